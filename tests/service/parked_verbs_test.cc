// A parked verb is found by its call, wherever it is.
#include "server/space/parked_verbs.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "server/space/session.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class ParkedVerbsTest : public testing::Test {
 protected:
  ParkedVerb VerbOf(uint64_t sequence, uint32_t index = 0) {
    return {.member = &member_, .sequence = sequence, .index = index, .operation = ReleaseOp({sequence})};
  }
  uint64_t Found(uint64_t sequence, uint32_t index = 0) {
    const ParkedVerb* verb = parked_.Find(&member_, sequence, index);
    if (verb == nullptr) return 0;
    EXPECT_EQ(verb->index, index);
    return verb->sequence;
  }
  void Wait(uint64_t due, ParkedVerb verb) {
    parked_.Name(due, BlockIdsOf(verb.operation));
    parked_.Park(due, std::move(verb));
  }

  Session session_{nullptr, {}};
  Member member_{&session_, 0, {}}, other_{&session_, 1, {}};
  ParkedVerbs parked_;
};

TEST_F(ParkedVerbsTest, AVerbIsFoundWhereverItIs) {
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) Wait(7, VerbOf(sequence));
  Wait(7, VerbOf(3, 1));
  EXPECT_EQ(Found(2), 2u);
  EXPECT_EQ(Found(3, 1), 3u);
  EXPECT_EQ(Found(2, 1), 0u);
  EXPECT_EQ(parked_.Find(&other_, 2, 0), nullptr);

  ParkedVerb first = *parked_.Pop(7), second = *parked_.Pop(7);
  EXPECT_EQ(Found(1), 0u) << "it is parked nowhere";
  EXPECT_EQ(Found(2), 0u);
  EXPECT_EQ(Found(3), 3u);
  const std::vector<uint32_t> blocks = {1};
  const BlockGates::Id gate = first.gate = parked_.Enter();
  parked_.StandFirst(gate, blocks);
  parked_.Start(1, std::move(first), 1);
  EXPECT_EQ(Found(1), 1u) << "it runs";
  second.gate = parked_.Enter();
  parked_.StandLast(second.gate, blocks);
  parked_.ParkBehind(std::move(second));
  EXPECT_EQ(Found(2), 2u) << "it is behind the one that runs";

  parked_.Finish(1);
  EXPECT_EQ(Found(1), 0u);
  EXPECT_FALSE(parked_.Leave(gate, 10));
  const std::optional<ParkedVerb> admitted = parked_.Admit();
  ASSERT_TRUE(admitted.has_value());
  EXPECT_EQ(admitted->sequence, 2u);
  EXPECT_EQ(Found(2), 0u);
}

TEST_F(ParkedVerbsTest, WhatEndsWithItsSessionIsNotFound) {
  Wait(7, VerbOf(1));
  ParkedVerb runs = VerbOf(2);
  runs.gate = parked_.Enter();
  parked_.Start(1, std::move(runs), 1);
  parked_.ParkBehind(VerbOf(3));
  EXPECT_EQ(parked_.TakeRunning().size(), 1u);
  EXPECT_EQ(Found(2), 0u);
  EXPECT_EQ(parked_.PopSome(10).size(), 2u);
  EXPECT_EQ(Found(1), 0u);
  EXPECT_EQ(Found(3), 0u);
  EXPECT_EQ(parked_.size(), 0u);
}

TEST_F(ParkedVerbsTest, WhatAFenceMayLetGoIsCounted) {
  ParkedVerb large{.member = &member_, .sequence = 1, .operation = ReleaseOp(std::vector<uint64_t>(5000, 1))};
  Wait(7, std::move(large));
  ParkedVerb choice{.member = &member_, .sequence = 2};
  choice.operation.mutable_choose_episode()->set_name("set");
  Wait(8, std::move(choice));
  EXPECT_EQ(parked_.to_be_let_go().names, 5002u);
  EXPECT_EQ(parked_.to_be_let_go().of_sets, 1u);
  const std::vector<BlockRef> late = {BlockRef{BlockId{1}, 1}, BlockRef{BlockId{2}, 1}};
  parked_.ReleaseLate(9, v1::Release(), late);
  EXPECT_EQ(parked_.to_be_let_go().names, 5004u);
  parked_.Pop(8);
  parked_.Pop(8);
  EXPECT_EQ(parked_.to_be_let_go().names, 2u);
  EXPECT_EQ(parked_.to_be_let_go().of_sets, 0u);
}

}  // namespace
}  // namespace kvpool
