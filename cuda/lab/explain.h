// Which tokens stay, drawn.
#ifndef KVPOOL_CUDA_LAB_EXPLAIN_H_
#define KVPOOL_CUDA_LAB_EXPLAIN_H_

#include <cstdint>
#include <string>
#include <vector>

namespace kvpool::lab {

struct Picture {
  std::string title;
  uint32_t tokens = 0;
  uint32_t tokens_per_block = 0;
  uint32_t rows = 0;
  std::vector<float> scores;   // [rows][tokens]
  std::vector<uint8_t> stays;  // [rows][tokens]
};

// A line per block: a full mark per token that stays, a dot per token that leaves, and the block's scores.
std::string DrawText(const Picture& picture);
// Cells: one a token, shaded by score, crossed out if it leaves.
std::string DrawSvg(const Picture& picture);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_EXPLAIN_H_
