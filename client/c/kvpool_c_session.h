// Shared by the sources of the C ABI.
#ifndef KVPOOL_CLIENT_C_KVPOOL_C_SESSION_H_
#define KVPOOL_CLIENT_C_KVPOOL_C_SESSION_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/c/kvpool.h"
#include "client/session.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/status_macros.h"

struct kvpool_session {
  std::unique_ptr<kvpool::Session> session;
  std::deque<kvpool::Refusal> refusals;  // Taken from the session, and not by the caller yet.
};

namespace kvpool {

// Keeps the message for kvpool_last_error and returns the code.
int Answer(const absl::Status& status);

// INVALID_ARGUMENT: `given` is NULL, or its struct_size was not set.
template <typename Struct>
absl::Status CheckStructSize(const Struct* given, const char* type) {
  constexpr size_t kMaxStructBytes = 4096;
  if (given == nullptr) return absl::InvalidArgumentError(absl::StrCat("the ", type, " is NULL"));
  if (given->struct_size >= sizeof(size_t) && given->struct_size <= kMaxStructBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(type, ".struct_size is ", given->struct_size, "; must be ",
                                                 sizeof(size_t), " to ", kMaxStructBytes,
                                                 ": set it to sizeof(", type, ")"));
}

// The caller's structure as this library knows it, or INVALID_ARGUMENT: the rule under "Versions" in
// kvpool.h. A field that is added later must start behind the former sizeof, and structures grow by multiples
// of 8 bytes: padding at the end is not set by every caller.
template <typename Struct>
absl::StatusOr<Struct> ReadStruct(const Struct* given, const char* type) {
  static_assert(sizeof(Struct) % 8 == 0);
  RETURN_IF_ERROR(CheckStructSize(given, type));
  const size_t size = given->struct_size;
  const char* const bytes = reinterpret_cast<const char*>(given);
  for (size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(type, ".struct_size is ", size, " and byte ", i,
                                                   " is set; this library knows ", sizeof(Struct),
                                                   " bytes, and those behind them must be 0"));
  }
  Struct known = {};
  std::memcpy(&known, bytes, std::min(size, sizeof(Struct)));
  return known;
}

// kvpool_operation_start with a parsed request.
int StartOperation(kvpool_session* session, const v1::Operation& request, kvpool_operation** operation);

inline Deadline In(uint32_t timeout_ms) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
}

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_C_KVPOOL_C_SESSION_H_
