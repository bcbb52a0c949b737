// What a comparison of pairs needs: processors of one's own, and what pairs say together.
#ifndef KVPOOL_TESTS_BENCH_PAIRS_H_
#define KVPOOL_TESTS_BENCH_PAIRS_H_

#include <sched.h>
#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace kvpool::bench {

std::vector<int> UsableCpus();

// Keeps all threads of a process on one CPU, for as long as this object lives.
class Pinned {
 public:
  Pinned(pid_t pid, int cpu);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  // All threads of that name go to another one. How many there are.
  int PinThreads(const std::string& name, int cpu) const;

 private:
  const pid_t pid_;
  cpu_set_t before_;
};

double UsSince(std::chrono::steady_clock::time_point start);

inline constexpr int kPairs = 20;
// The upper end of the 95 % interval of the median of kPairs values, which supposes nothing of how they are distributed: the 15th is
// below the median of all pairs for less than one run of 40 (P(B(20, 1/2) >= 15) = 0.021). The mean's, by Student's t, is
// mostly of the pair in which the host was busy: of two daemons of one kind it said up to 9 %.
double UpperEnd(std::vector<double> values);

}  // namespace kvpool::bench

#endif  // KVPOOL_TESTS_BENCH_PAIRS_H_
