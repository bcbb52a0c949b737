// Who holds what, as engines know it from the daemon's answers alone: the oracle against two owners of a block.
//
//   a hold begins   when an answer gives it
//   it ends         when its release is sent, or when an operation that may release it is; when the session's close is
//                   answered; when the last process of the session is dead
//
// A session whose verbs are not all understood, or heard the end of, is not followed any more (Ignore).
//
// So this never counts a hold that the daemon has not given, and a block that somebody here holds must never be leased.
#ifndef KVPOOL_TESTS_FUZZ_HOLDINGS_H_
#define KVPOOL_TESTS_FUZZ_HOLDINGS_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "proto/support/block_ref.h"
#include "proto/support/check.h"

namespace kvpool::fuzz {

class Holdings {
 public:
  // A block of `space` is answered as leased to `session`.
  void Lease(uint64_t session, uint64_t space, uint64_t ref) {
    const uint32_t id = Index(BlockRef::Unpack(ref).id);
    KVPOOL_CHECK(id != 0, "session %lu was leased the null block", session);
    for (const auto& [holder, blocks] : holds_) {
      const auto it = blocks.find({space, id});
      KVPOOL_CHECK(it == blocks.end(),
                   "block %u of space %lu was leased to session %lu; session %lu has %u holds on it", id,
                   space, session, holder, it->second);
    }
    Add(session, space, ref);
  }
  void Add(uint64_t session, uint64_t space, uint64_t ref) {
    if (ref != 0 && !ignored_.contains(session)) ++holds_[session][{space, Index(BlockRef::Unpack(ref).id)}];
  }
  bool Has(uint64_t session, uint64_t space, uint64_t ref) const {
    const auto held = holds_.find(session);
    return held != holds_.end() && held->second.contains({space, Index(BlockRef::Unpack(ref).id)});
  }
  // One hold fewer; false: there was none.
  bool Drop(uint64_t session, uint64_t space, uint64_t ref) {
    auto& blocks = holds_[session];
    const auto it = blocks.find({space, Index(BlockRef::Unpack(ref).id)});
    if (it == blocks.end()) return false;
    if (--it->second == 0) blocks.erase(it);
    return true;
  }
  void DropAll(uint64_t session, uint64_t space, uint64_t ref) {
    holds_[session].erase({space, Index(BlockRef::Unpack(ref).id)});
  }
  void End(uint64_t session) { holds_.erase(session); }
  void Ignore(uint64_t session) {
    End(session);
    ignored_.insert(session);
  }

 private:
  std::set<uint64_t> ignored_;
  std::map<uint64_t, std::map<std::pair<uint64_t, uint32_t>, uint32_t>>
      holds_;  // session -> (space, block) -> holds
};

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_HOLDINGS_H_
