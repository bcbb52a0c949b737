#include "server/sim/synthetic.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvpool::sim {
namespace {

constexpr uint32_t kTokensPerBlock = 512;

// Random numbers that do not depend on the standard library.
class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  double Share() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  bool Chance(double p) { return Share() < p; }
  // Uniform in [low, high].
  uint32_t Between(uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(Share() * (high - low + 1));
  }
  double Exponential(double mean) { return -mean * std::log1p(-Share()); }
  // Log-normal, given by its median.
  double LogNormal(double median, double sigma) {
    const double radius = std::sqrt(-2 * std::log1p(-Share()));
    return median * std::exp(sigma * radius * std::cos(2 * 3.14159265358979 * Share()));
  }

 private:
  std::mt19937_64 random_;
};

// Draws ranks 0 to n - 1, rank r with a probability proportional to (r + 1)^-skew.
class Zipf {
 public:
  Zipf(uint32_t n, double skew) : sums_(n) {
    double sum = 0;
    for (uint32_t r = 0; r < n; ++r) sums_[r] = sum += std::pow(r + 1, -skew);
  }
  uint32_t Draw(Dice* dice) const {
    const double at = dice->Share() * sums_.back();
    const auto it = std::upper_bound(sums_.begin(), sums_.end(), at);
    return static_cast<uint32_t>(std::min<size_t>(it - sums_.begin(), sums_.size() - 1));
  }

 private:
  std::vector<double> sums_;
};

using Chain = std::vector<uint32_t>;

// Records requests and numbers their contents.
class Recorder {
 public:
  explicit Recorder(Workload* w) : w_(*w) {}
  uint32_t New() { return w_.distinct++; }
  void Extend(Chain* chain, uint32_t blocks) {
    for (uint32_t i = 0; i < blocks; ++i) chain->push_back(New());
  }
  Chain NewChain(uint32_t blocks) {
    Chain chain;
    Extend(&chain, blocks);
    return chain;
  }
  void Ask(double now_ms, const Chain& chain) {
    w_.requests.push_back({.now_ms = static_cast<uint64_t>(now_ms),
                           .first = w_.contents.size(),
                           .blocks = static_cast<uint32_t>(chain.size()),
                           .tokens = static_cast<uint32_t>(chain.size()) * w_.tokens_per_block});
    w_.contents.insert(w_.contents.end(), chain.begin(), chain.end());
  }
  size_t size() const { return w_.requests.size(); }

 private:
  Workload& w_;
};

// A user who asks repeatedly: what the next prompt keeps of the last, when it comes, and how many are left.
struct Dialogue {
  double at_ms = 0;
  Chain chain;
  uint32_t left = 0;  // requests to come
  uint32_t kind = 0;
  bool operator<(const Dialogue& other) const { return at_ms > other.at_ms; }  // soonest on top
};

// Runs dialogues side by side. Start makes a new one, Step asks once and says whether the dialogue goes on.
template <typename Start, typename Step>
void RunDialogues(uint32_t requests, double start_every_ms, Dice* dice, Recorder* out, Start start,
                  Step step) {
  std::priority_queue<Dialogue> queue;
  double next_start = 0;
  while (out->size() < requests) {
    if (queue.empty() || next_start <= queue.top().at_ms) {
      Dialogue d = start(next_start);
      d.at_ms = next_start;
      queue.push(std::move(d));
      next_start += dice->Exponential(start_every_ms);
      continue;
    }
    Dialogue d = queue.top();
    queue.pop();
    if (step(&d)) queue.push(std::move(d));
  }
}

// Tool loops: a long shared prompt of instructions, then step after step within seconds, each appending its
// result; then never again.
void Agents(uint32_t requests, Dice* dice, Recorder* out) {
  std::vector<Chain> tools;
  for (int i = 0; i < 60; ++i) tools.push_back(out->NewChain(dice->Between(8, 40)));
  const Zipf popular(60, 0.8);
  RunDialogues(
      requests, 4000, dice, out,
      [&](double) { return Dialogue{.chain = tools[popular.Draw(dice)], .left = dice->Between(2, 30)}; },
      [&](Dialogue* d) {
        out->Extend(&d->chain, dice->Between(1, 6));
        out->Ask(d->at_ms, d->chain);
        // Now and then a person has to approve first.
        d->at_ms += dice->LogNormal(dice->Chance(0.05) ? 90e3 : 6e3, 0.6);
        return --d->left > 0;
      });
}

// Documents found for a question stand in front of it; a few are found often, most hardly ever.
void Rag(uint32_t requests, Dice* dice, Recorder* out) {
  const Chain instructions = out->NewChain(3);
  std::vector<Chain> documents;
  for (int i = 0; i < 4000; ++i) {
    documents.push_back(instructions);
    out->Extend(&documents.back(), dice->Between(4, 20));
  }
  const Zipf popular(4000, 0.85);
  double now = 0;
  while (out->size() < requests) {
    Chain chain = documents[popular.Draw(dice)];
    out->Extend(&chain, dice->Between(1, 2));
    out->Ask(now += dice->Exponential(300), chain);
  }
}

// A job that reads the same long list of documents over and over, while dialogues go on.
void Batch(uint32_t requests, Dice* dice, Recorder* out) {
  std::vector<Chain> list;
  for (int i = 0; i < 1200; ++i) list.push_back(out->NewChain(dice->Between(5, 25)));
  size_t next = 0;
  RunDialogues(
      requests, 1000, dice, out,
      [&](double) {
        const bool reads = dice->Chance(0.6);
        return Dialogue{.chain = reads ? list[next++ % list.size()] : out->NewChain(dice->Between(2, 20)),
                        .left = reads ? 1 : dice->Between(1, 5),
                        .kind = reads};
      },
      [&](Dialogue* d) {
        if (d->kind == 0) out->Extend(&d->chain, dice->Between(1, 3));
        out->Ask(d->at_ms, d->chain);
        d->at_ms += dice->LogNormal(45e3, 0.8);
        return --d->left > 0;
      });
}

// Single blocks, drawn by a popularity that slowly changes.
void Keys(uint32_t requests, Dice* dice, Recorder* out) {
  constexpr uint32_t kKeys = 100000;
  for (uint32_t i = 0; i < kKeys; ++i) out->New();
  const Zipf popular(kKeys, 0.8);
  // A request asks for one block, so there are more requests.
  for (uint32_t i = 0; i < requests * 20; ++i) {
    out->Ask(i * 10.0, {(popular.Draw(dice) + i / 40) % kKeys});
  }
}

// Editors: each pause in typing sends the file so far with its end changed; then silence.
void Completion(uint32_t requests, Dice* dice, Recorder* out) {
  RunDialogues(
      requests, 9000, dice, out,
      [&](double) {
        return Dialogue{.chain = out->NewChain(dice->Between(4, 60)), .left = dice->Between(3, 40)};
      },
      [&](Dialogue* d) {
        Chain asked = d->chain;
        out->Extend(&asked, dice->Between(1, 2));
        out->Ask(d->at_ms, asked);
        if (dice->Chance(0.2)) d->chain.push_back(asked[d->chain.size()]);
        d->at_ms += dice->LogNormal(dice->Chance(0.1) ? 120e3 : 3e3, 0.7);
        return --d->left > 0;
      });
}

// Bursts of questions about one topic for some minutes, then none; and questions asked once.
void Bursts(uint32_t requests, Dice* dice, Recorder* out) {
  RunDialogues(
      requests, 500, dice, out,
      [&](double) {
        const bool hot = dice->Chance(0.02);
        return Dialogue{.chain = out->NewChain(hot ? dice->Between(10, 60) : dice->Between(2, 30)),
                        .left = hot ? dice->Between(10, 80) : 1,
                        .kind = hot};
      },
      [&](Dialogue* d) {
        Chain asked = d->chain;
        out->Extend(&asked, 1);
        out->Ask(d->at_ms, asked);
        d->at_ms += dice->Exponential(3000);
        return --d->left > 0;
      });
}

// In the first half long prompts come back and short ones don't, in the second half the reverse.
void Shift(uint32_t requests, Dice* dice, Recorder* out) {
  RunDialogues(
      requests, 700, dice, out,
      [&](double) {
        const bool is_long = dice->Chance(0.5), first_half = out->size() < requests / 2;
        return Dialogue{.chain = out->NewChain(is_long ? dice->Between(20, 40) : dice->Between(4, 12)),
                        .left = is_long == first_half ? 4u : 1u};
      },
      [&](Dialogue* d) {
        out->Ask(d->at_ms, d->chain);
        out->Extend(&d->chain, 1);
        d->at_ms += dice->LogNormal(60e3, 0.5);
        return --d->left > 0;
      });
}

// Quick dialogues whose every turn is as likely the last, so the most recently used is best kept.
void Chat(uint32_t requests, Dice* dice, Recorder* out) {
  const Chain instructions = out->NewChain(2);
  RunDialogues(
      requests, 2500, dice, out,
      [&](double) {
        Chain chain = instructions;
        out->Extend(&chain, dice->Between(1, 4));
        return Dialogue{.chain = chain};
      },
      [&](Dialogue* d) {
        out->Ask(d->at_ms, d->chain);
        out->Extend(&d->chain, dice->Between(1, 3));
        d->at_ms += dice->Exponential(30e3);
        return dice->Chance(0.85);
      });
}

// ---- Objects worth keeping among a flood of others, on which LRU does badly. Each is a chain of its own.

constexpr double kObjectMs = 10;  // time from one request to the next

class Objects {
 public:
  Objects(uint32_t requests, Recorder* out) : requests_(requests), out_(*out) {}
  bool full() const { return out_.size() >= requests_; }
  // The object of that number, which gets `blocks` blocks when it is first asked for.
  void Ask(uint32_t number, uint32_t blocks) {
    if (number >= kept_.size()) kept_.resize(number + 1);
    if (kept_[number].empty()) kept_[number] = out_.NewChain(blocks);
    Ask(kept_[number]);
  }
  void Ask(const Chain& object) {
    if (!full()) out_.Ask(static_cast<double>(out_.size()) * kObjectMs, object);
  }

 private:
  const uint32_t requests_;
  Recorder& out_;
  std::vector<Chain> kept_;
};

void SizeInversion(uint32_t requests, Dice* dice, Recorder* out) {
  Objects objects(requests, out);
  while (!objects.full()) {
    if (dice->Chance(0.2)) {
      objects.Ask(dice->Between(0, 99), 8);
    } else {
      objects.Ask(out->NewChain(dice->Between(1, 3)));
    }
  }
}

void ShortBursts(uint32_t requests, Dice* dice, Recorder* out) {
  Objects objects(requests, out);
  while (!objects.full()) {
    if (dice->Chance(0.6)) {
      objects.Ask(dice->Between(0, 399), 2);
      continue;
    }
    const Chain object = out->NewChain(4);
    for (uint32_t times = dice->Between(1, 3); times > 0; --times) objects.Ask(object);
  }
}

void Scans(uint32_t requests, Dice* dice, Recorder* out) {
  Objects objects(requests, out);
  const Zipf popular(700, 1);
  while (!objects.full()) {
    for (int i = 0; i < 600; ++i) objects.Ask(popular.Draw(dice), 1);
    for (int i = 0; i < 1200; ++i) objects.Ask(out->NewChain(1));
  }
}

void Flagged(uint32_t requests, Dice* dice, Recorder* out) {
  Objects objects(requests, out);
  while (!objects.full()) {
    objects.Ask(dice->Between(0, 299), 1);
    objects.Ask(out->NewChain(2));
  }
}

struct Kind {
  SyntheticKind kind;
  void (*make)(uint32_t requests, Dice* dice, Recorder* out);
};
constexpr Kind kKinds[] = {
    {{"agents", "tool loops behind long shared instructions"}, Agents},
    {{"rag", "documents by popularity in front of questions"}, Rag},
    {{"batch", "a list read from end to end, over and over, between dialogues"}, Batch},
    {{"keys", "single blocks by popularity that slowly changes"}, Keys},
    {{"completion", "editors asking with every pause in typing"}, Completion},
    {{"bursts", "much about one thing for minutes, and questions asked once"}, Bursts},
    {{"shift", "what comes back changes in the middle"}, Shift},
    {{"chat", "quick dialogues, each turn as likely the last"}, Chat},
    {{"size_inversion", "large objects come back, small ones do not"}, SizeInversion},
    {{"short_bursts", "objects asked for a few times in a row and never again, between steady ones"},
     ShortBursts},
    {{"scans", "long runs over new objects between skewed accesses to a small set"}, Scans},
    {{"flagged", "every other object never comes back, and is the one of two blocks"}, Flagged},
};

}  // namespace

absl::Span<const SyntheticKind> SyntheticKinds() {
  static const auto kinds = [] {
    std::vector<SyntheticKind> all;
    for (const Kind& kind : kKinds) all.push_back(kind.kind);
    return all;
  }();
  return kinds;
}

absl::StatusOr<Workload> MakeSynthetic(std::string_view kind, const SyntheticOptions& options) {
  for (const Kind& k : kKinds) {
    if (k.kind.name != kind) continue;
    Workload w{.name = std::string(kind), .tokens_per_block = kTokensPerBlock};
    Dice dice(options.seed);
    Recorder recorder(&w);
    k.make(options.requests, &dice, &recorder);
    return w;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "synthetic trace \"", absl::string_view(kind.data(), kind.size()), "\" is unknown; there are: ",
      absl::StrJoin(kKinds, ", ", [](std::string* text, const Kind& k) { text->append(k.kind.name); })));
}

}  // namespace kvpool::sim
