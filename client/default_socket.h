#ifndef KVPOOL_CLIENT_DEFAULT_SOCKET_H_
#define KVPOOL_CLIENT_DEFAULT_SOCKET_H_

#include <string>

namespace kvpool {

// Where kvpoold listens unless told otherwise: $KVPOOL_SOCKET, else $XDG_RUNTIME_DIR/kvpool/kvpoold.sock if there is
// one, else /run/kvpool/kvpoold.sock.
std::string DefaultSocket();

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_DEFAULT_SOCKET_H_
