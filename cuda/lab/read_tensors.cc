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
#include "cuda/lab/tensor.h"
#include "cuda/scorers/parts/element.h"
#include "nlohmann/json.hpp"
#include "proto/formats/safetensors.h"
#include "proto/support/status_macros.h"

namespace kvpool::lab {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxDimensions = 8;

// JSON has no numbers for NaN and infinities. Some libraries write "NaN", "Infinity" and "-Infinity" as
// strings, others (Python's) without the quotes, which QuoteConstants adds.
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

// Appends the numbers of nested lists; false if the lists' lengths do not agree with the shape.
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
    if (at->empty() || tensor->shape.size() > kMaxDimensions) return false;
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

// Reads {"0": [1, 5], "1": [2]}, rows by their numbers.
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
    // Other members are texts, or expected answers.
  }
  return tensors;
}

// The names under which a file of many problems may have a policy's; a later one counts before an earlier.
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
  return as(uint8_t{});  // U8 and BOOL
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
  ASSIGN_OR_RETURN(const safetensors::File file, safetensors::Parse(bytes));
  Tensors tensors;
  for (const safetensors::Tensor& from : file.tensors) {
    Tensor& to = tensors.by_name[from.name];
    to.shape = from.shape;
    to.values.reserve(from.elements);
    const auto* const data = reinterpret_cast<const unsigned char*>(from.bytes.data());
    const uint64_t element_bytes = safetensors::ElementBytes(from.dtype);
    for (uint64_t i = 0; i < from.elements; ++i) {
      to.values.push_back(ElementOf(from.dtype, data + i * element_bytes));
    }
  }
  return tensors;
}

absl::StatusOr<Tensors> ParseJson(const std::string& text, const std::string& policy) {
  Json json;
  try {
    json = Json::parse(QuoteConstants(text));
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
  if (!json.is_object()) return absl::InvalidArgumentError("not a JSON object");
  // A file of many problems has a policy's in a member of its name, those of budgets in a member
  // of "budgets".
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
