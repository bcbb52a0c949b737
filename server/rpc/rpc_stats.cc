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

// Indexed by ConnectionRefusal.
constexpr const char* kConnectionReasons[kConnectionRefusals] = {
    "open_files", "connections", "credentials", "protocol", "preface_timeout", "displaced"};

// There is one writer, so that a load and a store do, which are cheaper than fetch_add.
void Add(std::atomic<uint64_t>& counter, uint64_t amount) {
  counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

std::atomic<uint64_t>& Of(absl::StatusCode code, CodeCounts* counts) {
  const auto index = static_cast<size_t>(code);
  return (*counts)[index < counts->size() ? index : static_cast<size_t>(absl::StatusCode::kUnknown)];
}

void AddTo(const CodeCounts& counts, RpcStats::Codes* codes) {
  for (size_t code = 1; code < counts.size(); ++code) {
    const uint64_t count = counts[code].load(std::memory_order_relaxed);
    if (count > 0) (*codes)[absl::StatusCodeToString(static_cast<absl::StatusCode>(code))] += count;
  }
}

}  // namespace

void MethodStats::Record(uint64_t nanoseconds, absl::StatusCode code) {
  size_t bucket = 0;
  while (bucket < kBoundsNs.size() && nanoseconds > kBoundsNs[bucket]) ++bucket;
  Add(buckets_[bucket], 1);
  Add(sum_ns_, nanoseconds);
  if (code != absl::StatusCode::kOk) CountError(code);
}

void MethodStats::CountError(absl::StatusCode code) { Add(Of(code, &errors_), 1); }

MethodStats* RpcStats::Add(const std::string& method) {
  MutexLock lock(&mu_);
  auto& [name, stats] = shards_.emplace_back();
  name = method;
  return &stats;
}

void RpcStats::CountRefusedOpening(absl::StatusCode code) {
  Of(code, &refused_openings_).fetch_add(1, std::memory_order_relaxed);
}

RpcStats::Totals RpcStats::Snapshot() const {
  Totals totals;
  for (const absl::StatusCode code : kShownFromTheStart) {
    totals.refused_openings[absl::StatusCodeToString(code)] = 0;
  }
  AddTo(refused_openings_, &totals.refused_openings);
  for (size_t why = 0; why < kConnectionRefusals; ++why) {
    totals.refused_connections[kConnectionReasons[why]] =
        refused_connections_[why].load(std::memory_order_relaxed);
  }
  totals.paced = paced_.load(std::memory_order_relaxed);
  MutexLock lock(&mu_);
  for (const auto& [name, stats] : shards_) {
    Method& method = totals.methods[name];
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
    AddTo(stats.errors_, &method.errors);
  }
  return totals;
}

}  // namespace kvpool
