#include "server/device_runner.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

// Longer than the bounds of calls: compacting a long prompt is a matter of seconds on a host.
constexpr double kOperationBounds[] = {0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005,
                                       0.001,   0.0025,   0.005,   0.01,   0.025,   0.05,
                                       0.1,     0.25,     0.5,     1,      2.5,     10};

std::string VerbName(const DeviceOperation& operation) {
  const google::protobuf::OneofDescriptor* verbs = v1::Operation::descriptor()->FindOneofByName("verb");
  return v1::Operation::GetReflection()->GetOneofFieldDescriptor(operation.request, verbs)->name();
}

}  // namespace

DeviceRunner::DeviceRunner(const Options& options, std::unique_ptr<KvCompute> compute,
                           std::function<void(const Operation&)> over)
    : options_(options),
      compute_(std::move(compute)),
      over_(std::move(over)),
      work_(compute_.get(), options.feature_cache_bytes, options.workspace_bytes),
      thread_([this] { Loop(); }) {}

DeviceRunner::~DeviceRunner() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  changed_.SignalAll();
  thread_.join();
}

absl::Status DeviceRunner::Submit(Operation operation) {
  {
    MutexLock lock(&mu_);
    const size_t waiting = queue_.size() + (running_ ? 1 : 0);
    if (waiting >= options_.queue_limit) {
      return absl::ResourceExhaustedError(absl::StrCat(
          waiting, " operations wait for device ", options_.device, "; the limit is ", options_.queue_limit));
    }
    queue_.push_back(std::move(operation));
  }
  changed_.SignalAll();
  return absl::OkStatus();
}

void DeviceRunner::Loop() {
  while (true) {
    Operation operation;
    bool stopping;
    {
      MutexLock lock(&mu_);
      running_ = false;
      while (queue_.empty() && !stopping_) changed_.Wait(&mu_);
      if (queue_.empty()) return;
      operation = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      stopping = stopping_;
    }
    if (stopping) {
      operation->status = absl::UnavailableError("the daemon shuts down");
    } else if (operation->abandoned.load(std::memory_order_acquire)) {
      operation->status = absl::AbortedError("the session has ended");
    } else {
      RunOne(operation);
    }
    over_(operation);
  }
}

void DeviceRunner::RunOne(const Operation& operation) {
  const auto start = std::chrono::steady_clock::now();
  operation->status = work_.Run(operation.get());
  // The GPU's context is gone, and with it what blocks hold.
  KVPOOL_CHECK(!IsSticky(operation->status), "device %s: %s", options_.device.c_str(),
               operation->status.ToString().c_str());
  Count(*operation, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

void DeviceRunner::Count(const DeviceOperation& operation, double seconds) {
  const std::string verb = VerbName(operation);
  MutexLock lock(&mu_);
  seconds_.try_emplace({verb, std::string(operation.policy)}, kOperationBounds)
      .first->second.Observe(seconds);
  ++operations_[{verb, absl::StatusCodeToString(operation.status.code())}];
  if (!operation.status.ok()) return;
  if (operation.request.has_prune()) pruned_blocks_ += operation.released.size();
  moved_blocks_ += operation.destinations_used;
}

DeviceOperationsSnapshot DeviceRunner::Snapshot() {
  const FeatureStats features = work_.feature_stats();
  DeviceOperationsSnapshot snapshot{.device = options_.device,
                                    .feature_hits = features.hits,
                                    .feature_misses = features.misses,
                                    .features_evicted = features.evicted,
                                    .feature_bytes = features.bytes};
  MutexLock lock(&mu_);
  for (const auto& [labels, histogram] : seconds_) snapshot.seconds[labels] = histogram.Snapshot();
  snapshot.operations = operations_;
  snapshot.pruned_blocks = pruned_blocks_;
  snapshot.moved_blocks = moved_blocks_;
  snapshot.queued = static_cast<uint32_t>(queue_.size()) + (running_ ? 1 : 0);
  return snapshot;
}

}  // namespace kvpool
