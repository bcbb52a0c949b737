#include "server/access/peer.h"

#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvpool {

std::string Describe(const Peer& peer) {
  if (peer.process == nullptr) {
    return absl::StrCat(
        "network peer ", peer.address, " (certificate of ",
        peer.names.empty() ? "no subjectAltName" : absl::CHexEscape(absl::StrJoin(peer.names, ", ")),
        peer.certificate.empty() ? "" : "; SHA-256 ", peer.certificate, ")");
  }
  const PeerCredentials& process = *peer.process;
  return absl::StrCat("uid ", process.uid, " (gid ", process.gid, ", pid ", process.pid, ", cgroup ",
                      process.cgroup.empty() ? "not known" : absl::CHexEscape(process.cgroup), ")");
}

absl::Status CheckIsDaemonsUser(const Peer& peer, std::string_view what) {
  const bool trusted = peer.process != nullptr && (peer.process->uid == 0 || peer.process->uid == geteuid());
  if (trusted) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("only root and uid ", geteuid(),
                                                  ", as which the daemon runs, may ", std::string(what),
                                                  ", on the Unix socket; the caller is ", Describe(peer)));
}

}  // namespace kvpool
