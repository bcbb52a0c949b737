#include "tests/pool/diary.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvpool::diary {
namespace {

struct Printer {
  std::string operator()(const Open& e) const {
    return absl::StrCat("Open{.guaranteed = ", e.guaranteed, ", .max_blocks = ", e.max_blocks,
                        ", .coming = ", e.coming, "}");
  }
  std::string operator()(const Promise& e) const {
    return absl::StrCat("Promise{.session = ", e.session, "}");
  }
  std::string operator()(const Lease& e) const {
    return absl::StrCat("Lease{.session = ", e.session, ", .count = ", e.count, ", .min = ", e.min, "}");
  }
  std::string operator()(const Seal& e) const {
    std::string entries = absl::StrJoin(e.entries, ", ", [](std::string* out, const Seal::Entry& entry) {
      absl::StrAppend(out, "{", Text(entry.block), ", ", entry.group, ", ", Text(entry.keys),
                      entry.leave_duplicate ? ", true}" : "}");
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
  std::string operator()(const Enter& e) const { return absl::StrCat("Enter{", Text(e.range), "}"); }
  std::string operator()(const Vacate& e) const { return absl::StrCat("Vacate{", Text(e.range), "}"); }
  std::string operator()(const PutBack& e) const { return absl::StrCat("PutBack{.most = ", e.most, "}"); }
  std::string operator()(const Withhold& e) const { return absl::StrCat("Withhold{.most = ", e.most, "}"); }
  std::string operator()(const Shrink&) const { return "Shrink{}"; }
  std::string operator()(const Move& e) const {
    return absl::StrCat("Move{.session = ", e.session, ", .from = ", Text(e.from), ", .to = ", Text(e.to),
                        "}");
  }
  std::string operator()(const SetPolicy& e) const {
    return absl::StrCat("SetPolicy{.policy = \"", e.policy, "\"}");
  }
  std::string operator()(const Advance& e) const { return absl::StrCat("Advance{.by = ", e.by, "}"); }
};

}  // namespace

std::string Text(BlockRef ref) {
  return absl::StrCat("{BlockId{", Index(ref.id), "}, ", ref.generation, "}");
}
std::string Text(const std::vector<BlockRef>& refs) {
  return absl::StrCat(
      "{", absl::StrJoin(refs, ", ", [](std::string* out, BlockRef ref) { absl::StrAppend(out, Text(ref)); }),
      "}");
}
std::string Text(const BlockRange& range) { return absl::StrCat("{", range.first, ", ", range.end, "}"); }
std::string Text(const std::vector<uint32_t>& numbers) {
  return absl::StrCat("{", absl::StrJoin(numbers, ", "), "}");
}

std::string Print(const Entry& entry) { return absl::StrCat(std::visit(Printer(), entry), ","); }

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
  const uint32_t b = Below(model.end_block() + 1);
  const uint32_t generation = b < model.end_block() ? model.blocks[b].generation : 1;
  return {BlockId{b}, OneIn(4) ? generation + Below(3) - 1 : generation};
}

// Mostly blocks that the session holds; always in the order of their ids, which is often that of a chain.
std::vector<BlockRef> Generator::Refs(const Model& model, int session) {
  std::vector<BlockRef> refs;
  const uint32_t most = OneIn(10) ? 40 : 5;
  for (uint32_t b = 1; b < model.end_block() && refs.size() < most; ++b) {
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
  for (uint32_t b = 1; b < model.end_block(); ++b) {
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
    seal.entries.push_back({block, group, {walk[i]}, OneIn(3)});
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
  // Releases all it has, or the pool would fill up with forgotten blocks.
  Release release = {.session = session, .blocks = {}, .hint = hint};
  for (uint32_t b = 1; b < model.end_block(); ++b) {
    for (uint32_t holds = model.holds(session, b); holds > 0; --holds) {
      release.blocks.push_back({BlockId{b}, model.blocks[b].generation});
    }
  }
  return release;
}

Entry Generator::NextGivenBack(const Model& model) {
  if (!model.vacating() || OneIn(24)) {
    const uint32_t size = Below(2 + model.capacity() / 3);
    // The upper end, half of the time.
    const uint32_t first = model.end_block() - std::min(model.end_block() - 1, size);
    const uint32_t any = 1 + Below(first);
    const BlockRange range = OneIn(2) ? BlockRange{first, model.end_block()} : BlockRange{any, any + size};
    return Vacate{{range.first, std::min(range.end, model.end_block())}};
  }
  if (OneIn(24)) return PutBack{.most = Below(6)};
  if (OneIn(6)) return Withhold{.most = Below(6)};
  if (OneIn(6)) return Shrink{};
  Move move = {.session = Session(model), .from = AnyRef(model), .to = AnyRef(model)};
  for (uint32_t b = 1; b < model.end_block(); ++b) {
    const Model::Block& block = model.blocks[b];
    const BlockRef ref = {BlockId{b}, block.generation};
    const bool goes = model.going().contains(b) || OneIn(24);
    if (goes && block.state == BlockState::kCached && OneIn(2)) move.from = ref;
    if (block.state == BlockState::kLeased && OneIn(2)) {
      move.to = ref;
      if (!OneIn(24)) move.session = block.owner;
    }
  }
  return move;
}

Entry Generator::Next(const Model& model) {
  uint32_t open = 0;
  for (size_t s = 0; s < model.sessions.size(); ++s) open += model.open(static_cast<int>(s)) ? 1 : 0;
  if (open < setting_.sessions && OneIn(open == 0 ? 1 : 6)) {
    return Open{.guaranteed = OneIn(2) ? 0 : Below(model.capacity() / 2 + 2),
                .max_blocks = OneIn(2) ? 0 : 1 + Below(model.capacity()),
                .coming = OneIn(3) ? Below(model.capacity() / 2 + 2) : 0};
  }
  if (OneIn(16)) return Promise{.session = Session(model)};
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
    // Takes a session that ended, if there is one.
    for (size_t s = 0; s < model.sessions.size(); ++s) {
      if (model.sessions[s].phase == Model::Phase::kEnded)
        return FreeQuarantine{.session = static_cast<int>(s)};
    }
    return FreeQuarantine{.session = session};
  }
  // A pool that has little gives nothing back, or it would stay small.
  const bool has_much = model.capacity() > setting_.options.max_blocks * 3 / 4;
  if (dice < 97 && OneIn(3)) {
    // A hole, or a part of one, as often as not.
    uint32_t first = 1 + Below(setting_.options.max_blocks), size = Below(OneIn(4) ? 12 : 3);
    for (uint32_t b = 1; b < model.end_block() && OneIn(2); ++b) {
      if (!model.blocks[b].there && OneIn(3)) first = b;
    }
    return Enter{{first, first + size}};
  }
  if (dice < 97) return Grow{.blocks = Below(OneIn(4) ? 12 : 3)};
  if (has_much && OneIn(4)) return NextGivenBack(model);
  if (model.vacating() && OneIn(3)) return NextGivenBack(model);
  if (dice < 98 && OneIn(setting_.switches ? 1 : 4)) {
    const absl::Span<const PolicyEntry> all = ReplacementPolicies();
    const uint32_t any = Below(static_cast<uint32_t>(all.size()));
    return SetPolicy{.policy = setting_.switches ? std::string(all[any].name) : setting_.policy};
  }
  return Advance{.by = Below(20)};
}

}  // namespace kvpool::diary
