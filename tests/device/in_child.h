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

// What `body` answers in a fresh child process with these variables set, as text; "sticky " before errors that are.
std::string InChild(const Environment& environment, const std::function<absl::Status()>& body);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_IN_CHILD_H_
