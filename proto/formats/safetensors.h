// The safetensors format: 8 bytes of header size, a JSON header, the tensors one behind the other.
#ifndef KVPOOL_PROTO_FORMATS_SAFETENSORS_H_
#define KVPOOL_PROTO_FORMATS_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvpool::safetensors {

struct Tensor {
  std::string name;
  std::string dtype;  // F32, BF16, I64 …
  std::vector<uint64_t> shape;
  uint64_t elements = 1;
  absl::string_view bytes;  // Little-endian, row-major; a part of the text that was parsed.
};

struct File {
  std::vector<Tensor> tensors;  // Ordered by the position of their bytes.
  std::map<std::string, std::string> metadata;
};

// Bytes of an element; 0: not known.
uint64_t ElementBytes(absl::string_view dtype);

// Parses a file. INVALID_ARGUMENT: there is a gap, an overlap or a type whose size is not known, naming the
// tensor, or something behind the last tensor. REQUIRES: `bytes` outlives the result.
absl::StatusOr<File> Parse(absl::string_view bytes);

// Writes a file of the tensors in their order. REQUIRES: each has elements * ElementBytes(dtype) bytes.
std::string Write(const File& file);

}  // namespace kvpool::safetensors

#endif  // KVPOOL_PROTO_FORMATS_SAFETENSORS_H_
