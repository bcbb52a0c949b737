// How much memory this process may still take, by the machine and by its control groups.
#ifndef KVPOOL_CUDA_HOST_HOST_MEMORY_H_
#define KVPOOL_CUDA_HOST_HOST_MEMORY_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvpool {

struct HostMemory {
  size_t total_bytes = 0;      // The machine's memory, or the least control group limit above this process.
  size_t available_bytes = 0;  // What can be taken before the machine, or one of those groups, runs out.
  size_t huge_free_bytes = 0;  // In the machine's pool of 2 MiB pages, which is not part of the above.
};

// Reads proc and sys under `root` ("" in production). A group's page cache that could be dropped counts as
// available, as it does in MemAvailable. UNAVAILABLE: /proc/meminfo can't be read.
absl::StatusOr<HostMemory> ReadHostMemory(const std::string& root);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_HOST_HOST_MEMORY_H_
