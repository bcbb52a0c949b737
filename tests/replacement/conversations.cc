#include "tests/replacement/conversations.h"

#include <string>

#include "gtest/gtest.h"
#include "proto/formats/trace.h"
#include "server/sim/read_workload.h"

namespace kvpool {

sim::Workload Conversations() {
  const std::string trace =
      replay::FindConversationTrace(KVPOOL_SOURCE_DIR "/../shared/traces").value_or("synthetic:chat");
  absl::StatusOr<sim::Workload> workload = sim::ReadWorkload(trace, {.max_requests = KVPOOL_TWIN_REQUESTS});
  EXPECT_TRUE(workload.ok()) << workload.status();
  return workload.ok() ? *std::move(workload) : sim::Workload();
}

}  // namespace kvpool
