// How long an answer counts when a daemon wants memory back: what engines are told, and who is late.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "client/tools/operator_client.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// What the daemon waits for an answer: for an opening, and for a limit.
constexpr uint64_t kOpeningMs = 2000, kLimitMs = 1000;

class NoticesTest : public SessionTest {
 protected:
  // The notices of one session, in order.
  class Heard {
   public:
    void Add(const v1::Notice& notice) {
      std::lock_guard lock(mu_);
      notices_.push_back(notice);
    }
    // The next notice that memory is to be given back; without one the test fails. Under pressure others come as well.
    v1::Notice AwaitRevoke() {
      for (const Deadline deadline = Soon(); steady_clock::now() < deadline;) {
        {
          std::lock_guard lock(mu_);
          while (next_ < notices_.size()) {
            const v1::Notice& notice = notices_[next_++];
            if (notice.kind() == v1::NOTICE_KIND_REVOKE && notice.detail() == "memory is to be given back")
              return notice;
          }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      ADD_FAILURE() << "nobody is asked for anything";
      return {};
    }
    // Those heard so far are of no interest.
    void Skip() {
      std::lock_guard lock(mu_);
      next_ = notices_.size();
    }

   private:
    std::mutex mu_;
    std::vector<v1::Notice> notices_;
    size_t next_ = 0;
  };

  SessionOptions OptionsOf(const std::string& model) const {
    SessionOptions options = OptionsFor(daemon_->socket());
    options.client_name = model;
    options.fingerprint.set_digest(model);
    options.give_back = GiveBack::kAnyTime;
    options.magazine_blocks = 0;
    return options;
  }
  // An opening of another model, which waits for memory.
  class Opening {
   public:
    Opening(SessionOptions options, uint32_t guaranteed) {
      options.guaranteed_blocks = guaranteed;
      thread_ = std::thread([this, options = std::move(options)] {
        session_ = Session::Open(options);
        done_ = true;
      });
    }
    ~Opening() {
      if (thread_.joinable()) thread_.join();
    }
    bool done() const { return done_; }
    absl::StatusOr<std::unique_ptr<Session>>& Await() {
      thread_.join();
      return session_;
    }

   private:
    absl::StatusOr<std::unique_ptr<Session>> session_ = absl::UnknownError("");
    std::atomic<bool> done_{false};
    std::thread thread_;
  };
  // Leases so many blocks, and releases all but one in each slab.
  static void KeepOneOfEachSlab(Session* session, uint32_t blocks, std::vector<BlockRef>* kept) {
    auto all = session->LeaseWithin(blocks, Soon());
    ASSERT_TRUE(all.ok()) << all.status();
    std::vector<BlockRef> rest;
    for (const BlockRef block : all->refs())
      (Index(block.id) % kSlabBlocks == 5 ? *kept : rest).push_back(block);
    all->Detach();
    session->Release(rest);
    ASSERT_TRUE(session->Flush(Soon()).ok());
  }
  double Late() const { return daemon_->Metric("kvpool_give_back_late_total"); }
};

TEST_F(NoticesTest, ARevocationSaysHowLongItCountsAndWhoDoesNotAnswerIsLate) {
  StartDaemon("32MiB");
  Heard heard;
  SessionOptions options = OptionsOf("a");
  options.on_notice = [&heard](const v1::Notice& notice) { heard.Add(notice); };
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  // All eight slabs, in each of which one block stays leased and is never sealed.
  std::vector<BlockRef> kept;
  ASSERT_NO_FATAL_FAILURE(KeepOneOfEachSlab(a.get(), 500, &kept));
  ASSERT_EQ(kept.size(), 8u);

  Opening refused(OptionsOf("b"), 100);
  const v1::Notice revoke = heard.AwaitRevoke();
  EXPECT_GT(revoke.deadline_ms(), 0u);
  EXPECT_LE(revoke.deadline_ms(), kOpeningMs);
  EXPECT_TRUE(revoke.on());
  EXPECT_GE(revoke.value(), kept.size());
  const auto& b = refused.Await();
  EXPECT_EQ(b.status().code(), absl::StatusCode::kResourceExhausted) << b.status();
  const std::string log = daemon_->AwaitInLog("memory was not given back in time");
  EXPECT_THAT(log, HasSubstr(absl::StrCat("session ", a->id(), " (a, pid ", getpid(),
                                          ") has leased 1 blocks there")));
  EXPECT_EQ(Late(), 1);

  // Who lets go in time is not.
  heard.Skip();
  Opening opened(OptionsOf("b"), 100);
  EXPECT_LE(heard.AwaitRevoke().deadline_ms(), kOpeningMs);
  a->Release(kept);
  ASSERT_TRUE(a->Flush(Soon()).ok());
  EXPECT_TRUE(opened.Await().ok()) << opened.Await().status();
  EXPECT_EQ(Late(), 1);
}

TEST_F(NoticesTest, ALimitWaitsForAnAnswerToo) {
  StartDaemon("32MiB");
  Heard heard;
  SessionOptions options = OptionsOf("a");
  options.on_notice = [&heard](const v1::Notice& notice) { heard.Add(notice); };
  const auto a = Open(options);
  ASSERT_NE(a, nullptr);
  std::vector<BlockRef> kept;
  ASSERT_NO_FATAL_FAILURE(KeepOneOfEachSlab(a.get(), 250, &kept));
  auto client = tools::OperatorClient::Open({.socket = daemon_->socket(), .deadline = absl::Seconds(60)});
  ASSERT_TRUE(client.ok()) << client.status();
  v1::SetShareRequest request;
  request.set_space(1);
  request.set_limit_blocks(2 * kSlabBlocks);
  ASSERT_TRUE((*client)->SetShare(request).ok());
  const v1::Notice revoke = heard.AwaitRevoke();
  EXPECT_GT(revoke.deadline_ms(), 0u);
  EXPECT_LE(revoke.deadline_ms(), kLimitMs);
  // It asks again after that time, and is answered.
  EXPECT_THAT(daemon_->AwaitInLog("memory was not given back in time"), HasSubstr("(a, pid "));
  EXPECT_GE(Late(), 1);
  a->Release(kept);
  ASSERT_TRUE(a->Flush(Soon()).ok());
  for (const Deadline deadline = Soon(); a->capacity_blocks() > 2 * kSlabBlocks;) {
    ASSERT_LT(steady_clock::now(), deadline) << daemon_->Log();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_F(NoticesTest, AnEngineInCIsToldHowLongItHasAndGivesAHole) {
  StartDaemon("32MiB", {"--policy=lru"});
  PeerProcess giver(daemon_->socket(), KVPOOL_C_GIVER);
  ASSERT_EQ(giver.Ask("fill 512"), "ok");
  ASSERT_EQ(giver.Ask("ranges"), "0-512");

  // It hears of it, and does not answer.
  Opening refused(OptionsOf("b"), 100);
  const int64_t within = atoll(giver.Ask("asked").c_str());
  EXPECT_GT(within, 0);
  EXPECT_LE(within, static_cast<int64_t>(kOpeningMs));
  const auto& b = refused.Await();
  EXPECT_EQ(b.status().code(), absl::StatusCode::kResourceExhausted) << b.status();
  const std::string session = absl::StrCat("session ", giver.Ask("id"), " (giver");
  // The slab may still be on its way back.
  EXPECT_THAT(std::string(b.status().message()),
              AnyOf(HasSubstr(session + ") did not answer in time when memory was last asked for"),
                    HasSubstr(absl::StrCat(session, ", pid ", giver.pid(), ") has yet to unmap a slab"))));
  EXPECT_THAT(daemon_->AwaitInLog("memory was not given back in time"),
              HasSubstr(absl::StrCat(session, ", pid ", giver.pid(), ") has yet to unmap a slab")));
  EXPECT_EQ(Late(), 1);
  // The slab is its own again.
  for (const Deadline deadline = Soon(); giver.Ask("ranges") != "0-512";)
    ASSERT_LT(steady_clock::now(), deadline);
  EXPECT_EQ(giver.Ask("turn"), "-1 0");

  Opening opened(OptionsOf("b"), 100);
  uint64_t bytes = 0;
  int64_t longest = 0;
  while (!opened.done()) {
    std::istringstream turn(giver.Ask("turn"));
    int64_t left = 0;
    uint64_t given = 0;
    ASSERT_TRUE(turn >> left >> given) << turn.str();
    bytes += given;
    longest = std::max(longest, left);
  }
  EXPECT_TRUE(opened.Await().ok()) << opened.Await().status();
  EXPECT_GT(longest, 0);
  EXPECT_LE(longest, static_cast<int64_t>(kOpeningMs));
  EXPECT_GE(bytes, 2 * kSlabBlocks * kBlockBytes);
  EXPECT_EQ(Late(), 1);
  // The last slab stays for the block that it holds.
  const std::string ranges = giver.Ask("ranges");
  EXPECT_THAT(ranges, AllOf(testing::StartsWith("0-"), testing::EndsWith("-512"), HasSubstr(" ")));
}

}  // namespace
}  // namespace kvpool
