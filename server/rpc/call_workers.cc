#include "server/rpc/call_workers.h"

#include <algorithm>
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

absl::Status CallWorkers::Start(const Call& call, std::function<void()> work) {
  {
    MutexLock lock(&mu_);
    if (waiting_.size() >= options_.most_waiting ||
        waiting_bytes_ + call.bytes > options_.most_waiting_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat(waiting_.size(), " ", options_.calls, " of ", waiting_bytes_,
                       " bytes wait already, and this one has ", call.bytes, "; the limits are ",
                       options_.most_waiting, " and ", options_.most_waiting_bytes, " bytes"));
    }
    waiting_bytes_ += call.bytes;
    waiting_.Push(call.tenant, {.call = call, .work = std::move(work)});
  }
  wanted_.Signal();
  return absl::OkStatus();
}

size_t CallWorkers::waiting(uint64_t owner) {
  MutexLock lock(&mu_);
  return waiting_.Count([owner](const Waiting& each) { return each.call.owner == owner; });
}

bool CallWorkers::idle() {
  MutexLock lock(&mu_);
  return at_work_ == 0 && waiting_.empty();
}

std::optional<CallWorkers::Waiting> CallWorkers::Next() {
  return waiting_.Pop([this](const Waiting& each) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return each.call.owner == 0 ||
           std::find(running_.begin(), running_.end(), each.call.owner) == running_.end();
  });
}

void CallWorkers::Run() {
  uint64_t owner = 0;
  bool worked = false;
  while (true) {
    Waiting next;
    {
      MutexLock lock(&mu_);
      if (std::exchange(worked, true)) --at_work_;
      if (owner != 0) {
        running_.erase(std::find(running_.begin(), running_.end(), owner));
        // This thread takes one, and another of the same owner may have waited for this.
        wanted_.Signal();
      }
      std::optional<Waiting> first;
      while (!stop_ && !(first = Next()).has_value()) wanted_.Wait(&mu_);
      if (stop_) return;
      next = *std::move(first);
      waiting_bytes_ -= next.call.bytes;
      owner = next.call.owner;
      if (owner != 0) running_.push_back(owner);
      ++at_work_;
    }
    next.work();
  }
}

}  // namespace kvpool
