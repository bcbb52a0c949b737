// What a daemon asks and does before it ends for another one.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/housekeeper.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/tier_mover.h"
#include "server/events/event_log.h"
#include "server/scoring/device_runner.h"
#include "server/space/session.h"
#include "server/space/space.h"

namespace kvpool {
namespace {

// An error names so many sessions at most.
constexpr size_t kMostNamed = 3;

// Why the session could not come back to a daemon that begins now; empty: it could. REQUIRES: its space's mutex.
std::string WhyNotBack(const Session& session) {
  const bool joined = std::count(session.by_rank.begin(), session.by_rank.end(), nullptr) == 0;
  if (!joined || session.holder == kNobody || session.sink == kNullRef)
    return "not all of its members have joined and mapped its memory";
  for (const std::unique_ptr<Member>& member : session.members) {
    if (member->log == nullptr) return "the keeper does not know it";
    if (WhyLost why = member->log->WhyOver(); why.lost()) return why.text;
    if (member->identity.credentials.pid == 0)
      return absl::StrCat("member ", member->index, " is in a pid namespace that is not seen here");
  }
  return "";
}

}  // namespace

std::string Daemon::WhoCanNotComeBack() {
  std::vector<std::string> named;
  size_t lost = 0;
  for (const std::shared_ptr<Session>& session : registry_->Sessions()) {
    SpaceLock lock(*session->space);
    if (session->ended) continue;
    const std::string why = WhyNotBack(*session);
    if (why.empty() || ++lost > kMostNamed) continue;
    named.push_back(
        absl::StrCat("session ", session->terms.id, " (", session->terms.client_name, "): ", why));
  }
  if (lost > kMostNamed) named.push_back(absl::StrCat(lost - kMostNamed, " more"));
  return absl::StrJoin(named, "; ");
}

std::vector<TableVersion> Daemon::KeptTables() const {
  std::vector<TableVersion> tables(1);
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    if (space->table == nullptr) continue;
    SpaceLock lock(*space);
    // Where slabs lie is a thing of its own, which a program of before there were holes does not start with.
    tables.push_back(space->state.give_back.keeps_places()
                         ? TableVersion{.version = kFirstWithHoles, .oldest_reader = kFirstWithHoles}
                         : space->table->version());
  }
  return tables;
}

void Daemon::EndThreads() {
  stopping_.store(true, std::memory_order_relaxed);
  if (stand_ins_.joinable()) stand_ins_.join();
  verifier_.reset();
  // It takes turns at spaces, and whoever has a turn may wake the housekeeper or start a device operation.
  if (tier_mover_ != nullptr) tier_mover_->Stop();
  StopDeviceOperations();
  for (size_t device = 0; device < runners_.size() && !options_.device_threads; ++device) {
    while (RunDevicePart(device)) {
    }
  }
  // Operations read slabs, which may go after this; the end of one may wake the housekeeper. The runners themselves stay:
  // a scrape may look at them.
  for (const std::unique_ptr<DeviceRunner>& runner : runners_) {
    if (runner != nullptr) runner->End();
  }
  housekeeper_.reset();
  // A process that ends in haste would not write it.
  if (event_log_ != nullptr) event_log_->Drain();
}

}  // namespace kvpool
