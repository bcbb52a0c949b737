// Makes what has the size that a peer asked for, so that a system without memory for it refuses that peer and ends nobody.
#ifndef KVPOOL_SERVER_BASE_OR_EXHAUSTED_H_
#define KVPOOL_SERVER_BASE_OR_EXHAUSTED_H_

#include <new>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace kvpool {

// What `make` answers. RESOURCE_EXHAUSTED: it threw std::bad_alloc, as VirtualArray and operator new do; the message begins with
// `what`, which names what was to be made, and its size. REQUIRES: half of it leaves nothing behind.
template <typename Make>
absl::StatusOr<std::invoke_result_t<Make>> OrExhausted(const std::string& what, Make make) {
  try {
    return make();
  } catch (const std::bad_alloc& error) {
    return absl::ResourceExhaustedError(absl::StrCat(what, ": ", error.what()));
  }
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_OR_EXHAUSTED_H_
