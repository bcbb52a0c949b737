// kvpool-sim says which replacement policy and how much memory fit a trace.
//
// Exit status: 0 done; 1 the input is bad; 2 usage.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/cli/flags.h"
#include "proto/cli/version.h"
#include "proto/formats/trace.h"
#include "proto/support/status_macros.h"
#include "server/replacement/parts/weights.h"
#include "server/replacement/policy.h"
#include "server/sim/advise.h"
#include "server/sim/curve.h"
#include "server/sim/nodes.h"
#include "server/sim/progress_bar.h"
#include "server/sim/read_workload.h"
#include "server/sim/report.h"
#include "server/sim/sample.h"
#include "server/sim/sweep.h"
#include "server/sim/synthetic.h"
#include "server/sim/train.h"

namespace kvpool::sim {
namespace {

constexpr double kLeastSample = 10000;  // the most that --sample may divide by

struct Arguments {
  std::string trace, policy = "all", capacity, plot, weights, out;
  uint64_t space = 0, requests = 0, block_bytes = 0, seed = 1, epochs = 0,
           threads = std::max(1u, std::thread::hardware_concurrency());
  double from = 0, to = 1, warm_up = 0, sample = 1;
  PrefillCost cost;
  std::string nodes = "1,10,100";
  bool json = false, markdown = false, help = false, version = false;
};

void AddFlags(Arguments* a, Flags* flags) {
  flags->Add(
      "trace", &a->trace,
      "kvpoold's event log; or, plain or gzip, Mooncake's JSON lines, or CSV of key,time,size (.csv); or "
      "synthetic:KIND, one of those below. By default the public conversation trace, if it is at hand");
  flags->Add("policy", &a->policy, "all, or some of those below with commas between them");
  flags->Add("capacity", &a->capacity, "blocks, with commas; by default up to where everything fits");
  flags->Add("space", &a->space, {}, "of an event log with several spaces: the one to replay");
  flags->Add("requests", &a->requests, {}, "how many of the trace; 0: all");
  flags->Add("from", &a->from, 1, "begin at this share of the requests");
  flags->Add("to", &a->to, 1, "end at this share of the requests");
  flags->Add("warm-up", &a->warm_up, 1, "replay this share of the requests without counting their hits");
  flags->Add(
      "sample", &a->sample, 1,
      "replay this share of the blocks, drawn by hash, at capacities as much smaller: one in a whole number "
      "of them");
  flags->Add("block-bytes", &a->block_bytes, {.max = uint64_t{1} << 40},
             "of a block: what advise counts memory in, and what CSV sizes are divided by");
  flags->Add("prefill-us-per-token", &a->cost.us_per_token, 1e9, "cost of prefill: linear part");
  flags->Add("prefill-us-per-token-pair", &a->cost.us_per_token_pair, 1e9, "cost of prefill: quadratic part");
  flags->Add("seed", &a->seed, {}, "of policies that roll dice, and of a synthetic trace");
  flags->Add("threads", &a->threads, {.min = 1, .max = 1024}, "replays at a time");
  flags->Add("weights", &a->weights, "of a policy that is trained; by default those built in");
  flags->Add("epochs", &a->epochs, {.max = 10000},
             "of train: passes over the trace; 0: what fits the policy");
  flags->Add("out", &a->out, "of train: the file of weights to write");
  flags->Add("nodes", &a->nodes, "of nodes: how many share the trace, with commas");
  flags->Add("plot", &a->plot, "of curve: the SVG file to write");
  flags->Add("json", &a->json, "the results as JSON");
  flags->Add("markdown", &a->markdown, "the results as a table in Markdown");
  flags->Add("help", &a->help, "this text");
  flags->Add("version", &a->version, "what this build is");
}

std::string Help(const Flags& flags) {
  std::string text =
      "kvpool-sim run|curve|advise|nodes|train [--flags]\n\n"
      "run      replays the trace with each policy at each capacity\n"
      "curve    draws miss-ratio curves of all policies (--plot FILE.svg)\n"
      "advise   how much memory, which policy, what it saves (--block-bytes)\n"
      "nodes    splits the trace over nodes that have a store in common, and says what that brings\n"
      "train    makes weights for the policy from the trace (--policy NAME --out FILE)\n\n";
  text += flags.Help() + "\nPolicies:\n";
  for (const PolicyEntry& policy : ReplacementPolicies()) {
    absl::StrAppend(&text, "  ", std::string(policy.name), ": ", std::string(policy.summary), "\n");
  }
  absl::StrAppend(&text, "  opt: bound, the block leaves whose next use is farthest\n",
                  "  infinite: bound, nothing leaves\n\nPolicies that are trained:\n");
  for (const Trainer& trainer : Trainers()) {
    absl::StrAppend(&text, "  ", std::string(trainer.policy), ": ", std::string(trainer.summary), "\n");
  }
  text += "\nSynthetic traces:\n";
  for (const SyntheticKind& kind : SyntheticKinds()) {
    absl::StrAppend(&text, "  ", std::string(kind.name), ": ", std::string(kind.summary), "\n");
  }
  return text;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
}

absl::StatusOr<std::string> TracePath(const Arguments& a) {
  if (!a.trace.empty()) return a.trace;
  return replay::FindConversationTrace();
}

absl::StatusOr<Workload> ReadTrace(const Arguments& a) {
  ASSIGN_OR_RETURN(const std::string path, TracePath(a));
  return ReadWorkload(path, {.max_requests = a.requests,
                             .from = a.from,
                             .to = a.to,
                             .warm_up = a.warm_up,
                             .block_bytes = a.block_bytes,
                             .space = a.space,
                             .seed = a.seed});
}

absl::Status RunTrain(const Arguments& a) {
  ASSIGN_OR_RETURN(const Workload workload, ReadTrace(a));
  TrainOptions options{.seed = a.seed, .epochs = static_cast<uint32_t>(a.epochs), .cost = a.cost};
  options.capacities = SpreadCapacities(workload, 1);
  if (!a.capacity.empty()) {
    ASSIGN_OR_RETURN(options.capacities, ParseCapacities(a.capacity));
  }
  options.trained =
      absl::StrCat(workload.name.substr(workload.name.rfind('/') + 1), ", requests ", a.from, " to ", a.to,
                   ", capacities ", absl::StrJoin(options.capacities, " "), ", seed ", a.seed);
  std::optional<ProgressBar> bar;
  options.progress = [&bar](size_t done, size_t total) {
    if (!bar.has_value()) bar.emplace(isatty(STDERR_FILENO) != 0, total, "steps");
    bar->Draw(done);
  };
  ASSIGN_OR_RETURN(const Weights weights, Train(a.policy, workload, options));
  bar.reset();
  RETURN_IF_ERROR(WriteFile(a.out, weights.Serialize()));
  std::printf("%s: weights of %s, trained on %s\n", a.out.c_str(), weights.policy().c_str(),
              weights.trained().c_str());
  return absl::OkStatus();
}

absl::Status RunNodes(const Arguments& a) {
  ASSIGN_OR_RETURN(const Workload workload, ReadTrace(a));
  NodesOptions options{.policy = a.policy == "all" ? "learned" : a.policy, .seed = a.seed, .cost = a.cost};
  ASSIGN_OR_RETURN(options.nodes, ParseCapacities(a.nodes));
  ASSIGN_OR_RETURN(const std::vector<uint32_t> capacities, ParseCapacities(a.capacity));
  if (capacities.size() != 1) return absl::InvalidArgumentError("--capacity: nodes have one capacity");
  options.capacity_blocks = capacities[0];
  if (!a.weights.empty()) {
    ASSIGN_OR_RETURN(Weights weights, Weights::Read(a.weights));
    options.weights = std::make_shared<const Weights>(std::move(weights));
  }
  ASSIGN_OR_RETURN(const std::vector<NodesResult> results, ReplayNodes(workload, options));
  std::fputs(NodesTable(workload, results, a.markdown).c_str(), stdout);
  return absl::OkStatus();
}

absl::Status Run(const std::string& verb, const Arguments& a) {
  ASSIGN_OR_RETURN(const Workload all, ReadTrace(a));
  const Workload workload =
      Sample(all, {.one_in = static_cast<uint32_t>(std::lround(1 / a.sample)), .seed = a.seed});
  SweepOptions options{.seed = a.seed,
                       .cost = a.cost,
                       .threads = static_cast<uint32_t>(a.threads),
                       .progress = isatty(STDERR_FILENO) != 0};
  ASSIGN_OR_RETURN(options.policies, ParsePolicies(a.policy));
  if (!a.weights.empty()) {
    ASSIGN_OR_RETURN(Weights weights, Weights::Read(a.weights));
    options.weights = std::make_shared<const Weights>(std::move(weights));
  }
  options.capacities = SpreadCapacities(all, verb == "curve" ? 8 : 4);
  // Capacities that are too small for the sample are left out.
  std::erase_if(options.capacities, [&](uint32_t blocks) {
    return workload.ScaledCapacity(blocks) < workload.largest_request();
  });
  if (!a.capacity.empty()) {
    ASSIGN_OR_RETURN(options.capacities, ParseCapacities(a.capacity));
  }
  const bool has_infinite =
      std::find(options.policies.begin(), options.policies.end(), "infinite") != options.policies.end();
  if (verb != "run" && !has_infinite) options.policies.push_back("infinite");
  ASSIGN_OR_RETURN(const std::vector<Result> results, Sweep(workload, options));
  if (verb == "curve") {
    if (options.capacities.size() < 2)
      return absl::InvalidArgumentError("--capacity: a curve needs two at least");
    RETURN_IF_ERROR(WriteFile(a.plot, DrawCurves(workload, results)));
  }
  std::string text;
  if (verb == "advise") {
    text = Advise(workload, results, a.block_bytes);
  } else if (a.json) {
    text = Json(workload, results);
  } else if (a.markdown) {
    text = MarkdownTable(workload, results);
  } else if (verb == "run") {
    text = TextTable(workload, results);
  } else {
    text = absl::StrCat(a.plot, ": ", results.size(), " replays drawn\n");
  }
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

// What can be refused before the trace is read, which may take minutes.
absl::Status Check(const Arguments& a) {
  const auto wrong = [](const auto&... words) { return absl::InvalidArgumentError(absl::StrCat(words...)); };
  if (a.from >= a.to) return wrong("--from: ", a.from, " is not below --to, ", a.to);
  if (a.warm_up == 1) return wrong("--warm-up: 1 leaves no request whose hits count");
  if (a.sample * kLeastSample < 1) return wrong("--sample: ", a.sample, " is below 1 in ", kLeastSample);
  const absl::Status policies = ParsePolicies(a.policy).status();
  if (!policies.ok()) return wrong("--policy: ", policies.message());
  const absl::Status capacities =
      a.capacity.empty() ? absl::OkStatus() : ParseCapacities(a.capacity).status();
  return capacities.ok() ? capacities : wrong("--capacity: ", capacities.message());
}

int Usage(const std::string& message) {
  std::fprintf(stderr, "kvpool-sim: %s\nkvpool-sim --help says what there is\n", message.c_str());
  return 2;
}

int Main(std::vector<std::string> arguments) {
  Arguments a;
  Flags flags;
  AddFlags(&a, &flags);
  std::string verb;
  if (!arguments.empty() && !arguments[0].starts_with("-")) {
    verb = arguments[0];
    arguments.erase(arguments.begin());
  }
  const absl::StatusOr<std::vector<std::string>> rest = flags.Parse(arguments);
  if (!rest.ok()) return Usage(std::string(rest.status().message()));
  if (a.help) return std::fputs(Help(flags).c_str(), stdout), 0;
  if (a.version) return std::fputs(VersionText("kvpool-sim").c_str(), stdout), 0;
  if (verb != "run" && verb != "curve" && verb != "advise" && verb != "nodes" && verb != "train") {
    return Usage(absl::StrCat("\"", verb, "\" is not run, curve, advise, nodes or train"));
  }
  if (!rest->empty()) return Usage(absl::StrCat("\"", (*rest)[0], "\" is one argument too many"));
  // What another verb would take, this one would leave out in silence.
  static constexpr std::pair<const char*, const char*> kFlagsOfOneVerb[] = {
      {"plot", "curve"}, {"out", "train"}, {"epochs", "train"}, {"nodes", "nodes"}};
  for (const auto& [flag, only] : kFlagsOfOneVerb) {
    if (flags.given(flag) && verb != only) return Usage(absl::StrCat("--", flag, " is for ", only));
  }
  if ((a.json || a.markdown) && (verb == "advise" || verb == "train")) {
    return Usage("--json is for run and curve, --markdown for nodes, too");
  }
  if (verb == "curve" && a.plot.empty()) return Usage("--plot: curve needs a file to write");
  if (verb == "nodes" && (a.json || flags.given("sample")))
    return Usage("nodes takes neither --json nor --sample");
  if (verb == "nodes" && a.capacity.empty()) return Usage("--capacity: nodes needs the blocks of each");
  if (verb == "advise" && a.block_bytes == 0)
    return Usage("--block-bytes: advise needs the bytes of a block");
  if (verb == "train" && a.out.empty()) return Usage("--out: train needs a file to write");
  if (const absl::Status fits = Check(a); !fits.ok()) return Usage(std::string(fits.message()));
  const absl::Status status = verb == "train" ? RunTrain(a) : verb == "nodes" ? RunNodes(a) : Run(verb, a);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kvpool-sim: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace kvpool::sim

int main(int argc, char** argv) { return kvpool::sim::Main({argv + 1, argv + argc}); }
