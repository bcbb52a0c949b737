// Engines and daemons of different releases. What the last release was is in the folder of its name: its protos, and what one of its
// engines and its daemon said to each other. Usage to record that anew: wire_test --record FILE
#include <google/protobuf/any.pb.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/unknown_field_set.h>
#include <google/protobuf/util/delimited_message_util.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvpool/v1/attach.pb.h"
#include "kvpool/v1/engine.grpc.pb.h"
#include "kvpool/v1/operator.grpc.pb.h"
#include "proto/support/attach_socket.h"
#include "proto/support/check.h"
#include "proto/support/unique_fd.h"
#include "tests/compat/wire_proxy.h"
#include "tests/process/raw_engine.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

using google::protobuf::Any;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr char kProtos[] = KVPOOL_RELEASED "/kvpool.v1.binpb";
constexpr char kRecording[] = KVPOOL_RELEASED "/engine.binpb";
constexpr int kLaterField = 1999;

// One slab: what the daemon answers depends on no growth.
std::unique_ptr<DaemonProcess> StartDaemon() {
  auto daemon = DaemonProcess::Start({.capacity = "32MiB", .slab_bytes = "32MiB"});
  KVPOOL_CHECK(daemon.ok(), "%s", daemon.status().ToString().c_str());
  return *std::move(daemon);
}

std::string RunExample(const std::string& socket) {
  return RunProgram({"/usr/bin/env", "KVPOOL_SOCKET=" + socket, KVPOOL_EXAMPLE_IN_C}).output;
}

// Calls `visit` with a message and all messages in it.
void VisitAll(Message* message, const std::function<void(Message*)>& visit) {
  std::vector<const FieldDescriptor*> fields;
  const Reflection& reflection = *message->GetReflection();
  reflection.ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE || field->is_map()) continue;
    if (!field->is_repeated()) {
      VisitAll(reflection.MutableMessage(message, field), visit);
    } else {
      for (int i = 0; i < reflection.FieldSize(*message, field); ++i) {
        VisitAll(reflection.MutableRepeatedMessage(message, field, i), visit);
      }
    }
  }
  visit(message);
}

void AddLaterField(Message* message) {
  message->GetReflection()->MutableUnknownFields(message)->AddVarint(kLaterField, 1);
}

bool IsOfDaemon(const Message& message) {
  if (message.GetDescriptor() != v1::AttachFrame::descriptor()) {
    return message.GetDescriptor() != v1::OpenSession::descriptor() &&
           message.GetDescriptor() != v1::AddMember::descriptor() &&
           message.GetDescriptor() != v1::StepRequest::descriptor();
  }
  const auto& frame = static_cast<const v1::AttachFrame&>(message);
  return !frame.has_hello() && !frame.has_slab_ack();
}

// ---- The protos of the release

class Release {
 public:
  Release() {
    std::ifstream file(kProtos, std::ios::binary);
    google::protobuf::FileDescriptorSet files;
    KVPOOL_CHECK(files.ParseFromIstream(&file), "%s can't be read", kProtos);
    for (const auto& proto : files.file()) {
      KVPOOL_CHECK(pool_.BuildFile(proto) != nullptr, "%s: %s", kProtos, proto.name().c_str());
    }
  }
  // Leaves of a message what a program of the release sees of it. False: that is not all.
  bool Narrow(Message* message) {
    const auto* type = pool_.FindMessageTypeByName(message->GetTypeName());
    KVPOOL_CHECK(type != nullptr, "the release has no %s", message->GetTypeName().c_str());
    const std::unique_ptr<Message> seen(factory_.GetPrototype(type)->New());
    KVPOOL_CHECK(seen->ParseFromString(message->SerializeAsString()), "%s", message->DebugString().c_str());
    const size_t all = seen->ByteSizeLong();
    seen->DiscardUnknownFields();
    KVPOOL_CHECK(message->ParseFromString(seen->SerializeAsString()), "%s", seen->DebugString().c_str());
    return seen->ByteSizeLong() == all;
  }

 private:
  google::protobuf::DescriptorPool pool_;
  google::protobuf::DynamicMessageFactory factory_{&pool_};
};

void ExpectExamplesWork(const std::string& socket) {
  EXPECT_EQ(RunExample(socket), "0 of 1024 tokens were cached\n");
  EXPECT_EQ(RunExample(socket), "1024 of 1024 tokens were cached\n");
}

void SetStepFrames(Message* message, uint32_t version) {
  if (message->GetDescriptor() != v1::AttachFrame::descriptor()) return;
  auto* const frame = static_cast<v1::AttachFrame*>(message);
  if (frame->has_welcome()) frame->mutable_welcome()->set_step_frames(version);
}

TEST(Wire, TodaysEngineNeedsADaemonThatTakesFrames) {
  const auto daemon = StartDaemon();
  WireProxy proxy(daemon->socket(), [](Message* message) { SetStepFrames(message, 0); });
  EXPECT_EQ(RunExample(proxy.socket()),
            "the daemon at " + proxy.socket() +
                " speaks gRPC alone: it is older than this library; upgrade the daemon first\n");
}

TEST(Wire, TodaysEngineAndADaemonOfTheRelease) {
  const auto daemon = StartDaemon();
  Release release;
  std::set<std::string> lost;
  {
    WireProxy proxy(daemon->socket(), [&](Message* message) {
      if (!release.Narrow(message) && !IsOfDaemon(*message)) lost.insert(message->GetTypeName());
      // What carries the messages may be newer than they are.
      SetStepFrames(message, 1);
    });
    ExpectExamplesWork(proxy.socket());
  }
  EXPECT_EQ(lost, std::set<std::string>()) << "a daemon refuses what it does not know";
}

TEST(Wire, TodaysEngineAndALaterDaemon) {
  const auto daemon = StartDaemon();
  WireProxy proxy(daemon->socket(), [&](Message* message) {
    if (!IsOfDaemon(*message)) return;
    VisitAll(message, [](Message* part) {
      AddLaterField(part);
      if (part->GetDescriptor() == v1::MatchResult::descriptor()) {
        static_cast<v1::MatchResult*>(part)->set_miss(static_cast<v1::MissReason>(99));
      }
    });
    if (message->GetDescriptor() == v1::StepResponse::descriptor()) {
      static_cast<v1::StepResponse*>(message)->add_notices()->set_kind(static_cast<v1::NoticeKind>(99));
    }
  });
  ExpectExamplesWork(proxy.socket());
}

// ---- An engine of a later release: whatever it adds to a request could change what the rest means.

struct Method {
  std::string path;
  std::unique_ptr<Message> request;
};

std::vector<Method> UnaryMethods() {
  std::vector<Method> methods;
  const google::protobuf::FileDescriptor* const files[] = {v1::LeaseRequest::descriptor()->file(),
                                                           v1::EvictRequest::descriptor()->file()};
  for (const auto* file : files) {
    const auto* const service = file->service(0);
    for (int i = 0; i < service->method_count(); ++i) {
      const auto* const method = service->method(i);
      if (method->client_streaming()) continue;
      const Message* const request =
          google::protobuf::MessageFactory::generated_factory()->GetPrototype(method->input_type());
      methods.push_back({absl::StrCat("/", service->full_name(), "/", method->name()),
                         std::unique_ptr<Message>(request->New())});
    }
  }
  return methods;
}

grpc::Status Ask(grpc::GenericStub* stub, const std::string& path, const Message& request) {
  const grpc::Slice slice(request.SerializeAsString());
  const grpc::ByteBuffer sent(&slice, 1);
  grpc::ByteBuffer answer;
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  grpc::Status status;
  const auto call = stub->PrepareUnaryCall(&context, path, sent, &queue);
  call->StartCall();
  call->Finish(&answer, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  return status;
}

TEST(Wire, ALaterEnginesFieldsAreRefusedByName) {
  const auto daemon = StartDaemon();
  const auto engine = RawEngine::Open(daemon->socket());
  ASSERT_TRUE(engine.ok()) << engine.status();
  grpc::GenericStub stub((*engine)->channel());
  for (const Method& method : UnaryMethods()) {
    Message* const request = method.request.get();
    const FieldDescriptor* const call = request->GetDescriptor()->FindFieldByName("call");
    if (call != nullptr)
      request->GetReflection()->MutableMessage(request, call)->CopyFrom((*engine)->NextCall());
    AddLaterField(request);
    const grpc::Status status = Ask(&stub, method.path, *request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method.path;
    EXPECT_NE(status.error_message().find(" has unknown field 1999"), std::string::npos)
        << method.path << ": " << status.error_message();
  }
}

// ---- An engine of the release: what one said is said again.

std::vector<Any> ReadRecording() {
  std::ifstream file(kRecording, std::ios::binary);
  google::protobuf::io::IstreamInputStream stream(&file);
  std::vector<Any> messages;
  Any message;
  while (google::protobuf::util::ParseDelimitedFromZeroCopyStream(&message, &stream, nullptr)) {
    messages.push_back(message);
  }
  return messages;
}

// What each side names the other's things by differs from run to run.
class Names {
 public:
  // Compares an answer with what was recorded, but for what depends on the time, and notes what things are now called.
  void Learn(const Message& was, const Message& now) {
    ASSERT_EQ(was.GetDescriptor(), now.GetDescriptor());
    for (int i = 0; i < was.GetDescriptor()->field_count(); ++i) {
      const FieldDescriptor* const field = was.GetDescriptor()->field(i);
      static const std::set<std::string> kOfTheRun = {"daemon_epoch", "detail", "free_blocks", "hash_seed"};
      static const std::set<std::string> kUnknownToTheRelease = {"may_be_below", "step_frames",
                                                                 "takes_prefills"};
      if (kOfTheRun.contains(field->name()) || kUnknownToTheRelease.contains(field->name())) continue;
      SCOPED_TRACE(field->full_name());
      field->is_repeated() ? LearnEach(was, now, field) : LearnOne(was, now, field);
    }
  }
  // Makes a recorded request one of today.
  void Translate(Message* message) const {
    VisitAll(message, [this](Message* part) {
      std::vector<const FieldDescriptor*> fields;
      const Reflection& reflection = *part->GetReflection();
      reflection.ListFields(*part, &fields);
      for (const FieldDescriptor* field : fields) {
        if (field->type() == FieldDescriptor::TYPE_BYTES && !field->is_repeated()) {
          const auto token = tokens_.find(reflection.GetString(*part, field));
          if (token != tokens_.end()) reflection.SetString(part, field, token->second);
        } else if (field->type() == FieldDescriptor::TYPE_FIXED64 && field->is_repeated()) {
          for (int i = 0; i < reflection.FieldSize(*part, field); ++i) {
            const auto block = blocks_.find(reflection.GetRepeatedUInt64(*part, field, i));
            ASSERT_NE(block, blocks_.end()) << "a block that no answer named";
            reflection.SetRepeatedUInt64(part, field, i, block->second);
          }
        }
      }
    });
  }

 private:
  void LearnBlock(uint64_t was, uint64_t now) {
    EXPECT_EQ(blocks_.emplace(was, now).first->second, now);
    EXPECT_EQ(blocks_of_today_.emplace(now, was).first->second, was) << "two blocks in one";
  }
  void LearnEach(const Message& was, const Message& now, const FieldDescriptor* field) {
    const Reflection& reflection = *was.GetReflection();
    const int count = reflection.FieldSize(was, field);
    ASSERT_EQ(reflection.FieldSize(now, field), count);
    for (int i = 0; i < count; ++i) {
      if (field->type() == FieldDescriptor::TYPE_MESSAGE) {
        Learn(reflection.GetRepeatedMessage(was, field, i), reflection.GetRepeatedMessage(now, field, i));
      } else {
        ASSERT_EQ(field->type(), FieldDescriptor::TYPE_FIXED64) << "this field is not compared";
        LearnBlock(reflection.GetRepeatedUInt64(was, field, i), reflection.GetRepeatedUInt64(now, field, i));
      }
    }
  }
  void LearnOne(const Message& was, const Message& now, const FieldDescriptor* field) {
    const Reflection& reflection = *was.GetReflection();
    if (field->type() == FieldDescriptor::TYPE_FIXED64) {
      LearnBlock(reflection.GetUInt64(was, field), reflection.GetUInt64(now, field));
    } else if (field->type() == FieldDescriptor::TYPE_BYTES) {
      if (reflection.GetString(was, field).empty())
        return;  // The release said nothing here, or had no such field.
      ASSERT_EQ(reflection.GetString(now, field).size(), reflection.GetString(was, field).size());
      tokens_[reflection.GetString(was, field)] = reflection.GetString(now, field);
    } else if (field->type() == FieldDescriptor::TYPE_MESSAGE) {
      ASSERT_EQ(reflection.HasField(now, field), reflection.HasField(was, field));
      if (reflection.HasField(was, field))
        Learn(reflection.GetMessage(was, field), reflection.GetMessage(now, field));
    } else {
      std::string before, after;
      google::protobuf::TextFormat::PrintFieldValueToString(was, field, -1, &before);
      google::protobuf::TextFormat::PrintFieldValueToString(now, field, -1, &after);
      EXPECT_EQ(after, before);
    }
  }

  std::map<std::string, std::string> tokens_;
  std::map<uint64_t, uint64_t> blocks_, blocks_of_today_;
};

class Replay {
 public:
  explicit Replay(const std::string& daemon_socket)
      : socket_(daemon_socket), stub_(v1::Engine::NewStub(ConnectTo("unix:" + daemon_socket))) {}
  ~Replay() { HangUp(); }

  // A message that the engine sent is sent, and one that it received is waited for.
  void Go(const Any& message) {
    if (message.type_url() == "kvpool.v1.AttachFrame") return OnFrame(Read<v1::AttachFrame>(message));
    if (message.type_url() == "kvpool.v1.OpenSession") {
      grpc::ClientContext context;
      const grpc::Status status = stub_->OpenSession(&context, Read<v1::OpenSession>(message), &opened_);
      ASSERT_TRUE(status.ok()) << status.error_message();
    } else if (message.type_url() == "kvpool.v1.OpenSessionResult") {
      names_.Learn(Read<v1::OpenSessionResult>(message), opened_);
    } else if (message.type_url() == "kvpool.v1.StepRequest") {
      if (stream_ == nullptr) {
        call_ = std::make_unique<grpc::ClientContext>();
        stream_ = stub_->Step(call_.get());
      }
      ASSERT_TRUE(stream_->Write(Read<v1::StepRequest>(message)));
    } else {
      ASSERT_EQ(message.type_url(), "kvpool.v1.StepResponse");
      OnAnswer(Read<v1::StepResponse>(message));
    }
  }

 private:
  template <typename Type>
  Type Read(const Any& message) {
    Type read;
    EXPECT_TRUE(read.ParseFromString(message.value()));
    EXPECT_EQ(read.SerializeAsString(), message.value()) << "what is sent is what was recorded";
    if (!IsOfDaemon(read)) names_.Translate(&read);
    return read;
  }
  void OnFrame(const v1::AttachFrame& frame) {
    if (frame.has_hello()) {
      HangUp();
      auto connected = ConnectAttachSocket(socket_ + kAttachSuffix);
      ASSERT_TRUE(connected.ok()) << connected.status();
      attach_ = *std::move(connected);
    }
    if (!IsOfDaemon(frame)) {
      ASSERT_TRUE(SendFrame(attach_.get(), frame).ok());
      return;
    }
    v1::AttachFrame now;
    UniqueFd fd;
    const auto received = ReceiveFrame(attach_.get(), &now, &fd);
    ASSERT_TRUE(received.ok() && *received == ReceiveOutcome::kFrame);
    EXPECT_EQ(fd.valid(), frame.has_slab());
    names_.Learn(frame, now);
  }
  void OnAnswer(const v1::StepResponse& was) {
    const bool opened = was.sequence() == 0 && !was.results().empty();
    if (was.sequence() == 0 && !opened) return;  // Notices come when they come.
    v1::StepResponse now;
    while (opened ? now.results().empty() : now.sequence() != was.sequence())
      ASSERT_TRUE(stream_->Read(&now)) << "no answer " << was.sequence();
    v1::StepResponse expected = was;
    expected.clear_notices();
    now.clear_notices();
    names_.Learn(expected, now);
  }
  void HangUp() {
    if (stream_ == nullptr) return;
    call_->TryCancel();
    stream_->Finish();
    stream_ = nullptr;
  }

  const std::string socket_;
  const std::unique_ptr<v1::Engine::Stub> stub_;
  Names names_;
  UniqueFd attach_;
  v1::OpenSessionResult opened_;
  std::unique_ptr<grpc::ClientContext> call_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
};

TEST(Wire, AnEngineOfTheReleaseAndTodaysDaemon) {
  const std::vector<Any> messages = ReadRecording();
  std::set<std::string> verbs;
  const auto daemon = StartDaemon();
  Replay replay(daemon->socket());
  for (size_t i = 0; i < messages.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("message ", i, ", ", messages[i].type_url()));
    replay.Go(messages[i]);
    if (HasFatalFailure()) return;
    v1::StepRequest request;
    if (messages[i].type_url() == "kvpool.v1.StepRequest" && request.ParseFromString(messages[i].value())) {
      for (const v1::Operation& operation : request.operations()) {
        verbs.insert(v1::Operation::descriptor()->FindFieldByNumber(operation.verb_case())->name());
      }
    }
  }
  EXPECT_EQ(verbs, (std::set<std::string>{"close_session", "lease", "match", "release", "seal"}));
}

int Record(const char* path) {
  const auto daemon = StartDaemon();
  std::ofstream file(path, std::ios::binary);
  WireProxy proxy(daemon->socket(), [&](Message* message) {
    Any any;
    any.set_type_url(message->GetTypeName());
    any.set_value(message->SerializeAsString());
    google::protobuf::util::SerializeDelimitedToOstream(any, &file);
    std::fprintf(stderr, "%s %s\n", any.type_url().c_str(),
                 message->ShortDebugString().substr(0, 150).c_str());
  });
  ExpectExamplesWork(proxy.socket());
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace
}  // namespace kvpool

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--record") return kvpool::Record(argv[2]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
