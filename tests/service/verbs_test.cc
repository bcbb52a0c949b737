// Every verb of an engine, one session at a time.
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

std::vector<uint64_t> Refs(const google::protobuf::RepeatedField<uint64_t>& blocks) {
  return {blocks.begin(), blocks.end()};
}

uint32_t Generation(uint64_t ref) { return BlockRef::Unpack(ref).generation; }

class VerbsTest : public ServiceTest {};

TEST_F(VerbsTest, LeaseSealReleaseMatch) {
  StartDaemon(/*slabs=*/4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(3);
  const v1::SealResult sealed = engine->Seal(blocks, Keys("a", 3));
  ASSERT_EQ(sealed.refused_size(), 0) << sealed.ShortDebugString();
  EXPECT_EQ(Refs(sealed.canonical()), blocks);
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0);
  EXPECT_EQ(Blocks().cached(), 3);

  const v1::MatchResult match = engine->Match(Keys("a", 4));
  EXPECT_EQ(match.tokens(), 48);
  EXPECT_EQ(match.miss(), v1::MISS_REASON_NEVER_SEEN);
  ASSERT_EQ(match.groups_size(), 1);
  EXPECT_EQ(Refs(match.groups(0).blocks()), blocks);
  EXPECT_EQ(Blocks().sealed(), 3);
}

TEST_F(VerbsTest, SinkIsLeasedOnceAndGuarded) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  EXPECT_EQ(engine->opened.sink_block(), 0) << "no slab was mapped when the session was opened";
  const v1::LeaseResult lease = engine->LeaseAsked(1, 1);
  const uint64_t sink = lease.sink_block();
  ASSERT_NE(sink, 0);
  EXPECT_NE(sink, lease.blocks(0));
  EXPECT_EQ(Blocks().leased(), 2);

  const std::string why = "block " + std::to_string(IdOf(sink)) + " is the sink of session 1";
  const v1::ReleaseResult released = engine->Release({sink});
  ASSERT_EQ(released.refused_size(), 1);
  EXPECT_EQ(released.refused(0).message(), why);
  EXPECT_EQ(released.refused(0).code(), kFailedPrecondition);
  const v1::SealResult sealed = engine->Seal({lease.blocks(0), sink}, Keys("s", 2));
  ASSERT_EQ(sealed.refused_size(), 1);
  EXPECT_EQ(sealed.refused(0).index(), 1);
  EXPECT_EQ(sealed.refused(0).message(), why);
  EXPECT_EQ(sealed.canonical(0), lease.blocks(0));
  EXPECT_EQ(sealed.canonical(1), 0);
  EXPECT_EQ(Blocks().leased(), 1);
}

TEST_F(VerbsTest, RefusalsSayWhatIsWrongWithEachBlock) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto other = OpenEngine(OpenRequest(), "other");
  const std::vector<uint64_t> blocks = engine->Lease(2);
  const std::vector<uint64_t> others = other->Lease(1);
  engine->Release({blocks[1]});
  const std::vector<uint64_t> again = engine->Lease(1);
  ASSERT_EQ(IdOf(again[0]), IdOf(blocks[1])) << "a block freed last is leased first";

  const uint64_t unknown = BlockRef{BlockId{4000}, 1}.Pack();
  const uint64_t null = uint64_t{1} << 32;
  const v1::ReleaseResult result = engine->Release({blocks[0], blocks[1], others[0], unknown, null});
  ASSERT_EQ(result.refused_size(), 4);
  EXPECT_EQ(result.refused(0).index(), 1);
  EXPECT_EQ(result.refused(0).code(), kFailedPrecondition);
  EXPECT_EQ(result.refused(0).message(), "block " + std::to_string(IdOf(blocks[1])) + " generation " +
                                             std::to_string(Generation(blocks[1])) +
                                             " is stale: now at generation " +
                                             std::to_string(Generation(again[0])));
  EXPECT_EQ(result.refused(1).code(), kFailedPrecondition);
  EXPECT_EQ(result.refused(1).message(),
            "block " + std::to_string(IdOf(others[0])) + " is leased, and not held by session 1");
  EXPECT_EQ(result.refused(2).code(), kNotFound);
  EXPECT_EQ(result.refused(2).message(), "block 4000 does not exist: ids end at 15");
  EXPECT_EQ(result.refused(3).message(), "block 0 is the null block");
  EXPECT_EQ(Blocks().leased(), 4) << "two sinks, one of ours, one of the other's: the good one was released";
}

TEST_F(VerbsTest, ReleaseOfAFreedBlockIsStale) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0);
  const v1::ReleaseResult twice = engine->Release(blocks);
  ASSERT_EQ(twice.refused_size(), 1);
  EXPECT_EQ(twice.refused(0).message(), "block " + std::to_string(IdOf(blocks[0])) + " generation " +
                                            std::to_string(Generation(blocks[0])) + " is stale: now free");
}

TEST_F(VerbsTest, AnswersStaySmallHoweverManyBlocksAreRefused) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const v1::ReleaseResult result = engine->Release(std::vector<uint64_t>(65536, uint64_t{7} << 32 | 999));
  ASSERT_EQ(result.refused_size(), 65536);
  EXPECT_FALSE(result.refused(0).message().empty());
  EXPECT_EQ(result.refused(65535).code(), kNotFound);
  EXPECT_TRUE(result.refused(65535).message().empty());
  EXPECT_LT(result.ByteSizeLong(), 1u << 20);
}

TEST_F(VerbsTest, DedupHoldsTheCanonicalBlock) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto other = OpenEngine(OpenRequest(), "other");
  const std::vector<uint64_t> first = engine->Lease(1), second = other->Lease(1);
  engine->Seal(first, Keys("a", 1));
  const v1::SealResult duplicate = other->Seal(second, Keys("a", 1));
  EXPECT_EQ(duplicate.refused_size(), 0);
  EXPECT_EQ(Refs(duplicate.canonical()), first);
  EXPECT_EQ(other->Release({second[0], first[0]}).refused_size(), 0) << "its own block stayed leased to it";
  EXPECT_EQ(Blocks().sealed(), 1);
}

TEST_F(VerbsTest, ADuplicateMayBeLeftWhereCreditWouldNotCoverIt) {
  StartDaemon(1);  // 15 blocks: a sink each, one cached, two leased.
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> first = engine->Lease(1);
  engine->Seal(first, Keys("a", 1));
  engine->Release(first);
  const std::vector<uint64_t> own = engine->Lease(2);
  auto greedy = OpenRequest();
  greedy.set_guaranteed_blocks(11);  // And the sink: of 11 that are free, and the cached one.
  const auto other = OpenEngine(greedy, "other");
  EXPECT_EQ(engine->Seal({own[0]}, Keys("a", 1)).refused_size(), 1) << "promised to the other";
  v1::Operation operation = SealOp(own, Keys("a", 2));
  operation.mutable_seal()->set_leave_duplicates(true);
  const v1::SealResult sealed = engine->Do(operation).seal();
  EXPECT_EQ(sealed.refused_size(), 0);
  EXPECT_EQ(Refs(sealed.canonical()), std::vector<uint64_t>({0, own[1]}));
  EXPECT_EQ(engine->Release(first).refused_size(), 1) << "it was given no hold";
  EXPECT_EQ(engine->Release(own).refused_size(), 0);
  EXPECT_EQ(other->Lease(11).size(), 11u);
}

TEST_F(VerbsTest, OneBlockUnderSeveralOpaqueKeys) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(2);
  v1::Operation operation = SealOp(blocks, {});
  operation.mutable_seal()->set_key_bytes(5);
  operation.mutable_seal()->set_keys_per_block(2);
  operation.mutable_seal()->set_keys("aliasfirstotherchain");
  EXPECT_EQ(engine->Do(operation).seal().refused_size(), 0);
  v1::Operation match = MatchOp({});
  match.mutable_match()->mutable_groups(0)->set_key_bytes(5);
  match.mutable_match()->mutable_groups(0)->set_keys("first");
  EXPECT_EQ(engine->Do(match).match().groups(0).blocks(0), blocks[0]);
  match.mutable_match()->mutable_groups(0)->set_keys("alias");
  EXPECT_EQ(engine->Do(match).match().groups(0).blocks(0), blocks[0]);
  match.mutable_match()->mutable_groups(0)->set_keys("chain");
  EXPECT_EQ(engine->Do(match).match().groups(0).blocks(0), blocks[1]);
}

TEST_F(VerbsTest, RefAddsAHoldThatReleaseTakes) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  engine->Seal(blocks, Keys("a", 1));
  EXPECT_EQ(engine->Do(RefOp(blocks)).ref().refused_size(), 0);
  engine->Release(blocks);
  EXPECT_EQ(Blocks().sealed(), 1);
  engine->Release(blocks);
  EXPECT_EQ(Blocks().cached(), 1);
  EXPECT_EQ(engine->Do(RefOp(blocks)).ref().refused(0).code(), kFailedPrecondition)
      << "cached: a match takes it";
}

TEST_F(VerbsTest, TouchCountsWhatIsResident) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(3);
  engine->Seal({blocks[0], blocks[1]}, Keys("a", 2));
  EXPECT_EQ(engine->Do(TouchOp({blocks[0], blocks[1], uint64_t{9} << 32 | 5})).touch().touched(), 2);
}

TEST_F(VerbsTest, PinsAreUnderABudgetAndExpire) {
  options_.pin_budget = 0.25;
  StartDaemon(1);  // 15 blocks, 3 of them pinnable.
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(5);
  for (int i = 0; i < 5; ++i) engine->Seal({blocks[i]}, {Key("p" + std::to_string(i))});
  engine->Release(blocks);
  const v1::PinResult pin = engine->Do(PinOp(blocks, 1000)).pin();
  ASSERT_EQ(pin.refused_size(), 2);
  EXPECT_EQ(pin.refused(0).index(), 3);
  EXPECT_EQ(pin.refused(0).code(), kResourceExhausted);
  EXPECT_NE(pin.refused(0).message().find("is beyond the pin budget: 3 of 3 blocks are pinned"),
            std::string::npos)
      << pin.refused(0).message();
  EXPECT_EQ(Blocks().cached(), 2);
  EXPECT_EQ(engine->Do(UnpinOp({blocks[0], blocks[4]})).unpin().unpinned(), 1);
  EXPECT_EQ(Blocks().cached(), 3);
  clock_.Advance(1001);
  daemon_->HousekeepOnce();
  EXPECT_EQ(Blocks().cached(), 5);
}

TEST_F(VerbsTest, RetentionDecidesWhoLeavesFirst) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(2);
  engine->Seal({blocks[0]}, {Key("dear")});
  engine->Seal({blocks[1]}, {Key("cheap")});
  engine->Release({blocks[1]});
  engine->Release({blocks[0]});  // The dear one was used last, the cheap one has the lower priority.
  EXPECT_EQ(engine->Do(RetainOp({blocks[0]}, 90, 1000)).set_retention().refused_size(), 0);
  EXPECT_EQ(engine->Do(RetainOp({blocks[1]}, 10, 1000)).set_retention().refused_size(), 0);
  engine->Lease(13);
  EXPECT_EQ(engine->Match({Key("dear")}).tokens(), 16);
  const v1::MatchResult cheap = engine->Match({Key("cheap")});
  EXPECT_EQ(cheap.tokens(), 0);
  EXPECT_EQ(cheap.miss(), v1::MISS_REASON_EVICTED);
}

TEST_F(VerbsTest, RetentionDecays) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(1);
  engine->Seal(blocks, {Key("dear")});
  v1::Operation operation = RetainOp(blocks, 100, 10000);
  operation.mutable_set_retention()->set_half_life_ms(1000);
  EXPECT_EQ(engine->Do(operation).set_retention().refused_size(), 0);
  const auto pinned = [&] {
    clock_.Advance(1000);
    daemon_->HousekeepOnce();
    return daemon_->Snapshot().spaces.at(0).pinned;
  };
  for (int i = 0; i < 5; ++i) EXPECT_EQ(pinned(), 1) << i;  // 75, 62, 56, 53, 51.
  EXPECT_EQ(pinned(), 0);
}

TEST_F(VerbsTest, BlocksOfAPrunedBeamLeaveFirst) {
  StartDaemon(1);  // 15 blocks, one of them the sink.
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> old = engine->Lease(1);
  engine->Seal(old, {Key("old")});
  engine->Release(old);
  const std::vector<uint64_t> blocks = engine->Lease(3);
  engine->Seal({blocks[0], blocks[1]}, {Key("prompt"), Key("pruned")});
  engine->Seal({blocks[2]}, {Key("kept")}, Key("prompt"));
  engine->Do(RefOp({blocks[0]}));  // Each of two beams holds the prompt.
  v1::Operation release = ReleaseOp({blocks[0], blocks[1]});
  release.mutable_release()->set_reuse(v1::REUSE_NEVER);
  EXPECT_EQ(engine->Do(release).release().refused_size(), 0);
  engine->Lease(11);
  EXPECT_EQ(engine->Match({Key("prompt"), Key("pruned")}).tokens(), 16) << "one block";
  EXPECT_EQ(engine->Match({Key("prompt"), Key("kept")}).tokens(), 32);
  EXPECT_EQ(engine->Match({Key("old")}).tokens(), 16);
}

TEST_F(VerbsTest, LeaseSaysWhyItIsShort) {
  StartDaemon(1);  // 15 blocks.
  v1::OpenSession promised = OpenRequest();
  promised.set_guaranteed_blocks(4);
  const auto keeper = OpenEngine(promised, "keeper");
  v1::OpenSession capped = OpenRequest();
  capped.set_max_blocks(5);
  const auto engine = OpenEngine(capped);

  v1::LeaseResult lease = keeper->LeaseAsked(1, 1);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_NONE);
  EXPECT_EQ(lease.free_blocks(), 3) << "the sink does not eat into the guarantee";

  lease = engine->LeaseAsked(8, 1);
  EXPECT_EQ(lease.blocks_size(), 5);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_CAP);
  lease = engine->LeaseAsked(1, 1);
  EXPECT_EQ(lease.blocks_size(), 0);

  const auto greedy = OpenEngine(OpenRequest(), "greedy");
  lease = greedy->LeaseAsked(15, 0);  // 15 - 3 sinks - 1 - 5 - 3 promised.
  EXPECT_EQ(lease.blocks_size(), 3);
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_CREDIT);
  lease = keeper->LeaseAsked(4, 0);
  EXPECT_EQ(lease.blocks_size(), 3) << "what was guaranteed was there";
  EXPECT_EQ(lease.shortfall(), v1::SHORTFALL_PRESSURE);
  const SpaceSnapshot space = daemon_->Snapshot().spaces.at(0);
  EXPECT_EQ(space.counters.shortfalls[v1::SHORTFALL_CAP], 2);
  EXPECT_EQ(space.counters.shortfalls[v1::SHORTFALL_CREDIT], 1);
  EXPECT_EQ(space.counters.shortfalls[v1::SHORTFALL_PRESSURE], 1);
}

TEST_F(VerbsTest, MinIsAllOrNothing) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  EXPECT_EQ(engine->LeaseAsked(20, 15).blocks_size(), 0);
  EXPECT_EQ(engine->LeaseAsked(20, 14).blocks_size(), 14);
}

TEST_F(VerbsTest, GroupsMatchTogether) {
  StartDaemon(4);
  v1::OpenSession request = OpenRequest();
  v1::LayerGroup* sliding = request.mutable_layout()->add_groups();
  sliding->set_name("sliding");
  sliding->add_layers(1);
  sliding->set_tokens_per_block(16);
  sliding->set_window_tokens(32);
  const auto engine = OpenEngine(request);
  const std::vector<uint64_t> full = engine->Lease(4), window = engine->Lease(4);
  engine->Seal(full, Keys("k", 4));
  v1::Operation seal = SealOp({window[2], window[3]}, {Keys("k", 4)[2], Keys("k", 4)[3]});
  seal.mutable_seal()->set_group(1);
  EXPECT_EQ(engine->Do(seal).seal().refused_size(), 0);

  v1::Operation match = MatchOp(Keys("k", 4));
  v1::GroupKeys* second = match.mutable_match()->add_groups();
  *second = match.match().groups(0);
  second->set_group(1);
  const v1::MatchResult result = engine->Do(match).match();
  EXPECT_EQ(result.tokens(), 64);
  EXPECT_EQ(Refs(result.groups(0).blocks()), full);
  EXPECT_EQ(Refs(result.groups(1).blocks()), (std::vector<uint64_t>{0, 0, window[2], window[3]}));
}

TEST_F(VerbsTest, ABatchIsAppliedInOrderAndCounted) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(2);
  const v1::StepResponse response = engine->Step({SealOp(blocks, Keys("a", 2)), ReleaseOp(blocks), LeaseOp(0),
                                                  MatchOp(Keys("a", 2)), FenceOp(3), TouchOp(blocks)});
  EXPECT_EQ(response.code(), 0);
  EXPECT_EQ(response.sequence(), 2);
  ASSERT_EQ(response.results_size(), 6);
  EXPECT_EQ(response.results(2).code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(response.results(2).message(), "lease.count is 0; must be 1 to 65536");
  EXPECT_EQ(response.results(3).match().tokens(), 32) << "one bad operation does not stop the others";
  EXPECT_EQ(response.results(4).fence().passed(), 3);
  const DaemonSnapshot snapshot = daemon_->Snapshot();
  EXPECT_EQ(snapshot.totals.space.batches, 1);
  EXPECT_EQ(snapshot.step_operations.at("lease"), 2);
  EXPECT_EQ(snapshot.step_operations.at("close_session"), 0);
  EXPECT_EQ(snapshot.step_errors.at("lease"), 1);
  EXPECT_EQ(snapshot.step_errors.at("seal"), 0);
}

TEST_F(VerbsTest, RefusedBlocksAreCountedByVerb) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const uint64_t held = engine->Lease(1)[0];
  // The one that is held, and so many that nobody has.
  const auto beside = [held](uint32_t count) {
    std::vector<uint64_t> blocks = {held};
    for (uint32_t i = 0; i < count; ++i) {
      blocks.push_back(BlockRef{.id = BlockId{IdOf(held) + 1 + i}, .generation = 1}.Pack());
    }
    return blocks;
  };
  const v1::StepResponse response = engine->Step(
      {RefOp(beside(3)), SealOp(beside(1), Keys("a", 2)), PinOp(beside(4), 1000),
       RetainOp(beside(5), 50, 1000), UnpinOp(beside(6)), TouchOp(beside(7)), ReleaseOp(beside(2))});
  for (const v1::OperationResult& result : response.results())
    EXPECT_EQ(result.code(), 0) << result.message();
  std::map<std::string, uint64_t> refused = daemon_->Snapshot().refused_blocks;
  std::erase_if(refused, [](const auto& verb) { return verb.second == 0; });
  EXPECT_EQ(refused, (std::map<std::string, uint64_t>{
                         {"pin", 4}, {"ref", 3}, {"release", 2}, {"seal", 1}, {"set_retention", 5}}))
      << "unpin and touch are harmless";
}

TEST_F(VerbsTest, OperationsThatAreRefusedAreCountedByVerb) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  // Behind the end of the session, of each verb another number.
  std::vector<v1::Operation> operations = {CloseOp()};
  std::map<std::string, uint64_t> expected;
  const auto* verbs = v1::Operation::descriptor()->FindOneofByName("verb");
  for (int i = 0; i < verbs->field_count(); ++i) {
    for (int times = 0; times <= i; ++times) {
      v1::Operation& operation = operations.emplace_back();
      operation.GetReflection()->MutableMessage(&operation, verbs->field(i));
    }
    expected[verbs->field(i)->name()] = static_cast<uint64_t>(i) + 1;
  }
  const v1::StepResponse response = engine->Step(operations);
  EXPECT_EQ(response.results(0).code(), 0);
  EXPECT_EQ(response.results(1).code(), kAborted);
  EXPECT_EQ(daemon_->Snapshot().step_errors, expected);
}

TEST_F(VerbsTest, HistogramsFillFromWhatHappens) {
  StartDaemon(1);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(10);
  for (int i = 0; i < 10; ++i) engine->Seal({blocks[i]}, {Key("h" + std::to_string(i))});
  engine->Release(blocks);
  clock_.Advance(3000);
  for (int i = 0; i < 16; ++i) engine->Match({Key("h3")});
  engine->Lease(10);
  daemon_->HousekeepOnce();
  const SpaceSnapshot space = daemon_->Snapshot().spaces.at(0);
  const auto total = [](const HistogramSnapshot& histogram) {
    uint64_t total = 0;
    for (const uint64_t count : histogram.counts) total += count;
    return total;
  };
  EXPECT_EQ(total(space.lifetime), total(space.idle_before_evict));
  EXPECT_GE(total(space.lifetime), 6);
  EXPECT_EQ(total(space.reuse_gap), 2) << "one match in eight is looked at";
  EXPECT_EQ(space.pool.evicted[static_cast<int>(EvictReason::kDirect)] +
                space.pool.evicted[static_cast<int>(EvictReason::kBackground)],
            total(space.lifetime));
  EXPECT_GE(total(space.reclaim), 1);
}

}  // namespace
}  // namespace kvpool
