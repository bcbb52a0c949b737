// Numbers from a file, by name.
#ifndef KVPOOL_CUDA_LAB_TENSOR_H_
#define KVPOOL_CUDA_LAB_TENSOR_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvpool::lab {

// Row-major. A single number has no dimensions.
struct Tensor {
  std::vector<uint64_t> shape;
  std::vector<double> values;
};

// What one problem is given as. Lists of lists of unequal length are in `ragged`: attention rows while a sequence
// grows, steps at which tokens were active.
struct Tensors {
  std::map<std::string, Tensor> by_name;
  std::map<std::string, std::vector<std::vector<double>>> ragged;

  const Tensor* Find(const std::string& name) const {
    const auto found = by_name.find(name);
    return found == by_name.end() ? nullptr : &found->second;
  }
  // Lists of numbers, whether or not they are of one length; empty if there are none by that name.
  std::vector<std::vector<double>> FindRows(const std::string& name) const;
};

// A file of JSON or, by its name's end, safetensors. A JSON object that has no tensors of its own but a member `policy`
// is read from there. INVALID_ARGUMENT names the file and the place.
absl::StatusOr<Tensors> ReadTensors(const std::string& path, const std::string& policy);
absl::StatusOr<Tensors> ParseJson(const std::string& text, const std::string& policy);
// F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U8 BOOL; no gaps, no overlaps, nothing behind the last tensor.
absl::StatusOr<Tensors> ParseSafetensors(const std::string& bytes);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_TENSOR_H_
