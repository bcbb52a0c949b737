// Checks, on a machine with a GPU, the behaviour that the design relies on and no document promises. Prints a
// table; the exit status is 0 if and only if nothing that the design relies on turned out false.
#include <signal.h>
#include <sys/types.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cuda/device.h"
#include "proto/support/status_macros.h"
#include "tests/gpu/gpu_process.h"

namespace kvpool {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr uint64_t kKey = 7;

// How much the check does on the GPU.
struct Effort {
  size_t slab_bytes = 64 * kMiB;
  size_t stamp_bytes = 512 * kMiB;
  int kills = 20;           // processes that are killed while their kernel runs
  uint64_t watch_ms = 500;  // how long each one's memory is watched afterwards
};
// The fake driver's answers mean nothing; a run over it only shows that the questions work.
constexpr Effort kQuick = {.slab_bytes = 4 * kMiB, .stamp_bytes = 16 * kMiB, .kills = 2, .watch_ms = 20};

// A finding. An error says that it could not be found out, or is not as the design needs it.
using Answer = absl::StatusOr<std::string>;

absl::Status ExpectStamp(GpuProcess& process, uint64_t key, const std::string& when) {
  ASSIGN_OR_RETURN(const GpuAnswer answer, process.Do({.op = GpuOp::kVerifyStamp, .key = key}));
  if (answer.values[0] == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(answer.values[0], " wrong words ", when));
}

struct Shared {
  std::unique_ptr<GpuProcess> exporter;
  std::unique_ptr<GpuProcess> importer;
};

// One process exports memory with a stamp in it, and another maps it.
absl::StatusOr<Shared> Share(const Effort& effort, bool by_ipc) {
  Shared shared;
  ASSIGN_OR_RETURN(shared.exporter, GpuProcess::Start());
  ASSIGN_OR_RETURN(shared.importer, GpuProcess::Start());
  UniqueFd fd;
  ASSIGN_OR_RETURN(
      const GpuAnswer made,
      shared.exporter->Do({.op = by_ipc ? GpuOp::kMakeIpcSlab : GpuOp::kMakeSlab, .bytes = effort.slab_bytes},
                          -1, &fd));
  RETURN_IF_ERROR(shared.exporter->Do({.op = GpuOp::kWriteStamp, .key = kKey}).status());
  RETURN_IF_ERROR(shared.importer
                      ->Do({.op = by_ipc ? GpuOp::kOpenIpc : GpuOp::kMapSlab,
                            .bytes = effort.slab_bytes,
                            .handle = made.handle},
                           fd.get())
                      .status());
  RETURN_IF_ERROR(ExpectStamp(*shared.importer, kKey, "right after the import"));
  return shared;
}

Answer WhatGpu() {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> process, GpuProcess::Start());
  ASSIGN_OR_RETURN(const GpuAnswer answer, process->Do({.op = GpuOp::kDescribe}));
  return answer.text;
}

Answer CallCosts(size_t bytes) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> process, GpuProcess::Start());
  ASSIGN_OR_RETURN(const GpuAnswer answer, process->Do({.op = GpuOp::kMeasureCalls, .bytes = bytes}));
  std::string text;
  for (size_t i = 0; i < kCallNames.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", kCallNames[i], " ", answer.values[i]);
  }
  return text + " us";
}

Answer ExporterKilled(const Effort& effort, bool by_ipc) {
  ASSIGN_OR_RETURN(Shared shared, Share(effort, by_ipc));
  ASSIGN_OR_RETURN(const uint64_t death_us, shared.exporter->Kill());
  RETURN_IF_ERROR(ExpectStamp(*shared.importer, kKey, "after the exporter's death"));
  RETURN_IF_ERROR(shared.importer->Do({.op = GpuOp::kWriteStamp, .key = kKey + 1}).status());
  RETURN_IF_ERROR(ExpectStamp(*shared.importer, kKey + 1, "written after the exporter's death"));
  return absl::StrCat("the importer reads and writes on; SIGKILL to pidfd ", death_us, " us");
}

Answer ImporterKilled(const Effort& effort) {
  ASSIGN_OR_RETURN(Shared shared, Share(effort, false));
  RETURN_IF_ERROR(shared.importer->Kill().status());
  RETURN_IF_ERROR(ExpectStamp(*shared.exporter, kKey, "after the importer's death"));
  return "the exporter does not notice";
}

Answer OnlyAnFdHolds(const Effort& effort) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> exporter, GpuProcess::Start());
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> witness, GpuProcess::Start());
  UniqueFd fd;
  RETURN_IF_ERROR(exporter->Do({.op = GpuOp::kMakeSlab, .bytes = effort.slab_bytes}, -1, &fd).status());
  RETURN_IF_ERROR(exporter->Do({.op = GpuOp::kWriteStamp, .key = kKey}).status());
  RETURN_IF_ERROR(exporter->Kill().status());
  // This process holds the fd and has no CUDA context. Other processes' allocations must not get this memory.
  UniqueFd other;
  RETURN_IF_ERROR(witness->Do({.op = GpuOp::kMakeSlab, .bytes = effort.slab_bytes}, -1, &other).status());
  RETURN_IF_ERROR(witness->Do({.op = GpuOp::kWriteStamp, .key = kKey + 1}).status());
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> heir, GpuProcess::Start());
  RETURN_IF_ERROR(heir->Do({.op = GpuOp::kMapSlab, .bytes = effort.slab_bytes}, fd.get()).status());
  RETURN_IF_ERROR(ExpectStamp(*heir, kKey, "imported from an fd whose maker was dead"));
  return "it stays, and a new process can import it";
}

Answer FreedWithTheLastFd(const Effort& effort) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> witness, GpuProcess::Start());
  ASSIGN_OR_RETURN(const GpuAnswer before, witness->Do({.op = GpuOp::kFreeBytes}));
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> exporter, GpuProcess::Start());
  UniqueFd fd;
  RETURN_IF_ERROR(exporter->Do({.op = GpuOp::kMakeSlab, .bytes = effort.slab_bytes}, -1, &fd).status());
  RETURN_IF_ERROR(exporter->Kill().status());
  ASSIGN_OR_RETURN(const GpuAnswer held, witness->Do({.op = GpuOp::kFreeBytes}));
  fd.Reset();
  ASSIGN_OR_RETURN(const GpuAnswer after, witness->Do({.op = GpuOp::kFreeBytes}));
  const auto mib = [&](uint64_t bytes) {
    return static_cast<int64_t>(before.values[0] - bytes) / static_cast<int64_t>(kMiB);
  };
  return absl::StrCat("of ", effort.slab_bytes / kMiB,
                      " MiB, missing while only the fd holds it: ", mib(held.values[0]),
                      " MiB; after closing it: ", mib(after.values[0]), " MiB");
}

// This question decides when a dead engine's blocks may be given to others. A child that the engine has forked keeps the
// GPU's files open: the design can't see it and does not rely on an answer, but operators are told of it.
Answer WritesAfterDeath(const Effort& effort, bool forked) {
  constexpr uint64_t kForever = uint64_t{1} << 36;
  uint64_t latest_us = 0;
  uint64_t moves = 0;
  uint64_t slowest_death_us = 0;
  for (int round = 0; round < effort.kills; ++round) {
    ASSIGN_OR_RETURN(Shared shared, Share(effort, false));
    GpuProcess& victim = *shared.exporter;
    GpuProcess& witness = *shared.importer;
    ASSIGN_OR_RETURN(const GpuAnswer before, witness.Do({.op = GpuOp::kSampleCounter}));
    RETURN_IF_ERROR(victim.Do({.op = GpuOp::kStartCounting, .key = kForever}).status());
    // Once the counter moves, the kernel runs.
    uint64_t running = before.values[0];
    while (running == before.values[0]) {
      ASSIGN_OR_RETURN(const GpuAnswer now, witness.Do({.op = GpuOp::kSampleCounter}));
      running = now.values[0];
    }
    pid_t child = -1;
    if (forked) {
      ASSIGN_OR_RETURN(const GpuAnswer made, victim.Do({.op = GpuOp::kFork}));
      child = static_cast<pid_t>(made.values[0]);
    }
    ASSIGN_OR_RETURN(const uint64_t death_us, victim.Kill());
    slowest_death_us = std::max(slowest_death_us, death_us);
    ASSIGN_OR_RETURN(const GpuAnswer watched,
                     witness.Do({.op = GpuOp::kWatchCounter, .key = effort.watch_ms}));
    if (forked) ::kill(child, SIGKILL);
    moves += watched.values[0] != watched.values[1];
    latest_us = std::max(latest_us, watched.values[2]);
  }
  if (moves != 0 && forked) {
    return absl::StrCat("in ", moves, " of ", effort.kills, " kills the kernel wrote on, up to ", latest_us,
                        " us later: an engine must not fork after it has opened the GPU");
  }
  if (moves != 0) {
    return absl::DataLossError(absl::StrCat("in ", moves, " of ", effort.kills,
                                            " kills a dead process's kernel wrote up to ", latest_us,
                                            " us after its pidfd had fired: quarantine must last longer"));
  }
  return absl::StrCat("none in ", effort.kills, " kills of a running kernel; SIGKILL to pidfd ",
                      slowest_death_us, " us at most");
}

Answer ReadOnlyMapping(const Effort& effort) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> exporter, GpuProcess::Start());
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> reader, GpuProcess::Start());
  UniqueFd fd;
  RETURN_IF_ERROR(exporter->Do({.op = GpuOp::kMakeSlab, .bytes = effort.slab_bytes}, -1, &fd).status());
  RETURN_IF_ERROR(exporter->Do({.op = GpuOp::kWriteStamp, .key = kKey}).status());
  RETURN_IF_ERROR(reader->Do({.op = GpuOp::kMapReadOnly, .bytes = effort.slab_bytes}, fd.get()).status());
  RETURN_IF_ERROR(ExpectStamp(*reader, kKey, "through a read-only mapping"));
  const absl::Status written = reader->Do({.op = GpuOp::kWriteStamp, .key = kKey + 1}).status();
  if (written.ok()) return absl::DataLossError("a write through a read-only mapping succeeded");
  RETURN_IF_ERROR(ExpectStamp(*exporter, kKey, "after a write through a read-only mapping"));
  RETURN_IF_ERROR(exporter->Do({.op = GpuOp::kWriteStamp, .key = kKey + 2}).status());
  return absl::StrCat("the writer loses its context (", written.message(), "), the owner is unharmed");
}

Answer ReexportOfAnImport(const Effort& effort) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> exporter, GpuProcess::Start());
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> importer, GpuProcess::Start());
  UniqueFd fd;
  RETURN_IF_ERROR(exporter->Do({.op = GpuOp::kMakeSlab, .bytes = effort.slab_bytes}, -1, &fd).status());
  ASSIGN_OR_RETURN(const GpuAnswer answer,
                   importer->Do({.op = GpuOp::kReexport, .bytes = effort.slab_bytes}, fd.get()));
  return answer.text;
}

Answer StallOfRunningKernels() {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> process, GpuProcess::Start());
  ASSIGN_OR_RETURN(const GpuAnswer answer, process->Do({.op = GpuOp::kMeasureStall, .bytes = 256 * kMiB}));
  return absl::StrFormat(
      "a 256 MiB slab takes %d us idle, %d us beside a kernel; the kernel %d us alone, %d us beside it",
      answer.values[0], answer.values[1], answer.values[2], answer.values[3]);
}

Answer StampSpeed(const Effort& effort) {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> process, GpuProcess::Start());
  ASSIGN_OR_RETURN(const GpuAnswer answer,
                   process->Do({.op = GpuOp::kMeasureStamps, .bytes = effort.stamp_bytes}));
  return absl::StrFormat("write %.1f GB/s, verify %.1f GB/s", answer.values[0] / 1e3, answer.values[1] / 1e3);
}

Answer FenceCost() {
  ASSIGN_OR_RETURN(const std::unique_ptr<GpuProcess> process, GpuProcess::Start());
  ASSIGN_OR_RETURN(const GpuAnswer answer, process->Do({.op = GpuOp::kMeasureFence}));
  return absl::StrFormat("record %d ns, query %d ns, wait on an idle stream %d us", answer.values[0],
                         answer.values[1], answer.values[2]);
}

Answer SignalCost(const Effort& effort, bool by_event) {
  ASSIGN_OR_RETURN(Shared shared, Share(effort, false));
  if (by_event) {
    const absl::StatusOr<GpuAnswer> event = shared.exporter->Do({.op = GpuOp::kMakeEvent});
    if (absl::IsUnimplemented(event.status()))
      return absl::StrCat("not supported here: ", event.status().message());
    RETURN_IF_ERROR(event.status());
    RETURN_IF_ERROR(shared.importer->Do({.op = GpuOp::kOpenEvent, .handle = event->handle}).status());
  } else {
    // Numbers start above the value that the stamp left in the semaphore's word.
    RETURN_IF_ERROR(shared.exporter->Do({.op = GpuOp::kStartCounting, .key = 1}).status());
    for (uint64_t word = 0; word != 1;) {
      ASSIGN_OR_RETURN(const GpuAnswer now, shared.exporter->Do({.op = GpuOp::kSampleCounter}));
      word = now.values[0];
    }
  }
  ASSIGN_OR_RETURN(SocketPair sockets, MakeSocketPair());
  RETURN_IF_ERROR(shared.exporter->Send({.op = GpuOp::kServeSignals}, sockets.first.get()));
  sockets.first.Reset();
  ASSIGN_OR_RETURN(
      const GpuAnswer answer,
      shared.importer->Do({.op = GpuOp::kMeasureSignals, .key = by_event}, sockets.second.get()));
  return absl::StrFormat("p50 %.1f us, p99 %.1f us", answer.values[0] / 10.0, answer.values[1] / 10.0);
}

struct Fact {
  std::string question;
  std::function<Answer()> find;
};

std::vector<Fact> Facts(const Effort& effort) {
  std::vector<Fact> facts;
  facts.push_back({"GPU", WhatGpu});
  for (const size_t mib : {2, 64, 256, 1024}) {
    facts.push_back({absl::StrCat("driver calls, ", mib, " MiB"), [mib] { return CallCosts(mib * kMiB); }});
  }
  facts.push_back({"exporter killed, VMM", [=] { return ExporterKilled(effort, false); }});
  facts.push_back({"exporter killed, IPC", [=] { return ExporterKilled(effort, true); }});
  facts.push_back({"importer killed", [=] { return ImporterKilled(effort); }});
  facts.push_back({"memory that only an fd holds", [=] { return OnlyAnFdHolds(effort); }});
  facts.push_back({"memory after the last fd", [=] { return FreedWithTheLastFd(effort); }});
  facts.push_back({"writes after the pidfd fired", [=] { return WritesAfterDeath(effort, false); }});
  facts.push_back({"the same, a forked child alive", [=] { return WritesAfterDeath(effort, true); }});
  facts.push_back({"read-only mapping", [=] { return ReadOnlyMapping(effort); }});
  facts.push_back({"export of an import", [=] { return ReexportOfAnImport(effort); }});
  facts.push_back({"slabs made beside kernels", StallOfRunningKernels});
  facts.push_back({"stamps", [=] { return StampSpeed(effort); }});
  facts.push_back({"fence", FenceCost});
  facts.push_back({"order across processes, semaphore", [=] { return SignalCost(effort, false); }});
  facts.push_back({"order across processes, IPC event", [=] { return SignalCost(effort, true); }});
  return facts;
}

// The exit status.
int Ask(const std::vector<Fact>& facts) {
  int failures = 0;
  for (const Fact& fact : facts) {
    const Answer answer = fact.find();
    const bool no_gpu = fact.question == "GPU" && !answer.ok();
    failures += !answer.ok();
    std::printf("%-4s  %-34s  %s\n", answer.ok() ? "ok" : "FAIL", fact.question.c_str(),
                answer.ok() ? answer->c_str() : answer.status().ToString().c_str());
    std::fflush(stdout);
    if (no_gpu) {
      std::printf("no such device here: none of the facts could be asked\n");
      return 2;
    }
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvpool

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--role") == 0) return kvpool::ServeGpuProcess();
  const bool quick = argc == 2 && std::strcmp(argv[1], "--quick") == 0;
  const bool only_gpu = argc == 2 && std::strcmp(argv[1], "--gpu") == 0;
  if (argc != 1 && !quick && !only_gpu) {
    std::fprintf(stderr, "usage: gpu_facts [--quick | --gpu]\n");
    return 2;
  }
  if (only_gpu) return kvpool::Ask({{"GPU", kvpool::WhatGpu}});
  return kvpool::Ask(kvpool::Facts(quick ? kvpool::kQuick : kvpool::Effort()));
}
