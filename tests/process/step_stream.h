// A Step stream of an engine without the client library, over gRPC or as frames of the Unix socket: the same for whoever uses it.
#ifndef KVPOOL_TESTS_PROCESS_STEP_STREAM_H_
#define KVPOOL_TESTS_PROCESS_STEP_STREAM_H_

#include <memory>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "kvpool/v1/engine.grpc.pb.h"

namespace kvpool {

enum class StepBy { kGrpc, kFrames };

// "grpc", "frames".
std::string NameOf(StepBy by);
void PrintTo(StepBy by, std::ostream* out);

// Each waits for as long as it takes.
class RawStepStream {
 public:
  virtual ~RawStepStream() = default;
  // False: the daemon reads no more.
  virtual bool Write(const v1::StepRequest& request) = 0;
  // False: it has ended the stream.
  virtual bool Read(v1::StepResponse* response) = 0;
  virtual void WritesDone() = 0;
  // Hangs up.
  virtual void TryCancel() = 0;
  // How the daemon ended it. UNAVAILABLE, CANCELLED: without saying how.
  virtual absl::Status Finish() = 0;
};

// `stub` and `socket` are the same daemon's.
std::unique_ptr<RawStepStream> OpenStep(StepBy by, v1::Engine::Stub* stub, const std::string& socket);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_PROCESS_STEP_STREAM_H_
