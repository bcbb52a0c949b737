// What a replay says at its end.
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/replay/replay.h"
#include "client/tools/text.h"
#include "proto/support/check.h"

namespace kvpool::replay {
namespace {

using tools::HumanCount;
using tools::HumanSeconds;

// What an engine waits for, in words.
const char* VerbTitle(Verb verb) {
  switch (verb) {
    case Verb::kMatch:
      return "match, answered";
    case Verb::kLeaseLocal:
      return "lease, from the magazine";
    case Verb::kLeaseWait:
      return "lease, magazine refilled";
    case Verb::kSealLocal:
      return "seal, queued";
    case Verb::kSealAnswer:
      return "seal, answered";
    case Verb::kRelease:
      return "release, queued";
  }
  KVPOOL_CHECK(false, "verb %d", static_cast<int>(verb));
}

double PerSecond(uint64_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

std::string Points(double difference) { return absl::StrFormat("%+.2f points", 100 * difference); }

std::string HitsJson(const HitCounts& hits) {
  return absl::StrFormat(
      R"("hit_blocks":%d,"block_hit_ratio":%.6f,"hit_tokens":%d,"token_hit_ratio":%.6f,"evicted_blocks":%d)",
      hits.hit_blocks, hits.block_ratio(), hits.hit_tokens, hits.token_ratio(), hits.evictions);
}

std::string BelowJson(const ReplayResult& result) {
  if (!result.below.has_value()) return "null";
  const BelowCounts& below = *result.below;
  return absl::StrFormat(
      R"({"demoted_blocks":%d,"promoted_blocks":%d,"late_blocks":%d,"dropped_blocks":%d,"lost_blocks":%d,)"
      R"("no_room_blocks":%d,"corrupt_values":%d,"late_tokens":%d,"infinite":{%s}})",
      below.demoted_blocks, below.promoted_blocks, below.late_blocks, below.dropped_blocks, below.lost_blocks,
      below.no_room_blocks, below.corrupt_values, result.late_tokens, HitsJson(result.infinite));
}

}  // namespace

std::string RenderTable(const ReplayResult& result) {
  const HitCounts& hits = result.hits;
  std::string text = absl::StrFormat(
      "%s, %s, %s, pool of %s: %s (%s requests/s, %s blocks/s)\n", HumanCount(hits.requests, "request"),
      HumanCount(hits.blocks, "block"), HumanCount(result.engines, "engine"),
      HumanCount(result.capacity_blocks, "block"), HumanSeconds(result.seconds),
      HumanCount(static_cast<uint64_t>(PerSecond(hits.requests, result.seconds))),
      HumanCount(static_cast<uint64_t>(PerSecond(hits.blocks, result.seconds))));
  tools::Table ratios({"", ">REPLAY", ">EXACT LRU", ">DIFFERENCE"});
  ratios.Add({"block hit ratio", absl::StrFormat("%.4f", hits.block_ratio()),
              absl::StrFormat("%.4f", result.exact.block_ratio()),
              Points(hits.block_ratio() - result.exact.block_ratio())});
  ratios.Add({"token hit ratio", absl::StrFormat("%.4f", hits.token_ratio()),
              absl::StrFormat("%.4f", result.exact.token_ratio()),
              Points(hits.token_ratio() - result.exact.token_ratio())});
  ratios.Add({"evicted blocks", HumanCount(hits.evictions), HumanCount(result.exact.evictions), ""});
  tools::Table verbs({"VERB", ">COUNT", ">P50", ">P99", ">MAX"});
  for (int verb = 0; verb < kVerbs; ++verb) {
    const Durations& durations = result.verbs[static_cast<size_t>(verb)];
    if (durations.count() == 0) continue;
    const auto human = [](uint64_t ns) { return HumanSeconds(static_cast<double>(ns) * 1e-9); };
    verbs.Add({VerbTitle(static_cast<Verb>(verb)), HumanCount(durations.count()),
               human(durations.QuantileNs(0.5)), human(durations.QuantileNs(0.99)),
               human(durations.max_ns())});
  }
  absl::StrAppend(&text, "\n", ratios.Text(), "\n", verbs.Text(), "\n");
  if (result.below.has_value()) {
    const BelowCounts& below = *result.below;
    absl::StrAppendFormat(
        &text,
        "Below the pool: %s down, %s up; %s late, %s dropped, %s lost, %s without room; %s\n"
        "Infinite memory hits %.4f of the blocks and %.4f of the tokens; this replay %s and %s of that\n",
        HumanCount(below.demoted_blocks, "block"), HumanCount(below.promoted_blocks),
        HumanCount(below.late_blocks), HumanCount(below.dropped_blocks), HumanCount(below.lost_blocks),
        HumanCount(below.no_room_blocks), HumanCount(below.corrupt_values, "damaged value"),
        result.infinite.block_ratio(), result.infinite.token_ratio(),
        tools::Percent(hits.block_ratio(), result.infinite.block_ratio()),
        tools::Percent(hits.token_ratio(), result.infinite.token_ratio()));
  }
  if (result.daemon_kills > 0) {
    absl::StrAppend(&text, result.engines_outlived_daemon ? "The daemon" : "The daemon, and all engines,",
                    " killed and restarted ", HumanCount(result.daemon_kills, "time"), "\n");
  }
  if (result.kills > 0) {
    absl::StrAppend(&text, HumanCount(result.kills, "engine"), " killed and restarted, ",
                    HumanCount(result.reopened, "request"), " served again\n");
  }
  absl::StrAppend(
      &text, HumanCount(result.deduplicated_blocks, "block"), " deduplicated, ",
      HumanCount(result.retries, "request"), " begun again for want of blocks\n",
      HumanCount(result.checked_blocks, "block"), " checked, ",
      HumanCount(result.corrupt_blocks, "corruption"), ", ", HumanCount(result.double_owners, "double owner"),
      "; ", HumanCount(result.sealed_again, "block"), " sealed again under a key that was evicted or lost\n");
  return text;
}

std::string RenderJson(const ReplayResult& result, const std::string& workload) {
  std::string verbs;
  for (int verb = 0; verb < kVerbs; ++verb) {
    const Durations& durations = result.verbs[static_cast<size_t>(verb)];
    absl::StrAppendFormat(&verbs, R"(%s"%s":{"count":%d,"p50_ns":%d,"p99_ns":%d,"max_ns":%d})",
                          verb == 0 ? "" : ",", VerbName(static_cast<Verb>(verb)), durations.count(),
                          durations.QuantileNs(0.5), durations.QuantileNs(0.99), durations.max_ns());
  }
  const v1::StateCounts& states = result.states;
  return absl::StrFormat(
      R"({"workload":%s,"engines":%d,"seconds":%.3f,"requests":%d,"requests_per_second":%.1f,"blocks":%d,)"
      R"("blocks_per_second":%.1f,"tokens":%d,%s,"exact":{"capacity_blocks":%d,%s},"block_hit_ratio_difference":%.6f,)"
      R"("deduplicated_blocks":%d,"checked_blocks":%d,"corrupt_blocks":%d,"double_owners":%d,"sealed_again":%d,"refused":%d,"retries":%d,"kills":%d,"daemon_kills":%d,"reopened":%d,"below":%s,)"
      R"("sessions":%d,"states":{"free":%d,"leased":%d,"sealed":%d,"cached":%d,"quarantined":%d,"capacity":%d},)"
      R"("verbs":{%s}})"
      "\n",
      tools::JsonQuote(workload), result.engines, result.seconds, result.hits.requests,
      PerSecond(result.hits.requests, result.seconds), result.hits.blocks,
      PerSecond(result.hits.blocks, result.seconds), result.hits.tokens, HitsJson(result.hits),
      result.capacity_blocks, HitsJson(result.exact), result.hits.block_ratio() - result.exact.block_ratio(),
      result.deduplicated_blocks, result.checked_blocks, result.corrupt_blocks, result.double_owners,
      result.sealed_again, result.refused, result.retries, result.kills, result.daemon_kills, result.reopened,
      BelowJson(result), result.sessions, states.free(), states.leased(), states.sealed(), states.cached(),
      states.quarantined(), states.capacity(), verbs);
}

}  // namespace kvpool::replay
