#include "server/space/parked_verbs.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "proto/support/block_ref.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

// So many refs are looked at in one turn: some 0.3 ms.
constexpr size_t kLateSlice = 4096;

size_t NamesOf(const v1::Operation& operation) { return 1 + WeightOf(operation) + NumbersOf(operation); }

// Does the verb wait behind others on its blocks?
bool KeepsOrder(const v1::Operation& operation) { return !operation.has_touch() && !operation.has_ref(); }

}  // namespace

// ----------------------------------------------------------------------------------------- waiting for a step

bool ParkedVerbs::AnyWaitFor(const v1::Operation& operation) const {
  return KeepsOrder(operation) && !(last_.empty() && gates_.empty());
}

ParkedVerbs::Wait ParkedVerbs::WaitOf(const v1::Operation& operation) const {
  Wait wait{.due = operation.after()};
  if (AnyWaitFor(operation)) ForEachBlock(operation, [&](uint32_t block) { Extend(block, &wait); });
  return wait;
}

void ParkedVerbs::Extend(uint32_t block, Wait* wait) const {
  const auto it = last_.find(block);
  if (it != last_.end()) wait->due = std::max(wait->due, it->second.due);
  wait->held_up = wait->held_up || gates_.contains(block);
}

void ParkedVerbs::Name(uint64_t due, absl::Span<const uint32_t> blocks) {
  for (const uint32_t block : blocks) {
    LastOnBlock& last = last_[block];
    last.due = std::max(last.due, due);
    ++last.verbs;
  }
}

void ParkedVerbs::Unname(absl::Span<const uint32_t> blocks) {
  for (const uint32_t block : blocks) {
    const auto last = last_.find(block);
    if (--last->second.verbs == 0) last_.erase(last);
  }
}

void ParkedVerbs::Park(uint64_t due, ParkedVerb verb) {
  Add(verb);
  ParkedVerb& parked = by_due_.emplace(due, std::move(verb))->second;
  by_call_[CallOf(parked)] = &parked;
}

ParkedVerb ParkedVerbs::Take(std::multimap<uint64_t, ParkedVerb>::iterator it) {
  by_call_.erase(CallOf(it->second));
  ParkedVerb verb = std::move(it->second);
  by_due_.erase(it);
  Subtract(verb);
  return verb;
}

std::optional<ParkedVerb> ParkedVerbs::Pop(uint64_t passed) {
  if (by_due_.empty() || by_due_.begin()->first > passed) return std::nullopt;
  return Take(by_due_.begin());
}

std::optional<ParkedVerb> ParkedVerbs::PopAny() {
  if (!by_due_.empty()) return Take(by_due_.begin());
  if (behind_.empty()) return std::nullopt;
  by_call_.erase(CallOf(behind_.begin()->second));
  ParkedVerb verb = std::move(behind_.begin()->second);
  behind_.erase(behind_.begin());
  Subtract(verb);
  return verb;
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
  const auto it = by_call_.find({member, sequence, index});
  return it == by_call_.end() ? nullptr : it->second;
}

// ------------------------------------------------------------------------------------- running, and behind it

bool ParkedVerbs::AnyOnDevice(absl::Span<const BlockRef> blocks) const {
  if (running_.empty()) return false;
  return std::any_of(blocks.begin(), blocks.end(),
                     [this](BlockRef ref) { return on_device_gates_.contains(gates_.first(Index(ref.id))); });
}

void ParkedVerbs::ParkBehind(ParkedVerb verb) {
  if (verb.gate == 0) verb.gate = gates_.Enter();
  if (gates_.may_go(verb.gate)) lacking_.insert(verb.gate);
  Add(verb);
  const BlockGates::Id gate = verb.gate;
  ParkedVerb& parked = behind_.emplace(gate, std::move(verb)).first->second;
  by_call_[CallOf(parked)] = &parked;
}

void ParkedVerbs::Start(uint64_t id, ParkedVerb verb, size_t named) {
  on_device_gates_.insert(verb.gate);
  ++on_device_.verbs;
  on_device_.blocks += named;
  bytes_.Add(verb.bytes);
  const auto [it, is_new] = running_.emplace(id, Running{std::move(verb), named});
  KVPOOL_CHECK(is_new, "device operation %lu runs twice", id);
  by_call_[CallOf(it->second.verb)] = &it->second.verb;
}

ParkedVerb ParkedVerbs::Finish(uint64_t id) {
  const auto it = running_.find(id);
  KVPOOL_CHECK(it != running_.end(), "device operation %lu does not run", id);
  by_call_.erase(CallOf(it->second.verb));
  Running running = std::move(it->second);
  running_.erase(it);
  on_device_gates_.erase(running.verb.gate);
  --on_device_.verbs;
  on_device_.blocks -= running.named;
  bytes_.Subtract(running.verb.bytes);
  return std::move(running.verb);
}

std::vector<ParkedVerb> ParkedVerbs::TakeRunning() {
  std::vector<ParkedVerb> verbs;
  for (auto& [id, running] : running_) {
    --on_device_.verbs;
    on_device_.blocks -= running.named;
    bytes_.Subtract(running.verb.bytes);
    by_call_.erase(CallOf(running.verb));
    verbs.push_back(std::move(running.verb));
  }
  running_.clear();
  return verbs;
}

bool ParkedVerbs::Leave(BlockGates::Id gate, size_t most) {
  // Where its session has ended meanwhile, nobody stands at the gates.
  if (!gates_.stands(gate)) return false;
  std::vector<BlockGates::Id> next;
  const bool more = gates_.Leave(gate, most, &next);
  free_to_go_.insert(next.begin(), next.end());
  return more;
}

void ParkedVerbs::AdmitLacking() {
  free_to_go_.merge(lacking_);
  lacking_.clear();
}

std::optional<ParkedVerb> ParkedVerbs::Admit() {
  while (!free_to_go_.empty()) {
    const BlockGates::Id id = *free_to_go_.begin();
    free_to_go_.erase(free_to_go_.begin());
    // The one that is in front of it now lets it go when it leaves.
    if (!gates_.may_go(id)) continue;
    lacking_.erase(id);
    auto verb = behind_.extract(id);
    if (verb.empty()) continue;
    Subtract(verb.mapped());
    by_call_.erase(CallOf(verb.mapped()));
    return std::move(verb.mapped());
  }
  return std::nullopt;
}

size_t ParkedVerbs::BytesOf(const v1::Operation& operation, uint32_t ranks) {
  // Roughly what the lists and maps that have it take, and the messages beside their bytes.
  constexpr size_t kBytesOfVerb = 512, kBytesOfBlock = 48;
  const bool on_device = IsDeviceOperation(operation.verb_case());
  const size_t of_block = kBytesOfBlock + (on_device ? ranks * sizeof(uint64_t) : 0);
  return kBytesOfVerb + operation.ByteSizeLong() + CountBlocks(operation) * of_block;
}

void ParkedVerbs::Add(const ParkedVerb& verb) {
  Tally& tally = IsDeviceOperation(verb.operation.verb_case()) ? on_device_ : on_host_;
  ++tally.verbs;
  tally.blocks += WeightOf(verb.operation);
  work_.names += NamesOf(verb.operation);
  work_.of_sets += IsOfSets(verb.operation) ? 1 : 0;
  bytes_.Add(verb.bytes);
}

void ParkedVerbs::Subtract(const ParkedVerb& verb) {
  Tally& tally = IsDeviceOperation(verb.operation.verb_case()) ? on_device_ : on_host_;
  --tally.verbs;
  tally.blocks -= WeightOf(verb.operation);
  work_.names -= NamesOf(verb.operation);
  work_.of_sets -= IsOfSets(verb.operation) ? 1 : 0;
  bytes_.Subtract(verb.bytes);
}

v1::Release ParkedVerbs::TakeLate(uint64_t passed) {
  return late_.Take(passed, kLateSlice, [this](uint32_t block) { return gates_.contains(block); });
}

}  // namespace kvpool
