// An engine without the client library: raw attach frames and generated stubs, so that the
// protocol is what is tested.
#ifndef KVPOOL_TESTS_PROCESS_RAW_ENGINE_H_
#define KVPOOL_TESTS_PROCESS_RAW_ENGINE_H_

#include <grpcpp/channel.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvpool/v1/attach.pb.h"
#include "kvpool/v1/engine.grpc.pb.h"
#include "kvpool/v1/operator.grpc.pb.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// How long a test waits for what is to come: a busy machine is no failure.
inline constexpr auto kPatience = std::chrono::seconds(60);
inline constexpr uint64_t kSlabBytes = 16 * 4096;  // 16 blocks of SmallSession

// A channel with a connection of its own; by default gRPC shares connections within a process.
std::shared_ptr<grpc::Channel> ConnectTo(const std::string& target);
// 32-byte keys "PREFIX/0", "PREFIX/1", …, in one string.
std::string KeysOf(const std::string& prefix, int count);
// Asks for opaque blocks of 4 KiB and 16 tokens, in one full-attention group.
v1::OpenSession SmallSession(const std::string& attach_token);

// What comes from it until its other end is closed.
inline std::string ReadAll(const UniqueFd& file) {
  std::string all;
  char text[4096];
  for (ssize_t size; (size = read(file.get(), text, sizeof text)) > 0;)
    all.append(text, static_cast<size_t>(size));
  return all;
}

class RawEngine {
 public:
  // Connects the attach socket and says hello.
  static absl::StatusOr<std::unique_ptr<RawEngine>> Attach(const std::string& socket);
  // Attach, OpenSession, TakeSlabs: the engine can lease.
  static absl::StatusOr<std::unique_ptr<RawEngine>> Open(const std::string& socket);

  const std::string& attach_token() const { return attach_token_; }
  v1::Engine::Stub& stub() { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const v1::OpenSessionResult& session() const { return session_; }
  // Takes over a session that was opened by other means.
  void Adopt(const v1::OpenSessionResult& session) { session_ = session; }
  // Acknowledges slabs until one is ready.
  absl::Status TakeSlabs();

  // Both take the next sequence number.
  v1::Call NextCall(uint64_t after = 0);
  v1::StepRequest NextBatch();

  // One unary verb each.
  absl::StatusOr<std::vector<uint64_t>> Lease(uint32_t count);
  absl::StatusOr<v1::SealResult> Seal(const std::vector<uint64_t>& blocks, const std::string& keys);
  absl::StatusOr<v1::MatchResult> Match(const std::string& keys);
  absl::StatusOr<v1::ReleaseResult> Release(const std::vector<uint64_t>& blocks, uint64_t after = 0);
  absl::StatusOr<v1::FenceResult> Fence(uint64_t step);

 private:
  std::string attach_token_;
  UniqueFd attach_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Engine::Stub> stub_;
  v1::OpenSessionResult session_;
  uint64_t sequence_ = 0;
};

// A call's status; gRPC and Abseil have the same codes.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_PROCESS_RAW_ENGINE_H_
