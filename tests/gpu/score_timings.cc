// The cost of scoring on a GPU, by the GPU's own clock, and its targets:
//
//   feature pass        85 % of the bandwidth at which the device copies its own memory, measured just before
//   prune, cold         200 us: 4,096 tokens of a Llama-3.1-8B layout in bf16, 512 MiB to read
//   prune, kept         50 us: the same with the features of all blocks but the newest kept
//   keydiff             350 us: the same by the distance to a mean key, whose products are a second pass over K
//   caote               350 us: the same by the error that a token's leaving makes, a second pass over V
//   attention           1,500 us: the same by 64 queries of 32 heads, which need K twice
//   selection           300 us: half of a million candidates leave, from scores there to victims on the host
//
// and without a target:
//
//   passes of a type    records, products with the mean key, and attention in each other type
//   compaction          half of the 4,096 tokens are moved to other blocks, and the others dropped, merged into them, or
//                       written to others in 4 bits
//   every policy        prunes the 4,096 tokens, cold, with all its signals and weights
//
// Prints a line for each: ok or MISSED, the median of several rounds, and the target. Exit status: 0
// measured, 1 something failed, 2 there is no GPU.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cuda/driver/cuda_context.h"
#include "cuda/driver/cuda_kv_compute.h"
#include "cuda/scorers/policies/registry.h"
#include "cuda/scorers/select.h"
#include "proto/support/status_macros.h"
#include "tests/gpu/probe_driver.h"

namespace kvpool {
namespace {

using namespace scorers;

struct Effort {
  uint32_t layers = 32;
  uint32_t tokens = 4096;
  uint32_t pass_tokens = 32768;  // 4 GiB, so that the launch's cost does not matter
  uint32_t candidates = 1 << 20;
  size_t copy_bytes = size_t{4} << 30;
  int rounds = 21;
  int warmups = 3;
};
constexpr Effort kQuick = {.layers = 2,
                           .tokens = 256,
                           .pass_tokens = 128,
                           .candidates = 20000,
                           .copy_bytes = 1 << 20,
                           .rounds = 1,
                           .warmups = 0};
constexpr uint32_t kKvHeads = 8, kHeadDim = 128, kTokensPerBlock = 16, kQueryHeads = 32, kQueries = 64;
constexpr uint32_t kHiddenDim = 64;          // Weights of learned policies grow with it.
constexpr uint64_t kMostWeights = 64 << 20;  // floats
struct Type {
  KvDtype dtype;
  const char* name;
};
constexpr Type kBf16 = {KvDtype::kBf16, "bf16"};
constexpr Type kOtherTypes[] = {{KvDtype::kF32, "f32"},
                                {KvDtype::kF16, "f16"},
                                {KvDtype::kFp8E4m3, "fp8_e4m3"},
                                {KvDtype::kFp8E5m2, "fp8_e5m2"}};

// Llama-3.1-8B: K and V of a layer side by side, as in engines.
KvView LlamaView(uint32_t layers, uint32_t tokens, KvDtype dtype = KvDtype::kBf16) {
  const uint64_t row = kHeadDim * BytesOf(dtype), token = kKvHeads * row, plane = kTokensPerBlock * token;
  KvView view;
  view.dtype = dtype;
  view.shape = {.layers = layers,
                .kv_heads = kKvHeads,
                .tokens_per_block = kTokensPerBlock,
                .tokens = tokens,
                .k_head_dim = kHeadDim,
                .v_head_dim = kHeadDim};
  view.k = {.offset_bytes = 0,
            .layer_stride_bytes = 2 * plane,
            .token_stride_bytes = token,
            .head_stride_bytes = row,
            .dim_stride_bytes = BytesOf(dtype),
            .head_dim = kHeadDim};
  view.v = view.k;
  view.v.offset_bytes = plane;
  return view;
}
uint64_t BytesOf(const KvView& view) {
  return uint64_t{view.shape.blocks()} * view.shape.layers * view.k.layer_stride_bytes;
}

// A sequence on the device, with a record for each block.
struct Cache {
  KvView view;
  std::unique_ptr<KvBuffer> memory, record_memory, staged;
  Signals signals;
  std::vector<uint64_t> addresses;
  std::vector<float*> records;
  ScorePlan plan;
};

class Timings {
 public:
  explicit Timings(const Effort& effort) : effort_(effort) {}

  absl::Status Open() {
    ASSIGN_OR_RETURN(context_, CudaContext::Open("0"));
    ASSIGN_OR_RETURN(compute_, CudaKvCompute::Open(context_, {.timed = true}));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    ASSIGN_OR_RETURN(stream_, MakeStream(context_));
    ASSIGN_OR_RETURN(probe_, LoadProbeDriver());
    return absl::OkStatus();
  }

  absl::Status Run() {
    ASSIGN_OR_RETURN(const double copy_rate, CopyRate());
    std::printf("     copy on the device             %8.1f GB/s read and written\n", copy_rate / 1e9);
    {
      Cache cache;
      RETURN_IF_ERROR(Make("paged_eviction", effort_.pass_tokens, &cache));
      ASSIGN_OR_RETURN(const double us, Median([&] { return Pass(cache); }));
      const double rate = static_cast<double>(BytesOf(cache.view)) / us * 1e6;
      const double share = rate / copy_rate;
      Print(share >= 0.85, "feature pass",
            absl::StrFormat("%8.1f GB/s, %.0f %% of the copy", rate / 1e9, share * 100), "85 %");
    }
    Cache cache;
    RETURN_IF_ERROR(Make("paged_eviction", effort_.tokens, &cache));
    const uint32_t blocks = cache.view.shape.blocks();
    ASSIGN_OR_RETURN(const double cold, Median([&] { return Prune(cache, {0, blocks}); }));
    Print(cold <= 200, absl::StrCat("prune of ", effort_.tokens, " tokens, cold"),
          absl::StrFormat("%8.1f us", cold), "200 us");
    ASSIGN_OR_RETURN(const double kept, Median([&] { return Prune(cache, {blocks - 1, 1}); }));
    Print(kept <= 50, absl::StrCat("prune of ", effort_.tokens, " tokens, kept"),
          absl::StrFormat("%8.1f us", kept), "50 us");
    RETURN_IF_ERROR(Cold("keydiff", 350));
    RETURN_IF_ERROR(Cold("caote", 350));
    RETURN_IF_ERROR(Cold("cake", 1500));
    ASSIGN_OR_RETURN(const double chosen, Selection());
    Print(chosen <= 300, absl::StrCat("selection of ", effort_.candidates),
          absl::StrFormat("%8.1f us", chosen), "300 us");
    for (const Type& type : kOtherTypes) {
      for (const char* policy : {"keydiff", "cake"}) RETURN_IF_ERROR(Untargeted(policy, type));
    }
    RETURN_IF_ERROR(Compaction(kBf16));
    for (const Type& type : kOtherTypes) RETURN_IF_ERROR(Compaction(type));
    for (const PolicyFacts* const facts : Policies()) {
      RETURN_IF_ERROR(Untargeted(std::string(facts->name), kBf16));
    }
    return Untargeted("paged_eviction", kBf16, {{"ratio", "of_sums"}});
  }

 private:
  using Settings = std::vector<std::pair<std::string, std::string>>;

  static void Print(const std::string& what, double us) {
    std::printf("       %-30s %8.1f us\n", what.c_str(), us);
  }
  static void Print(bool met, const std::string& what, const std::string& figure, const std::string& limit) {
    std::printf("%-6s %-30s %s (held to %s)\n", met ? "ok" : "MISSED", what.c_str(), figure.c_str(),
                limit.c_str());
  }

  absl::Status Cold(const std::string& policy, int limit_us) {
    Cache cache;
    RETURN_IF_ERROR(Make(policy, effort_.tokens, &cache));
    ASSIGN_OR_RETURN(const double us, Median([&] { return Prune(cache, {0, cache.view.shape.blocks()}); }));
    Print(us <= limit_us, policy, absl::StrFormat("%8.1f us", us), absl::StrCat(limit_us, " us"));
    return absl::OkStatus();
  }

  absl::Status Untargeted(const std::string& policy, const Type& type, const Settings& settings = {}) {
    Cache cache;
    RETURN_IF_ERROR(Make(policy, effort_.tokens, &cache, type.dtype, settings));
    ASSIGN_OR_RETURN(const double us, Once([&] { return Prune(cache, {0, cache.view.shape.blocks()}); }));
    std::string name = absl::StrCat(policy, ", ", type.name);
    for (const auto& [key, value] : settings) absl::StrAppend(&name, ", ", key, "=", value);
    Print(name, us);
    if (!cache.plan.own_blocks) return absl::OkStatus();
    ASSIGN_OR_RETURN(const double tokens_us, Once([&] { return Prune(cache, {0, 1}, /*of_tokens=*/true); }));
    Print(absl::StrCat(name, ", by tokens"), tokens_us);
    return absl::OkStatus();
  }

  // Every second token stays; the others are dropped, merged into those, or kept in low precision.
  absl::Status Compaction(const Type& type) {
    Cache cache;
    RETURN_IF_ERROR(Make("recency", effort_.tokens, &cache, type.dtype));
    const uint32_t kept_tokens = effort_.tokens / 2;
    std::vector<uint32_t> kept(kept_tokens), evicted(kept_tokens);
    for (uint32_t i = 0; i < kept_tokens; ++i) kept[i] = 2 * i, evicted[i] = 2 * i + 1;
    ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> to, compute_->Allocate(BytesOf(cache.view) / 2));
    std::vector<uint64_t> to_blocks;
    for (uint32_t block = 0; block < cache.view.shape.blocks() / 2; ++block) {
      to_blocks.push_back(to->address() + block * cache.view.shape.layers * cache.view.k.layer_stride_bytes);
    }
    const GatherRequest gather = {
        .from = cache.view, .to_blocks = to_blocks.data(), .kept = kept.data(), .kept_tokens = kept_tokens};
    ASSIGN_OR_RETURN(const double dropped, Once([&]() -> absl::StatusOr<double> {
                       RETURN_IF_ERROR(compute_->Gather(gather));
                       return compute_->last_times().call_us;
                     }));
    Print(absl::StrCat("compaction of ", effort_.tokens, " tokens, ", type.name), dropped);
    const MergeRequest merge = {.gather = gather, .evicted = evicted.data(), .evicted_tokens = kept_tokens};
    ASSIGN_OR_RETURN(const double merged, Once([&]() -> absl::StatusOr<double> {
                       RETURN_IF_ERROR(compute_->Merge(merge).status());
                       return compute_->last_times().call_us;
                     }));
    Print(absl::StrCat("the same with a merge, ", type.name), merged);
    const KvShape& shape = cache.view.shape;
    const LowRequest low = {
        .from = cache.view,
        .to_blocks = to_blocks.data(),
        .evicted = evicted.data(),
        .evicted_tokens = kept_tokens,
        .layout = LowLayout::Of({.planes = shape.planes(),
                                 .k_head_dim = shape.k_head_dim,
                                 .v_head_dim = shape.v_head_dim,
                                 .bits = 4,
                                 .block_bytes = shape.layers * cache.view.k.layer_stride_bytes})};
    if (low.layout.Blocks(kept_tokens) > to_blocks.size()) {
      return absl::InternalError(absl::StrCat(low.layout.Blocks(kept_tokens), " blocks are needed"));
    }
    ASSIGN_OR_RETURN(const double in_bits, Once([&]() -> absl::StatusOr<double> {
                       RETURN_IF_ERROR(compute_->KeepLow(low));
                       return compute_->last_times().call_us;
                     }));
    Print(absl::StrCat("what leaves, in 4 bits, ", type.name), in_bits);
    RETURN_IF_ERROR(Fold(cache, evicted, type));
    return type.dtype == kBf16.dtype ? Drift(cache) : absl::OkStatus();
  }

  // Tokens that leave are added to a state, with the same weights for all planes.
  absl::Status Fold(const Cache& cache, const std::vector<uint32_t>& evicted, const Type& type) {
    FoldRequest fold = {.from = cache.view,
                        .evicted = evicted.data(),
                        .evicted_tokens = static_cast<uint32_t>(evicted.size()),
                        .features = 8,
                        .hidden = 32};
    const std::vector<float> weights(fold.WeightFloats(), 0.125f);
    const size_t weight_bytes = weights.size() * sizeof(float);
    ASSIGN_OR_RETURN(
        const std::unique_ptr<KvBuffer> memory,
        compute_->Allocate(weight_bytes + cache.view.shape.planes() * fold.StateFloats() * sizeof(float)));
    const KvPiece piece = {.address = reinterpret_cast<uint64_t>(weights.data()), .bytes = weight_bytes};
    RETURN_IF_ERROR(compute_->Stage({&piece, 1}, memory->address()));
    fold.weights = reinterpret_cast<const float*>(memory->address());
    fold.state = reinterpret_cast<float*>(memory->address() + weight_bytes);
    ASSIGN_OR_RETURN(const double us, Once([&]() -> absl::StatusOr<double> {
                       RETURN_IF_ERROR(compute_->Fold(fold).status());
                       return compute_->last_times().call_us;
                     }));
    Print(absl::StrCat("what leaves, in a state, ", type.name), us);
    return absl::OkStatus();
  }

  // How far the outputs of one layer move when every second token leaves, by a few queries.
  absl::Status Drift(const Cache& cache) {
    const std::vector<uint32_t> kept((cache.view.shape.tokens + 31) / 32, 0x55555555u);
    DriftRequest drift = {.kv = cache.view, .window = cache.signals.window, .kept = kept.data()};
    drift.window.queries = 8;
    ASSIGN_OR_RETURN(const double us, Once([&]() -> absl::StatusOr<double> {
                       RETURN_IF_ERROR(compute_->Drift(drift).status());
                       return compute_->last_times().call_us;
                     }));
    Print(absl::StrCat("drift of a layer, ", drift.window.queries, " queries"), us);
    return absl::OkStatus();
  }

  // What has no target is measured fewer times: once, where only the kernels' counts are of interest.
  absl::StatusOr<double> Once(const std::function<absl::StatusOr<double>()>& measure) const {
    return Median(measure, effort_.warmups / 3, std::max(1, effort_.rounds / 3));
  }
  absl::StatusOr<double> Median(const std::function<absl::StatusOr<double>()>& measure) const {
    return Median(measure, effort_.warmups, effort_.rounds);
  }
  absl::StatusOr<double> Median(const std::function<absl::StatusOr<double>()>& measure, int warmups,
                                int rounds) const {
    std::vector<double> all;
    for (int round = -warmups; round < rounds; ++round) {
      ASSIGN_OR_RETURN(const double one, measure());
      if (round >= 0) all.push_back(one);
    }
    std::ranges::nth_element(all, all.begin() + all.size() / 2);
    return all[all.size() / 2];
  }

  // Bytes read and written per second.
  absl::StatusOr<double> CopyRate() {
    ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> from, compute_->Allocate(effort_.copy_bytes));
    ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> to, compute_->Allocate(effort_.copy_bytes));
    ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
    const Driver& driver = context_->driver();
    CudaEvent events[2];
    for (CudaEvent& event : events) {
      CUevent made;
      RETURN_IF_ERROR(context_->Check(driver.cuEventCreate(&made, CU_EVENT_DEFAULT), "cuEventCreate"));
      event = CudaEvent(context_, made);
    }
    ASSIGN_OR_RETURN(
        const double ms, Median([&]() -> absl::StatusOr<double> {
          float elapsed_ms = 0;
          for (const CUresult result :
               {driver.cuEventRecord(events[0].get(), stream_.get()),
                probe_.cuMemcpyDtoDAsync(to->address(), from->address(), effort_.copy_bytes, stream_.get()),
                driver.cuEventRecord(events[1].get(), stream_.get()),
                driver.cuStreamSynchronize(stream_.get()),
                driver.cuEventElapsedTime(&elapsed_ms, events[0].get(), events[1].get())}) {
            RETURN_IF_ERROR(context_->Check(result, "copying on the device"));
          }
          return double{elapsed_ms};
        }));
    return 2 * static_cast<double>(effort_.copy_bytes) / (ms / 1e3);
  }

  // What tokens have of every signal is an ordinary number, and so are hidden states, weights and a window's queries.
  absl::Status StageSignals(const BoundPolicy& policy, Cache* cache) {
    const KvShape& shape = cache->view.shape;
    Signals& signals = cache->signals;
    signals.hidden_dim = kHiddenDim;
    uint64_t floats = std::max<uint64_t>(shape.planes(), kHiddenDim) * shape.tokens;
    if ((policy.needs() & kNeedWeights) != 0) {
      signals.weight_count = policy.facts().weight_count(policy.params, shape, kHiddenDim, 1);
      if (signals.weight_count > kMostWeights) {
        return absl::InternalError(
            absl::StrCat(std::string(policy.facts().name), " needs ", signals.weight_count, " weights"));
      }
      floats = std::max(floats, signals.weight_count);
    }
    const std::vector<float> numbers(floats, 1.0f / static_cast<float>(shape.tokens));
    const std::vector<uint16_t> queries(uint64_t{shape.layers} * kQueries * kQueryHeads * kHeadDim, 0x3c3c);
    const size_t number_bytes = numbers.size() * sizeof(float),
                 query_bytes = queries.size() * sizeof(uint16_t);
    ASSIGN_OR_RETURN(cache->staged, compute_->Allocate(number_bytes + query_bytes));
    const KvPiece pieces[] = {{.address = reinterpret_cast<uint64_t>(numbers.data()), .bytes = number_bytes},
                              {.address = reinterpret_cast<uint64_t>(queries.data()), .bytes = query_bytes}};
    const uint64_t there = cache->staged->address();
    RETURN_IF_ERROR(compute_->Stage(pieces, there));
    const auto* const staged = reinterpret_cast<const float*>(there);
    for (const SignalFacts& facts : kSignals) {
      if (facts.shape == SignalShape::kWindow) continue;  // It is computed from the queries.
      const bool of_tokens = facts.shape == SignalShape::kToken;
      signals.*facts.array = {staged, of_tokens ? uint64_t{shape.kv_heads} * shape.tokens : 0,
                              of_tokens ? shape.tokens : 0};
    }
    constexpr uint64_t kRow = kHeadDim * sizeof(uint16_t);
    cache->signals.window = {.data = reinterpret_cast<const void*>(there + number_bytes),
                             .dtype = KvDtype::kBf16,
                             .queries = kQueries,
                             .q_heads = kQueryHeads,
                             .layer_stride_bytes = kQueries * kQueryHeads * kRow,
                             .query_stride_bytes = kQueryHeads * kRow,
                             .head_stride_bytes = kRow};
    return absl::OkStatus();
  }

  absl::Status Make(const std::string& policy_name, uint32_t tokens, Cache* cache,
                    KvDtype dtype = KvDtype::kBf16, const Settings& settings = {}) {
    cache->view = LlamaView(effort_.layers, tokens, dtype);
    const uint32_t blocks = cache->view.shape.blocks();
    ASSIGN_OR_RETURN(cache->memory, compute_->Allocate(BytesOf(cache->view)));
    const CUdeviceptr start = cache->memory->address();
    for (uint32_t block = 0; block < blocks; ++block) {
      cache->addresses.push_back(start + uint64_t{block} * effort_.layers * cache->view.k.layer_stride_bytes);
    }
    cache->view.blocks = cache->addresses.data();
    {
      ASSIGN_OR_RETURN(const CurrentContext current, context_->MakeCurrent());
      const Driver& driver = context_->driver();
      // 0x3c3c is an ordinary number.
      RETURN_IF_ERROR(context_->Check(
          driver.cuMemsetD8Async(start, 0x3c, cache->memory->bytes(), stream_.get()), "cuMemsetD8Async"));
      RETURN_IF_ERROR(context_->Check(driver.cuStreamSynchronize(stream_.get()), "cuStreamSynchronize"));
    }
    ASSIGN_OR_RETURN(const BoundPolicy policy, BindPolicy(policy_name, settings));
    RETURN_IF_ERROR(StageSignals(policy, cache));
    ASSIGN_OR_RETURN(cache->plan,
                     compute_->Plan({.policy = policy, .shape = cache->view.shape}, cache->signals));
    const uint64_t record_bytes = cache->plan.record.floats * sizeof(float);
    if (record_bytes == 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(cache->record_memory, compute_->Allocate(blocks * record_bytes));
    for (uint32_t block = 0; block < blocks; ++block) {
      cache->records.push_back(
          reinterpret_cast<float*>(cache->record_memory->address() + block * record_bytes));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<double> Pass(const Cache& cache) {
    const BlockRun all = {0, cache.view.shape.blocks()};
    RETURN_IF_ERROR(compute_->Score(
        {.plan = &cache.plan, .kv = cache.view, .records = cache.records, .to_record = {&all, 1}}));
    return compute_->last_times().call_us;
  }

  // One block leaves, as the daemon prunes when the newest block has just filled, or one token.
  absl::StatusOr<double> Prune(const Cache& cache, BlockRun to_record, bool of_tokens = false) {
    const KvShape& shape = cache.view.shape;
    std::vector<uint8_t> marks(of_tokens ? shape.tokens : shape.blocks());
    if (!of_tokens) {
      MarkProtectedBlocks(ProtectionOf(cache.plan.request.policy, shape, 0, shape.tokens), {}, shape,
                          absl::MakeSpan(marks));
    }
    uint32_t victim = 0;
    RETURN_IF_ERROR(compute_->Score(
        {.plan = &cache.plan,
         .kv = cache.view,
         .signals = cache.signals,
         .records = cache.records,
         .to_record = {&to_record, 1},
         .choice = {.of_tokens = of_tokens, .count = 1, .protected_marks = marks, .victims = {&victim, 1}}}));
    return compute_->last_times().call_us;
  }

  // Scores that an engine gave, of one plane.
  absl::StatusOr<double> Selection() {
    const uint32_t n = effort_.candidates;
    std::vector<float> scores(n);
    uint64_t x = 1;
    for (float& score : scores) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      score = static_cast<float>(x >> 40);
    }
    KvView view = LlamaView(1, n);
    view.shape.kv_heads = 1;
    const std::vector<uint64_t> addresses(view.shape.blocks());
    view.blocks = addresses.data();
    ASSIGN_OR_RETURN(const std::unique_ptr<KvBuffer> staged, compute_->Allocate(n * sizeof(float)));
    const KvPiece piece = {.address = reinterpret_cast<uint64_t>(scores.data()), .bytes = n * sizeof(float)};
    RETURN_IF_ERROR(compute_->Stage({&piece, 1}, staged->address()));
    Signals signals;
    signals.importance.values = reinterpret_cast<const float*>(staged->address());
    ASSIGN_OR_RETURN(const BoundPolicy policy, BindPolicy("importance", {}));
    ASSIGN_OR_RETURN(const ScorePlan plan, compute_->Plan({.policy = policy, .shape = view.shape}, signals));
    const std::vector<uint8_t> marks(n);
    std::vector<uint32_t> victims(n / 2), expected(n / 2);
    ASSIGN_OR_RETURN(const double us, Median([&]() -> absl::StatusOr<double> {
                       RETURN_IF_ERROR(compute_->Score({.plan = &plan,
                                                        .kv = view,
                                                        .signals = signals,
                                                        .choice = {.of_tokens = true,
                                                                   .count = n / 2,
                                                                   .protected_marks = marks,
                                                                   .victims = absl::MakeSpan(victims)}}));
                       return compute_->last_times().choice_us;
                     }));
    std::vector<uint64_t> keys;
    RETURN_IF_ERROR(SelectRows(scores.data(), 1, marks, n / 2, &keys, absl::MakeSpan(expected)));
    if (victims != expected) return absl::InternalError("the GPU's victims are not the host's");
    return us;
  }

  const Effort effort_;
  std::shared_ptr<const CudaContext> context_;
  std::unique_ptr<CudaKvCompute> compute_;
  CudaStream stream_;
  ProbeDriver probe_;
};

int Main(int argc, char** argv) {
  const bool quick = argc == 2 && std::strcmp(argv[1], "--quick") == 0;
  if (argc > 1 && !quick) {
    std::fprintf(stderr, "usage: score_timings [--quick]\n");
    return 1;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // so that a file has each figure once it is known
  Timings timings(quick ? kQuick : Effort());
  absl::Status status = timings.Open();
  if (absl::IsUnavailable(status)) {
    std::printf("no such device here: %s\n", status.ToString().c_str());
    return 2;
  }
  if (status.ok()) status = timings.Run();
  if (!status.ok()) std::printf("FAIL   %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace kvpool

int main(int argc, char** argv) { return kvpool::Main(argc, argv); }
