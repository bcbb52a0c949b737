// Compact with DISPOSITION_LOW: which blocks get which tokens, and what is refused. The bytes of a record are low_test's
// (tests/scorers).
#include <algorithm>
#include <cstring>
#include <thread>

#include "cuda/scorers/parts/element.h"
#include "proto/support/low_layout.h"
#include "tests/service/score_fixture.h"

namespace kvpool {
namespace {

using Refs = std::vector<uint64_t>;
using Tokens = std::vector<uint32_t>;

constexpr uint64_t kBlockBytes = 512;  // K and V of 4 tokens fill it, and so does one record of 400 bytes.

class LowTest : public ScoreTest {
 protected:
  ~LowTest() override { daemon_.reset(); }

  void SetUp() override {
    StartScoring(2);
    v1::OpenSession request = ScoredRequest();
    request.mutable_layout()->set_block_bytes(kBlockBytes);
    engine_ = OpenEngine(request, "engine");
    Settle({engine_.get()});
    blocks_ = engine_->Lease(3);
    low_ = engine_->Lease(5);
    for (uint32_t token = 0; token < 3 * kTokens; ++token) {
      for (uint32_t plane = 0; plane < kLayers * kHeads; ++plane) {
        for (uint32_t dim = 0; dim < kDim; ++dim) {
          *At(false, plane, token, dim) = dim == 0 ? Value(plane, token) : 1;
          *At(true, plane, token, dim) = Value(plane, token);
        }
      }
    }
    std::memset(BlockAt(low_[4]), 0x5a, kBlockBytes);
  }

  unsigned char* BlockAt(uint64_t ref) {
    return reinterpret_cast<unsigned char*>(hold_.slab_addresses().at(0)) +
           Index(BlockRef::Unpack(ref).id) * kBlockBytes;
  }
  float* At(bool value, uint32_t plane, uint32_t token, uint32_t dim) {
    const uint32_t layer = (value ? kLayers : 0) + plane / kHeads;
    return reinterpret_cast<float*>(BlockAt(blocks_[token / kTokens])) +
           ((layer * kTokens + token % kTokens) * kHeads + plane % kHeads) * kDim + dim;
  }
  // An f16 has it.
  static float Value(uint32_t plane, uint32_t token) { return static_cast<float>(16 * plane + token + 1); }
  std::string BytesOf(uint64_t ref) { return {reinterpret_cast<char*>(BlockAt(ref)), kBlockBytes}; }

  v1::Operation LowOp(const Tokens& keep) {
    v1::Operation operation = CompactOp(blocks_, 1);
    v1::Compact* compact = operation.mutable_compact();
    if (!keep.empty()) compact->mutable_keep()->mutable_positions()->Add(keep.begin(), keep.end());
    compact->set_disposition(v1::DISPOSITION_LOW);
    compact->mutable_low()->mutable_blocks()->Add(low_.begin(), low_.end());
    return operation;
  }
  v1::CompactResult Compact(const v1::Operation& operation) {
    const v1::OperationResult answer = Run(engine_.get(), operation);
    EXPECT_EQ(answer.code(), 0) << answer.message();
    return answer.compact();
  }
  void Refused(const v1::Operation& operation, int code, const std::string& words) {
    const v1::OperationResult answer = Run(engine_.get(), operation);
    EXPECT_EQ(answer.code(), code) << answer.message();
    EXPECT_NE(answer.message().find(words), std::string::npos) << answer.message();
  }
  // A token's V has one number, which is the zero of its range.
  void ExpectLow(uint32_t plane, const Tokens& tokens) {
    const LowLayout layout =
        LowLayout::Of({.k_head_dim = kDim, .v_head_dim = kDim, .bits = 4, .block_bytes = kBlockBytes});
    for (uint32_t i = 0; i < LowLayout::kGroupTokens; ++i) {
      uint16_t zero;
      std::memcpy(&zero, BlockAt(low_[plane]) + layout.v_ranges_at + 4 * i + 2, sizeof zero);
      EXPECT_EQ(scorers::Element<scorers::KvDtype::kF16>::Load(zero),
                i < tokens.size() ? Value(plane, tokens[i]) : 0)
          << "plane " << plane << " token " << i;
    }
  }

  std::unique_ptr<Engine> engine_;
  Refs blocks_, low_;
};

TEST_F(LowTest, WhatLeavesIsInTheBlocksNamedAndWhatStaysAsWithDrop) {
  v1::Operation operation = LowOp({0, 1, 2, 3, 7});
  operation.mutable_compact()->set_keep_sources(true);
  const std::string before[] = {BytesOf(blocks_[0]), BytesOf(blocks_[1]), BytesOf(blocks_[2])};
  const v1::CompactResult kept = Compact(operation);
  EXPECT_EQ(kept.low_tokens(), 7);
  EXPECT_EQ(kept.low_blocks(), 4) << "one record for each of 4 planes";
  EXPECT_EQ(kept.low_records_per_block(), 1);
  for (uint32_t plane = 0; plane < 4; ++plane) ExpectLow(plane, {4, 5, 6, 8, 9, 10, 11});
  EXPECT_EQ(BytesOf(low_[4]), std::string(kBlockBytes, 0x5a)) << "it was not needed";
  for (uint32_t block = 0; block < 3; ++block) EXPECT_EQ(BytesOf(blocks_[block]), before[block]);

  v1::Operation dropping = operation;
  dropping.mutable_compact()->set_disposition(v1::DISPOSITION_DROP);
  dropping.mutable_compact()->clear_low();
  const v1::CompactResult dropped = Compact(dropping);
  ASSERT_EQ(dropped.table_size(), 2);
  for (int block = 0; block < 2; ++block)
    EXPECT_EQ(BytesOf(kept.table(block)).substr(0, 16), BytesOf(dropped.table(block)).substr(0, 16));
  EXPECT_EQ(dropped.low_records_per_block(), 0);
  EXPECT_NE(dropped.kept_digest(), kept.kept_digest()) << "later tokens see the others too";
  operation.mutable_compact()->mutable_low()->set_bits(4);
  EXPECT_EQ(Compact(operation).kept_digest(), kept.kept_digest()) << "it is the default";
  operation.mutable_compact()->mutable_low()->set_bits(2);
  EXPECT_NE(Compact(operation).kept_digest(), kept.kept_digest());
}

TEST_F(LowTest, LeadingBlocksStayWhereTheyAre) {
  const v1::CompactResult moved = Compact(LowOp({0, 1, 2, 3, 5, 11}));
  EXPECT_EQ(moved.table(0), blocks_[0]);
  EXPECT_EQ(moved.moved_from_block(), 1);
  EXPECT_EQ(moved.released(), 2);
  for (uint32_t plane = 0; plane < 4; ++plane) ExpectLow(plane, {4, 6, 7, 8, 9, 10});
}

TEST_F(LowTest, TokensAreWrittenAlsoWhereNothingMoves) {
  const v1::CompactResult result = Compact(LowOp({0, 1, 2, 3}));
  EXPECT_EQ(TableOf(result), Refs{blocks_[0]});
  EXPECT_EQ(result.low_tokens(), 8);
  for (uint32_t plane = 0; plane < 4; ++plane) ExpectLow(plane, {4, 5, 6, 7, 8, 9, 10, 11});
  EXPECT_EQ(Blocks().leased(), 1 + 1 + low_.size()) << "the sink, what stays, and the engine's low blocks";
  EXPECT_EQ(engine_->Release(low_).refused_size(), 0);
}

TEST_F(LowTest, EveryPlaneHasItsOwnList) {
  // Long keys leave first: in plane p the tokens are in another order.
  for (uint32_t token = 0; token < 12; ++token) {
    for (uint32_t plane = 0; plane < 4; ++plane)
      *At(false, plane, token, 0) = static_cast<float>((token * 5 + plane * 3) % 12);
  }
  v1::Operation operation = LowOp({});
  v1::Compact* compact = operation.mutable_compact();
  compact->set_budget_tokens(5);
  compact->set_scope(v1::SCOPE_HEAD);
  compact->mutable_policy()->set_name("inverse_key_l2");
  compact->mutable_protection();
  const v1::CompactResult result = Compact(operation);
  ASSERT_EQ(result.rows(), 4);
  ASSERT_EQ(result.kept_positions_size(), 20);
  for (uint32_t plane = 0; plane < 4; ++plane) {
    const auto first = result.kept_positions().begin() + plane * 5;
    Tokens left;
    for (uint32_t token = 0; token < 12; ++token) {
      if (!std::binary_search(first, first + 5, token)) left.push_back(token);
      EXPECT_EQ(std::binary_search(first, first + 5, token), (token * 5 + plane * 3) % 12 < 5);
    }
    ExpectLow(plane, left);
  }
}

TEST_F(LowTest, WithinItsBudgetNothingIsWritten) {
  v1::Operation operation = LowOp({});
  operation.mutable_compact()->set_budget_tokens(100);
  operation.mutable_compact()->mutable_low()->clear_blocks();
  const v1::CompactResult result = Compact(operation);
  EXPECT_EQ(TableOf(result), blocks_);
  EXPECT_EQ(result.low_tokens(), 0);
  EXPECT_EQ(result.low_blocks(), 0);
  EXPECT_EQ(result.kept_digest(), "");
}

TEST_F(LowTest, AfterADeviceErrorItCanBeTriedAgain) {
  hold_.FailWith(absl::InternalError("the kernel did not start"));
  const uint64_t leased = Blocks().leased();
  Refused(LowOp({5}), static_cast<int>(absl::StatusCode::kInternal), "the kernel did not start");
  EXPECT_EQ(Blocks().leased(), leased);
  hold_.FailWith(absl::OkStatus());
  EXPECT_EQ(Compact(LowOp({5})).low_tokens(), 11);
}

TEST_F(LowTest, LowBlocksAreHeldWhileTheyAreWritten) {
  hold_.Hold();
  const auto compact = Begin(engine_.get(), LowOp({5}));
  hold_.AwaitCalls(1);
  const auto release = Begin(engine_.get(), ReleaseOp({low_[3]}));
  EXPECT_FALSE(release->there()) << "behind the compact";
  const v1::StateCounts before = Blocks();
  engine_->Do(CloseOp());
  EXPECT_EQ(compact->Await().code(), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(Blocks().free(), before.free()) << "the device still writes";
  hold_.Release();
  while (Blocks().leased() > 0) std::this_thread::yield();
}

TEST_F(LowTest, RefusesBlocksThatItCanNotWrite) {
  v1::Operation operation = LowOp({5});
  v1::LowTerms* low = operation.mutable_compact()->mutable_low();
  const auto names = [&](const Refs& refs) {
    low->clear_blocks();
    low->mutable_blocks()->Add(refs.begin(), refs.end());
  };
  low->set_bits(3);
  Refused(operation, kInvalidArgument, "compact.low.bits is 3; must be 2, 4, 8, or 0 for 4");
  low->set_bits(8);
  names({});
  Refused(operation, kInvalidArgument,
          "compact.low.blocks has 0 blocks; 11 tokens that leave take 4 in 8 bits");
  names({low_[0], low_[1], low_[2]});
  Refused(operation, kInvalidArgument, "compact.low.blocks has 3 blocks; 11 tokens that leave take 4");
  names({low_[0], low_[1], low_[2], low_[0]});
  Refused(operation, kInvalidArgument, "compact.low.blocks names block");
  names({low_[0], low_[1], low_[2], blocks_[1]});
  Refused(operation, kInvalidArgument, "compact.low.blocks names block");
  const Refs other = engine_->Lease(2);
  engine_->Seal({other[0]}, {Key("sealed")});
  engine_->Release({other[1]});
  names({low_[0], low_[1], low_[2], low_[3], other[0]});
  Refused(operation, kFailedPrecondition, "compact.low.blocks[4]: block");
  names({low_[0], other[1], low_[2], low_[3]});
  Refused(operation, kFailedPrecondition, "compact.low.blocks[1]: block");
  EXPECT_EQ(Blocks().leased(), 1 + 3 + low_.size()) << "no destination is left";
  names(low_);
  low->set_bits(0);
  operation.mutable_compact()->set_disposition(v1::DISPOSITION_DROP);
  Refused(operation, kInvalidArgument,
          "compact.low is set; it goes with DISPOSITION_LOW, and disposition is DISPOSITION_DROP");
  operation.mutable_compact()->set_disposition(v1::DISPOSITION_LOW);
  operation.mutable_compact()->clear_low();
  Refused(operation, kInvalidArgument, "compact.low is not set");
  operation = LowOp({5});
  operation.mutable_compact()
      ->mutable_low()
      ->GetReflection()
      ->MutableUnknownFields(operation.mutable_compact()->mutable_low())
      ->AddVarint(1999, 1);
  Refused(operation, kInvalidArgument, "compact.low has unknown field 1999");
  // A signal is read from one of them.
  operation = LowOp({});
  v1::Signal* mass = operation.mutable_compact()->mutable_signals()->add_signals();
  mass->set_kind(v1::SIGNAL_KIND_MASS);
  mass->mutable_data()->add_blocks(low_[2]);
  operation.mutable_compact()->set_budget_tokens(8);
  Refused(operation, kInvalidArgument, "or one that something else is read from");
}

TEST_F(LowTest, RefusesBlocksThatAreTooSmall) {
  v1::OpenSession request = ScoredRequest("small");
  request.mutable_layout()->set_block_bytes(256);
  v1::LayerGroup* group = request.mutable_layout()->mutable_groups(0);
  group->mutable_layers()->Truncate(1);
  group->mutable_v()->set_offset_bytes(128);
  const auto small = OpenEngine(request, "small");
  Settle({small.get()});
  const Refs blocks = small->Lease(3);
  v1::Operation operation = CompactOp({blocks[0], blocks[1]}, 4);
  operation.mutable_compact()->set_disposition(v1::DISPOSITION_LOW);
  operation.mutable_compact()->mutable_low()->add_blocks(blocks[2]);
  const v1::OperationResult answer = Run(small.get(), operation);
  EXPECT_EQ(answer.code(), kInvalidArgument);
  EXPECT_EQ(answer.message(), "compact.low: 32 tokens of a plane take 400 bytes in 4 bits; a block has 256");
}

// Records are whole words, and elements of one byte may have blocks that are not.
TEST_F(LowTest, RefusesBlocksThatAreNotWholeWords) {
  v1::OpenSession request = ScoredRequest("bytes");
  request.mutable_layout()->set_block_bytes(1001);
  v1::LayerGroup* group = request.mutable_layout()->mutable_groups(0);
  group->set_dtype(v1::DTYPE_FP8_E4M3);
  for (v1::Plane* plane : {group->mutable_k(), group->mutable_v()}) {
    plane->set_dim_stride_bytes(1);
    plane->set_head_stride_bytes(kDim);
    plane->set_token_stride_bytes(kHeads * kDim);
    plane->set_layer_stride_bytes(kTokens * kHeads * kDim);
  }
  const auto odd = OpenEngine(request, "odd");
  Settle({odd.get()});
  const Refs blocks = odd->Lease(3);
  v1::Operation operation = CompactOp({blocks[0], blocks[1]}, 4);
  operation.mutable_compact()->set_disposition(v1::DISPOSITION_LOW);
  operation.mutable_compact()->mutable_low()->add_blocks(blocks[2]);
  const v1::OperationResult answer = Run(odd.get(), operation);
  EXPECT_EQ(answer.code(), kInvalidArgument);
  EXPECT_EQ(answer.message(), "compact.low: layout.block_bytes is 1001; must be a multiple of 4");
}

TEST_F(LowTest, WorkAndListsHaveTheirLimits) {
  options_.score_workspace_bytes = 40;
  daemon_.reset();
  hold_.Forget();
  SetUp();
  Refused(LowOp({5}), kResourceExhausted,
          "lists of the tokens that leave take 44 bytes on the device; the limit is 40");
  EXPECT_EQ(Compact(LowOp({5, 6})).low_tokens(), 10);
  EXPECT_EQ(Blocks().leased(), 1 + 1 + low_.size()) << "the refused one has left nothing";
}

}  // namespace
}  // namespace kvpool
