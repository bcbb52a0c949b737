// What this build is.
#ifndef KVPOOL_PROTO_CLI_VERSION_H_
#define KVPOOL_PROTO_CLI_VERSION_H_

#include <string>

#include "absl/strings/string_view.h"
#include "kvpool/version.h"

namespace kvpool {

// The checkout's commit when it was configured, with "-dirty" behind it if files had changed; or "unknown".
const char* Commit();

// What --version prints: "kvpoold 0.1.0 (commit 1a2b3c4d5e6f), CUDA: built with\n".
std::string VersionText(absl::string_view program);

}  // namespace kvpool

#endif  // KVPOOL_PROTO_CLI_VERSION_H_
