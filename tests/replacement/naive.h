// A naive twin of each policy, written to be obviously right: it walks lists and compares tuples.
#ifndef KVPOOL_TESTS_REPLACEMENT_NAIVE_H_
#define KVPOOL_TESTS_REPLACEMENT_NAIVE_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string_view>

#include "server/replacement/policy.h"

namespace kvpool {

class NaivePolicy {
 public:
  virtual ~NaivePolicy() = default;
  virtual void Insert(uint32_t block, const Content& content) = 0;
  virtual void Hit(uint32_t block) {}
  virtual void Hint(uint32_t block, const UseHint& hint) {}
  virtual void Score(uint32_t block, float score) {}
  virtual void Used(uint32_t block) {}
  virtual void Evict(uint32_t block) = 0;
  virtual uint32_t Victim() = 0;

  std::set<uint32_t> offered;
  uint64_t now_ms = 0;  // the time of the call
};

// Null if there is none of that name.
std::unique_ptr<NaivePolicy> MakeNaive(std::string_view name, const PolicyOptions& options);

// Plays the policy and its naive twin and aborts on the first victim on which they differ.
std::unique_ptr<ReplacementPolicy> WithTwin(std::unique_ptr<ReplacementPolicy> policy,
                                            std::unique_ptr<NaivePolicy> naive);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_REPLACEMENT_NAIVE_H_
