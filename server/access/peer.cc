#include "server/access/peer.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvpool {

std::string Describe(const Peer& peer) {
  if (peer.process == nullptr) {
    return absl::StrCat(
        "network peer ", peer.address, " (certificate of ",
        peer.names.empty() ? "no subjectAltName" : absl::CHexEscape(absl::StrJoin(peer.names, ", ")), ")");
  }
  const PeerCredentials& process = *peer.process;
  return absl::StrCat("uid ", process.uid, " (gid ", process.gid, ", pid ", process.pid, ", cgroup ",
                      process.cgroup.empty() ? "not known" : absl::CHexEscape(process.cgroup), ")");
}

}  // namespace kvpool
