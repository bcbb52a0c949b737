// What a start says of spaces that are not as they were.
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/other_table.h"
#include "tests/service/recovery_fixture.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class StartLogTest : public RecoveryTest {};

// Of two spaces one has room. Their shape is what it was, as they may have no more than a part of either device.
TEST_F(StartLogTest, ASpaceForWhichThereIsTooLittleMemoryTodayIsLostToMemory) {
  ASSERT_TRUE(Start().ok());
  max_space_bytes_ = options_.slab_bytes;
  Sleeper process;
  const auto first = Open(process.credentials());
  ASSERT_NE(first, nullptr) << opened_;
  first->Seal(first->Lease(2), Keys("k", 2));
  digest_ = "second";
  const auto second = Open(process.credentials());
  ASSERT_NE(second, nullptr) << opened_;
  second->Seal(second->Lease(3), Keys("k", 3));
  Kill();
  capacity_bytes_ = 2 * options_.slab_bytes - 1;
  testing::internal::CaptureStderr();
  ASSERT_TRUE(Start().ok());
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("space lost space=1 sealed=2"));
  const v1::GetRecoveryResponse recovery = Recovery();
  ASSERT_EQ(recovery.lost_spaces_size(), 1) << recovery.ShortDebugString();
  EXPECT_EQ(recovery.lost_spaces(0).reason(), "memory");
  EXPECT_THAT(recovery.lost_spaces(0).detail(), HasSubstr(" free"));
  EXPECT_EQ(recovery.lost_spaces(0).sealed_blocks(), 2u);
  EXPECT_EQ(recovery.lost_spaces(0).sessions(), 1u);
  ASSERT_EQ(daemon_->Snapshot().spaces.size(), 1u);
  EXPECT_EQ(daemon_->Snapshot().spaces[0].space, 2u);
}

// A build that kept no names of rules does not tell whose terms it kept.
TEST_F(StartLogTest, ASpaceOfNoRuleIsNotSaidToHaveLostOne) {
  options_.access = MakeAccess("[rule]\nuid = *\nrole = engine\ntenant = *\nweight = 7\n");
  ASSERT_TRUE(Start().ok());
  Sleeper process;
  const auto engine = Open(process.credentials());
  ASSERT_NE(engine, nullptr) << opened_;
  engine->Seal(engine->Lease(3), Keys("k", 3));
  Kill();
  ASSERT_NO_FATAL_FAILURE(VisitTable(keeper_, [](OtherTable table) { table.KeepSharesAsBefore(5); }));
  testing::internal::CaptureStderr();
  ASSERT_TRUE(Start().ok());
  daemon_->ApplyRules();
  EXPECT_THAT(testing::internal::GetCapturedStderr(), Not(HasSubstr("of a space")));
  EXPECT_EQ(daemon_->Snapshot().spaces.at(0).weight, 5);
}

}  // namespace
}  // namespace kvpool
