// What the sources of the C face share.
#ifndef KVPOOL_CLIENT_C_KVPOOL_C_SESSION_H_
#define KVPOOL_CLIENT_C_KVPOOL_C_SESSION_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/c/kvpool.h"
#include "client/session.h"
#include "kvpool/v1/engine.pb.h"

struct kvpool_session {
  std::unique_ptr<kvpool::Session> session;
};

namespace kvpool {

// Keeps the words for kvpool_last_error and answers the code.
int Answer(const absl::Status& status);

// INVALID_ARGUMENT unless struct_size is that of the structure as this library knows it.
template <typename Arguments>
absl::Status CheckStructSize(const Arguments& arguments, const char* type) {
  if (arguments.struct_size == sizeof(arguments)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("arguments.struct_size is ", arguments.struct_size,
                                                 ", this library knows ", sizeof(arguments),
                                                 " bytes: set it to sizeof(", type, ")"));
}

// What kvpool_operation_start does with a request that it has parsed.
int StartOperation(kvpool_session* session, const v1::Operation& request, kvpool_operation** operation);

inline Deadline In(uint32_t timeout_ms) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
}

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_C_KVPOOL_C_SESSION_H_
