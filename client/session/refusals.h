// What becomes of what the daemon refuses, verb by verb, so that no refusal is silent. All that concern
// blocks, and all that no call waits for, are counted (SessionCounters::refused).
//
//   kCaller        the call that waits for the answer gets it
//   kRecorded      nobody waits: Session::TakeRefusals has it
//   kEndsSession   nobody waits, and the engine's books and the daemon's differ: going on could use a block that
//                  another session has by now, or keep one for ever. The session ends, and says why
//   kHarmless      the verb is advice
#ifndef KVPOOL_CLIENT_SESSION_REFUSALS_H_
#define KVPOOL_CLIENT_SESSION_REFUSALS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <vector>

#include "client/refusal.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/mutex.h"

namespace kvpool {

enum class RefusalFate { kCaller, kRecorded, kEndsSession, kHarmless };

struct RefusalRule {
  std::string_view verb;
  RefusalFate whole;   // The operation was refused: nothing of it was applied.
  RefusalFate blocks;  // It was applied, but not to some of its blocks.
  std::string_view why;
};
// The rule of a verb that travels on the Step stream.
const RefusalRule& RefusalRuleOf(v1::Operation::VerbCase verb);

// How many of the operation's blocks were refused, when it was applied to the others.
uint64_t RefusedBlocks(const v1::OperationResult& result);
// The first of them, in words.
absl::Status WhyRefused(const v1::OperationResult& result);

// Refusals that nobody waited for, until somebody takes them. The newest are kept. Thread-safe.
class RefusalRecord {
 public:
  static constexpr size_t kKept = 64;

  void Add(Refusal refusal) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<Refusal> Take() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  std::deque<Refusal> refusals_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_REFUSALS_H_
