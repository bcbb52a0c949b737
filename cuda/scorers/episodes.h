// Episodes of a conversation (EpiCache, arXiv 2509.17396): segments of its history, grouped by what they are about. Each
// episode has a block set of its own, scored by its own patched prompt (epicache.h); a question is answered from the set
// of the nearest episode. Embeddings are the caller's. Host side: some thousand segments.
#ifndef KVPOOL_CUDA_SCORERS_EPISODES_H_
#define KVPOOL_CUDA_SCORERS_EPISODES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvpool::scorers {

// Row-major [rows][dim].
struct Embeddings {
  absl::Span<const double> values;
  uint64_t dim = 0;
  uint64_t rows() const { return dim == 0 ? 0 : values.size() / dim; }
  absl::Span<const double> Row(uint64_t row) const { return values.subspan(row * dim, dim); }
};

struct EpisodeOptions {
  uint32_t episodes = 4;
  uint32_t prompt_segments = 4;  // Nearest to the centroid: the episode's prompt.
  uint32_t tries = 10;           // Of k-means; the closest counts.
  uint64_t seed = 1;
};

struct Episodes {
  std::vector<uint32_t> of_segment;  // Number of the episode that each belongs to.
  std::vector<double> centroids;     // [episode][dim]
  // Of each episode, in order of time.
  std::vector<std::vector<uint32_t>> prompts;
};

// K-means++ from `tries` starts that follow from the seed alone. Episodes are numbered by their first segment, so that the
// same grouping has the same numbers. INVALID_ARGUMENT: no embeddings, values not finite, fewer segments than episodes.
absl::StatusOr<Episodes> FindEpisodes(const Embeddings& segments, const EpisodeOptions& options);

// The episode whose centroid has the largest cosine with the question; the lowest of several, and of nothing but zeros.
struct NearEpisode {
  uint32_t episode = 0;
  double cosine = 0;
};
absl::StatusOr<NearEpisode> NearestEpisode(const Embeddings& centroids, absl::Span<const double> question);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_EPISODES_H_
