// Where a match would end by what is resident, looked up part by part, so that nobody waits for all of it. It holds
// nothing and counts nothing: what it has found may be gone when it is asked for.
#ifndef KVPOOL_SERVER_POOL_MATCH_SEARCH_H_
#define KVPOOL_SERVER_POOL_MATCH_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_types.h"

namespace kvpool {

class MatchSearch {
 public:
  // The pool, the queries and their keys must live as long. REQUIRES: there is a query, and each is of a group of the pool's.
  MatchSearch(const BlockPool& pool, absl::Span<const GroupQuery> queries);
  ~MatchSearch();
  MatchSearch(const MatchSearch&) = delete;
  MatchSearch& operator=(const MatchSearch&) = delete;

  // A step is the least number of tokens that is a whole number of blocks in every group.
  uint64_t step_tokens() const;
  uint64_t asked_steps() const;
  uint64_t BlocksPerStep(size_t query) const;
  uint32_t window(size_t query) const;  // It is counted in blocks; 0: none.
  // The first block of the query that a prefix of this many steps reads.
  uint64_t First(size_t query, uint64_t steps) const;

  // Looks up some `keys` keys. False: call it again.
  bool Look(uint64_t keys);
  // The most steps that were found in every group, once Look has answered true.
  uint64_t steps() const;
  // Only prefixes of at most so many steps are looked for from here on: Look again.
  void Shorten(uint64_t steps);
  // Why no more than steps() were found.
  MissReason WhyNotLonger();

 private:
  struct Rep;
  const std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_MATCH_SEARCH_H_
