#include "client/session/connect_error.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

std::string SocketTrouble(const std::string& path, int type) {
  struct stat file;
  if (stat(path.c_str(), &file) != 0) {
    return errno == ENOENT ? "there is no such socket" : std::string(std::strerror(errno));
  }
  if (!S_ISSOCK(file.st_mode)) return "that is not a socket";
  sockaddr_un address{.sun_family = AF_UNIX};
  if (path.size() >= sizeof(address.sun_path)) return "that path is too long for a socket";
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return "";
  switch (errno) {
    case ECONNREFUSED:
      return "connection refused: kvpoold has ended without removing the socket";
    case EACCES:
      return absl::StrCat("user ", getuid(), " may not use the socket: it belongs to user ", file.st_uid,
                          ", group ", file.st_gid);
    case EAGAIN:
      return "too many connections wait for kvpoold to take them";
    default:
      return std::strerror(errno);
  }
}

std::string CannotReach(const std::string& socket, const char* suffix, int type, const std::string& seen) {
  const std::string trouble = SocketTrouble(socket + suffix, type);
  return absl::StrCat("cannot reach kvpoold at ", socket, ": ", trouble.empty() ? seen : trouble,
                      ". Is kvpoold running, and on this socket? KVPOOL_SOCKET or --socket names another");
}

}  // namespace kvpool
