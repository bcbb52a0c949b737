#include "tests/bench/raw_session.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstddef>

#include "proto/support/check.h"
#include "tests/bench/engines.h"

namespace kvpool::bench {
namespace {

constexpr int kGroups = RawSession::kGroups;
constexpr int kBlocksPerOperation = 1;

}  // namespace

std::unique_ptr<v1::Engine::Stub> EngineStub(const std::string& socket) {
  return v1::Engine::NewStub(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
}

RawSession::RawSession(const std::string& socket, StepBy by) : stub_(EngineStub(socket)) {
  auto attached = Attachment::Connect({.socket = socket, .client_name = "kvpool-bench"}, Patience());
  KVPOOL_CHECK(attached.ok(), "%s", attached.status().ToString().c_str());
  attachment_ = *std::move(attached);
  const SessionOptions options = EngineOptions(socket);
  v1::OpenSession request;
  request.set_attach_token(attachment_->token());
  *request.mutable_layout() = options.layout;
  *request.mutable_fingerprint() = options.fingerprint;
  grpc::ClientContext context;
  const grpc::Status opened = stub_->OpenSession(&context, request, &session_);
  KVPOOL_CHECK(opened.ok(), "OpenSession: %s", opened.error_message().c_str());
  attachment_->Start({.block_stride_bytes = session_.block_stride_bytes(),
                      .max_blocks = session_.max_blocks(),
                      .slab_bytes = session_.slab_bytes()},
                     session_.member_token(), &state_, [] {});
  state_.signal.Await(Patience(), [this] { return state_.capacity_blocks.load() > 0; });
  stream_ = OpenStep(by, stub_.get(), socket);
  // The session may lease once its slabs are mapped.
  while (leased_.size() < kGroups * kBlocksPerOperation) {
    v1::StepRequest first = Begin();
    first.add_operations()->mutable_lease()->set_count(kGroups * kBlocksPerOperation);
    const v1::StepResponse response = Say(first);
    const auto& blocks = response.results(0).lease().blocks();
    leased_.insert(leased_.end(), blocks.begin(), blocks.end());
  }
  leased_.resize(kGroups * kBlocksPerOperation);
}

v1::StepRequest RawSession::NextBatch() {
  v1::StepRequest request = Begin();
  std::string keys(kGroups * kBlocksPerOperation * 32, '\0');
  for (size_t i = 0; i < keys.size(); i += 32) {
    const uint64_t name = ++keys_made_;
    std::copy_n(reinterpret_cast<const char*>(&name), sizeof(name), keys.begin() + static_cast<ptrdiff_t>(i));
  }
  constexpr size_t kGroupKeyBytes = kBlocksPerOperation * 32;
  for (int group = 0; group < kGroups; ++group) {
    const size_t first = static_cast<size_t>(group) * kBlocksPerOperation;
    v1::GroupKeys& asked = *request.add_operations()->mutable_match()->add_groups();
    asked.set_key_bytes(32);
    asked.set_keys(last_keys_.empty() ? keys.substr(first * 32, kGroupKeyBytes)
                                      : last_keys_.substr(first * 32, kGroupKeyBytes));
    request.add_operations()->mutable_lease()->set_count(kBlocksPerOperation);
    v1::Seal& seal = *request.add_operations()->mutable_seal();
    seal.set_key_bytes(32);
    seal.set_keys(keys.substr(first * 32, kGroupKeyBytes));
    v1::Release& release = *request.add_operations()->mutable_release();
    for (size_t i = first; i < first + kBlocksPerOperation; ++i) {
      seal.add_blocks(leased_[i]);
      release.add_blocks(leased_[i]);
      if (i < matched_.size()) release.add_blocks(matched_[i]);
    }
  }
  last_keys_ = keys;
  return request;
}

void RawSession::LeaseAndRelease(uint32_t blocks) {
  v1::StepRequest request = Begin();
  request.add_operations()->mutable_lease()->set_count(blocks);
  const v1::StepResponse leased = Say(request);
  KVPOOL_CHECK(leased.results(0).lease().blocks_size() == static_cast<int>(blocks), "%d of %u blocks leased",
               leased.results(0).lease().blocks_size(), blocks);
  v1::StepRequest release = Begin();
  *release.add_operations()->mutable_release()->mutable_blocks() = leased.results(0).lease().blocks();
  KVPOOL_CHECK(Say(release).results(0).release().refused().empty(), "a release was refused");
}

v1::StepResponse RawSession::Say(const v1::StepRequest& request) {
  v1::StepResponse response;
  KVPOOL_CHECK(stream_->Write(request) && stream_->Read(&response), "the stream broke");
  return response;
}

void RawSession::Take(const v1::StepResponse& response) {
  leased_.clear();
  matched_.clear();
  for (const v1::OperationResult& result : response.results()) {
    KVPOOL_CHECK(
        result.code() == 0 && result.seal().refused_size() == 0 && result.release().refused_size() == 0,
        "an operation was refused");
    leased_.insert(leased_.end(), result.lease().blocks().begin(), result.lease().blocks().end());
    if (!result.has_match()) continue;
    const auto& hit = result.match().groups(0).blocks();
    matched_.insert(matched_.end(), hit.begin(), hit.end());
  }
  KVPOOL_CHECK(leased_.size() == kGroups * kBlocksPerOperation, "%zu blocks leased", leased_.size());
}

v1::StepRequest RawSession::Begin() {
  v1::StepRequest request;
  request.set_member_token(session_.member_token());
  request.set_acknowledged(sequence_);
  request.set_sequence(++sequence_);
  return request;
}

}  // namespace kvpool::bench
