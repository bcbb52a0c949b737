// Verbs of one session that wait: for a step that every rank member must pass, or behind such a verb on the
// same block.
//
//   due(verb) = max(its own `after`, due of the last parked verb on each of its blocks)
//
// Verbs leave in order of (due, arrival). Two verbs on one block therefore keep their order: the later one is
// due no earlier. A parked verb has changed nothing; dropping it is as if it never came.
// Not thread-safe: under the space's mutex.
#ifndef KVPOOL_SERVER_PARKED_VERBS_H_
#define KVPOOL_SERVER_PARKED_VERBS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvpool/v1/engine.pb.h"

namespace kvpool {

class Member;

// The blocks that an operation names; none for lease, match, fence and the verbs of the session.
const google::protobuf::RepeatedField<uint64_t>& BlocksOf(const v1::Operation& operation);

using Waiter = std::function<void(const v1::OperationResult&)>;

struct ParkedVerb {
  Member* member = nullptr;  // Who asked.
  uint64_t sequence = 0;
  uint32_t index = 0;
  v1::Operation operation;
  bool on_stream = false;       // Its result is a Completion.
  std::vector<Waiter> waiters;  // Unary calls that wait for it.
};

class ParkedVerbs {
 public:
  // Blocks named by parked verbs plus the verbs: bounds memory of a session whose members report no fence.
  static constexpr size_t kMaxNames = 65536;

  bool empty() const { return by_due_.empty(); }
  size_t size() const { return by_due_.size(); }
  // Blocks named, and one for each verb.
  size_t names() const { return names_; }

  // The step that `operation` has to wait for; 0: none.
  uint64_t Due(const v1::Operation& operation) const {
    if (last_.empty()) return operation.after();
    return DueBehindOthers(operation);
  }
  void Park(uint64_t due, ParkedVerb verb);
  // The next verb that is due once `passed` is; nothing: all wait.
  std::optional<ParkedVerb> Pop(uint64_t passed);
  // Whatever is there, for a session that ends.
  std::optional<ParkedVerb> PopAny();
  // The verb of this call, to wait for it as well; null: it is not here.
  ParkedVerb* Find(const Member* member, uint64_t sequence, uint32_t index);

 private:
  struct LastOnBlock {
    uint64_t due = 0;
    uint32_t verbs = 0;
  };
  uint64_t DueBehindOthers(const v1::Operation& operation) const;
  ParkedVerb Take(std::multimap<uint64_t, ParkedVerb>::iterator it);

  std::multimap<uint64_t, ParkedVerb> by_due_;
  absl::flat_hash_map<uint32_t, LastOnBlock> last_;  // By block id.
  size_t names_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_PARKED_VERBS_H_
