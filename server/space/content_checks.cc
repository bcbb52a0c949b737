#include "server/space/content_checks.h"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "server/base/log.h"
#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

// A match checks for so long; what it has not come to by then it does not answer.
constexpr auto kMostOfMatch = std::chrono::seconds(1);
constexpr auto kBetweenLogs = std::chrono::seconds(1);

}  // namespace

void ContentChecks::Sealed(BlockRef ref) {
  if (!on_) return;
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
  pool_.NextWithSum(BlockPool::WithSum::kDoubted, &undoubted_, kMostWaiting, most, &refs);
  for (const BlockRef ref : refs) Place(ref, part);
}

void ContentChecks::Sum(Part* part) const {
  for (Block& block : *part) {
    block.found = 0;
    for (const void* const at : block.at) block.found = Crc32c(at, facts_.layout.block_bytes(), block.found);
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
      pool_.Condemn(block.ref);
      ++counters.failed[static_cast<size_t>(when)];
      condemned_.push_back(block.ref);
      const auto now = std::chrono::steady_clock::now();
      if (now < logs_at_) {
        ++unlogged_;
        continue;
      }
      logs_at_ = now + kBetweenLogs;
      const BlockKey key = pool_.View(block.ref.id, 0)->key;
      const absl::string_view bytes(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
      LogError("block is not what was sealed", {{"space", facts_.id},
                                                {"block", Index(block.ref.id)},
                                                {"key", absl::BytesToHexString(bytes)},
                                                {"group", static_cast<int>(key.group)},
                                                {"when", kCheckedWhenNames[static_cast<size_t>(when)]},
                                                {"more", std::exchange(unlogged_, 0)}});
    }
  }
}

std::vector<BlockRef> ContentChecks::NextCondemned() {
  std::vector<BlockRef> unheld;
  for (size_t looks = std::min(condemned_.size(), kPartBlocks); looks > 0; --looks) {
    const BlockRef ref = condemned_.front();
    condemned_.pop_front();
    if (!pool_.IsResident(ref)) continue;
    condemned_.push_back(ref);
    if (pool_.View(ref.id, 0)->state == BlockState::kCached) unheld.push_back(ref);
  }
  return unheld;
}

bool ContentChecks::BeforeMatch(Turn& turn, const Session& session, const v1::Match& match) {
  const auto until = std::chrono::steady_clock::now() + kMostOfMatch;
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
    return !session.ended && std::chrono::steady_clock::now() < until;
  };
  for (const v1::GroupKeys& group : match.groups()) {
    const std::string_view keys = group.keys();
    for (size_t at = 0; at < keys.size() && compares(); at += group.key_bytes()) {
      const BlockRef ref = pool_.Find(BlockKey::From(keys.substr(at, group.key_bytes()), group.group()));
      // Without a window nothing is of use that is behind a gap.
      if (ref == kNullRef && facts_.layout.groups(static_cast<int>(group.group())).window_tokens() == 0)
        break;
      if (ref != kNullRef && pool_.IsDoubted(ref) && pool_.SumOf(ref).has_value()) Place(ref, &part);
      if (!Full(part) && ++looked % Turn::kNames != 0) continue;
      if (!check()) return !session.ended;
    }
  }
  if (!part.empty()) check();
  return !session.ended;
}

}  // namespace kvpool
