// Naive twins of policies that are queues.
#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "proto/support/check.h"
#include "server/replacement/parts/frequency_sketch.h"
#include "tests/replacement/naive_families.h"

namespace kvpool {
namespace {

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
    sketch_.Reserve(hash_.rbegin()->first + 1);
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

}  // namespace

std::unique_ptr<NaivePolicy> MakeNaiveQueues(std::string_view name, const PolicyOptions& options) {
  if (name == "slru") return std::make_unique<Slru>();
  if (name == "arc") return std::make_unique<Arc>();
  if (name == "s3_fifo") return std::make_unique<S3Fifo>();
  if (name == "sieve") return std::make_unique<Sieve>();
  if (name == "w_tinylfu") return std::make_unique<WTinyLfu>(options.max_blocks);
  return nullptr;
}

}  // namespace kvpool
