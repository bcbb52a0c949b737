// A peer on the gRPC socket: what it has to say, byte by byte, and the oracle for what it hears.
//
//   outside   the acceptor has not let it in, so far
//   stream    it is served as a Step stream
//   over      the daemon has closed it
//
// What it hears is frames, each a StepResponse: answers to its batches, in their order and each once, notices and completions
// between them, and at last how the stream ended, after which nothing comes.
#ifndef KVPOOL_TESTS_FUZZ_STREAM_PEER_H_
#define KVPOOL_TESTS_FUZZ_STREAM_PEER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "kvpool/v1/engine.pb.h"
#include "proto/support/step_frames.h"
#include "proto/support/unique_fd.h"

namespace kvpool::fuzz {

class StreamPeer {
 public:
  explicit StreamPeer(UniqueFd socket) : socket_(std::move(socket)) {}

  int socket() const { return socket_.get(); }
  bool outside() const { return state_ == State::kOutside; }
  bool is_stream() const { return state_ == State::kStream; }
  bool is_over() const { return state_ == State::kOver; }
  bool deaf() const { return deaf_; }
  // The first bytes that it sent, at most as many as a preface has.
  const std::string& preface() const { return preface_; }
  void OnLetIn() { state_ = State::kStream; }
  // Its stream may end without a word: the daemon's socket takes few that nobody reads, or the stream has not begun and never will.
  void NeedNotBeTold() { need_not_be_told_ = true; }

  // It has these bytes to say, or a frame of them.
  void Say(std::string_view bytes);
  void SayFrame(std::string_view bytes);
  // Sends at most so many bytes of what it has to say. False: nothing went.
  bool Send(size_t most);
  // Sends no more.
  void HalfClose();
  // Reads no more.
  void Deafen();
  // Reads at most so many bytes. `heard` gets each response of the stream but its end. False: nothing came.
  bool Hear(size_t most, const std::function<void(const v1::StepResponse&)>& heard);

  // The daemon had all that it needs, and this one has read all there is: what was asked is answered, and a stream that can't go
  // on has ended.
  void CheckServed() const;

 private:
  enum class State : uint8_t { kOutside, kStream, kOver };
  // A batch without an answer so far.
  struct Asked {
    uint64_t sequence = 0;
    bool opens = false;
  };
  void Sent(std::string_view bytes);
  void OnFrame(const v1::StepResponse& response);
  void OnEnd(const v1::StepResponse& end);
  void OnHangup();

  UniqueFd socket_;
  State state_ = State::kOutside;
  bool half_closed_ = false, deaf_ = false, need_not_be_told_ = false;
  std::string to_say_;
  std::string preface_;
  std::string sent_;     // Bytes of a frame that was sent in part.
  bool faulty_ = false;  // It has sent what ends a stream.
  std::deque<Asked> asked_;
  std::string coming_;  // Bytes of a frame that has come in part.
  size_t heard_frames_ = 0, heard_bytes_ = 0;
  bool ended_ = false;  // It was told how the stream ended.
};

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_STREAM_PEER_H_
