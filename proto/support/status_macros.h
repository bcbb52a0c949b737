// Abseil 20220623 has no status macros.
#ifndef KVPOOL_PROTO_SUPPORT_STATUS_MACROS_H_
#define KVPOOL_PROTO_SUPPORT_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define KVPOOL_STATUS_CONCAT_INNER(a, b) a##b
#define KVPOOL_STATUS_CONCAT(a, b) KVPOOL_STATUS_CONCAT_INNER(a, b)

// Returns from the function when `expression` is not OK.
#define RETURN_IF_ERROR(expression)                  \
  do {                                               \
    absl::Status kvpool_status_ = (expression);      \
    if (!kvpool_status_.ok()) return kvpool_status_; \
  } while (false)

// ASSIGN_OR_RETURN(auto value, Compute());
#define ASSIGN_OR_RETURN(lhs, expression) \
  KVPOOL_ASSIGN_OR_RETURN(KVPOOL_STATUS_CONCAT(kvpool_status_or_, __LINE__), lhs, expression)
#define KVPOOL_ASSIGN_OR_RETURN(statusor, lhs, expression) \
  auto statusor = (expression);                            \
  if (!statusor.ok()) return statusor.status();            \
  lhs = std::move(statusor).value()

#endif  // KVPOOL_PROTO_SUPPORT_STATUS_MACROS_H_
