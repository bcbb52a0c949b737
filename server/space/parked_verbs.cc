#include "server/space/parked_verbs.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "proto/support/block_ref.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

// So many refs are looked at in one turn: some 0.3 ms.
constexpr size_t kLateSlice = 4096;

// Does the verb wait behind others on its blocks?
bool KeepsOrder(const v1::Operation& operation) { return !operation.has_touch() && !operation.has_ref(); }

}  // namespace

// ----------------------------------------------------------------------------------------- waiting for a step

uint64_t ParkedVerbs::DueBehindOthers(const v1::Operation& operation) const {
  uint64_t due = operation.after();
  if (!KeepsOrder(operation)) return due;
  ForEachBlock(operation, [&](uint32_t block) {
    const auto it = last_.find(block);
    if (it != last_.end()) due = std::max(due, it->second.due);
  });
  return due;
}

void ParkedVerbs::Park(uint64_t due, ParkedVerb verb) {
  ForEachBlock(verb.operation, [&](uint32_t block) {
    LastOnBlock& last = last_[block];
    last.due = std::max(last.due, due);
    ++last.verbs;
  });
  Add(verb.operation);
  by_due_.emplace(due, std::move(verb));
}

ParkedVerb ParkedVerbs::Take(std::multimap<uint64_t, ParkedVerb>::iterator it) {
  ParkedVerb verb = std::move(it->second);
  by_due_.erase(it);
  ForEachBlock(verb.operation, [&](uint32_t block) {
    const auto last = last_.find(block);
    if (--last->second.verbs == 0) last_.erase(last);
  });
  Subtract(verb.operation);
  return verb;
}

std::optional<ParkedVerb> ParkedVerbs::Pop(uint64_t passed) {
  while (!by_due_.empty() && by_due_.begin()->first <= passed) {
    ParkedVerb verb = Take(by_due_.begin());
    if (!HeldUp(verb.operation)) return verb;
    ParkBehind(std::move(verb));
  }
  return std::nullopt;
}

std::optional<ParkedVerb> ParkedVerbs::PopAny() {
  if (!by_due_.empty()) return Take(by_due_.begin());
  for (std::deque<ParkedVerb>* verbs : {&readmitted_, &behind_}) {
    if (verbs->empty()) continue;
    ParkedVerb verb = std::move(verbs->front());
    verbs->pop_front();
    if (verbs == &behind_) Open(verb.operation);
    Subtract(verb.operation);
    return verb;
  }
  return std::nullopt;
}

std::vector<ParkedVerb> ParkedVerbs::PopSome(size_t count) {
  std::vector<ParkedVerb> verbs;
  while (verbs.size() < count) {
    std::optional<ParkedVerb> verb = PopAny();
    if (!verb.has_value()) break;
    verbs.push_back(*std::move(verb));
  }
  return verbs;
}

ParkedVerb* ParkedVerbs::Find(const Member* member, uint64_t sequence, uint32_t index) {
  const auto is_it = [&](const ParkedVerb& verb) {
    return verb.member == member && verb.sequence == sequence && verb.index == index;
  };
  for (auto& [due, verb] : by_due_) {
    if (is_it(verb)) return &verb;
  }
  for (auto& [id, running] : running_) {
    if (is_it(running.verb)) return &running.verb;
  }
  for (ParkedVerb& verb : behind_) {
    if (is_it(verb)) return &verb;
  }
  return nullptr;
}

// ------------------------------------------------------------------------------------- running, and behind it

bool ParkedVerbs::BehindGate(const v1::Operation& operation) const {
  if (!KeepsOrder(operation)) return false;
  bool behind = false;
  ForEachBlock(operation, [&](uint32_t block) { behind = behind || gates_.contains(block); });
  return behind;
}

bool ParkedVerbs::AnyOnDevice(absl::Span<const BlockRef> blocks) const {
  if (running_.empty()) return false;
  absl::flat_hash_set<uint32_t> used;
  for (const auto& [id, running] : running_) used.insert(running.blocks.begin(), running.blocks.end());
  return std::any_of(blocks.begin(), blocks.end(),
                     [&used](BlockRef ref) { return used.contains(Index(ref.id)); });
}

void ParkedVerbs::ParkBehind(ParkedVerb verb) {
  ForEachBlock(verb.operation, [&](uint32_t block) { ++gates_[block]; });
  Add(verb.operation);
  behind_.push_back(std::move(verb));
}

void ParkedVerbs::Start(uint64_t id, ParkedVerb verb, std::vector<uint32_t> blocks, size_t named) {
  for (const uint32_t block : blocks) ++gates_[block];
  ++on_device_.verbs;
  on_device_.blocks += named;
  const bool is_new = running_.emplace(id, Running{std::move(verb), std::move(blocks), named}).second;
  KVPOOL_CHECK(is_new, "device operation %lu runs twice", id);
}

ParkedVerb ParkedVerbs::Finish(uint64_t id) {
  const auto it = running_.find(id);
  KVPOOL_CHECK(it != running_.end(), "device operation %lu does not run", id);
  Running running = std::move(it->second);
  running_.erase(it);
  for (const uint32_t block : running.blocks) Open(block);
  --on_device_.verbs;
  on_device_.blocks -= running.named;
  return std::move(running.verb);
}

void ParkedVerbs::Add(const v1::Operation& operation) {
  Tally& tally = IsDeviceOperation(operation.verb_case()) ? on_device_ : on_host_;
  ++tally.verbs;
  tally.blocks += WeightOf(operation);
}

void ParkedVerbs::Subtract(const v1::Operation& operation) {
  Tally& tally = IsDeviceOperation(operation.verb_case()) ? on_device_ : on_host_;
  --tally.verbs;
  tally.blocks -= WeightOf(operation);
}

v1::Release ParkedVerbs::TakeLate(uint64_t passed) {
  return late_.Take(passed, kLateSlice, [this](uint32_t block) { return gates_.contains(block); });
}

void ParkedVerbs::BeginReadmission() {
  KVPOOL_CHECK(readmitted_.empty(), "%zu verbs are being readmitted", readmitted_.size());
  for (const ParkedVerb& verb : behind_) Open(verb.operation);
  readmitted_.swap(behind_);
}

std::optional<ParkedVerb> ParkedVerbs::NextReadmitted() {
  while (!readmitted_.empty()) {
    ParkedVerb verb = std::move(readmitted_.front());
    readmitted_.pop_front();
    Subtract(verb.operation);
    if (!HeldUp(verb.operation)) return verb;
    ParkBehind(std::move(verb));
  }
  return std::nullopt;
}

void ParkedVerbs::Open(const v1::Operation& operation) {
  ForEachBlock(operation, [&](uint32_t block) { Open(block); });
}

void ParkedVerbs::Open(uint32_t block) {
  const auto it = gates_.find(block);
  if (--it->second == 0) gates_.erase(it);
}

}  // namespace kvpool
