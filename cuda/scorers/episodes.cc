#include "cuda/scorers/episodes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cuda/base/stamp.h"
#include "proto/support/status_macros.h"

namespace kvpool::scorers {
namespace {

// K-means converges long before.
constexpr int kMaxRounds = 300;

double SquareDistance(absl::Span<const double> a, absl::Span<const double> b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
  return sum;
}

absl::Status CheckEmbeddings(const char* field, const Embeddings& embeddings) {
  if (embeddings.dim == 0 || embeddings.values.empty() || embeddings.values.size() % embeddings.dim != 0) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", embeddings.values.size(),
                                                   " values of dimension ", embeddings.dim, " are no rows"));
  }
  for (size_t i = 0; i < embeddings.values.size(); ++i) {
    if (std::isfinite(embeddings.values[i])) continue;
    return absl::InvalidArgumentError(absl::StrCat(field, ": row ", i / embeddings.dim, " is not finite"));
  }
  return absl::OkStatus();
}

struct Clusters {
  std::vector<uint32_t> of_row;
  std::vector<double> centroids;
  double distance = 0;  // sum of the squared distances of all rows from their centroids
};

// One run.
class KMeans {
 public:
  KMeans(const Embeddings& rows, uint32_t count, uint64_t seed)
      : rows_(rows), count_(count), state_(seed), of_row_(rows.rows(), count), centroids_(count * rows.dim) {}

  Clusters Run() {
    Start();
    for (int round = 0; round < kMaxRounds && Assign(); ++round) Move();
    return {.of_row = std::move(of_row_), .centroids = std::move(centroids_), .distance = distance_};
  }

 private:
  absl::Span<double> Centroid(uint32_t cluster) {
    return absl::MakeSpan(centroids_).subspan(cluster * rows_.dim, rows_.dim);
  }
  void Place(uint32_t cluster, uint64_t row) {
    std::copy(rows_.Row(row).begin(), rows_.Row(row).end(), Centroid(cluster).begin());
  }
  double Uniform() {
    return static_cast<double>(MixBits(state_ += 0x9e3779b97f4a7c15u) >> 11) / 9007199254740992.0;
  }

  // Takes rows as centroids, each with a probability in proportion to the square of its distance from those
  // taken (k-means++).
  void Start() {
    std::vector<double> distances(rows_.rows(), std::numeric_limits<double>::infinity());
    Place(0, static_cast<uint64_t>(Uniform() * static_cast<double>(rows_.rows())));
    for (uint32_t cluster = 1; cluster < count_; ++cluster) {
      for (uint64_t row = 0; row < rows_.rows(); ++row) {
        distances[row] = std::min(distances[row], SquareDistance(rows_.Row(row), Centroid(cluster - 1)));
      }
      double left = Uniform() * std::accumulate(distances.begin(), distances.end(), 0.0);
      uint64_t row = 0;
      while (row + 1 < rows_.rows() && (left -= distances[row]) >= 0) ++row;
      Place(cluster, row);
    }
  }

  // Assigns each row to the nearest centroid; returns whether any changed its cluster.
  bool Assign() {
    bool changed = false;
    distance_ = 0;
    for (uint64_t row = 0; row < rows_.rows(); ++row) {
      uint32_t nearest = 0;
      double least = std::numeric_limits<double>::infinity();
      for (uint32_t cluster = 0; cluster < count_; ++cluster) {
        const double apart = SquareDistance(rows_.Row(row), Centroid(cluster));
        if (apart < least) least = apart, nearest = cluster;
      }
      changed = changed || of_row_[row] != nearest;
      of_row_[row] = nearest;
      distance_ += least;
    }
    return changed;
  }

  void Move() {
    for (uint32_t cluster = 0; cluster < count_; ++cluster) {
      std::vector<double> sum(rows_.dim);
      double members = 0;
      for (uint64_t row = 0; row < rows_.rows(); ++row) {
        if (of_row_[row] != cluster) continue;
        ++members;
        for (uint64_t d = 0; d < rows_.dim; ++d) sum[d] += rows_.Row(row)[d];
      }
      // A cluster without rows stays where it is.
      for (uint64_t d = 0; d < rows_.dim && members > 0; ++d) Centroid(cluster)[d] = sum[d] / members;
    }
  }

  const Embeddings& rows_;
  const uint32_t count_;
  uint64_t state_;
  std::vector<uint32_t> of_row_;  // `count` for a row that has no cluster yet
  std::vector<double> centroids_;
  double distance_ = 0;
};

std::vector<uint32_t> PromptOf(const Embeddings& segments, const Episodes& episodes, uint32_t episode,
                               uint32_t prompt_segments) {
  const auto centroid = absl::MakeConstSpan(episodes.centroids).subspan(episode * segments.dim, segments.dim);
  std::vector<std::pair<double, uint32_t>> members;
  for (uint32_t segment = 0; segment < episodes.of_segment.size(); ++segment) {
    if (episodes.of_segment[segment] != episode) continue;
    members.emplace_back(SquareDistance(segments.Row(segment), centroid), segment);
  }
  std::sort(members.begin(), members.end());
  if (members.size() > prompt_segments) members.resize(prompt_segments);
  std::vector<uint32_t> prompt;
  for (const auto& [distance, segment] : members) prompt.push_back(segment);
  std::sort(prompt.begin(), prompt.end());
  return prompt;
}

}  // namespace

absl::StatusOr<Episodes> FindEpisodes(const Embeddings& segments, const EpisodeOptions& options) {
  RETURN_IF_ERROR(CheckEmbeddings("segments", segments));
  if (options.episodes == 0 || options.episodes > segments.rows()) {
    return absl::InvalidArgumentError(
        absl::StrCat("episodes is ", options.episodes, ", must be 1 to ", segments.rows(), ", the segments"));
  }
  if (options.tries == 0 || options.prompt_segments == 0) {
    return absl::InvalidArgumentError("tries and prompt_segments must be 1 or more");
  }
  Clusters best = KMeans(segments, options.episodes, options.seed).Run();
  for (uint32_t t = 1; t < options.tries; ++t) {
    Clusters other = KMeans(segments, options.episodes, MixBits(options.seed) + t).Run();
    if (other.distance < best.distance) best = std::move(other);
  }
  // Numbered by first segment. Clusters without rows, as equal rows make them, are left out.
  constexpr uint32_t kUnseen = ~0u;
  std::vector<uint32_t> number(options.episodes, kUnseen);
  Episodes episodes;
  uint32_t next = 0;
  for (const uint32_t cluster : best.of_row) {
    if (number[cluster] == kUnseen) {
      number[cluster] = next++;
      const auto first = best.centroids.begin() + static_cast<ptrdiff_t>(cluster * segments.dim);
      episodes.centroids.insert(episodes.centroids.end(), first,
                                first + static_cast<ptrdiff_t>(segments.dim));
    }
    episodes.of_segment.push_back(number[cluster]);
  }
  for (uint32_t episode = 0; episode < next; ++episode) {
    episodes.prompts.push_back(PromptOf(segments, episodes, episode, options.prompt_segments));
  }
  return episodes;
}

absl::StatusOr<NearEpisode> NearestEpisode(const Embeddings& centroids, absl::Span<const double> question) {
  RETURN_IF_ERROR(CheckEmbeddings("centroids", centroids));
  RETURN_IF_ERROR(CheckEmbeddings("question", {.values = question, .dim = question.size()}));
  if (question.size() != centroids.dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("the question has dimension ", question.size(), ", the centroids ", centroids.dim));
  }
  const auto dot = [](absl::Span<const double> a, absl::Span<const double> b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  NearEpisode nearest = {.cosine = -std::numeric_limits<double>::infinity()};
  for (uint32_t episode = 0; episode < centroids.rows(); ++episode) {
    const absl::Span<const double> centroid = centroids.Row(episode);
    const double lengths = std::sqrt(dot(centroid, centroid)) * std::sqrt(dot(question, question));
    const double cosine = lengths > 0 ? dot(centroid, question) / lengths : 0;
    if (cosine > nearest.cosine) nearest = {.episode = episode, .cosine = cosine};
  }
  return nearest;
}

}  // namespace kvpool::scorers
