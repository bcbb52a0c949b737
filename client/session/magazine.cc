#include "client/session/magazine.h"

#include <algorithm>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// Under pressure a refill brings an eighth: enough to go on with, little enough to leave some to others.
constexpr uint32_t kScarceShare = 8;
constexpr uint32_t kFirstKeep = 16;
// An engine that could not have many blocks asks again, and takes few meanwhile. After so many Takes it has
// given up.
constexpr uint32_t kPatienceTakes = 256;

}  // namespace

Magazine::Magazine(uint32_t max_blocks, uint32_t target)
    : max_blocks_(max_blocks),
      target_(target),
      entries_(static_cast<uint64_t*>(std::calloc(max_blocks, sizeof(uint64_t)))),
      keep_(std::min(target, kFirstKeep)),
      low_((keep_ + 1) / 2) {
  KVPOOL_CHECK(entries_ != nullptr, "no memory to track %u blocks", max_blocks);
}

Magazine::Taken Magazine::Take(absl::Span<BlockRef> out) {
  SpinLockHolder lock(&lock_);
  Taken taken;
  const size_t count = out.size();
  if (stock_.size() < count) {
    demand_ = std::max(demand_, static_cast<uint32_t>(count));
    forget_ = kPatienceTakes;
  } else {
    taken.ok = true;
    if (demand_ > 0 && (count >= demand_ || --forget_ == 0)) demand_ = 0;
    for (BlockRef& ref : out) {
      ref = stock_.back();
      stock_.pop_back();
      entries_[Index(ref.id)] = Entry(ref, kLent);
    }
  }
  taken.stock = static_cast<uint32_t>(stock_.size());
  taken.ask = !asked_ && (!taken.ok || taken.stock < low_);
  asked_ |= taken.ask;
  return taken;
}

Magazine::PutOutcome Magazine::Put(absl::Span<const BlockRef> refs, bool fenced,
                                   std::vector<BlockRef>* rest) {
  SpinLockHolder lock(&lock_);
  PutOutcome outcome;
  const size_t before = stock_.size();
  for (const BlockRef ref : refs) {
    if (ref == kNullRef) continue;
    if (Index(ref.id) >= max_blocks_) {
      ++outcome.refused;
      continue;
    }
    uint64_t& entry = entries_[Index(ref.id)];
    if (entry == Entry(ref, kLent)) {
      if (fenced) {
        entry = kGone;
        rest->push_back(ref);
      } else {
        entry = Entry(ref, kStocked);
        stock_.push_back(ref);
      }
    } else if (entry == kGone) {
      rest->push_back(ref);
    } else {
      ++outcome.refused;
    }
  }
  outcome.surplus = before <= high() && stock_.size() > high();
  return outcome;
}

void Magazine::Share(absl::Span<const BlockRef> refs) {
  SpinLockHolder lock(&lock_);
  for (const BlockRef ref : refs) {
    if (Index(ref.id) >= max_blocks_) continue;
    uint64_t& entry = entries_[Index(ref.id)];
    if (entry == Entry(ref, kLent)) entry = kGone;
  }
}

uint32_t Magazine::stock() const {
  SpinLockHolder lock(&lock_);
  return static_cast<uint32_t>(stock_.size());
}

uint32_t Magazine::Wanted(bool scarce) {
  SpinLockHolder lock(&lock_);
  if (refilling_ || !asked_) return 0;
  const uint32_t keep = scarce ? std::min(keep_, std::max(1u, target_ / kScarceShare)) : keep_;
  const uint32_t aim = std::max(keep, demand_);
  low_ = (keep + 1) / 2;
  if (stock_.size() >= low_ && stock_.size() >= demand_) {
    asked_ = false;
    return 0;
  }
  refilling_ = true;
  if (!scarce) keep_ = std::min(target_, keep_ * 2);
  return aim - std::min(aim, static_cast<uint32_t>(stock_.size()));
}

bool Magazine::NeedsCare() const {
  SpinLockHolder lock(&lock_);
  return (asked_ && !refilling_) || revoked_ > 0 || stock_.size() > high();
}

void Magazine::Refill(absl::Span<const BlockRef> refs) {
  SpinLockHolder lock(&lock_);
  for (const BlockRef ref : refs) {
    if (ref == kNullRef || Index(ref.id) >= max_blocks_) continue;
    entries_[Index(ref.id)] = Entry(ref, kStocked);
    stock_.push_back(ref);
  }
  refilling_ = asked_ = false;
}

void Magazine::Ask(uint32_t count) {
  SpinLockHolder lock(&lock_);
  demand_ = std::max(demand_, count);
  forget_ = kPatienceTakes;
  asked_ = true;
}

void Magazine::Revoke(uint64_t count) {
  SpinLockHolder lock(&lock_);
  revoked_ = count;
  keep_ = std::min(target_, kFirstKeep);
}

void Magazine::TakeSurplus(std::vector<BlockRef>* out) {
  SpinLockHolder lock(&lock_);
  const size_t surplus = stock_.size() > high() ? stock_.size() - std::max(target_, demand_) : 0;
  size_t count = std::min<size_t>(stock_.size(), std::max<uint64_t>(surplus, revoked_));
  revoked_ = 0;
  // The oldest go: the newest are still in the processor's caches.
  for (size_t i = 0; i < count; ++i) {
    entries_[Index(stock_[i].id)] = kGone;
    out->push_back(stock_[i]);
  }
  stock_.erase(stock_.begin(), stock_.begin() + static_cast<ptrdiff_t>(count));
}

}  // namespace kvpool
