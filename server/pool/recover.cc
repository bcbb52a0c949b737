// A pool from what another process left in its table.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"
#include "server/replacement/parts/offer_heap.h"

namespace kvpool {
namespace {

// LRU from what the records say, as good as they say it: blocks used in one millisecond are ordered by their ids. It
// costs nothing but for the blocks on offer. A policy that is told of every block needs a second for a million of them,
// in which nothing would be found.
class RecordOrder final : public ReplacementPolicy {
 public:
  RecordOrder(const VirtualArray<BlockRecord>& records, TimeMs now)
      : records_(records),
        recovered_ms_(static_cast<uint32_t>(now)),
        last_uses_(records.size()),
        places_(records.size()),
        heap_(&places_) {}

  std::string_view name() const override { return "lru"; }
  void OnInsert(BlockId block, const Content&) override { last_uses_[Index(block)] = ++uses_; }
  void OnHit(BlockId, uint64_t) override {}
  void OnUsed(BlockId block, uint64_t) override { last_uses_[Index(block)] = ++uses_; }
  void OnOffer(BlockId block) override {
    const uint32_t idle_ms = recovered_ms_ - records_[Index(block)].accessed_ms;
    // While the pool is recovered there are none, and the pages need not come.
    const uint64_t use = uses_ == 0 ? 0 : last_uses_[Index(block)];
    heap_.Insert(Index(block), {.major = use, .minor = use != 0 ? 0 : UINT32_MAX - idle_ms});
  }
  void OnWithdraw(BlockId block) override { heap_.Remove(Index(block)); }
  void OnEvict(BlockId) override {}
  BlockId Victim(uint64_t) override { return BlockId{heap_.first()}; }
  size_t Upcoming(absl::Span<BlockId> blocks) const override { return heap_.NearTop(blocks); }
  // The successor is told of blocks of one rank in the order of their records.
  Rank Standing(BlockId block) const override { return {.major = last_uses_[Index(block)]}; }
  void Prefetch(BlockId block, uint64_t) const override {
    last_uses_.Prefetch(Index(block));
    places_.Prefetch(Index(block));
  }
  uint32_t offered() const override { return heap_.size(); }
  double bytes_per_block() const override { return sizeof(uint64_t) + sizeof(uint32_t) + 24; }

 private:
  const VirtualArray<BlockRecord>& records_;
  const uint32_t recovered_ms_;
  // The number of each block's last use since the recovery; 0: there was none.
  VirtualArray<uint64_t> last_uses_;
  HeapPlaces places_;
  OfferHeap heap_;
  uint64_t uses_ = 0;
};

// Blocks whose buckets are prefetched together: enough to hide the latency of one behind the hashing of others.
constexpr size_t kRecoveredTogether = 32;

}  // namespace

// What is found of a block. Chains lead anywhere, so they are followed in a table of these, of which the processor has most
// at hand, and not in the records.
struct PoolRep::Remains {
  enum class Walk : uint8_t { kNone, kUnderWay, kDone };
  uint32_t parent, children, refs;
  uint8_t group;
  bool whole;  // It is resident, and its record is whole.
  Walk walk;   // Whether the chain from it to its root was followed.
};

RecoveredPool BlockPool::Recover(TimeMs now, absl::Span<const BlockRange> there) {
  KVPOOL_CHECK(rep_->table.has_value() && rep_->capacity == 0, "a pool that is in use is to be recovered");
  rep_->policy.Set(std::make_unique<RecordOrder>(rep_->records, now), PolicyFeed::Tell::kLater);
  rep_->stand_in = true;
  return rep_->Recover(now, there);
}

bool BlockPool::has_stand_in() const { return rep_->stand_in; }

void PoolRep::SetThere(absl::Span<const BlockRange> there) {
  for (const BlockRange& range : there) {
    KVPOOL_CHECK(range.first > extent && range.first < range.end && range.end <= options.max_blocks,
                 "blocks from %u on, up to %u, are there, behind block %u, of %u", range.first, range.end,
                 extent, options.max_blocks);
    if (range.first > extent + 1) holes.emplace(extent + 1, range.first);
    extent = range.end - 1;
    capacity += range.size();
  }
}

RecoveredPool PoolRep::Recover(TimeMs now, absl::Span<const BlockRange> there) {
  BeginVerb(now, 0);
  RecoveredPool found;
  const std::vector<uint32_t> changed = SealedInTornTurn();
  // The word is there before the turn is over: another process that dies here finds one or the other.
  if (!undo.Undo()) table->begun.half_turn = undo.turn();
  found.half_turn = table->begun.half_turn;
  undo.Commit();
  for (const uint32_t b : changed) {
    if (!records[b].resident()) ++found.lost[static_cast<size_t>(BlockLoss::kTorn)];
  }
  SetThere(there);
  const auto clear = [&](uint32_t first, uint32_t end) {
    for (uint32_t b = first; b < std::min({end, next_new, options.max_blocks}); ++b) {
      BlockRecord& r = records[b];
      if (r.resident()) ++found.lost[static_cast<size_t>(BlockLoss::kNoSlab)];
      // The block may come back. A record that is free keeps its generation, and no more.
      r.refs = r.children = 0;
      r.owner = static_cast<uint16_t>(kNobody);
      r.flags = 0;
      r.set_state(BlockState::kFree);
    }
  };
  for (const auto& [first, end] : holes) clear(first, end);
  clear(extent + 1, options.max_blocks);
  // A block that is not there was never answered to anybody, or has been given back since. What is held was leased, whatever else
  // the crash left.
  next_new = std::max(std::min(next_new, extent + 1), RecoverHolds(&found) + 1);
  VirtualArray<Remains> remains(next_new);
  remains.Populate(next_new);
  RecoverIndex(&found, &remains);
  RecoverChains(&found, &remains);
  RecoverStates(there, &found, &remains);
  undo.Commit();
  found.forgets_sums = options.keeps_sums && !options.table_has_sums;
  return found;
}

std::vector<uint32_t> PoolRep::SealedInTornTurn() const {
  std::vector<uint32_t> sealed;
  const auto first = static_cast<uint64_t>(reinterpret_cast<const char*>(table->records) - table->data);
  undo.VisitSaved([&](uint64_t at) {
    const uint64_t b = (at - first) / sizeof(BlockRecord);
    if (at >= first && b < options.max_blocks && records[b].resident())
      sealed.push_back(static_cast<uint32_t>(b));
  });
  std::sort(sealed.begin(), sealed.end());
  sealed.erase(std::unique(sealed.begin(), sealed.end()), sealed.end());
  return sealed;
}

bool BlockPool::Resume(Holder session, const SessionLimits& limits) { return rep_->Resume(session, limits); }

bool PoolRep::Resume(Holder session, const SessionLimits& limits) {
  Session& s = sessions[static_cast<size_t>(session)];
  KVPOOL_CHECK(s.phase == Phase::kEnded && s.tidied_from == 0, "a session in phase %d is to go on",
               static_cast<int>(s.phase));
  if (limits.max_blocks != 0 && s.held > limits.max_blocks) return false;
  bool sole = true;
  s.holds.VisitBelow(extent + 1, UINT32_MAX, [&](uint32_t b, uint32_t holds) {
    sole = sole && (records[b].resident() || records[b].refs == holds);
  });
  if (!sole) return false;  // A damaged block that it shared: nobody knows whose it is.
  s.phase = Phase::kOpen;
  s.limits = limits;
  s.limits.guaranteed = 0;
  s.holds.VisitBelow(extent + 1, UINT32_MAX, [&](uint32_t b, uint32_t holds) {
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
uint32_t PoolRep::RecoverHolds(RecoveredPool* found) {
  uint64_t highest = 0;
  table->begun.hold_pages = std::min(table->begun.hold_pages, table->page_count);
  absl::flat_hash_map<uint64_t, size_t> slots;
  for (uint32_t i = 0; i < table->begun.hold_pages; ++i) {
    HoldPage& page = table->pages[i];
    const uint64_t base = uint64_t{page.index} * HoldPage::kBlocks;
    const auto in_use =
        std::min<uint64_t>(HoldPage::kBlocks, extent + 1 - std::min<uint64_t>(base, extent + 1));
    const uint32_t first = base == 0 ? 1 : 0;  // The null block is nobody's.
    std::fill(page.counts, page.counts + std::min<uint64_t>(first, in_use), uint16_t{0});
    std::fill(page.counts + in_use, page.counts + HoldPage::kBlocks, uint16_t{0});
    for (const auto& [hole, end] : holes) {
      const uint64_t from = std::clamp<uint64_t>(hole, base, base + in_use) - base;
      const uint64_t to = std::clamp<uint64_t>(end, base, base + in_use) - base;
      std::fill(page.counts + from, page.counts + to, uint16_t{0});
    }
    page.live = static_cast<uint32_t>(HoldPage::kBlocks -
                                      std::count(page.counts, page.counts + HoldPage::kBlocks, 0));
    if (page.session == 0 || page.session == kOwnersId || page.live == 0) {
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
      if (page.counts[at] != 0) highest = std::max(highest, base + at);
    }
  }
  for (RecoveredPool::Session& session : found->sessions) {
    session.holds = sessions[static_cast<size_t>(session.holder)].all_holds;
  }
  return static_cast<uint32_t>(highest);
}

void PoolRep::RecoverIndex(RecoveredPool* found, VirtualArray<Remains>* remains) {
  index.Expect(capacity + 1);
  Prepare(capacity + 1, UINT32_MAX);
  std::vector<uint32_t> aliased;
  std::array<uint64_t, kRecoveredTogether> hashes;
  for (size_t first = 1; first < next_new; first += kRecoveredTogether) {
    const size_t end = std::min<size_t>(first + kRecoveredTogether, next_new);
    // All of a chunk is read before anything is stored in it: where a page is read first the kernel maps those around it,
    // too, and where it is written first, that one alone.
    for (size_t b = first; b < end; ++b) {
      if (!records[b].resident()) continue;
      hashes[b - first] = HashKey(records[b].block_key());
      index.PrefetchBucket(hashes[b - first]);
    }
    for (size_t b = first; b < end; ++b) {
      if (records[b].resident()) index.PrefetchRecord(hashes[b - first]);
    }
    for (size_t b = first; b < end; ++b) {
      const BlockRecord& r = records[b];
      if (!r.resident()) continue;
      const uint64_t hash = hashes[b - first];
      const auto block = static_cast<uint32_t>(b);
      const auto lose = [&](BlockLoss why) { ++found->lost[static_cast<size_t>(why)]; };
      if (table->checksums[b] != RecordChecksum(block, r)) {
        lose(BlockLoss::kChecksum);
      } else if (r.group() >= options.windows.size()) {
        lose(BlockLoss::kLayout);
      } else if (index.Find(hash, r.block_key()) != 0) {
        lose(BlockLoss::kDuplicate);
      } else {
        index.Insert(hash, block);
        (*remains)[b] = {.parent = r.parent, .group = r.group(), .whole = true};
        if (r.has(BlockRecord::kAliased)) aliased.push_back(block);
      }
    }
  }
  // What is under its own key comes first.
  for (const uint32_t b : aliased) RecoverAliases(b, found);
}

// Some may name other blocks by now only if the table is damaged: a key that is an alias is no block's own meanwhile.
void PoolRep::RecoverAliases(uint32_t b, RecoveredPool* found) {
  const BlockRecord& r = records[b];
  const auto is_whole = [&](const PoolTable::KeptAliases& kept) {
    return kept.generation() == r.generation && kept.count() <= PoolTable::KeptAliases::kMost &&
           kept.checksum == kept.Checksum(b, r);
  };
  if (!options.table_has_sums || !is_whole(table->aliases[b])) {
    ++found->lost_aliases;
    return;
  }
  const PoolTable::KeptAliases& kept = table->aliases[b];
  for (uint32_t i = 0; i < kept.count(); ++i) {
    const BlockKey alias = kept.key(i, r.group());
    if (Find(alias) == 0) index.AddAlias(alias, b);
  }
}

// A link is cut where its parent is not there, can't be one, or is behind the block itself.
void PoolRep::RecoverChains(RecoveredPool* found, VirtualArray<Remains>* remains) {
  using Walk = Remains::Walk;
  VirtualArray<Remains>& of = *remains;
  const auto sound = [&](const Remains& block) {
    if (block.parent >= next_new || options.windows[block.group] != 0) return false;
    const Remains& parent = of[block.parent];
    return parent.whole && parent.group == block.group && parent.walk != Walk::kUnderWay;
  };
  for (uint32_t b = 1; b < next_new; ++b) {
    if (!of[b].whole) continue;
    for (uint32_t at = b; at != 0 && of[at].walk == Walk::kNone; at = of[at].parent) {
      of[at].walk = Walk::kUnderWay;
      if (of[at].parent == 0 || sound(of[at])) continue;
      records[at].parent = of[at].parent = 0;
      table->checksums[at] = RecordChecksum(at, records[at]);
      ++found->cut_links;
    }
    for (uint32_t at = b; at != 0 && of[at].walk == Walk::kUnderWay; at = of[at].parent) {
      of[at].walk = Walk::kDone;
      ++of[of[at].parent].children;
    }
  }
}

std::optional<PoolRep::Protection> PoolRep::KeptProtectionOf(uint32_t b) const {
  const PoolTable::KeptProtection& kept = table->protections[b];
  if (kept.generation() != records[b].generation || kept.priority() > kMaxPriority) return std::nullopt;
  Protection p;
  if (kept.pin_until > now_ms) p.pin_until = kept.pin_until;
  if (kept.retain_until > now_ms && kept.priority() != kDefaultPriority) {
    p.priority = static_cast<uint8_t>(kept.priority());
    p.retain_until = kept.retain_until;
    p.retention_due = kept.retention_due;
    p.half_life_ms = kept.half_life_ms;
  }
  if (p.pin_until == 0 && p.priority == kDefaultPriority) return std::nullopt;
  return p;
}

// The blocks in front of it are pinned by it where their own pins were not kept: each is visited once.
void PoolRep::RecoverPin(uint32_t b, TimeMs until) {
  if (records[b].has(BlockRecord::kPinned)) {
    // A block behind it came first.
    if (protections.find(b)->second.pin_until < until) StartPin(b, until);
    return;
  }
  scratch_chain.clear();
  for (uint32_t at = b; at != 0 && !records[at].has(BlockRecord::kPinned); at = records[at].parent)
    scratch_chain.push_back(at);
  for (auto at = scratch_chain.rbegin(); at != scratch_chain.rend(); ++at) StartPin(*at, until);
}

void PoolRep::RecoverStates(absl::Span<const BlockRange> there, RecoveredPool* found,
                            VirtualArray<Remains>* remains) {
  VirtualArray<Remains>& of = *remains;
  for (Session& s : sessions) {
    s.holds.VisitBelow(extent + 1, UINT32_MAX, [&](uint32_t b, uint32_t holds) {
      const bool first = of[b].refs == 0;
      of[b].refs += holds;
      if (!of[b].whole) ++s.leased;
      // A sealed block holds its parent, and so on up the chain.
      for (uint32_t at = of[b].parent; first && at != 0 && of[at].refs++ == 0;) at = of[at].parent;
    });
  }
  counts = {};
  const auto enter = [&](uint32_t b, BlockState state) {
    records[b].set_state(state);
    ++counts[static_cast<size_t>(state)];
    if (IsInUse(state)) lease_order.Use(b);
  };
  std::vector<std::pair<uint32_t, TimeMs>> pins;
  for (uint32_t b = next_new; b-- > 1;) {
    if (absent(b)) continue;
    BlockRecord& r = records[b];
    const bool unsealed = r.state() == BlockState::kLeased ||
                          (r.state() == BlockState::kQuarantined && !r.has(BlockRecord::kRetired));
    std::optional<Protection> kept;
    if (of[b].whole && r.has(BlockRecord::kProtected)) kept = KeptProtectionOf(b);
    // One store, so that an heir of this process finds it, too.
    r.flags = static_cast<uint8_t>((kept.has_value() ? BlockRecord::kProtected : 0) |
                                   (index.has_aliases(b) ? BlockRecord::kAliased : 0));
    if (kept.has_value()) {
      protections[b] = *kept;
      if (kept->priority != kDefaultPriority) deadlines.emplace(kept->retention_due, b, Deadline::kRetention);
      if (Budgeted(r, *kept)) ++protected_blocks;
      if (kept->pin_until != 0) pins.emplace_back(b, kept->pin_until);
    }
    r.owner = static_cast<uint16_t>(kNobody);
    r.refs = of[b].refs;
    r.children = of[b].children;
    if (of[b].whole) {
      if (options.keeps_sums) {
        if (has_sum(b)) {
          Doubt(b);
        } else {
          ++found->unsummed;
        }
      }
      enter(b, r.refs > 0 ? BlockState::kSealed : BlockState::kCached);
      if (r.refs == 0 && r.last_generation()) ++last_generation_cached;
      if (r.refs == 0 && r.children == 0) Offer(b);
      continue;
    }
    enter(b, BlockState::kQuarantined);
    if (r.refs != 0) continue;
    if (unsealed) ++found->lost[static_cast<size_t>(BlockLoss::kUnsealed)];
    Free(b);  // It has it leased again, or retires it.
  }
  for (const BlockRange& range : there) {
    const uint32_t first = std::clamp(next_new, range.first, range.end);
    free.InsertRange(first, range.end);
    lease_order.Add(free, {first, range.end});
    counts[static_cast<size_t>(BlockState::kFree)] += range.end - first;
  }
  for (const auto& [b, until] : pins) RecoverPin(b, until);
  found->cached = count(BlockState::kCached);
  found->held = count(BlockState::kSealed);
  found->quarantined = count(BlockState::kQuarantined);
}

}  // namespace kvpool
