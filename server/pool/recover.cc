// A pool from what another process left in its table.
#include <algorithm>
#include <memory>
#include <utility>

#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {
namespace {

// In place of the policy until all blocks are in their states; then the real one is told of them, as of those of a
// policy before it.
class NoPolicy final : public ReplacementPolicy {
 public:
  std::string_view name() const override { return "none"; }
  void OnInsert(BlockId, const Content&) override {}
  void OnHit(BlockId, uint64_t) override {}
  void OnUsed(BlockId, uint64_t) override {}
  void OnOffer(BlockId) override {}
  void OnWithdraw(BlockId) override {}
  void OnEvict(BlockId) override {}
  BlockId Victim(uint64_t) override { return kNullBlock; }
  void Prefetch(BlockId, uint64_t) const override {}
  uint32_t offered() const override { return 0; }
  double bytes_per_block() const override { return 0; }
};

}  // namespace

RecoveredPool BlockPool::Recover(TimeMs now, uint32_t blocks) {
  KVPOOL_CHECK(rep_->table.has_value() && rep_->capacity == 0, "a pool that is in use is to be recovered");
  std::unique_ptr<ReplacementPolicy> policy = rep_->policy.Take();
  rep_->policy.Set(std::make_unique<NoPolicy>(), PolicyFeed::Tell::kLater);
  const RecoveredPool found = rep_->Recover(now, blocks);
  SetPolicy(now, std::move(policy));
  return found;
}

RecoveredPool PoolRep::Recover(TimeMs now, uint32_t blocks) {
  BeginVerb(now, 0);
  RecoveredPool found;
  // The word is there before the turn is over: another process that dies here finds one or the other.
  if (!undo.Undo()) table->begun.half_turn = undo.turn();
  found.half_turn = table->begun.half_turn;
  undo.Commit();
  capacity = std::min(blocks, options.max_blocks - 1);
  // A block beyond what there is was never answered to anybody.
  next_new = std::min(next_new, capacity + 1);
  std::vector<uint32_t> holds(capacity + 1);
  RecoverHolds(&found, &holds);
  // What is held was leased, whatever else the crash left.
  for (uint32_t b = capacity; b > 0 && b >= next_new; --b) {
    if (holds[b] != 0) next_new = b + 1;
  }
  const std::vector<bool> resident = RecoverChains(&found);
  RecoverStates(holds, resident, &found);
  undo.Commit();
  return found;
}

bool BlockPool::Resume(Holder session, const SessionLimits& limits) { return rep_->Resume(session, limits); }

bool PoolRep::Resume(Holder session, const SessionLimits& limits) {
  Session& s = sessions[static_cast<size_t>(session)];
  KVPOOL_CHECK(s.phase == Phase::kEnded && s.tidied_from == 0, "a session in phase %d is to go on",
               static_cast<int>(s.phase));
  if (limits.max_blocks != 0 && s.held > limits.max_blocks) return false;
  bool sole = true;
  s.holds.VisitBelow(capacity + 1, UINT32_MAX, [&](uint32_t b, uint32_t holds) {
    sole = sole && (records[b].resident() || records[b].refs == holds);
  });
  if (!sole) return false;  // A damaged block that it shared: nobody knows whose it is.
  s.phase = Phase::kOpen;
  s.limits = limits;
  s.limits.guaranteed = 0;
  s.holds.VisitBelow(capacity + 1, UINT32_MAX, [&](uint32_t b, uint32_t holds) {
    if (holds > kManyHolds) s.many_holds = true;
    BlockRecord& r = records[b];
    if (!r.resident()) {
      SetState(b, BlockState::kLeased);
      if (r.last_generation()) last_generation_blocks.push_back(b);
      Charge(b, session);
    } else if (Holder{r.owner} == kNobody && !r.last_generation()) {
      Charge(b, session);
    }
  });
  s.limits.guaranteed = std::min(limits.guaranteed, s.charged);
  s.unmet = limits.guaranteed - s.limits.guaranteed;
  return true;
}

// Each page belongs to one session. A page that can't be is of no session that was ever answered.
void PoolRep::RecoverHolds(RecoveredPool* found, std::vector<uint32_t>* holds) {
  table->begun.hold_pages = std::min(table->begun.hold_pages, table->page_count);
  absl::flat_hash_map<uint64_t, size_t> slots;
  for (uint32_t i = 0; i < table->begun.hold_pages; ++i) {
    HoldPage& page = table->pages[i];
    const uint64_t base = uint64_t{page.index} * HoldPage::kBlocks;
    const auto in_use =
        std::min<uint64_t>(HoldPage::kBlocks, capacity + 1 - std::min<uint64_t>(base, capacity + 1));
    const uint32_t first = base == 0 ? 1 : 0;  // The null block is nobody's.
    std::fill(page.counts, page.counts + std::min<uint64_t>(first, in_use), uint16_t{0});
    std::fill(page.counts + in_use, page.counts + HoldPage::kBlocks, uint16_t{0});
    page.live = static_cast<uint32_t>(HoldPage::kBlocks -
                                      std::count(page.counts, page.counts + HoldPage::kBlocks, 0));
    if (page.session == 0 || page.live == 0) {
      page = HoldPage();
      hold_pages.Give(&page);
      continue;
    }
    const auto [slot, is_new] = slots.emplace(page.session, sessions.size());
    if (is_new) {
      sessions.push_back({.phase = Phase::kEnded, .holds = HoldTable(&hold_pages)});
      sessions.back().holds.Begin(page.session);
      found->sessions.push_back({.id = page.session, .holder = Holder{static_cast<uint16_t>(slot->second)}});
    }
    Session& s = sessions[slot->second];
    KVPOOL_CHECK(s.holds.Adopt(&page), "session %lu has two pages of holds on block %lu", page.session, base);
    s.held += page.live;
    for (uint64_t at = 0; at < in_use; ++at) {
      s.all_holds += page.counts[at];
      (*holds)[base + at] += page.counts[at];
    }
  }
  for (RecoveredPool::Session& session : found->sessions) {
    session.holds = sessions[static_cast<size_t>(session.holder)].all_holds;
  }
}

std::vector<bool> PoolRep::RecoverChains(RecoveredPool* found) {
  std::vector<bool> resident(capacity + 1);
  for (uint32_t b = 1; b < next_new; ++b) {
    BlockRecord& r = records[b];
    r.flags = 0;
    r.refs = r.children = r.next_in_bucket = 0;
    r.owner = static_cast<uint16_t>(kNobody);
    if (!r.resident()) continue;
    const uint64_t hash = HashKey(r.block_key());
    resident[b] = r.group() < options.windows.size() && table->checksums[b] == RecordChecksum(b, r, hash) &&
                  index.Find(hash, r.block_key()) == 0;
    if (resident[b]) {
      index.Insert(hash, b);
    } else {
      ++found->dropped;
    }
  }
  // A link is cut where its parent is not there, can't be one, or is behind the block itself.
  const auto cut = [&](uint32_t b) {
    records[b].parent = 0;
    table->checksums[b] = RecordChecksum(b, records[b], HashKey(records[b].block_key()));
    ++found->cut_links;
  };
  std::vector<uint32_t> walked_from(capacity + 1);
  for (uint32_t b = 1; b < next_new; ++b) {
    if (!resident[b]) continue;
    for (uint32_t at = b; walked_from[at] == 0;) {
      walked_from[at] = b;
      const uint32_t parent = records[at].parent;
      if (parent == 0) break;
      const bool sound = parent < next_new && resident[parent] &&
                         records[parent].group() == records[at].group() &&
                         options.windows[records[at].group()] == 0 && walked_from[parent] != b;
      if (!sound) {
        cut(at);
        break;
      }
      at = parent;
    }
    if (records[b].parent != 0) ++records[records[b].parent].children;
  }
  return resident;
}

void PoolRep::RecoverStates(const std::vector<uint32_t>& holds, const std::vector<bool>& resident,
                            RecoveredPool* found) {
  counts = {};
  const auto enter = [&](uint32_t b, BlockState state) {
    records[b].set_state(state);
    ++counts[static_cast<size_t>(state)];
  };
  for (uint32_t b = 1; b < next_new; ++b) {
    // A sealed block holds its parent, and so on up the chain.
    if (!resident[b] || holds[b] == 0) continue;
    const bool first = records[b].refs == 0;
    records[b].refs += holds[b];
    for (uint32_t at = records[b].parent; first && at != 0 && records[at].refs++ == 0;)
      at = records[at].parent;
  }
  for (uint32_t b = next_new; b-- > 1;) {
    BlockRecord& r = records[b];
    if (resident[b]) {
      enter(b, r.refs > 0 ? BlockState::kSealed : BlockState::kCached);
      if (r.refs == 0 && r.last_generation()) ++last_generation_cached;
      if (r.refs == 0 && r.children == 0) r.flags |= BlockRecord::kOffered;
    } else if (holds[b] > 0) {
      r.refs = holds[b];
      r.parent = 0;
      enter(b, BlockState::kQuarantined);
    } else {
      // Free puts it on the stack of free blocks, or retires it.
      enter(b, BlockState::kQuarantined);
      Free(b);
    }
  }
  counts[static_cast<size_t>(BlockState::kFree)] += capacity + 1 - next_new;
  for (Session& s : sessions) {
    s.holds.VisitBelow(capacity + 1, UINT32_MAX, [&](uint32_t b, uint32_t) { s.leased += !resident[b]; });
  }
  found->cached = count(BlockState::kCached);
  found->held = count(BlockState::kSealed);
  found->quarantined = count(BlockState::kQuarantined);
}

}  // namespace kvpool
