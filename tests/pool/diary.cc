#include "tests/pool/diary.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/replacement/policy.h"
#include "tests/replacement/naive.h"

namespace kvpool::diary {
namespace {

// ----------------------------------------------------------------------------------------------- printing

std::string Text(BlockRef ref) {
  return absl::StrCat("{BlockId{", Index(ref.id), "}, ", ref.generation, "}");
}
std::string Text(const std::vector<BlockRef>& refs) {
  return absl::StrCat(
      "{", absl::StrJoin(refs, ", ", [](std::string* out, BlockRef ref) { absl::StrAppend(out, Text(ref)); }),
      "}");
}
std::string Text(const std::vector<uint32_t>& numbers) {
  return absl::StrCat("{", absl::StrJoin(numbers, ", "), "}");
}

struct Printer {
  std::string operator()(const Open& e) const {
    return absl::StrCat("Open{.guaranteed = ", e.guaranteed, ", .max_blocks = ", e.max_blocks, "}");
  }
  std::string operator()(const Lease& e) const {
    return absl::StrCat("Lease{.session = ", e.session, ", .count = ", e.count, ", .min = ", e.min, "}");
  }
  std::string operator()(const Seal& e) const {
    std::string entries = absl::StrJoin(e.entries, ", ", [](std::string* out, const Seal::Entry& entry) {
      absl::StrAppend(out, "{", Text(entry.block), ", ", entry.group, ", ", Text(entry.keys), "}");
    });
    return absl::StrCat("Seal{.session = ", e.session, ", .parent = {", e.parent.group, ", ", e.parent.number,
                        "}, .entries = {", entries, "}}");
  }
  std::string operator()(const Match& e) const {
    std::string queries = absl::StrJoin(e.queries, ", ", [](std::string* out, const Model::Query& q) {
      absl::StrAppend(out, "{", q.group, ", ", q.tokens_per_block, ", ", Text(q.numbers), "}");
    });
    return absl::StrCat("Match{.session = ", e.session, ", .queries = {", queries, "}}");
  }
  std::string operator()(const Release& e) const {
    return absl::StrCat("Release{.session = ", e.session, ", .blocks = ", Text(e.blocks), ", .hint = {Reuse{",
                        static_cast<int>(e.hint.reuse), "}, ", e.hint.category, "}}");
  }
  std::string operator()(const Ref& e) const {
    return absl::StrCat("Ref{.session = ", e.session, ", .blocks = ", Text(e.blocks), "}");
  }
  std::string operator()(const Touch& e) const {
    return absl::StrCat("Touch{.blocks = ", Text(e.blocks), "}");
  }
  std::string operator()(const Pin& e) const {
    return absl::StrCat("Pin{.blocks = ", Text(e.blocks), ", .ttl = ", e.ttl, "}");
  }
  std::string operator()(const Unpin& e) const {
    return absl::StrCat("Unpin{.blocks = ", Text(e.blocks), "}");
  }
  std::string operator()(const SetRetention& e) const {
    return absl::StrCat("SetRetention{.blocks = ", Text(e.blocks), ", .priority = ", e.priority,
                        ", .ttl = ", e.ttl, ", .half_life = ", e.half_life, "}");
  }
  std::string operator()(const SetScores& e) const {
    return absl::StrCat("SetScores{.blocks = ", Text(e.blocks), ", .scores = {",
                        absl::StrJoin(e.scores, ", "), "}}");
  }
  std::string operator()(const Expire&) const { return "Expire{}"; }
  std::string operator()(const Reclaim& e) const { return absl::StrCat("Reclaim{.count = ", e.count, "}"); }
  std::string operator()(const ReclaimVictims& e) const {
    return absl::StrCat("ReclaimVictims{.victims = ", Text(e.victims), "}");
  }
  std::string operator()(const End& e) const { return absl::StrCat("End{.session = ", e.session, "}"); }
  std::string operator()(const FreeQuarantine& e) const {
    return absl::StrCat("FreeQuarantine{.session = ", e.session, "}");
  }
  std::string operator()(const Grow& e) const { return absl::StrCat("Grow{.blocks = ", e.blocks, "}"); }
  std::string operator()(const SetPolicy& e) const {
    return absl::StrCat("SetPolicy{.policy = \"", e.policy, "\"}");
  }
  std::string operator()(const Advance& e) const { return absl::StrCat("Advance{.by = ", e.by, "}"); }
};

constexpr uint32_t kFirstAlias = 1000;  // Keys that are in no chain.
constexpr uint32_t kAliases = 6;

PoolOptions WithGhosts(PoolOptions options) {
  // Enough that the pool forgets nothing that the model remembers.
  options.ghosts = 1 << 14;
  return options;
}

std::string Differ(std::string_view what, uint64_t pool, uint64_t model) {
  if (pool == model) return "";
  return absl::StrCat(absl::string_view(what.data(), what.size()), ": ", pool, ", the model has ", model);
}

}  // namespace

std::string Print(const Entry& entry) { return absl::StrCat(std::visit(Printer(), entry), ","); }

// --------------------------------------------------------------------------------------------- generating

int Generator::Session(const Model& model) {
  const auto slots = static_cast<uint32_t>(model.sessions.size());
  for (int attempt = 0; attempt < 4 && slots != 0; ++attempt) {
    const auto session = static_cast<int>(Below(slots));
    if (model.open(session)) return session;
  }
  return static_cast<int>(Below(slots + 2));
}

BlockRef Generator::AnyRef(const Model& model) {
  if (OneIn(8)) return {BlockId{static_cast<uint32_t>(random_())}, static_cast<uint32_t>(random_())};
  const uint32_t b = Below(model.capacity() + 2);
  const uint32_t generation = b <= model.capacity() ? model.blocks[b].generation : 1;
  return {BlockId{b}, OneIn(4) ? generation + Below(3) - 1 : generation};
}

// Mostly blocks that the session holds; always in the order of their ids, which is often that of a chain.
std::vector<BlockRef> Generator::Refs(const Model& model, int session) {
  std::vector<BlockRef> refs;
  const uint32_t most = OneIn(10) ? 40 : 5;
  for (uint32_t b = 1; b <= model.capacity() && refs.size() < most; ++b) {
    const bool likely = session < 0 ? model.blocks[b].resident() : model.holds(session, b) > 0;
    if (!OneIn(likely ? 2 : 24)) continue;
    refs.push_back({BlockId{b}, model.blocks[b].generation});
    if (OneIn(16)) refs.push_back(refs.back());
  }
  while (refs.empty() || OneIn(12)) refs.push_back(AnyRef(model));
  if (OneIn(4)) std::shuffle(refs.begin(), refs.end(), random_);
  return refs;
}

// Key numbers from the root down, so that sequences share prefixes.
std::vector<uint32_t> Generator::Walk() {
  std::vector<uint32_t> walk;
  const uint32_t length = 1 + Below(setting_.key_depth);
  for (uint32_t node = 1; walk.size() < length; node = 2 * node + (OneIn(3) ? 1 : 0)) walk.push_back(node);
  if (OneIn(8)) walk.erase(walk.begin(), walk.begin() + Below(length));
  if (OneIn(12)) walk[Below(static_cast<uint32_t>(walk.size()))] = 1 + Below((1u << setting_.key_depth) - 1);
  if (OneIn(30)) walk[Below(static_cast<uint32_t>(walk.size()))] = kFirstAlias + Below(kAliases);
  return walk;
}

Seal Generator::NextSeal(const Model& model) {
  Seal seal = {.session = Session(model), .parent = {}, .entries = {}};
  const std::vector<uint32_t> walk = Walk();
  uint32_t group = Below(static_cast<uint32_t>(setting_.options.windows.size()));
  if (OneIn(60)) group = static_cast<uint32_t>(setting_.options.windows.size());
  size_t begin = 0;
  if (!OneIn(3)) {
    while (begin + 1 < walk.size() && model.Find({group, walk[begin]}) != 0) ++begin;
  }
  if (begin > 0) seal.parent = {OneIn(40) ? 0 : group, walk[begin - 1]};
  std::vector<BlockRef> leased;
  for (uint32_t b = 1; b <= model.capacity(); ++b) {
    const Model::Block& block = model.blocks[b];
    if (block.state == BlockState::kLeased && block.owner == seal.session)
      leased.push_back({BlockId{b}, block.generation});
  }
  for (size_t i = begin; i < walk.size(); ++i) {
    BlockRef block = AnyRef(model);
    if (!OneIn(20)) {
      if (leased.empty()) break;
      block = leased.back();
      if (!OneIn(24)) leased.pop_back();
    }
    seal.entries.push_back({block, group, {walk[i]}});
    std::vector<uint32_t>& keys = seal.entries.back().keys;
    while (OneIn(8)) keys.insert(keys.begin(), kFirstAlias + Below(kAliases));
    if (OneIn(60)) keys.insert(keys.begin(), 1 + Below((1u << setting_.key_depth) - 1));
    if (OneIn(100)) keys.clear();
  }
  return seal;
}

Match Generator::NextMatch(const Model& model) {
  Match match = {.session = Session(model), .queries = {}};
  const std::vector<uint32_t> walk = Walk();
  for (uint32_t g = 0; g < setting_.options.windows.size(); ++g) {
    if (g > 0 && OneIn(5)) continue;
    std::vector<uint32_t> numbers = walk;
    if (OneIn(4)) numbers.resize(Below(static_cast<uint32_t>(walk.size()) + 1));
    match.queries.push_back({g, setting_.tokens[g], numbers});
    if (OneIn(50)) match.queries.push_back(match.queries.back());
  }
  return match;
}

Release Generator::NextRelease(const Model& model, int session) {
  UseHint hint;
  if (OneIn(3)) hint = {.reuse = static_cast<Reuse>(Below(4)), .category = static_cast<uint8_t>(Below(3))};
  if (!OneIn(4)) return {.session = session, .blocks = Refs(model, session), .hint = hint};
  // All it has, or the pool would fill up with blocks that somebody forgot.
  Release release = {.session = session, .blocks = {}, .hint = hint};
  for (uint32_t b = 1; b <= model.capacity(); ++b) {
    for (uint32_t holds = model.holds(session, b); holds > 0; --holds) {
      release.blocks.push_back({BlockId{b}, model.blocks[b].generation});
    }
  }
  return release;
}

Entry Generator::Next(const Model& model) {
  uint32_t open = 0;
  for (size_t s = 0; s < model.sessions.size(); ++s) open += model.open(static_cast<int>(s)) ? 1 : 0;
  if (open < setting_.sessions && OneIn(open == 0 ? 1 : 6)) {
    return Open{.guaranteed = OneIn(2) ? 0 : Below(model.capacity() / 2 + 2),
                .max_blocks = OneIn(2) ? 0 : 1 + Below(model.capacity())};
  }
  int session = Session(model);
  if (OneIn(30)) session = static_cast<int>(Below(setting_.sessions + 3));
  const uint32_t dice = Below(100);
  if (dice < 16) {
    const uint32_t count = Below(OneIn(8) ? model.capacity() + 3 : 6);
    return Lease{.session = session, .count = count, .min = OneIn(2) ? 0 : Below(count + 1)};
  }
  if (dice < 32) return NextSeal(model);
  if (dice < 48) return NextMatch(model);
  if (dice < 66) return NextRelease(model, session);
  if (dice < 71) return Ref{.session = session, .blocks = Refs(model, session)};
  if (dice < 75) return Touch{.blocks = Refs(model, -1)};
  if (dice < 78) return Pin{.blocks = Refs(model, -1), .ttl = Below(40)};
  if (dice < 80) return Unpin{.blocks = Refs(model, -1)};
  if (dice < 84) {
    const uint8_t priorities[] = {0, 20, 50, 51, 80, 100};
    if (OneIn(4)) {
      SetScores scores = {.blocks = Refs(model, -1), .scores = {}};
      for (size_t i = 0; i < scores.blocks.size(); ++i) scores.scores.push_back(Below(9) / 8.0f);
      return scores;
    }
    return SetRetention{.blocks = Refs(model, -1),
                        .priority = priorities[Below(6)],
                        .ttl = Below(40),
                        .half_life = OneIn(2) ? Below(12) : 0};
  }
  if (dice < 88) return Expire{};
  if (dice < 91) return Reclaim{.count = OneIn(20) ? UINT32_MAX : Below(4)};
  if (dice < 93) return ReclaimVictims{.victims = Refs(model, -1)};
  if (dice < 94 && OneIn(3)) return End{.session = session};
  if (dice < 96) {
    // Of a session that ended, if there is one.
    for (size_t s = 0; s < model.sessions.size(); ++s) {
      if (model.sessions[s].phase == Model::Phase::kEnded)
        return FreeQuarantine{.session = static_cast<int>(s)};
    }
    return FreeQuarantine{.session = session};
  }
  if (dice < 97) return Grow{.blocks = Below(3)};
  if (dice < 98 && OneIn(setting_.switches ? 1 : 4)) {
    const absl::Span<const PolicyEntry> all = ReplacementPolicies();
    const uint32_t any = Below(static_cast<uint32_t>(all.size()));
    return SetPolicy{.policy = setting_.switches ? std::string(all[any].name) : setting_.policy};
  }
  return Advance{.by = Below(20)};
}

// ----------------------------------------------------------------------------------------------- applying

namespace {

// With its naive twin, where it has one.
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
  const std::string difference = std::visit([this](const auto& e) { return Do(e); }, entry);
  return difference.empty() ? TakeOver() : difference;
}

Pair::~Pair() {
  if (hand_over_ != nullptr) hand_over_->GiveUp(&pool_);
}

std::string Pair::Do(const Open& e) {
  const SessionLimits limits = {.guaranteed = e.guaranteed, .max_blocks = e.max_blocks};
  const absl::StatusOr<Holder> holder = pool_.AddSession(limits);
  const int expected = model_.AddSession(limits);
  const int slot = holder.ok() ? static_cast<int>(*holder) : -1;
  return slot == expected ? "" : absl::StrCat("session ", slot, ", the model has ", expected);
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
  for (size_t i = 0; i < e.entries.size(); ++i) entries.push_back({e.entries[i].block, keys[i]});
  std::vector<SealOutcome> outcomes(entries.size());
  const BlockKey parent = ToBlockKey(e.parent);
  pool_.Seal(Holder{static_cast<uint16_t>(e.session)}, model_.now, e.parent.number == 0 ? nullptr : &parent,
             entries, absl::MakeSpan(outcomes));

  uint32_t in_front = model_.Find(e.parent);
  for (size_t i = 0; i < entries.size(); ++i) {
    std::vector<ModelKey> model_keys;
    for (const uint32_t number : e.entries[i].keys) model_keys.push_back({e.entries[i].group, number});
    const SealOutcome expected = model_.SealOne(e.session, e.entries[i].block, model_keys, in_front);
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

// An LRU that takes over from an LRU leaves the order as it is, so of this the model need not know. Every other time
// the change takes some of the diary's next entries.
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
  const BlockView view = *pool_.View(BlockId{b}, model_.now);
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
  for (int state = 0; state < kBlockStates && d.empty(); ++state) {
    d = Differ(absl::StrCat("blocks in state ", state), pool_.counts()[state],
               model_.count(static_cast<BlockState>(state)));
  }
  for (uint32_t b = 1; b <= model_.capacity() && d.empty(); ++b) d = DifferenceOfBlock(b);
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
  for (int reason = 0; reason < kEvictReasons && d.empty(); ++reason) {
    d = Differ("evicted", p.evicted[reason], m.evicted[reason]);
  }
  for (int s = 0; s < static_cast<int>(model_.sessions.size()) && d.empty(); ++s) {
    const Holder holder{static_cast<uint16_t>(s)};
    const BlockPool::Holdings holdings = pool_.holdings(holder);
    d = Differ("charged", holdings.charged, model_.charged(s));
    if (d.empty()) d = Differ("held", holdings.leased + holdings.referenced, model_.held(s));
    if (d.empty()) d = Differ("guaranteed_free", pool_.guaranteed_free(holder), model_.unused(s));
  }
  return d;
}

// Every key, the ones that name nothing too.
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
