// Openings: OpenSession and AddMember, as unary calls and as first batches of Step streams. One may wait for
// gigabytes of slabs, so that openings have threads of their own, at which users take turns. Thread-safe.
#ifndef KVPOOL_SERVER_RPC_OPENINGS_H_
#define KVPOOL_SERVER_RPC_OPENINGS_H_

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "kvpool/v1/engine.pb.h"
#include "server/access/refusal_log.h"
#include "server/daemon/daemon.h"
#include "server/rpc/call_workers.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_stats.h"

namespace kvpool {

class Openings {
 public:
  // Openings that make slabs hold a thread for as long as that takes, while others find the memory they need: so
  // many of the former do not keep the latter waiting.
  static constexpr int kThreads = 8;
  // The status is its own: no thread shares the text of an error with the one that made it.
  using Done = std::function<void(absl::Status)>;

  // `daemon` and `stats` outlive it. No threads: tests call RunReady.
  Openings(Daemon* daemon, RpcStats* stats, int threads = kThreads);

  // Both call `done` once: on a thread of theirs or, if too many openings wait, within the call. All arguments are
  // valid until then. An opening whose caller is gone is given up, at its next slab at the latest. PERMISSION_DENIED: the
  // caller is no engine.
  void OpenSession(const Caller& caller, const v1::OpenSession* request, v1::OpenSessionResult* result,
                   Done done);
  void AddMember(const Caller& caller, const v1::AddMember* request, v1::AddMemberResult* result, Done done);
  bool idle() { return workers_.idle(); }
  bool RunReady() { return workers_.RunReady(); }
  // The answer with this token has reached nobody: what it opened is undone.
  void OnUndelivered(std::string_view member_token) { daemon_->OnUndelivered(member_token); }

 private:
  // An attach token serves the uid of its connection. If the caller is another, what was opened is undone.
  template <typename Result>
  absl::Status CheckOwned(const Caller& caller, Result* result);
  void Run(std::string_view method, const Caller& caller, size_t bytes, std::function<absl::Status()> open,
           Done done);
  void Refuse(std::string_view method, const Caller& caller, absl::Status status, const Done& done);

  Daemon* const daemon_;
  RpcStats* const stats_;
  RefusalLog refusals_{"opening refused"};
  CallWorkers workers_;  // It is the last member: its threads use all the others.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_OPENINGS_H_
