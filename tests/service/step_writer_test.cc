// The writer of answers against Protocol Buffers, byte for byte.
#include "server/wire/step_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>

namespace kvpool {
namespace {

class StepWriterTest : public testing::Test {
 protected:
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  // Of any size, and 0 as often as not: a field that is 0 is not written.
  uint64_t Number() { return Below(2) == 0 ? 0 : random_() >> Below(64); }
  uint32_t Small() { return static_cast<uint32_t>(Number()); }
  void Add(google::protobuf::RepeatedField<uint64_t>* blocks) {
    for (uint32_t i = Below(Below(8) == 0 ? 300 : 4); i > 0; --i) blocks->Add(random_());
  }

  void MakeResult(v1::OperationResult* result) {
    if (Below(16) == 0) {
      result->set_code(static_cast<int>(Below(20)) - 2);
      result->set_message(std::string(Below(200), 'm'));
      return;
    }
    if (Below(16) == 0) return result->set_parked(true);
    switch (Below(12)) {
      case 0:
        return result->mutable_fence()->set_passed(Number());
      case 1:
        return result->mutable_touch()->set_touched(Small());
      case 2: {
        v1::Refusal& refusal = *result->mutable_release()->add_refused();
        return refusal.set_index(Small());
      }
      case 3:
        Add(result->mutable_seal()->mutable_canonical());
        return result->mutable_seal()->add_refused()->set_message("refused");
      case 4:
        return;
      case 5:
        result->mutable_release();
        return;
      case 6:
      case 7: {
        v1::LeaseResult& lease = *result->mutable_lease();
        Add(lease.mutable_blocks());
        lease.set_shortfall(static_cast<v1::Shortfall>(Below(v1::Shortfall_MAX + 1)));
        lease.set_free_blocks(Small());
        return lease.set_sink_block(Number());
      }
      case 8:
      case 9:
        return Add(result->mutable_seal()->mutable_canonical());
      default: {
        v1::MatchResult& match = *result->mutable_match();
        match.set_tokens(Number());
        match.set_miss(static_cast<v1::MissReason>(Below(v1::MissReason_MAX + 1)));
        for (uint32_t i = Below(4); i > 0; --i) {
          v1::GroupHit& group = *match.add_groups();
          group.set_group(Small());
          Add(group.mutable_blocks());
        }
      }
    }
  }

  v1::StepResponse MakeAnswer() {
    v1::StepResponse answer;
    answer.set_sequence(Number());
    answer.set_free_blocks(Small());
    for (uint32_t i = Below(Below(8) == 0 ? 100 : 6); i > 0; --i) MakeResult(answer.add_results());
    if (Below(8) == 0) answer.add_completions()->set_sequence(Number());
    if (Below(8) == 0) answer.add_notices()->set_value(Number());
    if (Below(8) == 0) answer.set_code(static_cast<int>(Below(17)));
    if (Below(8) == 0) answer.set_message(std::string(Below(300), 'w'));
    return answer;
  }

  std::mt19937_64 random_{20261123};
};

TEST_F(StepWriterTest, AnyAnswerIsWrittenAlike) {
  std::string bytes;  // One for all, so that each answer finds what another left.
  for (int i = 0; i < (KVPOOL_SANITIZED ? 5'000 : 50'000); ++i) {
    const v1::StepResponse answer = MakeAnswer();
    // Memory that was made for the results is used as it is.
    std::string ready(MostOfStep(answer), '\0');
    const char* const at = ready.data();
    WriteStep(answer, &ready);
    const bool by_protobuf = answer.code() != 0 || !answer.message().empty() ||
                             answer.completions_size() > 0 || answer.notices_size() > 0;
    ASSERT_TRUE(by_protobuf || ready.data() == at) << answer.ShortDebugString();
    WriteStep(answer, &bytes);
    ASSERT_EQ(bytes, answer.SerializeAsString()) << answer.ShortDebugString();
  }
}

// Sizes around those where a length takes one byte more.
TEST_F(StepWriterTest, EachSizeIsWrittenAlike) {
  std::string bytes;
  for (int blocks : {0, 1, 13, 14, 15, 16, 17, 2045, 2046, 2047, 2048, 2049, 65536}) {
    v1::StepResponse answer;
    answer.set_sequence(1);
    v1::LeaseResult& lease = *answer.add_results()->mutable_lease();
    v1::SealResult& seal = *answer.add_results()->mutable_seal();
    v1::GroupHit& group = *answer.add_results()->mutable_match()->add_groups();
    for (auto* refs : {lease.mutable_blocks(), seal.mutable_canonical(), group.mutable_blocks()}) {
      refs->Resize(blocks, ~uint64_t{0});
    }
    WriteStep(answer, &bytes);
    ASSERT_EQ(bytes, answer.SerializeAsString()) << blocks;
    // Every number at its longest.
    answer.set_sequence(UINT64_MAX);
    answer.set_free_blocks(UINT32_MAX);
    lease.set_free_blocks(UINT32_MAX);
    lease.set_sink_block(UINT64_MAX);
    lease.set_shortfall(v1::SHORTFALL_RECLAIMING);
    answer.mutable_results(2)->mutable_match()->set_tokens(UINT64_MAX);
    answer.mutable_results(2)->mutable_match()->set_miss(v1::MISS_REASON_WINDOW);
    for (int i = 0; i < 15; ++i) *answer.mutable_results(2)->mutable_match()->add_groups() = group;
    WriteStep(answer, &bytes);
    ASSERT_EQ(bytes, answer.SerializeAsString()) << blocks;
  }
}

}  // namespace
}  // namespace kvpool
