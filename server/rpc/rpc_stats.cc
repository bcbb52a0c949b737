#include "server/rpc/rpc_stats.h"

namespace kvpool {
namespace {

// Whole nanoseconds, which are cheaper to compare with what the clock says than seconds.
constexpr auto kBoundsNs = [] {
  std::array<uint64_t, std::size(kCallBounds)> bounds{};
  for (size_t i = 0; i < bounds.size(); ++i) bounds[i] = static_cast<uint64_t>(kCallBounds[i] * 1e9 + 0.5);
  return bounds;
}();

constexpr absl::StatusCode kShownFromTheStart[] = {
    absl::StatusCode::kUnknown, absl::StatusCode::kInternal, absl::StatusCode::kDataLoss,
    absl::StatusCode::kUnavailable, absl::StatusCode::kResourceExhausted};

// There is one writer, so that a load and a store do, which are cheaper than fetch_add.
void Add(std::atomic<uint64_t>& counter, uint64_t amount) {
  counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

}  // namespace

void MethodStats::Record(uint64_t nanoseconds, absl::StatusCode code) {
  size_t bucket = 0;
  while (bucket < kBoundsNs.size() && nanoseconds > kBoundsNs[bucket]) ++bucket;
  Add(buckets_[bucket], 1);
  Add(sum_ns_, nanoseconds);
  if (code != absl::StatusCode::kOk) CountError(code);
}

void MethodStats::CountError(absl::StatusCode code) {
  const auto index = static_cast<size_t>(code);
  Add(errors_[index < errors_.size() ? index : static_cast<size_t>(absl::StatusCode::kUnknown)], 1);
}

MethodStats* RpcStats::Add(const std::string& method) {
  MutexLock lock(&mu_);
  auto& [name, stats] = shards_.emplace_back();
  name = method;
  return &stats;
}

std::map<std::string, RpcStats::Method> RpcStats::Snapshot() const {
  std::map<std::string, Method> methods;
  MutexLock lock(&mu_);
  for (const auto& [name, stats] : shards_) {
    Method& method = methods[name];
    if (method.seconds.bounds.empty()) {
      method.seconds.bounds.assign(std::begin(kCallBounds), std::end(kCallBounds));
      method.seconds.counts.resize(kRpcBuckets);
      for (const absl::StatusCode code : kShownFromTheStart)
        method.errors[absl::StatusCodeToString(code)] = 0;
    }
    for (size_t i = 0; i < stats.buckets_.size(); ++i) {
      method.seconds.counts[i] += stats.buckets_[i].load(std::memory_order_relaxed);
    }
    method.seconds.sum += static_cast<double>(stats.sum_ns_.load(std::memory_order_relaxed)) * 1e-9;
    for (size_t code = 1; code < stats.errors_.size(); ++code) {
      const uint64_t errors = stats.errors_[code].load(std::memory_order_relaxed);
      if (errors > 0) method.errors[absl::StatusCodeToString(static_cast<absl::StatusCode>(code))] += errors;
    }
  }
  return methods;
}

}  // namespace kvpool
