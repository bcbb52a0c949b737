#include "server/space/space_table.h"

#include <cstring>
#include <string_view>
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
  uint64_t checksum;  // Covers the header, with 0 here, and what is behind it up to the pool.
  uint64_t space;
  SpaceGeometry geometry;
  uint64_t pool_at;
  uint32_t tenant_bytes;
  uint32_t opening_bytes;
  char hash_seed[kSeedBytes];
};
constexpr char kTableMagic[8] = {'k', 'v', 'p', 's', 'p', 'a', 'c', 'e'};

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
  const uint64_t end = sizeof(header) + facts.tenant.size() + bytes.size();
  header.pool_at = (end + kPoolAlignment - 1) / kPoolAlignment * kPoolAlignment;
  header.checksum = ChecksumOf(header, absl::StrCat(facts.tenant, bytes));
  ASSIGN_OR_RETURN(
      SharedMemory memory,
      SharedMemory::Make("kvpool-table",
                         header.pool_at + PoolTable::Bytes(header.geometry.max_blocks, sessions)));
  char* at = memory.data();
  for (const std::string_view part :
       {std::string_view(reinterpret_cast<const char*>(&header), sizeof(header)),
        std::string_view(facts.tenant), std::string_view(bytes)}) {
    std::memcpy(at, part.data(), part.size());
    at += part.size();
  }
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
  if (header.version != kSpaceTableVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the table of a space is of version ", header.version,
                                                      "; this kvpoold reads version ", kSpaceTableVersion,
                                                      ": end it, so that the next one starts cold"));
  }
  const uint64_t end = sizeof(header) + uint64_t{header.tenant_bytes} + header.opening_bytes;
  if (header.pool_at < end || header.pool_at % kPoolAlignment != 0 || header.geometry.max_blocks == 0 ||
      memory_.bytes() != header.pool_at + PoolTable::Bytes(header.geometry.max_blocks, header.sessions)) {
    return Damaged("its sizes do not fit together");
  }
  const std::string_view behind(memory_.data() + sizeof(header), end - sizeof(header));
  if (header.checksum != ChecksumOf(header, behind)) return Damaged("its checksum is another");
  if (!opening_.ParseFromArray(behind.data() + header.tenant_bytes, static_cast<int>(header.opening_bytes))) {
    return Damaged("the opening in it is none");
  }
  space_ = header.space;
  geometry_ = header.geometry;
  tenant_scope_ = std::string(behind.substr(0, header.tenant_bytes));
  hash_seed_ = std::string(header.hash_seed, kSeedBytes);
  pool_at_ = header.pool_at;
  sessions_ = header.sessions;
  return absl::OkStatus();
}

void SpaceTable::Hold(PoolOptions* options) const {
  options->table = memory_.data() + pool_at_;
  options->table_sessions = sessions_;
}

}  // namespace kvpool
