#include <grpcpp/server_context.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/byte_buffer.h>

#include <utility>

#include "server/rpc/caller.h"
#include "server/rpc/step_transport.h"

namespace kvpool {
namespace {

class GrpcTransport final : public StepTransport {
 public:
  GrpcTransport(EngineService* service, RpcQueue* queue, const Connections* connections)
      : service_(service), queue_(queue), connections_(connections) {}

  void Begin(RpcTag* begun, RpcTag* over) override {
    context_.AsyncNotifyWhenDone(over);
    service_->RequestStep(&context_, &stream_, queue_->cq(), queue_->cq(), begun);
  }
  Peer peer() const override { return PeerOf(context_, *connections_); }
  bool gone() const override { return context_.IsCancelled(); }
  void Read(RpcTag* tag) override { stream_.Read(&received_, tag); }
  size_t read_bytes() const override { return received_.Length(); }
  absl::Status TakeRead(StepReader* reader) override {
    grpc::Slice bytes;
    const bool in_one = received_.TrySingleSlice(&bytes).ok() || received_.DumpToSingleSlice(&bytes).ok();
    received_.Clear();
    if (in_one && reader->Read({reinterpret_cast<const char*>(bytes.begin()), bytes.size()})) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError("the message is not a StepRequest");
  }
  void Write(std::string bytes, bool more, RpcTag* tag) override {
    const grpc::Slice slice(bytes);
    grpc::WriteOptions options;
    if (more) options.set_buffer_hint();
    stream_.Write(grpc::ByteBuffer(&slice, 1), options, tag);
  }
  void Finish(const absl::Status& status, RpcTag* tag) override { stream_.Finish(ToGrpcStatus(status), tag); }
  // The server does it for all calls at once when it stops.
  void Cancel() override {}

 private:
  EngineService* const service_;
  RpcQueue* const queue_;
  const Connections* const connections_;
  mutable grpc::ServerContext context_;
  grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer> stream_{&context_};
  grpc::ByteBuffer received_;
};

}  // namespace

std::unique_ptr<StepTransport> MakeGrpcTransport(EngineService* service, RpcQueue* queue,
                                                 const Connections* connections) {
  return std::make_unique<GrpcTransport>(service, queue, connections);
}

}  // namespace kvpool
