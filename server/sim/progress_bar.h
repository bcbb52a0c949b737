// A progress bar on stderr for work that takes longer than a second.
#ifndef KVPOOL_SERVER_SIM_PROGRESS_BAR_H_
#define KVPOOL_SERVER_SIM_PROGRESS_BAR_H_

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>

namespace kvpool::sim {

// Drawn by one thread, and erased when it ends.
class ProgressBar {
 public:
  // `steps` is the plural noun for what the total counts.
  ProgressBar(bool shown, size_t total, const char* steps)
      : shown_(shown), total_(total), steps_(steps), begin_(Clock::now()) {}
  ~ProgressBar() {
    if (drawn_) std::fprintf(stderr, "\r%*s\r", kWidth + 40, "");
  }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Draw(size_t done) {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    if (!shown_ || seconds < 1 || done == 0) return;
    drawn_ = true;
    const auto share = static_cast<double>(done) / static_cast<double>(total_);
    const int full = static_cast<int>(share * kWidth);
    std::string bar;
    for (int i = 0; i < kWidth; ++i) bar += i < full ? "█" : "░";
    std::fprintf(stderr, "\r%s %3.0f %%  %zu of %zu %s, %.0f s left ", bar.c_str(), share * 100, done, total_,
                 steps_, seconds / share - seconds);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kWidth = 30;
  const bool shown_;
  const size_t total_;
  const char* const steps_;
  const Clock::time_point begin_;
  bool drawn_ = false;
};

}  // namespace kvpool::sim

#endif  // KVPOOL_SERVER_SIM_PROGRESS_BAR_H_
