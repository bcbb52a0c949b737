#include "cuda/scorers/host_kernels.h"

#include "cuda/scorers/element.h"
#include "cuda/scorers/features.h"
#include "cuda/scorers/host_window.h"
#include "cuda/scorers/window.h"

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
    RecordOfLayer<dtype>(team, kv, at, block, layer, record);
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
  LoadQueries(team, context, plane);
  const HostRows& code = team.code();
  code.attend_window({.context = &context,
                      .plane = plane,
                      .scratch = scratch,
                      .widen = code.widen[static_cast<int>(context.kv.dtype)]});
}

}  // namespace kvpool::scorers
