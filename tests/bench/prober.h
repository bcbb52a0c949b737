// One engine that matches one key every millisecond, and how long each Match took.
#ifndef KVPOOL_TESTS_BENCH_PROBER_H_
#define KVPOOL_TESTS_BENCH_PROBER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/session.h"
#include "tests/bench/engines.h"

namespace kvpool::bench {

inline constexpr auto kProbePause = std::chrono::milliseconds(1);

// Matches until told to stop, and gives back what it found.
class Prober {
 public:
  // The keys are those of the first blocks of so many chains of kChainBlocks.
  Prober(Session* session, uint64_t chains) : thread_([this, session, chains] { Run(session, chains); }) {}
  // Milliseconds.
  std::vector<double> Stop() {
    stop_ = true;
    thread_.join();
    return std::move(ms_);
  }

 private:
  void Run(Session* session, uint64_t chains) {
    for (uint64_t i = 0; !stop_; ++i) {
      const std::string key = KeyOf(i * 7919 % chains * kChainBlocks);
      const auto begin = std::chrono::steady_clock::now();
      auto pending = session->Match(key);
      Check(pending.status());
      auto hit = pending->Wait(Patience());
      ms_.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
      Check(hit.status());
      std::this_thread::sleep_for(kProbePause);
    }
  }

  std::atomic<bool> stop_{false};
  std::vector<double> ms_;
  std::thread thread_;  // It is the last member: the thread uses the others.
};

}  // namespace kvpool::bench

#endif  // KVPOOL_TESTS_BENCH_PROBER_H_
