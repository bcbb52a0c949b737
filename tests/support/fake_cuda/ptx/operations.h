// What each opcode does.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_OPERATIONS_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_OPERATIONS_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "tests/support/fake_cuda/ptx/program.h"

namespace kvpool::fake::ptx {

struct Operation {
  Execute execute = nullptr;
  // A letter for each operand, the result first: p: a predicate; h, w, d: 2, 4 and 8 bytes for each lane.
  std::string operands;
};

// By opcode, as in "add.s32"; nullptr: there is none. Accesses to memory and moves of vectors are apart.
const Operation* FindOperation(const std::string& opcode);

// A load, store or atomic addition of elements of `type` ("u16", "f32"), whose registers have `register_bytes`.
enum class Access : uint8_t { kLoad, kStore, kAtomicAdd };
Execute FindAccess(Access access, std::string_view type, uint32_t register_bytes);
uint32_t BytesOfType(std::string_view type);

// Between one register and several whose bytes lie one after the other in it.
Execute FindPack(uint32_t part_bytes, uint32_t whole_bytes);
Execute FindUnpack(uint32_t part_bytes, uint32_t whole_bytes);

// d = a * b + c, of a warp's matrices: a is 16 x 16 of f16 or bf16 and b 16 x 8, or of tf32 16 x 8 and 8 x 8; c and d are 16 x 8
// of f32. The operands are d's four registers, a's four, b's two and c's four. nullptr: there is none of this opcode.
Execute FindMatrixProduct(std::string_view opcode);

void Branch(Warp& warp, const Instruction& instruction);
void Return(Warp& warp, const Instruction& instruction);
void Barrier(Warp& warp, const Instruction& instruction);

}  // namespace kvpool::fake::ptx

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_PTX_OPERATIONS_H_
