// All of a space that outlives the daemon, but for its slabs: what the space is, then its pool's table, in one piece of
// memory whose descriptor a keeper has.
//
//   header    version, sizes, geometry, hash seed, checksum of it and of the two behind it
//   tenant    its scope
//   opening   the OpenSession that made the space, without its token
//   pool      server/pool/pool_table.h
#ifndef KVPOOL_SERVER_SPACE_SPACE_TABLE_H_
#define KVPOOL_SERVER_SPACE_SPACE_TABLE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/unique_fd.h"
#include "server/base/shared_memory.h"
#include "server/pool/block_pool.h"
#include "server/space/space_facts.h"

namespace kvpool {

// It counts up with every change of what is kept, the pool's table included. Only this version is read.
inline constexpr uint32_t kSpaceTableVersion = 5;

class SpaceTable {
 public:
  // `sessions` at once have room for their holds.
  static absl::StatusOr<std::unique_ptr<SpaceTable>> Make(const SpaceFacts& facts,
                                                          const v1::OpenSession& opening, uint32_t sessions);
  // FAILED_PRECONDITION: it is of another version; the error names both. DATA_LOSS: it is damaged.
  static absl::StatusOr<std::unique_ptr<SpaceTable>> Map(UniqueFd fd);

  // What Make was told.
  uint64_t space() const { return space_; }
  const std::string& tenant_scope() const { return tenant_scope_; }
  const std::string& hash_seed() const { return hash_seed_; }
  const SpaceGeometry& geometry() const { return geometry_; }
  const v1::OpenSession& opening() const { return opening_; }

  int fd() const { return memory_.fd(); }
  // Makes these the options of a pool that lives here.
  void Hold(PoolOptions* options) const;

 private:
  explicit SpaceTable(SharedMemory memory) : memory_(std::move(memory)) {}
  absl::Status Read();

  SharedMemory memory_;
  uint64_t space_ = 0;
  SpaceGeometry geometry_;
  std::string tenant_scope_, hash_seed_;
  v1::OpenSession opening_;
  uint64_t pool_at_ = 0;
  uint32_t sessions_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_TABLE_H_
