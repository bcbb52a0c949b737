// Every verb of an engine, one session at a time.
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class VerbsTest : public ServiceTest {};

TEST_F(VerbsTest, LeaseSealReleaseMatch) {
  StartDaemon(/*slabs=*/4);
  const auto engine = OpenEngine(OpenRequest());
  const std::vector<uint64_t> blocks = engine->Lease(3);
  const v1::SealResult sealed = engine->Seal(blocks, Keys("a", 3));
  ASSERT_EQ(sealed.refused_size(), 0) << sealed.ShortDebugString();
  EXPECT_EQ(std::vector<uint64_t>(sealed.canonical().begin(), sealed.canonical().end()), blocks);
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0);
  EXPECT_EQ(Blocks().cached(), 3);

  const v1::MatchResult match = engine->Match(Keys("a", 4));
  EXPECT_EQ(match.tokens(), 48);
  EXPECT_EQ(match.miss(), v1::MISS_REASON_NEVER_SEEN);
  ASSERT_EQ(match.groups_size(), 1);
  EXPECT_EQ(std::vector<uint64_t>(match.groups(0).blocks().begin(), match.groups(0).blocks().end()), blocks);
  EXPECT_EQ(Blocks().sealed(), 3);
}

}  // namespace
}  // namespace kvpool
