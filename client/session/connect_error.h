// Why a connection to kvpoold's socket failed, in words that help.
#ifndef KVPOOL_CLIENT_SESSION_CONNECT_ERROR_H_
#define KVPOOL_CLIENT_SESSION_CONNECT_ERROR_H_

#include <string>

namespace kvpool {

// Tries to connect to a Unix socket and tells why that fails; empty: it does not.
std::string SocketTrouble(const std::string& path, int type);

// "cannot reach kvpoold at /run/kvpool/kvpoold.sock: there is no such socket. …" with what to try next. The
// socket that failed is `socket` + `suffix`, of this `type`. Libraries tell the causes of a failed
// connection apart badly, so this function connects once more to find out; if that succeeds, `seen` is
// given as the cause.
std::string CannotReach(const std::string& socket, const char* suffix, int type, const std::string& seen);

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_CONNECT_ERROR_H_
