#include "server/state_dir.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/support/status_macros.h"

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

absl::StatusOr<StateDir> StateDir::Open(const std::string& path) {
  RETURN_IF_ERROR(MakeOwnDirectory("--state-dir", path));
  ASSIGN_OR_RETURN(FileLock lock, FileLock::Take(path + "/kvpoold.lock"));
  uint64_t last = 0;
  std::ifstream(path + "/epoch") >> last;
  const uint64_t epoch =
      std::max<uint64_t>(last + 1, static_cast<uint64_t>(absl::ToUnixSeconds(absl::Now())));
  RETURN_IF_ERROR(WriteFileAtomically(path + "/epoch", absl::StrCat(epoch, "\n")));
  return StateDir(path, std::move(lock), epoch);
}

absl::Status StateDir::Announce(const ServingFacts& facts) const {
  return WriteFileAtomically(
      path_ + "/kvpoold.json",
      absl::StrCat("{\"pid\":", getpid(), ",\"epoch\":", epoch_, ",\"version\":", Quoted(facts.version),
                   ",\"socket\":", Quoted(facts.socket), ",\"attach_socket\":", Quoted(facts.attach_socket),
                   ",\"devices\":", Quoted(facts.devices), ",\"metrics_host\":", Quoted(facts.metrics_host),
                   ",\"metrics_port\":", facts.metrics_port, ",\"operator_port\":", facts.operator_port,
                   "}\n"));
}

void StateDir::Withdraw() const { std::remove((path_ + "/kvpoold.json").c_str()); }

}  // namespace kvpool
