// How a daemon ends for another one: an operator's call looks whether that can be, and main carries it out.
//
//   the call   is the caller let do this; may the program be started; could this one start again
//              would every session come back: waits for openings and for what runs on devices
//              lets no batch and no call begin, and looks again
//              names the program to the keeper: from here on there is no way back
//   main       ends calls, connections and threads, and then the process, with kHandsOver
//
// Engines see what they see when a daemon is killed, but for one thing: nothing was under way. What they sent last has
// either been applied whole or not been read, and they send it again to the next daemon.
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "proto/cli/version.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/kvpoold.h"
#include "server/program.h"
#include "server/rpc/operator_tls.h"
#include "server/rpc/tls_files.h"

namespace kvpool {
namespace {

// Sessions that open at this moment, and operations on devices, have so long to get done.
constexpr std::chrono::milliseconds kStopPatience{1000};
// From the first call that gRPC takes to the start of all else: milliseconds, but for a machine that is busy.
constexpr std::chrono::seconds kStartPatience{30};
// What kStopPatience is, once nothing new begins. Engines wait meanwhile.
constexpr std::chrono::milliseconds kRestingPatience{100};
constexpr std::chrono::milliseconds kPause{1};
// For answers on their way, the operator's among them.
constexpr std::chrono::milliseconds kLastAnswers{100};

}  // namespace

absl::Status Kvpoold::CheckSettingsOfToday() const {
  absl::StatusOr<Settings> settings = ParseSettings(arguments_);
  absl::Status status = settings.status();
  if (status.ok()) status = settings->Placed(AccessPolicyOf(settings->access).status());
  if (status.ok() && !settings->operator_tls_listen.empty())
    status = settings->Placed(OperatorTls::Open(settings->operator_tls).status());
  if (status.ok() && !settings->metrics_tls.certificate.empty())
    status = settings->Placed(WatchedTlsFiles::Open(kMetricsTlsNames, settings->metrics_tls).status());
  if (status.ok()) return status;
  return absl::FailedPreconditionError(
      absl::StrCat("this program could not start again, if the next one failed: ", status.message()));
}

absl::Status Kvpoold::AwaitSettled(std::chrono::milliseconds patience, bool end_sessions) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (true) {
    const bool busy = grpc_server_->busy();
    const std::string lost = end_sessions ? "" : daemon_->WhoCanNotComeBack();
    if (!busy && lost.empty()) return absl::OkStatus();
    if (std::chrono::steady_clock::now() >= until) {
      return absl::FailedPreconditionError(
          lost.empty() ? std::string("openings or large calls are under way; nothing has changed")
                       : absl::StrCat("some sessions could not come back, and nothing has changed: ", lost));
    }
    std::this_thread::sleep_for(kPause);
  }
}

absl::Status Kvpoold::PrepareUpgrade(const Peer& peer, const v1::UpgradeRequest& request,
                                     v1::UpgradeResponse* response) {
  if (keeper_ == nullptr) {
    return absl::FailedPreconditionError(
        "an upgrade needs --keeper=on: without a keeper all that is cached, and all sessions, end with this "
        "process");
  }
  if (program_.empty())
    return absl::FailedPreconditionError(
        "this process's keeper starts none: end it and start the next one, which goes on with what is "
        "cached");
  if (keeper_->lost())
    return absl::FailedPreconditionError("the keeper is gone, and nothing outlives this process");
  const auto ends = absl::FailedPreconditionError("this process was asked to end: start the next one then");
  if (ending_) return ends;
  if (!request.binary().empty()) RETURN_IF_ERROR(CheckIsDaemonsUser(peer, "name a program"));
  const std::string& path = request.binary().empty() ? program_ : request.binary();
  ProgramNeeds needs;
  if (!request.cold()) needs.tables = daemon_->KeptTables();
  ASSIGN_OR_RETURN(const NextProgram program, OpenProgram(path, needs));
  RETURN_IF_ERROR(CheckSettingsOfToday());
  const bool end_sessions = request.end_sessions() || request.cold();
  RETURN_IF_ERROR(AwaitSettled(kStopPatience, end_sessions));
  grpc_server_->Rest();
  absl::Cleanup go_on = [this] { grpc_server_->GoOn(); };
  RETURN_IF_ERROR(AwaitSettled(kRestingPatience, end_sessions));
  if (ending_) return ends;
  // What is kept for a cold one is not shown to it, and its locks would be taken.
  if (request.cold() || !program.takes_place) place_.Withdraw();
  const absl::Status named =
      keeper_->HandOverTo(program.file.get(), request.cold() ? HandOver::kCold : HandOver::kWarm);
  if (!named.ok()) {
    place_.Keep();
    return named;
  }
  std::move(go_on).Cancel();
  response->set_version(Version());
  response->set_daemon_epoch(state_dir_.epoch());
  response->set_binary(path);
  for (const std::string& change : daemon_->TierChanges()) {
    LogWarning("the next daemon has other tiers", {{"change", change}});
    response->add_tier_changes(change);
  }
  return absl::OkStatus();
}

absl::Status Kvpoold::Upgrade(const Peer& peer, const v1::UpgradeRequest& request,
                              v1::UpgradeResponse* response) {
  for (const auto until = std::chrono::steady_clock::now() + kStartPatience;
       !opened_.load(std::memory_order_acquire); std::this_thread::sleep_for(kPause)) {
    if (stopping_ || std::chrono::steady_clock::now() >= until)
      return absl::UnavailableError("this process has only started, and does not serve yet: try again");
  }
  if (upgrading_.exchange(true)) return absl::FailedPreconditionError("another upgrade is under way");
  absl::Status prepared = PrepareUpgrade(peer, request, response);
  if (!prepared.ok()) {
    upgrading_ = false;
    return prepared;
  }
  handing_over_ = true;
  kill(getpid(), kHandOverSignal);
  return absl::OkStatus();
}

bool Kvpoold::EndForNext() {
  if (keeper_ == nullptr || !program_.empty()) return false;
  keeper_->AwaitDropped();  // A keeper that is gone is noticed by it.
  if (keeper_->lost()) return false;
  // What is still under way after that ends as by a kill.
  AwaitSettled(kStopPatience, /*end_sessions=*/true).IgnoreError();
  grpc_server_->Rest();
  AwaitSettled(kRestingPatience, /*end_sessions=*/true).IgnoreError();
  keeper_->Ending();
  HandOver();
  return true;
}

void Kvpoold::HandOver() {
  keeper_finder_.reset();
  state_dir_.Withdraw();
  daemon_->EndSoon();
  const auto until = std::chrono::steady_clock::now() + kLastAnswers;
  while (!grpc_server_->quiet() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(kPause);
  // An end in good order would wait for each client to say that it has heard, which an idle one does late.
  grpc_server_->Stop(std::chrono::milliseconds(0));
  attach_server_->HangUp();
  daemon_->EndThreads();
}

}  // namespace kvpool
