#include "server/space/content_checks.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

constexpr uint64_t kTellPauseMs = 1000;

}  // namespace

void ContentChecks::Sealed(BlockRef ref) {
  if (!on_ || pool_.SumOf(ref).has_value() || pool_.IsCondemned(ref)) return;
  if (waiting_.size() == kMostWaiting) {
    ++counters.unsummed;
    return;
  }
  waiting_.push_back(ref);
}

void ContentChecks::Place(BlockRef ref, Part* part) const {
  const SlabRow& row = growth_.RowOf(ref.id);
  Block block{.ref = ref, .sum = pool_.SumOf(ref), .slabs = row.by_rank};
  for (size_t rank = 0; rank < row.by_rank.size(); ++rank) {
    block.at.push_back(reinterpret_cast<const void*>(growth_.AddressOf(ref.id, rank)));
  }
  part->push_back(std::move(block));
}

void ContentChecks::ChooseSealed(Part* part) {
  for (size_t looked = 0; looked < kPartBlocks && !waiting_.empty() && !Full(*part); ++looked) {
    const BlockRef ref = waiting_.front();
    waiting_.pop_front();
    if (!growth_.closed() && pool_.IsResident(ref) && !pool_.SumOf(ref).has_value()) Place(ref, part);
  }
}

void ContentChecks::ChooseSample(uint64_t bytes, Part* part) {
  if (growth_.closed()) return;
  std::vector<BlockRef> refs;
  const uint64_t most =
      std::min<uint64_t>({bytes / block_bytes(), kPartBytes / block_bytes() + 1, kPartBlocks});
  pool_.NextWithSum(BlockPool::WithSum::kAll, &sampled_, kPartBlocks, static_cast<size_t>(most), &refs);
  for (const BlockRef ref : refs) Place(ref, part);
}

void ContentChecks::ChooseDoubted(Part* part) {
  if (growth_.closed() || !compares()) return;
  std::vector<BlockRef> refs;
  const auto most = static_cast<size_t>(std::min<uint64_t>(kPartBytes / block_bytes() + 1, kPartBlocks));
  pool_.NextWithSum(BlockPool::WithSum::kDoubted, &undoubted_, kPartBlocks, most, &refs);
  for (const BlockRef ref : refs) Place(ref, part);
}

void ContentChecks::Sum(Part* part) const {
  for (Block& block : *part) {
    block.found = 0;
    for (const void* const at : block.at) block.found = Crc32c(at, facts_.layout.block_bytes(), block.found);
    // The last one to let go of a slab unmaps it, for which nobody with the mutex is to wait.
    block.slabs.clear();
  }
}

void ContentChecks::Settle(CheckedWhen when, absl::Span<const Block> part) {
  for (const Block& block : part) {
    if (!pool_.IsResident(block.ref)) continue;
    // Another check was faster.
    if (when == CheckedWhen::kRestart && !pool_.IsDoubted(block.ref)) continue;
    if (block.sum.has_value() && pool_.SumOf(block.ref) != block.sum) continue;
    ++counters.checked[static_cast<size_t>(when)];
    if (!block.sum.has_value()) {
      pool_.KeepSum(block.ref, block.found);
    } else if (block.found == *block.sum) {
      pool_.Believe(block.ref);
    } else {
      const BlockKey key = pool_.View(block.ref.id, 0)->key;
      pool_.Condemn(block.ref);
      ++counters.failed[static_cast<size_t>(when)];
      if (wrong_.has_value()) {
        ++wrong_->more;
      } else {
        wrong_ = {.ref = block.ref, .key = key, .when = when};
      }
    }
  }
}

std::vector<BlockRef> ContentChecks::NextCondemned() {
  std::vector<BlockRef> may_leave;
  pool_.NextCondemned(&condemned_, kPartBlocks, &may_leave);
  return may_leave;
}

std::optional<ContentChecks::Wrong> ContentChecks::TakeWrong(uint64_t now_ms) {
  if (!wrong_.has_value() || now_ms < tells_at_ms_) return std::nullopt;
  tells_at_ms_ = now_ms + kTellPauseMs;
  return std::exchange(wrong_, std::nullopt);
}

void ContentChecks::BeforeMatch(Turn& turn, const Session& session, const v1::Match& match, uint64_t until) {
  Part part;
  size_t looked = 0;
  // False: the session has ended, or the time is over.
  const auto check = [&] {
    if (!part.empty()) turn.Outside([&] { Sum(&part); });
    if (session.ended) return false;
    Settle(CheckedWhen::kRestart, part);
    part.clear();
    turn.Worked(Turn::kNames);
    turn.Breathe();
    return !session.ended && turn.now < until;
  };
  for (const v1::GroupKeys& group : match.groups()) {
    const std::string_view keys = group.keys();
    for (size_t at = 0; at < keys.size() && compares(); at += group.key_bytes()) {
      const BlockRef ref = pool_.Find(BlockKey::From(keys.substr(at, group.key_bytes()), group.group()));
      // Without a window nothing is of use that is behind a gap.
      if (ref == kNullRef && facts_.layout.groups(static_cast<int>(group.group())).window_tokens() == 0)
        break;
      if (ref != kNullRef && pool_.IsDoubted(ref)) Place(ref, &part);
      if (!Full(part) && ++looked % Turn::kNames != 0) continue;
      if (!check()) return;
    }
  }
  if (!part.empty()) check();
}

}  // namespace kvpool
