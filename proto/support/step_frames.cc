#include "proto/support/step_frames.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

// Most batches and answers are smaller: one read takes several.
constexpr size_t kReadBytes = 16 << 10;
// A buffer that was larger for one frame is not kept.
constexpr size_t kMaxKeptBytes = 64 << 10;

uint32_t LoadSize(const char* bytes) {
  uint32_t size = 0;
  for (size_t i = 0; i < kStepHeaderBytes; ++i) size |= uint32_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  return size;
}

}  // namespace

absl::StatusOr<UniqueFd> ConnectStepSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path ", path, " has ", path.size(),
                                                   " bytes; an address holds ",
                                                   sizeof(address.sun_path) - 1));
  }
  path.copy(address.sun_path, path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // On a Unix socket a connection stands at once, or the listener's queue is full (EAGAIN).
  if (!socket.valid() ||
      connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      send(socket.get(), kStepPreface.data(), kStepPreface.size(), MSG_NOSIGNAL) !=
          static_cast<ssize_t>(kStepPreface.size())) {
    return absl::UnavailableError(absl::StrCat("cannot connect to ", path, ": ", std::strerror(errno)));
  }
  return socket;
}

void StepFrameReader::MakeRoom(size_t bytes) {
  if (begin_ == end_) {
    begin_ = end_ = 0;
    if (capacity_ > kMaxKeptBytes && bytes <= kMaxKeptBytes) {
      buffer_ = nullptr;
      capacity_ = 0;
    }
  }
  // What there is gets filled first: each growth copies.
  if (capacity_ > end_ && (begin_ == 0 || capacity_ - begin_ >= bytes)) return;
  // It grows as the bytes come, not by what a peer says that there will be.
  const size_t held = end_ - begin_;
  const size_t capacity = std::max(kReadBytes, std::min(bytes, 2 * held + kReadBytes));
  if (capacity > capacity_) {
    std::unique_ptr<char[]> larger(new char[capacity]);
    if (held > 0) std::memcpy(larger.get(), buffer_.get() + begin_, held);
    buffer_ = std::move(larger);
    capacity_ = capacity;
  } else {
    std::memmove(buffer_.get(), buffer_.get() + begin_, held);
  }
  begin_ = 0;
  end_ = held;
}

StepFrameReader::Outcome StepFrameReader::Next(int socket) {
  while (true) {
    size_t wanted = kReadBytes;
    if (end_ - begin_ >= kStepHeaderBytes) {
      const uint32_t header = LoadSize(buffer_.get() + begin_);
      is_end_ = (header & kStepEndBit) != 0;
      frame_bytes_ = header & ~kStepEndBit;
      if (frame_bytes_ > most_bytes_) return Outcome::kTooLarge;
      frame_begin_ = begin_ + kStepHeaderBytes;
      if (end_ - frame_begin_ >= frame_bytes_) {
        begin_ = frame_begin_ + frame_bytes_;
        return Outcome::kFrame;
      }
      wanted = kStepHeaderBytes + frame_bytes_;
    }
    if (drained_) return Outcome::kNoneYet;
    MakeRoom(wanted);
    const size_t room = capacity_ - end_;
    const ssize_t got = recv(socket, buffer_.get() + end_, room, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      drained_ = true;
      return Outcome::kNoneYet;
    }
    if (got <= 0) return Outcome::kHangup;
    end_ += static_cast<size_t>(got);
    // There was room for more: a look that finds nothing is saved. Not after a hangup, of which poll() tells once.
    drained_ = static_cast<size_t>(got) < room && !hangup_;
  }
}

StepFrameWriter::Outcome StepFrameWriter::Write(int socket, std::string_view bytes, bool is_end) {
  const uint32_t size = static_cast<uint32_t>(bytes.size()) | (is_end ? kStepEndBit : 0);
  std::array<char, kStepHeaderBytes> header;
  for (size_t i = 0; i < kStepHeaderBytes; ++i) header[i] = static_cast<char>(size >> (8 * i));
  std::array<iovec, 2> parts = {iovec{header.data(), header.size()},
                                iovec{const_cast<char*>(bytes.data()), bytes.size()}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return Outcome::kBroken;
  const size_t done = sent < 0 ? 0 : static_cast<size_t>(sent);
  if (done == header.size() + bytes.size()) return Outcome::kSent;
  pending_.assign(header.data(), header.size());
  pending_.append(bytes);
  sent_ = done;
  return Outcome::kPending;
}

StepFrameWriter::Outcome StepFrameWriter::Flush(int socket) {
  Outcome outcome = Outcome::kSent;
  while (pending()) {
    const ssize_t sent =
        send(socket, pending_.data() + sent_, pending_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Outcome::kPending;
    if (sent < 0) {
      outcome = Outcome::kBroken;
      break;
    }
    sent_ += static_cast<size_t>(sent);
  }
  pending_ = std::string();
  sent_ = 0;
  return outcome;
}

}  // namespace kvpool
