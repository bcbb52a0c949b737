// Where kvpoold and its clients meet when nobody names a socket.
//
//   daemon (without --socket)    listens on  $XDG_RUNTIME_DIR/kvpool/kvpoold.sock, if the variable is set,
//                                            /run/kvpool/kvpoold.sock otherwise
//   client                       connects to $KVPOOL_SOCKET, if the variable is set,
//                                            the daemon's path above, if that file exists,
//                                            /run/kvpool/kvpoold.sock otherwise: a daemon of the system
#ifndef KVPOOL_PROTO_SUPPORT_DEFAULT_SOCKET_H_
#define KVPOOL_PROTO_SUPPORT_DEFAULT_SOCKET_H_

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace kvpool {

enum class SocketUser { kDaemon, kClient };

inline std::string DefaultSocket(SocketUser user) {
  constexpr char kName[] = "/kvpool/kvpoold.sock";
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const bool client = user == SocketUser::kClient;
  if (client && !variable("KVPOOL_SOCKET").empty()) return variable("KVPOOL_SOCKET");
  if (const std::string folder = variable("XDG_RUNTIME_DIR"); !folder.empty()) {
    const std::string path = folder + kName;
    if (!client || access(path.c_str(), F_OK) == 0) return path;
  }
  return std::string("/run") + kName;
}

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_DEFAULT_SOCKET_H_
