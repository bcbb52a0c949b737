#include "server/state_dir.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/sockets.h"

namespace kvpool {
namespace {

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&out, "\\u", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad4));
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

}  // namespace

absl::StatusOr<StateDir> StateDir::Open(const std::string& path, Place* place) {
  RETURN_IF_ERROR(MakeOwnDirectory("--state-dir", path));
  const absl::Status locked = place->Lock(path + "/kvpoold.lock");
  if (absl::IsAlreadyExists(locked)) return locked;
  uint64_t last = 0;
  std::ifstream(path + "/epoch") >> last;
  const uint64_t epoch =
      place->NextEpoch(std::max(last + 1, static_cast<uint64_t>(absl::ToUnixMillis(absl::Now()))));
  const absl::Status kept = WriteFileAtomically(path + "/epoch", absl::StrCat(epoch, "\n"));
  if (!locked.ok()) LogWarning("state directory not locked", {{"path", path}, {"error", locked}});
  if (!kept.ok()) {
    LogWarning("epoch not kept", {{"path", path},
                                  {"error", kept},
                                  {"epoch", epoch},
                                  {"last_kept", last},
                                  {"next", "by the clock, which must not go back"}});
  }
  StateDir state_dir(path, epoch);
  // A killed daemon has left its facts, of a process that is gone.
  if (locked.ok()) state_dir.Withdraw();
  return state_dir;
}

void StateDir::Announce(const ServingFacts& facts) const {
  const absl::Status written = WriteFileAtomically(
      path_ + "/kvpoold.json",
      absl::StrCat("{\"pid\":", getpid(), ",\"epoch\":", epoch_, ",\"version\":", Quoted(facts.version),
                   ",\"socket\":", Quoted(facts.socket), ",\"attach_socket\":", Quoted(facts.attach_socket),
                   ",\"devices\":", Quoted(facts.devices), ",\"metrics_host\":", Quoted(facts.metrics_host),
                   ",\"metrics_port\":", facts.metrics_port, ",\"operator_port\":", facts.operator_port,
                   "}\n"));
  if (!written.ok()) LogWarning("kvpoold.json not written", {{"path", path_}, {"error", written}});
}

void StateDir::Withdraw() const { std::remove((path_ + "/kvpoold.json").c_str()); }

}  // namespace kvpool
