// How the kernels of score_kernels.cu are launched: what they, the device that launches them and the fake driver that runs
// their bodies must agree on.
#ifndef KVPOOL_CUDA_KERNELS_LAUNCH_H_
#define KVPOOL_CUDA_KERNELS_LAUNCH_H_

#include <cstdint>

#include "cuda/base/lane.h"

namespace kvpool::scorers {

// Teams that read K and V in blocks of a sequence: four of them are resident on an SM, each with its loads on their way.
inline constexpr uint32_t kBlockThreads = 256;
// Teams of a whole plane: a model has a few hundred planes, about two an SM, so that each must fill half of one.
inline constexpr uint32_t kPlaneThreads = 1024;
// The same for policies and query windows, the largest of which need more than the 64 registers that 1,024 threads have
// each.
inline constexpr uint32_t kPolicyThreads = 512;

// Blocks of a sequence that one team unpacks: four a warp, whose loads overlap, and enough teams for every SM even of
// a model with a single plane.
inline constexpr uint32_t kUnpackBlocks = 32;
// Blocks whose keys one team multiplies: 32 KiB of 16 two-byte tokens of 128, as much as a record's team reads.
inline constexpr uint32_t kDotBlocks = 8;

// A share of one plane's blocks; shares of a plane are neighbours in the grid's x.
struct PlaneShares {
  uint32_t blocks_each = 0;
  uint32_t shares = 0;

  static constexpr PlaneShares Of(uint32_t blocks, uint32_t blocks_each) {
    return {blocks_each, blocks / blocks_each + (blocks % blocks_each != 0)};
  }
};

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
