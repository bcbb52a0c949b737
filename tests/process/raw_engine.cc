#include "tests/process/raw_engine.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include "absl/strings/str_cat.h"
#include "proto/support/attach_socket.h"
#include "proto/support/status_macros.h"

namespace kvpool {

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::shared_ptr<grpc::Channel> ConnectTo(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // Windows keep their initial size, 64 KiB.
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

std::string KeysOf(const std::string& prefix, int count) {
  std::string keys;
  for (int i = 0; i < count; ++i) {
    std::string key = absl::StrCat(prefix, "/", i);
    key.resize(32, '.');
    keys += key;
  }
  return keys;
}

v1::OpenSession SmallSession(const std::string& attach_token) {
  v1::OpenSession request;
  request.set_attach_token(attach_token);
  request.set_client_name("raw engine");
  v1::Layout* layout = request.mutable_layout();
  layout->set_encoding(v1::ENCODING_OPAQUE);
  layout->set_block_bytes(4096);
  v1::LayerGroup* group = layout->add_groups();
  group->set_name("full");
  group->add_layers(0);
  group->set_tokens_per_block(16);
  request.mutable_fingerprint()->set_digest("fingerprint of a small model");
  return request;
}

absl::StatusOr<std::unique_ptr<RawEngine>> RawEngine::Attach(const std::string& socket) {
  auto engine = std::make_unique<RawEngine>();
  ASSIGN_OR_RETURN(engine->attach_, ConnectAttachSocket(socket + ".attach"));
  v1::AttachFrame frame;
  frame.mutable_hello()->set_protocol(1);
  frame.mutable_hello()->set_client_name("raw engine");
  RETURN_IF_ERROR(SendFrame(engine->attach_.get(), frame).status());
  UniqueFd fd;
  RETURN_IF_ERROR(ReceiveFrame(engine->attach_.get(), &frame, &fd).status());
  if (!frame.has_welcome()) return absl::FailedPreconditionError(frame.ShortDebugString());
  engine->attach_token_ = frame.welcome().attach_token();
  engine->channel_ = ConnectTo("unix:" + socket);
  engine->stub_ = v1::Engine::NewStub(engine->channel_);
  return engine;
}

absl::StatusOr<std::unique_ptr<RawEngine>> RawEngine::Open(const std::string& socket) {
  ASSIGN_OR_RETURN(std::unique_ptr<RawEngine> engine, Attach(socket));
  grpc::ClientContext context;
  RETURN_IF_ERROR(
      FromGrpc(engine->stub_->OpenSession(&context, SmallSession(engine->attach_token_), &engine->session_)));
  RETURN_IF_ERROR(engine->TakeSlabs());
  return engine;
}

absl::Status RawEngine::TakeSlabs() {
  for (;;) {
    v1::AttachFrame frame;
    UniqueFd fd;
    ASSIGN_OR_RETURN(const ReceiveOutcome outcome, ReceiveFrame(attach_.get(), &frame, &fd));
    if (outcome != ReceiveOutcome::kFrame) return absl::UnavailableError("the daemon hung up");
    if (frame.has_slab_ready()) return absl::OkStatus();
    if (!frame.has_slab()) return absl::FailedPreconditionError(frame.ShortDebugString());
    if (!fd.valid()) return absl::FailedPreconditionError("a slab came without its descriptor");
    v1::AttachFrame ack;
    ack.mutable_slab_ack()->set_slab(frame.slab().slab());
    RETURN_IF_ERROR(SendFrame(attach_.get(), ack).status());
  }
}

v1::Call RawEngine::NextCall(uint64_t after) {
  v1::Call call;
  call.set_member_token(session_.member_token());
  call.set_acknowledged(sequence_);
  call.set_sequence(++sequence_);
  call.set_after(after);
  return call;
}

v1::StepRequest RawEngine::NextBatch() {
  v1::StepRequest request;
  request.set_member_token(session_.member_token());
  request.set_sequence(++sequence_);
  return request;
}

absl::StatusOr<std::vector<uint64_t>> RawEngine::Lease(uint32_t count) {
  v1::LeaseRequest request;
  *request.mutable_call() = NextCall();
  request.mutable_lease()->set_count(count);
  v1::LeaseResult result;
  grpc::ClientContext context;
  RETURN_IF_ERROR(FromGrpc(stub_->Lease(&context, request, &result)));
  return std::vector<uint64_t>(result.blocks().begin(), result.blocks().end());
}

absl::StatusOr<v1::SealResult> RawEngine::Seal(const std::vector<uint64_t>& blocks, const std::string& keys) {
  v1::SealRequest request;
  *request.mutable_call() = NextCall();
  request.mutable_seal()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  request.mutable_seal()->set_key_bytes(32);
  request.mutable_seal()->set_keys(keys);
  v1::SealResult result;
  grpc::ClientContext context;
  RETURN_IF_ERROR(FromGrpc(stub_->Seal(&context, request, &result)));
  return result;
}

absl::StatusOr<v1::MatchResult> RawEngine::Match(const std::string& keys) {
  v1::MatchRequest request;
  *request.mutable_call() = NextCall();
  v1::GroupKeys* group = request.mutable_match()->add_groups();
  group->set_key_bytes(32);
  group->set_keys(keys);
  v1::MatchResult result;
  grpc::ClientContext context;
  RETURN_IF_ERROR(FromGrpc(stub_->Match(&context, request, &result)));
  return result;
}

absl::StatusOr<v1::ReleaseResult> RawEngine::Release(const std::vector<uint64_t>& blocks, uint64_t after) {
  v1::ReleaseRequest request;
  *request.mutable_call() = NextCall(after);
  request.mutable_release()->mutable_blocks()->Add(blocks.begin(), blocks.end());
  v1::ReleaseResult result;
  grpc::ClientContext context;
  RETURN_IF_ERROR(FromGrpc(stub_->Release(&context, request, &result)));
  return result;
}

absl::StatusOr<v1::FenceResult> RawEngine::Fence(uint64_t step) {
  v1::FenceRequest request;
  *request.mutable_call() = NextCall();
  request.mutable_fence()->set_step(step);
  v1::FenceResult result;
  grpc::ClientContext context;
  RETURN_IF_ERROR(FromGrpc(stub_->Fence(&context, request, &result)));
  return result;
}

}  // namespace kvpool
