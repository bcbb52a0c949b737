#include "server/replacement/parts/weights.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/formats/safetensors.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

std::string ShapeText(absl::Span<const uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

// The values of an F32 tensor. INVALID_ARGUMENT: another type, or a value is not finite.
absl::StatusOr<std::vector<float>> ValuesOf(const safetensors::Tensor& tensor, const std::string& source) {
  const auto wrong = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": tensor \"", tensor.name, "\": ", what));
  };
  if (tensor.dtype != "F32") return wrong(absl::StrCat("dtype is ", tensor.dtype, ", not F32"));
  std::vector<float> values(tensor.elements);
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) return wrong(absl::StrCat("value ", i, " is ", values[i], ", not finite"));
  }
  return values;
}

absl::StatusOr<std::shared_ptr<const Weights>> ParseBuiltIn(const BuiltInWeights& built_in) {
  const absl::string_view bytes(reinterpret_cast<const char*>(built_in.bytes), built_in.size);
  ASSIGN_OR_RETURN(Weights weights,
                   Weights::Parse(bytes, absl::StrCat("built-in weights of ", View(built_in.policy))));
  return std::make_shared<const Weights>(std::move(weights));
}

}  // namespace

Weights::Weights(const WeightsShape& shape, std::string trained)
    : policy_(shape.policy), format_(shape.format), features_(shape.features), trained_(std::move(trained)) {}

absl::StatusOr<Weights> Weights::Parse(absl::string_view bytes, std::string source) {
  const absl::StatusOr<safetensors::File> file = safetensors::Parse(bytes);
  if (!file.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", file.status().message()));
  }
  Weights weights;
  const std::pair<const char*, std::string*> fields[] = {{"policy", &weights.policy_},
                                                         {"format", &weights.format_},
                                                         {"features", &weights.features_},
                                                         {"trained", &weights.trained_}};
  for (const auto& [name, field] : fields) {
    const auto found = file->metadata.find(name);
    if (found == file->metadata.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": the metadata lacks ", name, ": not written by kvpool-sim train"));
    }
    *field = found->second;
  }
  for (const safetensors::Tensor& tensor : file->tensors) {
    ASSIGN_OR_RETURN(std::vector<float> values, ValuesOf(tensor, source));
    weights.Set(tensor.name, tensor.shape, std::move(values));
  }
  weights.source_ = std::move(source);
  return weights;
}

absl::StatusOr<Weights> Weights::Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::ostringstream bytes;
  if (!(bytes << file.rdbuf()))
    return absl::UnavailableError(absl::StrCat(path, ": it can't be read, or is empty"));
  return Parse(std::move(bytes).str(), path);
}

absl::StatusOr<std::shared_ptr<const Weights>> Weights::BuiltIn(std::string_view policy) {
  // Each space with a trained policy asks, and parsing takes longer than the rest of its making.
  using Parsed = std::map<std::string_view, absl::StatusOr<std::shared_ptr<const Weights>>>;
  static const Parsed parsed = [] {
    Parsed all;
    for (const BuiltInWeights* built_in = kBuiltInWeights; !built_in->policy.empty(); ++built_in) {
      all.emplace(built_in->policy, ParseBuiltIn(*built_in));
    }
    return all;
  }();
  const auto found = parsed.find(policy);
  if (found != parsed.end()) return found->second;
  return absl::NotFoundError(absl::StrCat("no weights of ", View(policy), " are built in"));
}

absl::Status Weights::Check(const WeightsShape& shape) const {
  const auto wrong = [this](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(source_, ": ", what...));
  };
  if (policy_ != shape.policy) {
    return wrong("weights of policy ", policy_, ", not of ", View(shape.policy));
  }
  if (format_ != shape.format) return wrong("format is ", format_, ", not ", View(shape.format));
  if (features_ != shape.features) {
    return wrong("features are ", features_, ", not ", View(shape.features));
  }
  for (const WeightsShape::Tensor& expected : shape.tensors) {
    const auto found = tensors_.find(expected.name);
    if (found == tensors_.end()) {
      return wrong("tensor \"", expected.name, "\" of shape ", ShapeText(expected.shape), " is missing");
    }
    if (found->second.shape != expected.shape) {
      return wrong("tensor \"", expected.name, "\" has shape ", ShapeText(found->second.shape), ", not ",
                   ShapeText(expected.shape));
    }
  }
  if (tensors_.size() != shape.tensors.size()) {
    return wrong(tensors_.size(), " tensors, not ", shape.tensors.size());
  }
  return absl::OkStatus();
}

absl::Span<const float> Weights::Get(absl::string_view name) const {
  const auto found = tensors_.find(std::string_view(name.data(), name.size()));
  KVPOOL_CHECK(found != tensors_.end(), "%s: no tensor \"%s\"", source_.c_str(), std::string(name).c_str());
  return found->second.values;
}

void Weights::Set(const std::string& name, std::vector<uint64_t> shape, std::vector<float> values) {
  tensors_[name] = {std::move(shape), std::move(values)};
}

std::string Weights::Serialize() const {
  safetensors::File file;
  file.metadata = {{"policy", policy_}, {"format", format_}, {"features", features_}, {"trained", trained_}};
  for (const auto& [name, tensor] : tensors_) {
    file.tensors.push_back({.name = name,
                            .dtype = "F32",
                            .shape = tensor.shape,
                            .elements = tensor.values.size(),
                            .bytes = {reinterpret_cast<const char*>(tensor.values.data()),
                                      tensor.values.size() * sizeof(float)}});
  }
  return safetensors::Write(file);
}

}  // namespace kvpool
