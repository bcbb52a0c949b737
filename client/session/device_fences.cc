#include "client/session/device_fences.h"

#include "proto/support/status_macros.h"

namespace kvpool {

absl::StatusOr<std::unique_ptr<DeviceFences>> DeviceFences::Open(const std::string& device_uuid,
                                                                 Listener listener) {
  ASSIGN_OR_RETURN(std::unique_ptr<FenceEvents> events, OpenCudaFenceEvents(device_uuid));
  return std::make_unique<DeviceFences>(std::move(events), std::move(listener));
}

DeviceFences::DeviceFences(std::unique_ptr<FenceEvents> events, Listener listener)
    : events_(std::move(events)), listener_(std::move(listener)), thread_([this] { Run(); }) {}

DeviceFences::~DeviceFences() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    wake_.Signal();
  }
  thread_.join();
}

absl::Status DeviceFences::Record(uint64_t step, void* stream) {
  ASSIGN_OR_RETURN(std::unique_ptr<FenceEvent> event, events_->Record(stream));
  MutexLock lock(&mu_);
  recorded_.emplace_back(step, std::move(event));
  wake_.Signal();
  return absl::OkStatus();
}

void DeviceFences::Run() {
  while (true) {
    std::pair<uint64_t, std::unique_ptr<FenceEvent>> head;
    {
      MutexLock lock(&mu_);
      while (recorded_.empty() && !stop_) wake_.Wait(&mu_);
      if (stop_) return;
      head = std::move(recorded_.front());
      recorded_.pop_front();
    }
    const absl::Status done = head.second->Wait();
    if (!done.ok()) {
      listener_.on_error(done);
      return;
    }
    listener_.on_done(head.first);
  }
}

}  // namespace kvpool
