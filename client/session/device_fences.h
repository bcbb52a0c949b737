// Fences of steps that run on a device: an event is recorded behind the step's work, and a thread sleeps
// until it fires. Events of one session fire in the order of their steps, or the later one stands for both.
#ifndef KVPOOL_CLIENT_SESSION_DEVICE_FENCES_H_
#define KVPOOL_CLIENT_SESSION_DEVICE_FENCES_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/fence_events.h"
#include "proto/support/mutex.h"

namespace kvpool {

class DeviceFences {
 public:
  struct Listener {
    std::function<void(uint64_t step)> on_done;
    std::function<void(const absl::Status&)> on_error;  // The device's work failed; no later step completes.
  };
  // `device_uuid`: the 16 bytes of the GPU's UUID. The listener is called on the thread.
  static absl::StatusOr<std::unique_ptr<DeviceFences>> Open(const std::string& device_uuid,
                                                            Listener listener);
  // Takes events of any kind, for tests and other devices.
  DeviceFences(std::unique_ptr<FenceEvents> events, Listener listener);
  // Waits for the event at the head; later ones are dropped.
  ~DeviceFences();

  // Completes `step` when the work that is on the stream now is done. Does not wait.
  absl::Status Record(uint64_t step, void* stream) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  const std::unique_ptr<FenceEvents> events_;
  const Listener listener_;
  Mutex mu_;
  CondVar wake_;
  std::deque<std::pair<uint64_t, std::unique_ptr<FenceEvent>>> recorded_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_DEVICE_FENCES_H_
