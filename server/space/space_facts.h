// What a space is, for life.
#ifndef KVPOOL_SERVER_SPACE_SPACE_FACTS_H_
#define KVPOOL_SERVER_SPACE_SPACE_FACTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "kvpool/v1/engine.pb.h"
#include "server/space/space_geometry.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

struct SpaceFacts {
  uint64_t id = 0;
  std::string tenant;       // "default@1000", or a name shared by several uids.
  std::string tenant_name;  // "default".
  v1::Fingerprint fingerprint;
  v1::Layout layout;
  v1::SpaceKind kind = v1::SPACE_KIND_SLABS;
  // Both are indexed by rank; rank_devices are indices into the budget. Ranks may share a device.
  std::vector<Device*> devices;
  std::vector<size_t> rank_devices;
  SpaceGeometry geometry;
  std::string hash_seed;  // 32 bytes.
  // What its blocks' names below the pool begin with; none: nothing of it goes there.
  std::optional<TierSpace> tier_space;
  TierOwner tier_owner{};  // Whose that is. See OwnerBelow (daemon/space_terms.h).
  double low_watermark = 0;
  double high_watermark = 0;
  bool kept = false;  // What is sealed in it outlives the daemon: it has a table that a keeper keeps.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SPACE_FACTS_H_
