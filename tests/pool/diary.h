// A diary is a list of calls of a pool, as data. A generator writes it looking at the model alone. It can be
// applied whole or in part, since a pool must take any call in any order.
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

inline constexpr uint32_t kFirstAlias = 1000;  // keys from here on are in no chain
inline constexpr uint32_t kAliases = 6;

struct Open {
  uint32_t guaranteed, max_blocks, coming;
};
struct Promise {
  int session;
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
  ModelKey parent;  // number 0: none
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
// Of absent blocks, where nothing is to go.
struct Enter {
  BlockRange range;
};
// What was to go before is put back. Nothing is to go where some of the range is not there.
struct Vacate {
  BlockRange range;
};
struct PutBack {
  uint32_t most;
};
struct Withhold {
  uint32_t most;
};
struct Shrink {};
struct Move {
  int session;
  BlockRef from, to;
};
struct SetPolicy {
  std::string policy;
};
struct Advance {
  TimeMs by;
};

using Entry = std::variant<Open, Promise, Lease, Seal, Match, Release, Ref, Touch, Pin, Unpin, SetRetention,
                           SetScores, Expire, Reclaim, ReclaimVictims, End, FreeQuarantine, Grow, Enter,
                           Vacate, PutBack, Withhold, Shrink, Move, SetPolicy, Advance>;
using Diary = std::vector<Entry>;

// The entries as they would be written in C++.
std::string Print(const Entry& entry);
std::string Text(BlockRef ref);
std::string Text(const std::vector<BlockRef>& refs);
std::string Text(const std::vector<uint32_t>& numbers);
std::string Text(const BlockRange& range);

// The options of a pool, and of the diaries written for it.
struct Setting {
  std::string name;
  PoolOptions options;
  // Blocks that the pool begins with.
  uint32_t blocks = 8;
  // Tokens per block, indexed by group.
  std::vector<uint32_t> tokens = {1};
  // Keys are the nodes of a binary tree of this depth.
  uint32_t key_depth = 5;
  uint32_t sessions = 4;
  std::string policy = "lru";
  // Switches go between all policies; else to a new policy of the same name.
  bool switches = false;
  uint32_t diaries = 0;  // 0: as many as for LRU

  friend void PrintTo(const Setting& setting, std::ostream* os) { *os << setting.name; }
};

class Generator {
 public:
  Generator(const Setting& setting, uint64_t seed) : setting_(setting), random_(seed) {}
  // A call that the pool may get in the model's state.
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
  Entry NextGivenBack(const Model& model);

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
  // Compares all views; answers how they differ, or nothing.
  std::string Difference() const;
  // Compares what each key names, which is slower.
  std::string DifferenceOfKeys() const;
  const BlockPool& pool() const { return pool_; }
  const Model& model() const { return model_; }

 private:
  std::string Do(const Open& e);
  std::string Do(const Promise& e);
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
  std::string Do(const Enter& e);
  std::string Do(const Vacate& e);
  std::string Do(const PutBack& e);
  std::string Do(const Withhold& e);
  std::string Do(const Shrink& e);
  std::string Do(const Move& e);
  std::string Do(const SetPolicy& e);
  std::string Do(const Advance& e);
  // One step of the policy that is taking over, if one is.
  std::string TakeOver();
  std::string DifferenceOfBlock(uint32_t b) const;
  std::string DifferenceOfLog(const std::vector<Eviction>& log, const std::vector<uint32_t>& expected) const;

  const Setting setting_;
  BlockPool pool_;
  Model model_;
  uint32_t entries_ = 0;        // Those that were applied.
  std::vector<ModelKey> keys_;  // all keys there are

  enum class Stage { kCopy, kBuild, kFinish, kCatchUp };
  std::unique_ptr<BlockPool::HandOver> hand_over_;  // null: none is under way
  Stage stage_ = Stage::kCopy;
  std::string before_, after_;  // names of policies
};

}  // namespace kvpool::diary

#endif  // KVPOOL_TESTS_POOL_DIARY_H_
