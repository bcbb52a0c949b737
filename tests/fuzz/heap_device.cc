#include "tests/fuzz/heap_device.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "cuda/kv_compute.h"
#include "proto/support/status_macros.h"

namespace kvpool::fuzz {
namespace {

class HeapSlab final : public Slab {
 public:
  HeapSlab(size_t bytes, size_t alignment) : bytes_(bytes), data_(std::aligned_alloc(alignment, bytes)) {
    std::memset(data_, 0, bytes);
  }
  ~HeapSlab() override { std::free(data_); }
  bool Discard() override { return true; }
  size_t bytes() const override { return bytes_; }
  uint64_t address() const override { return reinterpret_cast<uint64_t>(data_); }
  absl::StatusOr<UniqueFd> Export() const override { return UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC)); }
  absl::StatusOr<IpcHandle> ipc_handle() const override {
    return absl::FailedPreconditionError("memory of the heap has no IPC handle");
  }

 private:
  const size_t bytes_;
  void* const data_;
};

class WatchedKvCompute final : public KvCompute {
 public:
  WatchedKvCompute(std::unique_ptr<KvCompute> compute, std::function<absl::Status()> on_call)
      : compute_(std::move(compute)), on_call_(std::move(on_call)) {}

  absl::StatusOr<std::unique_ptr<KvBuffer>> Allocate(size_t bytes) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->Allocate(bytes);
  }
  absl::Status Stage(absl::Span<const KvPiece> pieces, uint64_t to) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->Stage(pieces, to);
  }
  absl::StatusOr<scorers::ScorePlan> Plan(const scorers::ScoreRequest& request,
                                          const scorers::Signals& signals) const override {
    return compute_->Plan(request, signals);
  }
  absl::Status Score(const ScoreCall& call) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->Score(call);
  }
  double SecondsFor(const scorers::ScorePlan& plan) const override { return compute_->SecondsFor(plan); }
  absl::Status Gather(const scorers::GatherRequest& request) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->Gather(request);
  }
  absl::StatusOr<MergeOutcome> Merge(const scorers::MergeRequest& request) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->Merge(request);
  }
  absl::StatusOr<uint64_t> Fold(const scorers::FoldRequest& request) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->Fold(request);
  }
  absl::StatusOr<scorers::Drift> Drift(const scorers::DriftRequest& request) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->Drift(request);
  }
  absl::Status KeepLow(const scorers::LowRequest& request) override {
    RETURN_IF_ERROR(on_call_());
    return compute_->KeepLow(request);
  }

 private:
  const std::unique_ptr<KvCompute> compute_;
  const std::function<absl::Status()> on_call_;
};

class HeapDevice final : public Device {
 public:
  HeapDevice(std::string id, size_t granularity_bytes, std::function<absl::Status()> on_call)
      : id_(std::move(id)), granularity_bytes_(granularity_bytes), on_call_(std::move(on_call)) {}
  const std::string& id() const override { return id_; }
  const std::string& name() const override { return id_; }
  std::string uuid_bytes() const override { return ""; }
  size_t granularity_bytes() const override { return granularity_bytes_; }
  size_t total_bytes() const override { return size_t{1} << 30; }
  absl::StatusOr<size_t> free_bytes() const override { return total_bytes(); }
  absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override {
    return std::make_unique<HeapSlab>(bytes, granularity_bytes_);
  }
  absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t) override {
    return absl::UnimplementedError("IPC slabs exist on cuda devices only");
  }
  absl::Status CopyAll(absl::Span<const Copy> copies) override {
    for (const Copy& copy : copies) {
      std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.bytes);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) override {
    return std::make_unique<WatchedKvCompute>(MakeHostKvCompute(options), on_call_);
  }

 private:
  const std::string id_;
  const size_t granularity_bytes_;
  const std::function<absl::Status()> on_call_;
};

}  // namespace

std::unique_ptr<Device> MakeHeapDevice(std::string id, size_t granularity_bytes,
                                       std::function<absl::Status()> on_call) {
  return std::make_unique<HeapDevice>(std::move(id), granularity_bytes, std::move(on_call));
}

}  // namespace kvpool::fuzz
