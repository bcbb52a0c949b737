#include "server/replacement/use_classes.h"

#include <algorithm>
#include <bit>

namespace kvpool {
namespace {

// Contents that left and are remembered: as many as there are blocks, and at least so many.
constexpr uint32_t kLeastPast = 1u << 16;
constexpr uint32_t kUnitTokens = 512;

// How many of the (growing) limits x reaches.
template <size_t n>
int Reached(uint32_t x, const std::array<uint32_t, n>& limits) {
  return static_cast<int>(std::upper_bound(limits.begin(), limits.end(), x) - limits.begin());
}

constexpr std::array<uint32_t, UseClasses::kTurns - 1> kTurnLimits = {1, 2, 3, 4, 6};
constexpr std::array<uint32_t, UseClasses::kTotals - 1> kTotalLimits = {2,  3,  4,  5,  7, 10,
                                                                        14, 20, 28, 40, 64};
constexpr std::array<uint32_t, UseClasses::kFresh - 1> kFreshLimits = {2, 5, 14};
constexpr std::array<uint32_t, UseClasses::kHits - 1> kHitLimits = {2, 3, 4, 6, 10};
constexpr std::array<uint32_t, UseClasses::kHitFresh - 1> kHitFreshLimits = {3, 8};
constexpr std::array<uint32_t, UseClasses::kHitTotals - 1> kHitTotalLimits = {4, 10, 24};
// What is remembered of a content that left, from the lowest bits: hits and turn, as far as four bits go, the class of
// its wait or kNoWait, and when its last use ended, modulo 2^44.
constexpr int kCountBits = 4, kClassBits = 12, kSinceShift = 2 * kCountBits + kClassBits;
constexpr uint64_t kCountMask = (1 << kCountBits) - 1, kNoWait = (1 << kClassBits) - 1;
static_assert(UseClasses::kClasses <= kNoWait && kTurnLimits.back() <= kCountMask &&
              kHitLimits.back() <= kCountMask);

int GapOf(uint64_t blocks) { return std::min<int>(std::bit_width(blocks / 1024), UseClasses::kGaps - 1); }

// A block that was found so often when others went on from it is not theirs, but shared.
constexpr uint8_t kSharedHits = 5;

}  // namespace

UseClasses::UseClasses(const PolicyOptions& options)
    : blocks_per_unit_(std::max(1u, kUnitTokens / std::max(1u, options.tokens_per_block))),
      nodes_(options.max_blocks) {}

UseClasses::Use UseClasses::UseOf(int cls) {
  Use use;
  const auto take = [&cls](int values) {
    const int value = cls % values;
    cls /= values;
    return value;
  };
  if (cls < kUnhit) {
    use.last = take(2);
    use.fresh = take(kFresh);
    use.total = take(kTotals);
    use.turn = cls;
    return use;
  }
  cls -= kUnhit;
  use.hit_total = take(kHitTotals);
  use.hit_fresh = take(kHitFresh);
  use.gap = take(kGaps);
  use.hits = cls + 1;
  return use;
}

int UseClasses::GroupOf(int cls) {
  const Use use = UseOf(cls);
  if (use.hits > 0) return kTurns * 3 * 2 + (use.hits - 1) * kGaps + use.gap;
  const int length = use.total < 3 ? 0 : use.total < 8 ? 1 : 2;
  return (use.turn * 3 + length) * 2 + use.last;
}

int UseClasses::ClassOf(const Node& node) const {
  // A run that is forgotten: much came since.
  const Run run = run_ - node.latest < kRuns ? runs_[node.latest % kRuns] : Run{.length = 1u << 12};
  const auto units = [&](uint32_t blocks) { return (blocks + blocks_per_unit_ - 1) / blocks_per_unit_; };
  const uint32_t fresh = units(run.length), total = units(run.front + run.length);
  if (node.hits == 0) {
    const int last = node.depth + 1 == run.front + run.length ? 1 : 0;
    return ((Reached(node.turn, kTurnLimits) * kTotals + Reached(total, kTotalLimits)) * kFresh +
            Reached(fresh, kFreshLimits)) *
               2 +
           last;
  }
  return kUnhit +
         ((Reached(node.hits, kHitLimits) * kGaps + node.gap) * kHitFresh + Reached(fresh, kHitFreshLimits)) *
             kHitTotals +
         Reached(total, kHitTotalLimits);
}

uint8_t UseClasses::TurnBehind(const Node& front) {
  return front.hits >= kSharedHits ? 0 : static_cast<uint8_t>(std::min(front.turn + 1, 255));
}

std::optional<UseClasses::Wait> UseClasses::WaitOf(uint64_t past, uint64_t now) {
  const uint64_t cls = past >> 2 * kCountBits & kNoWait;
  if (cls == kNoWait) return std::nullopt;
  const uint64_t age = (now - (past >> kSinceShift)) << kSinceShift >> kSinceShift;
  return Wait{.cls = static_cast<int>(cls), .since = now - age};
}

std::optional<UseClasses::Wait> UseClasses::OnInsert(uint32_t block, const Content& content, uint64_t now) {
  std::optional<Wait> ended;
  const uint32_t parent = kvpool::Index(content.parent);
  Node& node = nodes_[block];
  const Node& front = nodes_[parent];
  node = {.hash = content.hash, .used = now, .parent = parent};
  node.depth = parent == 0 ? 0 : front.depth + 1;
  Run& run = runs_[front.run % kRuns];
  // Behind the last block of a run that is still being computed.
  const bool follows =
      parent != 0 && run_ - front.run < kRuns && run.open && front.depth + 1 == run.front + run.length;
  const uint64_t* const past = past_.Find(node.hash);
  if (past != nullptr) {
    // It is found again, only not here.
    node.hits = static_cast<uint8_t>((*past & kCountMask) + 1);
    node.turn = static_cast<uint8_t>(*past >> kCountBits & kCountMask);
    ended = WaitOf(*past, now);
    if (ended.has_value()) node.gap = static_cast<uint8_t>(GapOf(now - ended->since));
    past_.Remove(node.hash);
    if (follows && front.hits > 0) {
      ++run.front;
      node.run = front.run;
    } else {
      BeginRun(node.depth + 1, 0);
      node.run = run_;
    }
  } else if (follows && (front.hits == 0 || run.length == 0)) {
    node.turn = front.hits == 0 ? front.turn : TurnBehind(front);
    ++run.length;
    node.run = front.run;
  } else {
    node.turn = parent == 0 ? 0 : TurnBehind(front);
    BeginRun(node.depth, 1);
    node.run = run_;
  }
  node.latest = node.run;
  ++resident_;
  highest_ = std::max(highest_, block);
  return ended;
}

std::optional<UseClasses::Wait> UseClasses::OnHit(uint32_t block, uint64_t now) {
  Node& node = nodes_[block];
  node.hits = static_cast<uint8_t>(std::min(node.hits + 1, 255));
  if (!node.waits) return std::nullopt;
  node.waits = false;
  node.gap = static_cast<uint8_t>(GapOf(now - node.used));
  return Wait{.cls = node.cls, .since = node.used};
}

int UseClasses::OnUsed(uint32_t block, uint64_t now) {
  Node& node = nodes_[block];
  node.used = now;
  node.waits = true;
  if (run_ - node.run < kRuns) runs_[node.run % kRuns].open = false;
  // The tail of a chain comes first.
  Node& parent = nodes_[node.parent];
  if (static_cast<int32_t>(node.latest - parent.latest) > 0) parent.latest = node.latest;
  node.cls = static_cast<uint16_t>(ClassOf(node));
  return node.cls;
}

void UseClasses::OnEvict(uint32_t block, uint64_t now, absl::FunctionRef<void(const Wait&)> forgotten) {
  Node& node = nodes_[block];
  past_.Add(node.hash, node.used << kSinceShift | (node.waits ? node.cls : kNoWait) << 2 * kCountBits |
                           std::min<uint64_t>(node.turn, kCountMask) << kCountBits |
                           std::min<uint64_t>(node.hits, kCountMask));
  node.waits = false;
  for (const uint32_t most = std::max(kLeastPast, resident_); past_.size() > most;) {
    if (const auto wait = WaitOf(past_.oldest(), now); wait.has_value()) forgotten(*wait);
    past_.Trim(past_.size() - 1);
  }
  --resident_;
}

std::optional<UseClasses::Wait> UseClasses::InSlot(uint32_t slot, uint64_t now) const {
  if (slot <= highest_) {
    const Node& node = nodes_[slot];
    return node.waits ? std::optional(Wait{.cls = node.cls, .since = node.used}) : std::nullopt;
  }
  const uint64_t* const past = past_.InSlot(slot - highest_ - 1);
  return past == nullptr ? std::nullopt : WaitOf(*past, now);
}

}  // namespace kvpool
