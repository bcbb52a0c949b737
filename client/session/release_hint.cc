#include "client/release_hint.h"

#include "absl/strings/str_cat.h"

namespace kvpool {

absl::Status CheckHint(const ReleaseHint& hint) {
  if (!v1::Reuse_IsValid(hint.reuse)) {
    return absl::InvalidArgumentError(absl::StrCat("ReleaseHint.reuse is ", static_cast<int>(hint.reuse),
                                                   "; must be 0 to ", v1::Reuse_MAX));
  }
  if (hint.category > ReleaseHint::kMaxCategory) {
    return absl::InvalidArgumentError(absl::StrCat("ReleaseHint.category is ", hint.category,
                                                   "; must be 0 to ", ReleaseHint::kMaxCategory));
  }
  return absl::OkStatus();
}

}  // namespace kvpool
