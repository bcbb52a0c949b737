#include "server/sim/sample.h"

#include <algorithm>
#include <vector>

namespace kvpool::sim {
namespace {

// Contents that more than this share of the requests ask for are in every sample.
constexpr double kCommonShare = 0.01;

bool Chosen(uint32_t content, const SampleOptions& options) {
  // splitmix64.
  uint64_t z = content + options.seed * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (z ^ z >> 31) % options.one_in == 0;
}

}  // namespace

Workload Sample(const Workload& w, const SampleOptions& options) {
  if (options.one_in == 1) return w;
  std::vector<uint32_t> uses(w.distinct);
  for (const Request& request : w.requests) {
    for (const uint32_t content : w.asked(request)) ++uses[content];
  }
  const double most = std::max(1.0, kCommonShare * static_cast<double>(w.requests.size()));
  const auto common = [&](uint32_t content) { return uses[content] > most; };
  Workload sample{.name = w.name,
                  .tokens_per_block = w.tokens_per_block,
                  .warm_up = w.warm_up,
                  .distinct = w.distinct,
                  .one_in = options.one_in};
  for (uint32_t content = 0; content < w.distinct; ++content) sample.common_blocks += common(content) ? 1 : 0;
  sample.requests.reserve(w.requests.size());
  for (const Request& request : w.requests) {
    const absl::Span<const uint32_t> chain = w.chain(request);
    Request kept{.now_ms = request.now_ms, .first = sample.contents.size(), .tokens = request.tokens};
    for (uint32_t i = 0; i < chain.size(); ++i) {
      const bool for_itself = i == kept.common_blocks && i < request.blocks && common(chain[i]);
      if (!for_itself && !Chosen(chain[i], options)) continue;
      sample.contents.push_back(chain[i]);
      sample.fronts.push_back(i);
      if (!w.hints.empty()) sample.hints.push_back(w.hints[request.first + i]);
      ++(i < request.blocks ? kept.blocks : kept.answer_blocks);
      if (for_itself) ++kept.common_blocks;
    }
    sample.requests.push_back(kept);
  }
  return sample;
}

}  // namespace kvpool::sim
