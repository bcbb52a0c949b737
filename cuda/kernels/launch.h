// How the kernels of score_kernels.cu are launched: the kernels, the device that launches them and the fake
// driver that runs their bodies agree on this.
#ifndef KVPOOL_CUDA_KERNELS_LAUNCH_H_
#define KVPOOL_CUDA_KERNELS_LAUNCH_H_

#include <cstdint>

#include "cuda/base/lane.h"

namespace kvpool::scorers {

// The threads of teams that read K and V in blocks of a sequence.
inline constexpr uint32_t kBlockThreads = 256;
// The least number of teams that an SM must hold where each lane has four loads in flight: for more teams the assembler
// would save registers by having fewer loads, which tests/device/machine_code.py sees.
inline constexpr uint32_t kRecordTeams = 3;
// The threads of teams of a whole plane: a model has a few hundred planes, about two for each SM, so each
// must fill half of one.
inline constexpr uint32_t kPlaneThreads = 1024;
// The same for policies and query windows, some of which need more than the 64 registers that each of 1,024
// threads has.
inline constexpr uint32_t kPolicyThreads = 512;

// Blocks of a sequence that one team unpacks: four for each warp, whose loads overlap, and few enough that a
// model with a single plane has teams for every SM.
inline constexpr uint32_t kUnpackBlocks = 32;
// Bytes of the keys that one team multiplies, as many as a record's team reads of K in an 8B model: the vector that it
// multiplies them with is read once for all of them.
inline constexpr uint64_t kDotBytes = 32 << 10;

// How a plane's blocks are divided among teams; a plane's shares are neighbours in the grid's x.
struct PlaneShares {
  uint32_t blocks_each = 0;
  uint32_t shares = 0;

  static constexpr PlaneShares Of(uint32_t blocks, uint32_t blocks_each) {
    return {blocks_each, blocks / blocks_each + (blocks % blocks_each != 0)};
  }
};

// Bytes that one team copies at most: 32 rounds of all its threads, and few enough that a megabyte of attention is
// copied by 16 SMs.
inline constexpr uint64_t kCopyBytes = 64 << 10;

// Bytes to copy.
struct PieceCopy {
  uint64_t from = 0;
  uint64_t to = 0;
  uint64_t bytes = 0;
};

template <typename Team>
KVPOOL_HOST_DEVICE void CopyPiece(const Team& team, const PieceCopy& piece) {
  uint64_t whole = 0;
  if ((piece.from | piece.to) % sizeof(uint64_t) == 0) {
    whole = piece.bytes / sizeof(uint64_t) * sizeof(uint64_t);
    for (uint64_t i = team.id(); i < whole / sizeof(uint64_t); i += team.count()) {
      reinterpret_cast<uint64_t*>(piece.to)[i] = reinterpret_cast<const uint64_t*>(piece.from)[i];
    }
  }
  for (uint64_t i = whole + team.id(); i < piece.bytes; i += team.count()) {
    reinterpret_cast<unsigned char*>(piece.to)[i] = reinterpret_cast<const unsigned char*>(piece.from)[i];
  }
}

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_KERNELS_LAUNCH_H_
