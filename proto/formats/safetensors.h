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
  absl::string_view bytes;  // Little-endian, row-major; of the text that was parsed.
};

struct File {
  std::vector<Tensor> tensors;  // In the order of their bytes.
  std::map<std::string, std::string> metadata;
};

// Bytes of an element; 0: not known.
uint64_t ElementBytes(absl::string_view dtype);

// No gaps, no overlaps, nothing behind the last tensor; only types whose size is known. INVALID_ARGUMENT says which
// tensor. `bytes` must outlive the answer.
absl::StatusOr<File> Parse(absl::string_view bytes);

// The other way: a file of the tensors in their order. REQUIRES: as many bytes as elements times their size.
std::string Write(const File& file);

}  // namespace kvpool::safetensors

#endif  // KVPOOL_PROTO_FORMATS_SAFETENSORS_H_
