#include <sys/socket.h>

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/step_frames.h"
#include "server/rpc/step_transport.h"

namespace kvpool {
namespace {

class FrameTransport final : public StepTransport, public SocketOwner {
 public:
  FrameTransport(SocketEvents* events, UniqueFd socket, std::shared_ptr<const PeerCredentials> peer)
      : events_(*events), peer_(std::move(peer)), socket_(std::move(socket)) {}
  ~FrameTransport() override { Close(); }

  void Begin(RpcTag* begun, RpcTag* over) override;
  Peer peer() const override { return {.process = peer_, .address = {}, .names = {}, .certificate = {}}; }
  bool gone() const override { return gone_; }
  void Read(RpcTag* tag) override;
  size_t read_bytes() const override { return reader_.frame_bytes(); }
  absl::Status TakeRead(StepReader* reader) override;
  void Write(std::string bytes, bool more, RpcTag* tag) override;
  void Finish(const absl::Status& status, RpcTag* tag) override;
  void Cancel() override;

  void OnSocket(uint32_t events) override;

 private:
  void Close();
  // Each hands its tag back, if it is with us.
  void Return(RpcTag** tag, bool ok) {
    if (*tag != nullptr) events_.Return(std::exchange(*tag, nullptr), ok);
  }
  void ReadNext();
  void AfterWrite(StepFrameWriter::Outcome outcome);

  SocketEvents& events_;
  const std::shared_ptr<const PeerCredentials> peer_;
  UniqueFd socket_;
  bool watched_ = false;
  StepFrameReader reader_{kMaxStepRequestBytes};
  StepFrameWriter writer_;
  bool too_large_ = false;
  bool gone_ = false;
  bool awaits_room_ = false;
  RpcTag* read_ = nullptr;  // Those of operations under way.
  RpcTag* write_ = nullptr;
  RpcTag* over_ = nullptr;
};

void FrameTransport::Begin(RpcTag* begun, RpcTag* over) {
  std::array<char, kStepPreface.size()> preface;
  const bool there = recv(socket_.get(), preface.data(), preface.size(), MSG_DONTWAIT) ==
                     static_cast<ssize_t>(preface.size());
  watched_ = there && events_.Watch(socket_.get(), this).ok();
  if (watched_) over_ = over;
  events_.Return(begun, watched_);
}

void FrameTransport::Close() {
  if (watched_) events_.Unwatch(socket_.get());
  watched_ = false;
  socket_.Reset();
}

void FrameTransport::OnSocket(uint32_t events) {
  const bool hangup = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
  reader_.OnReadable(hangup);
  if (read_ != nullptr) ReadNext();
  if (write_ != nullptr) AfterWrite(writer_.Flush(socket_.get()));
  // It neither sends nor reads any more.
  if ((events & (EPOLLHUP | EPOLLERR)) == 0) return;
  gone_ = true;
  Return(&over_, true);
}

void FrameTransport::Read(RpcTag* tag) {
  read_ = tag;
  ReadNext();
}

void FrameTransport::ReadNext() {
  switch (reader_.Next(socket_.get())) {
    case StepFrameReader::Outcome::kFrame:
      return Return(&read_, true);
    case StepFrameReader::Outcome::kTooLarge:
      too_large_ = true;
      return Return(&read_, true);
    case StepFrameReader::Outcome::kHangup:
      return Return(&read_, false);
    case StepFrameReader::Outcome::kNoneYet:
      return;
  }
}

absl::Status FrameTransport::TakeRead(StepReader* reader) {
  if (too_large_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a batch of ", reader_.frame_bytes(), " bytes; the limit is ", kMaxStepRequestBytes));
  }
  if (!reader_.is_end() && reader->Read(reader_.frame())) return absl::OkStatus();
  return absl::InvalidArgumentError("the message is not a StepRequest");
}

void FrameTransport::Write(std::string bytes, bool more, RpcTag* tag) {
  write_ = tag;
  AfterWrite(writer_.Write(socket_.get(), bytes));
}

void FrameTransport::AfterWrite(StepFrameWriter::Outcome outcome) {
  const bool pending = outcome == StepFrameWriter::Outcome::kPending;
  if (pending != awaits_room_) events_.AwaitRoom(socket_.get(), this, awaits_room_ = pending);
  if (!pending) Return(&write_, outcome == StepFrameWriter::Outcome::kSent);
}

void FrameTransport::Finish(const absl::Status& status, RpcTag* tag) {
  v1::StepResponse end;
  end.set_code(status.raw_code());
  // What a status of gRPC holds.
  end.set_message(ToGrpcStatus(status).error_message());
  if (watched_ && !writer_.pending()) writer_.Write(socket_.get(), end.SerializeAsString(), /*is_end=*/true);
  Close();
  Return(&read_, false);
  events_.Return(tag, true);
  Return(&over_, true);
}

void FrameTransport::Cancel() {
  gone_ = true;
  Return(&read_, false);
  Return(&write_, false);
  Return(&over_, true);
}

}  // namespace

std::unique_ptr<StepTransport> MakeFrameTransport(SocketEvents* events, UniqueFd socket,
                                                  std::shared_ptr<const PeerCredentials> peer) {
  return std::make_unique<FrameTransport>(events, std::move(socket), std::move(peer));
}

}  // namespace kvpool
