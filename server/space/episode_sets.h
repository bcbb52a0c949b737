// Block sets that a session keeps under names, and finds again by name or by the nearest
// centroid (PutEpisode, ChooseEpisode).
//
//   a set holds each of its blocks once     from Put on, until it is replaced or removed
//   a choice holds each of them once more   the caller's to release
//
// All holds are the session's, so whatever ends it takes them back with the others. Not thread-safe: the
// space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_EPISODE_SETS_H_
#define KVPOOL_SERVER_SPACE_EPISODE_SETS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvpool/v1/score.pb.h"
#include "proto/support/block_ref.h"

namespace kvpool {

class EpisodeSets {
 public:
  struct Set {
    std::string name;
    std::vector<v1::Sequence> sequences;
    std::vector<BlockRef> blocks;  // All blocks of these sequences.
  };
  uint32_t size() const { return static_cast<uint32_t>(sets_.size()); }
  size_t blocks() const;
  size_t largest() const;  // Blocks of the largest set.
  const Set* Find(std::string_view name) const;
  // How many numbers a centroid has; 0: there is no set.
  uint64_t dim() const { return sets_.empty() ? 0 : centroids_.size() / sets_.size(); }
  // REQUIRES: the centroid has dim() numbers, unless there is no other set.
  void Put(Set set, absl::Span<const float> centroid);
  void Remove(std::string_view name);
  struct Nearest {
    const Set* set = nullptr;
    double cosine = 0;
  };
  absl::StatusOr<Nearest> Find(absl::Span<const float> embedding) const;

 private:
  size_t PlaceOf(std::string_view name) const;

  std::vector<Set> sets_;          // Sorted by name.
  std::vector<double> centroids_;  // [sets][dim]
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_EPISODE_SETS_H_
