#include "server/rpc/call_workers.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {

CallWorkers::CallWorkers(Options options) : options_(std::move(options)) {
  for (int i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Run(); });
}

CallWorkers::~CallWorkers() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  wanted_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status CallWorkers::Start(size_t bytes, std::function<void()> work) {
  {
    MutexLock lock(&mu_);
    if (waiting_.size() >= options_.most_waiting || waiting_bytes_ + bytes > options_.most_waiting_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat(waiting_.size(), " ", options_.calls, " of ", waiting_bytes_,
                       " bytes wait already, and this one has ", bytes, "; the limits are ",
                       options_.most_waiting, " and ", options_.most_waiting_bytes, " bytes"));
    }
    waiting_bytes_ += bytes;
    waiting_.push_back({.bytes = bytes, .work = std::move(work)});
  }
  wanted_.Signal();
  return absl::OkStatus();
}

void CallWorkers::Run() {
  while (true) {
    Waiting next;
    {
      MutexLock lock(&mu_);
      while (waiting_.empty() && !stop_) wanted_.Wait(&mu_);
      if (stop_) return;
      next = std::move(waiting_.front());
      waiting_.pop_front();
      waiting_bytes_ -= next.bytes;
    }
    next.work();
  }
}

}  // namespace kvpool
