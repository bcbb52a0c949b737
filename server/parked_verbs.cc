#include "server/parked_verbs.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "proto/support/block_ref.h"

namespace kvpool {

const google::protobuf::RepeatedField<uint64_t>& BlocksOf(const v1::Operation& operation) {
  static const auto* const none = new google::protobuf::RepeatedField<uint64_t>();
  switch (operation.verb_case()) {
    case v1::Operation::kSeal:
      return operation.seal().blocks();
    case v1::Operation::kRelease:
      return operation.release().blocks();
    case v1::Operation::kRef:
      return operation.ref().blocks();
    case v1::Operation::kTouch:
      return operation.touch().blocks();
    case v1::Operation::kPin:
      return operation.pin().blocks();
    case v1::Operation::kUnpin:
      return operation.unpin().blocks();
    case v1::Operation::kSetRetention:
      return operation.set_retention().blocks();
    case v1::Operation::kLease:
    case v1::Operation::kMatch:
    case v1::Operation::kFence:
    case v1::Operation::kWarmupDone:
    case v1::Operation::kCloseSession:
    case v1::Operation::kOpenSession:
    case v1::Operation::kAddMember:
    case v1::Operation::VERB_NOT_SET:
      return *none;
  }
  return *none;
}

uint64_t ParkedVerbs::DueBehindOthers(const v1::Operation& operation) const {
  uint64_t due = operation.after();
  // A touch is advice: it waits for nobody.
  if (operation.has_touch()) return due;
  for (const uint64_t wire : BlocksOf(operation)) {
    const auto it = last_.find(Index(BlockRef::Unpack(wire).id));
    if (it != last_.end()) due = std::max(due, it->second.due);
  }
  return due;
}

void ParkedVerbs::Park(uint64_t due, ParkedVerb verb) {
  const auto& blocks = BlocksOf(verb.operation);
  for (const uint64_t wire : blocks) {
    LastOnBlock& last = last_[Index(BlockRef::Unpack(wire).id)];
    last.due = std::max(last.due, due);
    ++last.verbs;
  }
  names_ += blocks.size() + 1;
  by_due_.emplace(due, std::move(verb));
}

ParkedVerb ParkedVerbs::Take(std::multimap<uint64_t, ParkedVerb>::iterator it) {
  ParkedVerb verb = std::move(it->second);
  by_due_.erase(it);
  const auto& blocks = BlocksOf(verb.operation);
  for (const uint64_t wire : blocks) {
    const auto last = last_.find(Index(BlockRef::Unpack(wire).id));
    if (--last->second.verbs == 0) last_.erase(last);
  }
  names_ -= blocks.size() + 1;
  return verb;
}

std::optional<ParkedVerb> ParkedVerbs::Pop(uint64_t passed) {
  if (by_due_.empty() || by_due_.begin()->first > passed) return std::nullopt;
  return Take(by_due_.begin());
}

std::optional<ParkedVerb> ParkedVerbs::PopAny() { return Pop(std::numeric_limits<uint64_t>::max()); }

ParkedVerb* ParkedVerbs::Find(const Member* member, uint64_t sequence, uint32_t index) {
  for (auto& [due, verb] : by_due_) {
    if (verb.member == member && verb.sequence == sequence && verb.index == index) return &verb;
  }
  return nullptr;
}

}  // namespace kvpool
