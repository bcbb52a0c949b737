// The Step stream's round trip with 64 operations, as frames and over gRPC, against a bare gRPC echo stream that carries the same bytes
// both ways. Servers are processes of their own, that of the echo an async gRPC server; clients are one thread that waits; the
// rounds take turns. And what a keeper costs: the same and smaller and larger batches, against a daemon without one.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvpool/v1/engine.grpc.pb.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"
#include "tests/bench/pairs.h"
#include "tests/bench/raw_session.h"
#include "tests/support/daemon_process.h"

namespace kvpool::bench {
namespace {

constexpr int kWarmupRounds = 500, kRounds = 3000;

using Stream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

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

}  // namespace

void BenchKeeper(Figures* figures) {
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
  const auto stub = EngineStub(directory.path() + "/echo.sock");
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
