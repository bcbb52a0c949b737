#include "server/scoring/device_runner.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "proto/support/named_thread.h"
#include "server/scoring/drift_sample.h"
#include "server/scoring/lost_gpu.h"
#include "server/scoring/score_answer.h"

namespace kvpool {
namespace {

// Seconds. They reach further than those of calls: compacting a long prompt takes seconds on a host.
constexpr double kOperationBounds[] = {0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005,
                                       0.001,   0.0025,   0.005,   0.01,   0.025,   0.05,
                                       0.1,     0.25,     0.5,     1,      2.5,     10};

// So large a part of the places is not for one tenant alone.
constexpr uint32_t kReservedPart = 4;

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
      work_(compute_.get(), options.feature_cache_bytes, options.workspace_bytes, options.time_limit),
      thread_(options.thread ? NamedThread("device-runner", [this] { Loop(); }) : std::thread()) {}

DeviceRunner::~DeviceRunner() { End(); }

void DeviceRunner::End() {
  Stop();
  if (thread_.joinable()) thread_.join();
}

void DeviceRunner::Stop() {
  MutexLock lock(&mu_);
  stopping_ = true;
  changed_.SignalAll();
}

absl::Status DeviceRunner::Submit(const Operation& operation) {
  for (size_t rank = 0; rank < operation->ranks.size(); ++rank) {
    const absl::Status entered = operation->ranks[rank].runner->Enter(operation->tenant);
    if (entered.ok()) continue;
    while (rank > 0) operation->ranks[--rank].runner->Leave(operation->tenant);
    return entered;
  }
  SendParts(operation, /*in_front=*/false);
  return absl::OkStatus();
}

absl::Status DeviceRunner::Enter(const std::string& tenant) {
  MutexLock lock(&mu_);
  if (stopping_) return absl::UnavailableError("the daemon shuts down");
  if (places_ >= options_.queue_limit) {
    ++counters_.refused_by_queue;
    return absl::ResourceExhaustedError(absl::StrCat(places_, " operations wait for device ", options_.device,
                                                     "; the limit is ", options_.queue_limit));
  }
  // The others of so many come to find one.
  const uint32_t most = options_.queue_limit - options_.queue_limit / kReservedPart;
  uint32_t& of_tenant = places_of_[tenant];
  if (of_tenant >= most) {
    ++counters_.refused_by_queue;
    return absl::ResourceExhaustedError(absl::StrCat(of_tenant, " operations of tenant ", tenant,
                                                     " wait for device ", options_.device, "; the limit is ",
                                                     most, " of ", options_.queue_limit));
  }
  ++of_tenant;
  ++places_;
  return absl::OkStatus();
}

void DeviceRunner::CountSessionRefusal() {
  MutexLock lock(&mu_);
  ++counters_.refused_by_session;
}

void DeviceRunner::Leave(const std::string& tenant) {
  MutexLock lock(&mu_);
  --places_;
  if (const auto of_tenant = places_of_.find(tenant); --of_tenant->second == 0) places_of_.erase(of_tenant);
  // The signal comes before the mutex is released, after which the runner may be gone.
  changed_.SignalAll();
}

void DeviceRunner::Push(Part part, bool in_front) {
  MutexLock lock(&mu_);
  const std::string& tenant = part.operation->tenant;
  if (in_front) {
    queue_.PushFront(tenant, std::move(part));
  } else {
    queue_.Push(tenant, std::move(part));
  }
  changed_.SignalAll();
}

void DeviceRunner::SendParts(const Operation& operation, bool in_front) {
  const auto ranks = static_cast<uint32_t>(operation->ranks.size());
  operation->parts_out.store(ranks, std::memory_order_release);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    operation->ranks[rank].runner->Push({.operation = operation, .rank = rank}, in_front);
  }
}

void DeviceRunner::Loop() {
  do {
    MutexLock lock(&mu_);
    while (queue_.empty() && !(stopping_ && places_ == 0)) changed_.Wait(&mu_);
  } while (RunNext());
}

bool DeviceRunner::RunNext() {
  Part part;
  bool stopping;
  {
    MutexLock lock(&mu_);
    if (queue_.empty()) return false;
    part = *queue_.Pop();
    stopping = stopping_;
  }
  DeviceOperation& operation = *part.operation;
  operation.ranks[part.rank].outcome.status = RunPart(part, stopping);
  if (operation.parts_out.fetch_sub(1, std::memory_order_acq_rel) == 1) Advance(part.operation);
  return true;
}

absl::Status DeviceRunner::RunPart(const Part& part, bool stopping) {
  DeviceOperation* operation = part.operation.get();
  if (stopping) return absl::UnavailableError("the daemon shuts down");
  // Its session has ended: nobody waits for the answer.
  if (operation->abandoned.load(std::memory_order_acquire))
    return absl::AbortedError("the session has ended");
  const auto start = std::chrono::steady_clock::now();
  absl::Status status =
      operation->answered ? RunSecondPart(operation, part.rank) : work_.Score(operation, part.rank);
  // After a sticky error the GPU's context is gone, and with it the contents of all blocks.
  EndIfGpuIsLost(status, absl::StrCat("device ", options_.device));
  if (part.rank == 0) {
    operation->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return status;
}

absl::Status DeviceRunner::RunSecondPart(DeviceOperation* operation, uint32_t rank) {
  if (operation->request.has_select()) return work_.PutPositions(*operation, rank);
  if (operation->drift_layer.has_value()) {
    absl::StatusOr<scorers::Drift>& drift = operation->ranks[rank].outcome.drift;
    drift = work_.MeasureDrift(*operation, rank);
    EndIfGpuIsLost(drift.status(), absl::StrCat("device ", options_.device));
  }
  return Moves(*operation) ? work_.Gather(operation, rank) : absl::OkStatus();
}

void DeviceRunner::Advance(const Operation& operation) {
  // If several ranks failed, the first rank's error counts, so that the answer does not depend
  // on which was faster.
  for (const RankWork& rank : operation->ranks) operation->status.Update(rank.outcome.status);
  if (operation->status.ok() && !operation->answered) {
    operation->status = AnswerOperation(operation.get());
    operation->answered = true;
    if (operation->status.ok() && options_.guard != nullptr) TakeSample(options_.guard, operation.get());
    const bool more = Moves(*operation) || operation->drift_layer.has_value();
    if (operation->status.ok() && more) return SendParts(operation, /*in_front=*/true);
  } else if (operation->status.ok()) {
    AnswerDisposition(operation.get());
  }
  if (operation->drift_layer.has_value()) ReportSample(options_.guard, *operation);
  operation->ranks[0].runner->Count(*operation);
  over_(operation);
  for (const RankWork& rank : operation->ranks) rank.runner->Leave(operation->tenant);
}

void DeviceRunner::Count(const DeviceOperation& operation) {
  const std::string verb = VerbName(operation);
  MutexLock lock(&mu_);
  const bool ran = operation.seconds > 0;
  if (ran) {
    seconds_.try_emplace({verb, std::string(operation.policy)}, kOperationBounds)
        .first->second.Observe(operation.seconds);
  }
  ++operations_[{verb, absl::StatusCodeToString(operation.status.code())}];
  if (!operation.status.ok()) return;
  if (operation.request.has_prune()) counters_.pruned_blocks += operation.released.size();
  counters_.compacted_blocks += operation.destinations_used;
}

DeviceOperationsSnapshot DeviceRunner::Snapshot() {
  DeviceOperationsSnapshot snapshot{.device = options_.device, .features = work_.feature_stats()};
  MutexLock lock(&mu_);
  for (const auto& [labels, histogram] : seconds_) snapshot.seconds[labels] = histogram.Snapshot();
  snapshot.operations = operations_;
  snapshot.counters = counters_;
  snapshot.queued = places_;
  return snapshot;
}

}  // namespace kvpool
