// Who may call what: each method of each service, by each kind of identity, with each role.
//
// The methods are those that the server lists, and each needs a row in kNeeds: a method that has none fails the test. The
// identity is always this process; what changes is the rule that it matches.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "proto/support/unique_fd.h"
#include "server/attach/attach_server.h"
#include "server/base/log.h"
#include "server/base/peer_process.h"
#include "server/daemon/daemon.h"
#include "server/rpc/grpc_server.h"
#include "tests/process/raw_engine.h"
#include "tests/support/access.h"
#include "tests/support/certificates.h"
#include "tests/support/daemon_process.h"
#include "tests/support/memory_device.h"

namespace kvpool {
namespace {

namespace pb = google::protobuf;
namespace reflection = grpc::reflection::v1alpha;

enum class Need {
  kNothing,   // Whoever may connect.
  kOwnToken,  // A token of a session that the caller's uid opened.
  kEngine,
  kObserver,
  kOperator,
  kDaemonsUser,  // The role operator, and the daemon's uid or root's, on the Unix socket.
};

// The table of server/README.md, "Who may call what".
const std::map<std::string, Need>& Needs() {
  static const auto* const needs = [] {
    auto* rows = new std::map<std::string, Need>{
        {"kvpool.v1.Engine.OpenSession", Need::kEngine},
        {"kvpool.v1.Engine.AddMember", Need::kEngine},
        {"grpc.health.v1.Health.Check", Need::kNothing},
        {"grpc.health.v1.Health.Watch", Need::kNothing},
        {"grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo", Need::kNothing},
    };
    for (const char* verb :
         {"Lease",   "Seal",        "Match",        "Release",       "Ref",          "Touch",  "Fence",
          "Pin",     "Unpin",       "SetRetention", "WarmupDone",    "Score",        "Select", "Prune",
          "Compact", "PlanBudgets", "PutEpisode",   "ChooseEpisode", "CloseSession", "Step"}) {
      rows->emplace(absl::StrCat("kvpool.v1.Engine.", verb), Need::kOwnToken);
    }
    for (const char* verb : {"ListSpaces", "ListSessions", "ListBlocks", "GetStats", "Explain", "GetPolicies",
                             "GetRecovery", "GetGuard", "ListTiers"}) {
      rows->emplace(absl::StrCat("kvpool.v1.Operator.", verb), Need::kObserver);
    }
    for (const char* verb : {"Evict", "Erase", "Revoke", "EndSession", "Drain", "PinPrefix", "SetPolicy",
                             "SetShare", "ResetGuard", "Upgrade", "DrainTier", "DetachTier"}) {
      rows->emplace(absl::StrCat("kvpool.v1.Operator.", verb), Need::kOperator);
    }
    rows->emplace("kvpool.v1.Operator.AttachTier", Need::kDaemonsUser);
    return rows;
  }();
  return *needs;
}

// A peer that is attached, as AttachServer would have it, without a socket.
class NobodysPeer final : public AttachPeer {
 public:
  void Send(const v1::AttachFrame&, UniqueFd) override {}
  void Close(const std::string&) override {}
  void Bound() override {}
  void NotAwaited(AttachId) override {}
};

class AccessMatrixTest : public testing::Test {
 protected:
  void SetUp() override { Start({}); }
  void TearDown() override {
    server_.reset();
    attach_.reset();
  }

  void Start(GrpcServerOptions server_options) {
    DaemonOptions options;
    options.version = "test";
    options.access = access_;
    options.slab_bytes = kSlabBytes;
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
    server_options.socket_path = socket();
    server_options.threads = 1;
    server_options.fd_ceiling = 1024;
    server_options.upgrade = [](const Peer&, const v1::UpgradeRequest&, v1::UpgradeResponse*) {
      return absl::FailedPreconditionError("this process is a test");
    };
    auto server = GrpcServer::Start(server_options, daemon_.get(), &stats_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = ConnectTo("unix:" + socket());
  }
  std::string socket() const { return directory_.path() + "/socket"; }

  void AwaitPaced(uint64_t calls) const {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (stats_.Snapshot().paced < calls && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
    EXPECT_GE(stats_.Snapshot().paced, calls);
  }
  // The token of a session that this user opened.
  std::string OpenedBy(uint32_t uid) {
    const auto welcome = daemon_->OnAttached(std::make_shared<NobodysPeer>(),
                                             {.pid = 1, .uid = uid, .gid = uid}, v1::AttachHello());
    EXPECT_TRUE(welcome.ok()) << welcome.status();
    v1::OpenSessionResult opened;
    const absl::Status status =
        daemon_->OpenSession(SmallSession(welcome->frame.welcome().attach_token()), &opened);
    EXPECT_TRUE(status.ok()) << status;
    return opened.member_token();
  }

  // The methods of all services that the server lists.
  std::vector<const pb::MethodDescriptor*> Methods() {
    grpc::ClientContext context;
    const auto stream = reflection::ServerReflection::NewStub(channel_)->ServerReflectionInfo(&context);
    reflection::ServerReflectionRequest request;
    request.set_list_services("");
    reflection::ServerReflectionResponse response;
    EXPECT_TRUE(stream->Write(request) && stream->Read(&response));
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
    std::vector<const pb::MethodDescriptor*> methods;
    for (const auto& listed : response.list_services_response().service()) {
      const pb::ServiceDescriptor* service =
          pb::DescriptorPool::generated_pool()->FindServiceByName(listed.name());
      for (int i = 0; service != nullptr && i < service->method_count(); ++i)
        methods.push_back(service->method(i));
    }
    return methods;
  }

  // The status of a call with this token, and else an empty request. Of a stream it is that of the first answer, if there
  // is one.
  grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, const pb::MethodDescriptor& method,
                    const std::string& token = "") {
    std::unique_ptr<pb::Message> request(
        pb::MessageFactory::generated_factory()->GetPrototype(method.input_type())->New());
    const pb::Descriptor& type = *method.input_type();
    if (const pb::FieldDescriptor* call = type.FindFieldByName("call")) {
      dynamic_cast<v1::Call*>(request->GetReflection()->MutableMessage(request.get(), call))
          ->set_member_token(token);
    } else if (const pb::FieldDescriptor* field = type.FindFieldByName("member_token")) {
      request->GetReflection()->SetString(request.get(), field, token);
    }
    return CallWith(channel, method, *request, nullptr);
  }
  // The same with this request; `response`, unless it is null, gets the answer of one that is no stream.
  static grpc::Status CallWith(const std::shared_ptr<grpc::Channel>& channel,
                               const pb::MethodDescriptor& method, const pb::Message& request,
                               pb::Message* response) {
    const grpc::Slice slice(request.SerializeAsString());
    grpc::ByteBuffer bytes(&slice, 1), answer;
    grpc::GenericStub stub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    grpc::CompletionQueue queue;
    const std::string path = absl::StrCat("/", method.service()->full_name(), "/", method.name());
    void* tag = nullptr;
    bool ok = false;
    grpc::Status status;
    if (!method.client_streaming() && !method.server_streaming()) {
      const auto call = stub.PrepareUnaryCall(&context, path, bytes, &queue);
      call->StartCall();
      call->Finish(&answer, &status, nullptr);
      queue.Next(&tag, &ok);
      grpc::Slice whole;
      if (response != nullptr && status.ok() && answer.DumpToSingleSlice(&whole).ok()) {
        EXPECT_TRUE(response->ParseFromArray(whole.begin(), static_cast<int>(whole.size())));
      }
      return status;
    }
    const auto call = stub.PrepareCall(&context, path, &queue);
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    if (ok) {
      call->Write(bytes, nullptr);
      queue.Next(&tag, &ok);
    }
    call->Read(&answer, nullptr);
    queue.Next(&tag, &ok);
    if (ok) {
      context.TryCancel();
      return grpc::Status::OK;
    }
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    return status;
  }

  // Checks every method against what `roles` may do, by a rule with the line `who`.
  void CheckAll(const std::shared_ptr<grpc::Channel>& channel, const std::string& who, bool local) {
    const std::vector<const pb::MethodDescriptor*> methods = Methods();
    ASSERT_EQ(methods.size(), Needs().size()) << "a row of Needs() is of no method";
    for (const std::string roles :
         {"", "engine", "observer", "operator", "engine, observer", "engine, operator"}) {
      const bool engine = absl::StrContains(roles, "engine");
      if (engine && !local) continue;  // No rule may say so; the file's own test sees to that.
      const bool operates = absl::StrContains(roles, "operator");
      const bool observes = operates || absl::StrContains(roles, "observer");
      access_->Replace(MakePolicy(roles.empty() ? "[another]\nuid = 4242\nrole = operator\n"
                                                : absl::StrCat("[rule]\n", who, "\nrole = ", roles, "\n",
                                                               engine ? "tenant = *\n" : "")));
      for (const pb::MethodDescriptor* method : methods) {
        const auto need = Needs().find(method->full_name());
        ASSERT_NE(need, Needs().end()) << method->full_name() << " has no row in Needs()";
        const grpc::Status status = Call(channel, *method);
        const auto expect = [&](bool allowed) {
          EXPECT_EQ(status.error_code() != grpc::StatusCode::PERMISSION_DENIED, allowed)
              << method->full_name() << " by " << who << " as \"" << roles
              << "\": " << status.error_message();
        };
        switch (need->second) {
          case Need::kNothing:
            expect(true);
            EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT)
                << method->full_name() << ": " << status.error_message();
            break;
          case Need::kOwnToken:
            // There is no such token. On the network there could be none.
            EXPECT_EQ(status.error_code(), local || method->name() != "Step"
                                               ? grpc::StatusCode::UNAUTHENTICATED
                                               : grpc::StatusCode::PERMISSION_DENIED)
                << method->full_name() << ": " << status.error_message();
            break;
          case Need::kEngine:
            expect(engine);
            break;
          case Need::kObserver:
            expect(observes);
            break;
          case Need::kOperator:
            expect(operates);
            break;
          case Need::kDaemonsUser:
            // On the Unix socket this test is the daemon's user.
            expect(operates && local);
            break;
        }
      }
      if (!local) continue;
      EXPECT_EQ(RawEngine::Attach(socket()).ok(), engine) << "the attach socket, as \"" << roles << "\"";
    }
  }

  const TemporaryDirectory directory_;
  MemoryDevice::Script script_;
  const std::shared_ptr<AccessControl> access_ = MakeAccess();
  RpcStats stats_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<AttachServer> attach_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(AccessMatrixTest, ByUid) { CheckAll(channel_, absl::StrCat("uid = ", geteuid()), /*local=*/true); }

TEST_F(AccessMatrixTest, ByGid) { CheckAll(channel_, absl::StrCat("gid = ", getegid()), /*local=*/true); }

TEST_F(AccessMatrixTest, ByCgroup) {
  const UniqueFd self(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  const std::string cgroup = CgroupOf(getpid(), self.get());
  if (cgroup.empty()) GTEST_SKIP() << "this kernel has no cgroup v2";
  CheckAll(channel_, "cgroup = " + cgroup, /*local=*/true);
}

TEST_F(AccessMatrixTest, ATokenServesTheUidThatOpenedItsSession) {
  const std::string own = OpenedBy(geteuid()), foreign = OpenedBy(4242);
  // Whatever the rules say by now: what is open can give back.
  for (const std::string& rules :
       {std::string(kOpenAccess), std::string("[a]\nuid = 4242\nrole = operator\n")}) {
    access_->Replace(MakePolicy(rules));
    for (const pb::MethodDescriptor* method : Methods()) {
      if (Needs().at(method->full_name()) != Need::kOwnToken) continue;
      if (method->name() == "CloseSession") continue;  // Its sessions are still wanted.
      const grpc::Status refused = Call(channel_, *method, foreign);
      EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method->full_name();
      EXPECT_TRUE(absl::StrContains(refused.error_message(), "which uid 4242 opened"))
          << refused.error_message();
      const grpc::Status served = Call(channel_, *method, own);
      EXPECT_NE(served.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method->full_name();
      EXPECT_NE(served.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method->full_name();
    }
  }
  const pb::MethodDescriptor* close =
      pb::DescriptorPool::generated_pool()->FindMethodByName("kvpool.v1.Engine.CloseSession");
  EXPECT_EQ(Call(channel_, *close, foreign).error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

// A batch of so many touches of nothing, which is answered.
v1::StepRequest Touches(const std::string& token, uint64_t sequence, int count) {
  v1::StepRequest batch;
  batch.set_member_token(token);
  batch.set_sequence(sequence);
  for (int i = 0; i < count; ++i) batch.add_operations()->mutable_touch();
  return batch;
}

TEST_F(AccessMatrixTest, VerbsOfARuleThatAllowsSoManyASecondWait) {
  const std::string rule = "[a]\nuid = *\nrole = engine\ntenant = *\n";
  access_->Replace(MakePolicy(rule + "verbs-a-second = 1\n"));
  const std::string token = OpenedBy(geteuid()), other = OpenedBy(geteuid());
  const auto engines = v1::Engine::NewStub(channel_);
  grpc::ClientContext context, unary_context;
  const auto stream = engines->Step(&context);
  // The first is in time, however large it is, and the next would wait for a quarter of an hour.
  v1::StepResponse answer;
  ASSERT_TRUE(stream->Write(Touches(token, 1, 900)));
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(answer.results_size(), 900);
  ASSERT_TRUE(stream->Write(Touches(token, 2, 1)));
  AwaitPaced(1);
  // Sessions of a rule have one pace.
  v1::TouchRequest touch;
  v1::TouchResult touched;
  touch.mutable_call()->set_member_token(other);
  touch.mutable_call()->set_sequence(1);
  touch.mutable_touch()->add_blocks(1);
  const grpc::Status refused = engines->Touch(&unary_context, touch, &touched);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(absl::StrContains(refused.error_message(), "Touch: the sessions of its rule"))
      << refused.error_message();
  EXPECT_EQ(stats_.Snapshot().paced, 2u);
  // Rules that are read again count for what waits, too.
  access_->Replace(MakePolicy(rule));
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(answer.sequence(), 2u);
  grpc::ClientContext now;
  const grpc::Status served = engines->Touch(&now, touch, &touched);
  EXPECT_TRUE(served.ok()) << served.error_message();
  // A caller that is gone takes its batch along.
  access_->Replace(MakePolicy(rule + "verbs-a-second = 1\n"));
  ASSERT_TRUE(stream->Write(Touches(token, 3, 900)));
  ASSERT_TRUE(stream->Read(&answer));
  ASSERT_TRUE(stream->Write(Touches(token, 4, 1)));
  AwaitPaced(3);
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (stats_.Snapshot().methods["Step"].errors["CANCELLED"] == 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::yield();
  EXPECT_EQ(stats_.Snapshot().methods["Step"].errors["CANCELLED"], 1u);
  // The server ends, too.
  grpc::ClientContext next_context;
  const auto next = engines->Step(&next_context);
  ASSERT_TRUE(next->Write(Touches(token, 4, 1)));
  AwaitPaced(4);
  TearDown();
  EXPECT_FALSE(next->Read(&answer));
}

TEST_F(AccessMatrixTest, AnAttachTokenServesTheUidThatConnected) {
  const auto attached = [&] {
    const auto welcome = daemon_->OnAttached(std::make_shared<NobodysPeer>(),
                                             {.pid = 1, .uid = 4242, .gid = 4242}, v1::AttachHello());
    EXPECT_TRUE(welcome.ok()) << welcome.status();
    return SmallSession(welcome->frame.welcome().attach_token());
  };
  const auto stub = v1::Engine::NewStub(channel_);
  {
    grpc::ClientContext context;
    v1::OpenSessionResult opened;
    const grpc::Status refused = stub->OpenSession(&context, attached(), &opened);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_TRUE(absl::StrContains(refused.error_message(), "which uid 4242 opened"))
        << refused.error_message();
  }
  grpc::ClientContext context;
  const auto stream = stub->Step(&context);
  v1::StepRequest batch;
  *batch.add_operations()->mutable_open_session() = attached();
  ASSERT_TRUE(stream->Write(batch));
  v1::StepResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  ASSERT_EQ(answer.results_size(), 1);
  EXPECT_EQ(answer.results(0).code(), static_cast<int>(grpc::StatusCode::PERMISSION_DENIED));
  EXPECT_FALSE(answer.results(0).has_open_session());
  stream->WritesDone();
  v1::ListSessionsResponse sessions;
  ASSERT_TRUE(daemon_->ListSessions(v1::ListSessionsRequest(), &sessions).ok());
  EXPECT_EQ(sessions.sessions_size(), 0) << sessions.DebugString();
}

TEST_F(AccessMatrixTest, RefusalsAreCountedAndAuditedButNotAll) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const std::string foreign = OpenedBy(4242);
  access_->Replace(MakePolicy("[a]\nuid = *\nrole = observer\n"));
  SetLog({.level = LogLevel::kError, .fd = ends[1]});
  const auto operators = v1::Operator::NewStub(channel_);
  const auto engines = v1::Engine::NewStub(channel_);
  for (int i = 0; i < 20; ++i) {
    grpc::ClientContext context;
    v1::EvictResponse response;
    EXPECT_EQ(operators->Evict(&context, v1::EvictRequest(), &response).error_code(),
              grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_FALSE(RawEngine::Attach(socket()).ok());
    grpc::ClientContext match_context, step_context;
    v1::MatchRequest match;
    v1::MatchResult matched;
    match.mutable_call()->set_member_token(foreign);
    EXPECT_EQ(engines->Match(&match_context, match, &matched).error_code(),
              grpc::StatusCode::PERMISSION_DENIED);
    const auto stream = engines->Step(&step_context);
    v1::StepRequest batch;
    batch.set_member_token(foreign);
    stream->Write(batch);
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  }
  EXPECT_EQ(stats_.Snapshot().methods["Evict"].errors["PERMISSION_DENIED"], 20u);
  EXPECT_EQ(attach_->Stats().refused["access"], 20u);
  TearDown();
  SetLog({});
  close(ends[1]);
  std::stringstream log;
  char text[4096];
  for (ssize_t size; (size = read(ends[0], text, sizeof text)) > 0;) log.write(text, size);
  close(ends[0]);
  const auto count = [&log](const std::string& part) {
    int found = 0;
    for (size_t at = 0; (at = log.str().find(part, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  const std::string who =
      absl::StrCat(" uid=", geteuid(), " pid=", getpid(), " code=PERMISSION_DENIED error=\"");
  EXPECT_EQ(count(absl::StrCat("I operator call refused category=audit method=Evict", who,
                               "Evict needs the role operator, which uid ")),
            5)
      << log.str();
  // Of all verbs together.
  EXPECT_EQ(count("I verb refused category=audit method="), 5) << log.str();
  for (const char* const method : {"Match", "Step"}) {
    EXPECT_GE(count(absl::StrCat("I verb refused category=audit method=", method, who,
                                 "member_token is of session ")),
              2)
        << log.str();
  }
  EXPECT_EQ(count(absl::StrCat("I attach refused category=audit method=attach", who,
                               "the attach socket needs the role engine, which uid ")),
            5)
      << log.str();
}

// Sets each field that is no message: a space and a session to the first, others to numbers of their own.
void Fill(pb::Message* message) {
  const pb::Descriptor& type = *message->GetDescriptor();
  const pb::Reflection& reflection = *message->GetReflection();
  for (int i = 0; i < type.field_count(); ++i) {
    const pb::FieldDescriptor* field = type.field(i);
    if (field->is_repeated()) continue;
    const bool of_first = field->name() == "space" || field->name() == "session";
    const int number = of_first ? 1 : 2 + i;
    switch (field->cpp_type()) {
      case pb::FieldDescriptor::CPPTYPE_UINT32:
        reflection.SetUInt32(message, field, static_cast<uint32_t>(number));
        break;
      case pb::FieldDescriptor::CPPTYPE_UINT64:
        reflection.SetUInt64(message, field, static_cast<uint64_t>(number));
        break;
      case pb::FieldDescriptor::CPPTYPE_INT32:
        reflection.SetInt32(message, field, number);
        break;
      case pb::FieldDescriptor::CPPTYPE_INT64:
        reflection.SetInt64(message, field, number);
        break;
      case pb::FieldDescriptor::CPPTYPE_DOUBLE:
        reflection.SetDouble(message, field, number);
        break;
      case pb::FieldDescriptor::CPPTYPE_BOOL:
        reflection.SetBool(message, field, true);
        break;
      case pb::FieldDescriptor::CPPTYPE_STRING:
        reflection.SetString(message, field, "lru");
        break;
      case pb::FieldDescriptor::CPPTYPE_FLOAT:
      case pb::FieldDescriptor::CPPTYPE_ENUM:
      case pb::FieldDescriptor::CPPTYPE_MESSAGE:
        break;
    }
  }
}

// The numbers of a message by their names, as a line of the audit has them.
std::map<std::string, std::string> NumbersOf(const pb::Message& message) {
  std::map<std::string, std::string> numbers;
  std::vector<const pb::FieldDescriptor*> set;
  message.GetReflection()->ListFields(message, &set);
  for (const pb::FieldDescriptor* field : set) {
    const pb::Reflection& reflection = *message.GetReflection();
    if (field->is_repeated()) {
      numbers[field->name()] = absl::StrCat(reflection.FieldSize(message, field));
    } else if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_UINT32) {
      numbers[field->name()] = absl::StrCat(reflection.GetUInt32(message, field));
    } else if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_UINT64) {
      numbers[field->name()] = absl::StrCat(reflection.GetUInt64(message, field));
    } else if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_DOUBLE) {
      numbers[field->name()] = absl::StrCat(reflection.GetDouble(message, field));
    }
  }
  return numbers;
}

TEST_F(AccessMatrixTest, EachOperatorCallThatChangesSomethingHasOneLineOfTheAudit) {
  struct Asked {
    std::string code;
    std::map<std::string, std::string> numbers;
  };
  std::map<std::string, Asked> asked;  // Keyed by method.
  std::vector<std::string> others;     // Those that change nothing.
  OpenedBy(geteuid());
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  SetLog({.level = LogLevel::kError, .fd = ends[1]});
  for (const pb::MethodDescriptor* method : Methods()) {
    const Need need = Needs().at(method->full_name());
    if (need != Need::kOperator && need != Need::kDaemonsUser && need != Need::kObserver) continue;
    pb::MessageFactory* factory = pb::MessageFactory::generated_factory();
    std::unique_ptr<pb::Message> request(factory->GetPrototype(method->input_type())->New());
    std::unique_ptr<pb::Message> response(factory->GetPrototype(method->output_type())->New());
    Fill(request.get());
    const grpc::Status status = CallWith(channel_, *method, *request, response.get());
    if (need == Need::kObserver) {
      others.push_back(method->name());
      continue;
    }
    Asked& of_method = asked[method->name()];
    of_method.code = absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
    of_method.numbers = NumbersOf(*request);
    of_method.numbers.merge(NumbersOf(*response));
  }
  TearDown();
  SetLog({});
  close(ends[1]);
  const std::string log = ReadAll(UniqueFd(ends[0]));
  EXPECT_EQ(asked.size(), 13u);
  EXPECT_FALSE(others.empty());
  for (const auto& [method, of_method] : asked) {
    const std::string head =
        absl::StrCat("I operator call category=audit method=", method, " uid=", geteuid(), " pid=", getpid(),
                     " code=", of_method.code, " ");
    const size_t at = log.find(head);
    ASSERT_NE(at, std::string::npos) << head << "\n" << log;
    EXPECT_EQ(log.find(absl::StrCat("I operator call category=audit method=", method, " "), at + 1),
              std::string::npos)
        << method << " has two";
    const std::string line = absl::StrCat(log.substr(at, log.find('\n', at) - at), " ");
    for (const auto& [name, value] : of_method.numbers) {
      EXPECT_TRUE(absl::StrContains(line, absl::StrCat(" ", name, "=", value, " ")))
          << name << " in " << line;
    }
  }
  for (const std::string& method : others) {
    EXPECT_FALSE(absl::StrContains(log, absl::StrCat("method=", method, " ")))
        << method << " changes nothing";
  }
}

class AccessMatrixTlsTest : public AccessMatrixTest {
 protected:
  void SetUp() override {
    if (!Certificates::CanBeMade())
      GTEST_SKIP() << "the openssl program, which makes the certificates, is not installed";
    ASSERT_NO_FATAL_FAILURE(certificates_.Make(R"(
      authorities ca other
      sign daemon ca 2
      # The common name is that of a rule, and is no name that counts.
      names=DNS:else.example,URI:spiffe://example/peer,DNS:peer.example
      sign peer ca 2 $names peer.example
      sign nameless ca 2 "" peer.example
      sign foreign other 2 $names peer.example
      sign expired ca -1 $names peer.example
      )"));
    Start({.operator_address = "127.0.0.1:0",
           .operator_tls = {
               .certificate = File("daemon.pem"), .key = File("daemon.key"), .client_ca = File("ca.pem")}});
  }
  std::string File(const std::string& name) const { return certificates_.File(name); }
  std::string Text(const std::string& name) const { return certificates_.Text(name); }
  std::shared_ptr<grpc::Channel> Connect(const std::string& identity) {
    return grpc::CreateChannel(
        absl::StrCat("127.0.0.1:", server_->operator_port()),
        grpc::SslCredentials({Text("ca.pem"), Text(identity + ".key"), Text(identity + ".pem")}));
  }
  grpc::Status GetStats(const std::string& identity) {
    grpc::ClientContext context;
    v1::GetStatsResponse response;
    return v1::Operator::NewStub(Connect(identity))->GetStats(&context, v1::GetStatsRequest(), &response);
  }

  Certificates certificates_;
};

TEST_F(AccessMatrixTlsTest, BySan) {
  CheckAll(Connect("peer"), "san = peer.example", /*local=*/false);
  CheckAll(Connect("peer"), "san = nobody.example, spiffe://example/peer", /*local=*/false);
}

TEST_F(AccessMatrixTlsTest, OtherCertificatesAreNobody) {
  access_->Replace(MakePolicy("[a]\nsan = peer.example\nrole = operator\n[b]\nuid = *\nrole = operator\n"));
  EXPECT_TRUE(GetStats("peer").ok());
  const grpc::Status nameless = GetStats("nameless");
  EXPECT_EQ(nameless.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_TRUE(absl::StrContains(nameless.error_message(), "(certificate of no subjectAltName; SHA-256 "))
      << nameless.error_message();
  EXPECT_EQ(GetStats("daemon").error_code(), grpc::StatusCode::PERMISSION_DENIED)
      << "its CA's, with another name";
  EXPECT_EQ(GetStats("foreign").error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(GetStats("expired").error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace kvpool
