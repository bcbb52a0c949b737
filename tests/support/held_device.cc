#include "tests/support/held_device.h"

#include <utility>

#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

class HeldKvCompute final : public KvCompute {
 public:
  HeldKvCompute(std::unique_ptr<KvCompute> compute, DeviceHold* hold)
      : compute_(std::move(compute)), hold_(*hold) {}

  absl::StatusOr<std::unique_ptr<KvBuffer>> Allocate(size_t bytes) override {
    return compute_->Allocate(bytes);
  }
  absl::Status Stage(absl::Span<const KvPiece> pieces, uint64_t to) override {
    return compute_->Stage(pieces, to);
  }
  absl::StatusOr<scorers::ScorePlan> Plan(const scorers::ScoreRequest& request,
                                          const scorers::Signals& signals) const override {
    return compute_->Plan(request, signals);
  }
  absl::Status Score(const ScoreCall& call) override {
    RETURN_IF_ERROR(hold_.Pass());
    return compute_->Score(call);
  }
  double SecondsFor(const scorers::ScorePlan& plan) const override { return compute_->SecondsFor(plan); }
  absl::Status Gather(const scorers::GatherRequest& request) override {
    RETURN_IF_ERROR(hold_.Pass());
    return compute_->Gather(request);
  }
  absl::StatusOr<MergeOutcome> Merge(const scorers::MergeRequest& request) override {
    RETURN_IF_ERROR(hold_.Pass());
    return compute_->Merge(request);
  }
  absl::StatusOr<uint64_t> Fold(const scorers::FoldRequest& request) override {
    RETURN_IF_ERROR(hold_.Pass());
    return compute_->Fold(request);
  }
  absl::StatusOr<scorers::Drift> Drift(const scorers::DriftRequest& request) override {
    RETURN_IF_ERROR(hold_.Pass());
    return compute_->Drift(request);
  }
  absl::Status KeepLow(const scorers::LowRequest& request) override {
    RETURN_IF_ERROR(hold_.Pass());
    return compute_->KeepLow(request);
  }

 private:
  const std::unique_ptr<KvCompute> compute_;
  DeviceHold& hold_;
};

class HeldDevice final : public Device {
 public:
  HeldDevice(std::unique_ptr<Device> device, DeviceHold* hold) : device_(std::move(device)), hold_(*hold) {}

  const std::string& id() const override { return device_->id(); }
  const std::string& name() const override { return device_->name(); }
  std::string uuid_bytes() const override { return device_->uuid_bytes(); }
  size_t granularity_bytes() const override { return device_->granularity_bytes(); }
  size_t total_bytes() const override { return device_->total_bytes(); }
  absl::StatusOr<size_t> free_bytes() const override { return device_->free_bytes(); }
  absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override {
    absl::StatusOr<std::unique_ptr<Slab>> slab = device_->MakeSlab(bytes);
    if (slab.ok()) hold_.AddSlab((*slab)->address());
    return slab;
  }
  absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t bytes) override {
    return device_->MakeIpcSlab(bytes);
  }
  absl::Status CopyAll(absl::Span<const Copy> copies) override { return device_->CopyAll(copies); }
  absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) override {
    ASSIGN_OR_RETURN(std::unique_ptr<KvCompute> compute, device_->MakeKvCompute(options));
    return std::make_unique<HeldKvCompute>(std::move(compute), &hold_);
  }

 private:
  const std::unique_ptr<Device> device_;
  DeviceHold& hold_;
};

}  // namespace

void DeviceHold::Hold() {
  MutexLock lock(&mu_);
  held_ = true;
}

void DeviceHold::Release() {
  MutexLock lock(&mu_);
  held_ = false;
  changed_.SignalAll();
}

void DeviceHold::AwaitCalls(int count) {
  MutexLock lock(&mu_);
  while (calls_ < count) changed_.Wait(&mu_);
}

int DeviceHold::calls() {
  MutexLock lock(&mu_);
  return calls_;
}

void DeviceHold::FailWith(const absl::Status& status) {
  MutexLock lock(&mu_);
  failure_ = status;
}

std::vector<uint64_t> DeviceHold::slab_addresses() {
  MutexLock lock(&mu_);
  return slabs_;
}

void DeviceHold::Forget() {
  MutexLock lock(&mu_);
  slabs_.clear();
}

absl::Status DeviceHold::Pass() {
  MutexLock lock(&mu_);
  ++calls_;
  changed_.SignalAll();
  while (held_) changed_.Wait(&mu_);
  return failure_;
}

void DeviceHold::AddSlab(uint64_t address) {
  MutexLock lock(&mu_);
  slabs_.push_back(address);
}

std::unique_ptr<Device> MakeHeldDevice(std::unique_ptr<Device> device, DeviceHold* hold) {
  return std::make_unique<HeldDevice>(std::move(device), hold);
}

}  // namespace kvpool
