// A flood of each verb by one tenant: how many of its verbs are served before one of another tenant's, in numbers.
//
// The verbs are those of the descriptors, and each needs a row in VerbRows(): one that has none fails the test. A daemon in this
// process has one RPC queue. Its thread is held at the first verb of the flood, and goes on when the whole flood and, behind it,
// the victim's verb are in the server's sockets. Which was applied when is told by the clock: each look at it is another
// millisecond, and a member's last call has that of its own.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/operator.pb.h"
#include "proto/support/mutex.h"
#include "proto/support/step_frames.h"
#include "server/base/clock.h"
#include "server/daemon/daemon.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/openings.h"
#include "server/rpc/step_call.h"
#include "server/space/space.h"
#include "server/wire/operation.h"
#include "tests/process/raw_engine.h"
#include "tests/process/step_stream.h"
#include "tests/service/service_fixture.h"
#include "tests/support/access.h"
#include "tests/support/daemon_process.h"
#include "tests/support/each_verb.h"

namespace kvpool {
namespace {

namespace pb = google::protobuf;

constexpr int kFlood = 256;
constexpr int kChannels = 4;
constexpr int kBatchOperations = 8;
// What is served before the victim's verb has been read, which the kernel's order of sockets decides, and then one more.
constexpr int kMostBefore = 8;
// The one that held the thread, and the one whose turn it is.
constexpr int kMostBeforeInLine = 2;
// Those of server/rpc.
constexpr int kLargeCallThreads = 4, kOpeningThreads = 8, kOperatorThreads = 4;
constexpr int kOpeningPlaces = 1024, kOperatorPlaces = 32;

// Stops threads. Not the one that made it.
class Turnstile {
 public:
  ~Turnstile() { Open(); }
  // From now on each thread that passes stops here, once.
  void Shut() {
    MutexLock lock(&mu_);
    shut_ = true;
    came_.clear();
    let_through_.clear();
  }
  void Open() {
    MutexLock lock(&mu_);
    shut_ = false;
    ++opened_;
    changed_.SignalAll();
  }
  // The n-th thread that stopped, from 0, goes on, and is not stopped again.
  void LetThrough(size_t nth) {
    MutexLock lock(&mu_);
    let_through_.insert(nth);
    changed_.SignalAll();
  }
  void Pass() {
    const std::thread::id self = std::this_thread::get_id();
    MutexLock lock(&mu_);
    const size_t nth = came_.size();
    if (!shut_ || self == maker_ || !came_.insert(self).second) return;
    changed_.SignalAll();
    // It may be shut again by the time that this thread runs.
    const uint64_t opened = opened_;
    while (opened_ == opened && !let_through_.contains(nth)) changed_.Wait(&mu_);
  }
  // False: so many threads have not come.
  bool AwaitStopped(size_t count) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(&mu_);
    while (came_.size() < count) {
      if (!changed_.WaitUntil(&mu_, end)) return false;
    }
    return true;
  }

 private:
  const std::thread::id maker_ = std::this_thread::get_id();
  Mutex mu_;
  CondVar changed_;
  bool shut_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t opened_ ABSL_GUARDED_BY(mu_) = 0;  // How often.
  std::set<std::thread::id> came_ ABSL_GUARDED_BY(mu_);
  std::set<size_t> let_through_ ABSL_GUARDED_BY(mu_);
};

// No two looks see the same time. A look may stop at the turnstile.
class LookClock final : public Clock {
 public:
  explicit LookClock(Turnstile* turnstile) : turnstile_(*turnstile) {}
  uint64_t NowMs() const override {
    turnstile_.Pass();
    return ++now_ms_;
  }

 private:
  Turnstile& turnstile_;
  mutable std::atomic<uint64_t> now_ms_{1'000'000};
};

// A call whose messages are in the server's socket, or beyond, when Send returns: no thread but the server's has to run for them
// to be read.
class WireCall {
 public:
  WireCall(const std::shared_ptr<grpc::Channel>& channel, const pb::MethodDescriptor& method)
      : stub_(channel),
        call_(stub_.PrepareCall(
            &context_, absl::StrCat("/", method.service()->full_name(), "/", method.name()), &queue_)) {
    call_->StartCall(nullptr);
    Await();
  }
  ~WireCall() {
    context_.TryCancel();
    Finish();
    queue_.Shutdown();
  }
  void Send(const pb::Message& message) {
    const grpc::Slice slice(message.SerializeAsString());
    call_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    EXPECT_TRUE(Await());
  }
  // A unary call's only message.
  void SendLast(const pb::Message& message) {
    Send(message);
    call_->WritesDone(nullptr);
    EXPECT_TRUE(Await());
  }
  // The next answer; false: none comes.
  bool Receive(pb::Message* answer) {
    BeginToRead();
    grpc::Slice slice;
    return AwaitRead() && answer_.DumpToSingleSlice(&slice).ok() &&
           answer->ParseFromArray(slice.begin(), static_cast<int>(slice.size()));
  }
  // Is there an answer to a unary call, as far as gRPC has seen by now?
  bool Answered() {
    BeginToRead();
    void* tag;
    bool ok = false;
    if (reading_ && queue_.AsyncNext(&tag, &ok, std::chrono::system_clock::time_point()) ==
                        grpc::CompletionQueue::GOT_EVENT) {
      reading_ = false;
    }
    return !reading_;
  }
  grpc::Status Finish() {
    if (std::exchange(finished_, true)) return status_;
    BeginToRead();
    AwaitRead();
    call_->Finish(&status_, nullptr);
    Await();
    return status_;
  }

 private:
  bool Await() {
    void* tag;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }
  // At most one is under way.
  void BeginToRead() {
    if (!std::exchange(reading_, true)) call_->Read(&answer_, nullptr);
  }
  bool AwaitRead() {
    reading_ = false;
    return Await();
  }

  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  grpc::ByteBuffer answer_;
  grpc::Status status_;
  bool reading_ = false, finished_ = false;
};

// One session, with what its verbs name.
struct Client {
  std::unique_ptr<Engine> engine;
  VerbSubject subject;
};

const pb::OneofDescriptor& VerbsOfSteps() { return *v1::Operation::descriptor()->FindOneofByName("verb"); }
const pb::ServiceDescriptor& Service(const std::string& name) {
  return *pb::DescriptorPool::generated_pool()->FindServiceByName(name);
}
const pb::MethodDescriptor& StepMethod() {
  return *Service(v1::Engine::service_full_name()).FindMethodByName("Step");
}

// The unary method with this field of v1::Operation, and the field of its request that has the same; null: there is none.
std::pair<const pb::MethodDescriptor*, const pb::FieldDescriptor*> UnaryOf(const pb::FieldDescriptor& verb) {
  const pb::ServiceDescriptor& engine = Service(v1::Engine::service_full_name());
  for (int i = 0; i < engine.method_count(); ++i) {
    const pb::Descriptor& request = *engine.method(i)->input_type();
    for (int j = 0; j < request.field_count(); ++j) {
      if (engine.method(i)->client_streaming() || request.FindFieldByName("call") == nullptr) continue;
      if (request.field(j)->message_type() == verb.message_type())
        return {engine.method(i), request.field(j)};
    }
  }
  return {nullptr, nullptr};
}

// Those that have a row and are no openings.
std::vector<std::string> VerbsOfRows() {
  std::vector<std::string> verbs;
  for (const auto& [verb, row] : VerbRows()) {
    if (row != nullptr) verbs.push_back(verb);
  }
  return verbs;
}

TEST(FloodRowsTest, EachVerbHasARow) {
  std::set<const pb::MethodDescriptor*> flooded = {&StepMethod()};
  ASSERT_EQ(VerbsOfSteps().field_count(), static_cast<int>(VerbRows().size()))
      << "a row of VerbRows() is of no verb";
  for (int i = 0; i < VerbsOfSteps().field_count(); ++i) {
    const pb::FieldDescriptor& verb = *VerbsOfSteps().field(i);
    const auto row = VerbRows().find(verb.name());
    ASSERT_NE(row, VerbRows().end()) << verb.name() << " has no row in VerbRows()";
    if (row->second != nullptr) flooded.insert(UnaryOf(verb).first);
  }
  const pb::ServiceDescriptor& engine = Service(v1::Engine::service_full_name());
  for (int i = 0; i < engine.method_count(); ++i) {
    const pb::MethodDescriptor* method = engine.method(i);
    if (method->name() == "OpenSession" || method->name() == "AddMember") continue;
    EXPECT_TRUE(flooded.contains(method)) << method->name() << " is no row's unary form";
  }
}

class FloodTest : public testing::Test {
 protected:
  static constexpr uint64_t kSlab = 2048 * kVerbBlockBytes;

  void Start(GrpcServerOptions server_options = {}) {
    DaemonOptions options;
    options.version = "test";
    options.access = access_;
    options.slab_bytes = kSlab;
    options.device_capacity_bytes = {8 * kSlab};
    options.housekeeping_thread = false;
    options.device_threads = false;
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(
        MakeHostDevice({.capacity_bytes = options.device_capacity_bytes[0], .try_huge_pages = false}));
    auto daemon = Daemon::Start(options, std::move(devices), &clock_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    server_options.socket_path = directory_.path() + "/socket";
    server_options.threads = 1;
    server_options.fd_ceiling = 1024;
    auto server = GrpcServer::Start(server_options, daemon_.get(), &stats_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    for (int i = 0; i < kChannels + 1; ++i) {
      channels_.push_back(ConnectTo("unix:" + server_options.socket_path));
      ASSERT_TRUE(channels_.back()->WaitForConnected(std::chrono::system_clock::now() + kPatience));
    }
  }
  void TearDown() override {
    turnstile_.Open();
    server_.reset();
  }

  // A session that is ready to be used.
  Client Open(const std::string& tenant, const std::string& model = "model") {
    static std::atomic<uint32_t> next{1};
    const uint32_t number = next++;
    Client client;
    client.engine = std::make_unique<Engine>(
        daemon_.get(), tenant, PeerCredentials{static_cast<pid_t>(number), geteuid(), getegid()});
    v1::OpenSession request = VerbSession();
    request.mutable_fingerprint()->set_digest(model);
    request.set_tenant(tenant);
    const absl::Status opened = client.engine->Open(request);
    EXPECT_TRUE(opened.ok()) << opened;
    while (client.engine->MapSlabs()) daemon_->HousekeepOnce();
    VerbSubject& subject = client.subject;
    subject.key = Key(absl::StrCat(tenant, " ", number));
    subject.leased = client.engine->Lease(3);
    subject.sealed = subject.leased.back();
    subject.leased.pop_back();
    EXPECT_EQ(client.engine->Do(SealOne(subject.sealed, subject.key)).seal().refused_size(), 0);
    EXPECT_EQ(client.engine->Do(PutEpisodeOf(subject)).code(), 0);
    return client;
  }

  // When the session was last served.
  static uint64_t ServedAt(const Client& client) {
    const SpaceLock lock(*client.engine->member->session->space);
    return client.engine->member->last_call_ms;
  }
  // Waits without gRPC, so that no thread of this test reads what the server's is to read.
  static bool AwaitServed(const Client& client, uint64_t after) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (ServedAt(client) <= after) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }

  std::shared_ptr<grpc::Channel> ChannelOf(int flooder) const { return channels_[flooder % kChannels]; }
  const std::shared_ptr<grpc::Channel>& victims_channel() const { return channels_.back(); }

  std::unique_ptr<WireCall> OpenStream(const std::shared_ptr<grpc::Channel>& channel, const Client& client) {
    auto stream = std::make_unique<WireCall>(channel, StepMethod());
    stream->Send(BatchOf(client, TouchOp({}), 1));
    v1::StepResponse bound;
    EXPECT_TRUE(stream->Receive(&bound));
    EXPECT_EQ(bound.code(), 0) << bound.message();
    return stream;
  }
  static v1::StepRequest BatchOf(const Client& client, const v1::Operation& operation, int count) {
    v1::StepRequest batch;
    batch.set_member_token(client.engine->token);
    batch.set_sequence(++client.engine->sequence);
    for (int i = 0; i < count; ++i) *batch.add_operations() = operation;
    return batch;
  }
  // The request of the operation's unary form.
  static std::unique_ptr<pb::Message> UnaryRequest(const Client& client, const v1::Operation& operation) {
    const pb::Reflection& of_operation = *operation.GetReflection();
    const pb::FieldDescriptor* verb = of_operation.GetOneofFieldDescriptor(operation, &VerbsOfSteps());
    const auto [method, field] = UnaryOf(*verb);
    std::unique_ptr<pb::Message> request(
        pb::MessageFactory::generated_factory()->GetPrototype(method->input_type())->New());
    const pb::Reflection& of_request = *request->GetReflection();
    auto* call = dynamic_cast<v1::Call*>(
        of_request.MutableMessage(request.get(), method->input_type()->FindFieldByName("call")));
    call->set_member_token(client.engine->token);
    call->set_sequence(++client.engine->sequence);
    of_request.MutableMessage(request.get(), field)->CopyFrom(of_operation.GetMessage(operation, verb));
    return request;
  }
  static std::unique_ptr<WireCall> NewUnary(const std::shared_ptr<grpc::Channel>& channel,
                                            const v1::Operation& operation) {
    return std::make_unique<WireCall>(
        channel,
        *UnaryOf(*operation.GetReflection()->GetOneofFieldDescriptor(operation, &VerbsOfSteps())).first);
  }
  // A verb that is answered on the queue's thread: what this tenant sent before on that channel has had its turn.
  static void RoundTrip(const std::shared_ptr<grpc::Channel>& channel, const Client& client) {
    const v1::Operation touch = TouchOp({client.subject.sealed});
    const auto call = NewUnary(channel, touch);
    call->SendLast(*UnaryRequest(client, touch));
    EXPECT_TRUE(call->Finish().ok());
  }

  const TemporaryDirectory directory_;
  const std::shared_ptr<AccessControl> access_ = MakeAccess();
  Turnstile turnstile_;
  LookClock clock_{&turnstile_};
  RpcStats stats_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<GrpcServer> server_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;  // The last is the victim's.
};

// Connections of frames that come while the queue's thread is at work.
class LateFramesTest : public FloodTest {
 protected:
  // Holds the thread in a batch of a stream that stays open.
  void HoldThread() {
    holder_ = Open("holder");
    held_ = OpenStep(StepBy::kFrames, nullptr, path());
    v1::StepResponse bound;
    ASSERT_TRUE(held_->Write(BatchOf(holder_, TouchOp({}), 1)) && held_->Read(&bound));
    turnstile_.Shut();
    ASSERT_TRUE(held_->Write(BatchOf(holder_, TouchOp({holder_.subject.sealed}), 1)));
    ASSERT_TRUE(turnstile_.AwaitStopped(1));
  }
  // Returns when the acceptor has handed over what was connected before.
  void AwaitAcceptor() const {
    // One whose first bytes are wrong is closed at once, behind those that came before.
    const UniqueFd wrong(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path().copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(connect(wrong.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(send(wrong.get(), "no preface", 10, MSG_NOSIGNAL), 10);
    char byte;
    EXPECT_LE(recv(wrong.get(), &byte, 1, 0), 0);
  }
  std::string path() const { return directory_.path() + "/socket"; }

  Client holder_;
  std::unique_ptr<RawStepStream> held_;
};

TEST_F(LateFramesTest, EndWithADaemonThatStops) {
  Start();
  HoldThread();
  auto late = OpenStep(StepBy::kFrames, nullptr, path());
  AwaitAcceptor();
  // The thread finds the connection first, and then that it is to stop.
  std::thread stops([this] { server_->Stop(std::chrono::milliseconds(0)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  turnstile_.Open();
  stops.join();
  v1::StepResponse answer;
  EXPECT_FALSE(late->Read(&answer)) << "it was not heard of";
}

TEST_F(LateFramesTest, AnOpeningWhoseCallerIsGoneOpensNothing) {
  Start();
  HoldThread();
  Engine engine(daemon_.get(), "gone", PeerCredentials{99, geteuid(), getegid()});
  v1::StepRequest batch;
  v1::OpenSession& opening = *batch.add_operations()->mutable_open_session() = VerbSession();
  opening.set_attach_token(engine.attach_token);
  opening.mutable_fingerprint()->set_digest("a model of its own");
  {
    auto gone = OpenStep(StepBy::kFrames, nullptr, path());
    ASSERT_TRUE(gone->Write(batch));
  }
  // The sockets are looked at between its first tag and its second one.
  std::vector<UniqueFd> others;
  for (int i = 0; i < 20; ++i) others.push_back(*ConnectStepSocket(path()));
  AwaitAcceptor();
  turnstile_.Open();
  v1::StepResponse answer;
  ASSERT_TRUE(held_->Read(&answer));
  const auto next = OpenStep(StepBy::kFrames, nullptr, path());
  ASSERT_TRUE(next->Write(BatchOf(holder_, TouchOp({}), 1)) && next->Read(&answer));
  EXPECT_EQ(stats_.Snapshot().methods["Step"].errors["CANCELLED"], 1u);
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 1u) << "the holder's";
}

// Verb, and whether it comes in batches of Step streams.
class VerbFloodTest : public FloodTest, public testing::WithParamInterface<std::tuple<std::string, bool>> {
 protected:
  struct Caller {
    Client client;
    std::unique_ptr<WireCall> call;
    std::unique_ptr<pb::Message> request;
    bool streams;

    void Send() const {
      if (streams) {
        call->Send(*request);
      } else {
        call->SendLast(*request);
      }
    }
    void ExpectServed() const {
      if (!streams) {
        const grpc::Status status = call->Finish();
        EXPECT_TRUE(status.ok()) << status.error_message();
        return;
      }
      v1::StepResponse answer;
      do {
        ASSERT_TRUE(call->Receive(&answer));
      } while (answer.sequence() == 0);  // It was not asked for.
      ASSERT_GT(answer.results_size(), 0) << answer.message();
      EXPECT_EQ(answer.results(0).code(), 0) << answer.results(0).message();
    }
  };
  Caller MakeCaller(Client client, const std::shared_ptr<grpc::Channel>& channel) {
    const auto& [verb, streams] = GetParam();
    const v1::Operation operation = VerbRows().at(verb)(client.subject);
    Caller caller{.client = std::move(client), .call = nullptr, .request = nullptr, .streams = streams};
    if (streams) {
      caller.call = OpenStream(channel, caller.client);
      caller.request = std::make_unique<v1::StepRequest>(BatchOf(caller.client, operation, kBatchOperations));
    } else {
      caller.call = NewUnary(channel, operation);
      caller.request = UnaryRequest(caller.client, operation);
    }
    return caller;
  }
};

TEST_P(VerbFloodTest, LeavesAnotherTenantItsTurn) {
  Start();
  const Caller victim = MakeCaller(Open("victim"), victims_channel());
  std::vector<Caller> flood;
  for (int i = 0; i < kFlood; ++i) flood.push_back(MakeCaller(Open("flooder"), ChannelOf(i)));

  const uint64_t start = clock_.NowMs();
  turnstile_.Shut();
  flood[0].Send();
  ASSERT_TRUE(turnstile_.AwaitStopped(1));
  for (int i = 1; i < kFlood; ++i) flood[i].Send();
  victim.Send();
  turnstile_.Open();
  ASSERT_TRUE(AwaitServed(victim.client, start));
  for (const Caller& caller : flood) ASSERT_TRUE(AwaitServed(caller.client, start));

  const uint64_t at = ServedAt(victim.client);
  const auto before = std::count_if(flood.begin(), flood.end(),
                                    [&](const Caller& caller) { return ServedAt(caller.client) < at; });
  RecordProperty("served_before", static_cast<int>(before));
  EXPECT_LE(before, kMostBefore);

  if (IsDeviceOperation(VerbRows().at(std::get<0>(GetParam()))(victim.client.subject).verb_case())) {
    // All of them wait for the device. A part of each tenant's runs in turn, and an operation has two at most.
    const auto over = [&victim] {
      const Session& session = *victim.client.engine->member->session;
      const SpaceLock lock(*session.space);
      return session.device_operations.empty();
    };
    EXPECT_FALSE(over());
    int parts = 0;
    while (!over() && daemon_->RunDevicePart(0)) ++parts;
    EXPECT_LE(parts, 2 * 2 * (std::get<1>(GetParam()) ? kBatchOperations : 1));
    while (daemon_->RunDevicePart(0)) {
    }
  }
  victim.ExpectServed();
  for (const Caller& caller : flood) caller.ExpectServed();
}

INSTANTIATE_TEST_SUITE_P(Verbs, VerbFloodTest,
                         testing::Combine(testing::ValuesIn(VerbsOfRows()), testing::Bool()),
                         [](const testing::TestParamInfo<VerbFloodTest::ParamType>& info) {
                           return absl::StrCat(std::get<0>(info.param),
                                               std::get<1>(info.param) ? "_in_steps" : "_by_itself");
                         });

// The same for streams that come as frames, of which each is a socket.
TEST_F(FloodTest, OfFramesLeavesAnotherTenantItsTurn) {
  Start();
  const auto open = [&](const Client& client) {
    auto stream = OpenStep(StepBy::kFrames, nullptr, directory_.path() + "/socket");
    EXPECT_TRUE(stream->Write(BatchOf(client, TouchOp({}), 1)));
    v1::StepResponse bound;
    EXPECT_TRUE(stream->Read(&bound));
    EXPECT_EQ(bound.code(), 0) << bound.message();
    return stream;
  };
  const auto batch = [](const Client& client) {
    return BatchOf(client, TouchOp({client.subject.sealed}), kBatchOperations);
  };
  // More than one that is always ready to be read.
  constexpr int kBatches = 8;
  const Client victim = Open("victim");
  const auto victims = open(victim);
  std::vector<Client> flooders;
  std::vector<std::unique_ptr<RawStepStream>> streams;
  for (int i = 0; i < kFlood; ++i) {
    flooders.push_back(Open("flooder"));
    streams.push_back(open(flooders.back()));
  }
  const uint64_t start = clock_.NowMs();
  turnstile_.Shut();
  ASSERT_TRUE(streams[0]->Write(batch(flooders[0])));
  ASSERT_TRUE(turnstile_.AwaitStopped(1));
  for (int i = 0; i < kFlood; ++i) {
    for (int j = 0; j < kBatches; ++j) ASSERT_TRUE(streams[i]->Write(batch(flooders[i])));
  }
  ASSERT_TRUE(victims->Write(batch(victim)));
  turnstile_.Open();
  ASSERT_TRUE(AwaitServed(victim, start));
  const uint64_t at = ServedAt(victim);
  v1::StepResponse answer;
  // Each look at the clock is another millisecond, and a batch takes one.
  EXPECT_LE(at - start, 2 * kMostBefore) << "the flooder was served before, again and again";
  EXPECT_TRUE(victims->Read(&answer));
  EXPECT_EQ(answer.code(), 0) << answer.message();
  for (const auto& stream : streams) {
    for (int j = 0; j < kBatches; ++j) ASSERT_TRUE(stream->Read(&answer));
  }
}

// Calls that threads of their own carry out, since they name very many blocks. Whether they come in Step streams.
class LargeFloodTest : public FloodTest, public testing::WithParamInterface<bool> {};

TEST_P(LargeFloodTest, LeavesAnotherTenantItsTurn) {
  const bool streams = GetParam();
  constexpr int kLarge = 40;
  Start();
  // One thread is to work, on what model 0's sessions have sent. The others are held, each in a space of its own.
  std::vector<Client> holders, flooders;
  for (int i = kLargeCallThreads - 1; i >= 0; --i) {
    holders.push_back(Open("flooder", absl::StrCat("model ", i)));
  }
  for (int i = 0; i < kLarge; ++i) flooders.push_back(Open("flooder", "model 0"));
  const Client teller = Open("flooder", "model of one that is not held");
  const Client victim = Open("victim"), victims_teller = Open("victim");
  const auto touch = [](const Client& client) {
    return TouchOp(std::vector<uint64_t>(kLargeCallNames + 1, client.subject.sealed));
  };
  std::map<const Client*, std::unique_ptr<WireCall>> calls;
  const auto open = [&](const Client& client, const std::shared_ptr<grpc::Channel>& channel) {
    calls[&client] = streams ? OpenStream(channel, client) : NewUnary(channel, touch(client));
  };
  const auto send = [&](const Client& client) {
    if (streams) {
      calls[&client]->Send(BatchOf(client, touch(client), 1));
    } else {
      calls[&client]->SendLast(*UnaryRequest(client, touch(client)));
    }
  };
  for (const Client& holder : holders) open(holder, ChannelOf(0));
  for (const Client& flooder : flooders) open(flooder, ChannelOf(0));
  open(victim, victims_channel());

  const uint64_t start = clock_.NowMs();
  turnstile_.Shut();
  turnstile_.LetThrough(0);  // The queue's thread.
  RoundTrip(ChannelOf(0), teller);
  for (size_t i = 0; i < holders.size(); ++i) {
    send(holders[i]);
    ASSERT_TRUE(turnstile_.AwaitStopped(i + 2));
  }
  for (const Client& flooder : flooders) send(flooder);
  RoundTrip(ChannelOf(0), teller);
  send(victim);
  RoundTrip(victims_channel(), victims_teller);
  turnstile_.LetThrough(holders.size());
  ASSERT_TRUE(AwaitServed(victim, start));
  const uint64_t at = ServedAt(victim);
  for (const Client& flooder : flooders) ASSERT_TRUE(AwaitServed(flooder, start));
  const auto before = std::count_if(flooders.begin(), flooders.end(),
                                    [&](const Client& flooder) { return ServedAt(flooder) < at; });
  EXPECT_LE(before + 1, kMostBeforeInLine) << "with the one that held the thread";
  turnstile_.Open();
}

INSTANTIATE_TEST_SUITE_P(Calls, LargeFloodTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "in_steps" : "by_themselves";
                         });

// A call that names nothing, and lets go or drops very many verbs that were parked. Which, and whether it comes in a Step
// stream.
class ParkedFloodTest : public FloodTest,
                        public testing::WithParamInterface<std::tuple<std::string, bool>> {};

TEST_P(ParkedFloodTest, LeavesTheQueueToOthers) {
  const auto& [verb, streams] = GetParam();
  constexpr int kBatches = 16, kNames = 4000;
  Start();
  const Client flooder = Open("flooder", "model 0"), victim = Open("victim");
  for (int i = 0; i < kBatches; ++i) {
    v1::Operation release = ReleaseOp(std::vector<uint64_t>(kNames, flooder.subject.sealed), /*after=*/7);
    ASSERT_TRUE(flooder.engine->Step({release}).results(0).parked());
  }
  const v1::Operation operation = verb == "fence" ? FenceOp(7) : CloseOp();
  const auto call = streams ? OpenStream(ChannelOf(0), flooder) : NewUnary(ChannelOf(0), operation);
  turnstile_.Shut();
  turnstile_.LetThrough(0);  // The queue's thread, which may still be at what came before.
  RoundTrip(ChannelOf(0), victim);
  if (streams) {
    call->Send(BatchOf(flooder, operation, 1));
  } else {
    call->SendLast(*UnaryRequest(flooder, operation));
  }
  EXPECT_TRUE(turnstile_.AwaitStopped(2)) << "the queue's thread did it itself";
  RoundTrip(victims_channel(), victim);
  turnstile_.Open();
}

INSTANTIATE_TEST_SUITE_P(Calls, ParkedFloodTest,
                         testing::Combine(testing::Values("fence", "close_session"), testing::Bool()),
                         [](const testing::TestParamInfo<ParkedFloodTest::ParamType>& info) {
                           return absl::StrCat(std::get<0>(info.param),
                                               std::get<1>(info.param) ? "_in_steps" : "_by_itself");
                         });

// Openings, of two users. Whether they are AddMember.
class OpeningFloodTest : public ServiceTest, public testing::WithParamInterface<bool> {
 protected:
  static constexpr uint32_t kFlooder = 1000, kVictim = 2000;
  // One that is under way: its token and its request, and what they point to.
  struct Opening {
    std::unique_ptr<Engine> engine;
    Caller caller;
    v1::OpenSession open;
    v1::AddMember add;
    v1::OpenSessionResult opened;
    v1::AddMemberResult added;
  };

  // One that makes a slab stops there.
  void Begin(uint32_t uid, const std::string& model, bool add) {
    openings_.push_back(std::make_unique<Opening>());
    Opening& opening = *openings_.back();
    opening.engine = Attach("engine", uid);
    opening.caller.peer.process = std::make_shared<PeerCredentials>(PeerCredentials{1, uid, uid});
    const auto done = [this, uid](const absl::Status& status) {
      MutexLock lock(&mu_);
      refused_ += status.code() == absl::StatusCode::kResourceExhausted ? 1 : 0;
      served_ += uid == kVictim ? 'v' : 'f';
      changed_.SignalAll();
    };
    if (add) {
      // It belongs to no session, and is told so.
      opening.add.set_attach_token(opening.engine->attach_token);
      return server_->AddMember(opening.caller, &opening.add, &opening.added, done);
    }
    opening.open = OpenRequest(model);
    opening.open.set_attach_token(opening.engine->attach_token);
    server_->OpenSession(opening.caller, &opening.open, &opening.opened, done);
  }
  // Who was served, the victim among them.
  std::string AwaitVictim() {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(&mu_);
    while (!absl::StrContains(served_, 'v') && changed_.WaitUntil(&mu_, end)) {
    }
    return served_;
  }
  size_t refused() {
    MutexLock lock(&mu_);
    return refused_;
  }

  Turnstile turnstile_;
  RpcStats stats_;
  Mutex mu_;
  CondVar changed_;
  std::string served_ ABSL_GUARDED_BY(mu_);  // It names the users, in order.
  size_t refused_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::unique_ptr<Opening>> openings_;
  std::unique_ptr<Openings> server_;
};

TEST_P(OpeningFloodTest, LeavesAnotherUserItsTurnAndAPlace) {
  options_.max_sessions = 4 * kOpeningPlaces;
  StartDaemon(64);
  scripts_[0]->on_make = [this] { turnstile_.Pass(); };
  const auto flooder = Attach("flooder", kFlooder), victim = Attach("victim", kVictim);
  ASSERT_TRUE(flooder->Open(OpenRequest()).ok() && victim->Open(OpenRequest()).ok());
  server_ = std::make_unique<Openings>(daemon_.get(), &stats_);

  // All threads are making slabs.
  turnstile_.Shut();
  for (int i = 0; i < kOpeningThreads; ++i) {
    Begin(kFlooder, absl::StrCat("another model ", i), /*add=*/false);
    ASSERT_TRUE(turnstile_.AwaitStopped(static_cast<size_t>(i) + 1));
  }
  // More than have a place.
  for (int i = 0; i < kOpeningPlaces + 10; ++i) Begin(kFlooder, "model", GetParam());
  EXPECT_EQ(refused(), 10u);
  Begin(kVictim, "model", GetParam());
  EXPECT_EQ(refused(), 10u) << "there is a place for it";
  turnstile_.LetThrough(0);
  // Ten were refused.
  EXPECT_LE(AwaitVictim().find('v') - 10, kMostBeforeInLine) << "or never";
  turnstile_.Open();
  server_.reset();
}

INSTANTIATE_TEST_SUITE_P(Calls, OpeningFloodTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "AddMember" : "OpenSession";
                         });

// Operator calls, of two users: this process, and whoever has a certificate.
class OperatorFloodTest : public FloodTest {
 protected:
  static const pb::MethodDescriptor& Upgrade() {
    return *Service(v1::Operator::service_full_name()).FindMethodByName("Upgrade");
  }
  std::string Text(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(directory_.path() + "/" + name).rdbuf();
    return text.str();
  }
  void StartWithTls() {
    const ProgramEnd made = RunProgram({"/bin/sh", "-ec", absl::StrCat("cd ", directory_.path(), R"(
      new="openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -batch"
      $new -x509 -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
      echo subjectAltName=DNS:localhost,IP:127.0.0.1 > san
      $new -subj /CN=peer -keyout peer.key -out peer.csr
      openssl x509 -req -days 2 -in peer.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile san -out peer.pem
      )")});
    ASSERT_EQ(made.exit_code, 0) << made.output;
    access_->Replace(MakePolicy(absl::StrCat(kOpenAccess, "[network]\nsan = localhost\nrole = operator\n")));
    const auto file = [this](const char* name) { return directory_.path() + "/" + name; };
    Start({.operator_address = "127.0.0.1:0",
           .operator_tls = {.certificate = file("peer.pem"),
                            .key = file("peer.key"),
                            .client_ca = file("ca.pem")},
           .upgrade = [this](const Peer& peer, const v1::UpgradeRequest&, v1::UpgradeResponse*) {
             (peer.process == nullptr ? victims_ : turnstile_).Pass();
             return absl::FailedPreconditionError("this process is a test");
           }});
    if (HasFatalFailure()) return;
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = Text("ca.pem");
    options.pem_cert_chain = Text("peer.pem");
    options.pem_private_key = Text("peer.key");
    network_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->operator_port()),
                                   grpc::SslCredentials(options));
  }
  // Nothing is asked of it, and whether it would be done does not matter.
  static std::unique_ptr<WireCall> Begin(const std::shared_ptr<grpc::Channel>& channel,
                                         const pb::MethodDescriptor& method) {
    std::unique_ptr<pb::Message> request(
        pb::MessageFactory::generated_factory()->GetPrototype(method.input_type())->New());
    if (auto* drain = dynamic_cast<v1::DrainRequest*>(request.get())) drain->set_cancel(true);
    auto call = std::make_unique<WireCall>(channel, method);
    call->SendLast(*request);
    return call;
  }

  // The one that is answered, of calls of which one has no place: gRPC may hand over a call before one that came earlier. Null:
  // none is.
  static std::unique_ptr<WireCall> TakeAnswered(std::vector<std::unique_ptr<WireCall>>* calls) {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < end) {
      for (auto call = calls->begin(); call != calls->end(); ++call) {
        if (!(*call)->Answered()) continue;
        std::unique_ptr<WireCall> answered = std::move(*call);
        calls->erase(call);
        return answered;
      }
      std::this_thread::yield();
    }
    return nullptr;
  }

  Turnstile victims_;
  std::shared_ptr<grpc::Channel> network_;
};

TEST_F(OperatorFloodTest, LeavesAnotherUserItsTurnAndAPlace) {
  if (RunProgram({"/bin/sh", "-c", "command -v openssl"}).exit_code != 0) {
    GTEST_SKIP() << "the openssl program, which makes the certificates, is not installed";
  }
  StartWithTls();
  if (HasFatalFailure()) return;
  const pb::ServiceDescriptor& service = Service(v1::Operator::service_full_name());
  for (int i = 0; i < service.method_count(); ++i) {
    SCOPED_TRACE(service.method(i)->name());
    turnstile_.Shut();
    victims_.Shut();
    std::vector<std::unique_ptr<WireCall>> calls, flood, victims;
    for (size_t thread = 0; thread < kOperatorThreads; ++thread) {
      calls.push_back(Begin(ChannelOf(0), Upgrade()));
      ASSERT_TRUE(turnstile_.AwaitStopped(thread + 1));
    }
    // One more than has a place, of each. The refusal says that the others are there.
    for (int call = 0; call < kOperatorPlaces + 1; ++call)
      flood.push_back(Begin(ChannelOf(0), *service.method(i)));
    const std::unique_ptr<WireCall> too_many = TakeAnswered(&flood);
    ASSERT_NE(too_many, nullptr);
    const grpc::Status refused = too_many->Finish();
    ASSERT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.error_message();
    EXPECT_THAT(
        refused.error_message(),
        testing::HasSubstr(absl::StrCat(kOperatorPlaces, " operator calls of user \"uid ", geteuid(), "\"")));
    for (int call = 0; call < kOperatorPlaces + 1; ++call) victims.push_back(Begin(network_, Upgrade()));
    const std::unique_ptr<WireCall> victim = TakeAnswered(&victims);
    ASSERT_NE(victim, nullptr);
    EXPECT_THAT(victim->Finish().error_message(),
                testing::HasSubstr(absl::StrCat(2 * kOperatorPlaces, " operator calls of ")));
    turnstile_.LetThrough(0);
    ASSERT_TRUE(victims_.AwaitStopped(1));
    // The only thread that goes on is held again, by the victim's call.
    int before = 0;
    for (const auto& call : flood) before += call->Answered() ? 1 : 0;
    EXPECT_LE(before + 1, kMostBeforeInLine);
    turnstile_.Open();
    victims_.Open();
    for (const auto& call : flood) call->Finish();
    for (const auto& call : victims) call->Finish();
  }
}

}  // namespace
}  // namespace kvpool
