// The audit lines of the log: operator calls that change something, and openings that were refused, each with
// who asked and what came of it. Thread-safe.
#ifndef KVPOOL_SERVER_RPC_AUDIT_H_
#define KVPOOL_SERVER_RPC_AUDIT_H_

#include <google/protobuf/message.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "proto/support/mutex.h"
#include "server/rpc/caller.h"

namespace kvpool {

// A line with the scalar fields of both messages, and the sizes of repeated ones. Text is cut after 256 bytes.
void AuditOperatorCall(const Peer& peer, std::string_view method, const google::protobuf::Message& request,
                       const google::protobuf::Message& response, const absl::Status& status);

// An engine that is refused may come back at once, again and again: of each reason, a status code, only kMostLines
// are logged in kWindow. The next line after it says how many were left out.
class RefusedOpenings {
 public:
  static constexpr uint32_t kMostLines = 5;
  static constexpr auto kWindow = std::chrono::seconds(10);

  void Audit(const Peer& peer, std::string_view method, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Reason {
    std::chrono::steady_clock::time_point window_begin;
    uint32_t lines = 0;
    uint64_t left_out = 0;
  };

  Mutex mu_;
  std::array<Reason, 17> reasons_ ABSL_GUARDED_BY(mu_);  // Indexed by status code.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_AUDIT_H_
