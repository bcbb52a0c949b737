#include "proto/formats/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool::safetensors {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMostElements = uint64_t{1} << 32;
constexpr uint64_t kMostHeaderBytes = 100 << 20;  // The same limit as the format's own library.
constexpr size_t kMostDimensions = 8;
constexpr char kMetadata[] = "__metadata__";

// A tensor, and where its bytes begin.
using Placed = std::pair<uint64_t, Tensor>;

absl::StatusOr<Placed> PlacedOf(const std::string& name, const Json& entry, absl::string_view data) {
  const auto wrong = [&name](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", name, "\": ", what));
  };
  const auto is_list = [&entry](const char* field) {
    if (!entry.is_object() || !entry.contains(field) || !entry[field].is_array()) return false;
    return std::all_of(entry[field].begin(), entry[field].end(),
                       [](const Json& number) { return number.is_number_unsigned(); });
  };
  if (!is_list("shape") || !is_list("data_offsets") || !entry.contains("dtype") ||
      !entry["dtype"].is_string() || entry["data_offsets"].size() != 2 ||
      entry["shape"].size() > kMostDimensions) {
    return wrong("its entry lacks dtype, shape of up to 8 numbers, or two data_offsets");
  }
  Tensor tensor{.name = name, .dtype = entry["dtype"].get<std::string>(), .shape = {}, .bytes = {}};
  const uint64_t begin = entry["data_offsets"][0].get<uint64_t>();
  const uint64_t end = entry["data_offsets"][1].get<uint64_t>();
  const uint64_t element_bytes = ElementBytes(tensor.dtype);
  if (element_bytes == 0) return wrong(absl::StrCat("dtype ", tensor.dtype, " is not read here"));
  for (const Json& number : entry["shape"]) {
    const uint64_t extent = tensor.shape.emplace_back(number.get<uint64_t>());
    if (extent != 0 && tensor.elements > kMostElements / extent) return wrong("more than 2^32 elements");
    tensor.elements *= extent;
  }
  const uint64_t size = tensor.elements * element_bytes;
  if (begin > end || end > data.size() || end - begin != size) {
    return wrong(
        absl::StrCat("data_offsets ", begin, " to ", end, " are not ", size, " bytes within ", data.size()));
  }
  tensor.bytes = data.substr(begin, size);
  return Placed{begin, std::move(tensor)};
}

}  // namespace

uint64_t ElementBytes(absl::string_view dtype) {
  if (dtype == "F64" || dtype == "I64") return 8;
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16") return 2;
  if (dtype == "F8_E4M3" || dtype == "F8_E5M2" || dtype == "I8" || dtype == "U8" || dtype == "BOOL") return 1;
  return 0;
}

absl::StatusOr<File> Parse(absl::string_view bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) return absl::InvalidArgumentError("shorter than 8 bytes");
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kMostHeaderBytes || header_bytes > bytes.size() - sizeof(header_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header is said to have ", header_bytes, " bytes, the file has ", bytes.size()));
  }
  const absl::string_view text = bytes.substr(sizeof(header_bytes), header_bytes);
  const Json header = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return absl::InvalidArgumentError("the header is no JSON object");
  const absl::string_view data = bytes.substr(sizeof(header_bytes) + header_bytes);
  File file;
  std::vector<Placed> placed;
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadata) {
      for (const auto& [key, value] : entry.items()) {
        if (value.is_string()) file.metadata[key] = value.get<std::string>();
      }
      continue;
    }
    ASSIGN_OR_RETURN(Placed one, PlacedOf(name, entry, data));
    placed.push_back(std::move(one));
  }
  std::stable_sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::pair(a.first, a.second.bytes.size()) < std::pair(b.first, b.second.bytes.size());
  });
  uint64_t next = 0;
  for (auto& [begin, tensor] : placed) {
    if (begin != next) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", tensor.name, "\" begins at ", begin,
                                                     ", the one before it ends at ", next));
    }
    next = begin + tensor.bytes.size();
    file.tensors.push_back(std::move(tensor));
  }
  if (next == data.size()) return file;
  return absl::InvalidArgumentError(absl::StrCat(data.size() - next, " bytes behind the last tensor"));
}

std::string Write(const File& file) {
  nlohmann::ordered_json header;
  if (!file.metadata.empty()) header[kMetadata] = file.metadata;
  std::string data;
  for (const Tensor& tensor : file.tensors) {
    KVPOOL_CHECK(tensor.bytes.size() == tensor.elements * ElementBytes(tensor.dtype), "tensor %s: %zu bytes",
                 tensor.name.c_str(), tensor.bytes.size());
    const size_t begin = data.size();
    data.append(tensor.bytes.data(), tensor.bytes.size());
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  // The tensors begin at a multiple of 8.
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t header_bytes = text.size();
  std::string bytes(sizeof(header_bytes), '\0');
  std::memcpy(bytes.data(), &header_bytes, sizeof(header_bytes));
  return absl::StrCat(bytes, text, data);
}

}  // namespace kvpool::safetensors
