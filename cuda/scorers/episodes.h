// Episodes of a conversation (EpiCache, arXiv 2509.17396): segments of its history, grouped by subject. Each
// episode has a block set of its own, scored by its own patched prompt (epicache.h); a question is answered
// from the set of the nearest episode. The caller computes the embeddings. This runs on the host, on some
// thousand segments.
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
  uint32_t prompt_segments = 4;  // segments of an episode's prompt: the nearest to its centroid
  uint32_t tries = 10;           // runs of k-means, of which the one with the least distances counts
  uint64_t seed = 1;
};

struct Episodes {
  std::vector<uint32_t> of_segment;            // the number of each segment's episode
  std::vector<double> centroids;               // [episode][dim]
  std::vector<std::vector<uint32_t>> prompts;  // [episode][], segments in order of time
};

// K-means++ from `tries` starts, which depend on the seed alone. Episodes are numbered by their first
// segment, so that the same grouping has the same numbers. INVALID_ARGUMENT: there are no embeddings, fewer
// segments than episodes, or values that are not finite.
absl::StatusOr<Episodes> FindEpisodes(const Embeddings& segments, const EpisodeOptions& options);

// The episode whose centroid has the largest cosine with the question, the lowest of several. The cosine with
// a vector of zeros is 0.
struct NearEpisode {
  uint32_t episode = 0;
  double cosine = 0;
};
absl::StatusOr<NearEpisode> NearestEpisode(const Embeddings& centroids, absl::Span<const double> question);

}  // namespace kvpool::scorers

#endif  // KVPOOL_CUDA_SCORERS_EPISODES_H_
