#include "tests/fuzz/stream_peer.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "proto/support/check.h"

namespace kvpool::fuzz {
namespace {

// Whoever does not read may have so much waiting in its socket, as the kernel counts it, and more: nothing was held back.
constexpr size_t kSurelyTaken = 64 << 10, kKernelBytesOfFrame = 1024;
constexpr size_t kMaxToSay = 4 << 20;

uint32_t SizeAt(std::string_view bytes) {
  uint32_t header;  // Little-endian, as this machine is.
  std::memcpy(&header, bytes.data(), sizeof(header));
  return header;
}

bool Opens(const v1::StepRequest& request) {
  return request.operations_size() == 1 &&
         (request.operations(0).has_open_session() || request.operations(0).has_add_member());
}

}  // namespace

void StreamPeer::Say(std::string_view bytes) {
  if (!half_closed_ && to_say_.size() + bytes.size() <= kMaxToSay) to_say_ += bytes;
}

void StreamPeer::SayFrame(std::string_view bytes) {
  const auto size = static_cast<uint32_t>(bytes.size());
  std::string frame(reinterpret_cast<const char*>(&size), sizeof(size));
  Say(frame += bytes);
}

bool StreamPeer::Send(size_t most) {
  const size_t size = std::min(most, to_say_.size());
  if (size == 0 || is_over()) return false;
  const ssize_t took = send(socket(), to_say_.data(), size, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (took < 0) {
    KVPOOL_CHECK(errno == EAGAIN || errno == EPIPE || errno == ECONNRESET, "send: errno %d", errno);
    if (errno != EAGAIN) to_say_.clear();
    return false;
  }
  Sent({to_say_.data(), static_cast<size_t>(took)});
  to_say_.erase(0, static_cast<size_t>(took));
  return true;
}

void StreamPeer::Sent(std::string_view bytes) {
  const size_t of_preface = std::min(kStepPreface.size() - preface_.size(), bytes.size());
  preface_ += bytes.substr(0, of_preface);
  sent_ += bytes.substr(of_preface);
  size_t at = 0;
  while (!faulty_ && sent_.size() - at >= kStepHeaderBytes) {
    const std::string_view left = std::string_view(sent_).substr(at);
    const uint32_t header = SizeAt(left);
    const size_t frame_bytes = header & ~kStepEndBit;
    faulty_ = frame_bytes > kMaxStepRequestBytes;
    if (faulty_ || left.size() < kStepHeaderBytes + frame_bytes) break;
    v1::StepRequest request;
    faulty_ = (header & kStepEndBit) != 0 ||
              !request.ParseFromArray(left.data() + kStepHeaderBytes, static_cast<int>(frame_bytes));
    if (!faulty_) asked_.push_back({.sequence = request.sequence(), .opens = Opens(request)});
    at += kStepHeaderBytes + frame_bytes;
  }
  sent_.erase(0, at);
}

void StreamPeer::HalfClose() {
  half_closed_ = true;
  to_say_.clear();
  shutdown(socket(), SHUT_WR);
}

void StreamPeer::Deafen() {
  deaf_ = true;
  shutdown(socket(), SHUT_RD);
}

bool StreamPeer::Hear(size_t most, const std::function<void(const v1::StepResponse&)>& heard) {
  if (deaf_ || is_over()) return false;
  std::array<char, 4096> bytes;
  const ssize_t size = recv(socket(), bytes.data(), std::min(most, bytes.size()), MSG_DONTWAIT);
  if (size < 0 && errno == EAGAIN) return false;
  if (size <= 0) {
    OnHangup();
    return true;
  }
  KVPOOL_CHECK(is_stream(), "the acceptor speaks");
  coming_.append(bytes.data(), static_cast<size_t>(size));
  size_t at = 0;
  while (coming_.size() - at >= kStepHeaderBytes) {
    const std::string_view left = std::string_view(coming_).substr(at);
    const uint32_t header = SizeAt(left);
    const size_t frame_bytes = header & ~kStepEndBit;
    KVPOOL_CHECK(!ended_, "%zu bytes after the stream's end", left.size());
    KVPOOL_CHECK(frame_bytes <= kMaxStepResponseBytes, "an answer of %zu bytes", frame_bytes);
    if (left.size() < kStepHeaderBytes + frame_bytes) break;
    v1::StepResponse response;
    KVPOOL_CHECK(response.ParseFromArray(left.data() + kStepHeaderBytes, static_cast<int>(frame_bytes)),
                 "an answer that does not parse");
    at += kStepHeaderBytes + frame_bytes;
    ++heard_frames_;
    heard_bytes_ += frame_bytes;
    if ((header & kStepEndBit) != 0) {
      OnEnd(response);
    } else {
      OnFrame(response);
      heard(response);
    }
  }
  coming_.erase(0, at);
  KVPOOL_CHECK(!ended_ || coming_.empty(), "%zu bytes after the stream's end", coming_.size());
  return true;
}

void StreamPeer::OnFrame(const v1::StepResponse& response) {
  for (const v1::Completion& completion : response.completions()) {
    KVPOOL_CHECK(!completion.result().parked(), "a completion that is parked");
  }
  if (response.sequence() == 0 && response.results_size() == 0 && response.code() == 0) {
    KVPOOL_CHECK(response.completions_size() + response.notices_size() > 0, "a frame that says nothing");
    return;
  }
  KVPOOL_CHECK(!asked_.empty(), "an answer to %lu, which was not asked or has an answer",
               response.sequence());
  const Asked asked = asked_.front();
  asked_.pop_front();
  const bool opened = asked.opens && response.sequence() == 0 && response.results_size() == 1;
  KVPOOL_CHECK(opened || response.sequence() == asked.sequence, "%lu is answered where %lu comes first",
               response.sequence(), asked.sequence);
}

void StreamPeer::OnEnd(const v1::StepResponse& end) {
  ended_ = true;
  KVPOOL_CHECK(end.sequence() == 0 && end.results_size() == 0 && end.completions_size() == 0 &&
                   end.notices_size() == 0,
               "an end with an answer in it");
  KVPOOL_CHECK(end.code() >= 0 && end.code() <= 16, "status code %d", end.code());
  if (end.code() != 0) return;
  KVPOOL_CHECK(half_closed_, "a stream ends well that goes on");
  KVPOOL_CHECK(!faulty_, "a stream ends well that can't go on");
  KVPOOL_CHECK(asked_.empty(), "a stream ends well, and %lu has no answer", asked_.front().sequence);
}

void StreamPeer::OnHangup() {
  const bool was_stream = is_stream();
  state_ = State::kOver;
  if (ended_ || !was_stream) return;
  const bool all_taken = heard_bytes_ + kKernelBytesOfFrame * heard_frames_ + coming_.size() <= kSurelyTaken;
  KVPOOL_CHECK(!all_taken || need_not_be_told_, "the daemon hangs up and does not say why");
}

void StreamPeer::CheckServed() const {
  KVPOOL_CHECK(!outside() || (preface_.empty() && !half_closed_) || deaf_,
               "the acceptor has heard all, and does nothing");
  if (!is_stream() || deaf_) return;
  KVPOOL_CHECK(!half_closed_, "nothing more comes, and the stream goes on");
  KVPOOL_CHECK(!faulty_, "the stream can't go on, and does");
  KVPOOL_CHECK(asked_.empty(), "batch %lu has no answer", asked_.front().sequence);
}

}  // namespace kvpool::fuzz
