// A diary: what was asked of a pool, as data. It is written by a generator that looks at the model alone, and
// can be applied whole or in part, since a pool must take any order of anything.
#ifndef KVPOOL_TESTS_POOL_DIARY_H_
#define KVPOOL_TESTS_POOL_DIARY_H_

#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "server/pool/block_pool.h"
#include "server/pool/hand_over.h"
#include "server/replacement/policy.h"
#include "tests/pool/model.h"

namespace kvpool::diary {

inline constexpr uint32_t kFirstAlias = 1000;  // Keys that are in no chain.
inline constexpr uint32_t kAliases = 6;

struct Open {
  uint32_t guaranteed, max_blocks;
};
struct Lease {
  int session;
  uint32_t count, min;
};
struct Seal {
  struct Entry {
    BlockRef block;
    uint32_t group;
    std::vector<uint32_t> keys;
    bool leave_duplicate = false;
  };
  int session;
  ModelKey parent;  // Number 0: none.
  std::vector<Entry> entries;
};
struct Match {
  int session;
  std::vector<Model::Query> queries;
};
struct Release {
  int session;
  std::vector<BlockRef> blocks;
  UseHint hint;
};
struct Ref {
  int session;
  std::vector<BlockRef> blocks;
};
struct Touch {
  std::vector<BlockRef> blocks;
};
struct Pin {
  std::vector<BlockRef> blocks;
  TimeMs ttl;
};
struct Unpin {
  std::vector<BlockRef> blocks;
};
struct SetRetention {
  std::vector<BlockRef> blocks;
  uint8_t priority;
  TimeMs ttl, half_life;
};
struct SetScores {
  std::vector<BlockRef> blocks;
  std::vector<float> scores;
};
struct Expire {};
struct Reclaim {
  uint32_t count;
};
struct ReclaimVictims {
  std::vector<BlockRef> victims;
};
struct End {
  int session;
};
struct FreeQuarantine {
  int session;
};
struct Grow {
  uint32_t blocks;
};
struct SetPolicy {
  std::string policy;
};
struct Advance {
  TimeMs by;
};

using Entry = std::variant<Open, Lease, Seal, Match, Release, Ref, Touch, Pin, Unpin, SetRetention, SetScores,
                           Expire, Reclaim, ReclaimVictims, End, FreeQuarantine, Grow, SetPolicy, Advance>;
using Diary = std::vector<Entry>;

// As they would be written in C++.
std::string Print(const Entry& entry);
std::string Text(BlockRef ref);
std::string Text(const std::vector<BlockRef>& refs);
std::string Text(const std::vector<uint32_t>& numbers);

// What a pool is, and how wild its days are.
struct Setting {
  std::string name;
  PoolOptions options;
  uint32_t blocks = 8;                 // At the start.
  std::vector<uint32_t> tokens = {1};  // Per block, by group.
  uint32_t key_depth = 5;              // Keys are the nodes of a binary tree of this depth.
  uint32_t sessions = 4;
  std::string policy = "lru";
  bool switches = false;  // Between all policies; else now and then to a new one of the same name.
  uint32_t diaries = 0;   // 0: as many as there are for LRU.

  friend void PrintTo(const Setting& setting, std::ostream* os) { *os << setting.name; }
};

class Generator {
 public:
  Generator(const Setting& setting, uint64_t seed) : setting_(setting), random_(seed) {}
  // Something that the pool may be asked in the model's state.
  Entry Next(const Model& model);

 private:
  uint32_t Below(uint32_t n) { return n == 0 ? 0 : static_cast<uint32_t>(random_() % n); }
  bool OneIn(uint32_t n) { return Below(n) == 0; }
  int Session(const Model& model);
  BlockRef AnyRef(const Model& model);
  std::vector<BlockRef> Refs(const Model& model, int session);
  std::vector<uint32_t> Walk();
  Seal NextSeal(const Model& model);
  Match NextMatch(const Model& model);
  Release NextRelease(const Model& model, int session);

  const Setting setting_;
  std::mt19937_64 random_;
};

// A pool and its model, side by side.
class Pair {
 public:
  explicit Pair(const Setting& setting);
  ~Pair();
  // Applies the entry to both; answers how they differ, or nothing.
  std::string Apply(const Entry& entry);
  // Of all that can be looked at.
  std::string Difference() const;
  // Of what each key names: slower.
  std::string DifferenceOfKeys() const;
  const BlockPool& pool() const { return pool_; }
  const Model& model() const { return model_; }

 private:
  std::string Do(const Open& e);
  std::string Do(const Lease& e);
  std::string Do(const Seal& e);
  std::string Do(const Match& e);
  std::string Do(const Release& e);
  std::string Do(const Ref& e);
  std::string Do(const Touch& e);
  std::string Do(const Pin& e);
  std::string Do(const Unpin& e);
  std::string Do(const SetRetention& e);
  std::string Do(const SetScores& e);
  std::string Do(const Expire& e);
  std::string Do(const Reclaim& e);
  std::string Do(const ReclaimVictims& e);
  std::string Do(const End& e);
  std::string Do(const FreeQuarantine& e);
  std::string Do(const Grow& e);
  std::string Do(const SetPolicy& e);
  std::string Do(const Advance& e);
  // One step of the policy that is taking over, if one is.
  std::string TakeOver();
  std::string DifferenceOfBlock(uint32_t b) const;
  std::string DifferenceOfLog(const std::vector<Eviction>& log, const std::vector<uint32_t>& expected) const;

  const Setting setting_;
  BlockPool pool_;
  Model model_;
  std::vector<ModelKey> keys_;  // All there are.

  enum class Stage { kCopy, kBuild, kFinish, kCatchUp };
  std::unique_ptr<BlockPool::HandOver> hand_over_;  // Null: none.
  Stage stage_ = Stage::kCopy;
  std::string before_, after_;  // Policies.
};

}  // namespace kvpool::diary

#endif  // KVPOOL_TESTS_POOL_DIARY_H_
