// Who is an engine of which tenant, and what the rules of access leave to its sessions.
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

std::string Rule(const std::string& lines) { return absl::StrCat("[rule]\nrole = engine\n", lines); }

class AccessTest : public ServiceTest {
 protected:
  void Rules(const std::string& rules) { access_->Replace(MakePolicy(rules)); }
  v1::OpenSession RequestOf(const std::string& tenant, uint32_t guaranteed = 0) const {
    v1::OpenSession request = OpenRequest();
    request.set_tenant(tenant);
    request.set_guaranteed_blocks(guaranteed);
    return request;
  }
};

TEST_F(AccessTest, TenantsAreThoseOfTheRule) {
  Rules(
      "[team]\nuid = 1000, 1001\nrole = engine\ntenant = team, guests\n"
      "[own]\nuid = 1002, 1003\nrole = engine\ntenant = *\n");
  StartDaemon(8);
  const auto a = Attach("a", 1000), b = Attach("b", 1001), c = Attach("c", 1000), d = Attach("d", 1002),
             e = Attach("e", 1003), f = Attach("f", 1002);
  ASSERT_TRUE(a->Open(RequestOf("")).ok());
  ASSERT_TRUE(b->Open(RequestOf("team")).ok());
  EXPECT_EQ(a->opened.space(), b->opened.space()) << "who names none has the first";
  ASSERT_TRUE(c->Open(RequestOf("guests")).ok());
  EXPECT_NE(c->opened.space(), a->opened.space());
  // The name of another's tenant is one's own, unless the rule gives it.
  ASSERT_TRUE(d->Open(RequestOf("team")).ok());
  ASSERT_TRUE(e->Open(RequestOf("team")).ok());
  EXPECT_NE(d->opened.space(), a->opened.space());
  EXPECT_NE(d->opened.space(), e->opened.space());
  EXPECT_NE(d->opened.hash_seed(), e->opened.hash_seed());
  ASSERT_TRUE(f->Open(RequestOf("team")).ok());
  EXPECT_EQ(d->opened.space(), f->opened.space());

  const auto g = Attach("g", 1000);
  const absl::Status refused = g->Open(RequestOf("others"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(refused.message(), "tenant is \"others\"; rule [team] gives uid 1000 tenant = team, guests");
  EXPECT_TRUE(g->Open(RequestOf("guests")).ok()) << "its token serves again";
}

TEST_F(AccessTest, OthersTenantsFindNothing) {
  Rules("[a]\nuid = 1000\nrole = engine\ntenant = a\n[b]\nuid = 1001\nrole = engine\ntenant = b\n");
  StartDaemon(8);
  const auto a = Attach("a", 1000), b = Attach("b", 1001);
  ASSERT_TRUE(a->Open(OpenRequest()).ok());
  ASSERT_TRUE(b->Open(OpenRequest()).ok());
  Settle({a.get(), b.get()});
  a->Seal(a->Lease(2), Keys("x", 2));
  EXPECT_EQ(b->Match(Keys("x", 2)).tokens(), 0);
  EXPECT_EQ(a->Match(Keys("x", 2)).tokens(), 32);
}

TEST_F(AccessTest, AMemberNeedsARuleThatGivesTheSessionsTenant) {
  Rules(Rule("uid = 1000\ntenant = a"));
  StartDaemon(4, /*devices=*/2);
  v1::OpenSession request = OpenRequest();
  request.set_ranks(2);
  const auto first = Attach("first", 1000), second = Attach("second", 1000),
             foreign = Attach("foreign", 1000);
  ASSERT_TRUE(first->Open(request).ok());
  Rules(Rule("uid = 1000\ntenant = b"));
  EXPECT_EQ(second->Join(*first, JoinRequest(*first, 1)).message(),
            "tenant is \"a\"; rule [rule] gives uid 1000 tenant = b");
  Rules("[rule]\nuid = 1000\nrole = observer\n");
  EXPECT_EQ(second->Join(*first, JoinRequest(*first, 1)).code(), absl::StatusCode::kPermissionDenied);
  Rules(Rule("uid = 1000\ntenant = a"));
  EXPECT_TRUE(second->Join(*first, JoinRequest(*first, 1)).ok());
}

// Rules count when something is taken. What is open goes on: above all, it can give back.
TEST_F(AccessTest, AnOpenSessionOutlivesItsRule) {
  Rules(Rule("uid = 1000\ntenant = a"));
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto blocks = engine->Lease(3);
  const auto waiting = Attach("waiting", 1000);
  Rules(Rule("uid = 4242\ntenant = a"));
  EXPECT_EQ(engine->Release(blocks).refused_size(), 0);
  EXPECT_EQ(engine->Lease(1).size(), 1u);
  EXPECT_EQ(waiting->Open(OpenRequest()).code(), absl::StatusCode::kPermissionDenied);
  const auto refused =
      daemon_->OnAttached(std::make_shared<FakePeer>(), {.pid = 7, .uid = 1000, .gid = 9}, v1::AttachHello());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(refused.status().message(),
            "the attach socket needs the role engine, which uid 1000 (gid 9, pid 7, cgroup not known) lacks: "
            "no rule of "
            "rules matches it: add one there, and send the daemon SIGHUP");
}

TEST_F(AccessTest, SessionsOfARuleAreCounted) {
  Rules(Rule("uid = 1000, 1001\ntenant = a\nsessions = 2\n[other]\nuid = 1002\nrole = engine\ntenant = a"));
  StartDaemon(8);
  const auto a = OpenEngine(OpenRequest("m"), "a");
  const auto b = Attach("b", 1001), c = Attach("c", 1000), d = Attach("d", 1002);
  ASSERT_TRUE(b->Open(OpenRequest("m")).ok());
  const absl::Status refused = c->Open(OpenRequest("m"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(), "rule [rule] allows sessions = 2: 2 are taken, 1 asked for");
  EXPECT_TRUE(d->Open(OpenRequest("m")).ok()) << "another rule's";
  // It counts until its process is gone, and under its rule's name whatever the rules say.
  daemon_->OnHangup(a->id);
  EXPECT_EQ(c->Open(OpenRequest("m")).code(), absl::StatusCode::kResourceExhausted);
  Rules(Rule("uid = 1000, 1001\ntenant = a\nsessions = 2"));
  EXPECT_EQ(c->Open(OpenRequest("m")).code(), absl::StatusCode::kResourceExhausted);
  daemon_->OnProcessDead(a->id);
  EXPECT_TRUE(c->Open(OpenRequest("m")).ok());
}

TEST_F(AccessTest, GuaranteesOfARuleAreSummed) {
  Rules(Rule("uid = 1000\ntenant = a\nguaranteed-blocks = 10"));
  StartDaemon(8);
  const auto a = Attach("a"), b = Attach("b"), c = Attach("c");
  ASSERT_TRUE(a->Open(RequestOf("", 7)).ok());
  EXPECT_EQ(b->Open(RequestOf("", 4)).message(),
            "rule [rule] allows guaranteed-blocks = 10: 7 are taken, 4 asked for");
  // A limit that is lowered later refuses none that asks for nothing of it.
  Rules(Rule("uid = 1000\ntenant = a\nguaranteed-blocks = 0"));
  EXPECT_TRUE(c->Open(RequestOf("")).ok());
  Rules(Rule("uid = 1000\ntenant = a\nguaranteed-blocks = 10"));
  EXPECT_TRUE(b->Open(RequestOf("", 3)).ok());
  // An opening that fails takes nothing.
  a->Die();
  const auto d = Attach("d");
  v1::OpenSession wrong = RequestOf("", 7);
  wrong.add_device_uuids("no such device");
  wrong.mutable_fingerprint()->set_digest("another");
  EXPECT_FALSE(d->Open(wrong).ok());
  EXPECT_TRUE(d->Open(RequestOf("", 7)).ok());
}

TEST_F(AccessTest, ASessionHoldsWhatItsRuleAllows) {
  Rules(Rule("uid = 1000\ntenant = a\nheld-blocks = 3"));
  StartDaemon(4);
  EXPECT_EQ(Attach("a")->Open(RequestOf("", 4)).message(),
            "guaranteed_blocks is 4; rule [rule] allows held-blocks = 3 of a session");
  const auto engine = OpenEngine(OpenRequest());
  EXPECT_EQ(engine->Lease(3).size(), 3u);
  const v1::LeaseResult beyond = engine->LeaseAsked(1, 0);
  EXPECT_EQ(beyond.blocks_size(), 0);
  EXPECT_EQ(beyond.shortfall(), v1::SHORTFALL_CAP);
  // What it asks for itself counts where that is less.
  v1::OpenSession less = OpenRequest();
  less.set_max_blocks(2);
  const auto modest = OpenEngine(less, "modest");
  EXPECT_EQ(modest->LeaseAsked(3, 0).blocks_size(), 2);
}

TEST_F(AccessTest, ASessionPinsWhatItsRuleAllows) {
  Rules(Rule("uid = 1000\ntenant = a\npinned-blocks = 2"));
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto blocks = engine->Lease(4);
  engine->Seal(blocks, Keys("x", 4));
  EXPECT_EQ(engine->Do(PinOp({blocks[1]}, 60000)).pin().refused_size(), 0) << "with the one in front of it";
  const v1::OperationResult pinned = engine->Do(PinOp({blocks[2]}, 60000));
  ASSERT_EQ(pinned.pin().refused_size(), 1);
  EXPECT_EQ(pinned.pin().refused(0).code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_NE(pinned.pin().refused(0).message().find("2 of 2 blocks are pinned"), std::string::npos)
      << pinned.pin().refused(0).message();
  EXPECT_EQ(engine->Do(RetainOp({blocks[3]}, 90, 60000)).set_retention().refused_size(), 1);
  EXPECT_EQ(engine->Do(RetainOp({blocks[3]}, 10, 60000)).set_retention().refused_size(), 0);
}

TEST_F(AccessTest, ADaemonWithoutRulesDoesNotStart) {
  EXPECT_EQ(Daemon::Start({}, {}, &clock_).status().code(), absl::StatusCode::kInvalidArgument);
  std::vector<std::unique_ptr<Device>> devices;
  MemoryDevice::Script script;
  devices.push_back(std::make_unique<MemoryDevice>("mem0", kGranuleBytes, &script));
  EXPECT_EQ(
      Daemon::Start({.device_capacity_bytes = {1 << 20}}, std::move(devices), &clock_).status().message(),
      "access is null; who may do what is needed");
}

}  // namespace
}  // namespace kvpool
