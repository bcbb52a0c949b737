#include "server/rpc/call_workers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"

namespace kvpool {

CallWorkers::CallWorkers(Options options) : options_(std::move(options)) {
  for (int i = 0; i < options_.threads; ++i) threads_.push_back(NamedThread("calls", [this] { Run(); }));
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
    RETURN_IF_ERROR(CheckPlace(call));
    for (Places* const taken : {&taken_, &taken_by_[call.tenant]}) {
      ++taken->calls;
      taken->bytes += call.bytes;
    }
    waiting_.Push(call.tenant, {.call = call, .work = std::move(work)});
  }
  wanted_.Signal();
  return absl::OkStatus();
}

void CallWorkers::StartHeld(const Call& call, std::function<void()> work) {
  {
    MutexLock lock(&mu_);
    waiting_.Push(call.tenant, {.call = call, .held = true, .work = std::move(work)});
  }
  wanted_.Signal();
}

absl::Status CallWorkers::CheckPlace(const Call& call) const {
  const auto check = [&](const Places& taken, size_t most, size_t most_bytes, absl::string_view whose) {
    if (taken.calls < most && taken.bytes + call.bytes <= most_bytes) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat(taken.calls, " ", options_.calls, whose, " of ",
                                                     taken.bytes, " bytes wait already, and this one has ",
                                                     call.bytes, "; the limits are ", most, " and ",
                                                     most_bytes, " bytes"));
  };
  RETURN_IF_ERROR(check(taken_, options_.most_waiting, options_.most_waiting_bytes, ""));
  const auto own = taken_by_.find(call.tenant);
  if (options_.turns_by.empty() || own == taken_by_.end()) return absl::OkStatus();
  return check(own->second, options_.most_waiting / 2, options_.most_waiting_bytes / 2,
               absl::StrCat(" of ", options_.turns_by, " \"", call.tenant, "\""));
}

void CallWorkers::Leave(const Call& call) {
  const auto own = taken_by_.find(call.tenant);
  for (Places* const taken : {&taken_, &own->second}) {
    --taken->calls;
    taken->bytes -= call.bytes;
  }
  if (own->second.calls == 0) taken_by_.erase(own);
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

void CallWorkers::Begin(const Waiting& next) {
  if (!next.held) Leave(next.call);
  if (next.call.owner != 0) running_.push_back(next.call.owner);
  ++at_work_;
}

void CallWorkers::End(uint64_t owner) {
  --at_work_;
  if (owner == 0) return;
  running_.erase(std::find(running_.begin(), running_.end(), owner));
  // This thread takes one, and another of the same owner may have waited for this.
  wanted_.Signal();
}

bool CallWorkers::RunReady() {
  Waiting next;
  {
    MutexLock lock(&mu_);
    std::optional<Waiting> first = Next();
    if (!first.has_value()) return false;
    next = *std::move(first);
    Begin(next);
  }
  next.work();
  MutexLock lock(&mu_);
  End(next.call.owner);
  return true;
}

void CallWorkers::Run() {
  std::optional<uint64_t> ended;
  while (true) {
    Waiting next;
    {
      MutexLock lock(&mu_);
      if (ended.has_value()) End(*ended);
      std::optional<Waiting> first;
      while (!stop_ && !(first = Next()).has_value()) wanted_.Wait(&mu_);
      if (stop_) return;
      next = *std::move(first);
      Begin(next);
    }
    next.work();
    ended = next.call.owner;
  }
}

}  // namespace kvpool
