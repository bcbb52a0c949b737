// What people ask of the daemon.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "server/daemon/snapshot.h"
#include "server/replacement/policy.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class OperatorTest : public ServiceTest {
 protected:
  v1::EvictResponse Evict(const v1::EvictRequest& request) {
    v1::EvictResponse response;
    const absl::Status status = daemon_->Evict(request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return response;
  }
  v1::ExplainResponse ExplainBlock(uint64_t space, uint32_t block) {
    v1::ExplainRequest request;
    request.set_space(space);
    request.set_block(block);
    v1::ExplainResponse response;
    const absl::Status status = daemon_->Explain(request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return response;
  }
  v1::ExplainResponse ExplainKey(uint64_t space, const std::string& key, uint32_t group = 0) {
    v1::ExplainRequest request;
    request.set_space(space);
    request.set_key(key);
    request.set_group(group);
    v1::ExplainResponse response;
    const absl::Status status = daemon_->Explain(request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return response;
  }
  // A chain of cached blocks.
  std::vector<uint64_t> Cache(Engine* engine, const std::string& prefix, int count) {
    const std::vector<uint64_t> blocks = engine->Lease(count);
    engine->Seal(blocks, Keys(prefix, count));
    engine->Release(blocks);
    return blocks;
  }
};

TEST_F(OperatorTest, EvictByCountTakesLeavesFirst) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), "a", 5);
  v1::EvictRequest request;
  request.set_count(2);
  EXPECT_EQ(Evict(request).evicted(), 2);
  EXPECT_EQ(engine->Match(Keys("a", 5)).tokens(), 48);
  request.set_count(0);
  const v1::EvictResponse rest = Evict(request);
  EXPECT_EQ(rest.evicted(), 0);
  EXPECT_EQ(rest.held_back(), 3) << "the match holds them";
}

TEST_F(OperatorTest, EvictByKeyTakesWhatIsBehindIt) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), "a", 6);
  Cache(engine.get(), "b", 2);
  v1::EvictRequest request;
  request.set_key(Keys("a", 6)[2]);
  v1::EvictResponse response = Evict(request);
  EXPECT_EQ(response.evicted(), 4);
  EXPECT_EQ(response.held_back(), 0);
  EXPECT_EQ(Blocks().cached(), 4);
  engine->Match(Keys("a", 2));
  request.set_key(Keys("a", 6)[0]);
  response = Evict(request);
  EXPECT_EQ(response.evicted(), 0);
  EXPECT_EQ(response.held_back(), 2);
  request.set_key(Keys("b", 2)[0]);
  request.set_count(1);
  EXPECT_EQ(Evict(request).evicted(), 1);
  EXPECT_EQ(engine->Match(Keys("b", 2)).tokens(), 16) << "the leaf went";
}

TEST_F(OperatorTest, EvictOfAKeyThatNoBlockHasIsNotFound) {
  StartDaemon(4);
  v1::OpenSession tenant = OpenRequest();
  tenant.set_tenant("red");
  const auto a = OpenEngine(OpenRequest(), "a"), red = OpenEngine(tenant, "red");
  Cache(a.get(), "a", 2);
  v1::EvictRequest request;
  v1::EvictResponse response;
  request.set_key("nobody's");
  EXPECT_EQ(daemon_->Evict(request, &response),
            absl::NotFoundError("key 6e6f626f64792773 of group 0 is resident in no space asked"));
  // It is elsewhere than where it was looked for.
  request.set_key(Key("a0"));
  request.set_tenant("red");
  EXPECT_EQ(daemon_->Evict(request, &response).code(), absl::StatusCode::kNotFound);
  request.clear_tenant();
  request.set_session(red->opened.session());
  EXPECT_EQ(daemon_->Evict(request, &response).code(), absl::StatusCode::kNotFound);
  // A key that was found is no error, whoever sealed it.
  request.set_session(a->opened.session());
  request.set_key(Keys("a", 2)[1]);
  EXPECT_EQ(Evict(request).evicted(), 1);
  EXPECT_EQ(daemon_->Evict(request, &response).code(), absl::StatusCode::kNotFound) << "it has gone";
}

TEST_F(OperatorTest, EvictBySessionTenantAndSpace) {
  StartDaemon(4);
  v1::OpenSession tenant = OpenRequest();
  tenant.set_tenant("red");
  const auto a = OpenEngine(OpenRequest(), "a"), b = OpenEngine(OpenRequest(), "b"),
             red = OpenEngine(tenant, "red");
  Cache(a.get(), "a", 3);
  Cache(b.get(), "b", 2);
  Cache(red.get(), "r", 4);
  v1::EvictRequest request;
  request.set_session(b->opened.session());
  EXPECT_EQ(Evict(request).evicted(), 2);
  request.Clear();
  request.set_tenant("red");
  request.set_count(1);
  EXPECT_EQ(Evict(request).evicted(), 1);
  request.set_tenant("red@1000");
  request.set_count(0);
  EXPECT_EQ(Evict(request).evicted(), 3);
  request.Clear();
  request.set_space(a->opened.space());
  EXPECT_EQ(Evict(request).evicted(), 3);
  request.set_space(99);
  v1::EvictResponse response;
  EXPECT_EQ(daemon_->Evict(request, &response).message(), "space 99 does not exist");
  request.Clear();
  request.set_session(99);
  EXPECT_EQ(daemon_->Evict(request, &response).code(), absl::StatusCode::kNotFound);
}

TEST_F(OperatorTest, EvictByKeyInALargeTree) {
  options_.slab_bytes = 1 << 20;
  StartDaemon(256);
  const auto engine = OpenEngine(OpenRequest());
  Settle({engine.get()});
  // A trunk of 300 with two branches of 400, leaves with lower ids than their parents among them.
  const std::vector<uint64_t> blocks = engine->Lease(1000);
  engine->Seal({blocks.begin() + 500, blocks.begin() + 800}, Keys("t", 300));
  engine->Seal({blocks.begin(), blocks.begin() + 350}, Keys("x", 350), Keys("t", 300)[299]);
  engine->Seal({blocks.begin() + 350, blocks.begin() + 500}, Keys("y", 150), Keys("t", 300)[149]);
  engine->Release(blocks);
  v1::EvictRequest request;
  request.set_key(Keys("t", 300)[150]);
  EXPECT_EQ(Evict(request).evicted(), 500) << "150 of the trunk and the branch behind them";
  EXPECT_EQ(engine->Match(Keys("t", 300)).tokens(), 150 * 16);
}

// One slice of a pass went of a chain whose ids fall from its root, whatever its length.
TEST_F(OperatorTest, EvictByKeyTakesOnePassWhateverTheOrderOfIds) {
  constexpr int kBlocks = 8000, kSlabs = 640;
  options_.slab_bytes = kSlabs * kSlabBlocks * kBlockBytes;
  StartDaemon(kSlabs);
  const auto engine = OpenEngine(OpenRequest());
  std::vector<uint64_t> blocks = engine->Lease(kBlocks);
  ASSERT_EQ(blocks.size(), kBlocks);
  std::sort(blocks.rbegin(), blocks.rend(), [](uint64_t a, uint64_t b) { return IdOf(a) < IdOf(b); });
  const std::vector<std::string> keys = Keys("t", kBlocks);
  engine->Seal(blocks, keys);
  engine->Release(blocks);
  // Each slice is one hold of the mutex.
  const auto holds = [&] {
    const std::vector<uint64_t> counts = daemon_->Snapshot().spaces.at(0).hold.counts;
    return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  };
  v1::EvictRequest request;
  request.set_key(keys[0]);
  const uint64_t before = holds();
  EXPECT_EQ(Evict(request).evicted(), kBlocks);
  EXPECT_LT(holds() - before, 100) << "8 slices are looked at, 32 evicted";
}

TEST_F(OperatorTest, ListsShowWhatThereIs) {
  StartDaemon(4);
  v1::OpenSession request = OpenRequest();
  request.set_guaranteed_blocks(3);
  request.set_max_blocks(9);
  request.set_client_name("vllm pod-7");
  const auto engine = OpenEngine(request);
  const std::vector<uint64_t> blocks = engine->Lease(2);
  engine->Seal({blocks[0]}, Keys("a", 1));
  std::optional<v1::OperationResult> answer;
  engine->Send(ReleaseOp({blocks[1]}, 4), &answer);

  v1::ListSpacesResponse spaces;
  ASSERT_TRUE(daemon_->ListSpaces({}, &spaces).ok());
  ASSERT_EQ(spaces.spaces_size(), 1);
  const v1::SpaceInfo& space = spaces.spaces(0);
  EXPECT_EQ(space.tenant(), "default@1000");
  EXPECT_EQ(space.fingerprint(), "model");
  EXPECT_EQ(space.facts().at("weights"), "model");
  EXPECT_EQ(space.layout().block_bytes(), kBlockBytes);
  EXPECT_EQ(space.devices(0), "mem0");
  EXPECT_EQ(space.slabs(), 1);
  EXPECT_EQ(space.bytes(), kSlabBlocks * kBlockBytes);
  EXPECT_EQ(space.blocks().capacity(), 15);
  EXPECT_EQ(space.policy(), "learned");

  v1::ListSessionsRequest of_space;
  of_space.set_space(99);
  v1::ListSessionsResponse sessions;
  EXPECT_EQ(daemon_->ListSessions(of_space, &sessions).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(daemon_->ListSessions({}, &sessions).ok());
  const v1::SessionInfo& session = sessions.sessions(0);
  EXPECT_EQ(session.client_name(), "vllm pod-7");
  EXPECT_EQ(session.leased(), 2) << "one and the sink";
  EXPECT_EQ(session.referenced(), 1);
  EXPECT_EQ(session.guaranteed(), 3);
  EXPECT_EQ(session.max_blocks(), 9);
  EXPECT_EQ(session.parked(), 1);
  EXPECT_EQ(session.members(0).uid(), 1000);
  EXPECT_TRUE(session.members(0).alive());

  v1::GetStatsResponse stats;
  ASSERT_TRUE(daemon_->GetStats({}, &stats).ok());
  EXPECT_EQ(stats.version(), "test");
  EXPECT_EQ(stats.spaces(), 1);
  EXPECT_EQ(stats.sessions(), 1);
  EXPECT_EQ(stats.sealed_total(), 1);
  EXPECT_EQ(stats.devices(0).used_bytes(), kSlabBlocks * kBlockBytes);
}

TEST_F(OperatorTest, BlocksArePagedAndFiltered) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(3);
  engine->Seal(blocks, Keys("a", 3));
  v1::ListBlocksRequest request;
  request.set_space(engine->opened.space());
  request.set_limit(10);
  v1::ListBlocksResponse page;
  ASSERT_TRUE(daemon_->ListBlocks(request, &page).ok());
  EXPECT_EQ(page.blocks_size(), 10);
  EXPECT_EQ(page.blocks(0).block(), 1);
  EXPECT_EQ(page.next(), 11);
  request.set_first(page.next());
  page.Clear();
  ASSERT_TRUE(daemon_->ListBlocks(request, &page).ok());
  EXPECT_EQ(page.blocks_size(), 5);
  EXPECT_EQ(page.next(), 0);
  request.set_first(0);
  request.set_state(v1::BLOCK_STATE_SEALED);
  page.Clear();
  ASSERT_TRUE(daemon_->ListBlocks(request, &page).ok());
  ASSERT_EQ(page.blocks_size(), 3);
  for (const v1::BlockInfo& block : page.blocks()) {
    EXPECT_EQ(block.key().substr(0, 1), "a");
    EXPECT_EQ(block.priority(), 50);
    EXPECT_EQ(block.owner_session(), engine->opened.session());
  }
  request.set_space(12);
  EXPECT_EQ(daemon_->ListBlocks(request, &page).message(), "space 12 does not exist");
}

TEST_F(OperatorTest, SetPolicyKeepsWhatIsCached) {
  options_.policy = "lru";
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), "a", 3);
  Cache(engine.get(), "b", 3);
  v1::EvictRequest one;
  one.set_count(1);
  Evict(one);  // LRU is still the policy.
  v1::SetPolicyRequest request;
  request.set_policy("s3_fifo");
  request.set_space(engine->opened.space());
  v1::SetPolicyResponse response;
  ASSERT_TRUE(daemon_->SetPolicy(request, &response).ok());
  ASSERT_EQ(response.spaces_size(), 1);
  EXPECT_EQ(response.spaces(0).previous(), "lru");
  EXPECT_EQ(response.spaces(0).policy(), "s3_fifo");
  EXPECT_EQ(response.spaces(0).blocks(), 5);
  EXPECT_EQ(Blocks().cached(), 5);
  v1::GetPoliciesResponse policies;
  ASSERT_TRUE(daemon_->GetPolicies({}, &policies).ok());
  EXPECT_EQ(policies.spaces(0).policy(), "s3_fifo");
  EXPECT_EQ(policies.new_spaces(), "lru") << "one space was asked";
  EXPECT_EQ(policies.available_size(), static_cast<int>(ReplacementPolicies().size()));
  Evict(one);
  Evict(one);
  EXPECT_EQ(engine->Match(Keys("b", 3)).tokens(), 48) << "the older chain went on leaving";
  // What left is counted under the policy of the time: counters never fall.
  const SpaceSnapshot counted = daemon_->Snapshot().spaces.at(0);
  const auto by_operator = static_cast<size_t>(EvictReason::kOperator);
  EXPECT_EQ(counted.evicted_by_policy.at("lru")[by_operator], 1);
  EXPECT_EQ(counted.evicted_by_policy.at("s3_fifo")[by_operator], 2);

  request.set_space(0);
  request.set_policy("gdsf");
  response.Clear();
  ASSERT_TRUE(daemon_->SetPolicy(request, &response).ok());
  EXPECT_EQ(response.spaces(0).previous(), "s3_fifo");
  ASSERT_TRUE(daemon_->SetPolicy(request, &response).ok());
  EXPECT_EQ(response.spaces(1).previous(), "gdsf") << "nothing to change";
  const auto later = OpenEngine(OpenRequest("another model"), "later");
  policies.Clear();
  ASSERT_TRUE(daemon_->GetPolicies({}, &policies).ok());
  EXPECT_EQ(policies.new_spaces(), "gdsf");
  ASSERT_EQ(policies.spaces_size(), 2);
  EXPECT_EQ(policies.spaces(1).policy(), "gdsf");
  request.set_space(99);
  EXPECT_EQ(daemon_->SetPolicy(request, &response).message(), "space 99 does not exist");
}

TEST_F(OperatorTest, RevokeAsksTheMemberThatKeepsTheMagazine) {
  StartDaemon(4);
  const auto rank = OpenEngine(OpenRequest());
  const auto scheduler = Attach();
  v1::AddMember join = JoinRequest(*rank, 0);
  join.mutable_role()->set_scheduler(true);
  ASSERT_TRUE(scheduler->Join(*rank, join).ok());
  v1::RevokeRequest request;
  request.set_blocks(5);
  v1::RevokeResponse response;
  ASSERT_TRUE(daemon_->Revoke(request, &response).ok());
  EXPECT_EQ(response.sessions_asked(), 0) << "it has no stream";
  const auto listener = std::make_shared<FakeListener>();
  daemon_->BindStream(scheduler->member, listener);
  scheduler->Pending();
  rank->Pending();
  ASSERT_TRUE(daemon_->Revoke(request, &response).ok());
  EXPECT_EQ(response.sessions_asked(), 1);
  // Either may keep a magazine.
  for (const v1::StepResponse& told : {scheduler->Pending(), rank->Pending()}) {
    ASSERT_EQ(told.notices_size(), 1);
    EXPECT_EQ(told.notices(0).kind(), v1::NOTICE_KIND_REVOKE);
    EXPECT_EQ(told.notices(0).value(), 5);
  }
  request.set_session(99);
  EXPECT_EQ(daemon_->Revoke(request, &response).message(), "session 99 does not exist");
}

TEST_F(OperatorTest, EndSessionQuarantinesUntilItsProcessesAreGone) {
  StartDaemon(1);
  const auto hung = OpenEngine(OpenRequest());
  const auto other = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = hung->Lease(3);
  hung->Seal({blocks[0]}, {Key("kept")});
  v1::EndSessionRequest request;
  v1::EndSessionResponse response;
  EXPECT_EQ(daemon_->EndSession(request, &response).message(), "session is 0; required");
  request.set_session(99);
  EXPECT_EQ(daemon_->EndSession(request, &response).message(), "session 99 does not exist");
  request.set_session(hung->opened.session());
  for (int time = 0; time < 2; ++time) {  // Once more changes nothing.
    response.Clear();
    ASSERT_TRUE(daemon_->EndSession(request, &response).ok());
    EXPECT_TRUE(response.session().ended());
    EXPECT_EQ(response.session().end_reason(),
              absl::StrCat("session ", hung->opened.session(), " ended: an operator asked for it"));
    ASSERT_EQ(response.session().members_size(), 1);
    EXPECT_TRUE(response.session().members(0).alive());
    EXPECT_EQ(daemon_->Snapshot().sessions_ended.at("operator"), 1);
  }
  EXPECT_EQ(hung->peer->closed(), response.session().end_reason());
  EXPECT_EQ(static_cast<absl::StatusCode>(hung->Do(LeaseOp(1)).code()), absl::StatusCode::kAborted);
  // It still runs, and may write: nobody gets its blocks.
  const auto count = [this](BlockState state) {
    return daemon_->Snapshot().spaces.at(0).blocks[static_cast<int>(state)];
  };
  EXPECT_EQ(count(BlockState::kQuarantined), 3) << "two blocks and the sink";
  EXPECT_EQ(count(BlockState::kSealed), 1);
  hung->Die();
  EXPECT_EQ(count(BlockState::kQuarantined), 0);
  EXPECT_EQ(count(BlockState::kCached), 1);
  EXPECT_EQ(daemon_->EndSession(request, &response).code(), absl::StatusCode::kNotFound) << "it is gone";
  EXPECT_EQ(other->Lease(5).size(), 5) << "others don't notice";
}

TEST_F(OperatorTest, ExplainABlock) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest(), "vllm");
  const auto other = OpenEngine(OpenRequest(), "sglang");
  const uint64_t space = engine->opened.space();
  const std::vector<uint64_t> blocks = engine->Lease(4);
  EXPECT_EQ(ExplainBlock(space, IdOf(blocks[0])).summary(),
            "Block " + std::to_string(IdOf(blocks[0])) +
                " of space 1 is leased to session 1 (vllm), which alone writes it; it is not sealed yet.");
  engine->Seal({blocks[0], blocks[1]}, Keys("a", 2));
  other->Match(Keys("a", 2));
  clock_.Advance(2500);
  v1::ExplainResponse sealed = ExplainBlock(space, IdOf(blocks[1]));
  EXPECT_NE(sealed.summary().find("is sealed and stays: it is held by 2 sessions and 0 blocks behind it."),
            std::string::npos)
      << sealed.summary();
  EXPECT_EQ(sealed.blocks(0).block(), IdOf(blocks[1]));
  EXPECT_EQ(sealed.blocks(1).block(), IdOf(blocks[0])) << "the chain in front of it";
  EXPECT_EQ(sealed.details(0), "session 1 (vllm) holds it 1 time");
  EXPECT_EQ(sealed.details(1), "session 2 (sglang) holds it 1 time");
  EXPECT_NE(sealed.details(2).find("sealed by session 1 2.5 s ago under key 6131"), std::string::npos)
      << sealed.details(2);
  EXPECT_NE(sealed.details(4).find("block 2 of its chain"), std::string::npos) << sealed.details(4);
  engine->Release({blocks[0], blocks[1]});
  other->Release({blocks[0], blocks[1]});
  EXPECT_NE(ExplainBlock(space, IdOf(blocks[0])).summary().find("is cached: nobody holds it"),
            std::string::npos);
  const uint64_t sink = engine->LeaseAsked(1, 1).sink_block();
  EXPECT_NE(ExplainBlock(space, IdOf(sink)).summary().find("is the sink of session 1 (vllm)"),
            std::string::npos);
  daemon_->OnHangup(engine->id);
  EXPECT_NE(ExplainBlock(space, IdOf(blocks[2])).summary().find("is quarantined: session 1 (vllm) ended"),
            std::string::npos);
  EXPECT_NE(ExplainBlock(space, 15).summary().find("is free"), std::string::npos);
  v1::ExplainRequest beyond;
  beyond.set_space(space);
  beyond.set_block(4000);
  v1::ExplainResponse response;
  EXPECT_EQ(daemon_->Explain(beyond, &response).code(), absl::StatusCode::kNotFound);
}

TEST_F(OperatorTest, ExplainAMiss) {
  StartDaemon(8);
  v1::OpenSession request = OpenRequest();
  v1::LayerGroup* group = request.mutable_layout()->add_groups();
  *group = request.layout().groups(0);
  group->set_name("sliding");
  group->set_layers(0, 1);
  const auto engine = OpenEngine(request);
  const auto newer = OpenEngine(OpenRequest("newer"));
  const uint64_t space = engine->opened.space();
  const std::vector<uint64_t> blocks = Cache(engine.get(), "a", 1);

  v1::ExplainResponse here = ExplainKey(0, Key("a0"));
  EXPECT_NE(here.summary().find("is cached"), std::string::npos) << here.summary();
  EXPECT_EQ(here.blocks(0).block(), IdOf(blocks[0]));
  EXPECT_NE(ExplainKey(space, Key("a0"), 1).summary().find("under group 0 (\"full\"), not 1"),
            std::string::npos);
  EXPECT_NE(ExplainKey(newer->opened.space(), Key("a0"))
                .summary()
                .find("as the fingerprints differ: weights \"model\" there, \"newer\" here"),
            std::string::npos)
      << ExplainKey(newer->opened.space(), Key("a0")).summary();
  EXPECT_NE(ExplainKey(space, Key("nothing")).summary().find("never sealed here"), std::string::npos);
  Evict({});
  clock_.Advance(3000);
  EXPECT_NE(ExplainKey(space, Key("a0")).summary().find("it was evicted from space 1"), std::string::npos);
  EXPECT_NE(ExplainKey(space, Key("a0")).summary().find("3.0 s ago."), std::string::npos)
      << ExplainKey(space, Key("a0")).summary();
}

TEST_F(OperatorTest, PinByPrefix) {
  StartDaemon(2);
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), "a", 3);
  v1::PinPrefixRequest request;
  request.set_key(Keys("a", 3)[1]);
  request.set_ttl_ms(60000);
  v1::PinPrefixResponse response;
  ASSERT_TRUE(daemon_->PinPrefix(request, &response).ok());
  EXPECT_EQ(response.pinned(), 2);
  EXPECT_EQ(Evict({}).evicted(), 1);
  request.set_ttl_ms(0);
  response.Clear();
  ASSERT_TRUE(daemon_->PinPrefix(request, &response).ok());
  EXPECT_EQ(response.pinned(), 2);
  EXPECT_EQ(Evict({}).evicted(), 2);
  EXPECT_EQ(daemon_->PinPrefix(request, &response).message(), "key is resident in no space asked");
  Cache(engine.get(), "b", 10);
  request.set_key(Keys("b", 10)[9]);
  request.set_ttl_ms(1000);
  const absl::Status refused = daemon_->PinPrefix(request, &response);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(refused.message())
                .find("and the 9 in front of it can't be pinned: 0 of 3 blocks are pinned"),
            std::string::npos)
      << refused;
}

// A prefix of several slices, whole or not at all, whatever others do between them.
TEST_F(OperatorTest, PinByALongPrefix) {
  constexpr uint32_t kLong = 5000;
  options_.slab_bytes = 8192 * kBlockBytes;
  options_.pin_budget = 0.9;
  StartDaemon(8192 / kSlabBlocks);
  const auto engine = OpenEngine(OpenRequest());
  Cache(engine.get(), "a", kLong);
  v1::PinPrefixRequest request;
  request.set_key(Keys("a", kLong).back());
  request.set_ttl_ms(60000);
  v1::PinPrefixResponse response;
  ASSERT_TRUE(daemon_->PinPrefix(request, &response).ok());
  EXPECT_EQ(response.pinned(), kLong);
  EXPECT_EQ(Evict({}).evicted(), 0);
  request.set_ttl_ms(0);
  response.Clear();
  ASSERT_TRUE(daemon_->PinPrefix(request, &response).ok());
  EXPECT_EQ(response.pinned(), kLong);

  std::atomic<bool> over = false;
  std::thread evicts([&] {
    v1::EvictRequest some;
    some.set_count(1);
    while (!over) {
      v1::EvictResponse evicted;
      EXPECT_TRUE(daemon_->Evict(some, &evicted).ok());
    }
  });
  uint32_t pinned = 0;
  for (uint32_t length = kLong - 100; length > 1000 && pinned == 0; length -= 100) {
    request.set_key(Keys("a", length).back());
    request.set_ttl_ms(60000);
    response.Clear();
    const absl::Status status = daemon_->PinPrefix(request, &response);
    EXPECT_TRUE(status.ok() || absl::IsAborted(status) || absl::IsNotFound(status)) << status;
    if (status.ok()) pinned = length;
  }
  over = true;
  evicts.join();
  Evict({});
  EXPECT_GE(Blocks().cached() + Blocks().sealed(), pinned);
}

}  // namespace
}  // namespace kvpool
