// All of a space that outlives the daemon, but for its slabs: what the space is, then its pool's table, in one piece of
// memory whose descriptor a keeper has.
//
//   header    version, sizes, geometry, hash seed, checksum of it and of the three behind it
//   tenant    its scope
//   opening   the OpenSession that made the space, without its token
//   readers   the oldest version that reads this, and the oldest that has had it since
//   shares    what operators and rules say of the space's part of a device; absent in tables of builds that did not keep it
//   whole     the same, with what builds of before do not know; absent likewise
//   pool      server/pool/pool_table.h; from version 7 on with sums of content
//
// A daemon reads its own version and the one before. It also reads the next one, if that says so: then all that it knows is
// where it expects it, and what is new lies behind. As it lets that go stale, it leaves word that it was here.
#ifndef KVPOOL_SERVER_SPACE_SPACE_TABLE_H_
#define KVPOOL_SERVER_SPACE_SPACE_TABLE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/unique_fd.h"
#include "server/access/access_policy.h"
#include "server/base/shared_memory.h"
#include "server/pool/block_pool.h"
#include "server/space/space_facts.h"

namespace kvpool {

// It counts up with every change of what is kept, the pool's table and members' logs included.
inline constexpr uint32_t kSpaceTableVersion = 8;
// The oldest that is read, and the oldest that reads this one.
inline constexpr uint32_t kOldestTableRead = 6, kOldestTableReader = 7;
// From this one on a space may have holes, which those before do not start with (slab_places.h).
inline constexpr uint32_t kFirstWithHoles = 8;

// Whether a build of version `own`, which reads versions from `oldest_read` on, reads what one of version `kept` has written,
// which says that versions from `oldest_reader` on can.
inline constexpr bool ReadsTable(uint32_t own, uint32_t oldest_read, uint32_t kept, uint32_t oldest_reader) {
  return kept <= own ? kept >= oldest_read : kept == own + 1 && oldest_reader <= own;
}

// Of a table, and what a program has to be to read it.
struct TableVersion {
  uint32_t version = kSpaceTableVersion;
  uint32_t oldest_reader = kOldestTableReader;
};

// What may change of a space's part of its devices while it lives (GiveBack).
struct KeptShares {
  uint32_t share_blocks = 0;
  uint32_t operator_limit_blocks = 0;
  uint32_t operator_weight = 0;
  uint32_t rule_limit_blocks = 0;
  uint32_t rule_weight = 0;
  // Builds of before know what is in front of this. Where one of them has kept others since, these are as below.
  uint32_t operator_priority = 0;  // Each is a v1::PriorityClass.
  uint32_t rule_priority = 0;
  uint32_t asked_priority = 0;
  uint32_t rule_bytes = 0;
  char rule[kMostRuleNameBytes] = {};  // Its name.
  bool operator==(const KeptShares&) const = default;
};

class SpaceTable {
 public:
  // `sessions` at once have room for their holds.
  static absl::StatusOr<std::unique_ptr<SpaceTable>> Make(const SpaceFacts& facts,
                                                          const v1::OpenSession& opening, uint32_t sessions);
  // FAILED_PRECONDITION: it is of a version that this build does not read; the error names both. DATA_LOSS: it is damaged.
  static absl::StatusOr<std::unique_ptr<SpaceTable>> Map(UniqueFd fd);

  // What Make was told.
  uint64_t space() const { return space_; }
  const std::string& tenant_scope() const { return tenant_scope_; }
  const std::string& hash_seed() const { return hash_seed_; }
  const SpaceGeometry& geometry() const { return geometry_; }
  const v1::OpenSession& opening() const { return opening_; }
  // Of the build that made it, whoever has had it since.
  const TableVersion& version() const { return version_; }

  // The last ones that were kept, whole, whenever the daemon was killed; zeros if none were. A table that an older build has had
  // since may have those of before.
  KeptShares shares() const;
  // Does nothing in a table without room for them. One call at a time.
  void KeepShares(const KeptShares& shares);

  int fd() const { return memory_.fd(); }
  // In its pool, as far as their records say so: all of them are looked at.
  uint32_t sealed_blocks() const;
  // Makes these the options of a pool that lives here.
  void Hold(PoolOptions* options) const;

 private:
  explicit SpaceTable(SharedMemory memory) : memory_(std::move(memory)) {}
  absl::Status Read();

  SharedMemory memory_;
  TableVersion version_;
  uint64_t space_ = 0;
  SpaceGeometry geometry_;
  std::string tenant_scope_, hash_seed_;
  v1::OpenSession opening_;
  uint64_t pool_at_ = 0;
  uint64_t shares_at_ = 0;  // 0: there is no room for them.
  uint64_t whole_at_ = 0;   // Likewise.
  uint32_t sessions_ = 0;
  bool has_sums_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_TABLE_H_
