#include "server/pool/reuse_curve.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <utility>

namespace kvpool {

ReuseCurve::ReuseCurve(uint32_t most_blocks)
    : one_in_(std::bit_ceil((uint64_t{most_blocks} + kMostKeys - 1) / kMostKeys)),
      most_keys_(std::max(1u, static_cast<uint32_t>(most_blocks / one_in_))) {}

uint32_t ReuseCurve::UsedSince(uint32_t place) const {
  uint32_t until = 0;
  for (uint32_t i = place + 1; i > 0; i &= i - 1) until += counts_[i];
  return static_cast<uint32_t>(places_.size()) - until;
}

void ReuseCurve::Count(uint32_t place, int32_t n) {
  for (uint32_t i = place + 1; i < counts_.size(); i += i & -i) counts_[i] += static_cast<uint32_t>(n);
}

void ReuseCurve::Compact() {
  // At least half of the places are free then, so that each use pays for two at most.
  const size_t size = std::max<size_t>(64, 2 * std::min<size_t>(2 * places_.size(), most_keys_ + 1));
  std::vector<uint64_t> keys;
  keys.reserve(size);
  std::copy_if(keys_.begin() + oldest_, keys_.begin() + next_, std::back_inserter(keys),
               [](uint64_t key) { return key != 0; });
  oldest_ = 0;
  next_ = static_cast<uint32_t>(keys.size());
  for (uint32_t place = 0; place < next_; ++place) places_[keys[place]] = place;
  keys.resize(size);
  keys_ = std::move(keys);
  counts_.assign(size + 1, 0);
  for (uint32_t i = 1; i <= size; ++i) {
    counts_[i] += i <= next_ ? 1 : 0;
    if (const uint32_t above = i + (i & -i); above <= size) counts_[above] += counts_[i];
  }
}

void ReuseCurve::Use(uint64_t hash, uint64_t now_ms, bool asked) {
  if (uses_ == 0) since_ms_ = last_ms_ = now_ms;
  const auto took_ms = static_cast<double>(last_ms_ - std::min(last_ms_, since_ms_));
  const auto longest_ms = static_cast<uint64_t>(kLongestPause * std::max(kLeastMs, took_ms));
  if (now_ms > last_ms_ + longest_ms) since_ms_ += now_ms - last_ms_ - longest_ms;
  last_ms_ = now_ms;
  if (++uses_ >= kRecentUses) {
    uses_ /= 2;
    for (double& reuses : reuses_) reuses /= 2;
    since_ms_ += (now_ms - std::min(now_ms, since_ms_)) / 2;
  }
  if (next_ == keys_.size()) Compact();
  const uint64_t key = std::max<uint64_t>(hash, 1);
  const auto [found, is_new] = places_.try_emplace(key, next_);
  if (!is_new) {
    const uint32_t place = std::exchange(found->second, next_);
    if (asked) reuses_[uint64_t{UsedSince(place)} * kBuckets / most_keys_] += 1;
    Count(place, -1);
    keys_[place] = 0;
  }
  keys_[next_] = key;
  Count(next_, 1);
  ++next_;
  if (places_.size() <= most_keys_) return;
  while (keys_[oldest_] == 0) ++oldest_;
  places_.erase(std::exchange(keys_[oldest_], 0));
  Count(oldest_, -1);
}

ReuseCurve::Slopes ReuseCurve::At(uint32_t blocks, uint32_t step, uint32_t most, uint64_t now_ms) const {
  const double bucket_blocks = static_cast<double>(one_in_ * most_keys_) / kBuckets;
  const auto end = static_cast<uint32_t>(
      std::clamp<double>(std::ceil(most / bucket_blocks), 1, kBuckets));  // Where the curve ends, in buckets.
  std::array<double, kBuckets + 1> hits{};
  for (uint32_t i = 0; i < end; ++i) hits[i + 1] = hits[i] + reuses_[i];
  hits[end] += uses_ / kUsesPerUnseenReuse;
  const auto slope = [&hits](uint32_t from, uint32_t to) { return (hits[to] - hits[from]) / (to - from); };
  std::array<uint32_t, kBuckets + 1> corners{};
  uint32_t count = 1;
  for (uint32_t i = 1; i <= end; ++i) {
    while (count > 1 && slope(corners[count - 2], corners[count - 1]) <= slope(corners[count - 1], i))
      --count;
    corners[count++] = i;
  }
  // Hits of a cache of so many blocks, by the hull.
  const auto hull = [&](double blocks_there) {
    const double at = std::clamp<double>(blocks_there / bucket_blocks, 0, end);
    uint32_t c = 1;
    while (c + 1 < count && corners[c] < at) ++c;
    return hits[corners[c - 1]] + slope(corners[c - 1], corners[c]) * (at - corners[c - 1]);
  };
  // A hit of the sample stands for one_in_, and comes in all this time.
  const double passed_ms = static_cast<double>(now_ms - std::min(now_ms, since_ms_));
  const double scale = static_cast<double>(one_in_) / std::max(kLeastMs, passed_ms) / step;
  const double here = hull(blocks);
  return {.last = (here - hull(static_cast<double>(blocks) - step)) * scale,
          .next = (hull(static_cast<double>(blocks) + step) - here) * scale};
}

size_t ReuseCurve::bytes() const {
  return keys_.capacity() * sizeof(uint64_t) + counts_.capacity() * sizeof(uint32_t) +
         places_.capacity() * (sizeof(std::pair<uint64_t, uint32_t>) + 1);
}

}  // namespace kvpool
