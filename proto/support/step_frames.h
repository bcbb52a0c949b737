// The Step stream without gRPC: the same batches and answers as frames of a Unix socket.
//
// Whoever connects to kvpoold.sock says first what the connection is: HTTP/2's preface for gRPC, or kStepPreface for one Step stream,
// whose bytes are then frames, in both directions. A frame is its size, 4 bytes little-endian, and so many bytes: a StepRequest one
// way, a StepResponse the other. A size with the bit kStepEndBit is the daemon's last frame: code and message of that response are
// the stream's status, as gRPC's trailers would have it. Shutting the sending half down is gRPC's half-close.
//
// This is what gRPC's stream costs in HTTP/2 and completion queues, saved: a write and a read at each end carry a batch and its answer.
#ifndef KVPOOL_PROTO_SUPPORT_STEP_FRAMES_H_
#define KVPOOL_PROTO_SUPPORT_STEP_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// It is as long as HTTP/2's, so that whoever accepts looks at so many bytes. The number is the version of the frames.
inline constexpr std::string_view kStepPreface = "* kvpool.v1 STEP 1 *\r\n\r\n";
// What AttachWelcome.step_frames says of it.
inline constexpr uint32_t kStepFramesVersion = 1;
inline constexpr uint32_t kStepEndBit = uint32_t{1} << 31;
inline constexpr size_t kStepHeaderBytes = 4;
// A batch may name kMaxNames keys of kMaxKeyBytes, which is 4 MiB, plus framing.
inline constexpr size_t kMaxStepRequestBytes = 8 << 20;
inline constexpr size_t kMaxStepResponseBytes = 64 << 20;

// A non-blocking SOCK_STREAM socket that is connected to `path` and has said kStepPreface. INVALID_ARGUMENT: the path does not fit
// in an address; UNAVAILABLE: the system's words and the path.
absl::StatusOr<UniqueFd> ConnectStepSocket(const std::string& path);

// Takes frames out of a socket's bytes.
class StepFrameReader {
 public:
  explicit StepFrameReader(size_t most_bytes) : most_bytes_(most_bytes) {}

  enum class Outcome {
    kFrame,     // frame() is the next one.
    kNoneYet,   // The socket has no more for now: poll, then OnReadable.
    kHangup,    // The other end sends no more, or is gone. What it sent of a frame is lost.
    kTooLarge,  // frame_bytes() is above the limit: the stream can't go on.
  };
  Outcome Next(int socket);
  // poll() says that there is something, or, with `hangup`, that there will be no more than what there is.
  void OnReadable(bool hangup) {
    drained_ = false;
    hangup_ = hangup_ || hangup;
  }

  // Valid until the next call of Next.
  std::string_view frame() const { return {buffer_.get() + frame_begin_, frame_bytes_}; }
  bool is_end() const { return is_end_; }
  size_t frame_bytes() const { return frame_bytes_; }

 private:
  // Room for the frame that begins at begin_, or for a small one if its size is not known yet.
  void MakeRoom(size_t bytes);

  const size_t most_bytes_;
  std::unique_ptr<char[]> buffer_;
  size_t capacity_ = 0, begin_ = 0, end_ = 0;  // What has come and was not handed out is [begin_, end_).
  size_t frame_begin_ = 0, frame_bytes_ = 0;
  bool is_end_ = false;
  bool drained_ = false, hangup_ = false;
};

// Puts frames into a non-blocking socket.
class StepFrameWriter {
 public:
  enum class Outcome {
    kSent,
    kPending,  // The socket has no room for all of it: poll, then Flush.
    kBroken,   // Nobody will read it, and nothing is pending any more.
  };
  // REQUIRES: nothing is pending, and `bytes` has fewer than 2^31.
  Outcome Write(int socket, std::string_view bytes, bool is_end = false);
  Outcome Flush(int socket);
  bool pending() const { return sent_ < pending_.size(); }

 private:
  std::string pending_;  // A frame that was sent in part.
  size_t sent_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_STEP_FRAMES_H_
