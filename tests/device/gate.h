#ifndef KVPOOL_TESTS_DEVICE_GATE_H_
#define KVPOOL_TESTS_DEVICE_GATE_H_

#include <condition_variable>
#include <mutex>

namespace kvpool {

// Holds a stream up until it is opened, like an engine's step that takes long.
class Gate {
 public:
  void Open() {
    const std::lock_guard lock(mu_);
    open_ = true;
    opened_.notify_all();
  }
  // The function to give to cuLaunchHostFunc.
  static void Wait(void* gate) {
    auto* self = static_cast<Gate*>(gate);
    std::unique_lock lock(self->mu_);
    self->opened_.wait(lock, [self] { return self->open_; });
  }

 private:
  std::mutex mu_;
  std::condition_variable opened_;
  bool open_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_GATE_H_
