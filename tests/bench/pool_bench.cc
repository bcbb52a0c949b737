// The block pool alone, without sockets or threads.
//
// The pool is filled, in a random order of block ids, and then serves requests of 64 blocks for documents drawn
// at random from twice as many as it has room for. A request matches its keys, leases and seals what is
// missing, which reclaims as much, and releases all: the blocks of a request are strewn over the whole pool,
// so at 16 Mi blocks only the prefetching hides the memory's latency. One operation is one block in one
// of Match, Lease, Seal and Release; what Lease has to reclaim is in its time and not in the count.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/replacement/policy.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

constexpr uint32_t kRequestBlocks = 64;
constexpr uint32_t kSmallPool = 16u << 10;
constexpr uint32_t kLargePool = 16u << 20;
// As of 64 MiB slabs of 64 KiB blocks.
constexpr uint32_t kSlabBlocks = 1024;
// So many requests run between two looks at the clock; their keys are made before the first look.
constexpr int kPreparedRequests = 64;
constexpr double kMeasuredSeconds = 1.5;

using Clock = std::chrono::steady_clock;

uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t total_pages = 0, resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

enum Verb { kMatch, kLease, kSeal, kRelease };
constexpr const char* kVerbs[] = {"Match", "Lease", "Seal", "Release"};

struct Costs {
  double seconds[4] = {};
  uint64_t operations[4] = {};

  double ns(int verb) const { return seconds[verb] * 1e9 / static_cast<double>(operations[verb]); }
  uint64_t all_operations() const { return operations[0] + operations[1] + operations[2] + operations[3]; }
  double all_seconds() const { return seconds[0] + seconds[1] + seconds[2] + seconds[3]; }
  double operations_per_s() const { return static_cast<double>(all_operations()) / all_seconds(); }
};

class Load {
 public:
  explicit Load(uint32_t blocks)
      : blocks_(blocks),
        documents_(2 * blocks / kRequestBlocks),
        pool_({.max_blocks = blocks, .slab_blocks = kSlabBlocks, .windows = {0}},
              *MakeReplacementPolicy("lru", blocks)) {
    KVPOOL_CHECK(pool_.Grow(blocks - 1).ok(), "%u blocks", blocks - 1);
    session_ = *pool_.AddSession({});
  }

  // Every block was used, in no order.
  void Shuffle() {
    std::vector<BlockRef> all;
    pool_.Lease(session_, 0, blocks_ - 1, blocks_ - 1, &all);
    std::shuffle(all.begin(), all.end(), random_);
    std::vector<Verdict> verdicts(all.size());
    pool_.Release(session_, 0, all, absl::MakeSpan(verdicts));
  }
  // The pool is filled, and turned over once.
  void WarmUp() {
    while (pool_.counters().leased < 3 * uint64_t{blocks_}) Serve(nullptr);
  }
  Costs Measure() {
    Costs costs;
    while (costs.all_seconds() < kMeasuredSeconds) Serve(&costs);
    return costs;
  }
  const BlockPool& pool() const { return pool_; }

 private:
  void Prepare();
  void Serve(Costs* costs);

  const uint32_t blocks_;
  const uint32_t documents_;
  BlockPool pool_;
  Holder session_;
  TimeMs now_ = 0;
  std::mt19937_64 random_{20240611};
  std::vector<BlockKey> keys_;
};

// Keys as a digest would make them: uniform bits (splitmix64 over document and place).
void Load::Prepare() {
  keys_.resize(kPreparedRequests * kRequestBlocks);
  for (size_t i = 0; i < keys_.size(); i += kRequestBlocks) {
    const uint64_t document = random_() % documents_;
    for (uint32_t place = 0; place < kRequestBlocks; ++place) {
      uint64_t state = document << 8 | place;
      for (size_t at = 0; at < keys_[i + place].bytes.size(); at += sizeof(uint64_t)) {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        state = z ^= z >> 31;
        std::memcpy(&keys_[i + place].bytes[at], &z, sizeof(z));
      }
    }
  }
}

void Load::Serve(Costs* costs) {
  Prepare();
  MatchOutcome match;
  SealEntry entries[kRequestBlocks];
  SealVerdict outcomes[kRequestBlocks];
  Verdict verdicts[kRequestBlocks];
  Clock::time_point before = Clock::now();
  const auto account = [&](Verb verb, size_t operations) {
    if (costs == nullptr) return;
    const Clock::time_point after = Clock::now();
    costs->seconds[verb] += std::chrono::duration<double>(after - before).count();
    costs->operations[verb] += operations;
    before = after;
  };
  for (size_t i = 0; i < keys_.size(); i += kRequestBlocks) {
    const absl::Span<const BlockKey> keys = absl::MakeSpan(keys_).subspan(i, kRequestBlocks);
    const GroupQuery query = {.group = 0, .keys = keys};
    ++now_;
    pool_.Match(session_, now_, {&query, 1}, &match);
    account(kMatch, kRequestBlocks);
    std::vector<BlockRef>& held = match.blocks[0];
    const size_t hits = held.size();
    const auto missing = static_cast<uint32_t>(kRequestBlocks - hits);
    pool_.Lease(session_, now_, missing, missing, &held);
    account(kLease, missing);
    for (size_t b = hits; b < kRequestBlocks; ++b) entries[b] = {held[b], {&keys[b], 1}};
    pool_.Seal(session_, now_, hits == 0 ? nullptr : &keys[hits - 1], {entries + hits, missing},
               {outcomes + hits, missing});
    account(kSeal, missing);
    pool_.Release(session_, now_, held, {verdicts, held.size()});
    account(kRelease, kRequestBlocks);
  }
}

void AddCosts(std::string_view size, const Costs& costs, Figures* figures) {
  for (int verb = 0; verb < 4; ++verb) {
    figures->Add(absl::StrCat(kVerbs[verb], " of a block, ", absl::string_view(size.data(), size.size())),
                 costs.ns(verb), "ns");
  }
}

}  // namespace

void BenchPool(Figures* figures) {
  figures->Note("requests of 64 blocks, documents at random from twice the capacity, block ids shuffled");
  Costs small;
  {
    Load load(kSmallPool);
    load.Shuffle();
    load.WarmUp();
    small = load.Measure();
  }
  AddCosts("16 Ki blocks", small, figures);
  figures->Add("operations, 16 Ki blocks", small.operations_per_s(), "1/s", AtLeast(10e6));

  const uint64_t before = ResidentBytes();
  Load load(kLargePool);
  const auto accounted = static_cast<double>(load.pool().bookkeeping_bytes());
  const uint64_t free_bytes =
      static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (free_bytes < 2 * accounted) {
    figures->Skip("16 Mi blocks", absl::StrCat(free_bytes >> 20, " MiB of memory are free"));
    return;
  }
  load.Shuffle();
  load.WarmUp();
  const uint64_t after = ResidentBytes();
  const Costs large = load.Measure();
  AddCosts("16 Mi blocks", large, figures);
  figures->Add("operations, 16 Mi blocks", large.operations_per_s(), "1/s");
  figures->Add("cost at 16 Mi over cost at 16 Ki", small.operations_per_s() / large.operations_per_s(),
               "ratio", AtMost(8));
  figures->Add("bookkeeping of a block, 16 Mi, resident", static_cast<double>(after - before) / kLargePool,
               "bytes", AtMost(96));
  figures->Add("bookkeeping of a block, 16 Mi, accounted", accounted / kLargePool, "bytes", AtMost(96));
}

}  // namespace kvpool::bench
