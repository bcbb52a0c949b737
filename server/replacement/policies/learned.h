// hit_density with a prior: what a trained network knows of conversations.
#ifndef KVPOOL_SERVER_REPLACEMENT_POLICIES_LEARNED_H_
#define KVPOOL_SERVER_REPLACEMENT_POLICIES_LEARNED_H_

#include <array>
#include <string_view>

#include "server/replacement/parts/use_classes.h"
#include "server/replacement/parts/weights.h"
#include "server/replacement/policies/hit_density.h"

namespace kvpool {

// Maps a class to the rate at which its blocks are found again, by the time they have waited, with
// one hidden layer:
//
//   rate(class, span) = exp(out(span) + bias(span)),  out = W2 tanh(W1 inputs(class) + b1)
//
// in hits per second. kvpool-sim train fits it to what came back in a trace. The
// spans are ReuseModel::Prior's.
struct ReuseNetwork {
  static constexpr int kInputs = UseClasses::kTurns + UseClasses::kTotals + UseClasses::kFresh + 2 +
                                 UseClasses::kHits + UseClasses::kHitFresh + UseClasses::kHitTotals;
  static constexpr int kHidden = 16;
  static constexpr int kOutputs = ReuseModel::Prior::kSpans;
  using Inputs = std::array<float, kInputs>;

  static WeightsShape Shape();
  static Inputs InputsOf(int cls);

  // REQUIRES: weights.Check(Shape()) is OK.
  static ReuseModel::Prior::Rates RatesOf(const Weights& weights, int cls);
};

// hit_density, but until a class was seen often enough the network says how much more or less it comes back
// than others do. How much comes back in all is learned from the start, so weights that don't fit what runs
// cost little.
class LearnedPolicy final : public HitDensityPolicy {
 public:
  static WeightsShape Shape() { return ReuseNetwork::Shape(); }
  // REQUIRES: options.weights is not null and has Shape().
  explicit LearnedPolicy(const PolicyOptions& options)
      : HitDensityPolicy(options, {[weights = options.weights](int cls) {
                           return ReuseNetwork::RatesOf(*weights, cls);
                         }}) {}
  std::string_view name() const override { return "learned"; }
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_REPLACEMENT_POLICIES_LEARNED_H_
