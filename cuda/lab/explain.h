// Drawings of the tokens that stay.
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

// A line for each block: # for a token that stays, . for one that leaves, and the mean of their scores.
std::string DrawText(const Picture& picture);
// A cell for each token, shaded by score, and crossed out if the token leaves.
std::string DrawSvg(const Picture& picture);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_EXPLAIN_H_
