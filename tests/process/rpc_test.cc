// What engines and operators see on the wire of a real kvpoold. Started as "process_test engine SOCKET
// LEASE SEAL", this program is an engine that leases, seals under the keys of "shared", says so, and
// waits to be killed.
#include <fcntl.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "proto/support/step_frames.h"
#include "tests/process/raw_engine.h"
#include "tests/process/step_stream.h"
#include "tests/support/daemon_process.h"

extern char** environ;

namespace kvpool {
namespace {

int RunEngine(const std::string& socket, int lease, int seal) {
  auto engine = RawEngine::Open(socket);
  if (!engine.ok()) return printf("%s\n", engine.status().ToString().c_str()), 1;
  auto blocks = (*engine)->Lease(lease);
  if (!blocks.ok() || blocks->size() != static_cast<size_t>(lease)) return 2;
  blocks->resize(seal);
  auto sealed = (*engine)->Seal(*blocks, KeysOf("shared", seal));
  if (!sealed.ok() || sealed->refused_size() != 0) return 3;
  printf("ready\n");
  fflush(stdout);
  for (;;) pause();
}

// An engine in a process of its own.
class EngineProcess {
 public:
  EngineProcess(const std::string& socket, int lease, int seal) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], 1);
    std::string words[] = {"process_test", "engine", socket, absl::StrCat(lease), absl::StrCat(seal)};
    char* arguments[] = {words[0].data(), words[1].data(), words[2].data(),
                         words[3].data(), words[4].data(), nullptr};
    if (posix_spawn(&pid_, "/proc/self/exe", &files, nullptr, arguments, environ) != 0) std::abort();
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    char word[6] = {};
    const ssize_t size = read(ends[0], word, sizeof(word));
    EXPECT_EQ(std::string(word, size > 0 ? size : 0), "ready\n");
    close(ends[0]);
  }
  ~EngineProcess() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
};

class RpcTest : public ::testing::Test {
 protected:
  void Start(std::vector<std::string> flags = {}) {
    auto daemon = DaemonProcess::Start({.flags = std::move(flags)});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = std::move(*daemon);
    channel_ = ConnectTo(daemon_->target());
    operators_ = v1::Operator::NewStub(channel_);
  }
  std::unique_ptr<RawEngine> OpenEngine() {
    auto engine = RawEngine::Open(daemon_->socket());
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
  v1::StateCounts Blocks() {
    v1::GetStatsResponse response;
    grpc::ClientContext context;
    const absl::Status status = FromGrpc(operators_->GetStats(&context, v1::GetStatsRequest(), &response));
    EXPECT_TRUE(status.ok()) << status;
    return response.blocks();
  }
  v1::ListSessionsResponse Sessions() {
    v1::ListSessionsResponse response;
    grpc::ClientContext context;
    const absl::Status status =
        FromGrpc(operators_->ListSessions(&context, v1::ListSessionsRequest(), &response));
    EXPECT_TRUE(status.ok()) << status;
    return response;
  }
  // Asks until the condition holds; each question is a round trip.
  template <typename Question>
  static bool Eventually(Question question) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!question()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Operator::Stub> operators_;
};

class RpcStepTest : public RpcTest, public ::testing::WithParamInterface<StepBy> {};

INSTANTIATE_TEST_SUITE_P(Step, RpcStepTest, ::testing::Values(StepBy::kGrpc, StepBy::kFrames),
                         [](const auto& info) { return NameOf(info.param); });

TEST_F(RpcTest, TwoProcessesShareAPrefixAndAKilledOneGivesBackTheRest) {
  Start();
  auto survivor = OpenEngine();
  ASSERT_NE(survivor, nullptr);
  const v1::StateCounts before = Blocks();
  EngineProcess engine(daemon_->socket(), 16, 8);

  const auto match = survivor->Match(KeysOf("shared", 10));
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_EQ(match->tokens(), 8u * 16);
  EXPECT_EQ(match->miss(), v1::MISS_REASON_NEVER_SEEN);

  engine.Kill();
  EXPECT_TRUE(Eventually([&] {
    const v1::StateCounts now = Blocks();
    EXPECT_EQ(now.free() + now.leased() + now.sealed() + now.cached() + now.quarantined(), now.capacity());
    return now.quarantined() == 0 && now.leased() == before.leased();
  }));
  EXPECT_EQ(Blocks().sealed(), 8u);
  EXPECT_EQ(Sessions().sessions_size(), 1);
  EXPECT_EQ(daemon_->Metric("kvpool_sessions_ended_total"), 1);
}

TEST_P(RpcStepTest, StepAndUnaryVerbsAnswerAlike) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  const auto blocks = engine->Lease(4);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  const auto sealed = engine->Seal(*blocks, KeysOf("a", 4));
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  const auto matched = engine->Match(KeysOf("a", 5));
  ASSERT_TRUE(matched.ok()) << matched.status();
  const std::vector<uint64_t> strangers = {(uint64_t{9} << 32) | 17, (uint64_t{1} << 32) | 999999};
  const auto released = engine->Release(strangers);
  ASSERT_TRUE(released.ok()) << released.status();
  EXPECT_EQ(released->refused_size(), 2);
  const auto fenced = engine->Fence(3);
  ASSERT_TRUE(fenced.ok()) << fenced.status();

  const auto stream = OpenStep(GetParam(), &engine->stub(), daemon_->socket());
  v1::StepRequest batch = engine->NextBatch();
  v1::GroupKeys* group = batch.add_operations()->mutable_match()->add_groups();
  group->set_key_bytes(32);
  group->set_keys(KeysOf("a", 5));
  batch.add_operations()->mutable_release()->mutable_blocks()->Add(strangers.begin(), strangers.end());
  batch.add_operations()->mutable_fence()->set_step(3);
  ASSERT_TRUE(stream->Write(batch));
  v1::StepResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(answer.sequence(), batch.sequence());
  ASSERT_EQ(answer.results_size(), 3) << answer.DebugString();
  EXPECT_EQ(answer.results(0).match().SerializeAsString(), matched->SerializeAsString());
  EXPECT_EQ(answer.results(1).release().SerializeAsString(), released->SerializeAsString());
  EXPECT_EQ(answer.results(2).fence().SerializeAsString(), fenced->SerializeAsString());

  // The same batch again gets the first answer again.
  ASSERT_TRUE(stream->Write(batch));
  v1::StepResponse again;
  ASSERT_TRUE(stream->Read(&again));
  EXPECT_EQ(again.results(0).SerializeAsString(), answer.results(0).SerializeAsString());
  stream->WritesDone();
  while (stream->Read(&again)) {
  }
  EXPECT_TRUE(stream->Finish().ok());
}

// A session whose blocks can be scored: one layer, one head of 4 floats.
absl::StatusOr<std::unique_ptr<RawEngine>> OpenScored(const std::string& socket) {
  ASSIGN_OR_RETURN(std::unique_ptr<RawEngine> engine, RawEngine::Attach(socket));
  v1::OpenSession request = SmallSession(engine->attach_token());
  request.mutable_layout()->set_encoding(v1::ENCODING_STRIDED);
  v1::LayerGroup* group = request.mutable_layout()->mutable_groups(0);
  group->set_kv_heads(1);
  group->set_k_head_dim(4);
  group->set_v_head_dim(4);
  group->set_dtype(v1::DTYPE_F32);
  group->mutable_k()->set_token_stride_bytes(16);
  group->mutable_k()->set_dim_stride_bytes(4);
  *group->mutable_v() = group->k();
  group->mutable_v()->set_offset_bytes(1024);
  request.mutable_fingerprint()->set_digest("a model that can be scored");
  grpc::ClientContext context;
  v1::OpenSessionResult opened;
  RETURN_IF_ERROR(FromGrpc(engine->stub().OpenSession(&context, request, &opened)));
  engine->Adopt(opened);
  RETURN_IF_ERROR(engine->TakeSlabs());
  return engine;
}

// The results of four operations, including those that came late.
std::vector<v1::OperationResult> AllResults(RawStepStream* stream, uint64_t sequence, int count) {
  std::vector<v1::OperationResult> results(count);
  for (int missing = count; missing > 0;) {
    v1::StepResponse answer;
    if (!stream->Read(&answer)) break;
    for (int i = 0; i < answer.results_size(); ++i) {
      if (answer.results(i).parked()) continue;
      results[i] = answer.results(i);
      --missing;
    }
    for (const v1::Completion& completion : answer.completions()) {
      EXPECT_EQ(completion.sequence(), sequence);
      results[completion.index()] = completion.result();
      --missing;
    }
  }
  return results;
}

TEST_P(RpcStepTest, VerbsOnTheDeviceAnswerLateAndAlike) {
  Start();
  absl::StatusOr<std::unique_ptr<RawEngine>> opened = OpenScored(daemon_->socket());
  ASSERT_TRUE(opened.ok()) << opened.status();
  RawEngine& engine = **opened;
  const auto blocks = engine.Lease(5);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  v1::Sequence sequence;
  sequence.mutable_blocks()->Add(blocks->begin(), blocks->end());
  const auto call = [&engine](auto method, auto request, auto* result) {
    *request.mutable_call() = engine.NextCall();
    grpc::ClientContext context;
    const grpc::Status status = (engine.stub().*method)(&context, request, result);
    EXPECT_TRUE(status.ok()) << status.error_message();
  };

  v1::ScoreRequest score;
  *score.mutable_score()->mutable_sequence() = sequence;
  score.mutable_score()->set_block_scores(true);
  v1::ScoreResult scored;
  call(&v1::Engine::Stub::Score, score, &scored);
  EXPECT_EQ(scored.block_scores_size(), 5);
  v1::SelectRequest select;
  *select.mutable_select()->mutable_sequence() = sequence;
  select.mutable_select()->mutable_window()->set_queries(1);
  select.mutable_select()->mutable_window()->set_q_heads(1);
  select.mutable_select()->mutable_window()->mutable_data()->set_inlined(
      std::string(4 * sizeof(float), '\0'));
  select.mutable_select()->set_budget_blocks(2);
  v1::SelectResult selected;
  call(&v1::Engine::Stub::Select, select, &selected);
  EXPECT_EQ(selected.selected(), 2u);
  v1::PruneRequest prune;
  *prune.mutable_prune()->mutable_sequence() = sequence;
  prune.mutable_prune()->set_budget_blocks(4);
  prune.mutable_prune()->set_dry_run(true);
  v1::PruneResult pruned;
  call(&v1::Engine::Stub::Prune, prune, &pruned);
  EXPECT_EQ(pruned.victims_size(), 1);
  v1::CompactRequest compact;
  *compact.mutable_compact()->mutable_sequence() = sequence;
  compact.mutable_compact()->mutable_keep()->add_positions(20);
  compact.mutable_compact()->set_keep_sources(true);
  v1::CompactResult compacted;
  call(&v1::Engine::Stub::Compact, compact, &compacted);
  EXPECT_EQ(compacted.table_size(), 1);
  v1::PlanBudgetsRequest plan;
  plan.mutable_plan_budgets()->set_method(v1::BUDGET_METHOD_UNIFORM);
  plan.mutable_plan_budgets()->set_layers(2);
  plan.mutable_plan_budgets()->set_tokens_per_layer(9);
  v1::PlanBudgetsResult planned;
  call(&v1::Engine::Stub::PlanBudgets, plan, &planned);
  EXPECT_EQ(planned.budget_tokens_size(), 2);

  const auto stream = OpenStep(GetParam(), &engine.stub(), daemon_->socket());
  v1::StepRequest batch = engine.NextBatch();
  *batch.add_operations()->mutable_score() = score.score();
  *batch.add_operations()->mutable_prune() = prune.prune();
  *batch.add_operations()->mutable_plan_budgets() = plan.plan_budgets();
  *batch.add_operations()->mutable_select() = select.select();
  *batch.add_operations()->mutable_release()->mutable_blocks() = sequence.blocks();
  ASSERT_TRUE(stream->Write(batch));
  const std::vector<v1::OperationResult> results = AllResults(stream.get(), batch.sequence(), 5);
  scored.set_blocks_read(0);  // The features are in the cache now.
  pruned.set_blocks_read(0);
  selected.set_blocks_read(0);
  EXPECT_EQ(results[0].score().SerializeAsString(), scored.SerializeAsString());
  EXPECT_EQ(results[1].prune().SerializeAsString(), pruned.SerializeAsString());
  EXPECT_EQ(results[2].plan_budgets().SerializeAsString(), planned.SerializeAsString());
  EXPECT_EQ(results[3].select().SerializeAsString(), selected.SerializeAsString());
  EXPECT_TRUE(results[4].has_release());
  EXPECT_EQ(results[4].release().refused_size(), 0);
}

TEST_P(RpcStepTest, AStreamOpensItsOwnSession) {
  Start();
  auto engine = RawEngine::Attach(daemon_->socket());
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto stream = OpenStep(GetParam(), &(*engine)->stub(), daemon_->socket());
  v1::StepRequest batch;
  *batch.add_operations()->mutable_open_session() = SmallSession("not a token");
  ASSERT_TRUE(stream->Write(batch));
  v1::StepResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  ASSERT_EQ(answer.results_size(), 1);
  EXPECT_NE(answer.results(0).code(), 0);
  EXPECT_FALSE(answer.results(0).message().empty());

  *batch.mutable_operations(0)->mutable_open_session() = SmallSession((*engine)->attach_token());
  ASSERT_TRUE(stream->Write(batch));
  ASSERT_TRUE(stream->Read(&answer));
  ASSERT_EQ(answer.results_size(), 1);
  ASSERT_EQ(answer.results(0).code(), 0) << answer.results(0).message();
  (*engine)->Adopt(answer.results(0).open_session());
  ASSERT_TRUE((*engine)->TakeSlabs().ok());

  batch = (*engine)->NextBatch();
  batch.clear_member_token();
  batch.add_operations()->mutable_lease()->set_count(3);
  ASSERT_TRUE(stream->Write(batch));
  do {  // A capacity notice may come first.
    ASSERT_TRUE(stream->Read(&answer));
  } while (answer.sequence() == 0);
  EXPECT_EQ(answer.results(0).lease().blocks_size(), 3) << answer.DebugString();

  batch = (*engine)->NextBatch();
  batch.set_member_token("another member's");
  ASSERT_TRUE(stream->Write(batch));
  do {
    ASSERT_TRUE(stream->Read(&answer));
  } while (answer.sequence() == 0);
  EXPECT_EQ(answer.code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
}

TEST_P(RpcStepTest, AnUnknownTokenIsRefusedEverywhere) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  const auto stream = OpenStep(GetParam(), &engine->stub(), daemon_->socket());
  v1::StepRequest batch = engine->NextBatch();
  batch.set_member_token(std::string(16, 'x'));
  ASSERT_TRUE(stream->Write(batch));
  v1::StepResponse answer;
  EXPECT_FALSE(stream->Read(&answer));
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kUnauthenticated);

  v1::LeaseRequest lease;
  *lease.mutable_call() = engine->NextCall();
  lease.mutable_call()->set_member_token(std::string(16, 'x'));
  lease.mutable_lease()->set_count(1);
  grpc::ClientContext lease_context;
  v1::LeaseResult result;
  EXPECT_EQ(engine->stub().Lease(&lease_context, lease, &result).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  // An answer is counted once it is on its way.
  EXPECT_TRUE(
      Eventually([&] { return daemon_->Metric("kvpool_rpc_errors_total", "method=\"Lease\"") == 1; }));
}

TEST_F(RpcTest, BytesThatAreNoBatchEndTheStream) {
  Start();
  v1::StepRequest no_text;
  no_text.add_operations()->mutable_open_session()->set_tenant("\xff");
  for (const std::string& bytes : {std::string("\xff\xff\xff"), no_text.SerializeAsString()}) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    const auto stream = stub.PrepareCall(&context, "/kvpool.v1.Engine/Step", &queue);
    const auto next = [&] {
      void* tag = nullptr;
      bool ok = false;
      EXPECT_TRUE(queue.Next(&tag, &ok));
      return ok;
    };
    stream->StartCall(nullptr);
    ASSERT_TRUE(next());
    const grpc::Slice slice(bytes);
    stream->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    EXPECT_TRUE(next());
    grpc::Status status;
    stream->Finish(&status, nullptr);
    EXPECT_TRUE(next());
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), "the message is not a StepRequest");
  }
  EXPECT_NE(OpenEngine(), nullptr) << "others do not notice";
  EXPECT_EQ(daemon_->Log().find("libprotobuf"), std::string::npos)
      << "a peer writes to stderr: " << daemon_->Log();
}

// A frame by hand: its size, whatever follows.
std::string FrameOf(const std::string& bytes, uint32_t size) {
  std::string frame(4, '\0');
  for (int i = 0; i < 4; ++i) frame[i] = static_cast<char>(size >> (8 * i));
  return frame + bytes;
}
std::string FrameOf(const std::string& bytes) { return FrameOf(bytes, static_cast<uint32_t>(bytes.size())); }

// A connection that has said kStepPreface, and no more.
class RawFrames {
 public:
  explicit RawFrames(const std::string& path) : socket_(*ConnectStepSocket(path)) {}
  void Say(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t more = send(socket_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      ASSERT_TRUE(more > 0 || errno == EAGAIN) << strerror(errno);
      sent += more > 0 ? static_cast<size_t>(more) : 0;
      pollfd polled{socket_.get(), POLLOUT, 0};
      if (more < 0) poll(&polled, 1, -1);
    }
  }
  // The next frame, the last one included; waits.
  v1::StepResponse Next() {
    StepFrameReader::Outcome outcome;
    while ((outcome = reader_.Next(socket_.get())) == StepFrameReader::Outcome::kNoneYet) {
      pollfd polled{socket_.get(), POLLIN, 0};
      poll(&polled, 1, -1);
      reader_.OnReadable(false);
    }
    EXPECT_EQ(outcome, StepFrameReader::Outcome::kFrame);
    v1::StepResponse response;
    EXPECT_TRUE(response.ParseFromArray(reader_.frame().data(), static_cast<int>(reader_.frame().size())));
    return response;
  }
  // How the daemon ends the stream.
  absl::Status End() {
    v1::StepResponse response = Next();
    while (!reader_.is_end()) response = Next();
    char byte;
    while (recv(socket_.get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) {
      pollfd polled{socket_.get(), POLLIN, 0};
      poll(&polled, 1, -1);
    }
    EXPECT_LE(recv(socket_.get(), &byte, 1, 0), 0) << "it said something after the end";
    return absl::Status(static_cast<absl::StatusCode>(response.code()), response.message());
  }
  int socket() const { return socket_.get(); }

 private:
  UniqueFd socket_;
  StepFrameReader reader_{kMaxStepResponseBytes};
};

TEST_F(RpcTest, FramesThatAreNoBatchesEndTheirStreamAlone) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  const std::string good = engine->NextBatch().SerializeAsString();
  const auto ends = [&](const std::string& bytes) {
    RawFrames frames(daemon_->socket());
    frames.Say(bytes);
    return frames.End();
  };
  const absl::Status no_batch = absl::InvalidArgumentError("the message is not a StepRequest");
  EXPECT_EQ(ends(FrameOf("\xff\xff\xff")), no_batch);
  EXPECT_EQ(ends(FrameOf(good, uint32_t{1} << 31 | static_cast<uint32_t>(good.size()))), no_batch)
      << "the last frame is the daemon's to send";
  EXPECT_EQ(ends(FrameOf("", (8 << 20) + 1)),
            absl::ResourceExhaustedError("a batch of 8388609 bytes; the limit is 8388608"));
  EXPECT_EQ(ends(FrameOf("", 0x7fffffff)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ends(FrameOf("")).code(), absl::StatusCode::kUnauthenticated) << "it names no member";
  EXPECT_NE(OpenEngine(), nullptr) << "others do not notice";
  EXPECT_EQ(daemon_->Log().find("libprotobuf"), std::string::npos)
      << "a peer writes to stderr: " << daemon_->Log();
}

TEST_F(RpcTest, FramesThatComeByteByByteAndManyAtOnceAreTheSame) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  RawFrames frames(daemon_->socket());
  std::string all;
  const auto fence = [&](uint64_t step) {
    v1::StepRequest batch = engine->NextBatch();
    batch.add_operations()->mutable_fence()->set_step(step);
    return FrameOf(batch.SerializeAsString());
  };
  for (const char byte : fence(1)) frames.Say(std::string(1, byte));
  while (frames.Next().sequence() == 0) {  // Notices come first.
  }
  // More than are read while nobody takes their answers.
  constexpr uint64_t kBatches = 100;
  for (uint64_t step = 2; step <= kBatches; ++step) all += fence(step);
  frames.Say(all);
  shutdown(frames.socket(), SHUT_WR);
  for (uint64_t step = 2; step <= kBatches; ++step) {
    const v1::StepResponse answer = frames.Next();
    ASSERT_EQ(answer.results_size(), 1) << answer.ShortDebugString();
    EXPECT_EQ(answer.results(0).fence().passed(), step);
  }
  EXPECT_EQ(frames.End(), absl::OkStatus());
}

TEST_F(RpcTest, FramesThatHangUpAnywhereLeaveNothing) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  v1::StepRequest batch = engine->NextBatch();
  batch.add_operations()->mutable_lease()->set_count(1);
  const std::string frame = FrameOf(batch.SerializeAsString());
  const auto open_fds = [&] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/fd"))) {
      ++count;
    }
    return count;
  };
  EXPECT_EQ(Sessions().sessions_size(), 1);  // Its connection stays.
  const size_t before = open_fds();
  // In the middle of a frame, the last one whole: nobody waits for its answer.
  for (size_t size = 0; size <= frame.size(); ++size) {
    RawFrames(daemon_->socket()).Say(frame.substr(0, size));
  }
  EXPECT_TRUE(Eventually([&] { return Sessions().sessions(0).leased() == 2; }))  // One is the sink block.
      << "a batch that came whole is applied once";
  EXPECT_TRUE(Eventually([&] { return open_fds() <= before; })) << "of " << before;
  EXPECT_TRUE(engine->Fence(1).ok());
}

TEST_F(RpcTest, FramesOfAPeerThatDoesNotReadDoNotHoldTheDaemonUp) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  RawFrames frames(daemon_->socket());
  // Answers that no socket holds: each refuses 16384 blocks.
  for (int i = 0; i < 8; ++i) {
    v1::StepRequest batch = engine->NextBatch();
    auto* blocks = batch.add_operations()->mutable_release()->mutable_blocks();
    for (uint64_t block = 0; block < 16384; ++block) blocks->Add(uint64_t{1} << 32 | (1'000'000 + block));
    frames.Say(FrameOf(batch.SerializeAsString()));
  }
  EXPECT_TRUE(Eventually([&] { return daemon_->Metric("kvpool_step_batches_total") >= 2; }));
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(RpcTest, AParkedUnaryCallAnswersWhenItsStepHasPassed) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  const auto blocks = engine->Lease(2);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  v1::ReleaseRequest release;
  *release.mutable_call() = engine->NextCall(/*after=*/5);
  release.mutable_release()->mutable_blocks()->Add(blocks->begin(), blocks->end());
  absl::Status released = absl::UnknownError("not yet");
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::ReleaseResult result;
    released = FromGrpc(engine->stub().Release(&context, release, &result));
  });
  EXPECT_TRUE(Eventually([&] { return Sessions().sessions(0).parked() == 1; }));
  EXPECT_EQ(Sessions().sessions(0).leased(), 3u);  // Those two and the sink block.
  EXPECT_TRUE(engine->Fence(5).ok());
  caller.join();
  EXPECT_TRUE(released.ok()) << released;
  EXPECT_EQ(Sessions().sessions(0).leased(), 1u);
}

TEST_F(RpcTest, AParkedUnaryCallEndsWithTheDaemon) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  const auto blocks = engine->Lease(1);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  absl::Status released;
  v1::ReleaseRequest release;
  *release.mutable_call() = engine->NextCall(/*after=*/5);
  release.mutable_release()->add_blocks((*blocks)[0]);
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::ReleaseResult result;
    released = FromGrpc(engine->stub().Release(&context, release, &result));
  });
  EXPECT_TRUE(Eventually([&] { return Sessions().sessions(0).parked() == 1; }));
  EXPECT_EQ(daemon_->Stop(), 0);
  caller.join();
  EXPECT_FALSE(released.ok());
}

TEST_P(RpcStepTest, ANewerStreamOfAMemberTakesOver) {
  Start();
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  v1::StepResponse answer;
  const auto older = OpenStep(GetParam(), &engine->stub(), daemon_->socket());
  v1::StepRequest batch = engine->NextBatch();
  batch.add_operations()->mutable_lease()->set_count(1);
  ASSERT_TRUE(older->Write(batch));
  ASSERT_TRUE(older->Read(&answer));
  const auto newer = OpenStep(GetParam(), &engine->stub(), daemon_->socket());
  batch = engine->NextBatch();
  batch.add_operations()->mutable_lease()->set_count(1);
  ASSERT_TRUE(newer->Write(batch));
  ASSERT_TRUE(newer->Read(&answer));
  EXPECT_EQ(answer.results(0).lease().blocks_size(), 1) << answer.DebugString();
  while (older->Read(&answer)) {
  }
  EXPECT_EQ(older->Finish().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(daemon_->Metric("kvpool_reconnects_total"), 1);
}

TEST_P(RpcStepTest, AClientThatStopsReadingIsNotReadFurther) {
  Start();
  auto greedy = OpenEngine();
  auto other = OpenEngine();
  ASSERT_TRUE(greedy != nullptr && other != nullptr);
  // Each answer refuses 16384 blocks, which is far more than the stream's window holds.
  const auto stream = OpenStep(GetParam(), &greedy->stub(), daemon_->socket());
  constexpr int kBatches = 40;
  std::thread writer([&] {
    for (int i = 0; i < kBatches; ++i) {
      v1::StepRequest batch = greedy->NextBatch();
      auto* blocks = batch.add_operations()->mutable_release()->mutable_blocks();
      for (uint64_t block = 0; block < 16384; ++block) blocks->Add(uint64_t{1} << 32 | (1'000'000 + block));
      if (!stream->Write(batch)) return;
    }
    stream->WritesDone();
  });
  EXPECT_TRUE(Eventually([&] { return daemon_->Metric("kvpool_step_batches_total") >= 16; }));
  // Meanwhile others are served. Their calls give the daemon time to read more of its
  // batches, which it must not.
  for (int i = 0; i < 500; ++i) ASSERT_TRUE(other->Fence(i + 1).ok());
  EXPECT_LE(daemon_->Metric("kvpool_step_operations_total", "verb=\"release\""), 24);
  v1::StepResponse answer;
  int answers = 0;
  while (stream->Read(&answer)) answers += answer.sequence() != 0 ? 1 : 0;
  writer.join();
  EXPECT_EQ(answers, kBatches);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_P(RpcStepTest, SigtermDrainsTellsAndEnds) {
  Start({"--shutdown-grace=60s"});
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  const auto stream = OpenStep(GetParam(), &engine->stub(), daemon_->socket());
  v1::StepRequest batch = engine->NextBatch();
  batch.add_operations()->mutable_lease()->set_count(1);
  ASSERT_TRUE(stream->Write(batch));
  v1::StepResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  kill(daemon_->pid(), SIGTERM);
  bool drain = false;
  while (!drain && stream->Read(&answer)) {
    for (const v1::Notice& notice : answer.notices()) drain |= notice.kind() == v1::NOTICE_KIND_DRAIN;
  }
  EXPECT_TRUE(drain);
  // A well-behaved engine closes its session; then there is nothing left to wait for.
  batch = engine->NextBatch();
  batch.add_operations()->mutable_close_session();
  ASSERT_TRUE(stream->Write(batch));
  while (stream->Read(&answer)) {
  }
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_P(RpcStepTest, ThreadsCanBeMany) {
  Start({"--rpc-threads=4"});
  auto engine = OpenEngine();
  ASSERT_NE(engine, nullptr);
  for (int i = 0; i < 50; ++i) {
    const auto stream = OpenStep(GetParam(), &engine->stub(), daemon_->socket());
    v1::StepRequest batch = engine->NextBatch();
    batch.add_operations()->mutable_fence()->set_step(i + 1);
    ASSERT_TRUE(stream->Write(batch));
    v1::StepResponse answer;
    ASSERT_TRUE(stream->Read(&answer));
    EXPECT_EQ(answer.results(0).fence().passed(), static_cast<uint64_t>(i + 1));
    ASSERT_TRUE(engine->Fence(i + 1).ok());
  }
  EXPECT_EQ(daemon_->Stop(), 0);
}

}  // namespace
}  // namespace kvpool

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "engine")
    return kvpool::RunEngine(argv[2], atoi(argv[3]), atoi(argv[4]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
