#include "server/space/episode_sets.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/scorers/episodes.h"
#include "proto/support/status_macros.h"

namespace kvpool {

size_t EpisodeSets::PlaceOf(std::string_view name) const {
  const auto less = [](const Set& set, std::string_view wanted) { return set.name < wanted; };
  return std::lower_bound(sets_.begin(), sets_.end(), name, less) - sets_.begin();
}

const EpisodeSets::Set* EpisodeSets::Find(std::string_view name) const {
  const size_t place = PlaceOf(name);
  return place < sets_.size() && sets_[place].name == name ? &sets_[place] : nullptr;
}

size_t EpisodeSets::blocks() const {
  size_t blocks = 0;
  for (const Set& set : sets_) blocks += set.blocks.size();
  return blocks;
}

size_t EpisodeSets::largest() const {
  size_t blocks = 0;
  for (const Set& set : sets_) blocks = std::max(blocks, set.blocks.size());
  return blocks;
}

void EpisodeSets::Put(Set set, absl::Span<const float> centroid) {
  Remove(set.name);
  const size_t place = PlaceOf(set.name);
  sets_.insert(sets_.begin() + static_cast<ptrdiff_t>(place), std::move(set));
  centroids_.insert(centroids_.begin() + static_cast<ptrdiff_t>(place * centroid.size()), centroid.begin(),
                    centroid.end());
}

void EpisodeSets::Remove(std::string_view name) {
  if (Find(name) == nullptr) return;
  const auto place = static_cast<ptrdiff_t>(PlaceOf(name)), numbers = static_cast<ptrdiff_t>(dim());
  centroids_.erase(centroids_.begin() + place * numbers, centroids_.begin() + (place + 1) * numbers);
  sets_.erase(sets_.begin() + place);
}

absl::StatusOr<EpisodeSets::Nearest> EpisodeSets::Find(absl::Span<const float> embedding) const {
  if (embedding.size() != dim()) {
    return absl::InvalidArgumentError(absl::StrCat("choose_episode.embedding has ", embedding.size(),
                                                   " numbers; the session's centroids have ", dim()));
  }
  const std::vector<double> question(embedding.begin(), embedding.end());
  ASSIGN_OR_RETURN(const scorers::NearEpisode nearest,
                   scorers::NearestEpisode({.values = centroids_, .dim = dim()}, question));
  return Nearest{.set = &sets_[nearest.episode], .cosine = nearest.cosine};
}

}  // namespace kvpool
