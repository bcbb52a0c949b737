// A session without the client library, so that only what it sends is measured.
#ifndef KVPOOL_TESTS_BENCH_RAW_SESSION_H_
#define KVPOOL_TESTS_BENCH_RAW_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/session/attachment.h"
#include "kvpool/v1/engine.grpc.pb.h"
#include "tests/process/step_stream.h"

namespace kvpool::bench {

std::unique_ptr<v1::Engine::Stub> EngineStub(const std::string& socket);

class RawSession {
 public:
  static constexpr int kGroups = 16;  // Each has four operations in NextBatch.

  RawSession(const std::string& socket, StepBy by);

  // 64 operations: each group matches what the last round sealed, leases, seals what the last round leased, and gives
  // back that and what the last round matched.
  v1::StepRequest NextBatch();
  // Remembers what the next batch names.
  void Take(const v1::StepResponse& response);
  // Leases so many blocks, and gives them back in a batch of its own.
  void LeaseAndRelease(uint32_t blocks);

  // A batch without operations.
  v1::StepRequest Begin();
  v1::StepResponse Say(const v1::StepRequest& request);

 private:
  const std::unique_ptr<v1::Engine::Stub> stub_;
  SessionState state_;
  std::unique_ptr<Attachment> attachment_;
  v1::OpenSessionResult session_;
  std::unique_ptr<RawStepStream> stream_;
  uint64_t sequence_ = 0, keys_made_ = 0;
  std::string last_keys_;
  std::vector<uint64_t> leased_, matched_;
};

}  // namespace kvpool::bench

#endif  // KVPOOL_TESTS_BENCH_RAW_SESSION_H_
