#include "server/space/give_back.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvpool {
namespace {

// Blocks that are looked at, withheld or put back under one hold of the space's mutex: some 0.1 ms.
constexpr uint32_t kSlice = 1024;
// Blocks that move together, and their bytes: some milliseconds of copying, in which the housekeeper does nothing else.
constexpr uint32_t kMostCopies = 64;
constexpr uint64_t kMostCopyBytes = 16 << 20;
// A block with more children than that stays where it is, until some have left.
constexpr uint32_t kMostChildren = 1024;
// What is evicted may lie in the slab itself, and makes no room elsewhere.
constexpr int kReclaims = 4;
// Sessions are asked for what they hold in the slab at most this often.
constexpr uint64_t kAskAgainMs = 100;

}  // namespace

void GiveBack::Ask(uint32_t slabs_wanted, uint64_t until_ms) {
  const uint32_t there = slabs() + (growth_.leaving().has_value() ? 1 : 0);
  if (!asked()) ++counters.asked;
  keep_slabs_ = std::min(keep_slabs_, there - std::min(there - 1, slabs_wanted));
  until_ms_ = std::max(until_ms_, until_ms);
  growth_.Block(until_ms_);
}

uint32_t GiveBack::spare_slabs() const {
  if (facts_.kind == v1::SPACE_KIND_IPC || growth_.entered() < 2 || !sessions_.Keepers().empty()) return 0;
  const uint32_t in_use =
      pool_.capacity() - pool_.available() - pool_.counts()[static_cast<int>(BlockState::kWithheld)];
  const uint32_t needed = std::max(share_blocks, in_use + pool_.promised());
  uint32_t keep = growth_.entered();
  // The null block is no part of the capacity.
  while (keep > 1 && growth_.end_block(keep - 1) - 1 >= needed) --keep;
  return growth_.entered() - keep;
}

bool GiveBack::PutBack() {
  if (pool_.keep() == pool_.capacity()) return false;
  pool_.Vacate(std::min(pool_.capacity(), pool_.keep() + kSlice));
  return true;
}

void GiveBack::Cancel() {
  keep_slabs_ = UINT32_MAX;
  pool_.Vacate(pool_.capacity());
}

GiveBack::Next GiveBack::Step(Turn& turn, std::vector<Copy>* copies, std::vector<Eviction>* evictions) {
  if (growth_.leaving().has_value()) return sessions_.all_left() ? Next::kDestroy : Next::kWait;
  if (asked() && slabs() <= keep_slabs_) keep_slabs_ = UINT32_MAX;
  if (asked() && turn.now >= until_ms_) {
    ++counters.missed;
    keep_slabs_ = UINT32_MAX;
  }
  if (!asked()) return PutBack() ? Next::kGoOn : Next::kDone;
  // A slab on its way to members is not to be overtaken.
  if (!growth_.all_entered() || slabs() < 2 || !sessions_.Keepers().empty()) return Next::kWait;
  const uint32_t keep = growth_.slabs().back().first_block - 1;
  if (pool_.keep() != keep) {
    pool_.Vacate(keep);
    at_ = keep;
    asked_holders_ms_ = 0;
  }
  if (!pool_.NoteChildren(kSlice)) return Next::kGoOn;
  pool_.Withhold(kSlice);
  const bool gone_through = Gather(turn, copies, evictions);
  if (!copies->empty()) return Next::kCopy;
  if (pool_.Shrink()) {
    growth_.Leave(turn.now);
    sessions_.AskToUnmap(turn);
    return sessions_.all_left() ? Next::kDestroy : Next::kGoOn;
  }
  if (!gone_through) return Next::kGoOn;
  AskHolders(turn);
  return Next::kWait;
}

bool GiveBack::Gather(Turn& turn, std::vector<Copy>* copies, std::vector<Eviction>* evictions) {
  const uint64_t block_bytes = facts_.layout.block_bytes() * facts_.devices.size();
  const auto most = static_cast<uint32_t>(
      std::clamp<uint64_t>(kMostCopyBytes / std::max<uint64_t>(1, block_bytes), 1, kMostCopies));
  bool gone_through = false;
  std::vector<BlockRef> cached;
  for (uint32_t looked = 0; looked < kSlice && cached.size() < most && !gone_through; ++looked) {
    const absl::StatusOr<BlockView> view = pool_.View(BlockId{++at_}, turn.now);
    if (view->state == BlockState::kCached && view->children <= kMostChildren) {
      cached.push_back(view->ref);
    }
    if (at_ < pool_.capacity()) continue;
    gone_through = true;
    at_ = pool_.keep();
  }
  if (cached.empty()) return gone_through;
  const absl::StatusOr<Holder> own = below_.holder();
  if (!own.ok()) return gone_through;
  // Whatever is the next to leave makes room: some of these blocks, if they are the coldest.
  const auto count = static_cast<uint32_t>(cached.size());
  for (int i = 0; i < kReclaims && growth_.free_blocks() < count; ++i) {
    if (pool_.Reclaim(turn.now, count - growth_.free_blocks(), EvictReason::kBackground, evictions) == 0)
      break;
    pool_.Withhold(kSlice);
  }
  std::vector<BlockRef> leased;
  pool_.Lease(*own, turn.now, std::min(count, growth_.free_blocks()), 1, &leased);
  std::vector<BlockRef> unused;
  size_t next = 0;
  for (const BlockRef to : leased) {
    while (next < cached.size() && !pool_.IsResident(cached[next])) ++next;
    if (next == cached.size() || Index(to.id) > pool_.keep()) {
      unused.push_back(to);
      continue;
    }
    Copy copy = {.from = cached[next++], .to = to, .slabs = {}, .by_rank = {}};
    Place(copy.from, /*is_source=*/true, &copy);
    Place(copy.to, /*is_source=*/false, &copy);
    copies->push_back(std::move(copy));
  }
  std::vector<Verdict> verdicts(unused.size());
  pool_.Release(*own, turn.now, unused, absl::MakeSpan(verdicts));
  return gone_through;
}

void GiveBack::Place(BlockRef block, bool is_source, Copy* copy) const {
  const SlabRow& row = growth_.RowOf(block.id);
  copy->by_rank.resize(row.by_rank.size());
  for (size_t rank = 0; rank < row.by_rank.size(); ++rank) {
    Device::Copy& of_rank = copy->by_rank[rank];
    (is_source ? of_rank.from : of_rank.to) = growth_.AddressOf(block.id, rank);
    of_rank.bytes = facts_.layout.block_bytes();
    copy->slabs.push_back(row.by_rank[rank]);
  }
}

void GiveBack::OnCopied(Turn& turn, absl::Span<const Copy> copies, bool copied) {
  const absl::StatusOr<Holder> own = below_.holder();
  if (!own.ok()) return;
  for (const Copy& copy : copies) {
    if (copied && pool_.Move(*own, turn.now, copy.from, copy.to, kMostChildren)) {
      sessions_.CopySealer(copy.from.id, copy.to.id);
      continue;
    }
    // Somebody uses it by now, or it has left.
    Verdict verdict;
    pool_.Release(*own, turn.now, {&copy.to, 1}, {&verdict, 1});
  }
  pool_.Withhold(kSlice);
}

void GiveBack::AskHolders(const Turn& turn) {
  if (turn.now - asked_holders_ms_ < kAskAgainMs) return;
  asked_holders_ms_ = turn.now;
  for (Session* session : sessions_) {
    if (session->ended || session->holder == kNobody) continue;
    // Which of them lie in the slab the engine's magazine does not know: those that it leases next do not.
    const BlockPool::Holdings holdings = pool_.holdings(session->holder);
    if (holdings.leased <= 1) continue;
    sessions_.Post(session->lead(), v1::NOTICE_KIND_REVOKE,
                   {.value = holdings.leased, .detail = "memory is to be given back"});
  }
}

std::string GiveBack::Obstacle() const {
  std::vector<std::string> why;
  if (facts_.kind == v1::SPACE_KIND_IPC) return "its memory is one IPC allocation";
  if (growth_.leaving().has_value()) {
    for (const Session* session : sessions_) {
      for (const auto& member : session->members) {
        if (!member->leaves || member->dead) continue;
        why.push_back(absl::StrCat("session ", session->terms.id, " (", session->terms.client_name, ", pid ",
                                   member->identity.credentials.pid, ") has yet to unmap a slab"));
      }
    }
    return absl::StrJoin(why, "; ");
  }
  why = sessions_.Keepers();
  if (spare_slabs() == 0) why.push_back("all of it is held, promised or kept for it");
  if (slabs() < 2 || spare_slabs() == 0) return absl::StrJoin(why, "; ");
  // Who holds what in the last slab.
  constexpr uint32_t kMostLooked = 4096;
  const uint32_t first = growth_.slabs().back().first_block;
  std::map<uint64_t, uint32_t> held;  // Blocks, keyed by session.
  uint32_t pinned = 0;
  for (uint32_t b = first; b <= std::min(pool_.capacity(), first + kMostLooked); ++b) {
    const absl::StatusOr<BlockView> view = pool_.View(BlockId{b}, 0);
    if (!view.ok() || (view->state != BlockState::kLeased && view->state != BlockState::kSealed &&
                       view->state != BlockState::kQuarantined)) {
      continue;
    }
    pinned += view->pinned ? 1 : 0;
    for (const Session* session : sessions_) {
      if (session->holder != kNobody && pool_.holds(session->holder, BlockId{b}) > 0)
        ++held[session->terms.id];
    }
  }
  for (const auto& [id, blocks] : held) {
    why.push_back(absl::StrCat("session ", id, " holds ", blocks, " blocks of the slab that would be next"));
  }
  if (pinned > 0) why.push_back(absl::StrCat(pinned, " blocks of the slab that would be next are pinned"));
  return absl::StrJoin(why, "; ");
}

}  // namespace kvpool
