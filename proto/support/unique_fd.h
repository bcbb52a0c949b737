// An owned file descriptor, closed by the destructor.
#ifndef KVPOOL_PROTO_SUPPORT_UNIQUE_FD_H_
#define KVPOOL_PROTO_SUPPORT_UNIQUE_FD_H_

#include <unistd.h>

namespace kvpool {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) Reset(other.Release());
    return *this;
  }
  ~UniqueFd() { Reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  // No retry on EINTR: Linux has closed the descriptor by then.
  void Reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_UNIQUE_FD_H_
