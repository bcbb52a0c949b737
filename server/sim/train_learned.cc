#include "server/sim/train_learned.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "server/replacement/parts/use_classes.h"
#include "server/replacement/policies/learned.h"

namespace kvpool::sim {
namespace {

constexpr int kSpans = ReuseModel::Prior::kSpans;
// Passes over all classes; the first step of Adam; the cost of large weights.
constexpr uint32_t kEpochs = 2000;
constexpr double kRate = 0.01, kDecay = 0.3;
constexpr int kInputs = ReuseNetwork::kInputs, kHidden = ReuseNetwork::kHidden;

// The waits of all classes with the same inputs, summed: all that training needs to know of a trace.
struct Waits {
  ReuseNetwork::Inputs inputs{};
  std::array<double, kSpans> hits{};     // hits, by age
  std::array<double, kSpans> seconds{};  // time waited, by age
};

class Observer {
 public:
  explicit Observer(const Workload& w)
      : workload_(w),
        classes_({.max_blocks = w.distinct + 1, .tokens_per_block = w.tokens_per_block}),
        open_(w.distinct),
        by_class_(UseClasses::kClasses) {}

  // Replays the trace as if nothing ever left, so that the result depends on the trace alone.
  std::vector<Waits> Run() {
    for (const Request& r : workload_.requests) Serve(r);
    const uint64_t end = workload_.requests.back().now_ms;
    for (uint32_t content = 0; content < workload_.distinct; ++content) {
      if (open_[content].cls >= 0) Close(content, end, false);
    }
    std::vector<Waits> all;
    for (int c = 0; c < UseClasses::kClasses; ++c) {
      const ReuseNetwork::Inputs inputs = ReuseNetwork::InputsOf(c);
      const auto same =
          std::find_if(all.begin(), all.end(), [&](const Waits& w) { return w.inputs == inputs; });
      Waits& to = same != all.end() ? *same : (all.push_back({.inputs = inputs}), all.back());
      for (int s = 0; s < kSpans; ++s) {
        to.hits[s] += by_class_[c].hits[s];
        to.seconds[s] += by_class_[c].seconds[s];
      }
    }
    return all;
  }

 private:
  struct Open {
    uint64_t since_ms = 0;
    double weight = 0;
    int cls = -1;
  };

  void Serve(const Request& r) {
    const absl::Span<const uint32_t> chain = workload_.chain(r);
    for (size_t i = 0; i < chain.size(); ++i) {
      const uint32_t content = chain[i];
      if (open_[content].cls >= 0) {
        Close(content, r.now_ms, true);
        classes_.OnHit(content + 1, inserted_);
      } else {
        const BlockId parent{i == 0 ? 0 : chain[i - 1] + 1};
        classes_.OnInsert(content + 1, {.hash = content + 1, .parent = parent, .now_ms = r.now_ms},
                          inserted_++);
      }
    }
    // The blocks of a prompt come back together or not at all, so they are not independent observations.
    const double weight = 1 / std::sqrt(static_cast<double>(chain.size()));
    for (size_t i = chain.size(); i-- > 0;) {
      open_[chain[i]] = {r.now_ms, weight, classes_.OnUsed(chain[i] + 1, inserted_)};
    }
  }

  void Close(uint32_t content, uint64_t now_ms, bool hit) {
    Open& open = open_[content];
    const auto& begins = ReuseModel::Prior::SpanBegins();
    const auto age = static_cast<double>(now_ms - open.since_ms);
    Waits& waits = by_class_[open.cls];
    for (int s = 0; s < kSpans; ++s) {
      const double end = s + 1 == kSpans ? 1e18 : begins[s + 1];
      waits.seconds[s] += open.weight * (std::min(age, end) - begins[s]) / 1000;
      if (age >= end) continue;
      if (hit) waits.hits[s] += open.weight;
      break;
    }
    open.cls = -1;
  }

  const Workload& workload_;
  UseClasses classes_;
  uint64_t inserted_ = 0;
  std::vector<Open> open_;  // indexed by content
  std::vector<Waits> by_class_;
};

// Adam (Kingma and Ba, 2015) over all weights at once.
class Adam {
 public:
  explicit Adam(size_t n) : mean_(n), square_(n) {}
  void Step(const std::vector<double>& gradient, double rate, std::vector<double>* values) {
    ++steps_;
    for (size_t i = 0; i < values->size(); ++i) {
      mean_[i] = 0.9 * mean_[i] + 0.1 * gradient[i];
      square_[i] = 0.999 * square_[i] + 0.001 * gradient[i] * gradient[i];
      const double m = mean_[i] / (1 - std::pow(0.9, steps_)), v = square_[i] / (1 - std::pow(0.999, steps_));
      (*values)[i] -= rate * m / (std::sqrt(v) + 1e-9);
    }
  }

 private:
  std::vector<double> mean_, square_;
  int steps_ = 0;
};

// All weights are in one array: w1, b1, w2, b2.
constexpr size_t kAtW1 = 0, kAtB1 = kAtW1 + kHidden * kInputs, kAtW2 = kAtB1 + kHidden,
                 kAtB2 = kAtW2 + kSpans * kHidden, kWeights = kAtB2 + kSpans;

// Adds the gradient of the negative log-likelihood of the waits under the network's rates.
void AddGradient(const std::vector<Waits>& all, const std::vector<double>& w, std::vector<double>* gradient) {
  std::array<double, kHidden> hidden, back;
  for (const Waits& waits : all) {
    for (int h = 0; h < kHidden; ++h) {
      double sum = w[kAtB1 + h];
      for (int i = 0; i < kInputs; ++i) sum += w[kAtW1 + h * kInputs + i] * double{waits.inputs[i]};
      hidden[h] = std::tanh(sum);
    }
    back.fill(0);
    for (int s = 0; s < kSpans; ++s) {
      double out = w[kAtB2 + s];
      for (int h = 0; h < kHidden; ++h) out += w[kAtW2 + s * kHidden + h] * hidden[h];
      const double expected = waits.seconds[s] * std::exp(out);
      const double slope = expected - waits.hits[s];
      (*gradient)[kAtB2 + s] += slope;
      for (int h = 0; h < kHidden; ++h) {
        (*gradient)[kAtW2 + s * kHidden + h] += slope * hidden[h];
        back[h] += slope * w[kAtW2 + s * kHidden + h];
      }
    }
    for (int h = 0; h < kHidden; ++h) {
      const double slope = back[h] * (1 - hidden[h] * hidden[h]);
      (*gradient)[kAtB1 + h] += slope;
      for (int i = 0; i < kInputs; ++i)
        (*gradient)[kAtW1 + h * kInputs + i] += slope * double{waits.inputs[i]};
    }
  }
}

// No trace is long enough for the longest waits, so a little is assumed of each class: the longer a block has
// waited, the longer it will.
void AssumeTail(std::vector<Waits>* all) {
  constexpr double kHits = 0.02, kChance = 0.3;  // kHits hits at a rate of kChance / age
  const auto& begins = ReuseModel::Prior::SpanBegins();
  for (Waits& waits : *all) {
    for (int s = 0; s < kSpans; ++s) {
      waits.hits[s] += kHits;
      waits.seconds[s] += kHits / kChance * (begins[s] + begins[s + 1]) / 2000;
    }
  }
}

std::vector<float> Part(const std::vector<double>& w, size_t begin, size_t end) {
  return {w.begin() + static_cast<std::ptrdiff_t>(begin), w.begin() + static_cast<std::ptrdiff_t>(end)};
}

}  // namespace

absl::StatusOr<Weights> TrainLearned(const Workload& workload, const TrainOptions& options) {
  std::vector<Waits> all = Observer(workload).Run();
  AssumeTail(&all);
  std::mt19937_64 random(options.seed);
  std::vector<double> w(kWeights);
  for (double& value : w) value = (static_cast<double>(random() >> 11) * 0x1p-53 - 0.5) * 0.4;
  for (int s = 0; s < kSpans; ++s) {
    double hits = 1e-3, seconds = 1;
    for (const Waits& waits : all) hits += waits.hits[s], seconds += waits.seconds[s];
    w[kAtB2 + s] = std::log(hits / seconds);
  }
  const uint32_t epochs = options.epochs != 0 ? options.epochs : kEpochs;
  Adam adam(kWeights);
  for (uint32_t epoch = 0; epoch < epochs; ++epoch) {
    std::vector<double> gradient(kWeights);
    AddGradient(all, w, &gradient);
    for (size_t i = 0; i < kAtB2; ++i) gradient[i] += kDecay * w[i];
    adam.Step(gradient, kRate * (1 - 0.9 * epoch / epochs), &w);
    if (options.progress) options.progress(epoch + 1, epochs);
  }
  Weights weights(ReuseNetwork::Shape(), options.trained);
  weights.Set("w1", {kHidden, kInputs}, Part(w, kAtW1, kAtB1));
  weights.Set("b1", {kHidden}, Part(w, kAtB1, kAtW2));
  weights.Set("w2", {kSpans, kHidden}, Part(w, kAtW2, kAtB2));
  weights.Set("b2", {kSpans}, Part(w, kAtB2, kWeights));
  return weights;
}

}  // namespace kvpool::sim
