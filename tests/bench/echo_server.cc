#include "tests/bench/echo_server.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>

#include "absl/synchronization/mutex.h"
#include "proto/support/check.h"

namespace kvpool::bench {

int ServeEcho(const std::string& socket, const std::string& answer_file) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // kvpoold does the same.
  std::ifstream file(answer_file, std::ios::binary);
  const std::string answer((std::istreambuf_iterator<char>(file)), {});
  const grpc::Slice slice(answer);

  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
  builder.RegisterAsyncGenericService(&service);
  const std::unique_ptr<grpc::ServerCompletionQueue> queue = builder.AddCompletionQueue();
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  KVPOOL_CHECK(server != nullptr, "no echo server on %s", socket.c_str());
  std::printf("ready\n");
  std::fflush(stdout);

  // One stream, as the bench opens it.
  grpc::GenericServerContext context;
  grpc::GenericServerAsyncReaderWriter stream(&context);
  service.RequestCall(&context, &stream, queue.get(), queue.get(), nullptr);
  void* tag = nullptr;
  bool ok = false;
  grpc::ByteBuffer said, reply(&slice, 1);
  bool reading = false;
  while (queue->Next(&tag, &ok) && ok) {
    // Started or written: read. Read: write.
    reading = !reading;
    if (reading) {
      stream.Read(&said, nullptr);
    } else {
      stream.Write(reply, nullptr);
    }
  }
  return 0;
}

}  // namespace kvpool::bench
