// The host's pass over K and V against the memory's own speed: both on the same threads over the same blocks, in turn;
// speeds are the best of all rounds, ratios the median of the rounds'. What reads memory as fast as a plain sum can't be made faster by other vector code.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cuda/host_workers.h"
#include "cuda/scorers/gather.h"
#include "cuda/scorers/host_kernels.h"
#include "cuda/scorers/score.h"
#include "cuda/scorers/select.h"
#include "cuda/stamp.h"
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
constexpr int kSlowRounds = 2;  // Of the compiler's own code: it takes twenty times as long.

double SecondsOf(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Anonymous memory, each page touched.
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

// Of what was measured in turns: a machine that others use too is now faster, now slower.
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

// Sum of a block, as fast as this processor adds.
__attribute__((target_clones("avx512f", "avx2", "default"))) uint64_t SumOfBlock(uint64_t address,
                                                                                 uint64_t bytes) {
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

// Everything read once, nothing else done.
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

// One decision of each kind on the whole sequence, and what it comes to per generated token at this block size:
// PagedEviction decides once a block, the others move every token but one, every token.
void BenchEviction(const Memory& memory, HostWorkers* workers, Figures* figures) {
  for (const uint32_t per_block : {8u, 16u, 32u}) {
    const Cache cache(memory, KvDtype::kBf16, per_block);
    const KvShape& shape = cache.view.shape;
    double per_token[3] = {};
    const char* const policies[3] = {"paged_eviction", "streaming_llm", "inverse_key_l2"};
    for (int p = 0; p < 3; ++p) {
      const ScorePlan plan = PlanOf(policies[p], shape, workers->count());
      const Records records(plan, shape);
      ComputeRecords(plan, cache.view, 0, shape.blocks(), records.pointers.data(), workers);
      const Workspace workspace(plan);
      std::vector<float> tokens(shape.tokens), blocks(shape.blocks());
      std::vector<uint64_t> keys(shape.tokens);
      std::vector<uint8_t> marks(shape.tokens);
      std::vector<uint32_t> victims(1), kept(shape.tokens);
      double best = 1e9;
      for (int round = 0; round < kRounds; ++round) {
        best = std::min(
            best, SecondsOf([&] {
              // The newest block's record is all that is read: the others are kept.
              ComputeRecords(plan, cache.view, shape.blocks() - 1, 1,
                             records.pointers.data() + shape.blocks() - 1, workers);
              RunScore(plan, {.kv = cache.view, .records = records.pointers.data()}, workspace.span(),
                       {.token_scores = tokens.data(), .block_scores = blocks.data()}, workers);
              const Protection protection =
                  ProtectionOf(plan.request.policy, shape, 0, shape.tokens - per_block);
              if (p == 0) {
                const auto room = absl::MakeSpan(marks).first(shape.blocks());
                MarkProtectedBlocks(protection, {}, shape, room);
                KVPOOL_CHECK(
                    SelectVictims(blocks, room, 1, absl::MakeSpan(keys), absl::MakeSpan(victims)).ok(),
                    "a block to drop");
                return;
              }
              MarkProtectedTokens(protection, {}, shape, absl::MakeSpan(marks));
              KVPOOL_CHECK(
                  SelectVictims(tokens, marks, 1, absl::MakeSpan(keys), absl::MakeSpan(victims)).ok(),
                  "a token to drop");
            }));
      }
      per_token[p] = best * 1e6;
      if (p == 0) {
        per_token[p] /= per_block;
        continue;
      }
      // A token is dropped by moving all behind it one place up: half of the sequence on average, into blocks of
      // its own, the upper half of the memory's.
      const uint32_t half = shape.blocks() / 2;
      KvView from = cache.view;
      from.shape.tokens = half * per_block;
      for (uint32_t i = 0; i + 1 < from.shape.tokens; ++i) kept[i] = i + 1;
      per_token[p] += 1e6 * SecondsOf([&] {
                        Gather({.from = from,
                                .to_blocks = cache.addresses.data() + half,
                                .kept = kept.data(),
                                .kept_tokens = from.shape.tokens - 1},
                               workers);
                      });
    }
    for (int p = 0; p < 3; ++p) {
      figures->Add(absl::StrCat("eviction_per_token_", policies[p], "_", per_block), per_token[p], "us");
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
