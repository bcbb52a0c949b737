#include "tests/process/step_stream.h"

#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/socket.h>

#include <utility>

#include "proto/support/check.h"
#include "proto/support/step_frames.h"
#include "tests/process/raw_engine.h"

namespace kvpool {
namespace {

class GrpcStream final : public RawStepStream {
 public:
  explicit GrpcStream(v1::Engine::Stub* stub) : stream_(stub->Step(&context_)) {}
  ~GrpcStream() override {
    context_.TryCancel();
    (void)Finish();
  }
  bool Write(const v1::StepRequest& request) override { return stream_->Write(request); }
  bool Read(v1::StepResponse* response) override { return stream_->Read(response); }
  void WritesDone() override { stream_->WritesDone(); }
  void TryCancel() override { context_.TryCancel(); }
  absl::Status Finish() override {
    if (!std::exchange(finished_, true)) status_ = FromGrpc(stream_->Finish());
    return status_;
  }

 private:
  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
  bool finished_ = false;
  absl::Status status_;
};

class FrameStream final : public RawStepStream {
 public:
  explicit FrameStream(const std::string& socket) {
    auto connected = ConnectStepSocket(socket);
    KVPOOL_CHECK(connected.ok(), "%s", connected.status().ToString().c_str());
    socket_ = *std::move(connected);
  }
  bool Write(const v1::StepRequest& request) override {
    StepFrameWriter::Outcome outcome = writer_.Write(socket_.get(), request.SerializeAsString());
    while (outcome == StepFrameWriter::Outcome::kPending) {
      Poll(POLLOUT);
      outcome = writer_.Flush(socket_.get());
    }
    return outcome == StepFrameWriter::Outcome::kSent;
  }
  bool Read(v1::StepResponse* response) override {
    if (ended_) return false;
    StepFrameReader::Outcome outcome;
    while ((outcome = reader_.Next(socket_.get())) == StepFrameReader::Outcome::kNoneYet) {
      Poll(POLLIN);
      reader_.OnReadable(false);
    }
    ended_ = outcome != StepFrameReader::Outcome::kFrame || reader_.is_end();
    v1::StepResponse end;
    v1::StepResponse* const into = ended_ ? &end : response;
    const bool whole = outcome == StepFrameReader::Outcome::kFrame &&
                       into->ParseFromArray(reader_.frame().data(), static_cast<int>(reader_.frame().size()));
    if (ended_ && whole) status_ = absl::Status(static_cast<absl::StatusCode>(end.code()), end.message());
    return !ended_ && whole;
  }
  void WritesDone() override { shutdown(socket_.get(), SHUT_WR); }
  void TryCancel() override {
    ended_ = true;
    status_ = absl::CancelledError("by this end");
    socket_.Reset();
  }
  absl::Status Finish() override {
    v1::StepResponse rest;
    while (Read(&rest)) {
    }
    return status_;
  }

 private:
  void Poll(short events) {
    pollfd polled{socket_.get(), events, 0};
    poll(&polled, 1, -1);
  }

  UniqueFd socket_;
  StepFrameReader reader_{kMaxStepResponseBytes};
  StepFrameWriter writer_;
  bool ended_ = false;
  absl::Status status_ = absl::UnavailableError("the daemon hung up");
};

}  // namespace

std::string NameOf(StepBy by) { return by == StepBy::kGrpc ? "grpc" : "frames"; }

void PrintTo(StepBy by, std::ostream* out) { *out << NameOf(by); }

std::unique_ptr<RawStepStream> OpenStep(StepBy by, v1::Engine::Stub* stub, const std::string& socket) {
  if (by == StepBy::kGrpc) return std::make_unique<GrpcStream>(stub);
  return std::make_unique<FrameStream>(socket);
}

}  // namespace kvpool
