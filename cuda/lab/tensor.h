// Named arrays of numbers from a file.
#ifndef KVPOOL_CUDA_LAB_TENSOR_H_
#define KVPOOL_CUDA_LAB_TENSOR_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvpool::lab {

// Values are row-major. A single number has no dimensions.
struct Tensor {
  std::vector<uint64_t> shape;
  std::vector<double> values;
};

// The arrays of one problem. Lists of lists of unequal length are in `ragged`: attention rows of a sequence
// that grows, steps at which tokens were active.
struct Tensors {
  std::map<std::string, Tensor> by_name;
  std::map<std::string, std::vector<std::vector<double>>> ragged;

  const Tensor* Find(const std::string& name) const {
    const auto found = by_name.find(name);
    return found == by_name.end() ? nullptr : &found->second;
  }
  // The lists of numbers of this name, of equal length or not; empty if there are none.
  std::vector<std::vector<double>> FindRows(const std::string& name) const;
};

// Reads a file in safetensors format if its name ends so, else in JSON. In JSON tensors may stand in a member
// named `policy` instead of in the object itself. INVALID_ARGUMENT names the file and the place.
absl::StatusOr<Tensors> ReadTensors(const std::string& path, const std::string& policy);
absl::StatusOr<Tensors> ParseJson(const std::string& text, const std::string& policy);
// Types F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U8 BOOL. Gaps, overlaps and bytes behind the last
// tensor are refused.
absl::StatusOr<Tensors> ParseSafetensors(const std::string& bytes);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_TENSOR_H_
