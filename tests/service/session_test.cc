// Opening, joining and ending sessions; who may, and what comes back when.
#include <gmock/gmock.h>

#include <algorithm>
#include <utility>

#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class SessionTest : public ServiceTest {
 protected:
  v1::SessionInfo Info(uint64_t id) {
    v1::ListSessionsResponse response;
    EXPECT_TRUE(daemon_->ListSessions({}, &response).ok());
    for (const v1::SessionInfo& info : response.sessions()) {
      if (info.session() == id) return info;
    }
    return {};
  }
  uint64_t EndedBy(const std::string& reason) {
    const auto ended = daemon_->Snapshot().sessions_ended;
    const auto it = ended.find(reason);
    return it == ended.end() ? 0 : it->second;
  }
};

TEST_F(SessionTest, OpenAnswersWhatAnEngineNeedsToMap) {
  options_.epoch = 77;
  StartDaemon(4);
  v1::OpenSession request = OpenRequest();
  request.mutable_layout()->set_block_bytes(1000);
  const auto engine = Attach();
  ASSERT_TRUE(engine->Open(request).ok());
  EXPECT_TRUE(engine->peer->bound);
  const v1::OpenSessionResult& opened = engine->opened;
  EXPECT_EQ(opened.daemon_epoch(), 77);
  EXPECT_EQ(opened.hash_seed().size(), 32);
  EXPECT_EQ(opened.member_token().size(), 16);
  EXPECT_EQ(opened.block_stride_bytes(), 1024) << "1000 would need slabs of 2 MB in granules of 16 KiB";
  EXPECT_EQ(opened.slab_bytes(), 16384);
  EXPECT_EQ(opened.max_blocks(), 64);
  EXPECT_EQ(opened.kind(), v1::SPACE_KIND_SLABS);
}

TEST_F(SessionTest, EnginesOfOneFingerprintShareASpace) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest(), "a"), b = OpenEngine(OpenRequest(), "b");
  EXPECT_EQ(a->opened.space(), b->opened.space());
  EXPECT_EQ(a->opened.hash_seed(), b->opened.hash_seed());
  a->Seal(a->Lease(2), Keys("x", 2));
  EXPECT_EQ(b->Match(Keys("x", 2)).tokens(), 32);
  const auto other = OpenEngine(OpenRequest("other model"), "c");
  EXPECT_NE(other->opened.space(), a->opened.space());
  EXPECT_EQ(other->Match(Keys("x", 2)).tokens(), 0);
}

TEST_F(SessionTest, MismatchNamesBothSides) {
  StartDaemon(4, /*devices=*/2);
  const auto engine = OpenEngine(OpenRequest());
  const auto expect = [&](const v1::OpenSession& request, const std::string& words) {
    const absl::Status status = Attach()->Open(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_NE(std::string(status.message()).find(words), std::string::npos) << status;
  };
  v1::OpenSession request = OpenRequest();
  request.mutable_layout()->mutable_groups(0)->set_tokens_per_block(32);
  expect(request, "modified: groups[0].tokens_per_block: 16 -> 32");
  request = OpenRequest();
  (*request.mutable_fingerprint()->mutable_facts())["weights"] = "newer";
  (*request.mutable_fingerprint()->mutable_facts())["dtype"] = "bf16";
  expect(
      request,
      "under the same digest: dtype missing there, \"bf16\" here; weights \"model\" there, \"newer\" here");
  request = OpenRequest();
  request.set_ranks(2);
  expect(request,
         "ranks differs from that of space 1 of tenant default@1000 under this fingerprint: 1 there, 2 here");
  request = OpenRequest();
  request.set_kind(v1::SPACE_KIND_IPC);
  expect(request, "kind differs");
  request = OpenRequest();
  request.add_device_uuids("mem1");
  expect(request,
         "device_uuids[0] differs from that of space 1 of tenant default@1000 under this fingerprint: mem0 "
         "there, mem1 here");
}

TEST_F(SessionTest, HostMemoryBesideGpusIsForThoseWhoNameIt) {
  StartDaemon(4, /*devices=*/3, /*gpus=*/2);
  v1::OpenSession request = OpenRequest();
  request.set_ranks(3);
  const absl::Status refused = Attach()->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "ranks is 3; the daemon has 2 GPUs: name each rank's device in device_uuids");
  request.set_ranks(2);
  EXPECT_TRUE(Attach()->Open(request).ok());
  v1::OpenSession on_host = OpenRequest("other");
  on_host.add_device_uuids("mem0");
  EXPECT_TRUE(Attach()->Open(on_host).ok());
  const absl::Status elsewhere = Attach()->Open(OpenRequest("other"));
  EXPECT_EQ(elsewhere.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      elsewhere.message(),
      "the device of rank 0 differs from that of space 2 of tenant default@1000 under this fingerprint: "
      "mem0 there, mem1 here");
  v1::ListSpacesResponse spaces;
  ASSERT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
  ASSERT_EQ(spaces.spaces_size(), 2);
  EXPECT_THAT(spaces.spaces(0).devices(), testing::ElementsAre("mem1", "mem2"));
  EXPECT_THAT(spaces.spaces(1).devices(), testing::ElementsAre("mem0"));
}

TEST_F(SessionTest, AttachTokenServesOnce) {
  StartDaemon(4);
  const auto engine = Attach();
  v1::OpenSession bad = OpenRequest();
  bad.mutable_layout()->set_block_bytes(1);
  EXPECT_FALSE(engine->Open(bad).ok());
  EXPECT_TRUE(engine->Open(OpenRequest()).ok()) << "a refused opening leaves the token good";
  const absl::Status twice = engine->Open(OpenRequest());
  EXPECT_EQ(twice.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(twice.message(), "attach_token was used already; each connection serves once");
  const auto gone = Attach();
  daemon_->OnHangup(gone->id);
  EXPECT_EQ(gone->Open(OpenRequest()).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(daemon_->FindMember("nobody's token..").status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(SessionTest, AddMemberChecksWhoComes) {
  StartDaemon(4, /*devices=*/2);
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  const auto rank0 = OpenEngine(request);
  const auto stranger = OpenEngine(OpenRequest("other"), "stranger");
  const v1::AddMember good = JoinRequest(*rank0, 1);

  v1::AddMember join = good;
  join.set_session(99);
  EXPECT_EQ(Attach()->Join(*rank0, join).message(), "session 99 is not open");
  join = good;
  join.set_invitation(stranger->token);
  EXPECT_EQ(Attach()->Join(*rank0, join).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Attach("other uid", 1001)->Join(*rank0, good).message(),
            "the member's uid is 1001; session 1 is of uid 1000");
  EXPECT_EQ(Attach()->Join(*rank0, JoinRequest(*rank0, 0)).message(),
            "role.rank 0 is taken by member 0 of session 1");
  EXPECT_EQ(Attach()->Join(*rank0, JoinRequest(*rank0, 2)).message(),
            "role.rank is 2; session 1 has ranks 0 to 1");
  join = good;
  join.mutable_layout()->set_block_bytes(2048);
  EXPECT_NE(std::string(Attach()->Join(*rank0, join).message()).find("block_bytes: 1024 -> 2048"),
            std::string::npos);
  join = good;
  join.mutable_fingerprint()->set_digest("another");
  EXPECT_EQ(Attach()->Join(*rank0, join).code(), absl::StatusCode::kFailedPrecondition);
  const auto rank1 = Attach();
  EXPECT_TRUE(rank1->Join(*rank0, good).ok());
  Settle({rank0.get(), rank1.get()});
  daemon_->OnHangup(rank0->id);
  EXPECT_EQ(Attach()->Join(*rank0, JoinRequest(*rank0, 1)).code(), absl::StatusCode::kAborted)
      << "the session has ended, and its processes live";
}

TEST_F(SessionTest, CapsHaveNumbers) {
  options_.max_sessions = 2;
  options_.max_members = 1;
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest()), b = OpenEngine(OpenRequest());
  const auto c = Attach();
  EXPECT_EQ(c->Open(OpenRequest()).message(), "2 sessions are open or not yet gone; max_sessions is 2");
  daemon_->OnHangup(a->id);
  EXPECT_EQ(c->Open(OpenRequest()).code(), absl::StatusCode::kResourceExhausted)
      << "its process may still run";
  daemon_->OnProcessDead(a->id);
  EXPECT_TRUE(c->Open(OpenRequest()).ok());
  v1::AddMember join = JoinRequest(*b, 0);
  join.mutable_role()->set_scheduler(true);
  EXPECT_EQ(Attach()->Join(*b, join).message(), "session 2 has 1 members; max_members is 1");
}

TEST_F(SessionTest, GuaranteesThatCanNotBeKeptAreRefused) {
  StartDaemon(2);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(20);
  const auto a = OpenEngine(request);
  EXPECT_EQ(a->peer->slabs().size(), 2) << "slabs for the guarantee come before the answer";
  absl::Status refused = Attach()->Open(request);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(),
            "guaranteed_blocks is 20 (and the sink): 21 blocks guaranteed asked, 10 unpromised of 31; the "
            "space can't "
            "grow: space 1 has all of its 32 blocks");
  request.set_guaranteed_blocks(32);
  EXPECT_EQ(Attach()->Open(request).message(),
            "guaranteed_blocks is 32; space 1 can have at most 32 blocks, the null block and the session's "
            "sink among "
            "them");
}

TEST_F(SessionTest, WarmupHoldsLeasesAndMatchesBack) {
  StartDaemon(4, /*devices=*/2);
  const auto sharer = OpenEngine(OpenRequest("warm"), "sharer");  // A space of one rank; the next is of two.
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  const auto before = OpenEngine(request, "before");
  const auto before1 = Attach();
  ASSERT_TRUE(before1->Join(*before, JoinRequest(*before, 1)).ok());
  Settle({before.get(), before1.get()});
  before->Seal(before->Lease(2), Keys("w", 2));

  request.set_warmup(true);
  const auto rank0 = OpenEngine(request), rank1 = Attach();
  v1::OperationResult result = rank0->Do(LeaseOp(1));
  EXPECT_EQ(result.message(), "lease during warm-up: 2 of 2 ranks have not sent WarmupDone");
  EXPECT_EQ(rank0->Do(WarmupDoneOp()).warmup_done().waiting_for(), 1);
  ASSERT_TRUE(rank1->Join(*rank0, JoinRequest(*rank0, 1)).ok());
  Settle({rank0.get(), rank1.get()});
  // Warm-up reaching for shared blocks: what others sealed is not answered while an engine writes to scratch.
  result = rank0->Do(MatchOp(Keys("w", 2)));
  EXPECT_EQ(result.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(result.message(), "match during warm-up: 1 of 2 ranks have not sent WarmupDone");
  EXPECT_EQ(rank1->Do(WarmupDoneOp()).warmup_done().waiting_for(), 0);
  EXPECT_EQ(rank0->Match(Keys("w", 2)).tokens(), 32);
  EXPECT_EQ(rank0->LeaseAsked(1, 1).blocks_size(), 1);
}

TEST_F(SessionTest, CloseGivesBackAtOnce) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto scheduler = Attach();
  v1::AddMember join = JoinRequest(*engine, 0);
  join.mutable_role()->set_scheduler(true);
  ASSERT_TRUE(scheduler->Join(*engine, join).ok());
  const std::vector<uint64_t> blocks = engine->Lease(5);
  engine->Seal({blocks[0]}, {Key("a")});
  engine->Do(RefOp({blocks[0]}));
  EXPECT_EQ(scheduler->Do(CloseOp()).close_session().released_blocks(), 6);
  EXPECT_EQ(Blocks().cached(), 1);
  EXPECT_EQ(Blocks().free(), Blocks().capacity() - 1);
  EXPECT_EQ(engine->peer->closed(), "session 1 was closed by member 1");
  EXPECT_FALSE(scheduler->peer->closed().has_value());
  EXPECT_EQ(engine->Do(LeaseOp(1)).code(), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(Info(1).session(), 0) << "gone";
  EXPECT_EQ(EndedBy("closed"), 1);
  // The processes end later; that is no second end.
  engine->Die();
  scheduler->Die();
  EXPECT_EQ(EndedBy("member_died") + EndedBy("hangup"), 0);
}

TEST_F(SessionTest, NothingIsDoneBehindACloseInItsBatch) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(2);
  const v1::StepResponse response =
      engine->Step({CloseOp(), LeaseOp(1), SealOp({blocks[0]}, {Key("a")}), RefOp(blocks), FenceOp(1),
                    ReleaseOp(blocks, 9), CloseOp()});
  EXPECT_EQ(response.results(0).close_session().released_blocks(), 2);
  for (int i = 1; i < response.results_size(); ++i) {
    EXPECT_EQ(response.results(i).code(), static_cast<int>(absl::StatusCode::kAborted)) << i;
    EXPECT_EQ(response.results(i).message(), "session 1 was closed by member 0") << i;
  }
  EXPECT_EQ(response.results_size(), 7);
  EXPECT_EQ(response.free_blocks(), 0u);
  EXPECT_EQ(Blocks().free(), Blocks().capacity());
  EXPECT_EQ(daemon_->Snapshot().spaces.at(0).parked, 0u);
}

TEST_F(SessionTest, HangupQuarantinesUntilEveryProcessIsDead) {
  StartDaemon(4, /*devices=*/2);
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  const auto rank0 = OpenEngine(request), rank1 = Attach();
  ASSERT_TRUE(rank1->Join(*rank0, JoinRequest(*rank0, 1)).ok());
  Settle({rank0.get(), rank1.get()});
  const std::vector<uint64_t> blocks = rank0->Lease(3);
  rank0->Seal({blocks[0]}, {Key("kept")});

  daemon_->OnHangup(rank1->id);
  EXPECT_EQ(EndedBy("hangup"), 1);
  const v1::SessionInfo ended = Info(1);
  EXPECT_TRUE(ended.ended());
  EXPECT_NE(ended.end_reason().find("hung up"), std::string::npos);
  EXPECT_TRUE(ended.members(0).alive());
  EXPECT_EQ(rank0->peer->closed(), ended.end_reason());
  EXPECT_EQ(Blocks().quarantined(), 3) << "two leases and the sink";
  EXPECT_EQ(Blocks().sealed(), 1) << "the ended session may still read it";
  EXPECT_EQ(rank0->Do(LeaseOp(1)).code(), static_cast<int>(absl::StatusCode::kAborted));
  const v1::StepResponse last = rank0->Pending();
  ASSERT_GE(last.notices_size(), 1);
  EXPECT_EQ(last.notices(last.notices_size() - 1).kind(), v1::NOTICE_KIND_ENDED);

  daemon_->OnProcessDead(rank1->id);
  EXPECT_EQ(Blocks().quarantined(), 3);
  daemon_->OnHangup(rank0->id);
  EXPECT_EQ(Blocks().quarantined(), 3) << "hung up is not dead";
  daemon_->OnProcessDead(rank0->id);
  EXPECT_EQ(Blocks().quarantined(), 0);
  EXPECT_EQ(Blocks().cached(), 1) << "what was sealed stays";
  EXPECT_EQ(Info(1).session(), 0);
  EXPECT_EQ(daemon_->FindMember(rank0->token).status().code(), absl::StatusCode::kUnauthenticated);
}

// Only the registry knows whether a token was taken: the attach socket learns it from a letter that may come late.
TEST_F(SessionTest, AHangupSaysWhetherTheProcessIsWaitedFor) {
  options_.idle_space_ms = 0;
  StartDaemon(4);
  const auto nobodys = Attach();
  EXPECT_FALSE(daemon_->OnHangup(nobodys->id));
  EXPECT_FALSE(daemon_->OnHangup(nobodys->id)) << "forgotten";
  daemon_->OnProcessDead(nobodys->id);

  const auto engine = Attach();
  scripts_[0]->on_make = [&] { EXPECT_TRUE(daemon_->OnHangup(engine->id)) << "it is being opened"; };
  ASSERT_TRUE(engine->Open(OpenRequest()).ok());
  scripts_[0]->on_make = nullptr;
  EXPECT_EQ(EndedBy("hangup"), 1);
  EXPECT_EQ(engine->peer->slabs().size(), 1) << "its process may map this";
  daemon_->HousekeepOnce();
  EXPECT_EQ(scripts_[0]->alive, 1) << "and has not ended";
  daemon_->OnProcessDead(engine->id);
  clock_.Advance(1);
  daemon_->HousekeepOnce();
  EXPECT_EQ(scripts_[0]->alive, 0);

  const auto failing = Attach();
  scripts_[0]->on_make = [&] { EXPECT_TRUE(daemon_->OnHangup(failing->id)); };
  scripts_[0]->fail_after = 0;
  EXPECT_FALSE(failing->Open(OpenRequest()).ok());
  scripts_[0]->on_make = nullptr;
  scripts_[0]->fail_after = -1;
  EXPECT_EQ(failing->Open(OpenRequest()).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(failing->peer->not_awaited) << "the hang-up was told that its end is";
  EXPECT_FALSE(engine->peer->not_awaited);
  daemon_->OnProcessDead(failing->id);
}

// Its engine may have waited for the opening no longer, and gone on without it.
TEST_F(SessionTest, ASessionThatWasNeverReadyIsGoneWhenItHangsUp) {
  options_.max_sessions = 1;
  StartDaemon(4);
  const auto engine = Attach();
  ASSERT_TRUE(engine->Open(OpenRequest()).ok());
  daemon_->OnHangup(engine->id);
  EXPECT_EQ(EndedBy("hangup"), 1);
  EXPECT_EQ(Info(1).session(), 0);
  const auto next = OpenEngine(OpenRequest());
  EXPECT_EQ(next->Lease(3).size(), 3);
  daemon_->OnProcessDead(engine->id);
  EXPECT_EQ(Blocks().leased(), 4) << "three and the sink";
}

TEST_F(SessionTest, AnOpeningThatNobodyWaitsForMakesNoMoreSlabs) {
  StartDaemon(4);
  const auto engine = Attach();
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(40);
  request.set_attach_token(engine->attach_token);
  std::atomic<bool> given_up{false};
  int made = 0;
  scripts_[0]->on_make = [&] { given_up = ++made == 2; };
  v1::OpenSessionResult result;
  EXPECT_EQ(daemon_->OpenSession(request, &result, &given_up).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(made, 2);
  EXPECT_EQ(scripts_[0]->alive, 0) << "nothing came of its space";
  EXPECT_TRUE(engine->Open(request).ok()) << "the token serves again";
}

TEST_F(SessionTest, DeathAloneEndsASession) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  engine->Lease(3);
  daemon_->OnProcessDead(engine->id);
  EXPECT_EQ(EndedBy("member_died"), 1);
  EXPECT_EQ(Blocks().free(), Blocks().capacity());
  daemon_->OnHangup(engine->id);
  EXPECT_EQ(EndedBy("hangup"), 0);
}

TEST_F(SessionTest, NothingOfAStoppedProcessIsReused) {
  StartDaemon(1);
  const auto stopped = OpenEngine(OpenRequest(), "stopped");
  const std::vector<uint64_t> blocks = stopped->Lease(10);
  daemon_->OnHangup(stopped->id);
  const auto engine = OpenEngine(OpenRequest(), "other");
  const v1::LeaseResult lease = engine->LeaseAsked(14, 0);
  EXPECT_EQ(lease.blocks_size(), 3);
  for (const uint64_t block : lease.blocks()) {
    EXPECT_EQ(std::count_if(blocks.begin(), blocks.end(),
                            [&](uint64_t other) { return uint32_t(other) == uint32_t(block); }),
              0);
  }
  daemon_->OnProcessDead(stopped->id);
  EXPECT_EQ(engine->LeaseAsked(14, 0).blocks_size(), 11);
}

TEST_F(SessionTest, ASlabThatCanNotBeMappedEndsTheSession) {
  StartDaemon(4, /*devices=*/2);
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  const auto rank0 = OpenEngine(request), rank1 = Attach();
  ASSERT_TRUE(rank1->Join(*rank0, JoinRequest(*rank0, 1)).ok());
  v1::SlabAck ack;
  ack.set_slab(0);
  ack.set_error("cuMemImportFromShareableHandle: out of memory");
  daemon_->OnSlabAck(rank1->id, ack);
  EXPECT_EQ(EndedBy("refused_slab"), 1);
  EXPECT_NE(
      rank0->peer->closed()->find("could not map slab 0: cuMemImportFromShareableHandle: out of memory"),
      std::string::npos);
  EXPECT_TRUE(rank1->peer->closed().has_value());
}

TEST_F(SessionTest, AnAcknowledgementOfNothingEndsTheSession) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  v1::SlabAck ack;
  ack.set_slab(7);
  daemon_->OnSlabAck(engine->id, ack);
  EXPECT_NE(engine->peer->closed()->find("slab_ack.slab is 7; 1 slabs were sent"), std::string::npos);
  const auto other = OpenEngine(OpenRequest());
  EXPECT_EQ(other->LeaseAsked(1, 1).blocks_size(), 1) << "other clients don't notice";
}

TEST_F(SessionTest, DrainRefusesNewSessionsAndTellsTheOld) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, listener);
  engine->Pending();
  v1::DrainResponse drained;
  ASSERT_TRUE(daemon_->Drain({}, &drained).ok());
  EXPECT_EQ(drained.sessions_left(), 1);
  EXPECT_GE(listener->pending, 1);
  v1::StepResponse told = engine->Pending();
  ASSERT_EQ(told.notices_size(), 1);
  EXPECT_EQ(told.notices(0).kind(), v1::NOTICE_KIND_DRAIN);
  EXPECT_TRUE(told.notices(0).on());
  EXPECT_EQ(Attach()->Open(OpenRequest()).code(), absl::StatusCode::kUnavailable);
  v1::DrainRequest cancel;
  cancel.set_cancel(true);
  ASSERT_TRUE(daemon_->Drain(cancel, &drained).ok());
  EXPECT_FALSE(engine->Pending().notices(0).on());
  EXPECT_TRUE(Attach()->Open(OpenRequest()).ok());
}

TEST_F(SessionTest, ANewerStreamTakesOver) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto first = std::make_shared<FakeListener>(), second = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, first);
  EXPECT_EQ(first->pending, 1) << "the capacity is news";
  engine->Pending();
  EXPECT_EQ(daemon_->Snapshot().reconnects, 0);
  daemon_->BindStream(engine->member, second);
  EXPECT_EQ(first->superseded, 1);
  EXPECT_EQ(second->pending, 1) << "the older stream may have lost what it took";
  const v1::StepResponse told = engine->Pending();
  ASSERT_EQ(told.notices_size(), 1);
  EXPECT_EQ(told.notices(0).kind(), v1::NOTICE_KIND_CAPACITY);
  EXPECT_EQ(told.notices(0).value(), 15);
  EXPECT_EQ(daemon_->Snapshot().reconnects, 1);
  daemon_->UnbindStream(engine->member, first.get());
  daemon_->OnHangup(engine->id);
  EXPECT_EQ(second->pending, 2) << "unbinding the older one left the newer alone";
  EXPECT_EQ(first->pending, 1);
}

TEST_F(SessionTest, PressureHasHysteresisAndAsksForLeasesBack) {
  options_.low_watermark = 0.2;
  options_.high_watermark = 0.4;
  StartDaemon(1);  // Low 3, high 6 of 15.
  v1::OpenSession request = OpenRequest();
  const auto engine = OpenEngine(request);
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(engine->member, listener);
  engine->Pending();
  const std::vector<uint64_t> blocks = engine->Lease(11);
  EXPECT_EQ(engine->Pending().notices_size(), 0);
  EXPECT_FALSE(daemon_->Snapshot().spaces.at(0).pressure);
  const std::vector<uint64_t> more = engine->Lease(1);
  EXPECT_TRUE(daemon_->Snapshot().spaces.at(0).pressure);
  v1::StepResponse told = engine->Pending();
  ASSERT_EQ(told.notices_size(), 2);
  EXPECT_EQ(told.notices(0).kind(), v1::NOTICE_KIND_PRESSURE);
  EXPECT_TRUE(told.notices(0).on());
  EXPECT_EQ(told.notices(0).value(), 2);
  EXPECT_EQ(told.notices(1).kind(), v1::NOTICE_KIND_REVOKE);
  EXPECT_EQ(told.notices(1).value(), 4) << "up to the high watermark";
  engine->Release({blocks[0], blocks[1], blocks[2]});
  EXPECT_EQ(engine->Pending().notices_size(), 0) << "five: between the marks";
  engine->Release({blocks[3]});
  told = engine->Pending();
  ASSERT_EQ(told.notices_size(), 1);
  EXPECT_FALSE(told.notices(0).on());
}

TEST_F(SessionTest, ALeaseThatComesShortAsksThoseWhoHoldMoreThanTheirGuarantee) {
  StartDaemon(1);
  const auto rich = OpenEngine(OpenRequest(), "rich");
  const auto poor = OpenEngine(OpenRequest(), "poor");
  rich->Lease(13);
  rich->Pending();
  for (int i = 0; i < 3; ++i) {
    clock_.Advance(100);
    EXPECT_EQ(poor->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_PRESSURE);
    EXPECT_EQ(poor->LeaseAsked(1, 1).shortfall(), v1::SHORTFALL_PRESSURE);
    const v1::StepResponse told = rich->Pending();
    ASSERT_EQ(told.notices_size(), 1);
    EXPECT_EQ(told.notices(0).kind(), v1::NOTICE_KIND_REVOKE);
    EXPECT_GE(told.notices(0).value(), 1);
  }
  EXPECT_EQ(rich->Pending().notices_size(), 0);
}

TEST_F(SessionTest, AHungMemberIsStaleNotDead) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  std::optional<v1::OperationResult> answer;
  engine->Send(ReleaseOp(blocks, 1), &answer);
  EXPECT_EQ(daemon_->Snapshot().spaces.at(0).members_stale, 0);
  clock_.Advance(5000);
  EXPECT_EQ(daemon_->Snapshot().spaces.at(0).members_stale, 1);
  EXPECT_EQ(Info(1).members(0).idle_seconds(), 5.0);
  engine->Fence(1);
  EXPECT_EQ(daemon_->Snapshot().spaces.at(0).members_stale, 0);
}

// A process may open and close sessions for ever. A space stays as long as one lives that mapped it, for which one
// attachment is enough.
TEST_F(SessionTest, ClosedSessionsOfALivingProcessAreForgotten) {
  StartDaemon(4);
  std::vector<std::weak_ptr<Member>> closed;
  AttachId first{};
  for (int i = 0; i < 50; ++i) {
    Engine engine(daemon_.get(), "engine", {.pid = 7, .uid = 1000, .gid = 1000, .process = 3});
    ASSERT_TRUE(engine.Open(OpenRequest()).ok());
    while (engine.MapSlabs()) daemon_->HousekeepOnce();
    engine.Seal(engine.Lease(1), Keys("a", 1));
    EXPECT_EQ(engine.Do(CloseOp()).code(), 0);
    EXPECT_EQ(daemon_->OnHangup(engine.id), i == 0) << "the end of the process is awaited once";
    EXPECT_EQ(daemon_->FindMember(engine.token).ok(), i == 0);
    if (i == 0) first = engine.id;
    closed.push_back(engine.member);
  }
  EXPECT_EQ(std::count_if(closed.begin(), closed.end(), [](const auto& member) { return !member.expired(); }),
            1);
  clock_.Advance(options_.idle_space_ms + 1);
  daemon_->HousekeepOnce();
  EXPECT_EQ(daemon_->Snapshot().spaces.size(), 1) << "the process may have it mapped";
  daemon_->OnProcessDead(first);
  clock_.Advance(options_.idle_space_ms + 1);
  daemon_->HousekeepOnce();
  EXPECT_TRUE(daemon_->Snapshot().spaces.empty());
}

// The hang-up ends the session, which is gone only behind it: by then the end of the process is awaited.
TEST_F(SessionTest, SessionsThatHangUpBeforeTheyAreReadyAreForgottenToo) {
  StartDaemon(4);
  for (int i = 0; i < 50; ++i) {
    Engine engine(daemon_.get(), "engine", {.pid = 7, .uid = 1000, .gid = 1000, .process = 3});
    ASSERT_TRUE(engine.Open(OpenRequest()).ok());
    EXPECT_TRUE(daemon_->OnHangup(engine.id));
    EXPECT_EQ(engine.peer->not_awaited, i > 0) << "the first stands for all";
    EXPECT_EQ(daemon_->FindMember(engine.token).ok(), i == 0);
  }
}

TEST_F(SessionTest, AClosedSessionStaysWhileNothingElseStandsForItsProcess) {
  StartDaemon(4);
  // Another space, another process, and one that can't be told apart from others.
  for (const auto& [model, process] :
       {std::pair("model", 3), {"other model", 3}, {"model", 4}, {"model", 0}, {"model", 0}}) {
    Engine engine(daemon_.get(), "engine",
                  {.pid = 7, .uid = 1000, .gid = 1000, .process = static_cast<uint64_t>(process)});
    ASSERT_TRUE(engine.Open(OpenRequest(model)).ok());
    while (engine.MapSlabs()) daemon_->HousekeepOnce();
    engine.Do(CloseOp());
    EXPECT_TRUE(daemon_->OnHangup(engine.id));
  }
}

TEST_F(SessionTest, ASessionThatHangsUpUnclosedWaitsForTheEndOfItsProcess) {
  StartDaemon(4);
  for (int i = 0; i < 2; ++i) {
    Engine engine(daemon_.get(), "engine", {.pid = 7, .uid = 1000, .gid = 1000, .process = 3});
    ASSERT_TRUE(engine.Open(OpenRequest()).ok());
    while (engine.MapSlabs()) daemon_->HousekeepOnce();
    engine.Lease(1);
    EXPECT_TRUE(daemon_->OnHangup(engine.id)) << "its blocks are quarantined until then";
    EXPECT_EQ(Blocks().quarantined(), 2 * (i + 1));
  }
}

}  // namespace
}  // namespace kvpool
