// What the kernel says of this process.
#ifndef KVPOOL_SERVER_METRICS_PROCESS_FACTS_H_
#define KVPOOL_SERVER_METRICS_PROCESS_FACTS_H_

namespace kvpool {

// As metrics have them: sizes in bytes, times in seconds. 0: /proc did not say.
struct ProcessFacts {
  double cpu_seconds = 0;
  double start_time_seconds = 0;  // Unix time.
  double resident_bytes = 0;
  double anonymous_bytes = 0;  // Resident, and neither shared nor of a file.
  double heap_bytes = 0;       // Allocated and not freed, as the allocator says.
  double virtual_bytes = 0;
  double open_fds = 0, max_fds = 0;
  double threads = 0;
};

ProcessFacts ReadProcessFacts();

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_PROCESS_FACTS_H_
