// The Step stream's round trip with 64 operations, as frames and over gRPC, against a bare gRPC echo stream that carries the same bytes
// both ways. Servers are processes of their own, that of the echo an async gRPC server; clients are one thread that waits; the
// rounds take turns. And what a keeper costs: the same and smaller and larger batches, against a daemon without one.
#include <grpcpp/grpcpp.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session/attachment.h"
#include "kvpool/v1/engine.grpc.pb.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"
#include "tests/process/step_stream.h"
#include "tests/support/daemon_process.h"

namespace kvpool::bench {
namespace {

constexpr int kGroups = 16;  // Each has four operations.
constexpr int kBlocksPerOperation = 1;
constexpr int kWarmupRounds = 500, kRounds = 3000;

using Stream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

std::unique_ptr<v1::Engine::Stub> Stub(const std::string& socket) {
  return v1::Engine::NewStub(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
}

// A session without the client library, so that only what it sends is measured.
class RawSession {
 public:
  RawSession(const std::string& socket, StepBy by) : stub_(Stub(socket)) {
    auto attached = Attachment::Connect({.socket = socket, .client_name = "kvpool-bench"}, Patience());
    KVPOOL_CHECK(attached.ok(), "%s", attached.status().ToString().c_str());
    attachment_ = *std::move(attached);
    const SessionOptions options = EngineOptions(socket);
    v1::OpenSession request;
    request.set_attach_token(attachment_->token());
    *request.mutable_layout() = options.layout;
    *request.mutable_fingerprint() = options.fingerprint;
    grpc::ClientContext context;
    const grpc::Status opened = stub_->OpenSession(&context, request, &session_);
    KVPOOL_CHECK(opened.ok(), "OpenSession: %s", opened.error_message().c_str());
    attachment_->Start({.block_stride_bytes = session_.block_stride_bytes(),
                        .max_blocks = session_.max_blocks(),
                        .slab_bytes = session_.slab_bytes()},
                       session_.member_token(), &state_, [] {});
    state_.signal.Await(Patience(), [this] { return state_.capacity_blocks.load() > 0; });
    stream_ = OpenStep(by, stub_.get(), socket);
    // The session may lease once its slabs are mapped.
    while (leased_.size() < kGroups * kBlocksPerOperation) {
      v1::StepRequest first = Begin();
      first.add_operations()->mutable_lease()->set_count(kGroups * kBlocksPerOperation);
      const v1::StepResponse response = Say(first);
      const auto& blocks = response.results(0).lease().blocks();
      leased_.insert(leased_.end(), blocks.begin(), blocks.end());
    }
    leased_.resize(kGroups * kBlocksPerOperation);
  }

  // 64 operations: each group matches what the last round sealed, leases, seals what the last round leased, and gives
  // back that and what the last round matched.
  v1::StepRequest NextBatch() {
    v1::StepRequest request = Begin();
    std::string keys(kGroups * kBlocksPerOperation * 32, '\0');
    for (size_t i = 0; i < keys.size(); i += 32) {
      const uint64_t name = ++keys_made_;
      std::copy_n(reinterpret_cast<const char*>(&name), sizeof(name),
                  keys.begin() + static_cast<ptrdiff_t>(i));
    }
    constexpr size_t kGroupKeyBytes = kBlocksPerOperation * 32;
    for (int group = 0; group < kGroups; ++group) {
      const size_t first = static_cast<size_t>(group) * kBlocksPerOperation;
      v1::GroupKeys& asked = *request.add_operations()->mutable_match()->add_groups();
      asked.set_key_bytes(32);
      asked.set_keys(last_keys_.empty() ? keys.substr(first * 32, kGroupKeyBytes)
                                        : last_keys_.substr(first * 32, kGroupKeyBytes));
      request.add_operations()->mutable_lease()->set_count(kBlocksPerOperation);
      v1::Seal& seal = *request.add_operations()->mutable_seal();
      seal.set_key_bytes(32);
      seal.set_keys(keys.substr(first * 32, kGroupKeyBytes));
      v1::Release& release = *request.add_operations()->mutable_release();
      for (size_t i = first; i < first + kBlocksPerOperation; ++i) {
        seal.add_blocks(leased_[i]);
        release.add_blocks(leased_[i]);
        if (i < matched_.size()) release.add_blocks(matched_[i]);
      }
    }
    last_keys_ = keys;
    return request;
  }
  // Leases so many blocks, and gives them back in a batch of its own.
  void LeaseAndRelease(uint32_t blocks) {
    v1::StepRequest request = Begin();
    request.add_operations()->mutable_lease()->set_count(blocks);
    const v1::StepResponse leased = Say(request);
    KVPOOL_CHECK(leased.results(0).lease().blocks_size() == static_cast<int>(blocks),
                 "%d of %u blocks leased", leased.results(0).lease().blocks_size(), blocks);
    v1::StepRequest release = Begin();
    *release.add_operations()->mutable_release()->mutable_blocks() = leased.results(0).lease().blocks();
    KVPOOL_CHECK(Say(release).results(0).release().refused().empty(), "a release was refused");
  }
  v1::StepResponse Say(const v1::StepRequest& request) {
    v1::StepResponse response;
    KVPOOL_CHECK(stream_->Write(request) && stream_->Read(&response), "the stream broke");
    return response;
  }
  // Remembers what the next batch names.
  void Take(const v1::StepResponse& response) {
    leased_.clear();
    matched_.clear();
    for (const v1::OperationResult& result : response.results()) {
      KVPOOL_CHECK(
          result.code() == 0 && result.seal().refused_size() == 0 && result.release().refused_size() == 0,
          "an operation was refused");
      leased_.insert(leased_.end(), result.lease().blocks().begin(), result.lease().blocks().end());
      if (!result.has_match()) continue;
      const auto& hit = result.match().groups(0).blocks();
      matched_.insert(matched_.end(), hit.begin(), hit.end());
    }
    KVPOOL_CHECK(leased_.size() == kGroups * kBlocksPerOperation, "%zu blocks leased", leased_.size());
  }

 private:
  v1::StepRequest Begin() {
    v1::StepRequest request;
    request.set_member_token(session_.member_token());
    request.set_acknowledged(sequence_);
    request.set_sequence(++sequence_);
    return request;
  }

  const std::unique_ptr<v1::Engine::Stub> stub_;
  SessionState state_;
  std::unique_ptr<Attachment> attachment_;
  v1::OpenSessionResult session_;
  std::unique_ptr<RawStepStream> stream_;
  uint64_t sequence_ = 0, keys_made_ = 0;
  std::string last_keys_;
  std::vector<uint64_t> leased_, matched_;
};

std::vector<int> UsableCpus() {
  cpu_set_t set;
  KVPOOL_CHECK(sched_getaffinity(0, sizeof(set), &set) == 0, "sched_getaffinity: %s", strerror(errno));
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// Keeps all threads of a process on one CPU, for as long as this object lives.
class Pinned {
 public:
  Pinned(pid_t pid, int cpu) : pid_(pid) {
    KVPOOL_CHECK(sched_getaffinity(pid, sizeof(before_), &before_) == 0, "sched_getaffinity: %s",
                 strerror(errno));
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    Set(set);
  }
  ~Pinned() { Set(before_); }

 private:
  void Set(const cpu_set_t& set) const {
    for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid_, "/task"))) {
      const pid_t thread = std::stoi(task.path().filename());
      // A thread may have ended meanwhile.
      KVPOOL_CHECK(sched_setaffinity(thread, sizeof(set), &set) == 0 || errno == ESRCH,
                   "sched_setaffinity: %s", strerror(errno));
    }
  }
  const pid_t pid_;
  cpu_set_t before_;
};

double UsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

double TimedLease(RawSession* session, uint32_t blocks) {
  const auto start = std::chrono::steady_clock::now();
  session->LeaseAndRelease(blocks);
  return UsSince(start);
}

double TimedBatch(RawSession* session) {
  const v1::StepRequest request = session->NextBatch();
  const auto start = std::chrono::steady_clock::now();
  const v1::StepResponse response = session->Say(request);
  const double us = UsSince(start);
  session->Take(response);
  return us;
}

// The upper end of the 95 % interval of the median of 20 pairs, which supposes nothing of how they are distributed: the 15th is
// below the median of all pairs for less than one run of 40 (P(B(20, 1/2) >= 15) = 0.021). The mean's, by Student's t, is
// mostly of the pair in which the host was busy: of two daemons of one kind it said up to 9 %.
double UpperEnd(std::vector<double> values) {
  KVPOOL_CHECK(values.size() == 20, "%zu pairs, not 20", values.size());
  std::sort(values.begin(), values.end());
  return values[14];
}

}  // namespace

void BenchKeeper(Figures* figures) {
  constexpr int kPairs = 20;
  struct Work {
    const char* what;
    int rounds, slices;
    double (*round)(RawSession*);
    std::vector<double> loss_percent;
  };
  const auto lease_one = [](RawSession* session) { return TimedLease(session, 1); };
  const auto lease_many = [](RawSession* session) { return TimedLease(session, 2048); };
  std::vector<Work> works = {{.what = "Lease and Release of a block",
                              .rounds = 20,
                              .slices = 100,
                              .round = lease_one,
                              .loss_percent = {}},
                             {.what = "Lease and Release of 2,048 blocks",
                              .rounds = 5,
                              .slices = 60,
                              .round = lease_many,
                              .loss_percent = {}},
                             {.what = "Step of 64 operations",
                              .rounds = 20,
                              .slices = 100,
                              .round = TimedBatch,
                              .loss_percent = {}}};
  // All of them take turns on one CPU, which the daemons inherit: how long another one takes to wake up is no part of it.
  const Pinned pinned(getpid(), UsableCpus().back());
  for (int pair = 0; pair < kPairs; ++pair) {
    // Where the memory of a daemon comes to lie is worth some percent, for as long as it lives: each pair has its own two.
    std::unique_ptr<DaemonProcess> daemons[2];
    std::unique_ptr<RawSession> sessions[2];
    for (const int kept : {pair % 2, 1 - pair % 2}) {
      daemons[kept] = kept ? StartDaemon("64MiB", "64MiB", {"--keeper=on"}) : StartDaemon("64MiB", "64MiB");
      sessions[kept] = std::make_unique<RawSession>(daemons[kept]->socket(), StepBy::kFrames);
    }
    for (Work& work : works) {
      for (RawSession* const session : {sessions[0].get(), sessions[1].get()}) {
        for (int i = 0; i < 5 * work.rounds; ++i) work.round(session);
      }
      // The processor is up to twice as fast as a moment ago, and the host takes it away now and then: so slices of a
      // millisecond take turns, and a pair's figure is the median of the ratios of neighbours.
      std::vector<double> ratios;
      for (int slice = 0; slice < work.slices; ++slice) {
        double median_us[2];
        for (const int kept : {(slice + pair) % 2, (slice + pair + 1) % 2}) {
          std::vector<double> us;
          for (int i = 0; i < work.rounds; ++i) us.push_back(work.round(sessions[kept].get()));
          median_us[kept] = Percentile(us, 0.5);
        }
        ratios.push_back(median_us[1] / median_us[0]);
      }
      work.loss_percent.push_back(100 * (Percentile(ratios, 0.5) - 1));
    }
    for (auto& session : sessions) session.reset();
    // Killed, the keeper would leave its daemon behind.
    KVPOOL_CHECK(daemons[1]->Stop() == 0, "the daemon with a keeper did not end");
  }
  for (const Work& work : works) {
    figures->Add(absl::StrCat(work.what, ": loss, median of ", kPairs, " pairs"),
                 Percentile(work.loss_percent, 0.5), "%");
    figures->Add(absl::StrCat(work.what, ": loss, upper end of its 95 % interval"),
                 UpperEnd(work.loss_percent), "%", AtMost(3));
  }
}

void BenchStep(Figures* figures) {
  const auto daemon = StartDaemon("16MiB", "16MiB");
  RawSession session(daemon->socket(), StepBy::kFrames), by_grpc(daemon->socket(), StepBy::kGrpc);
  v1::StepRequest request;
  v1::StepResponse response;
  const auto step_once = [&](RawSession* session) {
    request = session->NextBatch();
    const auto start = std::chrono::steady_clock::now();
    response = session->Say(request);
    const double us = UsSince(start);
    session->Take(response);
    return us;
  };
  for (int round = 0; round < kWarmupRounds; ++round) step_once(&session);

  const TemporaryDirectory directory;
  const std::string answer = response.SerializeAsString();
  std::ofstream(directory.path() + "/answer", std::ios::binary) << answer;
  EngineProcess echo({"echo", directory.path() + "/echo.sock", directory.path() + "/answer", ""});
  KVPOOL_CHECK(echo.ReadLine() == "ready", "the echo server is not ready");
  const auto stub = Stub(directory.path() + "/echo.sock");
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = stub->Step(&context);
  const auto echo_once = [&] {
    v1::StepResponse echoed;
    KVPOOL_CHECK(stream->Write(request) && stream->Read(&echoed), "the echo stream broke");
  };
  figures->Note(absl::StrCat("16 times Match, Lease and Seal of a block and Release of two in one batch; ",
                             request.ByteSizeLong(), " bytes there, ", answer.size(), " back; ", kRounds,
                             " rounds of each, taking turns; every block leased is one reclaimed"));
  const auto compare = [&](const std::string& placement) {
    std::vector<double> step_us, grpc_us, echo_us;
    for (int round = -kWarmupRounds; round < kRounds; ++round) {
      const double step = step_once(&session), over_grpc = step_once(&by_grpc);
      const auto echo_start = std::chrono::steady_clock::now();
      echo_once();
      const double bare = UsSince(echo_start);
      if (round < 0) continue;
      step_us.push_back(step);
      grpc_us.push_back(over_grpc);
      echo_us.push_back(bare);
    }
    const double step = Percentile(step_us, 0.5), over_grpc = Percentile(grpc_us, 0.5);
    const double bare = Percentile(echo_us, 0.5);
    figures->Add(absl::StrCat("Step round trip of 64 operations, as frames, median, ", placement), step,
                 "us");
    figures->Add(absl::StrCat("Step round trip of 64 operations, over gRPC, median, ", placement), over_grpc,
                 "us");
    figures->Add(absl::StrCat("bare gRPC echo of the same bytes, median, ", placement), bare, "us");
    figures->Add(absl::StrCat("frames over the bare echo, ", placement), step / bare, "", AtMost(1.25));
    figures->Add(absl::StrCat("gRPC over the bare echo, ", placement), over_grpc / bare, "");
  };
  // Where the scheduler puts three processes changes from run to run, and either figure with it by half.
  const std::vector<int> cpus = UsableCpus();
  const int other = cpus[cpus.size() > 1 ? 1 : 0];
  {
    const Pinned client(getpid(), cpus[0]), daemon_pin(daemon->pid(), other), echo_pin(echo.pid(), other);
    compare("client and servers on cores of their own");
  }
  {
    const Pinned client(getpid(), cpus[0]), daemon_pin(daemon->pid(), cpus[0]), echo_pin(echo.pid(), cpus[0]);
    compare("all on one core");
  }
  context.TryCancel();
  stream->Finish();
}

}  // namespace kvpool::bench
