// How long a prefix is resident in every group: the part of a match that only looks. Only server/pool/*.cc include it.
#ifndef KVPOOL_SERVER_POOL_MATCH_LOOKUP_H_
#define KVPOOL_SERVER_POOL_MATCH_LOOKUP_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "server/pool/pool_rep.h"
#include "server/pool/pool_types.h"

namespace kvpool {

// Lengths are counted in steps. A step is the least number of tokens that is a whole number of blocks in
// every group.
class MatchLookup {
 public:
  // Whatever an earlier lookup left in `scratch` is written over.
  MatchLookup(const PoolRep& rep, absl::Span<const GroupQuery> queries, MatchScratch* scratch);

  // False: there is no query, or one that can't be answered. REQUIRES of all others: it answered true.
  bool Measure();
  uint64_t step_tokens() const { return step_tokens_; }
  uint64_t asked_steps() const { return asked_steps_; }
  uint64_t BlocksPerStep(size_t q) const { return scratch_.steps[q]; }
  uint32_t window(size_t q) const { return r_.options.windows[queries_[q].group]; }
  // The first block of query q that a prefix of this many steps reads.
  uint64_t First(size_t q, uint64_t steps) const;

  // Looks up some `keys` keys. False: call it again.
  bool Advance(uint64_t keys);
  // The most steps whose blocks were all found, once Advance has answered true.
  uint64_t steps() const { return steps_; }
  // Where the leading runs of the groups without a window end.
  uint64_t run_steps() const { return run_steps_; }
  // Only prefixes of at most so many steps are looked for from here on: Advance again.
  void Shorten(uint64_t steps) { steps_ = std::min(steps_, steps); }
  // The blocks found of query q: 0 for a key that names none. Good for those that a prefix of steps() reads.
  const std::vector<uint32_t>& found(size_t q) const { return scratch_.found[q]; }
  // Why no more than steps() are resident.
  MissReason WhyNotLonger();

 private:
  static constexpr uint32_t kUnknown = UINT32_MAX;

  void Resolve(size_t q, uint64_t begin, uint64_t end);
  bool LeadingRun(size_t q);
  bool LongestWindowed();
  // Blocks of the query that LongestWindowed has found resident, last: it need not look at them again.
  std::pair<uint64_t, uint64_t>& run(size_t q) { return scratch_.runs[q]; }

  const PoolRep& r_;
  const absl::Span<const GroupQuery> queries_;
  MatchScratch& scratch_;
  uint64_t step_tokens_ = 1, asked_steps_ = 0;
  uint64_t steps_ = 0, run_steps_ = 0;
  size_t leading_ = 0;       // The query whose leading run is looked up.
  uint64_t leading_at_ = 0;  // So many blocks of it were found.
  uint64_t budget_ = 0;      // So many keys may be looked up before Advance returns.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_MATCH_LOOKUP_H_
