#include "server/rpc/openings.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// All processes of a machine's engines may come at once, as after a restart of the daemon: a user has half of the places.
constexpr size_t kMostWaiting = 2048;
constexpr size_t kMostWaitingBytes = 64 << 20;

}  // namespace

Openings::Openings(Daemon* daemon, RpcStats* stats, int threads)
    : daemon_(daemon),
      stats_(stats),
      workers_({.calls = "openings",
                .threads = threads,
                .most_waiting = kMostWaiting,
                .most_waiting_bytes = kMostWaitingBytes,
                .turns_by = "user"}) {}

void Openings::OpenSession(const Caller& caller, const v1::OpenSession* request,
                           v1::OpenSessionResult* result, Done done) {
  Run(
      "OpenSession", caller, request->ByteSizeLong(),
      [this, &caller, request, result] {
        RETURN_IF_ERROR(daemon_->OpenSession(*request, result, &caller.gone));
        return CheckOwned(caller, result);
      },
      std::move(done));
}

void Openings::AddMember(const Caller& caller, const v1::AddMember* request, v1::AddMemberResult* result,
                         Done done) {
  Run(
      "AddMember", caller, request->ByteSizeLong(),
      [this, &caller, request, result] {
        RETURN_IF_ERROR(daemon_->AddMember(*request, result));
        return CheckOwned(caller, result);
      },
      std::move(done));
}

template <typename Result>
absl::Status Openings::CheckOwned(const Caller& caller, Result* result) {
  const absl::StatusOr<std::shared_ptr<Member>> member = daemon_->FindMember(result->member_token());
  if (!member.ok()) {  // It has hung up and died since, so that nobody can say whose it was.
    result->Clear();
    return absl::AbortedError("the process behind attach_token has ended");
  }
  absl::Status owned = CheckOwner(caller.peer, **member);
  if (!owned.ok()) {
    OnUndelivered(result->member_token());
    result->Clear();
  }
  return owned;
}

void Openings::Run(std::string_view method, const Caller& caller, size_t bytes,
                   std::function<absl::Status()> open, Done done) {
  absl::Status engine =
      daemon_->access().Admit(caller.peer, AccessRole::kEngine, {method.data(), method.size()}).status();
  if (!engine.ok()) return Refuse(method, caller, std::move(engine), done);
  // The tenant is not known yet.
  absl::Status started = workers_.Start(
      {.bytes = bytes, .tenant = UserOf(caller.peer)}, [this, method, &caller, open = std::move(open), done] {
        absl::Status opened = caller.gone ? absl::CancelledError("the caller is gone") : open();
        if (opened.ok()) return done(std::move(opened));
        Refuse(method, caller, std::move(opened), done);
      });
  if (!started.ok()) Refuse(method, caller, std::move(started), done);
}

void Openings::Refuse(std::string_view method, const Caller& caller, absl::Status status, const Done& done) {
  stats_->CountRefusedOpening(status.code());
  refusals_.Add(caller.peer, method, status);
  done(std::move(status));
}

}  // namespace kvpool
