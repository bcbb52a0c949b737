// Naive twins of policies that learn what becomes of blocks by the turn of their conversation.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "server/replacement/parts/reuse_statistics.h"
#include "tests/replacement/naive_families.h"

namespace kvpool {
namespace {

// A block whose parent is not the block inserted last belongs to the next turn.
class Turned : public NaivePolicy {
 protected:
  struct Facts {
    uint64_t hash = 0, last_use = 0, used_ms = 0;
    int turn = 0, depth = 0, hits = 0, category = 0, phase = 0;
    bool tail = false, returns = false;
    Reuse said = Reuse::kUnknown;
  };
  Facts& Enter(uint32_t block, const Content& content) {
    const uint32_t parent = Index(content.parent);
    Facts f = {.hash = content.hash};
    if (parent != 0) {
      f.turn = facts_.at(parent).turn + (parent == last_inserted_ ? 0 : 1);
      f.depth = facts_.at(parent).depth + 1;
    }
    last_inserted_ = block;
    return facts_[block] = f;
  }
  // Whether the run of blocks inserted together ends with this one.
  bool EndsRun(uint32_t block) { return block == last_inserted_ && std::exchange(last_inserted_, 0) != 0; }
  void Evict(uint32_t block) override { facts_.erase(block); }

  std::map<uint32_t, Facts> facts_;

 private:
  uint32_t last_inserted_ = 0;
};

class WorkloadAware : public Turned {
 public:
  explicit WorkloadAware(uint32_t max_blocks) : reuse_(kClasses, max_blocks) {}
  void Insert(uint32_t block, const Content& content) override {
    Facts& f = Enter(block, content);
    f.hits = reuse_.End(content.hash, now_ms).has_value() ? 1 : 0;
  }
  void Hit(uint32_t block) override {
    Facts& f = facts_.at(block);
    ++f.hits;
    f.category = 0;
    reuse_.End(f.hash, now_ms);
  }
  void Hint(uint32_t block, const UseHint& hint) override {
    if (hint.category != 0) facts_.at(block).category = hint.category;
  }
  void Used(uint32_t block) override {
    Facts& f = facts_.at(block);
    EndsRun(block);
    f.used_ms = now_ms;
    reuse_.Begin(f.hash, ClassOf(f), now_ms);
  }
  void Evict(uint32_t block) override {
    const auto stayed = static_cast<double>(now_ms - facts_.at(block).used_ms);
    stay_ms_ = std::isinf(stay_ms_) ? stayed : stay_ms_ + (stayed - stay_ms_) / 256;
    Turned::Evict(block);
  }
  uint32_t Victim() override {
    // Takes from each class the one used longest ago, then the deepest; and of those the least likely.
    std::map<int, std::tuple<uint64_t, int, uint32_t>> first;
    for (const uint32_t b : offered) {
      const Facts& f = facts_.at(b);
      const std::tuple candidate(f.used_ms, -f.depth, b);
      const auto [it, is_new] = first.emplace(ClassOf(f), candidate);
      if (!is_new) it->second = std::min(it->second, candidate);
    }
    uint32_t least = 0;
    std::tuple<double, int> least_rank;
    for (const auto& [cls, candidate] : first) {
      const auto& [used_ms, minus_depth, block] = candidate;
      const double rate = 1 / reuse_.MeanWait(cls), share = reuse_.ShareOfBegun(cls);
      const double yet = share * std::exp(-rate * static_cast<double>(now_ms - used_ms));
      const std::tuple rank(yet * -std::expm1(-rate * stay_ms_) / (1 - share + yet), minus_depth);
      if (least != 0 && !(rank < least_rank)) continue;
      least = block;
      least_rank = rank;
    }
    return least;
  }

 private:
  static constexpr int kClasses = 4 * 3 + 15;
  static int ClassOf(const Facts& f) {
    return f.category != 0 ? 11 + f.category : std::min(f.turn, 3) * 3 + std::min(f.hits, 2);
  }
  ReuseStatistics reuse_;
  double stay_ms_ = std::numeric_limits<double>::infinity();
};

class Succinct : public Turned {
 public:
  Succinct(uint32_t max_blocks, bool phases) : phases_(phases), reuse_(24, max_blocks) {}
  void Insert(uint32_t block, const Content& content) override {
    Facts& f = Enter(block, content);
    if (const auto cls = reuse_.End(content.hash, inserted_)) f.hits = *cls / 6 + 1;
    ++inserted_;
    Asked(f.hash, /*missed=*/true);
  }
  void Hit(uint32_t block) override {
    Facts& f = facts_.at(block);
    ++f.hits;
    f.said = Reuse::kUnknown;
    f.tail = false;
    reuse_.End(f.hash, inserted_);
    Asked(f.hash, /*missed=*/false);
  }
  void Hint(uint32_t block, const UseHint& hint) override {
    if (hint.reuse != Reuse::kUnknown) facts_.at(block).said = hint.reuse;
  }
  void Used(uint32_t block) override {
    Facts& f = facts_.at(block);
    f.last_use = ++uses_;
    if (EndsRun(block)) f.tail = true;
    const int cls = (std::min(f.hits, 3) * 3 + std::min(f.turn, 2)) * 2 + (f.tail ? 1 : 0);
    f.returns = f.said == Reuse::kUnknown ? reuse_.ChanceOfEnded(cls) > 0.5 : f.said == Reuse::kExpected;
    f.phase = phase_;
    if (inserted_ > 8 * facts_.size()) reuse_.GiveUp(inserted_ - 8 * facts_.size());
    reuse_.Begin(f.hash, cls, inserted_);
    // Now all that a lease made room for is inserted.
    while (shadow_.size() > facts_.size()) {
      shadow_.erase(std::min_element(shadow_.begin(), shadow_.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; }));
    }
    if (shadow_.contains(f.hash)) shadow_[f.hash] = ++asked_;
  }
  uint32_t Victim() override {
    const auto least = [&](bool lru) {
      return *std::min_element(offered.begin(), offered.end(), [&](uint32_t a, uint32_t b) {
        const Facts &f = facts_.at(a), &g = facts_.at(b);
        if (lru) return f.last_use < g.last_use;
        return std::tuple(phases_ ? f.phase : 0, f.returns, f.last_use) <
               std::tuple(phases_ ? g.phase : 0, g.returns, g.last_use);
      });
    };
    if (offered.empty()) return 0;
    if (facts_.at(least(false)).phase == phase_) ++phase_;
    auto absent = static_cast<double>(shadow_.size());
    for (const auto& [block, f] : facts_) absent -= shadow_.contains(f.hash) ? 1 : 0;
    return least(/*lru=*/!(debt_ + absent < static_cast<double>(facts_.size())));
  }

 private:
  void Asked(uint64_t hash, bool missed) {
    const bool lru_missed = !shadow_.contains(hash);
    shadow_[hash] = ++asked_;
    debt_ += (missed ? 1 : 0) - (lru_missed ? 17.0 / 16 : 0);
    debt_ = std::max(debt_, -static_cast<double>(facts_.size()));
  }

  const bool phases_;
  ReuseStatistics reuse_;
  // What an LRU would hold, and when each was asked for or used last.
  std::map<uint64_t, uint64_t> shadow_;
  uint64_t asked_ = 0;
  double debt_ = 0;
  uint64_t inserted_ = 0, uses_ = 0;
  int phase_ = 1;
};

}  // namespace

std::unique_ptr<NaivePolicy> MakeNaiveTurned(std::string_view name, const PolicyOptions& options) {
  if (name == "workload_aware") return std::make_unique<WorkloadAware>(options.max_blocks);
  if (name == "succinct_discard") return std::make_unique<Succinct>(options.max_blocks, /*phases=*/false);
  if (name == "succinct_phase") return std::make_unique<Succinct>(options.max_blocks, /*phases=*/true);
  return nullptr;
}

}  // namespace kvpool
