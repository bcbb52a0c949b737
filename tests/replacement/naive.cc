#include "tests/replacement/naive.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "proto/support/check.h"
#include "server/replacement/frequency_sketch.h"
#include "server/replacement/reuse_statistics.h"

namespace kvpool {
namespace {

// --------------------------------------------------------------------- policies that compare blocks by numbers

class Compared : public NaivePolicy {
 public:
  struct Facts {
    uint64_t hash = 0;
    uint64_t insertion = 0, accesses = 1, last = 0, previous = 0, last_use = 0, depth = 0;
    double worth = 0;
  };
  void Insert(uint32_t block, const Content& content) override {
    ++now_;
    facts_[block] = {.hash = content.hash, .insertion = now_, .last = now_, .last_use = now_};
    const uint32_t parent = Index(content.parent);
    facts_[block].depth = parent == 0 ? 0 : facts_.at(parent).depth + 1;
    Accessed(&facts_[block]);
  }
  void Hit(uint32_t block) override {
    Facts& f = facts_.at(block);
    f.previous = f.last;
    f.last = ++now_;
    ++f.accesses;
    Accessed(&f);
  }
  void Used(uint32_t block) override { facts_.at(block).last_use = ++now_; }
  void Evict(uint32_t block) override {
    Left(facts_.at(block));
    facts_.erase(block);
  }
  uint32_t Victim() override {
    const auto first = std::min_element(offered.begin(), offered.end(), [&](uint32_t a, uint32_t b) {
      const Facts &f = facts_.at(a), &g = facts_.at(b);
      return std::tuple(Number(f), f.last_use, a) < std::tuple(Number(g), g.last_use, b);
    });
    return first == offered.end() ? 0 : *first;
  }

 protected:
  virtual double Number(const Facts& facts) const = 0;  // The least leaves; of two alike, the one used first.
  virtual void Accessed(Facts* facts) {}
  virtual void Left(const Facts& facts) {}
  size_t resident() const { return facts_.size(); }

 private:
  std::map<uint32_t, Facts> facts_;
  uint64_t now_ = 0;
};

class Lru : public Compared {
  double Number(const Facts&) const override { return 0; }
};
class Fifo : public Compared {
  double Number(const Facts& f) const override { return static_cast<double>(f.insertion); }
};
class LengthAware : public Compared {
  double Number(const Facts& f) const override {
    return static_cast<double>(f.accesses) - static_cast<double>(f.depth) / 1e6;
  }
};

class LruK : public Compared {
  double Number(const Facts& f) const override { return static_cast<double>(f.previous); }
  void Accessed(Facts* f) override {
    for (auto it = history_.begin(); it != history_.end(); ++it) {
      if (it->first != f->hash) continue;
      f->previous = it->second;
      history_.erase(it);
      return;
    }
  }
  void Left(const Facts& f) override {
    history_.emplace_back(f.hash, f.last);
    while (history_.size() > resident()) history_.pop_front();
  }
  std::list<std::pair<uint64_t, uint64_t>> history_;
};

class Retained : public NaivePolicy {
 public:
  explicit Retained(uint32_t max_blocks) : half_life_(max_blocks) {}
  void Insert(uint32_t block, const Content&) override {
    ++inserted_;
    facts_[block] = {.priority = 50, .set_at = inserted_, .last_use = ++used_};
  }
  void Hit(uint32_t block) override {
    Facts& f = facts_.at(block);
    const double left = f.priority * std::exp2(-(inserted_ - f.set_at) / half_life_);
    f.priority = static_cast<float>(std::min(100.0, left + 50));
    f.set_at = inserted_;
    f.said = Reuse::kUnknown;
  }
  void Hint(uint32_t block, const UseHint& hint) override {
    if (hint.reuse != Reuse::kUnknown) facts_.at(block).said = hint.reuse;
  }
  void Used(uint32_t block) override {
    Facts& f = facts_.at(block);
    f.last_use = ++used_;
    if (f.said == Reuse::kUnknown) return;
    f.priority = f.said == Reuse::kExpected ? 100 : 1;
    f.set_at = inserted_;
  }
  void Evict(uint32_t block) override { facts_.erase(block); }
  uint32_t Victim() override {
    const auto rank = [&](uint32_t b) {
      const Facts& f = facts_.at(b);
      return std::tuple(std::floor(f.set_at + half_life_ * std::log2(std::max(1.0f, f.priority))),
                        f.last_use);
    };
    const auto first = std::min_element(offered.begin(), offered.end(),
                                        [&](uint32_t a, uint32_t b) { return rank(a) < rank(b); });
    return first == offered.end() ? 0 : *first;
  }

 private:
  struct Facts {
    float priority = 0;
    double set_at = 0;
    uint64_t last_use = 0;
    Reuse said = Reuse::kUnknown;
  };
  const double half_life_;
  std::map<uint32_t, Facts> facts_;
  double inserted_ = 0;
  uint64_t used_ = 0;
};

class ScoreWeighted : public Compared {
 public:
  explicit ScoreWeighted(uint32_t max_blocks) : blocks_(max_blocks) {}
  void Insert(uint32_t block, const Content& content) override {
    scores_.erase(block);
    uses_[block] = ++used_;
    Compared::Insert(block, content);
  }
  void Score(uint32_t block, float score) override { scores_[block] = score; }
  void Used(uint32_t block) override {
    uses_[block] = ++used_;
    Compared::Used(block);
  }
  // Half a turnover between the best and the worst of a sequence.
  uint32_t Victim() override {
    const auto rank = [&](uint32_t b) {
      const double score = scores_.contains(b) ? scores_[b] : 0.5;
      return std::tuple(uses_[b] + score * blocks_ / 2, uses_[b]);
    };
    const auto first = std::min_element(offered.begin(), offered.end(),
                                        [&](uint32_t a, uint32_t b) { return rank(a) < rank(b); });
    return first == offered.end() ? 0 : *first;
  }

 private:
  double Number(const Facts&) const override { return 0; }
  const double blocks_;
  std::map<uint32_t, double> scores_;
  std::map<uint32_t, double> uses_;
  double used_ = 0;
};

// Frequency times cost, with ageing.
class GreedyDual : public Compared {
 public:
  explicit GreedyDual(double cost_per_depth) : cost_per_depth_(cost_per_depth) {}

 private:
  double Number(const Facts& f) const override { return f.worth; }
  void Accessed(Facts* f) override {
    f->worth =
        age_ + static_cast<uint32_t>(f->accesses) * (1 + cost_per_depth_ * static_cast<uint32_t>(f->depth));
  }
  void Left(const Facts& f) override { age_ = std::max(age_, f.worth); }
  const double cost_per_depth_;
  double age_ = 0;
};

// -------------------------------------------------------------------------------- policies that are queues

class Queues : public NaivePolicy {
 protected:
  using Queue = std::list<uint32_t>;  // Oldest first.

  explicit Queues(size_t count) : queues_(count) {}
  void Push(uint32_t block, size_t queue) { queues_[queue].push_back(block); }
  void Drop(uint32_t block) {
    for (Queue& q : queues_) q.remove(block);
  }
  void Move(uint32_t block, size_t queue) {
    Drop(block);
    Push(block, queue);
  }
  size_t QueueOf(uint32_t block) const {
    for (size_t q = 0; q < queues_.size(); ++q) {
      if (std::count(queues_[q].begin(), queues_[q].end(), block) != 0) return q;
    }
    KVPOOL_CHECK(false, "block %u is in no queue", block);
  }
  uint32_t FirstOffered(size_t queue) const {
    for (const uint32_t b : queues_[queue]) {
      if (offered.contains(b)) return b;
    }
    return 0;
  }
  size_t size(size_t queue) const { return queues_[queue].size(); }
  size_t resident() const {
    size_t sum = 0;
    for (const Queue& q : queues_) sum += q.size();
    return sum;
  }

  std::vector<Queue> queues_;
  std::map<uint32_t, uint64_t> hash_;
};

class Slru : public Queues {
 public:
  Slru() : Queues(2) {}
  void Insert(uint32_t block, const Content&) override { Push(block, 0); }
  void Hit(uint32_t block) override {
    Move(block, 1);
    while (size(1) > resident() * 4 / 5) Move(queues_[1].front(), 0);
  }
  void Used(uint32_t block) override { Move(block, QueueOf(block)); }
  void Evict(uint32_t block) override { Drop(block); }
  uint32_t Victim() override { return FirstOffered(0) != 0 ? FirstOffered(0) : FirstOffered(1); }
};

using Ghosts = std::list<uint64_t>;  // Oldest first.
bool Forget(Ghosts* ghosts, uint64_t hash) { return ghosts->remove(hash) != 0; }

class Arc : public Queues {
 public:
  Arc() : Queues(2) {}
  void Insert(uint32_t block, const Content& content) override {
    const size_t c = resident() + 1, b1 = b1_.size(), b2 = b2_.size();
    hash_[block] = content.hash;
    if (Forget(&b1_, content.hash)) {
      p_ = std::min(c, p_ + std::max<size_t>(1, b2 / b1));
      Push(block, 1);
    } else if (Forget(&b2_, content.hash)) {
      const size_t step = std::max<size_t>(1, b1 / b2);
      p_ = p_ > step ? p_ - step : 0;
      Push(block, 1);
    } else {
      Push(block, 0);
    }
  }
  void Hit(uint32_t block) override { Move(block, 1); }
  void Used(uint32_t block) override { Move(block, QueueOf(block)); }
  void Evict(uint32_t block) override {
    const size_t c = resident();
    (QueueOf(block) == 0 ? b1_ : b2_).push_back(hash_[block]);
    Drop(block);
    while (size(0) + b1_.size() > c) b1_.pop_front();
    while (resident() + b1_.size() + b2_.size() > 2 * c) b2_.pop_front();
  }
  uint32_t Victim() override {
    const bool from_t1 = FirstOffered(0) != 0 && (size(0) > p_ || FirstOffered(1) == 0);
    return FirstOffered(from_t1 ? 0 : 1);
  }

 private:
  Ghosts b1_, b2_;
  size_t p_ = 0;
};

class S3Fifo : public Queues {
 public:
  S3Fifo() : Queues(2) {}
  void Insert(uint32_t block, const Content& content) override {
    hash_[block] = content.hash;
    hits_[block] = 0;
    Push(block, Forget(&ghosts_, content.hash) ? 1 : 0);
  }
  void Hit(uint32_t block) override { hits_[block] = std::min(3, hits_[block] + 1); }
  void Evict(uint32_t block) override {
    if (QueueOf(block) == 0) ghosts_.push_back(hash_[block]);
    while (ghosts_.size() > resident() * 9 / 10) ghosts_.pop_front();
    Drop(block);
  }
  uint32_t Victim() override {
    if (offered.empty()) return 0;
    while (true) {
      const uint32_t small = FirstOffered(0), main = FirstOffered(1);
      const bool small_is_full = size(0) * 10 >= resident();
      if (main == 0 || (small != 0 && small_is_full)) {
        if (hits_[small] < 2) return small;
        hits_[small] = 0;
        Move(small, 1);
      } else {
        if (hits_[main] == 0) return main;
        --hits_[main];
        Move(main, 1);
      }
    }
  }

 private:
  Ghosts ghosts_;
  std::map<uint32_t, int> hits_;
};

class Sieve : public Queues {
 public:
  Sieve() : Queues(1) {}
  void Insert(uint32_t block, const Content&) override {
    Push(block, 0);
    visited_[block] = false;
    order_[block] = ++insertions_;
  }
  void Hit(uint32_t block) override { visited_[block] = true; }
  void Evict(uint32_t block) override {
    Drop(block);
    if (order_[block] != hand_) return;
    ++hand_;
    if (std::none_of(offered.begin(), offered.end(), [&](uint32_t b) { return order_[b] >= hand_; }))
      hand_ = 0;
  }
  uint32_t Victim() override {
    if (offered.empty()) return 0;
    for (;; hand_ = 0) {
      for (const uint32_t b : queues_[0]) {
        if (order_[b] < hand_ || !offered.contains(b)) continue;
        hand_ = order_[b];
        if (!visited_[b]) return b;
        visited_[b] = false;
        ++hand_;
      }
    }
  }

 private:
  std::map<uint32_t, bool> visited_;
  std::map<uint32_t, uint64_t> order_;
  uint64_t insertions_ = 0, hand_ = 0;
};

class WTinyLfu : public Queues {
 public:
  explicit WTinyLfu(uint32_t blocks) : Queues(3), sketch_(blocks) {}
  void Insert(uint32_t block, const Content& content) override {
    hash_[block] = content.hash;
    sketch_.Add(content.hash);
    Push(block, 0);
    if (resident() > most_) {
      most_ = resident();
      if (Over()) Move(queues_[0].front(), 1);
    }
  }
  void Hit(uint32_t block) override {
    sketch_.Add(hash_[block]);
    if (QueueOf(block) == 0) return;
    Move(block, 2);
    while (size(2) * 5 > (size(1) + size(2)) * 4) Move(queues_[2].front(), 1);
  }
  void Used(uint32_t block) override { Move(block, QueueOf(block)); }
  void Evict(uint32_t block) override { Drop(block); }
  uint32_t Victim() override {
    const uint32_t newcomer = FirstOffered(0);
    const uint32_t old = FirstOffered(1) != 0 ? FirstOffered(1) : FirstOffered(2);
    if (newcomer == 0) return old;
    if (old == 0) return newcomer;
    if (size(0) < std::max<size_t>(1, resident() / 100)) return old;
    if (sketch_.Count(hash_[newcomer]) <= sketch_.Count(hash_[old])) return newcomer;
    Move(newcomer, 1);
    return old;
  }

 private:
  bool Over() const { return size(0) > std::max<size_t>(1, resident() / 100); }
  FrequencySketch sketch_;
  size_t most_ = 0;
};

// ---------------------------------------------------------------------- policies that know what became of others

// A block whose parent is not the block that was inserted last is of the next turn.
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
    stay_ms_ += (stayed - stay_ms_) / 256;
    Turned::Evict(block);
  }
  uint32_t Victim() override {
    // Of each class the one used longest ago, then the deepest; of those the least likely.
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
  double stay_ms_ = 0;
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
    while (shadow_.size() > facts_.size()) {
      shadow_.erase(std::min_element(shadow_.begin(), shadow_.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; }));
    }
    debt_ += (missed ? 1 : 0) - (lru_missed ? 17.0 / 16 : 0);
    debt_ = std::max(debt_, -static_cast<double>(facts_.size()));
  }

  const bool phases_;
  ReuseStatistics reuse_;
  std::map<uint64_t, uint64_t> shadow_;  // What an LRU would hold, and when it was asked for or used last.
  uint64_t asked_ = 0;
  double debt_ = 0;
  uint64_t inserted_ = 0, uses_ = 0;
  int phase_ = 1;
};

// ---------------------------------------------------------------------------------------------------- twins

class Twins final : public ReplacementPolicy {
 public:
  Twins(std::unique_ptr<ReplacementPolicy> policy, std::unique_ptr<NaivePolicy> naive)
      : policy_(std::move(policy)), naive_(std::move(naive)) {}

  std::string_view name() const override { return policy_->name(); }
  void OnInsert(BlockId block, const Content& content) override {
    policy_->OnInsert(block, content);
    naive_->now_ms = content.now_ms;
    naive_->Insert(Index(block), content);
  }
  void OnHit(BlockId block, uint64_t now_ms) override {
    policy_->OnHit(block, now_ms);
    naive_->now_ms = now_ms;
    naive_->Hit(Index(block));
  }
  void OnHint(BlockId block, const UseHint& hint) override {
    policy_->OnHint(block, hint);
    naive_->Hint(Index(block), hint);
  }
  void OnScore(BlockId block, float score) override {
    policy_->OnScore(block, score);
    naive_->Score(Index(block), score);
  }
  void OnUsed(BlockId block, uint64_t now_ms) override {
    policy_->OnUsed(block, now_ms);
    naive_->now_ms = now_ms;
    naive_->Used(Index(block));
  }
  void OnOffer(BlockId block) override {
    policy_->OnOffer(block);
    naive_->offered.insert(Index(block));
  }
  void OnWithdraw(BlockId block) override {
    policy_->OnWithdraw(block);
    naive_->offered.erase(Index(block));
  }
  void OnEvict(BlockId block) override {
    policy_->OnEvict(block);
    naive_->Evict(Index(block));
  }
  BlockId Victim(uint64_t now_ms) override {
    const BlockId victim = policy_->Victim(now_ms);
    naive_->now_ms = now_ms;
    const uint32_t expected = naive_->Victim();
    ++victims_;
    KVPOOL_CHECK(Index(victim) == expected, "victim %lu is block %u, not %u as its naive twin has it",
                 victims_, Index(victim), expected);
    return victim;
  }
  void Prefetch(BlockId block, uint64_t hash) const override { policy_->Prefetch(block, hash); }
  Rank Standing(BlockId block) const override { return policy_->Standing(block); }
  uint32_t offered() const override { return policy_->offered(); }
  double bytes_per_block() const override { return policy_->bytes_per_block(); }

 private:
  const std::unique_ptr<ReplacementPolicy> policy_;
  const std::unique_ptr<NaivePolicy> naive_;
  uint64_t victims_ = 0;
};

}  // namespace

std::unique_ptr<NaivePolicy> MakeNaive(std::string_view name, const PolicyOptions& options) {
  if (name == "lru") return std::make_unique<Lru>();
  if (name == "fifo") return std::make_unique<Fifo>();
  if (name == "length_aware") return std::make_unique<LengthAware>();
  if (name == "lru_k") return std::make_unique<LruK>();
  if (name == "lfu") return std::make_unique<GreedyDual>(0);
  if (name == "gdsf") return std::make_unique<GreedyDual>(options.cost_per_depth);
  if (name == "slru") return std::make_unique<Slru>();
  if (name == "arc") return std::make_unique<Arc>();
  if (name == "s3_fifo") return std::make_unique<S3Fifo>();
  if (name == "sieve") return std::make_unique<Sieve>();
  if (name == "retention") return std::make_unique<Retained>(options.max_blocks);
  if (name == "score_weighted") return std::make_unique<ScoreWeighted>(options.max_blocks);
  if (name == "workload_aware") return std::make_unique<WorkloadAware>(options.max_blocks);
  if (name == "succinct_discard") return std::make_unique<Succinct>(options.max_blocks, /*phases=*/false);
  if (name == "succinct_phase") return std::make_unique<Succinct>(options.max_blocks, /*phases=*/true);
  if (name == "w_tinylfu") return std::make_unique<WTinyLfu>(options.max_blocks);
  return nullptr;
}

std::unique_ptr<ReplacementPolicy> WithTwin(std::unique_ptr<ReplacementPolicy> policy,
                                            std::unique_ptr<NaivePolicy> naive) {
  return std::make_unique<Twins>(std::move(policy), std::move(naive));
}

}  // namespace kvpool
