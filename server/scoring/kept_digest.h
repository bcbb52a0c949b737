// The digest that the keys of a pruned sequence must chain in: what was pruned, and how.
#ifndef KVPOOL_SERVER_SCORING_KEPT_DIGEST_H_
#define KVPOOL_SERVER_SCORING_KEPT_DIGEST_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool {

// SHA256("kvpool.kept.v1" || policy || u32 parameters || for each, sorted by name: name, value || u32 rows ||
// u32 tokens a row || u32 positions...), where rows that are shorter than the longest end with 2^32 - 1. Strings have their length in front, integers are little-endian. An
// empty `policy` stands for tokens that the engine chose.
std::string KeptDigest(const v1::Policy& policy, uint32_t rows, absl::Span<const uint32_t> positions);
// The same of a compaction. One that merges has this behind it: "merge" || u32 thresholds || f32 thresholds... || f32
// smoothing; one that keeps what leaves in low precision: "low" || u32 bits; one that adds it to a state: "less" || u32 rank ||
// u32 hidden || name of the weights || u32, 1 with a state before, which the keys of the sequence so far stand for.
std::string KeptDigest(const v1::Compact& compact, uint32_t rows, absl::Span<const uint32_t> positions);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SCORING_KEPT_DIGEST_H_
