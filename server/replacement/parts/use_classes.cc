#include "server/replacement/parts/use_classes.h"

#include <algorithm>
#include <bit>

namespace kvpool {
namespace {

// As many contents that left are remembered as there are blocks, and at least so many: 256 KiB, which fit a
// core's cache. Four times as many taught nothing more.
constexpr uint32_t kLeastPast = 1u << 14;
constexpr uint32_t kUnitTokens = 512;

// A table of how many of the growing limits a number reaches.
template <uint32_t last>
class Limits {
 public:
  template <size_t n>
  explicit constexpr Limits(const uint32_t (&limits)[n]) {
    for (uint32_t x = 0; x <= last; ++x) {
      for (const uint32_t limit : limits) reached_[x] += x >= limit;
    }
  }
  int Reached(uint32_t x) const { return reached_[std::min(x, last)]; }

 private:
  std::array<uint8_t, last + 1> reached_{};
};

constexpr Limits<6> kTurnLimits({1, 2, 3, 4, 6});
constexpr Limits<64> kTotalLimits({2, 3, 4, 5, 7, 10, 14, 20, 28, 40, 64});
constexpr Limits<14> kFreshLimits({2, 5, 14});
constexpr Limits<10> kHitLimits({2, 3, 4, 6, 10});
constexpr Limits<8> kHitFreshLimits({3, 8});
constexpr Limits<24> kHitTotalLimits({4, 10, 24});
// The number of a content that left has, from the lowest bits, its hits and turn, in four bits each, and the
// class of its wait or kNoWait.
constexpr int kCountBits = 4, kWaitBits = 12;
static_assert(2 * kCountBits + kWaitBits == PastContents::kNumberBits);
constexpr uint64_t kCountMask = (1 << kCountBits) - 1, kNoWait = (1 << kWaitBits) - 1;
static_assert(UseClasses::kClasses <= kNoWait);

int GapOf(uint64_t blocks) { return std::min<int>(std::bit_width(blocks / 1024), UseClasses::kGaps - 1); }

// A block that was found so often before others continued it is shared by many conversations.
constexpr uint8_t kSharedHits = 5;

}  // namespace

UseClasses::UseClasses(const PolicyOptions& options)
    : blocks_per_unit_(std::max(1u, kUnitTokens / std::max(1u, options.tokens_per_block))),
      nodes_(options.max_blocks),
      past_(std::max(kLeastPast, options.max_blocks)) {}

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
  // A run that is forgotten counts as a long one.
  const Run run = run_ - node.latest < kRuns ? runs_[node.latest % kRuns] : Run{.length = 1u << 12};
  const auto units = [&](uint32_t blocks) { return (blocks + blocks_per_unit_ - 1) / blocks_per_unit_; };
  const uint32_t fresh = units(run.length), total = units(run.front + run.length);
  if (node.hits == 0) {
    const int last = node.depth + 1 == run.front + run.length ? 1 : 0;
    return ((kTurnLimits.Reached(node.turn) * kTotals + kTotalLimits.Reached(total)) * kFresh +
            kFreshLimits.Reached(fresh)) *
               2 +
           last;
  }
  return kUnhit +
         ((kHitLimits.Reached(node.hits) * kGaps + node.gap) * kHitFresh + kHitFreshLimits.Reached(fresh)) *
             kHitTotals +
         kHitTotalLimits.Reached(total);
}

uint8_t UseClasses::TurnBehind(const Node& front) {
  return front.hits >= kSharedHits ? 0 : static_cast<uint8_t>(std::min(front.turn + 1, 255));
}

std::optional<UseClasses::Wait> UseClasses::WaitOf(const PastContents::Past& past, uint64_t now) {
  const uint64_t cls = past.number() >> 2 * kCountBits;
  if (cls == kNoWait) return std::nullopt;
  return Wait{.cls = static_cast<int>(cls), .since = now - past.AgeAt(now)};
}

std::optional<UseClasses::Wait> UseClasses::OnInsert(uint32_t block, const Content& content, uint64_t now) {
  std::optional<Wait> ended;
  const uint32_t parent = kvpool::Index(content.parent);
  Node& node = nodes_[block];
  const Node& front = nodes_[parent];
  node = {.hash = content.hash, .used = now, .parent = parent};
  node.depth = parent == 0 ? 0 : front.depth + 1;
  Run& run = runs_[front.run % kRuns];
  // True behind the last block of a run that is still being computed.
  const bool follows =
      parent != 0 && run_ - front.run < kRuns && run.open && front.depth + 1 == run.front + run.length;
  PastContents::Past* const past = past_.Find(node.hash);
  if (past != nullptr) {
    // The content is found again, only not in the cache.
    node.hits = static_cast<uint8_t>((past->number() & kCountMask) + 1);
    node.turn = static_cast<uint8_t>(past->number() >> kCountBits & kCountMask);
    ended = WaitOf(*past, now);
    if (ended.has_value()) node.gap = static_cast<uint8_t>(GapOf(now - ended->since));
    past_.Forget(past);
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
  // The tail of a chain is used first.
  Node& parent = nodes_[node.parent];
  if (static_cast<int32_t>(node.latest - parent.latest) > 0) parent.latest = node.latest;
  node.cls = static_cast<uint16_t>(ClassOf(node));
  return node.cls;
}

void UseClasses::OnEvict(uint32_t block, uint64_t now, absl::FunctionRef<void(const Wait&)> forgotten) {
  Node& node = nodes_[block];
  const uint64_t number = (node.waits ? node.cls : kNoWait) << 2 * kCountBits |
                          std::min<uint64_t>(node.turn, kCountMask) << kCountBits |
                          std::min<uint64_t>(node.hits, kCountMask);
  node.waits = false;
  // Until there are as many sets as may be they are half full at most. All of them are walked over, and a
  // walk over empty places teaches nothing.
  past_.Reserve(static_cast<uint32_t>(std::min<uint64_t>(2 * ++evicted_, std::max(kLeastPast, resident_))));
  if (const PastContents::Past lost = past_.Remember(node.hash, node.used, number, now); lost.hash != 0) {
    if (const auto wait = WaitOf(lost, now); wait.has_value()) forgotten(*wait);
  }
  --resident_;
}

std::optional<UseClasses::Wait> UseClasses::InSlot(uint32_t slot, uint64_t now) const {
  if (slot <= highest_) {
    const Node& node = nodes_[slot];
    return node.waits ? std::optional(Wait{.cls = node.cls, .since = node.used}) : std::nullopt;
  }
  const PastContents::Past* const past = past_.InSlot(slot - highest_ - 1);
  return past == nullptr ? std::nullopt : WaitOf(*past, now);
}

}  // namespace kvpool
