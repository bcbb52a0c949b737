// Requests that break a documented limit: each is refused with the field, its value and the limit, and nothing
// else happens.
#include <functional>

#include "absl/strings/match.h"
#include "server/wire/field_checks.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

class BadInputTest : public ServiceTest {};

// A field that no contract has yet.
template <typename Message>
void AddUnknown(Message* message) {
  message->GetReflection()->MutableUnknownFields(message)->AddVarint(1999, 1);
}

TEST_F(BadInputTest, OpenSession) {
  StartDaemon(4);
  struct Case {
    const char* words;
    std::function<void(v1::OpenSession*)> spoil;
  };
  const auto group = [](v1::OpenSession* r) { return r->mutable_layout()->mutable_groups(0); };
  const auto strided = [=](v1::OpenSession* r) {
    r->mutable_layout()->set_encoding(v1::ENCODING_STRIDED);
    r->mutable_layout()->set_block_bytes(4096);
    v1::LayerGroup* g = group(r);
    g->set_kv_heads(2);
    g->set_k_head_dim(64);
    g->set_v_head_dim(0);
    g->set_dtype(v1::DTYPE_F16);
    v1::Plane* k = g->mutable_k();
    k->set_token_stride_bytes(256);
    k->set_head_stride_bytes(128);
    k->set_dim_stride_bytes(2);
    return g;
  };
  const Case cases[] = {
      {"tenant has 65 bytes; must have 0 to 64", [](auto* r) { r->set_tenant(std::string(65, 'a')); }},
      {"tenant has byte 47; allowed are [A-Za-z0-9._-]", [](auto* r) { r->set_tenant("../etc"); }},
      {"client_name has 129 bytes; must have 0 to 128",
       [](auto* r) { r->set_client_name(std::string(129, 'a')); }},
      {"ranks is 65; must be 0 to 64", [](auto* r) { r->set_ranks(65); }},
      {"role.rank is 1; must be below ranks, 1", [](auto* r) { r->mutable_role()->set_rank(1); }},
      {"role.rank is 1; must be 0 for the scheduler",
       [](auto* r) {
         r->set_ranks(2);
         r->mutable_role()->set_scheduler(true);
         r->mutable_role()->set_rank(1);
       }},
      {"layout is missing", [](auto* r) { r->clear_layout(); }},
      {"layout.encoding is 0; must be 1 to 3", [](auto* r) { r->mutable_layout()->clear_encoding(); }},
      {"layout.encoding is 9; must be 1 to 3",
       [](auto* r) { r->mutable_layout()->set_encoding(static_cast<v1::Encoding>(9)); }},
      {"layout.block_bytes is 63; must be 64 to 1073741824",
       [](auto* r) { r->mutable_layout()->set_block_bytes(63); }},
      {"layout.block_bytes is 18446744073709551615; must be 64 to 1073741824",
       [](auto* r) { r->mutable_layout()->set_block_bytes(UINT64_MAX); }},
      {"number of layout.groups is 0; must be 1 to 16", [](auto* r) { r->mutable_layout()->clear_groups(); }},
      {"layout.groups[0].name has 0 bytes; must have 1 to 64", [=](auto* r) { group(r)->clear_name(); }},
      {"number of layout.groups[0].layers is 0; must be 1 to 1024",
       [=](auto* r) { group(r)->clear_layers(); }},
      {"layout.groups[0].layers[1] is 0; must be above 0", [=](auto* r) { group(r)->add_layers(0); }},
      {"layout.groups[1].layers: layer 0 is in another group too",
       [=](auto* r) { *r->mutable_layout()->add_groups() = v1::LayerGroup(*group(r)); }},
      {"layout.groups[0].tokens_per_block is 4097; must be 1 to 4096",
       [=](auto* r) { group(r)->set_tokens_per_block(4097); }},
      {"layout.groups[0].dtype is 77; must be 0 to 5",
       [=](auto* r) { group(r)->set_dtype(static_cast<v1::Dtype>(77)); }},
      {"layout.groups[0].kv_heads is 1025; must be 1 to 1024",
       [=](auto* r) { strided(r)->set_kv_heads(1025); }},
      {"layout.groups[0].k_head_dim is 0; must be 1 to 4096",
       [=](auto* r) { strided(r)->set_k_head_dim(0); }},
      {"layout.groups[0].dtype is unspecified", [=](auto* r) { strided(r)->clear_dtype(); }},
      {"layout.groups[0].k is missing", [=](auto* r) { strided(r)->clear_k(); }},
      {"layout.groups[0].v is missing; v_head_dim is 64", [=](auto* r) { strided(r)->set_v_head_dim(64); }},
      {"layout.groups[0].v is given, but v_head_dim is 0", [=](auto* r) { strided(r)->mutable_v(); }},
      {"layout.groups[0].k.dim_stride_bytes is 1; an element has 2 bytes",
       [=](auto* r) { strided(r)->mutable_k()->set_dim_stride_bytes(1); }},
      {"layout.groups[0].k: its farthest element ends at byte 4097; layout.block_bytes is 4096",
       [=](auto* r) { strided(r)->mutable_k()->set_offset_bytes(1); }},
      {"layout.groups[0].k: its farthest element ends at byte beyond 2^64",
       [=](auto* r) { strided(r)->mutable_k()->set_token_stride_bytes(UINT64_MAX); }},
      {"layout.groups[0].k: its farthest element ends at byte beyond 2^64",
       [=](auto* r) { strided(r)->mutable_k()->set_offset_bytes(UINT64_MAX); }},
      {"layout.groups[0].k.offset_bytes is 3; must be a multiple of the element size, 2",
       [=](auto* r) {
         strided(r)->mutable_k()->set_offset_bytes(3), r->mutable_layout()->set_block_bytes(8192);
       }},
      {"layout.groups[0].k.token_stride_bytes is 255; must be a multiple of the element size, 2",
       [=](auto* r) { strided(r)->mutable_k()->set_token_stride_bytes(255); }},
      {"layout.groups[0].k.head_stride_bytes is 127; must be a multiple of the element size, 2",
       [=](auto* r) { strided(r)->mutable_k()->set_head_stride_bytes(127); }},
      {"layout.groups[0].k.layer_stride_bytes is 5; must be a multiple of the element size, 2",
       [=](auto* r) { strided(r)->mutable_k()->set_layer_stride_bytes(5); }},
      {"layout.groups[0].k.dim_stride_bytes is 3; must be a multiple of the element size, 2",
       [=](auto* r) {
         strided(r)->mutable_k()->set_dim_stride_bytes(3), r->mutable_layout()->set_block_bytes(8192);
       }},
      {"layout.block_bytes is 8193; must be a multiple of the element size, 2",
       [=](auto* r) { strided(r), r->mutable_layout()->set_block_bytes(8193); }},
      {"fingerprint is missing", [](auto* r) { r->clear_fingerprint(); }},
      {"fingerprint.digest has 0 bytes; must have 1 to 64",
       [](auto* r) { r->mutable_fingerprint()->clear_digest(); }},
      {"fingerprint.facts[\"x\"] has 257 bytes; must have 0 to 256",
       [](auto* r) { (*r->mutable_fingerprint()->mutable_facts())["x"] = std::string(257, 'a'); }},
      {"number of fingerprint.facts is 65; must be 0 to 64",
       [](auto* r) {
         for (int i = 0; i < 64; ++i) (*r->mutable_fingerprint()->mutable_facts())[std::to_string(i)] = "";
       }},
      {"device_uuids has 2 entries; must have none or 1",
       [](auto* r) { r->add_device_uuids("a"), r->add_device_uuids("b"); }},
      {"device_uuids names \"GPU-1\"; the daemon has mem0", [](auto* r) { r->add_device_uuids("GPU-1"); }},
      {"kind is 7; must be 0 to 2", [](auto* r) { r->set_kind(static_cast<v1::SpaceKind>(7)); }},
      {"guaranteed_blocks is 5; max_blocks is 4",
       [](auto* r) { r->set_guaranteed_blocks(5), r->set_max_blocks(4); }},
      {"guaranteed_blocks is 4294967295; space 1 can have at most 64 blocks",
       [](auto* r) { r->set_guaranteed_blocks(UINT32_MAX); }},
      {"attach_token has 5 bytes; must have 32", [](auto* r) { r->set_client_name("short token"); }},
      {"open_session has unknown field 1999", [](auto* r) { AddUnknown(r); }},
      {"layout has unknown field 1999", [](auto* r) { AddUnknown(r->mutable_layout()); }},
      {"layout.groups[0] has unknown field 1999", [=](auto* r) { AddUnknown(group(r)); }},
      {"role has unknown field 1999", [](auto* r) { AddUnknown(r->mutable_role()); }},
  };
  for (const Case& bad : cases) {
    const auto engine = Attach();
    v1::OpenSession request = OpenRequest();
    bad.spoil(&request);
    if (request.client_name() == "short token") engine->attach_token = "short";
    const absl::Status status = engine->Open(request);
    EXPECT_FALSE(status.ok()) << bad.words;
    EXPECT_NE(std::string(status.message()).find(bad.words), std::string::npos) << status;
  }
  EXPECT_TRUE(daemon_->Snapshot().spaces.empty()) << "no refused opening left a space behind";
  v1::OpenSession good = OpenRequest();
  strided(&good);
  EXPECT_TRUE(Attach()->Open(good).ok()) << "the farthest element may end at the last byte";
}

TEST_F(BadInputTest, Operations) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const uint64_t block = engine->Lease(1)[0];
  const std::vector<uint64_t> too_many(65537, block);
  const auto with = [](v1::Operation operation, const std::function<void(v1::Operation*)>& spoil) {
    spoil(&operation);
    return operation;
  };
  struct Case {
    const char* words;
    v1::Operation operation;
  };
  const Case cases[] = {
      {"operation has no verb", {}},
      {"lease.count is 0; must be 1 to 65536", LeaseOp(0)},
      {"lease.min is 2; must be at most lease.count, 1", LeaseOp(1, 2)},
      {"after is 3; not allowed with lease", with(LeaseOp(1), [](auto* o) { o->set_after(3); })},
      {"after is 3; not allowed with lease", with(MatchOp({Key("a")}), [](auto* o) { o->set_after(3); })},
      {"after is 3; not allowed with lease", with(FenceOp(1), [](auto* o) { o->set_after(3); })},
      {"after is 9223372036854775808; must be 0 to 9223372036854775807",
       with(ReleaseOp({block}), [](auto* o) { o->set_after(uint64_t{1} << 63); })},
      {"fence.step is 9223372036854775808; must be 0 to 9223372036854775807", FenceOp(uint64_t{1} << 63)},
      {"release.blocks is 0; must be 1 to 65536", ReleaseOp({})},
      {"release.reuse is 4; must be 0 to 3",
       with(ReleaseOp({block}), [](auto* o) { o->mutable_release()->set_reuse(static_cast<v1::Reuse>(4)); })},
      {"release.reuse is 4294967295; must be 0 to 3",
       with(ReleaseOp({block}),
            [](auto* o) { o->mutable_release()->set_reuse(static_cast<v1::Reuse>(-1)); })},
      {"release.category is 16; must be 0 to 15",
       with(ReleaseOp({block}), [](auto* o) { o->mutable_release()->set_category(16); })},
      {"ref.blocks is 0; must be 1 to 65536", RefOp({})},
      {"touch.blocks is 0; must be 1 to 65536", TouchOp({})},
      {"unpin.blocks is 0; must be 1 to 65536", UnpinOp({})},
      {"pin.ttl_ms is 0; must be 1 to 86400000", PinOp({block}, 0)},
      {"pin.ttl_ms is 18446744073709551615; must be 1 to 86400000", PinOp({block}, UINT64_MAX)},
      {"set_retention.priority is 101; must be 0 to 100", RetainOp({block}, 101, 5)},
      {"set_retention.ttl_ms is 86400001; must be 1 to 86400000", RetainOp({block}, 1, 86400001)},
      {"set_retention.half_life_ms is 86400001; must be 0 to 86400000",
       with(RetainOp({block}, 1, 5),
            [](auto* o) { o->mutable_set_retention()->set_half_life_ms(86400001); })},
      {"seal.group is 1; the layout has 1 groups",
       with(SealOp({block}, {Key("a")}), [](auto* o) { o->mutable_seal()->set_group(1); })},
      {"seal.key_bytes is 65; must be 1 to 64",
       with(SealOp({block}, {Key("a")}), [](auto* o) { o->mutable_seal()->set_key_bytes(65); })},
      {"seal.keys_per_block is 9; must be 0 to 8",
       with(SealOp({block}, {Key("a")}), [](auto* o) { o->mutable_seal()->set_keys_per_block(9); })},
      {"seal.keys has 64 bytes; 1 blocks * 1 keys * 32 bytes are 32", SealOp({block}, Keys("a", 2))},
      {"seal.parent_key has 3 bytes; must have none or seal.key_bytes, 32",
       SealOp({block}, {Key("a")}, "abc")},
      {"match.groups is 0; must be 1 to 16",
       with(MatchOp({}), [](auto* o) { o->mutable_match()->clear_groups(); })},
      {"match.groups names group 0 twice",
       with(MatchOp({}), [](auto* o) { o->mutable_match()->add_groups()->set_key_bytes(1); })},
      {"match.groups.group is 4294967295; the layout has 1 groups",
       with(MatchOp({}), [](auto* o) { o->mutable_match()->mutable_groups(0)->set_group(UINT32_MAX); })},
      {"match.groups.key_bytes is 0; must be 1 to 64",
       with(MatchOp({}), [](auto* o) { o->mutable_match()->mutable_groups(0)->set_key_bytes(0); })},
      {"match.groups.keys has 33 bytes; must be a multiple of key_bytes, 32",
       with(MatchOp({Key("a")}),
            [](auto* o) { o->mutable_match()->mutable_groups(0)->mutable_keys()->push_back('x'); })},
      {"open_session and add_member come alone", with({}, [](auto* o) { o->mutable_open_session(); })},
      {"lease has unknown field 1999", with(LeaseOp(1), [](auto* o) { AddUnknown(o->mutable_lease()); })},
      {"operation has unknown field 1999", with(LeaseOp(1), [](auto* o) { AddUnknown(o); })},
      {"close_session has unknown field 1999",
       with(CloseOp(), [](auto* o) { AddUnknown(o->mutable_close_session()); })},
  };
  for (const Case& bad : cases) {
    const v1::StepResponse response = engine->Step({bad.operation});
    ASSERT_EQ(response.results_size(), 1) << response.message();
    EXPECT_EQ(response.results(0).code(), kInvalidArgument) << bad.words;
    EXPECT_NE(response.results(0).message().find(bad.words), std::string::npos)
        << response.results(0).message();
  }
  EXPECT_EQ(Blocks().leased(), 2) << "nothing happened";
  EXPECT_EQ(engine->Release({block}).refused_size(), 0);
}

TEST_F(BadInputTest, Batches) {
  StartDaemon(4);
  const auto engine = OpenEngine(OpenRequest());
  const auto expect = [&](const v1::StepRequest& request, const std::string& words) {
    const v1::StepResponse response = engine->Step(request);
    EXPECT_EQ(response.code(), kInvalidArgument);
    EXPECT_EQ(response.results_size(), 0);
    EXPECT_EQ(response.message(), words);
  };
  v1::StepRequest request;
  request.set_sequence(100);
  for (int i = 0; i < 4097; ++i) *request.add_operations() = LeaseOp(1);
  expect(request, "operations in the batch is 4097; must be 0 to 4096");
  request.clear_operations();
  for (int i = 0; i < 2; ++i) *request.add_operations() = ReleaseOp(std::vector<uint64_t>(32769, 7));
  expect(request, "blocks and keys in the batch is 65538; must be 0 to 65536");
  request.clear_operations();
  *request.add_operations() = MatchOp({});
  request.mutable_operations(0)->mutable_match()->mutable_groups(0)->set_key_bytes(1);
  request.mutable_operations(0)->mutable_match()->mutable_groups(0)->set_keys(std::string(65537, 'k'));
  expect(request, "blocks and keys in the batch is 65537; must be 0 to 65536");
  request.clear_operations();
  *request.add_operations() = LeaseOp(UINT32_MAX);
  expect(request, "blocks and keys in the batch is 4294967295; must be 0 to 65536");
  request.clear_operations();
  request.set_member_token("somebody else's");
  expect(request, "member_token is not that of this stream");
  request.set_member_token(engine->token);
  AddUnknown(&request);
  expect(request, "step has unknown field 1999");
  EXPECT_EQ(engine->Step({LeaseOp(1)}).code(), 0) << "a refused batch leaves the stream good";
  const v1::OperationResult unary = engine->Do(ReleaseOp(std::vector<uint64_t>(65537, 7)));
  EXPECT_EQ(unary.message(), "blocks and keys in the call is 65537; must be 0 to 65536");
}

TEST_F(BadInputTest, OperatorRequests) {
  StartDaemon(4);
  const auto expect = [](const absl::Status& status, const std::string& words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(status.message()), words);
  };
  v1::EvictRequest evict;
  v1::EvictResponse evicted;
  evict.set_key(std::string(65, 'k'));
  expect(daemon_->Evict(evict, &evicted), "key has 65 bytes; must have 0 to 64");
  evict.set_key("k");
  evict.set_group(16);
  expect(daemon_->Evict(evict, &evicted), "group is 16; must be 0 to 15");
  v1::ListBlocksRequest list;
  v1::ListBlocksResponse blocks;
  expect(daemon_->ListBlocks(list, &blocks), "space is 0; required");
  list.set_space(1);
  list.set_limit(1001);
  expect(daemon_->ListBlocks(list, &blocks), "limit is 1001; must be 0 to 1000");
  list.set_state(static_cast<v1::BlockState>(9));
  expect(daemon_->ListBlocks(list, &blocks), "state is 9; must be 0 to 5");
  v1::RevokeRequest revoke;
  v1::RevokeResponse revoked;
  expect(daemon_->Revoke(revoke, &revoked), "blocks is 0; must be 1 to 4294967295");
  v1::ExplainRequest explain;
  v1::ExplainResponse explained;
  expect(daemon_->Explain(explain, &explained), "subject is missing: a block or a key");
  explain.set_block(5);
  expect(daemon_->Explain(explain, &explained), "space is 0; required to explain a block");
  explain.set_key("");
  expect(daemon_->Explain(explain, &explained), "key has 0 bytes; must have 1 to 64");
  v1::SetPolicyRequest policy;
  v1::SetPolicyResponse changed;
  policy.set_policy("mru");
  EXPECT_TRUE(absl::StartsWith(daemon_->SetPolicy(policy, &changed).message(),
                               "replacement policy \"mru\" is unknown; there are: lru, "));
  v1::PinPrefixRequest pin;
  v1::PinPrefixResponse pinned;
  pin.set_key("k");
  pin.set_ttl_ms(86400001);
  expect(daemon_->PinPrefix(pin, &pinned), "ttl_ms is 86400001; must be 0 to 86400000");
  AddUnknown(&pin);
  expect(daemon_->PinPrefix(pin, &pinned), "pin_prefix has unknown field 1999");
}

TEST_F(BadInputTest, Options) {
  const auto start = [&](DaemonOptions options, uint64_t capacity) {
    scripts_.push_back(std::make_unique<MemoryDevice::Script>());
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<MemoryDevice>("mem0", kGranuleBytes, scripts_.back().get()));
    options.device_capacity_bytes = {capacity};
    options.housekeeping_thread = false;
    options.access = access_;
    return std::string(Daemon::Start(options, std::move(devices), &clock_).status().message());
  };
  EXPECT_EQ(start({}, 1 << 20), "");
  EXPECT_EQ(start({}, 100), "capacity of device mem0 in bytes is 100; must be 16384 to 1099511627776");
  EXPECT_EQ(start({.low_watermark = 0.5, .high_watermark = 0.1}, 1 << 20),
            "low_watermark is 0.5; must be at most high_watermark, 0.1");
  EXPECT_EQ(start({.pin_budget = 1.5}, 1 << 20), "pin_budget is 1.5; must be 0 to 1");
  EXPECT_EQ(start({.tenant_share = 0}, 1 << 20), "tenant_share is 0; must be above 0, up to 1");
  EXPECT_EQ(start({.max_sessions = 0}, 1 << 20), "max_sessions is 0; must be 1 to 32768");
  EXPECT_NE(start({.policy = "belady"}, 1 << 20).find("lru"), std::string::npos)
      << "names the policies there are";
}

// gRPC's streams read into messages that were used before.
TEST(FieldChecksTest, AMessageThatWasClearedHasNoUnknownField) {
  v1::EvictRequest request;
  ASSERT_TRUE(request.ParseFromString("\xf8\x07\x01"));  // Field 127 is 1.
  EXPECT_EQ(CheckKnown("evict", request).message(), "evict has unknown field 127");
  request.Clear();
  EXPECT_TRUE(CheckKnown("evict", request).ok());
}

}  // namespace
}  // namespace kvpool
