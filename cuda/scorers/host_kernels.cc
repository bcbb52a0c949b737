#include "cuda/scorers/host_kernels.h"

#include <array>
#include <cstddef>

#include "cuda/scorers/element.h"
#include "cuda/scorers/features.h"
#include "cuda/scorers/team.h"
#include "cuda/scorers/window.h"

namespace kvpool::scorers {
namespace {

// Everything below is inlined into a function whose attribute names the instructions: one source, and no code of
// one instruction set that the linker could pick for another.
KVPOOL_INLINE void Record(const KvView& kv, const RecordLayout& at, uint32_t block, uint32_t layer,
                          float* record) {
  const HostTeam team;
  switch (kv.dtype) {
    case KvDtype::kF32:
      return RecordOfLayer<KvDtype::kF32>(team, kv, at, block, layer, record);
    case KvDtype::kF16:
      return RecordOfLayer<KvDtype::kF16>(team, kv, at, block, layer, record);
    case KvDtype::kBf16:
      return RecordOfLayer<KvDtype::kBf16>(team, kv, at, block, layer, record);
    case KvDtype::kFp8E4m3:
      return RecordOfLayer<KvDtype::kFp8E4m3>(team, kv, at, block, layer, record);
    case KvDtype::kFp8E5m2:
      return RecordOfLayer<KvDtype::kFp8E5m2>(team, kv, at, block, layer, record);
  }
}

KVPOOL_INLINE void Dots(const ScoreContext& context, uint32_t plane) {
  const HostTeam team;
  switch (context.kv.dtype) {
    case KvDtype::kF32:
      return AnchorDots<KvDtype::kF32>(team, context, plane);
    case KvDtype::kF16:
      return AnchorDots<KvDtype::kF16>(team, context, plane);
    case KvDtype::kBf16:
      return AnchorDots<KvDtype::kBf16>(team, context, plane);
    case KvDtype::kFp8E4m3:
      return AnchorDots<KvDtype::kFp8E4m3>(team, context, plane);
    case KvDtype::kFp8E5m2:
      return AnchorDots<KvDtype::kFp8E5m2>(team, context, plane);
  }
}

template <KvDtype dtype>
KVPOOL_INLINE void WindowOf(const HostTeam& team, const ScoreContext& context, uint32_t plane) {
  WindowLse<dtype>(team, context, plane);
  WindowStatistics<dtype>(team, context, plane);
}

KVPOOL_INLINE void Window(const ScoreContext& context, uint32_t plane) {
  const HostTeam team;
  LoadQueries(team, context, plane);
  switch (context.kv.dtype) {
    case KvDtype::kF32:
      return WindowOf<KvDtype::kF32>(team, context, plane);
    case KvDtype::kF16:
      return WindowOf<KvDtype::kF16>(team, context, plane);
    case KvDtype::kBf16:
      return WindowOf<KvDtype::kBf16>(team, context, plane);
    case KvDtype::kFp8E4m3:
      return WindowOf<KvDtype::kFp8E4m3>(team, context, plane);
    case KvDtype::kFp8E5m2:
      return WindowOf<KvDtype::kFp8E5m2>(team, context, plane);
  }
}

#define KVPOOL_HOST_KERNELS(suffix, attribute)                                                            \
  attribute void Record##suffix(const KvView& kv, const RecordLayout& at, uint32_t block, uint32_t layer, \
                                float* record) {                                                          \
    Record(kv, at, block, layer, record);                                                                 \
  }                                                                                                       \
  attribute void Dots##suffix(const ScoreContext& context, uint32_t plane) { Dots(context, plane); }      \
  attribute void Window##suffix(const ScoreContext& context, uint32_t plane) { Window(context, plane); }

KVPOOL_HOST_KERNELS(Baseline, )
KVPOOL_HOST_KERNELS(Avx2, __attribute__((target("avx2,fma,f16c"))))
KVPOOL_HOST_KERNELS(
    Avx512,
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512"))))

constexpr HostKernels kBaseline = {"baseline", RecordBaseline, DotsBaseline, WindowBaseline};
constexpr HostKernels kAvx2 = {"avx2", RecordAvx2, DotsAvx2, WindowAvx2};
constexpr HostKernels kAvx512 = {"avx512", RecordAvx512, DotsAvx512, WindowAvx512};

struct Runnable {
  std::array<const HostKernels*, 3> kernels{};
  size_t count = 0;
};

Runnable FindRunnable() {
  Runnable found;
  const auto add = [&found](const HostKernels& kernels) { found.kernels[found.count++] = &kernels; };
  add(kBaseline);
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) add(kAvx2);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    add(kAvx512);
  }
  return found;
}

const Runnable& TheRunnable() {
  static const Runnable runnable = FindRunnable();
  return runnable;
}

}  // namespace

const HostKernels& BestHostKernels() { return *TheRunnable().kernels[TheRunnable().count - 1]; }

absl::Span<const HostKernels* const> RunnableHostKernels() {
  return absl::MakeConstSpan(TheRunnable().kernels.data(), TheRunnable().count);
}

}  // namespace kvpool::scorers
