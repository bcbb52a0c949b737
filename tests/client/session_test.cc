// Sessions with a real daemon: what an engine sees when all is well.
#include "client/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/live_sequence.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

TEST_F(SessionTest, OpensWithMemoryAndGuarantee) {
  StartDaemon();
  SessionOptions options = OptionsFor(daemon_->socket());
  options.guaranteed_blocks = 40;
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  EXPECT_NE(session->base(), 0u);
  EXPECT_GE(session->block_stride_bytes(), kBlockBytes);
  EXPECT_EQ(session->hash_seed().size(), 32u);
  EXPECT_FALSE(session->sink_block() == kNullRef);
  EXPECT_GE(session->free_blocks(), 39u) << "the sink block is one of the guarantee";
  auto all = session->LeaseWithin(39, Soon());
  ASSERT_TRUE(all.ok()) << all.status();
  std::set<uint64_t> ids;
  for (const BlockRef ref : all->refs()) {
    EXPECT_NE(ref.id, kNullBlock);
    EXPECT_FALSE(ref == session->sink_block());
    EXPECT_TRUE(ids.insert(ref.Pack()).second);
  }
}

TEST_F(SessionTest, ReadsBackWhatItSealed) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(1, 20), kTokensPerBlock);
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), keys));
  const GroupKeys asked{.keys = KeyBytes(keys)};
  auto pending = session->Match({&asked, 1});
  ASSERT_TRUE(pending.ok()) << pending.status();
  auto hit = pending->Wait(Soon());
  ASSERT_TRUE(hit.ok()) << hit.status();
  EXPECT_EQ(hit->tokens, 20u * kTokensPerBlock);
  ASSERT_EQ(hit->groups[0].size(), 20u);
  for (size_t i = 0; i < keys.size(); ++i)
    EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i])) << i;
  EXPECT_EQ(session->counters().refused, 0u);
}

// Keys of one hash, to whoever knows the source: were they one in the daemon, too, each seal would visit all that came before,
// and this would take minutes.
TEST_F(SessionTest, KeysThatWereChosenToCollideDoNot) {
  constexpr uint32_t kBlocks = (KVPOOL_SANITIZED ? 32 : 256) << 10, kAtOnce = 16 << 10;
  StartDaemon("96MiB");
  SessionOptions options = OptionsFor(daemon_->socket());
  options.layout = OpaqueLayout({.block_bytes = 256, .tokens_per_block = kTokensPerBlock});
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  const Deadline end = Soon();
  for (uint64_t first = 0; first < kBlocks; first += kAtOnce) {
    auto blocks = session->LeaseWithin(kAtOnce, end);
    ASSERT_TRUE(blocks.ok()) << blocks.status();
    std::string keys;
    for (uint64_t i = first; i < first + kAtOnce; ++i) {
      const uint64_t words[4] = {0xa0761d6478bd642f, i, 0x8ebc6af09c88c6e3, i};
      keys.append(reinterpret_cast<const char*>(words), sizeof(words));
    }
    auto seal = session->Seal({.blocks = blocks->refs(), .keys = keys});
    ASSERT_TRUE(seal.ok()) << seal.status();
    const auto outcome = seal->Wait(end);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_TRUE(outcome->refused.empty()) << outcome->refused[0].message();
  }
}

TEST_F(SessionTest, ALongSequenceIsSealedInPieces) {
  constexpr uint32_t kBlocks = (16 << 10) + 1;
  StartDaemon();
  SessionOptions options = OptionsFor(daemon_->socket());
  options.layout = OpaqueLayout({.block_bytes = 256, .tokens_per_block = kTokensPerBlock});
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  LiveSequence sequence(session.get());
  auto blocks = session->LeaseWithin(kBlocks, Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  ASSERT_TRUE(sequence.Append(*std::move(blocks)).ok());
  ASSERT_TRUE(sequence.Extend(TokensOf(1, kBlocks)).ok());
  for (const size_t piece : {size_t{16} << 10, size_t{1}}) {
    auto seal = sequence.Seal();
    ASSERT_TRUE(seal.ok() && seal->has_value()) << seal.status();
    const auto outcome = (*seal)->Wait(Soon());
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->refused.empty()) << outcome->refused[0].message();
    EXPECT_EQ(outcome->canonical.size(), piece);
  }
  const auto nothing = sequence.Seal();
  EXPECT_TRUE(nothing.ok() && !nothing->has_value()) << nothing.status();
}

TEST_F(SessionTest, AnotherProcessSharesThePrefixInPlace) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  PeerProcess peer(daemon_->socket());
  ASSERT_EQ(peer.Ask("share 7 24"), "ok");
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(7, 30), kTokensPerBlock);
  const GroupKeys asked{.keys = KeyBytes(keys)};
  auto hit = session->Match({&asked, 1})->Wait(Soon());
  ASSERT_TRUE(hit.ok()) << hit.status();
  ASSERT_EQ(hit->groups[0].size(), 24u);
  EXPECT_EQ(hit->miss, v1::MISS_REASON_NEVER_SEEN);
  for (size_t i = 0; i < 24; ++i) EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i])) << i;
  // And the other way round.
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), PrefixHasher(session->hash_seed()).Chain(TokensOf(8, 5), 16)));
  EXPECT_EQ(peer.Ask("match 8 5"), "5 5");
}

TEST_F(SessionTest, TheMagazineIsLocal) {
  StartDaemon();
  SessionOptions options = OptionsFor(daemon_->socket());
  options.guaranteed_blocks = 16;
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->Flush(Soon()).ok());
  const SessionCounters before = session->counters();
  for (int i = 0; i < 10000; ++i) {
    auto block = session->Lease(1);
    ASSERT_TRUE(block.ok()) << block.status();
  }
  EXPECT_EQ(session->counters().operations, before.operations);
}

TEST_F(SessionTest, LeaseSaysWhatItLacks) {
  StartDaemon("8MiB");
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const uint32_t all = session->most_leased_blocks();
  EXPECT_EQ(all, session->max_blocks() - 2) << "but the null block and the sink";
  const auto none = session->Lease(all);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(none.status().message()),
              ::testing::HasSubstr(absl::StrCat(all, " blocks asked, 16 in the magazine")));
}

// The daemon would evict all that is cached for it, and the magazine would keep what it got.
TEST_F(SessionTest, ALeaseOfMoreThanThereCanBeTakesNothing) {
  StartDaemon("8MiB");
  SessionOptions options = OptionsFor(daemon_->socket());
  options.magazine_blocks = 0;
  const auto session = Open(options);
  options.max_blocks = 5;
  const auto capped = Open(options);
  ASSERT_TRUE(session != nullptr && capped != nullptr);
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(1, 8), kTokensPerBlock);
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), keys));
  const auto refused = [](Session* of, uint32_t count) {
    for (const absl::Status& status : {of->Lease(count).status(), of->LeaseWithin(count, Soon()).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_EQ(status.message(), absl::StrCat(count, " blocks asked; this session can never have more than ",
                                               of->most_leased_blocks()));
    }
    EXPECT_TRUE(of->Flush(Soon()).ok());
  };
  refused(session.get(), session->max_blocks() - 1);
  refused(session.get(), UINT32_MAX);
  refused(capped.get(), 6);
  const auto hit = session->Match(KeyBytes(keys))->Wait(Soon());
  ASSERT_TRUE(hit.ok()) << hit.status();
  EXPECT_EQ(hit->groups[0].size(), 8u);
  EXPECT_TRUE(capped->LeaseWithin(5, Soon()).ok());
}

// Each block of the space, slab after slab, while the memory is already in use.
TEST_F(SessionTest, TheSpaceGrowsUnderTheEngine) {
  StartDaemon("32MiB");
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const uint32_t all = session->max_blocks() - 1;
  ASSERT_GE(all, 6 * kSlabBlocks);
  const PrefixKey mark{std::array<uint8_t, 32>{1, 2, 3}};
  Blocks held;
  while (held.size() + 1 < all) {
    auto block = session->LeaseWithin(1, Soon());
    ASSERT_TRUE(block.ok()) << block.status() << " after " << held.size();
    Stamp(session->data((*block)[0]), mark);
    held.Append(*std::move(block));
  }
  // Word of the last slab comes by the attach socket, its blocks by the stream.
  for (const Deadline deadline = Soon(); session->capacity_blocks() < session->max_blocks();) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << session->capacity_blocks() << " blocks usable";
    std::this_thread::yield();
  }
  for (const BlockRef ref : held.refs()) EXPECT_TRUE(HasStamp(session->data(ref), mark));
}

// A binding may keep the object for long after the session.
TEST_F(SessionTest, OneThatWasDismantledHasNoMemoryAndAnswersAsAClosedOne) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  auto held = session->LeaseWithin(3, Soon());
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_TRUE(session->Close(Soon()).ok());
  EXPECT_NE(session->base(), 0u) << "what the engine still looks at stays mapped";
  const absl::Status closed = session->Lease(1).status();
  EXPECT_FALSE(closed.ok());
  for (int i = 0; i < 2; ++i) {
    session->Dismantle();
    EXPECT_EQ(session->base(), 0u);
  }
  EXPECT_EQ(session->Lease(1).status(), closed);
  EXPECT_EQ(session->LeaseWithin(1, Soon()).status(), closed);
  EXPECT_FALSE(session->Ref(held->refs()).ok());
  EXPECT_GT(session->capacity_blocks(), 0u);
  EXPECT_TRUE(session->Close(Soon()).ok());
}

TEST_F(SessionTest, ADuplicateSealAnswersTheOtherBlock) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(1, 3), kTokensPerBlock);
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), keys));
  auto mine = session->LeaseWithin(3, Soon());
  ASSERT_TRUE(mine.ok()) << mine.status();
  auto outcome = session->Seal({.blocks = mine->refs(), .keys = KeyBytes(keys)})->Wait(Soon());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ASSERT_EQ(outcome->duplicates.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_FALSE(outcome->canonical[i] == (*mine)[i]);
    EXPECT_TRUE(HasStamp(session->data(outcome->canonical[i]), keys[i]));
  }
  // Or holds none.
  outcome =
      session->Seal({.blocks = mine->refs(), .keys = KeyBytes(keys), .leave_duplicates = true})->Wait(Soon());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->refused.empty() && outcome->duplicates.empty());
  EXPECT_EQ(outcome->canonical, std::vector<BlockRef>(3, kNullRef));
}

TEST_F(SessionTest, ReleaseWaitsForItsStep) {
  StartDaemon("8MiB");
  const auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  const uint32_t all = session->max_blocks() - 2;
  auto everything = session->LeaseWithin(all, Soon());
  ASSERT_TRUE(everything.ok()) << everything.status();
  const uint64_t step = session->BeginStep();
  everything->Release();
  ASSERT_TRUE(session->Flush(Soon()).ok());
  const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  EXPECT_EQ(session->LeaseWithin(1, soon).status().code(), absl::StatusCode::kResourceExhausted);
  session->CompleteStep(step);
  EXPECT_TRUE(session->LeaseWithin(all, Soon()).ok());
  EXPECT_EQ(session->passed_step(), step);
}

TEST_F(SessionTest, ASealBehindAStepIsFoundOnlyAfterIt) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(1, 2), kTokensPerBlock);
  auto blocks = session->LeaseWithin(2, Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  const uint64_t step = session->BeginStep();
  auto seal = session->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
  ASSERT_TRUE(seal.ok()) << seal.status();
  const GroupKeys asked{.keys = KeyBytes(keys)};
  EXPECT_EQ(session->Match({&asked, 1})->Wait(Soon())->tokens, 0u);
  EXPECT_FALSE(seal->Ready());
  session->CompleteStep(step);
  EXPECT_TRUE(seal->Wait(Soon()).ok());
  EXPECT_EQ(session->Match({&asked, 1})->Wait(Soon())->tokens, 2u * kTokensPerBlock);
}

TEST_F(SessionTest, WarmupWritesGoToScratch) {
  StartDaemon();
  const auto other = Open();
  ASSERT_NE(other, nullptr);
  const auto keys = PrefixHasher(other->hash_seed()).Chain(TokensOf(3, 40), kTokensPerBlock);
  ASSERT_NO_FATAL_FAILURE(Share(other.get(), keys));

  SessionOptions options = OptionsFor(daemon_->socket());
  options.warmup = true;
  const auto session = Open(options);
  ASSERT_NE(session, nullptr);
  EXPECT_FALSE(session->Lease(1).ok());
  // An engine's dummy run: it writes low block ids, which others share by now.
  for (uint32_t id = 1; id < kSlabBlocks; ++id) Stamp(session->data({BlockId{id}, 0}), PrefixKey{});
  ASSERT_TRUE(session->FinishWarmup().ok());
  const GroupKeys asked{.keys = KeyBytes(keys)};
  auto hit = session->Match({&asked, 1})->Wait(Soon());
  ASSERT_TRUE(hit.ok()) << hit.status();
  ASSERT_EQ(hit->groups[0].size(), 40u);
  for (size_t i = 0; i < keys.size(); ++i)
    EXPECT_TRUE(HasStamp(session->data(hit->groups[0][i]), keys[i])) << i;
  EXPECT_TRUE(session->LeaseWithin(4, Soon()).ok());
}

TEST_F(SessionTest, DroppedAnswersGiveTheirHoldsBack) {
  StartDaemon("8MiB");
  const auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(1, 10), kTokensPerBlock);
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), keys));
  const GroupKeys asked{.keys = KeyBytes(keys)};
  for (int i = 0; i < 50; ++i) {
    auto dropped = session->Match({&asked, 1});
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    if (i % 2 == 0) {  // Half of them are dropped after the answer came.
      ASSERT_TRUE(session->Flush(Soon()).ok());
    }
  }
  // Were one hold left, its block could not be reclaimed.
  auto everything = session->LeaseWithin(session->max_blocks() - 2, Soon());
  EXPECT_TRUE(everything.ok()) << everything.status();
}

TEST_F(SessionTest, RefsKeepABlockUntilTheLastIsGone) {
  StartDaemon("8MiB");
  const auto session = OpenWithoutMagazine();
  ASSERT_NE(session, nullptr);
  auto block = session->LeaseWithin(1, Soon());
  ASSERT_TRUE(block.ok()) << block.status();
  auto fork = session->Ref(block->refs());
  ASSERT_TRUE(fork.ok()) << fork.status();
  block->Release();
  const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  EXPECT_FALSE(session->LeaseWithin(session->max_blocks() - 2, soon).ok());
  fork->Release();
  EXPECT_TRUE(session->LeaseWithin(session->max_blocks() - 2, Soon()).ok());
  EXPECT_EQ(session->counters().refused, 0u);
}

// The caller has the hold when Ref returns. If the daemon knows of none, what it would release is another's.
TEST_F(SessionTest, ARefOfABlockThatIsNotHeldEndsTheSession) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const BlockRef nobodys{BlockId{9}, 7};
  auto phantom = session->Ref({&nobodys, 1});
  ASSERT_TRUE(phantom.ok()) << phantom.status();
  session->Flush(Soon()).IgnoreError();
  EXPECT_EQ(session->status().code(), absl::StatusCode::kFailedPrecondition) << session->status();
  EXPECT_NE(session->status().message().find("refused ref of 1 blocks"), std::string::npos)
      << session->status();
  EXPECT_FALSE(session->Lease(1).ok());
}

TEST_F(SessionTest, WhatIsRefusedWithoutACallThatWaitsIsTold) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const BlockRef stale{BlockId{9}, 7};
  EXPECT_TRUE(session->Pin({&stale, 1}, std::chrono::milliseconds(1000)).ok());
  EXPECT_TRUE(session->SetRetention({&stale, 1}, 80, std::chrono::milliseconds(1000)).ok());
  ASSERT_TRUE(session->Flush(Soon()).ok());
  const std::vector<Refusal> refusals = session->TakeRefusals();
  ASSERT_EQ(refusals.size(), 2u);
  EXPECT_EQ(refusals[0].verb, "pin");
  EXPECT_EQ(refusals[0].status.message().find("block 9 generation 7 is stale"), 0) << refusals[0].status;
  EXPECT_EQ(refusals[1].verb, "set_retention");
  EXPECT_TRUE(session->TakeRefusals().empty());
  EXPECT_EQ(session->counters().refused, 2u);
}

TEST_F(SessionTest, PinsTouchesAndRetentionAreTaken) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(1, 4), kTokensPerBlock);
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), keys));
  const GroupKeys asked{.keys = KeyBytes(keys)};
  auto hit = session->Match({&asked, 1})->Wait(Soon());
  ASSERT_TRUE(hit.ok()) << hit.status();
  const absl::Span<const BlockRef> blocks = hit->groups[0].refs();
  EXPECT_TRUE(session->Touch(blocks).ok());
  EXPECT_TRUE(session->Pin(blocks, std::chrono::minutes(1)).ok());
  EXPECT_TRUE(session->SetRetention(blocks, 80, std::chrono::minutes(1)).ok());
  EXPECT_TRUE(session->SetRetention(blocks, 80, std::chrono::minutes(1), std::chrono::seconds(5)).ok());
  EXPECT_TRUE(session->Unpin(blocks).ok());
  // What the daemon would refuse whole, with nobody to hear of it.
  const auto minute = std::chrono::minutes(1);
  EXPECT_EQ(session->Pin(blocks, std::chrono::hours(25)).message(),
            "Pin.ttl is 90000000 ms; must be 1 to 86400000");
  EXPECT_EQ(session->SetRetention(blocks, 101, minute).message(),
            "SetRetention.priority is 101; must be 0 to 100");
  EXPECT_EQ(session->SetRetention(blocks, 1, minute, -minute).message(),
            "SetRetention.half_life is -60000 ms; must be 0 to 86400000");
  ASSERT_TRUE(session->Flush(Soon()).ok());
  EXPECT_EQ(session->counters().refused, 0u);
}

TEST_F(SessionTest, HintsAreTaken) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const auto keys = PrefixHasher(session->hash_seed()).Chain(TokensOf(1, 3), kTokensPerBlock);
  ASSERT_NO_FATAL_FAILURE(Share(session.get(), keys));
  const GroupKeys asked{.keys = KeyBytes(keys)};
  auto hit = session->Match({&asked, 1})->Wait(Soon());
  ASSERT_TRUE(hit.ok()) << hit.status();
  const auto blocks = hit->groups[0].Detach();
  const absl::Span<const BlockRef> refs = blocks;
  session->Release(refs.subspan(0, 1), 0);
  EXPECT_TRUE(session->ReleaseWithHint(refs.subspan(1, 1), {.category = 3}, 0).ok());
  EXPECT_TRUE(session->ReleaseWithHint(refs.subspan(2, 1), {.reuse = v1::REUSE_NEVER}, 0).ok());
  ASSERT_TRUE(session->Flush(Soon()).ok());
  EXPECT_EQ(session->counters().refused, 0u);
  const absl::Status category = session->ReleaseWithHint(refs, {.category = 16}, 0);
  EXPECT_EQ(category.message(), "ReleaseHint.category is 16; must be 0 to 15");
  const absl::Status reuse = session->ReleaseWithHint(refs, {.reuse = static_cast<v1::Reuse>(9)}, 0);
  EXPECT_EQ(reuse.message(), "ReleaseHint.reuse is 9; must be 0 to 3");
}

TEST_F(SessionTest, CallersMistakesAreNamed) {
  StartDaemon();
  const auto session = Open();
  ASSERT_NE(session, nullptr);
  const GroupKeys ragged{.keys = "abc"};
  EXPECT_EQ(session->Match({&ragged, 1}).status().code(), absl::StatusCode::kInvalidArgument);
  auto block = session->LeaseWithin(1, Soon());
  EXPECT_EQ(session->Seal({.blocks = block->refs(), .keys = "short"}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(session->Touch({}).code(), absl::StatusCode::kInvalidArgument);
  const BlockRef twice = (*block)[0];
  block->Release();
  session->Release({&twice, 1});
  EXPECT_EQ(session->counters().refused, 1u);
  EXPECT_EQ(session->CompleteStepOnStream(1, nullptr).code(), absl::StatusCode::kFailedPrecondition);

  SessionOptions other = OptionsFor(daemon_->socket());
  other.layout.set_block_bytes(2 * kBlockBytes);
  EXPECT_EQ(Session::Open(other).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Session::Join(other, "too short").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SessionTest, ARankJoinsAndItsFenceCounts) {
  StartDaemon("32MiB", {"--device=host,host"});
  const auto first = Open(RankOptions(0));
  ASSERT_NE(first, nullptr);
  auto second = Session::Join(RankOptions(1), first->Invitation());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*second)->block_stride_bytes(), first->block_stride_bytes());
  auto blocks = first->LeaseWithin(1, Soon());
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  // Each rank has memory of its own behind the same block.
  Stamp(first->data((*blocks)[0]), PrefixKey{});
  Stamp((*second)->data((*blocks)[0]), PrefixKey{std::array<uint8_t, 32>{9}});
  EXPECT_TRUE(HasStamp(first->data((*blocks)[0]), PrefixKey{}));
  const auto keys = PrefixHasher(first->hash_seed()).Chain(TokensOf(1, 1), kTokensPerBlock);
  const uint64_t step = first->BeginStep();
  (*second)->BeginStep(step);
  auto seal = first->Seal({.blocks = blocks->refs(), .keys = KeyBytes(keys)});
  first->CompleteStep(step);
  ASSERT_TRUE(first->Flush(Soon()).ok());
  EXPECT_FALSE(seal->Ready());
  (*second)->CompleteStep(step);
  EXPECT_TRUE(seal->Wait(Soon()).ok());
}

}  // namespace
}  // namespace kvpool
