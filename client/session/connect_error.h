#ifndef KVPOOL_CLIENT_SESSION_DEFAULT_SOCKET_H_
#define KVPOOL_CLIENT_SESSION_DEFAULT_SOCKET_H_

#include <string>

namespace kvpool {

// Where kvpoold listens unless told otherwise: $KVPOOL_SOCKET, else $XDG_RUNTIME_DIR/kvpool/kvpoold.sock if there is
// one, else /run/kvpool/kvpoold.sock.
std::string DefaultSocket();

// Why a connection to a Unix socket fails; empty: it does not.
std::string SocketTrouble(const std::string& path, int type);

// "cannot reach kvpoold at /run/kvpool/kvpoold.sock: there is no such socket. …" with what to try. `suffix` is what the
// name of the socket in question has behind it, `type` its type. It is tried once more, as what libraries say of failed
// connections tells causes apart badly; if that works, the cause is `seen`.
std::string CannotReach(const std::string& socket, const char* suffix, int type, const std::string& seen);

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_DEFAULT_SOCKET_H_
