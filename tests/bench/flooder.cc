#include "tests/bench/flooder.h"

#include <grpcpp/client_context.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/process/raw_engine.h"
#include "tests/support/each_verb.h"

namespace kvpool::bench {
namespace {

constexpr int kBatchVerbs = 64, kBatchesUnderWay = 8;
constexpr int kLargeNames = 16384;
// One slab: an engine without the client library does not map those that come later, and would then be given nothing.
constexpr uint64_t kSpaceBytes = 8 << 20;

// Verbs of one caller, until `stop`.
class Caller {
 public:
  Caller(std::string socket, std::string flood, int number)
      : socket_(std::move(socket)), flood_(std::move(flood)), number_(number) {}

  // Floods once `callers` are ready: what others do then may leave no block to prepare with.
  void Run(const std::atomic<bool>& stop, int callers, std::atomic<int>* ready) {
    if (flood_ == "close_session" || flood_ == "open_session" || flood_ == "add_member") {
      ++*ready;
      while (!stop) Call();
      return;
    }
    std::unique_ptr<RawEngine> engine = Open();
    grpc::ClientContext context;
    const auto stream = engine->stub().Step(&context);
    const v1::StepRequest batch = BatchOf(Prepare(engine.get(), stream.get()));
    ++*ready;
    while (*ready < callers) std::this_thread::yield();
    v1::StepResponse answer;
    for (int under_way = 0; !stop;) {
      for (; under_way < kBatchesUnderWay; ++under_way) Write(engine.get(), stream.get(), batch);
      KVPOOL_CHECK(stream->Read(&answer), "the stream ended");
      // What is said unasked has no sequence.
      if (answer.sequence() == 0) continue;
      acknowledged_ = answer.sequence();
      verbs += static_cast<uint64_t>(answer.results_size());
      --under_way;
    }
    context.TryCancel();
  }

  uint64_t verbs = 0;

 private:
  using Stream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

  std::unique_ptr<RawEngine> Open() const {
    auto engine = RawEngine::Attach(socket_);
    Check(engine.status());
    v1::OpenSession request = VerbSession();
    request.set_attach_token((*engine)->attach_token());
    request.set_tenant("flooder");
    request.set_max_space_bytes(kSpaceBytes);
    grpc::ClientContext context;
    v1::OpenSessionResult opened;
    Check(FromGrpc((*engine)->stub().OpenSession(&context, request, &opened)));
    (*engine)->Adopt(opened);
    Check((*engine)->TakeSlabs());
    return *std::move(engine);
  }

  // One call that opens, closes or is refused.
  void Call() {
    grpc::ClientContext context;
    if (flood_ == "close_session") {
      const auto engine = Open();
      v1::CloseSessionRequest request;
      *request.mutable_call() = engine->NextCall();
      v1::CloseSessionResult result;
      Check(FromGrpc(engine->stub().CloseSession(&context, request, &result)));
      verbs += 2;
      return;
    }
    // Nobody has such a token: that is what whoever floods with the least effort sends.
    if (stub_ == nullptr) stub_ = v1::Engine::NewStub(ConnectTo("unix:" + socket_));
    if (flood_ == "open_session") {
      v1::OpenSession request = VerbSession();
      request.set_attach_token(std::string(16, 'x'));
      v1::OpenSessionResult result;
      KVPOOL_CHECK(!stub_->OpenSession(&context, request, &result).ok(), "a session was opened");
    } else {
      v1::AddMember request;
      request.set_attach_token(std::string(16, 'x'));
      v1::AddMemberResult result;
      KVPOOL_CHECK(!stub_->AddMember(&context, request, &result).ok(), "a member was added");
    }
    ++verbs;
  }

  v1::StepRequest BatchOf(const VerbSubject& subject) const {
    v1::StepRequest batch;
    if (flood_ == "large touch") {
      const std::vector<uint64_t> names(kLargeNames, subject.sealed);
      batch.add_operations()->mutable_touch()->mutable_blocks()->Add(names.begin(), names.end());
      return batch;
    }
    for (int i = 0; i < kBatchVerbs; ++i) *batch.add_operations() = VerbRows().at(flood_)(subject);
    return batch;
  }

  void Write(RawEngine* engine, Stream* stream, v1::StepRequest batch) const {
    const v1::StepRequest numbers = engine->NextBatch();
    batch.set_member_token(numbers.member_token());
    batch.set_sequence(numbers.sequence());
    batch.set_acknowledged(acknowledged_);
    KVPOOL_CHECK(stream->Write(batch), "the stream ended");
  }

  v1::StepResponse Do(RawEngine* engine, Stream* stream, const std::vector<v1::Operation>& operations) {
    v1::StepRequest batch;
    for (const v1::Operation& operation : operations) *batch.add_operations() = operation;
    Write(engine, stream, batch);
    v1::StepResponse answer;
    do {
      KVPOOL_CHECK(stream->Read(&answer), "the stream ended");
    } while (answer.sequence() == 0);
    acknowledged_ = answer.sequence();
    return answer;
  }

  VerbSubject Prepare(RawEngine* engine, Stream* stream) {
    v1::Operation lease;
    lease.mutable_lease()->set_count(3);
    VerbSubject subject;
    while (subject.leased.size() < 3) {
      const v1::StepResponse answer = Do(engine, stream, {lease});
      const auto& blocks = answer.results(0).lease().blocks();
      subject.leased.insert(subject.leased.end(), blocks.begin(), blocks.end());
    }
    subject.leased.resize(3);
    subject.sealed = subject.leased.back();
    subject.leased.pop_back();
    subject.key = absl::StrCat("key of caller ", number_);
    subject.key.resize(32, '.');
    Do(engine, stream, {SealOne(subject.sealed, subject.key), PutEpisodeOf(subject)});
    return subject;
  }

  const std::string socket_, flood_;
  const int number_;
  std::unique_ptr<v1::Engine::Stub> stub_;
  uint64_t acknowledged_ = 0;
};

}  // namespace

int Flood(const std::string& socket, const std::string& flood, int callers) {
  std::atomic<bool> stop{false};
  std::atomic<int> ready{0};
  std::vector<std::unique_ptr<Caller>> all;
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) {
    all.push_back(std::make_unique<Caller>(socket, flood, i));
    threads.emplace_back([&, caller = all.back().get()] { caller->Run(stop, callers, &ready); });
  }
  while (ready < callers) std::this_thread::yield();
  std::printf("ready\n");
  std::fflush(stdout);
  std::getchar();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  uint64_t verbs = 0;
  for (const auto& caller : all) verbs += caller->verbs;
  std::printf("%lu verbs\n", verbs);
  std::fflush(stdout);
  std::getchar();
  return 0;
}

}  // namespace kvpool::bench
