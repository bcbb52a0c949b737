// Kernels in PTX, decoded so that a warp can execute them.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_PROGRAM_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvpool::fake::ptx {

inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

struct Warp;
struct Instruction;
using Execute = void (*)(Warp& warp, const Instruction& instruction);

// The place of an operand: a register of the warp, from its first byte on, or where it is negative ~place in the kernel's
// constants. Either has a value for each lane; a predicate is a mask of lanes.
using Place = int32_t;
inline constexpr Place kNoPlace = INT32_MAX;

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kParam };

struct Instruction {
  Execute execute = nullptr;
  Place guard = kNoPlace;  // executed by the lanes with this predicate
  bool guard_negated = false;
  Place to[4] = {kNoPlace, kNoPlace, kNoPlace, kNoPlace};
  Place from[10] = {kNoPlace, kNoPlace, kNoPlace, kNoPlace, kNoPlace,
                    kNoPlace, kNoPlace, kNoPlace, kNoPlace, kNoPlace};
  uint32_t target = 0;  // a branch's: an index of the kernel's code
  // Of an access to memory; from[0] has the address.
  Space space = Space::kGeneric;
  uint8_t count = 1;  // elements of a vector
  bool short_address = false;
  int64_t displacement = 0;
  uint32_t line = 0;  // the line of the module's text
};

// Registers that a kernel finds set, in this order at the start of a warp's registers. All have four bytes for each lane.
enum Special : uint32_t { kTidX, kNtidX, kCtaidX, kCtaidY, kNctaidX, kNctaidY, kZero, kSpecials };

struct Parameter {
  size_t offset, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0;
  uint32_t max_threads = 0;   // a thread block's; 0: not said
  size_t register_bytes = 0;  // a warp's
  std::vector<std::byte> constants;
  std::vector<Instruction> code;
};

struct Program {
  std::string text;  // Comments are left out; errors quote its lines.
  size_t shared_bytes = 0;
  std::map<std::string, std::unique_ptr<const Kernel>> kernels;

  std::string LineOf(const Instruction& instruction) const;
};

// Ends the process, with the line, where there is something that it does not know.
std::unique_ptr<const Program> Parse(std::string text);

}  // namespace kvpool::fake::ptx

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_PROGRAM_H_
