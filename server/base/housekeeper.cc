#include "server/base/housekeeper.h"

#include <chrono>
#include <utility>

#include "proto/support/named_thread.h"

namespace kvpool {
namespace {

constexpr std::chrono::milliseconds kTick{100};

}  // namespace

Housekeeper::Housekeeper(std::function<void()> round)
    : thread_(NamedThread("housekeeper", [this, round = std::move(round)] { Run(round); })) {}

Housekeeper::~Housekeeper() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  wanted_.Signal();
  thread_.join();
}

void Housekeeper::Wake() {
  {
    MutexLock lock(&mu_);
    if (due_) return;
    due_ = true;
  }
  wanted_.Signal();
}

void Housekeeper::Run(const std::function<void()>& round) {
  while (true) {
    {
      MutexLock lock(&mu_);
      const auto next = std::chrono::steady_clock::now() + kTick;
      while (!due_ && !stop_ && wanted_.WaitUntil(&mu_, next)) {
      }
      if (stop_) return;
      due_ = false;
    }
    round();
  }
}

}  // namespace kvpool
