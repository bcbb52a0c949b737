#include "server/space/give_back.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvpool {
namespace {

// Blocks that are looked at, withheld or put back under one hold of the space's mutex: some 0.1 ms.
constexpr uint32_t kSlice = 1024;
constexpr uint32_t kNotesSlice = 4096;
constexpr uint32_t kCountSlice = 4096;
// What keeps a slab is looked at so often, and whether nothing keeps another by now.
constexpr uint64_t kLookAgainMs = 20;
constexpr uint32_t kReclaimTogether = 256;
// Blocks that move together, and their bytes: some milliseconds of copying, in which the housekeeper does nothing else.
constexpr uint32_t kMostCopies = 64;
constexpr uint64_t kMostCopyBytes = 16 << 20;
// Children that get another parent under one hold of the mutex: each has two words of its record saved where a keeper is. A
// block with more stays where it is, until some have left.
constexpr uint32_t kMostChildren = 1024;
// What is evicted may lie in the slab itself, and makes no room elsewhere.
constexpr int kReclaims = 4;
// Sessions are asked for what they have leased in the slab after such a pause, which doubles each time.
constexpr uint64_t kAskHoldersMs = 100, kLongestAskMs = 5000;
// Somebody who holds what is to go, and does not let go of it for so long, may hold it for ever.
constexpr uint64_t kStuckMs = 100;
constexpr uint64_t kSayLateMs = 10'000;

}  // namespace

void GiveBack::Ask(uint32_t slabs_wanted, uint64_t until_ms) {
  const uint32_t there = slabs() + (growth_.leaving().has_value() ? 1 : 0);
  if (!asked()) {
    ++counters.asked;
    look_ms_ = 0;
    if (!growth_.leaving().has_value()) {
      ForgetAsked();
      until_ms_ = 0;
    }
  }
  begun_ = true;
  keep_slabs_ = std::min(keep_slabs_, there - std::min(there - 1, slabs_wanted));
  until_ms_ = std::max(until_ms_, until_ms);
  growth_.Block(until_ms_);
}

void GiveBack::ForgetAsked() {
  still_leased_.clear();
  asked_sessions_.clear();
  late_sessions_.clear();
  // Its holders hear of a new deadline at once.
  ask_holders_ms_ = 0;
  pause_ms_ = kAskHoldersMs;
}

void GiveBack::Withdraw(bool in_vain, uint64_t until_ms) {
  // Another asks until later, which is what sessions were told.
  if (in_vain && asked() && until_ms < until_ms_) return;
  // What is leaving is late at its own time.
  if (in_vain && asked() && slabs() > keep_slabs_ && !growth_.leaving().has_value()) Miss();
  keep_slabs_ = UINT32_MAX;
}

void GiveBack::NoteLate(const Session& session, uint32_t leased) {
  if (session.ended || !late_sessions_.insert(session.terms.id).second) return;
  ++counters.late;
  const bool named = std::any_of(late_.named.begin(), late_.named.end(),
                                 [&](const Late& one) { return one.session == session.terms.id; });
  if (named || late_.named.size() >= kMostLateNamed) {
    ++late_.more;
    return;
  }
  late_.named.push_back(
      {.session = session.terms.id,
       .client_name = session.terms.client_name,
       .pid = session.members.empty() ? 0 : session.members.front()->identity.credentials.pid,
       .leased = leased});
}

GiveBack::LateOnes GiveBack::TakeLate(uint64_t now) {
  if (late_.named.empty() || now < say_late_ms_) return {};
  say_late_ms_ = now + kSayLateMs;
  return std::exchange(late_, {});
}

void GiveBack::Miss() {
  ++counters.missed;
  if (growth_.leaving().has_value()) {
    if (!HadTime(leave_ms_)) return;
    for (const Session* session : sessions_) {
      const bool maps = std::any_of(session->members.begin(), session->members.end(), [](const auto& member) {
        return member->leaves && member->maps && !member->dead;
      });
      if (maps) NoteLate(*session, 0);
    }
    return;
  }
  for (const auto& [holder, blocks] : still_leased_) {
    const Session* const session = sessions_.of(holder);
    if (session == nullptr) continue;
    const auto asked = asked_sessions_.find(session->terms.id);
    if (asked == asked_sessions_.end() || !HadTime(asked->second)) continue;
    // What it had was looked at a while ago.
    const uint32_t holds = pool_.held_in(holder, pool_.going().first, pool_.going().end);
    if (const uint32_t kept = BesideSink(*session, std::min(blocks, holds)); kept > 0)
      NoteLate(*session, kept);
  }
}

uint32_t GiveBack::BesideSink(const Session& session, uint32_t blocks) const {
  return blocks > 0 && pool_.going().contains(Index(session.sink.id)) ? blocks - 1 : blocks;
}

uint32_t GiveBack::needed_blocks() const {
  const uint32_t in_use =
      pool_.capacity() - pool_.available() - pool_.counts()[static_cast<int>(BlockState::kWithheld)];
  return std::max(share_blocks, in_use + pool_.promised() + sessions_.unmet_blocks());
}

uint32_t GiveBack::needed_slabs() const {
  const uint32_t needed = needed_blocks();
  uint32_t keep = growth_.entered();
  // The null block is no part of the capacity.
  while (keep > 1 && growth_.blocks_of(keep - 1) - 1 >= needed) --keep;
  return keep;
}

uint32_t GiveBack::spare_slabs() const {
  if (facts_.kind == v1::SPACE_KIND_IPC || growth_.closed() || growth_.entered() < 2 || asking > 0) return 0;
  const uint32_t spare = growth_.entered() - needed_slabs();
  return spare == 0 || !sessions_.Keepers().empty() ? 0 : spare;
}

uint32_t GiveBack::excess_slabs() const {
  uint32_t excess = 0;
  while (excess + 1 < slabs() && growth_.blocks_of(slabs() - excess) > growth_.max_blocks()) ++excess;
  return excess == 0 ? 0 : std::min(excess, spare_slabs());
}

bool GiveBack::stuck(uint64_t now) const {
  const bool waits = waits_since_ms_ != 0 && (asked() || growth_.leaving().has_value());
  return waits && now >= waits_since_ms_ + kStuckMs;
}

bool GiveBack::Cancel() {
  Withdraw(/*in_vain=*/false, /*until_ms=*/0);
  waits_since_ms_ = 0;
  return PutBack();
}

bool GiveBack::PutBack() {
  looked_.clear();
  looking_ = false;
  const bool withheld = pool_.PutBack(kSlice);
  return pool_.FreeNotes(kSlice) || withheld;
}

bool GiveBack::Look() {
  if (!std::exchange(looking_, true)) looked_.clear();
  const std::vector<SlabRow>& rows = growth_.slabs();
  for (uint32_t left = kCountSlice; left > 0 && looked_.size() < rows.size();) {
    // One that is counted begins with no blocks.
    if (looked_.empty()) looked_.push_back({.blocks = {rows[1].first_block, rows[1].first_block}});
    Candidate& slab = looked_.back();
    const SlabRow& row = rows[looked_.size()];
    const uint32_t end = slab.blocks.end + std::min(left, row.end_block() - slab.blocks.end);
    const std::array<uint32_t, kBlockStates> counts = pool_.CountIn({slab.blocks.end, end});
    const auto of = [&](BlockState state) { return counts[static_cast<size_t>(state)]; };
    slab.cached += of(BlockState::kCached);
    slab.in_use += of(BlockState::kLeased) + of(BlockState::kSealed) + of(BlockState::kQuarantined);
    left -= end - slab.blocks.end;
    slab.blocks.end = end;
    if (end < row.end_block()) break;
    if (looked_.size() + 1 == rows.size()) {
      looking_ = false;
      return true;
    }
    const uint32_t next = rows[looked_.size() + 1].first_block;
    looked_.push_back({.blocks = {next, next}});
  }
  return false;
}

const GiveBack::Candidate* GiveBack::Best() {
  std::set<uint32_t> of_sinks;  // First blocks of their slabs.
  for (const Session* session : sessions_) {
    if (session->sink != kNullRef) of_sinks.insert(growth_.RowOf(session->sink.id).first_block);
  }
  for (Candidate& slab : looked_) slab.has_sink = of_sinks.contains(slab.blocks.first);
  const uint32_t needed = needed_blocks();
  const bool last_alone = this->last_alone();
  const Candidate* best = nullptr;
  for (const Candidate& slab : looked_) {
    if (pool_.capacity() - slab.blocks.size() < needed || (last_alone && &slab != &looked_.back())) continue;
    if (best == nullptr || !(*best < slab)) best = &slab;
  }
  return best;
}

GiveBack::Next GiveBack::Wait(const Turn& turn) {
  if (waits_since_ms_ == 0) waits_since_ms_ = turn.now;
  return Next::kWait;
}

GiveBack::Next GiveBack::Step(Turn& turn, std::vector<Copy>* copies, std::vector<Eviction>* evictions) {
  if (growth_.leaving().has_value()) {
    if (sessions_.all_left()) return Next::kDestroy;
    if (turn.now < until_ms_) return Wait(turn);
    Miss();
    keep_slabs_ = UINT32_MAX;
    sessions_.TakeBack(turn);
    return Next::kGoOn;
  }
  if (asked() && slabs() <= keep_slabs_) keep_slabs_ = UINT32_MAX;
  if (asked() && turn.now >= until_ms_) {
    Miss();
    keep_slabs_ = UINT32_MAX;
  }
  if (!asked()) {
    waits_since_ms_ = 0;
    if (PutBack()) return Next::kGoOn;
    begun_ = false;
    return Next::kDone;
  }
  if (places_ == Places::kNotKept && turn.now >= places_again_ms_) places_ = Places::kUnknown;
  // A slab on its way to members is not to be overtaken.
  if (!growth_.all_entered() || slabs() < 2 || !sessions_.Keepers().empty()) return Wait(turn);
  const bool is_last = leaves_.end == growth_.slabs().back().end_block();
  if (pool_.going().size() > 0 && (leaves_ != pool_.going() || (!is_last && last_alone()))) {
    // What another one was to give is put back first.
    PutBack();
    return Next::kGoOn;
  }
  const bool waits = waits_since_ms_ != 0 && turn.now < look_ms_ && !looking_;
  if (pool_.going().size() == 0 && (waits || spare_slabs() == 0)) return Wait(turn);
  // What is coldest leaves before a slab is chosen, and before anything moves: to the policy a block that has moved is the latest
  // that was used.
  const uint32_t free = growth_.free_blocks() + pool_.counts()[static_cast<int>(BlockState::kWithheld)];
  if (const uint32_t go = growth_.made_blocks() - growth_.blocks_of(std::max(1u, keep_slabs_)); free < go) {
    const uint32_t some = std::min(kReclaimTogether, go - free);
    if (pool_.Reclaim(turn.now, some, EvictReason::kBackground, evictions) > 0) return Next::kGoOn;
  }
  if (pool_.going().size() == 0 || looking_ || (waits_since_ms_ != 0 && turn.now >= look_ms_)) {
    if (!Look()) return Next::kGoOn;
    look_ms_ = turn.now + kLookAgainMs;
    const Candidate* const best = Best();
    if (best == nullptr) {
      if (PutBack()) return Next::kGoOn;
      return Wait(turn);
    }
    const auto current = std::find_if(looked_.begin(), looked_.end(),
                                      [this](const Candidate& slab) { return slab.blocks == pool_.going(); });
    if (current != looked_.end() && current->in_use > 0 && best->in_use == 0) {
      leaves_ = {};
      return Next::kGoOn;
    }
    if (pool_.going().size() == 0) {
      if (best != &looked_.back() && places_ == Places::kUnknown) return Next::kPlaces;
      leaves_ = best->blocks;
      pool_.Vacate(leaves_);
      at_ = leaves_.first;
      waits_since_ms_ = ask_holders_ms_ = 0;
      pause_ms_ = kAskHoldersMs;
      leased_.clear();
      asked_sessions_.clear();
    }
  }
  if (!pool_.can_move()) return Wait(turn);
  if (!pool_.NoteChildren(kNotesSlice)) return Next::kGoOn;
  pool_.Withhold(kSlice);
  const bool gone_through = Gather(turn, copies, evictions);
  if (!copies->empty()) return Next::kCopy;
  if (pool_.Shrink()) {
    looked_.clear();
    looking_ = false;
    leave_ms_ = turn.now;
    sessions_.AskToUnmap(turn, growth_.Leave(std::exchange(leaves_, {}), turn.now), until_ms_);
    waits_since_ms_ = look_ms_ = 0;
    return sessions_.all_left() ? Next::kDestroy : Next::kGoOn;
  }
  if (!gone_through) return Next::kGoOn;
  AskHolders(turn);
  return Wait(turn);
}

bool GiveBack::Gather(Turn& turn, std::vector<Copy>* copies, std::vector<Eviction>* evictions) {
  const uint64_t block_bytes = facts_.layout.block_bytes() * facts_.devices.size();
  const auto most = static_cast<uint32_t>(
      std::clamp<uint64_t>(kMostCopyBytes / std::max<uint64_t>(1, block_bytes), 1, kMostCopies));
  bool gone_through = false;
  std::vector<BlockRef> cached;
  uint32_t children = 0;
  for (uint32_t looked = 0; looked < kSlice && cached.size() < most && !gone_through; ++looked) {
    const absl::StatusOr<BlockView> view = pool_.View(BlockId{at_}, turn.now);
    if (view->state == BlockState::kCached && view->children <= kMostChildren &&
        view->ref.generation != UINT32_MAX) {
      if (!cached.empty() && children + view->children > kMostChildren) break;
      children += view->children;
      cached.push_back(view->ref);
    } else if (view->state == BlockState::kLeased) {
      ++leased_[view->owner];
    }
    if (++at_ < pool_.going().end) continue;
    gone_through = true;
    at_ = pool_.going().first;
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
    if (next == cached.size() || pool_.going().contains(Index(to.id))) {
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

bool GiveBack::OnCopied(Turn& turn, absl::Span<const Copy> copies, bool copied) {
  const absl::StatusOr<Holder> own = below_.holder();
  if (!own.ok()) return false;
  bool moved = false;
  for (const Copy& copy : copies) {
    if (copied && pool_.Move(*own, turn.now, copy.from, copy.to, kMostChildren)) {
      sessions_.CopySealer(copy.from.id, copy.to.id);
      checks_.Sealed(copy.to);
      below_.Sealed(copy.to, pool_.View(copy.to.id, turn.now)->key, below_.uses(copy.from.id));
      moved = true;
      continue;
    }
    // Somebody uses it by now, or it has left.
    Verdict verdict;
    pool_.Release(*own, turn.now, {&copy.to, 1}, {&verdict, 1});
  }
  pool_.Withhold(kSlice);
  if (moved) {
    waits_since_ms_ = 0;
  } else {
    Wait(turn);
  }
  return moved;
}

void GiveBack::AskHolders(const Turn& turn) {
  const auto leased = std::exchange(leased_, {});
  still_leased_ = leased;
  // Who has let go has answered.
  std::set<uint64_t> there;
  for (const auto& [holder, blocks] : leased) {
    const Session* const session = sessions_.of(holder);
    if (session != nullptr && BesideSink(*session, blocks) > 0) there.insert(session->terms.id);
  }
  std::erase_if(asked_sessions_, [&](const auto& asked) { return !there.contains(asked.first); });
  if (turn.now < ask_holders_ms_) return;
  ask_holders_ms_ = turn.now + pause_ms_;
  pause_ms_ = std::min(2 * pause_ms_, kLongestAskMs);
  for (const auto& [holder, blocks] : leased) {
    Session* const session = sessions_.of(holder);
    if (session == nullptr || session->ended || BesideSink(*session, blocks) == 0) continue;
    // A magazine gives the oldest of its stock, whichever they are; what it leases next does not lie in the slab.
    sessions_.PostAll(session, v1::NOTICE_KIND_REVOKE,
                      {.value = pool_.holdings(holder).leased,
                       .detail = "memory is to be given back",
                       .until_ms = until_ms_});
    asked_sessions_.emplace(session->terms.id, turn.now);
  }
}

bool GiveBack::LookAtHolders(SlabHolders* holders) const {
  if (facts_.kind == v1::SPACE_KIND_IPC || growth_.closed() || growth_.leaving().has_value()) return false;
  return holders->Look(pool_, growth_, sessions_, growth_.entered() > needed_slabs());
}

std::string GiveBack::Obstacle(const SlabHolders& holders) const {
  std::vector<std::string> why;
  if (facts_.kind == v1::SPACE_KIND_IPC) return "its memory is one IPC allocation";
  if (growth_.closed()) return "";
  if (growth_.leaving().has_value()) {
    size_t more = 0;
    for (const Session* session : sessions_) {
      for (const auto& member : session->members) {
        if (!member->leaves || member->dead) continue;
        if (why.size() == SlabHolders::kMostNamed) {
          ++more;
          continue;
        }
        why.push_back(absl::StrCat("session ", session->terms.id, " (", session->terms.client_name, ", pid ",
                                   member->identity.credentials.pid, ") has yet to unmap a slab"));
      }
    }
    if (more > 0) why.push_back(absl::StrCat(more, " more processes have, too"));
    return absl::StrJoin(why, "; ");
  }
  why = sessions_.Keepers();
  if (asking > 0) why.push_back("it waits for memory itself");
  // What they did not unmap is the space's again, and nothing else tells of it.
  std::vector<std::string> late;
  size_t more = 0;
  for (const Session* session : sessions_) {
    if (!late_sessions_.contains(session->terms.id)) continue;
    if (late.size() == SlabHolders::kMostNamed) {
      ++more;
      continue;
    }
    late.push_back(absl::StrCat("session ", session->terms.id, " (", session->terms.client_name, ")"));
  }
  if (!late.empty()) {
    why.push_back(absl::StrCat(absl::StrJoin(late, ", "),
                               more > 0 ? absl::StrCat(" and ", more, " more") : "",
                               " did not answer in time when memory was last asked for"));
  }
  if (growth_.entered() == 1) {
    why.push_back("the first slab of a space stays");
  } else if (needed_slabs() == growth_.entered()) {
    why.push_back("all of it is held, promised or kept for it");
  }
  if (const std::string one = sessions_.RigidOne(); growth_.entered() > 1 && !one.empty())
    why.push_back(absl::StrCat("for ", one, " only the last slab may go"));
  if (share_blocks > 0) why.push_back(absl::StrCat(share_blocks, " blocks are kept for it by an operator"));
  for (std::string& holder : holders.Describe()) why.push_back(std::move(holder));
  return absl::StrJoin(why, "; ");
}

}  // namespace kvpool
