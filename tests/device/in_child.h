// Runs a case in a process of its own: a process has one driver for life.
#ifndef KVPOOL_TESTS_DEVICE_IN_CHILD_H_
#define KVPOOL_TESTS_DEVICE_IN_CHILD_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace kvpool {

using Environment = std::vector<std::pair<std::string, std::string>>;

// Runs `body` in a fresh child process with these variables set, and returns its status as text, with "sticky
// " before a sticky error.
std::string InChild(const Environment& environment, const std::function<absl::Status()>& body);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_IN_CHILD_H_
