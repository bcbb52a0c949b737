// Folders, keys and values for tests of tiers, and calls that wait.
#ifndef KVPOOL_TESTS_TIERS_TIER_FIXTURE_H_
#define KVPOOL_TESTS_TIERS_TIER_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/tiers/tier.h"

namespace kvpool {

// A folder that goes with it.
class TierFolder {
 public:
  enum class On { kDisk, kMemory };
  explicit TierFolder(On on = On::kDisk);
  ~TierFolder();
  const std::string& path() const { return path_; }
  std::vector<std::string> Segments() const;

 private:
  std::string path_;
};

inline constexpr uint64_t kValueBytes = 5000;

// Every second value is of one of two tenants.
TierKey KeyOf(uint32_t number);
TierOwner OwnerOf(uint32_t number);
// The value that belongs to the key: every word of it differs from that of every other key.
std::shared_ptr<TierBuffer> ValueOf(uint32_t number, uint64_t bytes = kValueBytes);

std::vector<TierResult> Store(Tier* tier, const std::vector<uint32_t>& numbers, uint64_t bytes = kValueBytes);
struct Loaded {
  std::vector<TierResult> results;
  uint32_t right = 0;  // So many are kDone.
  uint32_t wrong = 0;  // So many are kDone, and are not what was stored.
};
Loaded Load(Tier* tier, const std::vector<uint32_t>& numbers, uint64_t bytes = kValueBytes,
            Tier::Deadline deadline = Tier::Deadline::max());
std::vector<bool> Exists(Tier* tier, const std::vector<uint32_t>& numbers);
std::vector<uint32_t> Numbers(uint32_t count, uint32_t first = 0);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_TIERS_TIER_FIXTURE_H_
