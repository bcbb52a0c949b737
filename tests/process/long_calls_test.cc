// Calls that take long, of a daemon in this process: openings whose slabs a test holds up, and what they must
// not stop. Memory is that of a MemoryDevice, which nobody maps.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/attach/attach_server.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/rpc/call_workers.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/rpc_queue.h"
#include "server/rpc/socket_events.h"
#include "server/rpc/step_call.h"
#include "tests/process/raw_engine.h"
#include "tests/process/step_stream.h"
#include "tests/support/access.h"
#include "tests/support/daemon_process.h"
#include "tests/support/memory_device.h"

namespace kvpool {
namespace {

constexpr uint32_t kManyBlocks = 20 * 16;

std::chrono::system_clock::time_point Soon() { return std::chrono::system_clock::now() + kPatience; }

// While it is shut, whoever comes waits.
class Gate {
 public:
  void Shut() {
    MutexLock lock(&mu_);
    shut_ = true;
    came_ = 0;
  }
  void Open() {
    MutexLock lock(&mu_);
    shut_ = false;
    changed_.SignalAll();
  }
  void Pass() {
    MutexLock lock(&mu_);
    ++came_;
    changed_.SignalAll();
    while (shut_) changed_.Wait(&mu_);
  }
  void AwaitArrivals(int count) {
    MutexLock lock(&mu_);
    while (came_ < count) changed_.Wait(&mu_);
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool shut_ ABSL_GUARDED_BY(mu_) = false;
  int came_ ABSL_GUARDED_BY(mu_) = 0;
};

class LongCallsTest : public testing::Test {
 protected:
  void SetUp() override {
    script_.on_make = [this] { gate_.Pass(); };
    DaemonOptions options;
    options.version = "test";
    options.access = MakeAccess();
    options.slab_bytes = kSlabBytes;
    options.max_sessions = 2;
    options.device_capacity_bytes = {64 * kSlabBytes};
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<MemoryDevice>("memory", 4096, &script_));
    auto daemon = Daemon::Start(options, std::move(devices), MonotonicClock());
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    auto attach =
        AttachServer::Start({.path = socket() + ".attach", .fd_ceiling = 1024}, EventsOf(daemon_.get()));
    ASSERT_TRUE(attach.ok()) << attach.status();
    attach_ = *std::move(attach);
    auto server = GrpcServer::Start({.socket_path = socket(), .threads = 1, .fd_ceiling = 1024},
                                    daemon_.get(), &stats_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    operators_ = v1::Operator::NewStub(ConnectTo("unix:" + socket()));
  }
  void TearDown() override {
    gate_.Open();
    StopServing();
  }
  // Nobody logs after it.
  void StopServing() {
    server_.reset();
    attach_.reset();
  }

  std::string socket() const { return directory_.path() + "/socket"; }
  std::unique_ptr<RawEngine> Attach() {
    auto engine = RawEngine::Attach(socket());
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  std::unique_ptr<RawEngine> OpenEngine() {
    auto engine = RawEngine::Open(socket());
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  // A session in a space of its own, for which 20 slabs are to be made.
  static v1::OpenSession LargeSession(const RawEngine& engine) {
    v1::OpenSession request = SmallSession(engine.attach_token());
    request.mutable_fingerprint()->set_digest("fingerprint of a large model");
    request.set_guaranteed_blocks(kManyBlocks - 2);
    return request;
  }
  static grpc::Status Open(RawEngine* engine, const v1::OpenSession& request,
                           std::chrono::system_clock::time_point deadline) {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    v1::OpenSessionResult opened;
    const grpc::Status status = engine->stub().OpenSession(&context, request, &opened);
    if (status.ok()) engine->Adopt(opened);
    return status;
  }
  // A verb that fails instead of waiting for ever.
  static grpc::Status Match(RawEngine* engine) {
    v1::MatchRequest request;
    *request.mutable_call() = engine->NextCall();
    v1::GroupKeys* group = request.mutable_match()->add_groups();
    group->set_key_bytes(32);
    group->set_keys(KeysOf("nothing", 1));
    grpc::ClientContext context;
    context.set_deadline(Soon());
    v1::MatchResult result;
    return engine->stub().Match(&context, request, &result);
  }
  int Sessions() {
    grpc::ClientContext context;
    context.set_deadline(Soon());
    v1::ListSessionsResponse response;
    const grpc::Status status = operators_->ListSessions(&context, {}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.sessions_size();
  }
  template <typename Question>
  static bool Eventually(Question question) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!question()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  TemporaryDirectory directory_;
  Gate gate_;
  MemoryDevice::Script script_;
  RpcStats stats_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<AttachServer> attach_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<v1::Operator::Stub> operators_;
};

class LongCallsStepTest : public LongCallsTest, public testing::WithParamInterface<StepBy> {
 protected:
  // A stream whose first batch opens a large session.
  std::unique_ptr<RawStepStream> BeginOpening(RawEngine* newcomer) const {
    auto stream = OpenStep(GetParam(), &newcomer->stub(), socket());
    v1::StepRequest batch;
    *batch.add_operations()->mutable_open_session() = LargeSession(*newcomer);
    EXPECT_TRUE(stream->Write(batch));
    return stream;
  }
};

INSTANTIATE_TEST_SUITE_P(Step, LongCallsStepTest, testing::Values(StepBy::kGrpc, StepBy::kFrames),
                         [](const auto& info) { return NameOf(info.param); });

TEST_F(LongCallsTest, VerbsAndOperatorsGoOnWhileASessionOpens) {
  const auto engine = OpenEngine();
  const auto newcomer = Attach();
  gate_.Shut();
  auto opened =
      std::async(std::launch::async, [&] { return Open(newcomer.get(), LargeSession(*newcomer), Soon()); });
  gate_.AwaitArrivals(1);
  const grpc::Status matched = Match(engine.get());
  EXPECT_TRUE(matched.ok()) << matched.error_message();
  EXPECT_EQ(Sessions(), 1);
  gate_.Open();
  const grpc::Status status = opened.get();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_GE(script_.alive, 21);
}

TEST_P(LongCallsStepTest, BatchesBehindAnOpeningWaitAndOthersDoNot) {
  const auto engine = OpenEngine();
  const auto newcomer = Attach();
  gate_.Shut();
  const auto stream = BeginOpening(newcomer.get());
  v1::StepRequest batch;
  batch.set_sequence(1);
  batch.add_operations()->mutable_fence()->set_step(3);
  ASSERT_TRUE(stream->Write(batch));
  gate_.AwaitArrivals(1);
  EXPECT_TRUE(Match(engine.get()).ok());
  gate_.Open();
  v1::StepResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  ASSERT_EQ(answer.results_size(), 1);
  EXPECT_TRUE(answer.results(0).has_open_session()) << answer.ShortDebugString();
  do {  // Notices may come first.
    ASSERT_TRUE(stream->Read(&answer));
  } while (answer.sequence() == 0);
  EXPECT_TRUE(answer.results(0).has_fence()) << answer.ShortDebugString();
  // However it came, an opening is one to whoever looks at metrics.
  const std::vector<uint64_t> counts = stats_.Snapshot().methods["OpenSession"].seconds.counts;
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), uint64_t{0}), 2u);
}

TEST_P(LongCallsStepTest, AnOpeningThatIsUnderWayWhenTheServerRestsIsTheStreamsLast) {
  const auto newcomer = Attach();
  gate_.Shut();
  const auto stream = BeginOpening(newcomer.get());
  gate_.AwaitArrivals(1);
  server_->Rest();
  gate_.Open();
  v1::StepResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  ASSERT_EQ(answer.results_size(), 1);
  EXPECT_TRUE(answer.results(0).has_open_session()) << answer.ShortDebugString();
  // An upgrade waits for it no longer than that.
  EXPECT_FALSE(stream->Read(&answer)) << answer.ShortDebugString();
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Eventually([&] { return server_->quiet(); }));
}

TEST_F(LongCallsTest, AnOpeningWhoseCallerGaveUpIsUndone) {
  const auto engine = OpenEngine();
  const auto newcomer = Attach();
  gate_.Shut();
  grpc::ClientContext context;
  auto opened = std::async(std::launch::async, [&] {
    v1::OpenSessionResult result;
    return newcomer->stub().OpenSession(&context, LargeSession(*newcomer), &result);
  });
  gate_.AwaitArrivals(1);
  context.TryCancel();
  EXPECT_EQ(opened.get().error_code(), grpc::StatusCode::CANCELLED);
  // The server hears of it by itself, and does not say so. Calls behind it on the same connection, to the one thread
  // that the server has, are answered once it has.
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(Match(newcomer.get()).ok());
  gate_.Open();
  EXPECT_TRUE(Eventually([&] { return stats_.Snapshot().refused_openings["CANCELLED"] == 1; }));
  EXPECT_LT(script_.alive, 21) << "it went on to make slabs for nobody";
  EXPECT_EQ(Sessions(), 1);
  const grpc::Status again = Open(newcomer.get(), LargeSession(*newcomer), Soon());
  EXPECT_TRUE(again.ok()) << "its token serves again: " << again.error_message();
}

TEST_P(LongCallsStepTest, AStreamThatBreaksWhileItOpensLeavesNothing) {
  const auto engine = OpenEngine();
  const auto newcomer = Attach();
  gate_.Shut();
  {
    const auto stream = BeginOpening(newcomer.get());
    gate_.AwaitArrivals(1);
    stream->TryCancel();
    EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kCancelled);
  }
  // The daemon has heard of it when the call is counted as failed.
  EXPECT_TRUE(Eventually([&] { return stats_.Snapshot().methods["Step"].errors["CANCELLED"] == 1; }));
  gate_.Open();
  EXPECT_TRUE(Eventually([&] { return stats_.Snapshot().refused_openings["CANCELLED"] == 1; }));
  EXPECT_EQ(Sessions(), 1);
  EXPECT_TRUE(Open(newcomer.get(), LargeSession(*newcomer), Soon()).ok()) << "its token serves again";
}

TEST_P(LongCallsStepTest, TheServerStopsWhileSessionsOpen) {
  const auto unary = Attach(), streamed = Attach();
  gate_.Shut();
  auto opened =
      std::async(std::launch::async, [&] { return Open(unary.get(), LargeSession(*unary), Soon()); });
  const auto stream = OpenStep(GetParam(), &streamed->stub(), socket());
  v1::StepRequest batch;
  *batch.add_operations()->mutable_open_session() = LargeSession(*streamed);
  batch.mutable_operations(0)->mutable_open_session()->mutable_fingerprint()->set_digest("another");
  ASSERT_TRUE(stream->Write(batch));
  gate_.AwaitArrivals(2);
  std::thread stop([&] { server_->Stop(std::chrono::milliseconds(0)); });
  EXPECT_FALSE(opened.get().ok());
  v1::StepResponse answer;
  EXPECT_FALSE(stream->Read(&answer));
  EXPECT_FALSE(stream->Finish().ok());
  gate_.Open();
  stop.join();
}

// What happens between the answer's way out and the caller: the call is cancelled when all is done already.
TEST_F(LongCallsTest, AnAnswerThatReachesNobodyEndsTheSession) {
  const auto newcomer = Attach();
  v1::OpenSession request = LargeSession(*newcomer);
  v1::OpenSessionResult opened;
  ASSERT_TRUE(daemon_->OpenSession(request, &opened).ok());
  EXPECT_EQ(Sessions(), 1);
  daemon_->OnUndelivered(opened.member_token());
  EXPECT_EQ(Sessions(), 0) << "it never had a block, so nothing is waited for";
  EXPECT_EQ(daemon_->Snapshot().sessions_ended["hangup"], 1u);
  // The connection is closed, so that the engine learns that its token is spent.
  while (newcomer->TakeSlabs().ok()) {
  }
  daemon_->OnUndelivered(opened.member_token());
}

TEST_F(LongCallsTest, RefusedOpeningsAreCountedAndNotAllLogged) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  SetLog({.fd = ends[1]});
  const auto engine = Attach();
  v1::OpenSession request = SmallSession(std::string(32, 'x'));
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(Open(engine.get(), request, Soon()).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
  EXPECT_EQ(stats_.Snapshot().refused_openings["UNAUTHENTICATED"], 20u);
  StopServing();
  SetLog({});
  close(ends[1]);
  const std::string log = ReadAll(UniqueFd(ends[0]));
  const std::string line =
      absl::StrCat("I opening refused category=audit method=OpenSession uid=", getuid(), " pid=", getpid(),
                   " code=UNAUTHENTICATED error=\"attach_token is of no connection to the attach socket\"\n");
  int lines = 0;
  for (size_t at = 0; (at = log.find(line, at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 5) << log;
}

TEST_F(LongCallsTest, OperatorCallsThatChangeSomethingAreAudited) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const auto engine = OpenEngine();
  SetLog({.level = LogLevel::kError, .fd = ends[1]});
  const auto call = [&](auto method, const auto& request, auto response) {
    grpc::ClientContext context;
    return (operators_.get()->*method)(&context, request, &response);
  };
  v1::EvictRequest evict;
  evict.set_count(7);
  EXPECT_TRUE(call(&v1::Operator::Stub::Evict, evict, v1::EvictResponse()).ok());
  v1::PinPrefixRequest pin;
  pin.set_key("\x01\xab");
  pin.set_ttl_ms(1000);
  EXPECT_FALSE(call(&v1::Operator::Stub::PinPrefix, pin, v1::PinPrefixResponse()).ok());
  v1::EndSessionRequest end;
  end.set_session(1);
  EXPECT_TRUE(call(&v1::Operator::Stub::EndSession, end, v1::EndSessionResponse()).ok());
  EXPECT_TRUE(
      call(&v1::Operator::Stub::ListSessions, v1::ListSessionsRequest(), v1::ListSessionsResponse()).ok());
  StopServing();
  SetLog({});
  close(ends[1]);
  std::string log;
  char text[4096];
  for (ssize_t size; (size = read(ends[0], text, sizeof text)) > 0;)
    log.append(text, static_cast<size_t>(size));
  close(ends[0]);
  const auto line = [](const std::string& method, const std::string& rest) {
    return absl::StrCat("I operator call category=audit method=", method, " uid=", getuid(),
                        " pid=", getpid(), rest);
  };
  EXPECT_NE(log.find(line("Evict", " code=OK count=7")), std::string::npos) << log;
  EXPECT_NE(log.find(line("PinPrefix",
                          " code=NOT_FOUND error=\"key is resident in no space asked\" key=01ab "
                          "ttl_ms=1000\n")),
            std::string::npos)
      << log;
  EXPECT_NE(log.find(line("EndSession", " code=OK session=1 space=1 tenant=")), std::string::npos) << log;
  EXPECT_EQ(log.find("ListSessions"), std::string::npos) << log;
}

// Calls of one session wait for one another, and take none of the threads that others need. What is too much is refused, and
// may be said again.
TEST_F(LongCallsTest, AFloodOfLargeUnaryCallsIsBounded) {
  const auto engine = OpenEngine();
  // Few and small ones: ThreadSanitizer sees no order in gRPC, and is slow to keep quiet about each word of a message
  // that one thread made and another sends.
  constexpr int kCalls = 24;
  std::vector<v1::TouchRequest> requests(kCalls);
  std::vector<v1::TouchResult> results(kCalls);
  std::vector<grpc::ClientContext> contexts(kCalls);
  std::vector<grpc::Status> statuses(kCalls);
  std::vector<std::unique_ptr<grpc::ClientAsyncResponseReader<v1::TouchResult>>> calls;
  grpc::CompletionQueue queue;
  for (int i = 0; i < kCalls; ++i) {
    requests[i].mutable_call()->set_member_token(engine->session().member_token());
    requests[i].mutable_call()->set_sequence(static_cast<uint64_t>(i) + 1);
    for (uint64_t ref = 0; ref <= kLargeCallNames; ++ref) requests[i].mutable_touch()->add_blocks(ref + 1);
    calls.push_back(engine->stub().AsyncTouch(&contexts[i], requests[i], &queue));
    calls.back()->Finish(&results[i], &statuses[i], nullptr);
  }
  for (int i = 0; i < kCalls; ++i) {
    void* tag;
    bool ok;
    ASSERT_TRUE(queue.Next(&tag, &ok));
  }
  for (int i = 0; i < kCalls; ++i) {
    if (statuses[i].ok()) continue;
    EXPECT_EQ(statuses[i].error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(statuses[i].error_message(),
                testing::HasSubstr("unary calls of session 1 wait for a large one already; limit 16"));
    grpc::ClientContext context;
    EXPECT_TRUE(engine->stub().Touch(&context, requests[i], &results[i]).ok()) << "said again";
  }
}

TEST_F(LongCallsTest, ALogThatNobodyReadsStopsNobody) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  // A pipe of one page, which is full.
  const int size = fcntl(ends[1], F_SETPIPE_SZ, 4096);
  ASSERT_GT(size, 0);
  const std::string page(static_cast<size_t>(size), '.');
  ASSERT_EQ(write(ends[1], page.data(), page.size()), size);
  SetLog({.fd = ends[1]});
  {
    const LogWriter writer;
    const uint64_t dropped = LogLinesDropped().lines;
    auto engine = OpenEngine();  // It is logged.
    EXPECT_TRUE(Match(engine.get()).ok());
    const std::string words(1000, 'w');
    while (LogLinesDropped().lines == dropped) LogInfo("loud", {{"words", words}});
    EXPECT_TRUE(Match(engine.get()).ok());
    EXPECT_EQ(Sessions(), 1);
    const uint64_t lost = LogLinesDropped().lines - dropped;

    // It is read again.
    std::string log;
    const std::string told = absl::StrCat("W log lines dropped count=", lost, "\n");
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (log.find(told) == std::string::npos && std::chrono::steady_clock::now() < deadline) {
      pollfd readable{.fd = ends[0], .events = POLLIN, .revents = 0};
      if (poll(&readable, 1, 100) != 1) continue;
      char text[4096];
      const ssize_t got = read(ends[0], text, sizeof text);
      log.append(text, static_cast<size_t>(got));
    }
    EXPECT_NE(log.find("session opened"), std::string::npos) << "what was queued is written";
    EXPECT_NE(log.find(told), std::string::npos);
    engine.reset();
    EXPECT_TRUE(Eventually([&] { return daemon_->Snapshot().sessions_open == 0; }));
  }
  SetLog({});
  close(ends[0]);
  close(ends[1]);
}

TEST(LogWriterTest, EndsWithoutAReader) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int size = fcntl(ends[1], F_SETPIPE_SZ, 4096);
  const std::string page(static_cast<size_t>(size), '.');
  ASSERT_EQ(write(ends[1], page.data(), page.size()), size);
  SetLog({.fd = ends[1]});
  {
    const LogWriter writer;
    LogInfo("stuck");
  }
  // Its thread is let go, and ends.
  std::string log;
  while (log.find("stuck\n") == std::string::npos) {
    char text[4096];
    const ssize_t got = read(ends[0], text, sizeof text);
    ASSERT_GT(got, 0);
    log.append(text, static_cast<size_t>(got));
  }
  SetLog({});
  close(ends[0]);
  close(ends[1]);
}

TEST(CallWorkersTest, RefusesWhatIsBeyondItsBounds) {
  Gate gate;
  gate.Shut();
  std::atomic<int> ran{0};
  const auto work = [&] {
    gate.Pass();
    ++ran;
  };
  {
    CallWorkers workers({.calls = "calls", .threads = 1, .most_waiting = 2, .most_waiting_bytes = 100});
    ASSERT_TRUE(workers.Start({.bytes = 1}, work).ok());
    gate.AwaitArrivals(1);
    EXPECT_TRUE(workers.Start({.bytes = 60}, work).ok());
    const absl::Status many_bytes = workers.Start({.bytes = 41}, work);
    EXPECT_EQ(many_bytes.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(many_bytes.message(),
              "1 calls of 60 bytes wait already, and this one has 41; the limits are 2 and 100 bytes");
    EXPECT_TRUE(workers.Start({.bytes = 40}, work).ok());
    EXPECT_EQ(workers.Start({}, work).code(), absl::StatusCode::kResourceExhausted);
    gate.Open();
    gate.AwaitArrivals(3);
  }
  EXPECT_EQ(ran, 3);
}

TEST(CallWorkersTest, OneTenantHasHalfOfThePlaces) {
  Gate gate;
  gate.Shut();
  std::atomic<int> ran{0};
  const auto work = [&] {
    gate.Pass();
    ++ran;
  };
  CallWorkers workers(
      {.calls = "calls", .threads = 1, .most_waiting = 4, .most_waiting_bytes = 100, .turns_by = "tenant"});
  ASSERT_TRUE(workers.Start({.tenant = "flooder"}, work).ok());
  gate.AwaitArrivals(1);
  ASSERT_TRUE(workers.Start({.bytes = 40, .tenant = "flooder"}, work).ok());
  EXPECT_EQ(
      workers.Start({.bytes = 11, .tenant = "flooder"}, work).message(),
      "1 calls of tenant \"flooder\" of 40 bytes wait already, and this one has 11; the limits are 2 and 50 "
      "bytes");
  ASSERT_TRUE(workers.Start({.tenant = "flooder"}, work).ok());
  EXPECT_EQ(workers.Start({.tenant = "flooder"}, work).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(workers.Start({.tenant = "victim"}, work).ok());
  // What a stream holds has a place besides.
  for (int i = 0; i < 10; ++i) workers.StartHeld({.tenant = "flooder"}, work);
  EXPECT_TRUE(workers.Start({.tenant = "victim"}, work).ok());
  EXPECT_EQ(workers.Start({.tenant = "third"}, work).code(), absl::StatusCode::kResourceExhausted);
  gate.Open();
  while (!workers.idle()) std::this_thread::yield();
  EXPECT_EQ(ran, 15);
  EXPECT_TRUE(workers.Start({.bytes = 50, .tenant = "flooder"}, work).ok());
}

TEST(CallWorkersTest, TenantsTakeTurns) {
  Gate gate;
  gate.Shut();
  Mutex mu;
  std::string order;
  CallWorkers workers({.calls = "calls", .threads = 1, .most_waiting = 1000, .most_waiting_bytes = 100});
  ASSERT_TRUE(workers.Start({.tenant = "flooder"}, [&] { gate.Pass(); }).ok());
  gate.AwaitArrivals(1);
  const auto add = [&](const std::string& tenant) {
    ASSERT_TRUE(workers
                    .Start({.tenant = tenant},
                           [&, tenant] {
                             MutexLock lock(&mu);
                             order += tenant[0];
                           })
                    .ok());
  };
  for (int i = 0; i < 500; ++i) add("flooder");
  for (int i = 0; i < 3; ++i) add("victim");
  gate.Open();
  while (!workers.idle()) std::this_thread::yield();
  MutexLock lock(&mu);
  // However many wait, each of the victim's waits for one of the flooder's at most.
  EXPECT_EQ(order.substr(0, 8), "fvfvfvff");
  EXPECT_EQ(order.size(), 503);
}

// Calls of two tenants arrive at a queue whose thread has not begun: what is applied in which order is then a matter of
// counting alone.
class RpcQueueTest : public testing::TestWithParam<StepBy> {
 protected:
  // What a call is to the queue: an event, and then work.
  class Call final : public RpcTag {
   public:
    Call(RpcQueueTest* test, std::string tenant, size_t bytes)
        : test_(*test), tenant_(std::move(tenant)), bytes_(bytes), alarm_(test->queue_->MakeAlarm()) {
      alarm_->Set(this);
    }
    void Run(bool) override {
      test_.queue_->CountRead(bytes_);
      const absl::Status room = test_.queue_->CheckTurn(tenant_, "Touch", bytes_);
      if (!room.ok()) {
        test_.refused_ = room;
        return Over('-');
      }
      test_.queue_->InTurn(
          tenant_, [this] { Over(tenant_[0]); }, bytes_);
    }

   private:
    void Over(char what) {
      test_.order_ += what;
      if (test_.order_.size() == test_.calls_.size()) test_.over_.Open();
    }
    RpcQueueTest& test_;
    const std::string tenant_;
    const size_t bytes_;
    const std::unique_ptr<RpcAlarm> alarm_;
  };
  RpcQueueTest() {
    over_.Shut();
    std::unique_ptr<RpcEvents> events;
    if (GetParam() == StepBy::kGrpc) {
      events = MakeGrpcEvents(builder_.AddCompletionQueue());
      // A completion queue needs a server, which nobody calls.
      builder_.RegisterService(&service_);
      server_ = builder_.BuildAndStart();
    } else {
      events = *SocketEvents::Make();
    }
    queue_ = std::make_unique<RpcQueue>(std::move(events), [this] { return several_; });
  }
  void Arrive(const std::string& tenant, int count, size_t bytes = 0) {
    for (int i = 0; i < count; ++i) calls_.push_back(std::make_unique<Call>(this, tenant, bytes));
  }
  std::string Serve() {
    queue_->Start();
    over_.Pass();
    if (server_ != nullptr) server_->Shutdown();
    queue_->Stop();
    return order_;
  }

  bool several_ = true;
  grpc::ServerBuilder builder_;
  v1::Operator::AsyncService service_;
  std::unique_ptr<RpcQueue> queue_;
  std::unique_ptr<grpc::Server> server_;  // It goes before its queue.
  Gate over_;
  std::string order_;  // Tenants' first letters, and - for what was refused.
  absl::Status refused_;
  std::vector<std::unique_ptr<Call>> calls_;
};

INSTANTIATE_TEST_SUITE_P(Events, RpcQueueTest, testing::Values(StepBy::kGrpc, StepBy::kFrames),
                         [](const auto& info) { return NameOf(info.param); });

TEST_P(RpcQueueTest, AVictimWaitsForOneOfTheFloodersCalls) {
  Arrive("flooder", 600);
  Arrive("victim", 3);
  const std::string order = Serve();
  EXPECT_EQ(order.size(), 603);
  EXPECT_EQ(order.substr(0, 6), "fvfvfv");
}

TEST_P(RpcQueueTest, AndForOneOfEachOtherTenant) {
  for (const char* tenant : {"a", "b", "c"}) Arrive(tenant, 200);
  Arrive("victim", 2);
  EXPECT_EQ(Serve().substr(0, 8), "abcvabcv");
}

TEST_P(RpcQueueTest, WhoSendsWithoutEndIsReadInPart) {
  Arrive("flooder", 5000);
  Arrive("victim", 1);
  const std::string order = Serve();
  // One turn for each 1,024 calls that are read in front of the victim's, and one more.
  EXPECT_LE(std::count(order.begin(), order.begin() + static_cast<ptrdiff_t>(order.find('v')), 'f'), 6);
}

TEST_P(RpcQueueTest, LargeMessagesAreReadInPartToo) {
  Arrive("flooder", 40, 256 << 10);
  Arrive("victim", 1);
  // One turn for each MiB that is read in front of the victim's, as long as there is room for what is read.
  EXPECT_LE(Serve().find('v'), 11);
}

TEST_P(RpcQueueTest, WhatWaitsForATenantsTurnIsBounded) {
  Arrive("flooder", 1030);
  Arrive("victim", 1);
  const std::string order = Serve();
  EXPECT_GE(std::count(order.begin(), order.end(), '-'), 1);
  EXPECT_NE(order.find('v'), std::string::npos);
  EXPECT_THAT(std::string(refused_.message()),
              testing::HasSubstr("Touch: 1024 verbs of tenant \"flooder\" wait for its turn"));
}

TEST_P(RpcQueueTest, AndInBytes) {
  // Four are read for each that is served.
  Arrive("flooder", 60, 256 << 10);
  Arrive("victim", 1, 256 << 10);
  const std::string order = Serve();
  EXPECT_GE(std::count(order.begin(), order.end(), '-'), 1);
  // What is refused was read, too.
  EXPECT_LE(std::count(order.begin(), order.begin() + static_cast<ptrdiff_t>(order.find('v')), 'f'), 16);
  EXPECT_THAT(std::string(refused_.message()),
              testing::HasSubstr("bytes, and this one has 262144; the limits are 1024 and 8388608 bytes"));
}

TEST_P(RpcQueueTest, OneTenantAloneDoesNotWait) {
  several_ = false;
  Arrive("a", 50);
  EXPECT_EQ(Serve().size(), 50);
}

TEST(CallWorkersTest, AnOwnerTakesOneThread) {
  Gate of_flooder, of_other;
  of_flooder.Shut();
  of_other.Shut();
  CallWorkers workers({.calls = "calls", .threads = 2, .most_waiting = 100, .most_waiting_bytes = 100});
  std::atomic<int> at_once{0}, ran{0};
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(workers
                    .Start({.owner = 1},
                           [&] {
                             EXPECT_EQ(++at_once, 1) << "two of one owner run";
                             of_flooder.Pass();
                             --at_once;
                             ++ran;
                           })
                    .ok());
  }
  of_flooder.AwaitArrivals(1);
  EXPECT_EQ(workers.waiting(1), 19u);
  ASSERT_TRUE(workers.Start({.owner = 2}, [&] { of_other.Pass(); }).ok());
  of_other.AwaitArrivals(1);  // It waits for nobody.
  of_other.Open();
  of_flooder.Open();
  of_flooder.AwaitArrivals(20);
  ASSERT_TRUE(workers.Start({.owner = 1}, [&] { of_other.Pass(); }).ok());
  of_other.AwaitArrivals(2);
  EXPECT_EQ(ran, 20);
}

}  // namespace
}  // namespace kvpool
