// Naive twins of policies that compare blocks by numbers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "tests/replacement/naive_families.h"

namespace kvpool {
namespace {

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
  // The least leaves; among equals, the one used first.
  virtual double Number(const Facts& facts) const = 0;
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

}  // namespace

std::unique_ptr<NaivePolicy> MakeNaiveCompared(std::string_view name, const PolicyOptions& options) {
  if (name == "lru") return std::make_unique<Lru>();
  if (name == "fifo") return std::make_unique<Fifo>();
  if (name == "length_aware") return std::make_unique<LengthAware>();
  if (name == "lru_k") return std::make_unique<LruK>();
  if (name == "lfu") return std::make_unique<GreedyDual>(0);
  if (name == "gdsf") return std::make_unique<GreedyDual>(options.cost_per_depth);
  if (name == "retention") return std::make_unique<Retained>(options.max_blocks);
  if (name == "score_weighted") return std::make_unique<ScoreWeighted>(options.max_blocks);
  return nullptr;
}

}  // namespace kvpool
