#include "client/default_socket.h"

#include <unistd.h>

#include <cstdlib>

namespace kvpool {

std::string DefaultSocket() {
  if (const char* path = std::getenv("KVPOOL_SOCKET"); path != nullptr && *path != '\0') return path;
  if (const char* folder = std::getenv("XDG_RUNTIME_DIR"); folder != nullptr && *folder != '\0') {
    const std::string path = std::string(folder) + "/kvpool/kvpoold.sock";
    if (access(path.c_str(), F_OK) == 0) return path;
  }
  return "/run/kvpool/kvpoold.sock";
}

}  // namespace kvpool
