// Pins and priorities protect blocks from reclaim, for a time and under a budget.
#include <algorithm>
#include <atomic>

#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {

void PoolRep::DropProtectionIfIdle(uint32_t b) {
  BlockRecord& r = records[b];
  const auto it = protections.find(b);
  if (r.has(BlockRecord::kPinned) || it->second.priority != kDefaultPriority) return;
  protections.erase(it);
  r.flags &= static_cast<uint8_t>(~BlockRecord::kProtected);
}

// What is told last of a block that has a protection no more is that it has none, and then kProtected goes: whoever finds
// that flag in the table finds what was told since.
void PoolRep::KeepProtection(uint32_t b) {
  if (!table.has_value()) return;
  const BlockRecord& r = records[b];
  const Protection& p = protections.find(b)->second;
  PoolTable::KeptProtection& kept = table->protections[b];
  kept.pin_until = r.has(BlockRecord::kPinned) ? p.pin_until : 0;
  kept.retain_until = p.retain_until;
  kept.retention_due = p.retention_due;
  kept.half_life_ms = p.half_life_ms;
  std::atomic_signal_fence(std::memory_order_release);
  kept.whose = uint64_t{r.generation} << 32 | p.priority;
  std::atomic_signal_fence(std::memory_order_release);
}

void PoolRep::StartPin(uint32_t b, TimeMs until) {
  BlockRecord& r = records[b];
  Protection& p = protections[b];
  r.flags |= BlockRecord::kProtected;
  if (r.has(BlockRecord::kPinned)) {
    deadlines.erase({p.pin_until, b, Deadline::kPin});
  } else {
    if (!Budgeted(r, p)) ++protected_blocks;
    r.flags |= BlockRecord::kPinned;
    AddRef(b, kNobody);
    if (r.parent != 0) ++protections[r.parent].pinned_children;
  }
  protections[b].pin_until = until;
  deadlines.emplace(until, b, Deadline::kPin);
  KeepProtection(b);
}

Verdict PoolRep::PinChain(uint32_t b, TimeMs until, uint32_t budget) {
  // The pins in front of a pin that lasts long enough last long enough too.
  const auto lasts = [&](uint32_t p) {
    return records[p].has(BlockRecord::kPinned) && protections.find(p)->second.pin_until >= until;
  };
  const auto deny = [&] {
    denied = b;
    return Verdict::kOverPinBudget;
  };
  const uint32_t room = budget - std::min(budget, protected_blocks);
  uint32_t more = 0;
  scratch_chain.clear();
  for (uint32_t p = b; p != 0 && !lasts(p); p = records[p].parent) {
    if (p == denied) return deny();
    const BlockRecord& r = records[p];
    const bool budgeted = r.has(BlockRecord::kProtected) && Budgeted(r, protections.find(p)->second);
    if (!budgeted && ++more > room) return deny();
    if (steps_left == 0) return Verdict::kTooFar;
    --steps_left;
    scratch_chain.push_back(p);
  }
  // A block behind one that credit does not cover may be beyond the budget, which is said first.
  const uint32_t over_budget = denied;
  const Verdict credit = CheckCredit(b, available() - promised);
  denied = over_budget;
  if (credit != Verdict::kDone) return credit;
  // Root first: the protection of a parent exists before a child counts itself there.
  for (auto p = scratch_chain.rbegin(); p != scratch_chain.rend(); ++p) StartPin(*p, until);
  return Verdict::kDone;
}

void PoolRep::EndPin(uint32_t b) {
  BlockRecord& r = records[b];
  Protection& p = protections.find(b)->second;
  KVPOOL_CHECK(p.pinned_children == 0, "block %u has %u pinned children", b, p.pinned_children);
  deadlines.erase({p.pin_until, b, Deadline::kPin});
  r.flags &= static_cast<uint8_t>(~BlockRecord::kPinned);
  if (!Budgeted(r, p)) --protected_blocks;
  if (r.parent != 0) {
    Protection& parent = protections.find(r.parent)->second;
    if (--parent.pinned_children == 0 && parent.pin_until <= now_ms) {
      deadlines.emplace(parent.pin_until, r.parent, Deadline::kPin);
    }
  }
  KeepProtection(b);
  DropProtectionIfIdle(b);
  DropRefs(b, 1);
}

void PoolRep::SetPriority(uint32_t b, const Retention& retention, TimeMs since) {
  BlockRecord& r = records[b];
  const bool offered = r.has(BlockRecord::kOffered);
  if (offered) Withdraw(b);
  Protection& p = protections[b];
  r.flags |= BlockRecord::kProtected;
  if (Budgeted(r, p)) --protected_blocks;
  if (p.priority != kDefaultPriority) deadlines.erase({p.retention_due, b, Deadline::kRetention});
  p.priority = retention.priority;
  p.retain_until = p.retention_due = retention.until;
  p.half_life_ms = retention.half_life_ms;
  if (p.half_life_ms != 0) p.retention_due = std::min(p.retain_until, since + p.half_life_ms);
  if (p.priority != kDefaultPriority) deadlines.emplace(p.retention_due, b, Deadline::kRetention);
  if (Budgeted(r, p)) ++protected_blocks;
  KeepProtection(b);
  DropProtectionIfIdle(b);
  if (offered) Offer(b);
}

void BlockPool::Pin(TimeMs now, TimeMs until, absl::Span<const BlockRef> blocks, absl::Span<Verdict> verdicts,
                    uint32_t most) {
  Rep& r = *rep_;
  const uint32_t budget = std::min(most, r.pin_budget());
  r.BeginVerb(now, blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    verdicts[i] = r.Resolve(blocks[i]);
    if (verdicts[i] != Verdict::kDone) continue;
    const uint32_t b = Index(blocks[i].id);
    verdicts[i] = r.records[b].resident() ? r.PinChain(b, until, budget) : Verdict::kWrongState;
  }
}

uint32_t BlockPool::Unpin(absl::Span<const BlockRef> blocks) {
  Rep& r = *rep_;
  r.BeginVerb(r.now_ms, blocks.size());
  uint32_t unpinned = 0;
  for (size_t i = blocks.size(); i-- > 0;) {
    if (r.Resolve(blocks[i]) != Verdict::kDone) continue;
    const uint32_t b = Index(blocks[i].id);
    if (!r.records[b].has(BlockRecord::kPinned) || r.protections.find(b)->second.pinned_children != 0)
      continue;
    r.EndPin(b);
    ++unpinned;
  }
  return unpinned;
}

void BlockPool::SetRetention(TimeMs now, const Retention& asked, absl::Span<const BlockRef> blocks,
                             absl::Span<Verdict> verdicts, uint32_t most) {
  Rep& r = *rep_;
  const uint32_t budget = std::min(most, r.pin_budget());
  r.BeginVerb(now, blocks.size());
  Retention retention = asked;
  retention.priority = std::min(asked.priority, kMaxPriority);
  for (size_t i = 0; i < blocks.size(); ++i) {
    verdicts[i] = r.Resolve(blocks[i]);
    if (verdicts[i] != Verdict::kDone) continue;
    const uint32_t b = Index(blocks[i].id);
    const BlockRecord& record = r.records[b];
    if (!record.resident()) {
      verdicts[i] = Verdict::kWrongState;
      continue;
    }
    const bool budgeted =
        record.has(BlockRecord::kProtected) && Rep::Budgeted(record, r.protections.find(b)->second);
    if (retention.priority > kDefaultPriority && !budgeted && r.protected_blocks >= budget) {
      verdicts[i] = Verdict::kOverPinBudget;
      continue;
    }
    r.SetPriority(b, retention, now);
  }
}

bool BlockPool::Expire(TimeMs now, uint32_t most) {
  Rep& r = *rep_;
  r.BeginVerb(now, 0);
  uint32_t done = 0;
  while (!r.deadlines.empty() && std::get<TimeMs>(*r.deadlines.begin()) <= now) {
    if (done++ >= most) return true;
    const auto [due, b, deadline] = *r.deadlines.begin();
    if (deadline == Rep::Deadline::kRetention) {
      const Rep::Protection& p = r.protections.find(b)->second;
      const int distance = due < p.retain_until ? (p.priority - kDefaultPriority) / 2 : 0;
      r.SetPriority(b,
                    {.priority = static_cast<uint8_t>(kDefaultPriority + distance),
                     .until = p.retain_until,
                     .half_life_ms = p.half_life_ms},
                    due);
      continue;
    }
    // A parent's pin lasts as long as its children's: if its own time is over, the end of the last of these
    // brings the deadline back.
    r.deadlines.erase(r.deadlines.begin());
    if (r.protections.find(b)->second.pinned_children == 0) r.EndPin(b);
  }
  return false;
}

}  // namespace kvpool
