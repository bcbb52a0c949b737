#include "cuda/scorers/host/host_kernels.h"

#include "cuda/scorers/host/host_window.h"
#include "cuda/scorers/parts/element.h"
#include "cuda/scorers/parts/features.h"

namespace kvpool::scorers {
namespace {

struct Record {
  const HostTeam& team;
  const KvView& kv;
  const RecordLayout& at;
  uint32_t block, layer;
  float* record;
  template <KvDtype dtype>
  void Run() const {
    if (kv.k.dim_stride_bytes != BytesOf(dtype)) {
      return RecordOfLayer<dtype>(team, kv, at, block, layer, record);
    }
    NormsOfLayer<dtype>(team, kv, at, block, layer, record);
    for (uint32_t head = 0; head < kv.shape.kv_heads && at.sums_keys(); ++head) {
      const uint32_t plane = layer * kv.shape.kv_heads + head;
      const auto section = [&](uint32_t start, uint32_t floats) {
        return start == RecordLayout::kNone ? nullptr : record + start + uint64_t{plane} * floats;
      };
      const uint32_t dim = kv.shape.k_head_dim;
      team.code().sum_columns[static_cast<int>(dtype)](
          {.first = kv.Row(kv.k, block, layer, 0, head),
           .stride_bytes = kv.k.token_stride_bytes,
           .rows = kv.shape.TokensOf(block),
           .dim = dim,
           .norms = section(at.k_norms, kv.shape.tokens_per_block),
           .unit = section(at.unit_key_sums, dim),
           .raw = section(at.key_sums, dim),
           .least = section(at.key_min, dim),
           .greatest = section(at.key_max, dim)});
    }
  }
};

struct Dots {
  const HostTeam& team;
  const ScoreContext& context;
  uint32_t plane;
  template <KvDtype dtype>
  void Run() const {
    AnchorDots<dtype>(team, context, plane, {0, context.shape().blocks()});
  }
};

}  // namespace

void RecordLayer(const HostTeam& team, const KvView& kv, const RecordLayout& at, uint32_t block,
                 uint32_t layer, float* record) {
  WithDtype(kv.dtype, Record{team, kv, at, block, layer, record});
}

void DotPlaneWithAnchor(const HostTeam& team, const ScoreContext& context, uint32_t plane) {
  WithDtype(context.kv.dtype, Dots{team, context, plane});
}

void AttendPlane(const HostTeam& team, const ScoreContext& context, uint32_t plane, float* scratch) {
  const HostRows& code = team.code();
  code.attend_window({.context = &context,
                      .plane = plane,
                      .scratch = scratch,
                      .widen = code.widen[static_cast<int>(context.kv.dtype)]});
}

}  // namespace kvpool::scorers
