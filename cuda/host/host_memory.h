// How much memory the machine and this process's control groups let it take.
#ifndef KVPOOL_CUDA_HOST_HOST_MEMORY_H_
#define KVPOOL_CUDA_HOST_HOST_MEMORY_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kvpool {

struct HostMemory {
  // The machine's memory, or the least limit among the control groups above this process.
  size_t total_bytes = 0;
  // The bytes that can be taken before the machine, or one of those groups, runs out.
  size_t available_bytes = 0;
  // The free bytes of the machine's pool of 2 MiB pages, which available_bytes does not include.
  size_t huge_free_bytes = 0;
};

// Reads proc and sys under `root` ("" in production). A group's page cache that can be dropped counts as
// available, as in MemAvailable. UNAVAILABLE: /proc/meminfo can't be read.
absl::StatusOr<HostMemory> ReadHostMemory(const std::string& root);

}  // namespace kvpool

#endif  // KVPOOL_CUDA_HOST_HOST_MEMORY_H_
