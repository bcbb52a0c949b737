// An engine that takes no holes comes into a space that has some: whose memory fills them, and how much of it.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/service/give_back_fixture.h"

namespace kvpool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Model "a" has two slabs and a hole of two slabs between them, and "b" the other four of six.
class FillHolesTest : public GiveBackTest {
 protected:
  FillHolesTest() {
    engines_take_holes_ = true;
    options_.give_back_ms = 5000;  // What nobody gives is not waited for.
  }
  void SetUp() override {
    Rules("priority = interactive");
    StartDaemon(6);
    a_ = OpenEngine(OpenRequest("a"), "a");
    std::vector<uint64_t> blocks = LeaseAll(a_.get(), 4 * kSlabBlocks - 2);
    // A block of the last slab is held.
    a_->Release({blocks.begin(), blocks.end() - 1});
    SetPriority(0, v1::PRIORITY_CLASS_BATCH);
    b_ = OpenSmall("b");
    for (int round = 0; round < 60 && Space(1).slabs < 4; ++round) {
      Churn(b_.get(), "b" + std::to_string(round));
      Settle({a_.get(), b_.get()});
    }
    ASSERT_EQ(Space(0).slabs, 2);
    ASSERT_EQ(Space(1).slabs, 4);
    GoOn({a_.get(), b_.get()});
    engines_take_holes_ = false;
  }
  void TearDown() override {
    a_.reset();
    b_.reset();
  }
  // Slabs go out in their order only once those in the hole were mapped by whoever is there.
  absl::Status OpenRigid(uint32_t guaranteed) {
    rigid_ = Attach("rigid");
    v1::OpenSession request = OpenRequest("a");
    request.set_guaranteed_blocks(guaranteed);
    absl::Status status;
    WhileEnginesGoOn({a_.get(), b_.get()}, [&] { status = rigid_->Open(request); });
    return status;
  }

  std::unique_ptr<Engine> a_, b_, rigid_;
};

TEST_F(FillHolesTest, AHigherClassGivesAsMuchAsIsGuaranteedAndNoMore) {
  const absl::Status refused = OpenRigid(kSlabBlocks);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("takes no holes"),
                    HasSubstr("for its 32 blocks, more than guaranteed_blocks, 16, no space of a class above "
                              "batch gives; space"),
                    HasSubstr("it is of class interactive, above batch")));
  EXPECT_EQ(Space(1).slabs, 4);
  EXPECT_EQ(Space(1).give_back.slabs, 0);
  const absl::Status opened = OpenRigid(kSlabBlocks + 1);
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(Space(0).slabs, 4);
  EXPECT_EQ(Space(1).slabs, 2);
}

TEST_F(FillHolesTest, AmongEqualsItIsWhatTheRuleWouldGuarantee) {
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  // One block is the guarantee of "b".
  Rules("guaranteed-blocks = 17");
  const absl::Status refused = OpenRigid(0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr("nor does one of this class, as they are more than that may be by its rule, 16; space"));
  EXPECT_EQ(Space(1).slabs, 4);
  Rules("guaranteed-blocks = 100\nheld-blocks = 16");
  EXPECT_EQ(OpenRigid(0).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Space(1).slabs, 4);
  Rules("guaranteed-blocks = 18");
  const absl::Status opened = OpenRigid(0);
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(Space(0).slabs, 4);
  EXPECT_EQ(Space(1).slabs, 2);
}

// As its leases would be, too.
TEST_F(FillHolesTest, ALowerClassGivesWhatItCanSpare) {
  Rules("guaranteed-blocks = 1");
  SetPriority(0, v1::PRIORITY_CLASS_STANDARD);
  SetPriority(1, v1::PRIORITY_CLASS_BATCH);
  const absl::Status opened = OpenRigid(0);
  EXPECT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(Space(0).slabs, 4);
  EXPECT_EQ(Space(1).slabs, 2);
}

}  // namespace
}  // namespace kvpool
