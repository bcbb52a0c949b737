#include "server/space/late_releases.h"

#include <algorithm>

namespace kvpool {
namespace {

// The pool's limit on one session's holds on one block: a release of more is of holds that are not there.
constexpr uint32_t kMostHolds = 65535;

}  // namespace

LateReleases::Fold* LateReleases::FoldFor(uint64_t due, const v1::Release& release) {
  const auto same_hint = [&release](const Fold& fold) {
    return fold.reuse == release.reuse() && fold.category == release.category();
  };
  for (Fold& fold : folds_) {
    if (fold.due == due && same_hint(fold)) return &fold;
  }
  if (folds_.size() < kMostFolds) {
    return &folds_.emplace_back(
        Fold{.due = due, .reuse = release.reuse(), .category = release.category(), .order = {}, .holds = {}});
  }
  // The newest one: a hint is advice, a step is not.
  auto fold = std::find_if(folds_.rbegin(), folds_.rend(), same_hint);
  if (fold == folds_.rend()) fold = folds_.rbegin();
  fold->due = std::max(fold->due, due);
  return &*fold;
}

void LateReleases::Add(uint64_t due, const v1::Release& release, absl::Span<const BlockRef> refs) {
  if (refs.empty()) return;
  Fold* fold = FoldFor(due, release);
  for (const BlockRef ref : refs) {
    uint32_t& holds = fold->holds[ref.Pack()];
    if (holds == kMostHolds || ++holds > 1) continue;
    fold->order.push_back(ref.Pack());
    ++blocks_;
  }
  FindEarliest();
}

v1::Release LateReleases::Take(uint64_t passed, size_t count,
                               absl::FunctionRef<bool(uint32_t block)> held_up) {
  v1::Release release;
  const auto fold =
      std::find_if(folds_.begin(), folds_.end(), [passed](const Fold& fold) { return fold.due <= passed; });
  if (fold == folds_.end()) return release;
  release.set_reuse(fold->reuse);
  release.set_category(fold->category);
  for (size_t left = std::min(count, fold->order.size()); left > 0; --left) {
    const uint64_t ref = fold->order.front();
    fold->order.pop_front();
    const auto holds = fold->holds.find(ref);
    // One that is named more often than a slice is long goes in several.
    const auto taken = static_cast<uint32_t>(
        std::min<size_t>(holds->second, count - std::min<size_t>(count, release.blocks_size())));
    if (taken > 0 && !held_up(Index(BlockRef::Unpack(ref).id))) {
      for (uint32_t i = 0; i < taken; ++i) release.add_blocks(ref);
      holds->second -= taken;
    }
    if (holds->second == 0) {
      fold->holds.erase(holds);
      --blocks_;
    } else {
      fold->order.push_back(ref);
    }
  }
  if (fold->order.empty()) folds_.erase(fold);
  FindEarliest();
  return release;
}

void LateReleases::FindEarliest() {
  earliest_due_ = UINT64_MAX;
  for (const Fold& fold : folds_) earliest_due_ = std::min(earliest_due_, fold.due);
}

}  // namespace kvpool
