// A warp: 32 lanes that execute one instruction after the other. Lanes that branch apart are groups, of which the one furthest
// behind goes on, so that they meet again; they wait for each other where an instruction says so (shfl.sync, bar.sync).
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_WARP_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_WARP_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/fake_cuda/ptx/program.h"
#include "tests/support/fake_cuda/shadow.h"

namespace kvpool::fake::ptx {

// Memory that a kernel may access.
struct Region {
  uint64_t begin = 0;
  uint64_t end = 0;
  int protection = 0;        // PROT_* of mmap
  Shadow* shadow = nullptr;  // null where other processes write, too
};

// What a kernel asked of the GPU, over all its launches.
struct Counts {
  uint64_t launches = 0;
  uint64_t thread_blocks = 0;
  uint64_t threads = 0;            // The most of a thread block in any launch.
  uint64_t instructions = 0;       // each counts once for a warp
  uint64_t lane_instructions = 0;  // and once for each of its lanes that executes it
  uint64_t matrix_products =
      0;  // those of them that are mma.sync: 2,048 multiplications each, or 1,024 of tf32, which take as long
  uint64_t barriers = 0;
  // Of global memory. A sector is 32 aligned bytes, the least that is moved. An instruction of a warp asks for
  // each byte and each sector once, however many of its lanes do.
  uint64_t read_bytes = 0;
  uint64_t read_sectors = 0;
  uint64_t written_bytes = 0;
  uint64_t written_sectors = 0;
  Footprint footprint;  // The bytes of global memory are summed over the launches.
};

struct Fault {
  CUresult result;
  uint32_t thread;
  const Instruction* at;
  std::string what;
};

// One launch, and the thread block of it that is being executed.
struct Launch {
  const Kernel* kernel;
  Counts* counts;
  std::vector<Region> regions;  // sorted by address
  std::vector<std::byte> parameters;
  std::vector<std::byte> shared;
  Shadow* shared_shadow;
  uint32_t threads;  // a thread block's
  Moment moment;
  std::optional<Fault> fault;

  const Region* Find(uint64_t address, uint32_t bytes) const;
};

enum class Wait : uint8_t { kNothing, kOtherLanes, kBarrier };
struct Group {
  uint32_t pc;
  uint32_t lanes;
  Wait wait;
};

struct Warp {
  Launch* launch = nullptr;
  uint32_t first_thread = 0;
  std::vector<std::byte> registers;
  const std::byte* constants = nullptr;
  // The group that executes.
  uint32_t pc = 0;
  uint32_t lanes = 0;
  uint32_t active = 0;        // those of its lanes that the guard lets execute
  uint32_t pick_at = 0;       // the place in the code where another group may be due
  std::vector<Group> groups;  // the others
  uint32_t ended = 0;

  // Begins a thread block; its special registers are set by the caller.
  void Start(uint32_t thread_count);
  // Executes until all lanes have ended or wait at a barrier, or the launch has a fault.
  void Run();
  bool IsOver() const { return groups.empty(); }
  // REQUIRES: every group waits at a barrier.
  void PassBarrier();

  template <typename T>
  T* at(Place place) {
    // Constants are never written: no instruction has one for its result.
    std::byte* const start =
        place >= 0 ? registers.data() + place : const_cast<std::byte*>(constants) + ~place;
    return reinterpret_cast<T*>(start);
  }
  // Calls f(lane) for each active lane.
  template <typename F>
  [[gnu::always_inline]] inline void Each(F f) {
    if (active == kAllLanes) {
      for (uint32_t i = 0; i < kLanes; ++i) f(i);
    } else {
      for (uint32_t rest = active; rest != 0; rest &= rest - 1) f(static_cast<uint32_t>(__builtin_ctz(rest)));
    }
  }
  // Whether all lanes of the mask execute this instruction now. If not, those that are here wait, and come here again.
  bool HaveMet(uint32_t mask);
  // Fills the addresses, in this process, that the active lanes access. False where one must not.
  bool Resolve(const Instruction& instruction, Touch touch, uint32_t bytes, uint64_t* addresses);
  void Fail(CUresult result, uint32_t lane, std::string what);

 private:
  bool Pick();
  void Count(const uint64_t* addresses, uint32_t bytes, Touch touch);
};

}  // namespace kvpool::fake::ptx

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_WARP_H_
