#include "proto/cli/version.h"

#include "absl/strings/str_cat.h"

namespace kvpool {

const char* Commit() { return KVPOOL_COMMIT; }

std::string VersionText(absl::string_view program) {
  return absl::StrCat(program, " ", Version(), " (commit ", Commit(), "), CUDA: built ",
                      KVPOOL_BUILT_WITH_CUDA, "\n");
}

}  // namespace kvpool
