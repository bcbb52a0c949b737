// With a tier, keys mean the same after every start and on every node that has the secret; and to nobody else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "server/tiers/file_tier.h"
#include "tests/service/service_fixture.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

// The seed that a daemon of its own, on another folder, gives a space.
class KeyedNode : public ServiceTest {
 public:
  explicit KeyedNode(const std::string& secret, const std::string& rules = kOpenAccess) {
    options_.access = MakeAccess(rules);
    auto tier = FileTier::Open({.path = folder_.path(), .capacity_bytes = 1 << 20});
    EXPECT_TRUE(tier.ok()) << tier.status();
    options_.tiers = {{*std::move(tier), {}}};
    options_.tier_secret = secret;
    StartDaemon(4);
  }
  std::string Seed(const std::function<void(v1::OpenSession*)>& change, uint32_t uid = 1000) {
    v1::OpenSession request = OpenRequest();
    change(&request);
    const auto engine = Attach("engine", uid);
    const absl::Status opened = engine->Open(request);
    EXPECT_TRUE(opened.ok()) << opened;
    return engine->opened.hash_seed();
  }

 private:
  void TestBody() override {}
  TierFolder folder_;
};

const std::string kSecret(32, 's');
void Nothing(v1::OpenSession*) {}

TEST(TierKeys, AreTheSameOnEveryNodeWithTheSecret) {
  const std::string seed = KeyedNode(kSecret).Seed(Nothing);
  EXPECT_EQ(seed.size(), 32);
  EXPECT_EQ(KeyedNode(kSecret).Seed(Nothing), seed);
  EXPECT_NE(KeyedNode(std::string(32, 't')).Seed(Nothing), seed);
}

TEST(TierKeys, AreOtherOnesWhereBytesMayDiffer) {
  KeyedNode node(kSecret);
  const std::string seed = node.Seed(Nothing);
  EXPECT_NE(node.Seed([](auto* r) { r->mutable_fingerprint()->set_digest("other"); }), seed);
  // Two layouts of one fingerprint are never in one daemon, but may be on two nodes.
  EXPECT_NE(KeyedNode(kSecret).Seed([](auto* r) { r->mutable_layout()->set_block_bytes(2048); }), seed);
  EXPECT_NE(
      KeyedNode(kSecret).Seed([](auto* r) { r->mutable_layout()->mutable_groups(0)->set_name("other"); }),
      seed);
  EXPECT_NE(KeyedNode(kSecret).Seed([](auto* r) { r->set_ranks(2); }), seed);
}

TEST(TierKeys, ATenantThatARuleNamesIsOneForAllUids) {
  const std::string rules = "[all]\nuid = *\nrole = engine\ntenant = team-a, team-b\n";
  const auto tenant = [](const char* name) { return [name](v1::OpenSession* r) { r->set_tenant(name); }; };
  const std::string seed = KeyedNode(kSecret, rules).Seed(tenant("team-a"), 1000);
  EXPECT_EQ(KeyedNode(kSecret, rules).Seed(tenant("team-a"), 2000), seed);
  EXPECT_NE(KeyedNode(kSecret, rules).Seed(tenant("team-b"), 1000), seed);
  // Where any tenant goes, each uid has its own, and none of them is the one that a rule names.
  EXPECT_NE(KeyedNode(kSecret).Seed(tenant("team-a"), 1000), seed);
  EXPECT_NE(KeyedNode(kSecret).Seed(Nothing, 1000), KeyedNode(kSecret).Seed(Nothing, 2000));
}

class WithoutTier : public ServiceTest {};

TEST_F(WithoutTier, EverySpaceHasASeedOfItsOwn) {
  StartDaemon(4);
  const auto a = OpenEngine(OpenRequest("a"));
  const auto b = OpenEngine(OpenRequest("b"));
  EXPECT_NE(a->opened.hash_seed(), b->opened.hash_seed());
}

TEST_F(WithoutTier, ASecretThatIsTooShortIsRefused) {
  TierFolder folder;
  options_.tiers = {{*FileTier::Open({.path = folder.path(), .capacity_bytes = 1 << 20}), {}}};
  options_.tier_secret = "short";
  options_.device_capacity_bytes = {kSlabBlocks * kBlockBytes};
  MemoryDevice::Script script;
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("mem", kGranuleBytes, &script));
  EXPECT_THAT(Daemon::Start(options_, std::move(devices), &clock_).status().ToString(),
              testing::HasSubstr("tier_secret in bytes is 5; must be 32 to 4096"));
}

}  // namespace
}  // namespace kvpool
