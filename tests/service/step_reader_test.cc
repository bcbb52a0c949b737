// The reader of batches against Protocol Buffers: on the batches of every step, and on bytes that are nearly a batch.
#include "server/wire/step_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

namespace kvpool {
namespace {

constexpr int kCases = KVPOOL_SANITIZED ? 10'000 : 100'000;

class StepReaderTest : public testing::Test {
 protected:
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  uint64_t Number() { return random_() >> Below(64); }
  std::string Some(uint32_t most) {
    std::string bytes(Below(most + 1), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

  void MakeOperation(v1::Operation* operation) {
    if (Below(4) == 0) operation->set_after(Number());
    switch (Below(12)) {
      case 0:
        return operation->mutable_fence()->set_step(Number());
      case 1:
        return operation->mutable_touch()->add_blocks(Number());
      case 2:
      case 3:
      case 4:
        operation->mutable_lease()->set_count(static_cast<uint32_t>(Number()));
        return operation->mutable_lease()->set_min(Below(3));
      case 5:
      case 6: {
        v1::Seal& seal = *operation->mutable_seal();
        for (uint32_t i = Below(4); i > 0; --i) seal.add_blocks(Number());
        seal.set_group(Below(3));
        seal.set_key_bytes(Below(65));
        seal.set_keys_per_block(Below(3));
        seal.set_keys(Some(100));
        seal.set_parent_key(Some(32));
        return seal.set_leave_duplicates(Below(2) == 0);
      }
      case 7:
      case 8: {
        for (uint32_t i = Below(3); i > 0; --i) {
          v1::GroupKeys& group = *operation->mutable_match()->add_groups();
          group.set_group(Below(3));
          group.set_key_bytes(Below(65));
          group.set_keys(Some(100));
        }
        return;
      }
      default: {
        v1::Release& release = *operation->mutable_release();
        for (uint32_t i = Below(4); i > 0; --i) release.add_blocks(Number());
        release.set_reuse(static_cast<v1::Reuse>(Below(5)));
        return release.set_category(Below(3) == 0 ? static_cast<uint32_t>(Number()) : 0);
      }
    }
  }
  v1::StepRequest MakeBatch() {
    v1::StepRequest batch;
    if (Below(4) == 0) batch.set_member_token(Some(20));
    batch.set_sequence(Number());
    batch.set_acknowledged(Number());
    for (uint32_t i = Below(Below(8) == 0 ? 200 : 8); i > 0; --i) MakeOperation(batch.add_operations());
    for (uint32_t i = Below(4) == 0 ? Below(Below(8) == 0 ? 70 : 4) : 0; i > 0; --i) {
      v1::PrefillSample& sample = *batch.add_prefills();
      sample.set_tokens(Number());
      sample.set_tokens_before(Number());
      sample.set_microseconds(Number());
    }
    return batch;
  }
  // What a peer could make of a batch: bytes changed, inserted, left out or doubled, or the end missing.
  void Spoil(std::string* bytes) {
    for (uint32_t i = Below(4); i > 0; --i) {
      const size_t at = Below(static_cast<uint32_t>(bytes->size() + 1));
      switch (Below(6)) {
        case 0:
          if (at < bytes->size()) (*bytes)[at] = static_cast<char>(random_());
          break;
        case 1:
          if (at < bytes->size()) (*bytes)[at] = static_cast<char>((*bytes)[at] + 1);
          break;
        case 2:
          bytes->insert(at, Some(3));
          break;
        case 3:
          bytes->erase(at, Below(4));
          break;
        case 4:
          bytes->insert(at, bytes->substr(at, Below(20)));
          break;
        case 5:
          bytes->resize(at);
          break;
      }
    }
  }
  void ExpectAlike(const std::string& bytes) {
    v1::StepRequest request;
    ASSERT_EQ(reader_.Read(bytes), request.ParseFromString(bytes));
    // Unknown fields are serialised too.
    if (request.ParseFromString(bytes)) {
      ASSERT_EQ(reader_.request().SerializeAsString(), request.SerializeAsString());
    }
    read_here_ += reader_.read_here();
  }

  std::mt19937_64 random_{20261122};
  StepReader reader_;  // One for all, so that each batch finds what another left.
  int read_here_ = 0;
};

TEST_F(StepReaderTest, BatchesOfEveryStepAreReadHere) {
  for (int round = 1; round <= 3; ++round) {
    v1::StepRequest batch;
    batch.set_sequence(round);
    for (int i = round; i <= 2; ++i) batch.add_prefills()->set_tokens(i);
    for (int i = 0; i < 16; ++i) {
      v1::GroupKeys& group = *batch.add_operations()->mutable_match()->add_groups();
      group.set_key_bytes(32);
      group.set_keys(std::string(64, static_cast<char>(i)));
      batch.add_operations()->mutable_lease()->set_count(2);
      v1::Operation& seal = *batch.add_operations();
      seal.set_after(round);
      seal.mutable_seal()->add_blocks(~uint64_t{0} / round);
      seal.mutable_seal()->set_keys(std::string(32, 'k'));
      batch.add_operations()->mutable_release()->add_blocks(i);
    }
    ASSERT_TRUE(reader_.Read(batch.SerializeAsString()));
    EXPECT_TRUE(reader_.read_here());
    EXPECT_EQ(reader_.request().SerializeAsString(), batch.SerializeAsString());
  }
}

TEST_F(StepReaderTest, AnyBatchIsReadAlike) {
  for (int i = 0; i < kCases / 5; ++i) ExpectAlike(MakeBatch().SerializeAsString());
  EXPECT_GT(read_here_, kCases / 25);
}

TEST_F(StepReaderTest, WhatIsNearlyABatchIsReadAlike) {
  for (int i = 0; i < kCases; ++i) {
    std::string bytes = MakeBatch().SerializeAsString();
    Spoil(&bytes);
    ExpectAlike(bytes);
  }
  EXPECT_GT(read_here_, kCases / 10);
}

TEST_F(StepReaderTest, BytesAreReadAlike) {
  for (int i = 0; i < kCases; ++i) {
    std::string bytes = Some(40);
    // Bytes that are tags and short lengths, mostly.
    for (char& byte : bytes) byte = static_cast<char>(Below(4) == 0 ? byte : byte & 0x3f);
    ExpectAlike(bytes);
  }
}

// What a peer sends once must not stay for ever.
TEST_F(StepReaderTest, LargeBatchesAreNotKept) {
  v1::StepRequest batch;
  for (size_t i = 0; i <= StepReader::kMaxKeptOperations; ++i) batch.add_operations()->mutable_lease();
  ASSERT_TRUE(reader_.Read(batch.SerializeAsString()));
  EXPECT_FALSE(reader_.read_here()) << "many operations";
  batch.Clear();
  batch.add_operations()->mutable_seal()->set_keys(std::string(StepReader::kMaxKeptOperationBytes, 'k'));
  ASSERT_TRUE(reader_.Read(batch.SerializeAsString()));
  EXPECT_FALSE(reader_.read_here()) << "a large operation";
  batch.Clear();
  for (int i = 0; i < 3; ++i) batch.add_operations()->mutable_match()->add_groups();
  ASSERT_TRUE(reader_.Read(batch.SerializeAsString()));
  EXPECT_TRUE(reader_.read_here());
  for (int i = 0; i < 2; ++i) batch.mutable_operations(0)->mutable_match()->add_groups();
  ASSERT_TRUE(reader_.Read(batch.SerializeAsString()));
  EXPECT_FALSE(reader_.read_here()) << "more groups than are kept";
}

}  // namespace
}  // namespace kvpool
