#include "server/replacement/policies/learned.h"

#include <algorithm>
#include <cmath>

#include "absl/types/span.h"

namespace kvpool {

WeightsShape ReuseNetwork::Shape() {
  return {
      .policy = "learned",
      .format = "1",
      .features = "turn[6],total[12],fresh[4],last[2],hits[6],hit_fresh[3],hit_total[4]",
      .tensors = {
          {"w1", {kHidden, kInputs}}, {"b1", {kHidden}}, {"w2", {kOutputs, kHidden}}, {"b2", {kOutputs}}}};
}

ReuseNetwork::Inputs ReuseNetwork::InputsOf(int cls) {
  const UseClasses::Use use = UseClasses::UseOf(cls);
  Inputs inputs{};
  int at = 0;
  const auto one_of = [&](int values, int value, bool said) {
    if (said) inputs[at + value] = 1;
    at += values;
  };
  const bool unhit = use.hits == 0;
  one_of(UseClasses::kTurns, use.turn, unhit);
  one_of(UseClasses::kTotals, use.total, unhit);
  one_of(UseClasses::kFresh, use.fresh, unhit);
  one_of(2, use.last, unhit);
  one_of(UseClasses::kHits, use.hits - 1, !unhit);
  one_of(UseClasses::kHitFresh, use.hit_fresh, !unhit);
  one_of(UseClasses::kHitTotals, use.hit_total, !unhit);
  return inputs;
}

ReuseModel::Prior::Rates ReuseNetwork::RatesOf(const Weights& weights, int cls) {
  const absl::Span<const float> w1 = weights.Get("w1"), b1 = weights.Get("b1"), w2 = weights.Get("w2"),
                                b2 = weights.Get("b2");
  const Inputs inputs = InputsOf(cls);
  std::array<double, kHidden> hidden;
  for (int h = 0; h < kHidden; ++h) {
    double sum = b1[h];
    for (int i = 0; i < kInputs; ++i) sum += double{w1[h * kInputs + i]} * double{inputs[i]};
    hidden[h] = std::tanh(sum);
  }
  ReuseModel::Prior::Rates rates;
  for (int o = 0; o < kOutputs; ++o) {
    double sum = b2[o];
    for (int h = 0; h < kHidden; ++h) sum += double{w2[o * kHidden + h]} * hidden[h];
    rates[o] = std::exp(std::min(sum, 10.0)) / 1000;
  }
  return rates;
}

}  // namespace kvpool
