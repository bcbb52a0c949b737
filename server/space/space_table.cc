#include "server/space/space_table.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/pool/pool_table.h"

namespace kvpool {
namespace {

constexpr size_t kSeedBytes = 32;
constexpr uint64_t kPoolAlignment = 4096;

struct Header {
  char magic[8];  // It and the version stay where they are in all versions.
  uint32_t version;
  uint32_t sessions;
  uint64_t
      checksum;  // Covers the header, with 0 here, and what is behind it, up to `had_by` or else the pool.
  uint64_t space;
  SpaceGeometry geometry;
  uint64_t pool_at;
  uint32_t tenant_bytes;
  uint32_t opening_bytes;
  char hash_seed[kSeedBytes];
};
constexpr char kTableMagic[8] = {'k', 'v', 'p', 's', 'p', 'a', 'c', 'e'};
constexpr uint32_t kFirstWithSums = 7;

struct Readers {
  uint32_t oldest;
  // Stored by an older build that takes the table over. 0: none has. What is behind that one's part is out of date then: the
  // version that it is of trusts only what says by itself that it is not.
  uint32_t had_by;
};

// Two of them, of which the other one is written, so that a kill in between changes nothing. Zeros where an older build left a gap
// in front of the pool.
struct Shares {
  struct First {
    uint32_t numbers[5];
  };
  std::atomic<uint32_t> current;  // 1 or 2; 0: none has been kept.
  First of[2];
};
// What is in `whole` at the same place counts if both begin with the numbers of both: else a build that does not know it has kept
// others since. A kill between the two parts of what is kept costs what that one does not know.
struct Whole {
  KeptShares of[2];
};
static_assert(std::is_standard_layout_v<Shares> && std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::is_standard_layout_v<KeptShares> && std::is_trivially_copyable_v<KeptShares> &&
              offsetof(KeptShares, operator_priority) == sizeof(Shares::First));

// No shares begin so.
constexpr Shares::First kNoShares = {{UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX}};

bool BeginsWith(const KeptShares& shares, const Shares::First& first) {
  return std::memcmp(&shares, &first, sizeof(first)) == 0;
}

uint64_t SharesAt(uint64_t readers_at) {
  const uint64_t end = readers_at + sizeof(Readers);
  return (end + alignof(Shares) - 1) / alignof(Shares) * alignof(Shares);
}

// FNV-1a: it is to find damage, not an enemy, who could write a right one.
uint64_t ChecksumOf(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

uint64_t ChecksumOf(Header header, std::string_view behind) {
  header.checksum = 0;
  return ChecksumOf({reinterpret_cast<const char*>(&header), sizeof(header)}) ^ ChecksumOf(behind) * 3;
}

absl::Status Damaged(std::string_view what) {
  return absl::DataLossError(absl::StrCat("the table of a space is damaged: ", std::string(what)));
}

absl::Status Unreadable(uint32_t version) {
  return absl::FailedPreconditionError(
      absl::StrCat("the table of a space is of version ", version, "; this kvpoold reads versions ",
                   kOldestTableRead, " to ", kSpaceTableVersion, ", and ", kSpaceTableVersion + 1,
                   " where that can be read by the one before: end it, so that the next one starts cold"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SpaceTable>> SpaceTable::Make(const SpaceFacts& facts,
                                                             const v1::OpenSession& opening,
                                                             uint32_t sessions) {
  const uint64_t pages = PoolTable::Pages(facts.geometry.max_blocks, sessions);
  if (pages > UINT32_MAX) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a space of ", facts.geometry.max_blocks, " blocks has ", pages,
                     " pages of holds of its sessions; with a keeper the limit is ", UINT32_MAX,
                     ": ask for a smaller max_space_bytes"));
  }
  v1::OpenSession kept = opening;
  kept.clear_attach_token();
  // Where it lies, whatever devices the next daemon has beside them.
  kept.clear_device_uuids();
  for (const Device* const device : facts.devices) kept.add_device_uuids(device->id());
  const std::string bytes = kept.SerializeAsString();
  KVPOOL_CHECK(facts.hash_seed.size() == kSeedBytes, "a hash seed of %zu bytes", facts.hash_seed.size());
  Header header{};
  std::memcpy(header.magic, kTableMagic, sizeof(kTableMagic));
  header.version = kSpaceTableVersion;
  header.sessions = sessions;
  header.space = facts.id;
  header.geometry = facts.geometry;
  header.tenant_bytes = static_cast<uint32_t>(facts.tenant.size());
  header.opening_bytes = static_cast<uint32_t>(bytes.size());
  std::memcpy(header.hash_seed, facts.hash_seed.data(), kSeedBytes);
  const Readers readers{.oldest = kOldestTableReader, .had_by = 0};
  std::string behind = facts.tenant + bytes;
  behind.append(reinterpret_cast<const char*>(&readers.oldest), sizeof(readers.oldest));
  const uint64_t end =
      SharesAt(sizeof(header) + behind.size() - sizeof(readers.oldest)) + sizeof(Shares) + sizeof(Whole);
  header.pool_at = (end + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment;
  header.checksum = ChecksumOf(header, behind);
  ASSIGN_OR_RETURN(
      SharedMemory memory,
      SharedMemory::Make("kvpool-table",
                         header.pool_at + PoolTable::Bytes(header.geometry.max_blocks, sessions)));
  std::memcpy(memory.data(), &header, sizeof(header));
  std::memcpy(memory.data() + sizeof(header), behind.data(), behind.size());
  std::unique_ptr<SpaceTable> table(new SpaceTable(std::move(memory)));
  RETURN_IF_ERROR(table->Read());
  return table;
}

absl::StatusOr<std::unique_ptr<SpaceTable>> SpaceTable::Map(UniqueFd fd) {
  ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Map(std::move(fd)));
  std::unique_ptr<SpaceTable> table(new SpaceTable(std::move(memory)));
  RETURN_IF_ERROR(table->Read());
  return table;
}

absl::Status SpaceTable::Read() {
  Header header;
  if (memory_.bytes() < sizeof(header)) return Damaged("it is shorter than its header");
  std::memcpy(&header, memory_.data(), sizeof(header));
  if (std::memcmp(header.magic, kTableMagic, sizeof(kTableMagic)) != 0)
    return Damaged("it does not begin as one");
  // Whether the next version can be read it says itself, behind what is looked at first.
  const bool may_read = ReadsTable(kSpaceTableVersion, kOldestTableRead, header.version, 0);
  if (!may_read) return Unreadable(header.version);
  const uint64_t readers_at = sizeof(header) + uint64_t{header.tenant_bytes} + header.opening_bytes;
  if (header.pool_at < readers_at + sizeof(Readers) || header.pool_at % kPoolAlignment != 0 ||
      header.geometry.max_blocks == 0 || header.pool_at > memory_.bytes()) {
    return Damaged("its sizes do not fit together");
  }
  const std::string_view behind(memory_.data() + sizeof(header),
                                readers_at + offsetof(Readers, had_by) - sizeof(header));
  if (header.checksum != ChecksumOf(header, behind)) return Damaged("its checksum is another");
  Readers readers{};
  std::memcpy(&readers, memory_.data() + readers_at, sizeof(readers));
  if (!ReadsTable(kSpaceTableVersion, kOldestTableRead, header.version, readers.oldest))
    return Unreadable(header.version);
  has_sums_ = header.version >= kFirstWithSums;
  const uint64_t pool_bytes = has_sums_
                                  ? PoolTable::Bytes(header.geometry.max_blocks, header.sessions)
                                  : PoolTable::BytesWithoutSums(header.geometry.max_blocks, header.sessions);
  const uint64_t there = memory_.bytes() - header.pool_at;
  if (header.version == kSpaceTableVersion ? there != pool_bytes : there < pool_bytes)
    return Damaged("its sizes do not fit together");
  if (header.version > kSpaceTableVersion) {
    readers.had_by = kSpaceTableVersion;
    std::memcpy(memory_.data() + readers_at + offsetof(Readers, had_by), &readers.had_by,
                sizeof(readers.had_by));
  }
  if (!opening_.ParseFromArray(behind.data() + header.tenant_bytes, static_cast<int>(header.opening_bytes))) {
    return Damaged("the opening in it is none");
  }
  version_ = {.version = header.version, .oldest_reader = readers.oldest};
  space_ = header.space;
  geometry_ = header.geometry;
  tenant_scope_ = std::string(behind.substr(0, header.tenant_bytes));
  hash_seed_ = std::string(header.hash_seed, kSeedBytes);
  pool_at_ = header.pool_at;
  if (SharesAt(readers_at) + sizeof(Shares) <= pool_at_) shares_at_ = SharesAt(readers_at);
  const uint64_t whole_at = SharesAt(readers_at) + sizeof(Shares);
  if (whole_at + sizeof(Whole) <= pool_at_) whole_at_ = whole_at;
  sessions_ = header.sessions;
  return absl::OkStatus();
}

KeptShares SpaceTable::shares() const {
  if (shares_at_ == 0) return {};
  const auto& shares = *reinterpret_cast<const Shares*>(memory_.data() + shares_at_);
  const uint32_t current = shares.current.load(std::memory_order_acquire);
  KeptShares kept;
  if (current != 1 && current != 2) return kept;
  const Shares::First& first = shares.of[current - 1];
  if (whole_at_ != 0) {
    // A build that does not know of them has written to the other one first, whatever it wrote here.
    const auto& whole = *reinterpret_cast<const Whole*>(memory_.data() + whole_at_);
    if (BeginsWith(whole.of[current - 1], first) && BeginsWith(whole.of[2 - current], shares.of[2 - current]))
      return whole.of[current - 1];
  }
  std::memcpy(&kept, &first, sizeof(first));
  return kept;
}

void SpaceTable::KeepShares(const KeptShares& kept) {
  if (shares_at_ == 0) return;
  auto& shares = *reinterpret_cast<Shares*>(memory_.data() + shares_at_);
  const uint32_t next = shares.current.load(std::memory_order_relaxed) == 1 ? 2 : 1;
  std::memcpy(&shares.of[next - 1], &kept, sizeof(Shares::First));
  Whole* const whole = whole_at_ == 0 ? nullptr : reinterpret_cast<Whole*>(memory_.data() + whole_at_);
  if (whole != nullptr) whole->of[next - 1] = kept;
  shares.current.store(next, std::memory_order_release);
  // A build that does not know of `whole` keeps its next ones there: they begin otherwise.
  if (whole == nullptr) return;
  std::memcpy(&whole->of[2 - next], &kNoShares, sizeof(kNoShares));
  std::memcpy(&shares.of[2 - next], &kNoShares, sizeof(kNoShares));
}

uint32_t SpaceTable::sealed_blocks() const {
  const PoolTable pool(memory_.data() + pool_at_, geometry_.max_blocks, sessions_);
  uint32_t sealed = 0;
  for (uint32_t b = 1; b < std::min(pool.begun.blocks, geometry_.max_blocks); ++b)
    sealed += pool.records[b].resident();
  return sealed;
}

void SpaceTable::Hold(PoolOptions* options) const {
  options->table = memory_.data() + pool_at_;
  options->table_sessions = sessions_;
  options->table_has_sums = has_sums_;
}

}  // namespace kvpool
