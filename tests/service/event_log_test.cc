// The event log: what it keeps, what it says of what it could not keep, and what the simulator makes of it.
#include "server/events/event_log.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "server/sim/read_workload.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class EventLogTest : public ServiceTest {
 protected:
  EventLogTest() {
    std::string folder = (std::filesystem::temp_directory_path() / "kvpool-events-XXXXXX").string();
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    path_ = (folder_ / "events").string();
  }
  ~EventLogTest() override { std::filesystem::remove_all(folder_); }

  static EventHeader Header(EventKind kind, uint32_t words, uint64_t time_ms = 0) {
    return {
        .kind = kind, .words = words, .time_ms = time_ms, .space = 1, .session = 1, .tokens_per_block = 16};
  }
  sim::Workload Read() const {
    absl::StatusOr<sim::Workload> workload = sim::ReadWorkload(path_, {});
    EXPECT_TRUE(workload.ok()) << workload.status();
    return workload.ok() ? *std::move(workload) : sim::Workload();
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(EventLogTest, WhatEnginesAskForIsReadBackAsRequests) {
  options_.event_log = path_;
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  engine->Match(Keys("a", 3));
  std::vector<uint64_t> blocks = engine->Lease(3);
  engine->Seal(blocks, Keys("a", 3));
  // The answer, block by block.
  const std::vector<std::string> five = Keys("a", 5);
  for (int i = 3; i < 5; ++i) {
    blocks.push_back(engine->Lease(1)[0]);
    engine->Seal({blocks.back()}, {five[i]}, five[i - 1]);
  }
  engine->Release(blocks);
  clock_.Advance(70);
  engine->Match(Keys("a", 6));
  const std::vector<uint64_t> lone = engine->Lease(1);
  engine->Seal(lone, Keys("b", 1));
  EXPECT_EQ(daemon_->Snapshot().events_logged, 0) << "nothing is on file yet";
  EXPECT_EQ(daemon_->Snapshot().events_lost, 0);
  daemon_.reset();

  struct stat file;
  ASSERT_EQ(stat(path_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  const sim::Workload w = Read();
  EXPECT_EQ(w.tokens_per_block, 16u);
  EXPECT_EQ(w.distinct, 7u);
  ASSERT_EQ(w.requests.size(), 3u);
  EXPECT_EQ(w.requests[0].blocks, 3u);
  EXPECT_EQ(w.requests[0].answer_blocks, 2u);
  EXPECT_EQ(w.requests[0].tokens, 48u);
  EXPECT_EQ(w.requests[1].now_ms, 70u);
  EXPECT_EQ(w.requests[1].blocks, 6u);
  EXPECT_EQ(w.requests[2].blocks, 0u);
  EXPECT_EQ(w.requests[2].answer_blocks, 1u);
  const auto first = w.chain(w.requests[0]), second = w.chain(w.requests[1]);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), second.begin())) << "the answer is asked for later";
  EXPECT_TRUE(w.hints.empty());
}

TEST_F(EventLogTest, HintsOfReleasesAreReadBackWithTheirBlocks) {
  options_.event_log = path_;
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest()), other = OpenEngine(OpenRequest(), "other");
  const auto serve = [](Engine* e, const std::vector<std::string>& keys) {
    const v1::MatchResult match = e->Match(keys);
    std::vector<uint64_t> held(match.groups(0).blocks().begin(), match.groups(0).blocks().end());
    const size_t hits = held.size();
    for (size_t i = hits; i < keys.size(); ++i) {
      held.push_back(e->Lease(1)[0]);
      e->Seal({held.back()}, {keys[i]}, i == 0 ? "" : keys[i - 1]);
    }
    return held;
  };
  const auto release = [](Engine* e, const std::vector<uint64_t>& blocks, v1::Reuse reuse,
                          uint32_t category) {
    v1::Operation operation = ReleaseOp(blocks);
    operation.mutable_release()->set_reuse(reuse);
    operation.mutable_release()->set_category(category);
    e->Do(operation);
  };
  // Two requests begin alike; the first to end is the first to have come.
  const std::vector<std::string> a = {Key("system"), Key("a1"), Key("a2")};
  const std::vector<std::string> b = {Key("system"), Key("b1")};
  const std::vector<uint64_t> of_a = serve(engine.get(), a), of_b = serve(other.get(), b);
  release(engine.get(), of_a, v1::REUSE_EXPECTED, 3);
  release(other.get(), of_b, v1::REUSE_UNSPECIFIED, 7);
  // A part of a chain, and nothing said of the rest.
  const std::vector<uint64_t> again = serve(engine.get(), a);
  release(engine.get(), {again[2]}, v1::REUSE_NEVER, 0);
  release(engine.get(), {again[0], again[1]}, v1::REUSE_UNSPECIFIED, 0);
  daemon_.reset();

  const sim::Workload w = Read();
  ASSERT_EQ(w.requests.size(), 3u);
  const UseHint expected = {.reuse = Reuse::kExpected, .category = 3}, seventh = {.category = 7};
  const std::vector<UseHint> in_order = {expected, expected, expected, seventh,
                                         seventh,  {},       {},       {.reuse = Reuse::kNever}};
  EXPECT_TRUE(w.hints == in_order);
}

TEST_F(EventLogTest, ALogOfTheFirstVersionIsRead) {
  auto log = EventLog::Open({.path = path_, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  (*log)->Add(Header(EventKind::kMatch, 2), {1, 2});
  EventHeader hint = Header(EventKind::kHint, 1);
  hint.category = 4;
  (*log)->Add(hint, {2});
  log->reset();
  EXPECT_EQ(Read().hints_of(Read().requests[0])[1].category, 4);
  const auto put = [&](std::streamoff at, char byte) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(at);
    file.put(byte);
  };
  // A hint that no version knows.
  put(32 + 40 + 16 + 3, 16);
  EXPECT_EQ(sim::ReadWorkload(path_, {}).status().message(),
            path_ + ": record 2 hints at reuse 0 and category 16");
  put(14, '1');
  EXPECT_EQ(sim::ReadWorkload(path_, {}).status().message(), path_ + ": record 2 is of kind 4 with 1 words");
  std::filesystem::resize_file(path_, 32 + 40 + 16);
  EXPECT_EQ(Read().requests.size(), 1u);
  EXPECT_TRUE(Read().hints.empty());
}

TEST_F(EventLogTest, KeysAreHashedWithASecret) {
  const BlockKey key = BlockKey::From("a prompt in plain text", 0), other = BlockKey::From("another", 0);
  auto one = EventLog::Open({.path = path_, .thread = false});
  auto two = EventLog::Open({.path = path_ + "2", .thread = false});
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ((*one)->Hash(key), (*one)->Hash(key));
  EXPECT_NE((*one)->Hash(key), (*one)->Hash(other));
  EXPECT_NE((*one)->Hash(key), (*two)->Hash(key));
}

TEST_F(EventLogTest, IsBounded) {
  auto log = EventLog::Open({.path = path_, .max_bytes = 8192, .buffer_bytes = 2048, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  for (uint64_t i = 0; i < 1000; ++i) {
    (*log)->Add(Header(EventKind::kMatch, 2, i), {i + 1, i + 2});
    if (i % 10 == 0) (*log)->Drain();
  }
  log->reset();
  EXPECT_LE(std::filesystem::file_size(path_) + std::filesystem::file_size(path_ + ".1"), 8192u);
  // The part in front is read too: more than half of the bound, up to the last request.
  const sim::Workload w = Read();
  EXPECT_GT(w.requests.size(), 4096 / 56);
  EXPECT_EQ(w.requests.back().now_ms, w.requests.size() - 1);
  // Another run of the daemon has other hashes: what it finds is not read with what it writes.
  log = EventLog::Open({.path = path_, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  (*log)->Add(Header(EventKind::kMatch, 1), {1});
  log->reset();
  EXPECT_EQ(Read().requests.size(), 1u);
}

TEST_F(EventLogTest, WhatDoesNotFitIsCountedAndSaid) {
  auto log = EventLog::Open({.path = path_, .buffer_bytes = 200, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  for (uint64_t i = 0; i < 10; ++i) (*log)->Add(Header(EventKind::kMatch, 1, i), {i + 1});
  EXPECT_EQ((*log)->counters().lost, 7u);
  (*log)->Drain();
  EXPECT_EQ((*log)->counters().written, 3u);
  (*log)->Add(Header(EventKind::kMatch, 1, 10), {11});
  log->reset();
  testing::internal::CaptureStderr();
  EXPECT_EQ(Read().requests.size(), 4u);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), path_ + ": 7 events were lost\n");
}

TEST_F(EventLogTest, AFullDiskStopsItAndNothingElse) {
  auto log = EventLog::Open({.path = path_, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  // Writes beyond this fail with EFBIG.
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  // Behind the first record, in the middle of the second.
  const rlimit least = {.rlim_cur = 32 + 48 + 40, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &least), 0);
  for (uint64_t i = 0; i < 3; ++i) (*log)->Add(Header(EventKind::kMatch, 1), {i + 1});
  EXPECT_EQ((*log)->counters().written, 0u);
  (*log)->Drain();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_EQ((*log)->counters().written, 1u);
  EXPECT_EQ((*log)->counters().lost, 2u);
  (*log)->Add(Header(EventKind::kMatch, 1), {4});
  EXPECT_EQ((*log)->counters().written, 1u);
  EXPECT_EQ((*log)->counters().lost, 3u);
  EXPECT_EQ(Read().requests.size(), 1u);
  const absl::Status nowhere = EventLog::Open({.path = path_ + "/events", .thread = false}).status();
  EXPECT_EQ(nowhere.code(), absl::StatusCode::kUnavailable) << nowhere;
  // A device would be renamed.
  const std::string device = (folder_ / "device").string();
  std::filesystem::create_symlink("/dev/full", device);
  EXPECT_EQ(EventLog::Open({.path = device, .thread = false}).status().message(),
            device + " is no regular file");
}

// A restart on a full disk is no worse than a disk that fills.
TEST_F(EventLogTest, AFullDiskAtTheStartStopsItAndNothingElse) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  const auto log = EventLog::Open({.path = path_, .thread = false});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  ASSERT_TRUE(log.ok()) << log.status();
  (*log)->Add(Header(EventKind::kMatch, 1), {1});
  EXPECT_EQ((*log)->counters().lost, 1u);
  EXPECT_EQ((*log)->counters().written, 0u);
}

TEST_F(EventLogTest, ALogThatWasCutOffIsReadUpToThere) {
  auto log = EventLog::Open({.path = path_, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  for (uint64_t i = 0; i < 4; ++i) (*log)->Add(Header(EventKind::kMatch, 2, i), {1, 2});
  log->reset();
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 4);
  EXPECT_EQ(Read().requests.size(), 3u);
  std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(32);
  file.put(9);
  file.close();
  EXPECT_EQ(sim::ReadWorkload(path_, {}).status().message(), path_ + ": record 1 is of kind 9 with 2 words");
}

TEST_F(EventLogTest, OfSeveralSpacesOneIsChosen) {
  auto log = EventLog::Open({.path = path_, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  for (uint64_t i = 0; i < 3; ++i) {
    EventHeader header = Header(EventKind::kMatch, 1, i);
    header.space = i == 0 ? 5 : 7;
    (*log)->Add(header, {i + 1});
  }
  log->reset();
  EXPECT_EQ(sim::ReadWorkload(path_, {}).status().message(),
            path_ + ": space 0: there are 5 (1 matches), 7 (2 matches)");
  EXPECT_EQ(sim::ReadWorkload(path_, {.space = 7})->requests.size(), 2u);
}

TEST_F(EventLogTest, MatchesWithoutKeysAreNoWorkload) {
  auto log = EventLog::Open({.path = path_, .thread = false});
  ASSERT_TRUE(log.ok()) << log.status();
  (*log)->Add(Header(EventKind::kMatch, 0), {});
  (*log)->Add(Header(EventKind::kSeal, 2), {0, 1});
  log->reset();
  EXPECT_EQ(sim::ReadWorkload(path_, {}).status().message(), path_ + ": space 1: no match asks for any key");
}

TEST_F(EventLogTest, ThreadsAddWhileItIsWritten) {
  constexpr int kThreads = 3, kEvents = 2000;
  auto log = EventLog::Open({.path = path_, .max_bytes = 64 << 20, .buffer_bytes = 1 << 20});
  ASSERT_TRUE(log.ok()) << log.status();
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&log, t] {
      for (uint64_t i = 0; i < kEvents; ++i) {
        (*log)->Add(Header(EventKind::kMatch, 2, i), {t + 1, i + 10});
        if (i % 100 == 0) (*log)->Drain();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  (*log)->Drain();
  EXPECT_EQ((*log)->counters().written + (*log)->counters().lost, uint64_t{kThreads} * kEvents);
  const uint64_t written = (*log)->counters().written;
  log->reset();
  EXPECT_EQ(Read().requests.size(), written);
}

}  // namespace
}  // namespace kvpool
