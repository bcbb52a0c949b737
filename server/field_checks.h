// The three shapes of an invalid field, in words that name field, value and limit.
#ifndef KVPOOL_SERVER_FIELD_CHECKS_H_
#define KVPOOL_SERVER_FIELD_CHECKS_H_

#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvpool {

inline absl::Status CheckRange(absl::string_view field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; must be ", low, " to ", high));
}

inline absl::Status CheckSize(absl::string_view field, const std::string& value, size_t low, size_t high) {
  if (value.size() >= low && value.size() <= high) return absl::OkStatus();
  const std::string limit = low == high ? absl::StrCat(low) : absl::StrCat(low, " to ", high);
  return absl::InvalidArgumentError(absl::StrCat(field, " has ", value.size(), " bytes; must have ", limit));
}

// A field of a newer contract may change what the others mean: it is refused, not skipped.
template <typename Message>
absl::Status CheckKnown(absl::string_view what, const Message& message) {
  // Looked up once a type: the way there from a message costs more than the rest of a verb's checks.
  static const google::protobuf::Reflection* const reflection = Message::default_instance().GetReflection();
  const google::protobuf::UnknownFieldSet& unknown = reflection->GetUnknownFields(message);
  if (unknown.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " has unknown field ", unknown.field(0).number()));
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_FIELD_CHECKS_H_
