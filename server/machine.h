// What the kernel's files and the environment say of the machine, or of the container that this process is in.
#ifndef KVPOOL_SERVER_MACHINE_H_
#define KVPOOL_SERVER_MACHINE_H_

#include <cstdint>
#include <string>

namespace kvpool {

struct MemoryLimit {
  uint64_t bytes = 0;
  std::string source;  // "RAM", or the file that says so.
};

// What this process may use: the machine's memory, or less where its cgroup or one around that has a limit, v2's
// memory.max or v1's memory.limit_in_bytes. Limits above a container's own tree can't be seen from inside. Tests
// have files of their own under `root`.
MemoryLimit UsableMemory(const std::string& root = "");

// What promises a GPU to this process: a variable as NAME=value, or a path under /dev or /proc. Empty: nothing
// does, or CUDA_VISIBLE_DEVICES hides all GPUs on purpose.
std::string PromisedGpu(const std::string& root = "");

}  // namespace kvpool

#endif  // KVPOOL_SERVER_MACHINE_H_
