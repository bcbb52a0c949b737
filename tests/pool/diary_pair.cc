// Applies an entry to the pool and to its model, and compares them.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/replacement/policy.h"
#include "tests/pool/diary.h"
#include "tests/replacement/naive.h"

namespace kvpool::diary {
namespace {

PoolOptions WithGhosts(PoolOptions options) {
  // Enough that the pool forgets nothing that the model remembers.
  options.ghosts = 1 << 14;
  return options;
}

// Those of a diary make the largest pool's tables grow until it is half over.
constexpr uint32_t kEntriesPerBucket = 64;

std::string Differ(std::string_view what, uint64_t pool, uint64_t model) {
  if (pool == model) return "";
  return absl::StrCat(absl::string_view(what.data(), what.size()), ": ", pool, ", the model has ", model);
}

// The policy, with its naive twin where it has one.
std::unique_ptr<ReplacementPolicy> PolicyOf(const Setting& setting, std::string_view name) {
  const PolicyOptions options = {.max_blocks = setting.options.max_blocks};
  std::unique_ptr<ReplacementPolicy> policy = *MakeReplacementPolicy(name, options);
  std::unique_ptr<NaivePolicy> naive = MakeNaive(name, options);
  return naive == nullptr ? std::move(policy) : WithTwin(std::move(policy), std::move(naive));
}

std::vector<uint32_t> BlocksOf(const std::vector<Eviction>& log) {
  std::vector<uint32_t> blocks;
  for (const Eviction& eviction : log) blocks.push_back(Index(eviction.block));
  return blocks;
}

}  // namespace

Pair::Pair(const Setting& setting)
    : setting_(setting),
      pool_(WithGhosts(setting.options), PolicyOf(setting, setting.policy)),
      model_(WithGhosts(setting.options)) {
  model_.has_choices = setting.switches || setting.policy != "lru";
  Do(Grow{.blocks = setting.blocks});
  for (uint32_t g = 0; g < setting.options.windows.size(); ++g) {
    for (uint32_t n = 1; n < 1u << setting.key_depth; ++n) keys_.push_back({g, n});
    for (uint32_t n = 0; n < kAliases; ++n) keys_.push_back({g, kFirstAlias + n});
  }
}

std::string Pair::Apply(const Entry& entry) {
  // The tables grow between any two verbs, bucket by bucket, for blocks that may come.
  if (++entries_ % kEntriesPerBucket == 0) pool_.Prepare(setting_.options.max_blocks, 1);
  const std::string difference = std::visit([this](const auto& e) { return Do(e); }, entry);
  return difference.empty() ? TakeOver() : difference;
}

Pair::~Pair() {
  if (hand_over_ != nullptr) hand_over_->GiveUp(&pool_);
}

std::string Pair::Do(const Open& e) {
  const SessionLimits limits = {.guaranteed = e.guaranteed, .max_blocks = e.max_blocks};
  const absl::StatusOr<Holder> holder = pool_.AddSession(limits, e.coming);
  const int expected = model_.AddSession(limits, e.coming);
  const int slot = holder.ok() ? static_cast<int>(*holder) : -1;
  return slot == expected ? "" : absl::StrCat("session ", slot, ", the model has ", expected);
}

std::string Pair::Do(const Promise& e) {
  return Differ("whole", pool_.Promise(Holder{static_cast<uint16_t>(e.session)}), model_.Promise(e.session));
}

std::string Pair::Do(const Lease& e) {
  std::vector<BlockRef> blocks, expected_blocks;
  const LeaseOutcome outcome =
      pool_.Lease(Holder{static_cast<uint16_t>(e.session)}, model_.now, e.count, e.min, &blocks);
  const std::vector<Eviction> log = pool_.TakeDirectEvictions();
  model_.choices = BlocksOf(log);
  const LeaseOutcome expected = model_.Lease(e.session, e.count, e.min, &expected_blocks);
  if (outcome.leased != expected.leased || outcome.shortfall != expected.shortfall ||
      blocks != expected_blocks) {
    return absl::StrCat("leased ", Text(blocks), " shortfall ", static_cast<int>(outcome.shortfall),
                        ", the model has ", Text(expected_blocks), " shortfall ",
                        static_cast<int>(expected.shortfall));
  }
  const std::vector<uint32_t> evicted = std::exchange(model_.direct_evictions, {});
  return DifferenceOfLog(log, evicted);
}

std::string Pair::Do(const Seal& e) {
  std::vector<std::vector<BlockKey>> keys;
  for (const Seal::Entry& entry : e.entries) {
    keys.emplace_back();
    for (const uint32_t number : entry.keys) keys.back().push_back(ToBlockKey({entry.group, number}));
  }
  std::vector<SealEntry> entries;
  for (size_t i = 0; i < e.entries.size(); ++i) {
    entries.push_back({e.entries[i].block, keys[i], e.entries[i].leave_duplicate});
  }
  std::vector<SealVerdict> outcomes(entries.size());
  const BlockKey parent = ToBlockKey(e.parent);
  pool_.Seal(Holder{static_cast<uint16_t>(e.session)}, model_.now, e.parent.number == 0 ? nullptr : &parent,
             entries, absl::MakeSpan(outcomes));

  uint32_t in_front = model_.Find(e.parent);
  for (size_t i = 0; i < entries.size(); ++i) {
    std::vector<ModelKey> model_keys;
    for (const uint32_t number : e.entries[i].keys) model_keys.push_back({e.entries[i].group, number});
    const SealVerdict expected =
        model_.SealOne(e.session, e.entries[i].block, model_keys, e.entries[i].leave_duplicate, in_front);
    if (outcomes[i].verdict != expected.verdict || outcomes[i].canonical != expected.canonical) {
      return absl::StrCat("entry ", i, " verdict ", static_cast<int>(outcomes[i].verdict), " ",
                          Text(outcomes[i].canonical), ", the model has ", static_cast<int>(expected.verdict),
                          " ", Text(expected.canonical));
    }
    in_front = model_keys.empty() ? 0 : model_.Find(model_keys.back());
  }
  return "";
}

std::string Pair::Do(const Match& e) {
  std::vector<std::vector<BlockKey>> keys;
  std::vector<GroupQuery> queries;
  for (const Model::Query& q : e.queries) {
    keys.emplace_back();
    for (const uint32_t number : q.numbers) keys.back().push_back(ToBlockKey({q.group, number}));
  }
  for (size_t q = 0; q < keys.size(); ++q) {
    queries.push_back({e.queries[q].group, keys[q], e.queries[q].tokens_per_block});
  }
  MatchOutcome outcome;
  pool_.Match(Holder{static_cast<uint16_t>(e.session)}, model_.now, queries, &outcome);
  const MatchOutcome expected = model_.Match(e.session, e.queries);
  for (size_t q = 0; q < queries.size(); ++q) {
    if (outcome.blocks[q] != expected.blocks[q]) {
      return absl::StrCat("query ", q, " ", Text(outcome.blocks[q]), ", the model has ",
                          Text(expected.blocks[q]));
    }
  }
  if (outcome.miss != expected.miss) {
    return absl::StrCat("miss ", static_cast<int>(outcome.miss), ", the model has ",
                        static_cast<int>(expected.miss));
  }
  return Differ("tokens", outcome.tokens, expected.tokens);
}

std::string Pair::Do(const Release& e) {
  std::vector<Verdict> verdicts(e.blocks.size());
  pool_.Release(Holder{static_cast<uint16_t>(e.session)}, model_.now, e.hint, e.blocks,
                absl::MakeSpan(verdicts));
  for (size_t i = e.blocks.size(); i-- > 0;) {
    const Verdict expected = model_.Release(e.session, e.blocks[i], e.hint.reuse == Reuse::kNever);
    if (verdicts[i] != expected)
      return Differ("verdict", static_cast<int>(verdicts[i]), static_cast<int>(expected));
  }
  return "";
}

std::string Pair::Do(const Ref& e) {
  std::vector<Verdict> verdicts(e.blocks.size());
  pool_.Ref(Holder{static_cast<uint16_t>(e.session)}, e.blocks, absl::MakeSpan(verdicts));
  for (size_t i = 0; i < e.blocks.size(); ++i) {
    const Verdict expected = model_.Ref(e.session, e.blocks[i]);
    if (verdicts[i] != expected)
      return Differ("verdict", static_cast<int>(verdicts[i]), static_cast<int>(expected));
  }
  return "";
}

std::string Pair::Do(const Touch& e) {
  uint32_t expected = 0;
  for (size_t i = e.blocks.size(); i-- > 0;) expected += model_.Touch(e.blocks[i]) ? 1 : 0;
  return Differ("touched", pool_.Touch(model_.now, e.blocks), expected);
}

std::string Pair::Do(const Pin& e) {
  std::vector<Verdict> verdicts(e.blocks.size());
  pool_.Pin(model_.now, model_.now + e.ttl, e.blocks, absl::MakeSpan(verdicts));
  for (size_t i = 0; i < e.blocks.size(); ++i) {
    const Verdict expected = model_.Pin(e.blocks[i], model_.now + e.ttl);
    if (verdicts[i] != expected)
      return Differ("verdict", static_cast<int>(verdicts[i]), static_cast<int>(expected));
  }
  return "";
}

std::string Pair::Do(const Unpin& e) {
  uint32_t expected = 0;
  for (size_t i = e.blocks.size(); i-- > 0;) expected += model_.Unpin(e.blocks[i]) ? 1 : 0;
  return Differ("unpinned", pool_.Unpin(e.blocks), expected);
}

std::string Pair::Do(const SetRetention& e) {
  std::vector<Verdict> verdicts(e.blocks.size());
  const Retention retention = {
      .priority = e.priority, .until = model_.now + e.ttl, .half_life_ms = e.half_life};
  pool_.SetRetention(model_.now, retention, e.blocks, absl::MakeSpan(verdicts));
  for (size_t i = 0; i < e.blocks.size(); ++i) {
    const Verdict expected = model_.SetRetention(e.blocks[i], retention);
    if (verdicts[i] != expected)
      return Differ("verdict", static_cast<int>(verdicts[i]), static_cast<int>(expected));
  }
  return "";
}

std::string Pair::Do(const SetScores& e) {
  uint32_t expected = 0;
  for (const BlockRef& block : e.blocks) expected += model_.SetScore(block) ? 1 : 0;
  return Differ("scored", pool_.SetScores(model_.now, e.blocks, e.scores), expected);
}

std::string Pair::Do(const Expire&) {
  pool_.Expire(model_.now);
  model_.Expire();
  return "";
}

std::string Pair::Do(const Reclaim& e) {
  std::vector<Eviction> log;
  std::vector<uint32_t> expected_log;
  const uint32_t freed = pool_.Reclaim(model_.now, e.count, EvictReason::kBackground, &log);
  model_.choices = BlocksOf(log);
  const uint32_t expected = model_.Reclaim(e.count, EvictReason::kBackground, &expected_log);
  const std::string difference = DifferenceOfLog(log, expected_log);
  return difference.empty() ? Differ("freed", freed, expected) : difference;
}

std::string Pair::Do(const ReclaimVictims& e) {
  std::vector<Eviction> log;
  std::vector<uint32_t> expected_log;
  const uint32_t freed = pool_.Reclaim(model_.now, e.victims, EvictReason::kOperator, &log);
  const uint32_t expected = model_.Reclaim(e.victims, EvictReason::kOperator, &expected_log);
  const std::string difference = DifferenceOfLog(log, expected_log);
  return difference.empty() ? Differ("freed", freed, expected) : difference;
}

std::string Pair::Do(const End& e) {
  pool_.EndSession(Holder{static_cast<uint16_t>(e.session)});
  model_.EndSession(e.session);
  return "";
}

std::string Pair::Do(const FreeQuarantine& e) {
  if (e.session >= static_cast<int>(model_.sessions.size()) || model_.open(e.session))
    return "";  // REQUIRES.
  return Differ("holds ended", pool_.FreeQuarantine(Holder{static_cast<uint16_t>(e.session)}),
                model_.FreeQuarantine(e.session));
}

std::string Pair::Do(const Grow& e) {
  return Differ("grown", pool_.Grow(e.blocks).ok(), model_.Grow(e.blocks));
}

std::string Pair::Do(const Enter& e) {
  return Differ("entered", pool_.Enter(e.range).ok(), model_.Enter(e.range));
}

std::string Pair::Do(const Vacate& e) {
  while (pool_.PutBack(5)) {
  }
  model_.PutBack(UINT32_MAX);
  for (uint32_t b = e.range.first; b < e.range.end; ++b) {
    if (b >= model_.end_block() || !model_.blocks[b].there) return "";
  }
  pool_.Vacate(e.range);
  while (!pool_.NoteChildren(3)) {
  }
  model_.Vacate(e.range);
  return "";
}

std::string Pair::Do(const PutBack& e) {
  return Differ("to be put back", pool_.PutBack(e.most), model_.PutBack(e.most));
}

std::string Pair::Do(const Withhold& e) {
  pool_.Withhold(e.most);
  model_.Withhold(e.most);
  return "";
}

std::string Pair::Do(const Shrink&) { return Differ("shrunk", pool_.Shrink(), model_.Shrink()); }

std::string Pair::Do(const Move& e) {
  if (hand_over_ != nullptr) return "";  // Then none moves.
  const bool moved =
      pool_.Move(Holder{static_cast<uint16_t>(e.session)}, model_.now, e.from, e.to, UINT32_MAX);
  return Differ("moved", moved, model_.Move(e.session, e.from, e.to));
}

// An LRU that takes over from an LRU keeps the order, so the model need not know of it. Every other time the
// hand-over goes on during the diary's next entries.
std::string Pair::Do(const SetPolicy& e) {
  if (hand_over_ != nullptr) return "";
  before_ = std::string(pool_.policy().name());
  after_ = e.policy;
  if (model_.now % 2 == 0) {
    stage_ = Stage::kCopy;
    hand_over_ = std::make_unique<BlockPool::HandOver>(
        BlockPool::HandOver::Options{.max_blocks = setting_.options.max_blocks},
        PolicyOf(setting_, e.policy));
    return "";
  }
  const std::unique_ptr<ReplacementPolicy> old = pool_.SetPolicy(model_.now, PolicyOf(setting_, e.policy));
  return old->name() == before_ && pool_.policy().name() == after_ ? "" : "another policy";
}

std::string Pair::TakeOver() {
  if (hand_over_ == nullptr) return "";
  if (pool_.policy().name() != before_) return "a new policy before its time";
  switch (stage_) {
    case Stage::kCopy:
      if (hand_over_->Copy(&pool_, model_.now, 3)) stage_ = Stage::kBuild;
      return "";
    case Stage::kBuild:
      hand_over_->Build();
      stage_ = Stage::kFinish;
      return "";
    case Stage::kFinish: {
      const std::unique_ptr<ReplacementPolicy> old = hand_over_->Finish(&pool_, 4);
      if (old == nullptr) {
        stage_ = Stage::kCatchUp;
        return "";
      }
      hand_over_.reset();
      return old->name() == before_ && pool_.policy().name() == after_ ? "" : "another policy";
    }
    case Stage::kCatchUp:
      hand_over_->CatchUp();
      stage_ = Stage::kFinish;
      return "";
  }
  return "";
}

std::string Pair::Do(const Advance& e) {
  model_.now += e.by;
  return "";
}

// ---------------------------------------------------------------------------------------------- comparing

std::string Pair::DifferenceOfLog(const std::vector<Eviction>& log,
                                  const std::vector<uint32_t>& expected) const {
  const std::vector<uint32_t> blocks = BlocksOf(log);
  return blocks == expected ? "" : absl::StrCat("evicted ", Text(blocks), ", the model has ", Text(expected));
}

std::string Pair::DifferenceOfBlock(uint32_t b) const {
  const Model::Block& block = model_.blocks[b];
  const absl::StatusOr<BlockView> found = pool_.View(BlockId{b}, model_.now);
  if (!found.ok()) return block.there ? absl::StrCat("block ", b, " is not there") : "";
  if (!block.there) return absl::StrCat("block ", b, " is there");
  const BlockView& view = *found;
  std::string d = Differ("generation", view.ref.generation, block.generation);
  if (d.empty()) d = Differ("state", static_cast<int>(view.state), static_cast<int>(block.state));
  if (d.empty()) d = Differ("refs", view.refs, model_.refs(b));
  if (d.empty()) d = Differ("parent", Index(view.parent), block.parent);
  if (d.empty()) d = Differ("children", view.children, block.resident() ? model_.children(b) : 0);
  if (d.empty()) d = Differ("pinned", view.pinned, block.pinned);
  if (d.empty()) d = Differ("priority", view.priority, block.standing());
  if (d.empty()) {
    d = Differ("owner", static_cast<uint16_t>(view.owner),
               block.owner < 0 ? static_cast<uint16_t>(kNobody) : static_cast<uint64_t>(block.owner));
  }
  if (d.empty() && block.resident()) {
    d = Differ("age", view.age_ms, model_.now - block.sealed);
    if (d.empty()) d = Differ("idle", view.idle_ms, model_.now - block.accessed);
    if (d.empty() && view.key != ToBlockKey(block.keys[0])) d = "another key";
    for (const ModelKey& key : block.keys) {
      if (d.empty()) d = Differ("block of its key", Index(pool_.Find(ToBlockKey(key)).id), b);
    }
  }
  for (int s = 0; s < static_cast<int>(model_.sessions.size()) && d.empty(); ++s) {
    d = Differ("holds", pool_.holds(Holder{static_cast<uint16_t>(s)}, BlockId{b}), model_.holds(s, b));
  }
  return d.empty() ? "" : absl::StrCat("block ", b, " ", d);
}

std::string Pair::Difference() const {
  std::string d = Differ("capacity", pool_.capacity(), model_.capacity());
  if (d.empty()) d = Differ("end", pool_.end_block(), model_.end_block());
  for (int state = 0; state < kBlockStates && d.empty(); ++state) {
    d = Differ(absl::StrCat("blocks in state ", state), pool_.counts()[state],
               model_.count(static_cast<BlockState>(state)));
  }
  for (uint32_t b = 1; b < model_.end_block() && d.empty(); ++b) d = DifferenceOfBlock(b);
  if (d.empty()) d = Differ("available", pool_.available(), model_.available());
  if (d.empty()) d = Differ("promised", pool_.promised(), model_.promised());
  if (d.empty() && model_.available() < model_.promised()) d = "a promise is broken";
  if (d.empty()) d = Differ("protected", pool_.pinned(), model_.budgeted());
  const PoolCounters& p = pool_.counters();
  const PoolCounters& m = model_.counters;
  if (d.empty()) d = Differ("leased", p.leased, m.leased);
  if (d.empty()) d = Differ("sealed", p.sealed, m.sealed);
  if (d.empty()) d = Differ("deduplicated", p.deduplicated, m.deduplicated);
  if (d.empty()) d = Differ("released", p.released, m.released);
  if (d.empty()) d = Differ("refused_stale", p.refused_stale, m.refused_stale);
  if (d.empty()) d = Differ("lookups", p.lookups, m.lookups);
  if (d.empty()) d = Differ("lookup_blocks", p.lookup_blocks, m.lookup_blocks);
  if (d.empty()) d = Differ("hit_blocks", p.hit_blocks, m.hit_blocks);
  if (d.empty()) d = Differ("lookup_tokens", p.lookup_tokens, m.lookup_tokens);
  if (d.empty()) d = Differ("hit_tokens", p.hit_tokens, m.hit_tokens);
  if (d.empty()) d = Differ("regret", p.regret, m.regret);
  if (d.empty()) d = Differ("moved", p.moved, m.moved);
  for (int reason = 0; reason < kEvictReasons && d.empty(); ++reason) {
    d = Differ("evicted", p.evicted[reason], m.evicted[reason]);
  }
  for (int s = 0; s < static_cast<int>(model_.sessions.size()) && d.empty(); ++s) {
    const Holder holder{static_cast<uint16_t>(s)};
    const BlockPool::Holdings holdings = pool_.holdings(holder);
    d = Differ("charged", holdings.charged, model_.charged(s));
    if (d.empty()) d = Differ("held", holdings.leased + holdings.referenced, model_.held(s));
    if (d.empty()) d = Differ("unmet", pool_.unmet(holder), model_.unmet(s));
    if (d.empty()) d = Differ("all holds", pool_.holds(holder), model_.all_holds(s));
    if (d.empty()) d = Differ("guaranteed_free", pool_.guaranteed_free(holder), model_.unused(s));
  }
  return d;
}

// Compares every key, also those that name nothing.
std::string Pair::DifferenceOfKeys() const {
  for (const ModelKey& key : keys_) {
    const BlockKey block_key = ToBlockKey(key);
    const uint32_t expected = model_.Find(key);
    const std::string d = Differ("block of a key", Index(pool_.Find(block_key).id), expected);
    if (!d.empty()) return absl::StrCat("group ", key.group, " key ", key.number, " ", d);
    const absl::StatusOr<uint32_t> ago = pool_.EvictedAgo(block_key, model_.now);
    const auto it = model_.evicted.find(key);
    const bool gone = expected == 0 && it != model_.evicted.end();
    if (ago.ok() != gone || (gone && *ago != model_.now - it->second.first)) {
      return absl::StrCat("group ", key.group, " key ", key.number, " eviction");
    }
  }
  return "";
}

}  // namespace kvpool::diary
