// What a tenant gets was another's before: no byte of that is in it. The daemon is a real one, and both tenants map what it
// sends them. The fake driver hands freed memory out again as it was (fake_cuda/residue.h); the kernel zeroes the host's.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/kv_compute.h"
#include "tests/device/test_device.h"
#include "tests/service/service_fixture.h"

namespace kvpool {
namespace {

constexpr uint32_t kBlocks = 32;  // A slab has so many.
constexpr size_t kMostSlabs = 8;
constexpr size_t kWrittenEveryBytes = 4096;
constexpr uint64_t kStamp = 0x5ec4e7005ec4e700;

// One engine of a tenant, and the memory that it maps.
struct Tenant {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<MemberMemory> memory;
  std::vector<std::pair<v1::Slab, UniqueFd>> sent;
  std::map<uint32_t, uint64_t> slabs;  // The addresses of those that are mapped.
};

class FormerTenantTest : public ServiceTest {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<TestDevice>> opened = OpenTestDevice(size_t{64} << 20);
    if (absl::IsUnavailable(opened.status()) || absl::IsUnimplemented(opened.status())) {
      GTEST_SKIP() << "no such device here: " << opened.status();
    }
    ASSERT_TRUE(opened.ok()) << opened.status();
    members_ = *std::move(opened);
    slab_bytes_ = members_->device().granularity_bytes();
    access_->Replace(MakePolicy(
        "[a]\nuid = 1000\nrole = engine\ntenant = a\n[b]\nuid = 1001\nrole = engine\ntenant = b\n"));
  }
  void Start(uint32_t slabs) {
    options_.version = "test";
    options_.policy = "lru";
    options_.housekeeping_thread = false;
    options_.slab_bytes = slab_bytes_;
    options_.device_capacity_bytes = {slabs * slab_bytes_};
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<Lent>(&members_->device()));
    absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options_, std::move(devices), &clock_);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  std::unique_ptr<Tenant> Open(uint32_t uid, uint32_t guaranteed) {
    auto tenant = std::make_unique<Tenant>();
    absl::StatusOr<std::unique_ptr<MemberMemory>> memory =
        members_->Reserve({.reserve_bytes = kMostSlabs * slab_bytes_});
    EXPECT_TRUE(memory.ok()) << memory.status();
    tenant->memory = *std::move(memory);
    engines_give_back_ = true;
    tenant->engine = Attach(absl::StrCat("uid ", uid), uid);
    Tenant* const to = tenant.get();
    to->engine->peer->on_slab = [to](const v1::Slab& slab, UniqueFd fd) {
      to->sent.emplace_back(slab, std::move(fd));
    };
    to->engine->peer->on_leave = [this, to](const v1::SlabLeave& leave) {
      EXPECT_TRUE(to->memory->UnmapSlab(leave.slab() * slab_bytes_, slab_bytes_).ok());
      to->slabs.erase(leave.slab());
      v1::SlabLeft left;
      left.set_slab(leave.slab());
      daemon_->OnSlabLeft(to->engine->id, left);
    };
    v1::OpenSession request = OpenRequest();
    request.mutable_layout()->set_block_bytes(slab_bytes_ / kBlocks);
    request.set_guaranteed_blocks(guaranteed);
    const absl::Status opened_session = to->engine->Open(request);
    EXPECT_TRUE(opened_session.ok()) << opened_session;
    MapSent(to);
    return tenant;
  }
  void MapSent(Tenant* tenant) {
    for (auto& [slab, fd] : std::exchange(tenant->sent, {})) {
      EXPECT_EQ(slab.bytes(), slab_bytes_);
      const absl::Status mapped =
          tenant->memory->MapSlab(std::move(fd), slab.slab() * slab_bytes_, slab_bytes_);
      EXPECT_TRUE(mapped.ok()) << mapped;
      tenant->slabs[slab.slab()] = tenant->memory->base() + slab.slab() * slab_bytes_;
    }
    tenant->engine->MapSlabs();
  }
  // Leases, writes and seals so many blocks, and writes all else that the tenant maps, as an engine may.
  void Fill(Tenant* tenant, uint32_t blocks) {
    // The space grows by what it comes short of.
    std::vector<uint64_t> leased;
    for (int round = 0; round < 20 && leased.size() < blocks; ++round) {
      const auto missing = blocks - static_cast<uint32_t>(leased.size());
      const v1::LeaseResult lease = tenant->engine->LeaseAsked(missing, 1);
      leased.insert(leased.end(), lease.blocks().begin(), lease.blocks().end());
      daemon_->HousekeepOnce();
      MapSent(tenant);
    }
    ASSERT_EQ(leased.size(), blocks);
    for (const uint64_t block : leased) {
      tenant->engine->Seal({block}, {Key(absl::StrCat("block", IdOf(block)))});
      clock_.Advance(1);
      tenant->engine->Release({block});
    }
    for (const auto& [slab, address] : tenant->slabs) {
      for (uint64_t at = 0; at < slab_bytes_; at += kWrittenEveryBytes) {
        ASSERT_TRUE(members_->Write(address + at, kStamp + at).ok());
      }
    }
  }
  // Words that are not zero in all that the tenant maps: as nobody of it has written, they are another's.
  size_t Foreign(const Tenant& tenant) {
    size_t foreign = 0;
    std::vector<uint64_t> words(slab_bytes_ / sizeof(uint64_t));
    for (const auto& [slab, address] : tenant.slabs) {
      EXPECT_TRUE(members_->ReadAll(address, absl::MakeSpan(words)).ok());
      for (const uint64_t word : words) foreign += word != 0 ? 1 : 0;
    }
    return foreign;
  }

  std::unique_ptr<TestDevice> members_;
  uint64_t slab_bytes_ = 0;

 private:
  // The daemon's device, which outlives it here.
  class Lent final : public Device {
   public:
    explicit Lent(Device* device) : device_(*device) {}
    const std::string& id() const override { return device_.id(); }
    const std::string& name() const override { return device_.name(); }
    std::string uuid_bytes() const override { return device_.uuid_bytes(); }
    size_t granularity_bytes() const override { return device_.granularity_bytes(); }
    size_t total_bytes() const override { return device_.total_bytes(); }
    absl::StatusOr<size_t> free_bytes() const override { return device_.free_bytes(); }
    absl::StatusOr<std::unique_ptr<Slab>> MakeSlab(size_t bytes) override { return device_.MakeSlab(bytes); }
    absl::StatusOr<std::unique_ptr<Slab>> MakeIpcSlab(size_t bytes) override {
      return device_.MakeIpcSlab(bytes);
    }
    absl::Status CopyAll(absl::Span<const Copy> copies) override { return device_.CopyAll(copies); }
    absl::StatusOr<std::unique_ptr<KvCompute>> MakeKvCompute(const KvComputeOptions& options) override {
      return device_.MakeKvCompute(options);
    }

   private:
    Device& device_;
  };
};

TEST_F(FormerTenantTest, ASlabThatWasGivenBack) {
  Start(/*slabs=*/3);
  const auto a = Open(1000, 0);
  Fill(a.get(), 3 * kBlocks - 2);
  EXPECT_GE(Foreign(*a), 3 * slab_bytes_ / kWrittenEveryBytes) << "it sees its own";
  const auto b = Open(1001, 2 * kBlocks - 2);
  EXPECT_EQ(a->slabs.size(), 1);
  ASSERT_EQ(b->slabs.size(), 2);
  EXPECT_EQ(Foreign(*b), 0);
  // What moved within the space has done so with its bytes, and only there.
  EXPECT_GE(Foreign(*a), slab_bytes_ / kWrittenEveryBytes);
}

TEST_F(FormerTenantTest, ASpaceThatHasEnded) {
  Start(/*slabs=*/3);
  auto a = Open(1000, 0);
  Fill(a.get(), 3 * kBlocks - 2);
  a->engine->Die();
  a.reset();
  const auto b = Open(1001, 3 * kBlocks - 2);
  ASSERT_EQ(b->slabs.size(), 3);
  EXPECT_EQ(Foreign(*b), 0);
}

// Both have the same model, at the same time: what one frees is never leased by the other, nor is its slab.
TEST_F(FormerTenantTest, TheNeighbourOfOneThatIsThere) {
  Start(/*slabs=*/4);
  const auto a = Open(1000, kBlocks - 2);
  const auto b = Open(1001, kBlocks - 2);
  Fill(a.get(), kBlocks - 2);
  EXPECT_EQ(Foreign(*b), 0);
  ASSERT_FALSE(b->engine->LeaseAsked(2 * kBlocks, 1).blocks().empty());
  for (int i = 0; i < 4; ++i) {
    daemon_->HousekeepOnce();
    MapSent(b.get());
  }
  EXPECT_GE(b->slabs.size(), 2) << "it has grown";
  EXPECT_EQ(Foreign(*b), 0);
  EXPECT_EQ(b->engine->Match({Key("block2")}).tokens(), 0);
}

}  // namespace
}  // namespace kvpool
