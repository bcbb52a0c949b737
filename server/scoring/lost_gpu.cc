#include "server/scoring/lost_gpu.h"

#include <string>
#include <utility>

#include "cuda/device.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

std::function<void()>& Tell() {
  static auto& tell = *new std::function<void()>;
  return tell;
}

}  // namespace

void BeforeEndForLostGpu(std::function<void()> tell) { Tell() = std::move(tell); }

void EndIfGpuIsLost(const absl::Status& status, absl::string_view doing) {
  if (!IsSticky(status)) return;
  if (Tell() != nullptr) Tell()();
  KVPOOL_CHECK(!IsSticky(status), "%s: %s", std::string(doing).c_str(), status.ToString().c_str());
}

}  // namespace kvpool
