// The host's pass over K and V against the memory's own speed: both on the same threads over the same blocks, in turn;
// speeds are the best of all rounds, ratios the median of the rounds'. What reads memory as fast as a plain sum can't be made faster by other vector code.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/base/stamp.h"
#include "cuda/scorers/gather.h"
#include "cuda/scorers/host/host_kernels.h"
#include "cuda/scorers/host/host_workers.h"
#include "cuda/scorers/score.h"
#include "cuda/scorers/select.h"
#include "proto/support/check.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

using namespace scorers;

// Llama-3.1-8B: 4,096 tokens are 512 MiB in 16 bits.
constexpr uint32_t kLayers = 32, kKvHeads = 8, kHeadDim = 128, kTokens = 4096;
constexpr uint64_t kMemoryBytes = 512u << 20;
constexpr int kRounds = 25;
constexpr int kWindowRounds = 5;
constexpr int kEvictionRounds = 11;
// The compiler's own code takes twenty times as long as the others, so it runs fewer rounds.
constexpr int kSlowRounds = 2;

double SecondsOf(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Anonymous memory, of which each page was touched.
class Memory {
 public:
  Memory() {
    void* const memory =
        mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KVPOOL_CHECK(memory != MAP_FAILED, "no 512 MiB for the bench");
    madvise(memory, kMemoryBytes, MADV_HUGEPAGE);
    bytes_ = static_cast<unsigned char*>(memory);
    // Halves of every type are then ordinary numbers between 1 and 2, or so.
    for (uint64_t i = 0; i < kMemoryBytes / 8; ++i) {
      reinterpret_cast<uint64_t*>(bytes_)[i] = 0x3c3c3c3c3c3c3c3cu ^ (MixBits(i) & 0x0303030303030303u);
    }
  }
  ~Memory() { munmap(bytes_, kMemoryBytes); }
  Memory(const Memory&) = delete;
  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes_); }

 private:
  unsigned char* bytes_;
};

// For ratios of what was measured in turns: a machine that others use too is now faster, now slower.
double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Cache {
  Cache(const Memory& memory, KvDtype dtype, uint32_t tokens_per_block) {
    const uint64_t row = kHeadDim * BytesOf(dtype), token = kKvHeads * row, plane = tokens_per_block * token;
    block_bytes = 2 * kLayers * plane;
    view.dtype = dtype;
    view.shape = {.layers = kLayers,
                  .kv_heads = kKvHeads,
                  .tokens_per_block = tokens_per_block,
                  .tokens = static_cast<uint32_t>(
                      std::min<uint64_t>(kTokens, kMemoryBytes / block_bytes * tokens_per_block)),
                  .k_head_dim = kHeadDim,
                  .v_head_dim = kHeadDim};
    // K and V of a layer side by side, as engines have them.
    view.k = {.offset_bytes = 0,
              .layer_stride_bytes = 2 * plane,
              .token_stride_bytes = token,
              .head_stride_bytes = row,
              .dim_stride_bytes = BytesOf(dtype),
              .head_dim = kHeadDim};
    view.v = view.k;
    view.v.offset_bytes = plane;
    for (uint32_t block = 0; block < view.shape.blocks(); ++block) {
      addresses.push_back(memory.address() + block * block_bytes);
    }
    view.blocks = addresses.data();
  }
  uint64_t bytes() const { return addresses.size() * block_bytes; }

  std::vector<uint64_t> addresses;
  uint64_t block_bytes = 0;
  KvView view;
};

using Words = uint64_t __attribute__((vector_size(64)));

__attribute__((always_inline)) inline uint64_t SumOf(uint64_t address, uint64_t bytes) {
  const Words* const words = reinterpret_cast<const Words*>(address);
  Words a = {}, b = {}, c = {}, d = {};
  for (uint64_t i = 0; i < bytes / sizeof(Words); i += 4) {
    a += words[i];
    b += words[i + 1];
    c += words[i + 2];
    d += words[i + 3];
  }
  a += b + c + d;
  return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}
__attribute__((target("avx512f"))) uint64_t SumOfAvx512(uint64_t address, uint64_t bytes) {
  return SumOf(address, bytes);
}
__attribute__((target("avx2"))) uint64_t SumOfAvx2(uint64_t address, uint64_t bytes) {
  return SumOf(address, bytes);
}

// Sum of a block, as fast as this processor adds. Chosen when first called: what target_clones makes is resolved while the
// program is loaded, before the thread sanitizer is there to be called.
uint64_t SumOfBlock(uint64_t address, uint64_t bytes) {
  static const auto sum = __builtin_cpu_supports("avx512f") ? SumOfAvx512
                          : __builtin_cpu_supports("avx2")  ? SumOfAvx2
                                                            : SumOf;
  return sum(address, bytes);
}

// Reads everything once and does nothing else.
uint64_t ReadAll(const Cache& cache, HostWorkers* workers) {
  std::vector<uint64_t> sums(workers->count() * 8);  // A cache line each.
  // The items of the pass (ComputeRecords): whole blocks.
  workers->Run(static_cast<uint32_t>(cache.addresses.size()), [&](uint32_t block, uint32_t worker) {
    sums[worker * 8] += SumOfBlock(cache.addresses[block], cache.block_bytes);
  });
  uint64_t sum = 0;
  for (const uint64_t x : sums) sum += x;
  return sum;
}

struct Records {
  Records(const ScorePlan& plan, const KvShape& shape)
      : floats(uint64_t{plan.record.floats} * shape.blocks()) {
    for (uint32_t block = 0; block < shape.blocks(); ++block) {
      pointers.push_back(floats.data() + uint64_t{block} * plan.record.floats);
    }
  }
  std::vector<float> floats;
  std::vector<float*> pointers;
};

ScorePlan PlanOf(const char* policy, const KvShape& shape, uint32_t threads, const Signals& signals = {}) {
  const auto bound = BindPolicy(policy, {});
  KVPOOL_CHECK(bound.ok(), "%s", policy);
  const auto plan = PlanScore({.policy = *bound, .shape = shape}, signals, threads);
  KVPOOL_CHECK(plan.ok(), "%s", policy);
  return *plan;
}

class Workspace {
 public:
  explicit Workspace(const ScorePlan& plan) : bytes_(plan.workspace_bytes), memory_(bytes_ + 64) {}
  absl::Span<std::byte> span() const {
    const uint64_t start = reinterpret_cast<uint64_t>(memory_.data());
    return {const_cast<std::byte*>(memory_.data()) + (64 - start % 64) % 64, bytes_};
  }

 private:
  size_t bytes_;
  std::vector<std::byte> memory_;
};

// Records of all blocks by one instruction set's code.
void RecordAll(const HostRows& rows, const ScorePlan& plan, const KvView& kv, const Records& records,
               HostWorkers* workers) {
  const HostTeam team(rows);
  workers->Run(kv.shape.blocks(), [&](uint32_t block, uint32_t) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      RecordLayer(team, kv, plan.record, block, layer, records.pointers[block]);
    }
  });
}

struct Dtype {
  const char* name;
  KvDtype dtype;
};
constexpr Dtype kDtypes[] = {{"f32", KvDtype::kF32},
                             {"f16", KvDtype::kF16},
                             {"bf16", KvDtype::kBf16},
                             {"fp8_e4m3", KvDtype::kFp8E4m3},
                             {"fp8_e5m2", KvDtype::kFp8E5m2}};

void BenchFeatures(const Memory& memory, HostWorkers* workers, Figures* figures) {
  volatile uint64_t sink = 0;
  for (const Dtype& type : kDtypes) {
    const Cache cache(memory, type.dtype, 16);
    const ScorePlan plan = PlanOf("paged_eviction", cache.view.shape, workers->count());
    const Records records(plan, cache.view.shape);
    const auto kernels = RunnableHostRows();
    double read = 1e9;
    std::vector<double> pass(kernels.size(), 1e9), of_read;
    for (int round = 0; round < kRounds; ++round) {
      const double this_read = SecondsOf([&] { sink = sink + ReadAll(cache, workers); });
      read = std::min(read, this_read);
      for (size_t i = round < kSlowRounds ? 0 : 1; i < kernels.size(); ++i) {
        const double this_pass =
            SecondsOf([&] { RecordAll(*kernels[i], plan, cache.view, records, workers); });
        pass[i] = std::min(pass[i], this_pass);
        if (i + 1 == kernels.size()) of_read.push_back(this_read / this_pass);
      }
    }
    const double gigabytes = static_cast<double>(cache.bytes()) / 1e9;
    figures->Add(absl::StrCat("read_", type.name), gigabytes / read, "GB/s");
    for (size_t i = 0; i < kernels.size(); ++i) {
      figures->Add(absl::StrCat("features_", type.name, "_", kernels[i]->name), gigabytes / pass[i], "GB/s");
    }
    figures->Add(absl::StrCat("features_", type.name, "_of_read"), Median(of_read), "ratio", AtLeast(0.8));
  }
}

// What a window of queries says of 4,096 tokens: two FLOPs for each element of each key and query.
void BenchWindow(const Memory& memory, HostWorkers* workers, Figures* figures) {
  constexpr uint32_t kQueryHeads = 32;
  const Cache cache(memory, KvDtype::kBf16, 16);
  const KvShape& shape = cache.view.shape;
  for (const uint32_t queries : {1u, 8u, 64u}) {
    std::vector<float> data(uint64_t{kLayers} * queries * kQueryHeads * kHeadDim);
    for (uint64_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(MixBits(i) % 2001) / 1000 - 1;
    Signals signals;
    signals.window = {.data = data.data(),
                      .queries = queries,
                      .q_heads = kQueryHeads,
                      .layer_stride_bytes = uint64_t{queries} * kQueryHeads * kHeadDim * 4,
                      .query_stride_bytes = kQueryHeads * kHeadDim * 4,
                      .head_stride_bytes = kHeadDim * 4};
    const ScorePlan plan = PlanOf("snapkv", shape, workers->count(), signals);
    const Workspace workspace(plan);
    std::vector<float> tokens(shape.tokens);
    double best = 1e9;
    for (int round = 0; round < kWindowRounds; ++round) {
      best = std::min(best, SecondsOf([&] {
                        RunScore(plan, {.kv = cache.view, .signals = signals}, workspace.span(),
                                 {.token_scores = tokens.data()}, workers);
                      }));
    }
    const double flops = 2.0 * kLayers * kQueryHeads * queries * kHeadDim * shape.tokens;
    figures->Add(absl::StrCat("window_", queries, "_queries"), best * 1e3, "ms");
    figures->Add(absl::StrCat("window_", queries, "_queries_speed"), flops / best / 1e9, "GFLOP/s");
  }
}

// A policy that evicts while a sequence decodes: one decision, and the move that frees what it chose.
class Eviction {
 public:
  Eviction(const char* policy, const Cache& cache, uint32_t tokens, HostWorkers* workers)
      : workers_(workers),
        view_(cache.view),
        plan_(PlanOf(policy, Shorten(&view_, tokens), workers->count())),
        records_(plan_, view_.shape),
        workspace_(plan_),
        tokens_(tokens),
        blocks_(view_.shape.blocks()),
        keys_(tokens),
        marks_(tokens),
        kept_(tokens),
        to_blocks_(cache.addresses.data() + view_.shape.blocks()) {
    ComputeRecords(plan_, view_, 0, view_.shape.blocks(), records_.pointers.data(), workers_);
    for (uint32_t i = 0; i + 1 < tokens; ++i) kept_[i] = i + 1;
  }

  // Scores and selection. The newest block's record is all that is read: the others are kept.
  double SecondsToDecide(bool a_block) {
    return SecondsOf([&] {
      const KvShape& shape = view_.shape;
      const uint32_t newest = shape.blocks() - 1;
      ComputeRecords(plan_, view_, newest, 1, records_.pointers.data() + newest, workers_);
      RunScore(plan_, {.kv = view_, .records = records_.pointers.data()}, workspace_.span(),
               {.token_scores = tokens_.data(), .block_scores = blocks_.data()}, workers_);
      const Protection protection =
          ProtectionOf(plan_.request.policy, shape, 0, shape.tokens - shape.tokens_per_block);
      const auto marks = absl::MakeSpan(marks_).first(a_block ? shape.blocks() : shape.tokens);
      if (a_block) {
        MarkProtectedBlocks(protection, {}, shape, marks);
      } else {
        MarkProtectedTokens(protection, {}, shape, marks);
      }
      KVPOOL_CHECK(
          SelectVictims(a_block ? blocks_ : tokens_, marks, 1, absl::MakeSpan(keys_), {&victim_, 1}).ok(),
          "one to drop");
    });
  }

  // The last `count` tokens move up into the place of the one before them, in blocks of their own.
  double SecondsToMove(uint32_t count) {
    KvView from = view_;
    from.shape.tokens = count + 1;
    return SecondsOf([&] {
      Gather({.from = from, .to_blocks = to_blocks_, .kept = kept_.data(), .kept_tokens = count}, workers_);
    });
  }

 private:
  static const KvShape& Shorten(KvView* view, uint32_t tokens) {
    view->shape.tokens = tokens;
    return view->shape;
  }

  HostWorkers* workers_;
  KvView view_;
  ScorePlan plan_;
  Records records_;
  Workspace workspace_;
  std::vector<float> tokens_, blocks_;
  std::vector<uint64_t> keys_;
  std::vector<uint8_t> marks_;
  std::vector<uint32_t> kept_;
  const uint64_t* to_blocks_;
  uint32_t victim_ = 0;
};

// What eviction costs a generated token at a full budget of 2,048. PagedEviction decides once a block of tokens, and a
// block leaves as it is. The others decide every token, and what is behind the victim moves up: for streaming_llm all
// but the sinks, for inverse_key_l2 half of the sequence on average. In favour of these two: features are taken to be kept
// although their blocks are new, and calls are not counted, of which they make one a token.
void BenchEviction(const Memory& memory, HostWorkers* workers, Figures* figures) {
  constexpr uint32_t kResident = kTokens / 2;  // The other half of the memory is where they move to.
  constexpr int kPolicies = 3;
  constexpr const char* kNames[kPolicies] = {"paged_eviction", "streaming_llm", "inverse_key_l2"};
  constexpr uint32_t kMoved[kPolicies] = {0, kResident - 1, kResident / 2};
  for (const uint32_t per_block : {8u, 16u, 32u}) {
    const Cache cache(memory, KvDtype::kBf16, per_block);
    std::vector<std::unique_ptr<Eviction>> evictions;
    for (const char* name : kNames) {
      evictions.push_back(std::make_unique<Eviction>(name, cache, kResident, workers));
    }
    std::vector<double> decisions[kPolicies], costs[kPolicies], ratios[kPolicies];
    for (int round = 0; round < kEvictionRounds; ++round) {
      for (int p = 0; p < kPolicies; ++p) {
        const bool paged = p == 0;
        const double decision = evictions[p]->SecondsToDecide(paged) / (paged ? per_block : 1);
        decisions[p].push_back(decision);
        costs[p].push_back(decision + (paged ? 0 : evictions[p]->SecondsToMove(kMoved[p])));
        ratios[p].push_back(costs[p].back() / costs[0].back());
      }
    }
    for (int p = 0; p < kPolicies; ++p) {
      const std::string name = absl::StrCat(kNames[p], "_", per_block);
      figures->Add(absl::StrCat("eviction_decision_", name), Median(decisions[p]) * 1e6, "us/token");
      if (p == 0) continue;
      figures->Add(absl::StrCat("eviction_with_moves_", name), Median(costs[p]) * 1e6, "us/token");
      figures->Add(absl::StrCat("eviction_", name, "_over_paged"), Median(ratios[p]), "ratio");
    }
  }
}

}  // namespace

void BenchScore(Figures* figures) {
  const uint32_t threads = std::max(1u, std::thread::hardware_concurrency());
  HostWorkers workers(threads);
  const Memory memory;
  figures->Note(absl::StrCat("score: Llama-3.1-8B layout, up to 4,096 tokens, 512 MiB, ", threads,
                             " threads; best speeds and median ratios of ", kRounds, " rounds; code for ",
                             BestHostRows().name));
  BenchFeatures(memory, &workers, figures);
  BenchWindow(memory, &workers, figures);
  BenchEviction(memory, &workers, figures);
}

}  // namespace kvpool::bench
