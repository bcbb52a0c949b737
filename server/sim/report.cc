#include "server/sim/report.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace kvpool::sim {
namespace {

std::string Header(const Workload& w) { return absl::StrCat(w.name, ": ", w.Describe(), "\n"); }

}  // namespace

std::string TextTable(const Workload& workload, const std::vector<Result>& results) {
  std::string text = Header(workload);
  absl::StrAppendFormat(&text, "%-15s %9s %8s %8s %10s %10s %12s %12s\n", "policy", "blocks", "hit", "tokens",
                        "evicted", "regret", "prefill saved", "ns/eviction");
  for (const Result& r : results) {
    absl::StrAppendFormat(&text, "%-15s %9d %8.4f %8.4f %10d %10d %11.1f %% %12.0f\n", r.policy,
                          r.capacity_blocks, r.block_ratio(), r.token_ratio(), r.evictions, r.regret,
                          r.prefill_us == 0 ? 0 : 100 * r.prefill_saved_us / r.prefill_us, r.decision_ns);
  }
  return text;
}

std::string MarkdownTable(const Workload& workload, const std::vector<Result>& results) {
  std::set<uint64_t> capacities;
  std::vector<std::string> policies;
  for (const Result& r : results) {
    if (r.policy != "infinite") capacities.insert(r.capacity_blocks);
    if (policies.empty() || policies.back() != r.policy) policies.push_back(r.policy);
  }
  std::string text = "| policy |";
  std::string rule = "| --- |";
  for (const uint64_t c : capacities) {
    absl::StrAppendFormat(&text, " %d blocks |", c);
    rule += " ---: |";
  }
  text += " prefill saved | ns per eviction | bytes per block |\n" + rule + " ---: | ---: | ---: |\n";
  for (const std::string& policy : policies) {
    absl::StrAppend(&text, "| ", policy, " |");
    double ns = 0, bytes = 0;
    std::string saved;
    for (const Result& r : results) {
      if (r.policy != policy) continue;
      for (size_t i = 0; i < (policy == "infinite" ? capacities.size() : 1); ++i) {
        absl::StrAppendFormat(&text, " %.4f |", r.block_ratio());
      }
      absl::StrAppendFormat(&saved, "%s%.1f %%", saved.empty() ? "" : " / ",
                            r.prefill_us == 0 ? 0 : 100 * r.prefill_saved_us / r.prefill_us);
      ns = std::max(ns, r.decision_ns);
      bytes = std::max(bytes, r.bytes_per_block);
    }
    absl::StrAppendFormat(&text, " %s | %.0f | %.0f |\n", saved, ns, bytes);
  }
  return text;
}

std::string Json(const Workload& workload, const std::vector<Result>& results) {
  nlohmann::ordered_json root;
  root["trace"] = workload.name;
  root["requests"] = workload.requests.size();
  root["distinct_blocks"] = workload.distinct;
  root["tokens_per_block"] = workload.tokens_per_block;
  root["sample_one_in"] = workload.one_in;
  root["results"] = nlohmann::ordered_json::array();
  for (const Result& r : results) {
    root["results"].push_back({{"policy", r.policy},
                               {"capacity_blocks", r.capacity_blocks},
                               {"blocks", r.blocks},
                               {"hit_blocks", r.hit_blocks},
                               {"block_hit_ratio", r.block_ratio()},
                               {"tokens", r.tokens},
                               {"hit_tokens", r.hit_tokens},
                               {"token_hit_ratio", r.token_ratio()},
                               {"evictions", r.evictions},
                               {"regret", r.regret},
                               {"prefill_us", r.prefill_us},
                               {"prefill_saved_us", r.prefill_saved_us},
                               {"decision_ns", r.decision_ns},
                               {"bytes_per_block", r.bytes_per_block},
                               {"seconds", r.seconds}});
  }
  return root.dump(2) + "\n";
}

}  // namespace kvpool::sim
