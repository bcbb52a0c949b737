#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/lab/tensor.h"
#include "cuda/scorers/element.h"
#include "nlohmann/json.hpp"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMostValues = uint64_t{1} << 32;
constexpr uint64_t kMostHeaderBytes = 100 << 20;  // As the format's own library.
constexpr size_t kMostDimensions = 8;

// JSON has no such numbers: some libraries write "NaN", "Infinity" and "-Infinity" as strings, others (Python's) without the
// quotes, which QuoteConstants then adds.
bool NumberOf(const Json& json, double* value) {
  if (json.is_number()) return *value = json.get<double>(), true;
  if (json.is_boolean()) return *value = json.get<bool>() ? 1 : 0, true;
  if (!json.is_string()) return false;
  const std::string& text = json.get_ref<const std::string&>();
  if (text == "NaN") return *value = std::numeric_limits<double>::quiet_NaN(), true;
  if (text == "Infinity") return *value = HUGE_VAL, true;
  if (text == "-Infinity") return *value = -HUGE_VAL, true;
  return false;
}

std::string QuoteConstants(const std::string& text) {
  std::string quoted;
  quoted.reserve(text.size());
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\' && i + 1 < text.size()) {
      quoted += c;
      quoted += text[++i];
      continue;
    }
    if (c == '"') in_string = !in_string;
    size_t length = 0;
    for (const absl::string_view name : {"NaN", "Infinity", "-Infinity"}) {
      if (!in_string && absl::string_view(text).substr(i, name.size()) == name) length = name.size();
    }
    if (length == 0) {
      quoted += c;
      continue;
    }
    absl::StrAppend(&quoted, "\"", absl::string_view(text).substr(i, length), "\"");
    i += length - 1;
  }
  return quoted;
}

// Appends the numbers of nested lists; false if they are not a box of numbers.
bool Flatten(const Json& json, size_t depth, Tensor* tensor) {
  if (!json.is_array()) {
    double value;
    if (depth != tensor->shape.size() || !NumberOf(json, &value)) return false;
    tensor->values.push_back(value);
    return true;
  }
  if (depth >= tensor->shape.size() || json.size() != tensor->shape[depth]) return false;
  return std::all_of(json.begin(), json.end(),
                     [&](const Json& element) { return Flatten(element, depth + 1, tensor); });
}

bool TensorOf(const Json& json, Tensor* tensor) {
  for (const Json* at = &json; at->is_array(); at = &at->front()) {
    tensor->shape.push_back(at->size());
    if (at->empty() || tensor->shape.size() > kMostDimensions) return false;
  }
  return Flatten(json, 0, tensor);
}

bool RaggedOf(const Json& json, std::vector<std::vector<double>>* rows) {
  if (!json.is_array()) return false;
  for (const Json& row : json) {
    Tensor numbers;
    if (!row.is_array()) return false;
    if (!row.empty() && (!TensorOf(row, &numbers) || numbers.shape.size() != 1)) return false;
    rows->push_back(std::move(numbers.values));
  }
  return true;
}

// {"0": [1, 5], "1": [2]}: rows by number.
bool RowsByNumber(const Json& json, std::vector<std::vector<double>>* rows) {
  if (!json.is_object()) return false;
  rows->resize(json.size());
  for (const auto& [key, row] : json.items()) {
    uint64_t index;
    Tensor numbers;
    if (!absl::SimpleAtoi(key, &index) || index >= rows->size()) return false;
    if (!row.empty() && (!TensorOf(row, &numbers) || numbers.shape.size() != 1)) return false;
    (*rows)[index] = std::move(numbers.values);
  }
  return !rows->empty();
}

Tensors TensorsOf(const Json& object) {
  Tensors tensors;
  for (const auto& [name, value] : object.items()) {
    Tensor tensor;
    std::vector<std::vector<double>> rows;
    if (TensorOf(value, &tensor)) {
      tensors.by_name[name] = std::move(tensor);
    } else if (RaggedOf(value, &rows) || (rows.clear(), RowsByNumber(value, &rows))) {
      tensors.ragged[name] = std::move(rows);
    }
    // Anything else is for people, or an expected answer.
  }
  return tensors;
}

// Members under which a file of many problems may have a policy's, the best last.
std::vector<std::string> KeysOf(const std::string& policy) {
  if (policy == "lazy_eviction") return {"lazy", policy};
  if (policy == "fast_caote") return {"caote", policy};
  if (policy == "pyramidkv") return {"pyramid", policy};
  if (policy == "keydiff" || policy == "inverse_key_l2") return {"paged_eviction", policy};
  return {policy};
}

double ElementOf(const std::string& dtype, const unsigned char* at) {
  const auto as = [at]<typename T>(T value) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  using scorers::Element;
  using scorers::KvDtype;
  if (dtype == "F64") return as(double{});
  if (dtype == "F32") return as(float{});
  if (dtype == "F16") return Element<KvDtype::kF16>::Load(as(uint16_t{}));
  if (dtype == "BF16") return Element<KvDtype::kBf16>::Load(as(uint16_t{}));
  if (dtype == "F8_E4M3") return Element<KvDtype::kFp8E4m3>::Load(as(uint8_t{}));
  if (dtype == "F8_E5M2") return Element<KvDtype::kFp8E5m2>::Load(as(uint8_t{}));
  if (dtype == "I64") return static_cast<double>(as(int64_t{}));
  if (dtype == "I32") return as(int32_t{});
  if (dtype == "I16") return as(int16_t{});
  if (dtype == "I8") return as(int8_t{});
  return as(uint8_t{});  // U8 and BOOL.
}

uint64_t BytesOf(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64") return 8;
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16") return 2;
  if (dtype == "F8_E4M3" || dtype == "F8_E5M2" || dtype == "I8" || dtype == "U8" || dtype == "BOOL") return 1;
  return 0;
}

struct Piece {
  std::string name, dtype;
  uint64_t begin = 0, end = 0;
  Tensor tensor;
};

absl::StatusOr<Piece> PieceOf(const std::string& name, const Json& entry, uint64_t data_bytes) {
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
  Piece piece{.name = name, .dtype = entry["dtype"].get<std::string>()};
  piece.begin = entry["data_offsets"][0].get<uint64_t>();
  piece.end = entry["data_offsets"][1].get<uint64_t>();
  const uint64_t element_bytes = BytesOf(piece.dtype);
  if (element_bytes == 0) return wrong(absl::StrCat("dtype ", piece.dtype, " is not read here"));
  uint64_t count = 1;
  for (const Json& number : entry["shape"]) {
    piece.tensor.shape.push_back(number.get<uint64_t>());
    const uint64_t extent = piece.tensor.shape.back();
    if (extent != 0 && count > kMostValues / extent) return wrong("more than 2^32 elements");
    count *= extent;
  }
  if (piece.begin > piece.end || piece.end > data_bytes || piece.end - piece.begin != count * element_bytes) {
    return wrong(absl::StrCat("data_offsets ", piece.begin, " to ", piece.end, " are not ",
                              count * element_bytes, " bytes within ", data_bytes));
  }
  return piece;
}

}  // namespace

std::vector<std::vector<double>> Tensors::FindRows(const std::string& name) const {
  if (const auto found = ragged.find(name); found != ragged.end()) return found->second;
  std::vector<std::vector<double>> rows;
  const Tensor* const tensor = Find(name);
  if (tensor == nullptr || tensor->shape.size() != 2) return rows;
  const auto columns = static_cast<ptrdiff_t>(tensor->shape[1]);
  for (auto at = tensor->values.begin(); at != tensor->values.end(); at += columns) {
    rows.emplace_back(at, at + columns);
  }
  return rows;
}

absl::StatusOr<Tensors> ParseSafetensors(const std::string& bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) return absl::InvalidArgumentError("shorter than 8 bytes");
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kMostHeaderBytes || header_bytes > bytes.size() - sizeof(header_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header is said to have ", header_bytes, " bytes, the file has ", bytes.size()));
  }
  const char* const header_start = bytes.data() + sizeof(header_bytes);
  const Json header =
      Json::parse(header_start, header_start + header_bytes, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return absl::InvalidArgumentError("the header is no JSON object");
  const uint64_t data_bytes = bytes.size() - sizeof(header_bytes) - header_bytes;
  std::vector<Piece> pieces;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    ASSIGN_OR_RETURN(Piece piece, PieceOf(name, entry, data_bytes));
    pieces.push_back(std::move(piece));
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t next = 0;
  Tensors tensors;
  const unsigned char* const data = reinterpret_cast<const unsigned char*>(header_start) + header_bytes;
  for (Piece& piece : pieces) {
    if (piece.begin != next) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", piece.name, "\" begins at ", piece.begin,
                                                     ", the one before it ends at ", next));
    }
    next = piece.end;
    const uint64_t element_bytes = BytesOf(piece.dtype);
    piece.tensor.values.reserve((piece.end - piece.begin) / element_bytes);
    for (uint64_t at = piece.begin; at < piece.end; at += element_bytes) {
      piece.tensor.values.push_back(ElementOf(piece.dtype, data + at));
    }
    tensors.by_name[piece.name] = std::move(piece.tensor);
  }
  if (next == data_bytes) return tensors;
  return absl::InvalidArgumentError(absl::StrCat(data_bytes - next, " bytes behind the last tensor"));
}

absl::StatusOr<Tensors> ParseJson(const std::string& text, const std::string& policy) {
  Json json;
  try {
    json = Json::parse(QuoteConstants(text));
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
  if (!json.is_object()) return absl::InvalidArgumentError("not a JSON object");
  // A file of many problems: by policy, those of budgets one level further down.
  const Json* object = &json;
  for (const char* group : {"", "budgets"}) {
    const bool in_group = *group != 0 && json.contains(group) && json[group].is_object();
    const Json& from = in_group ? json[group] : json;
    for (const std::string& key : KeysOf(policy)) {
      if (from.contains(key) && from[key].is_object()) object = &from[key];
    }
  }
  return TensorsOf(*object);
}

absl::StatusOr<Tensors> ReadTensors(const std::string& path, const std::string& policy) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  if (!file || !(bytes << file.rdbuf())) {
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  absl::StatusOr<Tensors> tensors = absl::EndsWith(path, ".safetensors")
                                        ? ParseSafetensors(std::move(bytes).str())
                                        : ParseJson(std::move(bytes).str(), policy);
  if (tensors.ok()) return tensors;
  return absl::Status(tensors.status().code(), absl::StrCat(path, ": ", tensors.status().message()));
}

}  // namespace kvpool::lab
