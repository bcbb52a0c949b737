#include "cuda/sticky.h"

#include "absl/strings/cord.h"
#include "cuda/device.h"

namespace kvpool {
namespace {

// The mark is a payload and not a status code, which other errors may have too.
constexpr char kStickyUrl[] = "kvpool/sticky";

}  // namespace

void MarkSticky(absl::Status* status) { status->SetPayload(kStickyUrl, absl::Cord()); }

bool IsSticky(const absl::Status& status) { return status.GetPayload(kStickyUrl).has_value(); }

}  // namespace kvpool
