#include "server/metrics/metrics.h"

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "server/metrics/process_facts.h"

namespace kvpool {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// Label values, indexed by BlockState, EvictReason and v1::Shortfall.
constexpr const char* kStates[kBlockStates] = {"free",   "leased",      "sealed",
                                               "cached", "quarantined", "withheld"};
constexpr const char* kReasons[kEvictReasons] = {"background", "direct", "operator", "damaged"};
constexpr const char* kShortfalls[] = {"none", "pressure", "growing", "credit", "cap", "reclaiming"};

// The families of one scrape, in the order they are added.
class Families {
 public:
  // Each begins a family, to which samples are added until the next one begins.
  void Gauge(const char* name, const char* help) { Begin(name, help, MetricType::Gauge); }
  void Counter(const char* name, const char* help) { Begin(name, help, MetricType::Counter); }
  void Histogram(const char* name, const char* help) { Begin(name, help, MetricType::Histogram); }

  using Labels = std::initializer_list<std::pair<const char*, std::string>>;
  void Add(Labels labels, double value) {
    ClientMetric& metric = Sample(labels);
    metric.gauge.value = value;
    metric.counter.value = value;
  }
  void Add(Labels labels, const HistogramSnapshot& snapshot) {
    prometheus::ClientMetric::Histogram& histogram = Sample(labels).histogram;
    uint64_t cumulative = 0;
    for (size_t i = 0; i < snapshot.counts.size(); ++i) {
      cumulative += snapshot.counts[i];
      histogram.bucket.push_back({cumulative, i < snapshot.bounds.size()
                                                  ? snapshot.bounds[i]
                                                  : std::numeric_limits<double>::infinity()});
    }
    histogram.sample_count = cumulative;
    histogram.sample_sum = snapshot.sum;
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  void Begin(const char* name, const char* help, MetricType type) {
    families_.push_back({name, help, type, {}});
  }
  ClientMetric& Sample(Labels labels) {
    ClientMetric& metric = families_.back().metric.emplace_back();
    for (const auto& [name, value] : labels) metric.label.push_back({name, value});
    return metric;
  }

  std::vector<MetricFamily> families_;
};

std::string Id(const SpaceSnapshot& space) { return absl::StrCat(space.space); }

// One value of each open space; `value` is a function of it, or a member.
template <typename Value>
void EachSpace(const DaemonSnapshot& daemon, Families* out, Value value) {
  for (const SpaceSnapshot& space : daemon.spaces) {
    out->Add({{"space", Id(space)}}, static_cast<double>(std::invoke(value, space)));
  }
}

// One value of each device that can score; `value` as above.
template <typename Value>
void EachScoringDevice(const DaemonSnapshot& daemon, Families* out, Value value) {
  for (const DeviceOperationsSnapshot& device : daemon.device_operations) {
    out->Add({{"device", device.device}}, static_cast<double>(std::invoke(value, device)));
  }
}

// ---- Counters
// A new counter is a member of its struct and a line in one of these tables. Sums over spaces need nothing
// (server/base/counters.h), and a member without a line does not compile.

// A family of its own.
template <typename Counters>
struct CounterFamily {
  uint64_t Counters::*value;
  const char* name;
  const char* help;
};
// A series of a family of several, told apart by a label.
template <typename Counters>
struct CounterSeries {
  uint64_t Counters::*value;
  const char* label;
};

constexpr CounterFamily<PoolCounters> kPoolFamilies[] = {
    {&PoolCounters::leased, "kvpool_leased_blocks_total", "Blocks leased."},
    {&PoolCounters::released, "kvpool_released_blocks_total", "Holds on blocks given back."},
    {&PoolCounters::sealed, "kvpool_sealed_blocks_total", "Blocks sealed under a new key."},
    {&PoolCounters::moved, "kvpool_moved_blocks_total",
     "Cached blocks moved within their space, for memory to be given back."},
    {&PoolCounters::deduplicated, "kvpool_deduplicated_blocks_total", "Blocks whose key was sealed already."},
    {&PoolCounters::lookups, "kvpool_lookups_total", "Matches."},
    {&PoolCounters::lookup_blocks, "kvpool_lookup_blocks_total", "Keys asked for in matches."},
    {&PoolCounters::hit_blocks, "kvpool_hit_blocks_total", "Keys found in matches."},
    {&PoolCounters::lookup_tokens, "kvpool_lookup_tokens_total", "Tokens asked for in matches."},
    {&PoolCounters::hit_tokens, "kvpool_hit_tokens_total", "Tokens found in matches."},
    {&PoolCounters::regret, "kvpool_regret_blocks_total", "Keys asked for after they were evicted."},
    {&PoolCounters::refused_stale, "kvpool_stale_refs_total",
     "Block refs refused because the block had changed hands."},
};
constexpr CounterSeries<PoolCounters> kVictims[] = {{&PoolCounters::decided_victims, "decision"},
                                                    {&PoolCounters::undecided_victims, "lru"}};
constexpr CounterFamily<GiveBackCounters> kGiveBackFamilies[] = {
    {&GiveBackCounters::slabs, "kvpool_given_back_slabs_total",
     "Slabs given back to the device for other spaces."},
    {&GiveBackCounters::asked, "kvpool_give_back_asked_total",
     "Times that a space was asked for memory for others."},
    {&GiveBackCounters::missed, "kvpool_give_back_missed_total",
     "Times that a space did not give what it was asked for in time: what is held there can't go."},
    {&GiveBackCounters::late, "kvpool_give_back_late_total",
     "Sessions that were asked to unmap a slab, or for leases, at least 100 ms before the time was over, and "
     "had "
     "not answered by then."}};
static_assert(sizeof(GiveBackCounters) == std::size(kGiveBackFamilies) * sizeof(uint64_t),
              "a counter of GiveBackCounters has no line in kGiveBackFamilies");
// PoolCounters::evicted is in kvpool_evicted_blocks_total, split by policy.
static_assert(sizeof(PoolCounters) ==
                  (std::size(kPoolFamilies) + std::size(kVictims) + kEvictReasons) * sizeof(uint64_t),
              "a counter of PoolCounters has no line in kPoolFamilies or kVictims");
static_assert(sizeof(SpaceCounters) ==
                  sizeof(SpaceCounters::operations) + sizeof(SpaceCounters::errors) +
                      sizeof(SpaceCounters::refused_blocks) + sizeof(SpaceCounters::shortfalls) +
                      sizeof(SpaceCounters::batches) + sizeof(SpaceCounters::growth_failures),
              "a counter of SpaceCounters has no family in AddMemory or AddVerbs");

constexpr CounterFamily<FeatureStats> kFeatureFamilies[] = {
    {&FeatureStats::hits, "kvpool_feature_cache_hits_total", "Full blocks whose features were kept."},
    {&FeatureStats::misses, "kvpool_feature_cache_misses_total",
     "Full blocks whose features had to be read from K and V."},
    {&FeatureStats::evicted, "kvpool_feature_cache_evicted_total", "Features that left for others."},
};
static_assert(sizeof(FeatureStats) ==
                  std::size(kFeatureFamilies) * sizeof(uint64_t) + sizeof(FeatureStats::bytes),
              "a counter of FeatureStats has no line in kFeatureFamilies");

constexpr CounterFamily<DeviceCounters> kDeviceFamilies[] = {
    {&DeviceCounters::pruned_blocks, "kvpool_pruned_blocks_total",
     "Blocks of live sequences that Prune released."},
    {&DeviceCounters::compacted_blocks, "kvpool_compacted_blocks_total", "Blocks that Compact filled."},
};
constexpr CounterSeries<DeviceCounters> kRefusals[] = {{&DeviceCounters::refused_by_queue, "queue"},
                                                       {&DeviceCounters::refused_by_session, "session"}};
static_assert(sizeof(DeviceCounters) ==
                  (std::size(kDeviceFamilies) + std::size(kRefusals)) * sizeof(uint64_t),
              "a counter of DeviceCounters has no line in kDeviceFamilies or kRefusals");

// ---- Families by what they are about
void AddMemory(const DaemonSnapshot& daemon, Families* out) {
  using Space = SpaceSnapshot;
  out->Gauge("kvpool_blocks", "Blocks by state; the states sum to the capacity.");
  for (const Space& space : daemon.spaces) {
    for (int state = 0; state < kBlockStates; ++state) {
      out->Add({{"space", Id(space)}, {"state", kStates[state]}}, space.blocks[state]);
    }
  }
  out->Gauge("kvpool_capacity_blocks", "Blocks of the space without the null block.");
  EachSpace(daemon, out, &Space::capacity);
  out->Gauge("kvpool_slabs", "Slabs of the space on each rank.");
  EachSpace(daemon, out, &Space::slabs);
  out->Gauge("kvpool_slab_bytes", "Bytes of the space's slabs, on all ranks together.");
  EachSpace(daemon, out, &Space::slab_bytes);
  out->Gauge("kvpool_space_bookkeeping_bytes",
             "Memory of the space's tables once every block of it is in use.");
  EachSpace(daemon, out, &Space::bookkeeping_bytes);
  out->Gauge("kvpool_device_capacity_bytes", "Device memory given to the daemon.");
  for (const v1::DeviceInfo& device : daemon.devices) {
    out->Add({{"device", device.device()}}, static_cast<double>(device.capacity_bytes()));
  }
  out->Gauge("kvpool_device_used_bytes", "Device memory in slabs.");
  for (const v1::DeviceInfo& device : daemon.devices) {
    out->Add({{"device", device.device()}}, static_cast<double>(device.used_bytes()));
  }
  out->Gauge("kvpool_device_unfreed_bytes",
             "Of the used memory, that of slabs which are gone, while the device does not show it as free.");
  for (const v1::DeviceInfo& device : daemon.devices) {
    out->Add({{"device", device.device()}}, static_cast<double>(device.unfreed_bytes()));
  }
  out->Gauge("kvpool_pinned_blocks", "Blocks pinned or retained above the default priority.");
  EachSpace(daemon, out, &Space::pinned);
  out->Gauge("kvpool_pin_budget_blocks", "Most blocks that may be pinned or retained.");
  EachSpace(daemon, out, &Space::pin_budget);
  out->Gauge("kvpool_pressure", "1 while free and reclaimable blocks are below the low watermark.");
  EachSpace(daemon, out, &Space::pressure);
  out->Counter("kvpool_growth_failures_total", "Slabs that a device refused although the budget had room.");
  EachSpace(daemon, out, [](const Space& space) { return space.counters.growth_failures; });
  for (const auto& family : kGiveBackFamilies) {
    out->Counter(family.name, family.help);
    EachSpace(daemon, out, [&](const Space& space) { return space.give_back.*family.value; });
  }
  out->Histogram(
      "kvpool_guarantee_wait_seconds",
      "How long openings waited for other spaces to give memory back, those that did not get it included.");
  out->Add({}, daemon.guarantee_wait);
  out->Gauge("kvpool_share_blocks", "Blocks that an operator keeps for the space, whatever others want.");
  EachSpace(daemon, out, &Space::share_blocks);
  out->Gauge("kvpool_limit_blocks", "The most blocks that the space may have.");
  EachSpace(daemon, out, &Space::limit_blocks);
  out->Gauge("kvpool_share_weight",
             "The space's weight where several want memory, by its rule or an operator; 0: it has none.");
  EachSpace(daemon, out, &Space::weight);
  out->Gauge("kvpool_share_priority",
             "The space's priority class, by its rule or an operator: 1 batch, 2 standard, 3 interactive.");
  EachSpace(daemon, out, &Space::priority);
}

// What the start of the daemon found of the one before it.
void AddRecovery(const DaemonSnapshot& daemon, Families* out) {
  const StartReport& start = daemon.start;
  out->Gauge("kvpool_start_info", "1; how the daemon started: warm, or why it found nothing.");
  out->Add({{"start", kColdStartNames[static_cast<size_t>(start.cold)]}}, 1);
  out->Gauge("kvpool_recovery_seconds", "Time in which this daemon read what was kept, all spaces together.");
  out->Add({}, start.recovery_seconds);
  out->Gauge("kvpool_first_answer_seconds",
             "From the start of the daemon to its first answer to a verb; 0: none yet.");
  out->Add({}, start.first_answer_seconds.value_or(0));
  out->Gauge("kvpool_recovery_lost_spaces", "Spaces that were kept and are not there, by reason.");
  for (size_t reason = 0; reason < kSpaceLossNames.size(); ++reason) {
    out->Add(
        {{"reason", kSpaceLossNames[reason]}},
        static_cast<double>(std::count_if(start.lost.begin(), start.lost.end(), [&](const LostSpace& lost) {
          return static_cast<size_t>(lost.loss) == reason;
        })));
  }
  out->Gauge("kvpool_recovered_blocks",
             "Sealed blocks that this daemon found when it started, cached or held.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    out->Add({{"space", Id(space)}, {"state", "cached"}}, space.recovered.blocks.cached);
    out->Add({{"space", Id(space)}, {"state", "held"}}, space.recovered.blocks.held);
  }
  out->Gauge("kvpool_recovery_dropped_blocks", "Blocks that were lost when this daemon started, by reason.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (size_t reason = 0; reason < kBlockLosses; ++reason) {
      out->Add({{"space", Id(space)}, {"reason", kBlockLossNames[reason]}},
               space.recovered.blocks.lost[reason]);
    }
  }
  out->Gauge(
      "kvpool_recovered_sessions",
      "Sessions of the daemon before: those that are back, and those whose members have not all come back.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    out->Add({{"space", Id(space)}, {"state", "back"}}, space.recovered.back);
    out->Add({{"space", Id(space)}, {"state", "waiting"}}, space.recovered.waiting);
  }
  out->Gauge("kvpool_recovery_lost_sessions",
             "Sessions of the daemon before that do not go on under this one, by reason.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (size_t reason = 0; reason < kSessionLosses; ++reason) {
      // Those that had ended before are none.
      if (reason <= static_cast<size_t>(SessionLoss::kEnded)) continue;
      out->Add({{"space", Id(space)}, {"reason", kSessionLossNames[reason]}},
               space.recovered.lost_sessions[reason]);
    }
  }
}

static_assert(sizeof(CheckCounters) == sizeof(CheckCounters::checked) + sizeof(CheckCounters::failed) +
                                           sizeof(CheckCounters::unsummed),
              "a counter of CheckCounters has no family in AddChecks");

// What --verify=seal has found.
void AddChecks(const DaemonSnapshot& daemon, Families* out) {
  out->Counter("kvpool_verify_blocks_total",
               "Blocks whose content was summed when they were sealed (seal), or compared with that sum.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (size_t when = 0; when < kCheckedWhenNames.size(); ++when) {
      out->Add({{"space", Id(space)}, {"when", kCheckedWhenNames[when]}},
               static_cast<double>(space.checks.checked[when]));
    }
  }
  out->Counter(
      "kvpool_verify_failed_blocks_total",
      "Blocks that held something else than what was sealed: no key finds them any more, and what is "
      "behind them stays.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (size_t when = 1; when < kCheckedWhenNames.size(); ++when) {
      out->Add({{"space", Id(space)}, {"when", kCheckedWhenNames[when]}},
               static_cast<double>(space.checks.failed[when]));
    }
  }
  out->Counter("kvpool_verify_unverified_blocks_total",
               "Blocks that are answered without a sum: too many waited for theirs, or the daemon ended "
               "before it was taken.");
  EachSpace(daemon, out, [](const SpaceSnapshot& space) {
    return space.checks.unsummed + space.recovered.blocks.unsummed;
  });
  out->Gauge("kvpool_verify_doubted_blocks",
             "Blocks that are not answered yet: what they hold is to be compared after a restart.");
  EachSpace(daemon, out, &SpaceSnapshot::doubted);
}

// Sessions come and go without end. So many, those with the most blocks, have a series of their own.
constexpr size_t kSessionsShown = 16;

void AddSessionBlocks(const DaemonSnapshot& daemon, Families* out) {
  struct Row {
    size_t space;
    SessionBlocks session;
  };
  std::vector<Row> rows;
  std::vector<uint64_t> others(daemon.spaces.size());
  for (size_t i = 0; i < daemon.spaces.size(); ++i) {
    for (const SessionBlocks& session : daemon.spaces[i].session_blocks) rows.push_back({i, session});
  }
  const size_t shown = std::min(rows.size(), kSessionsShown);
  std::partial_sort(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(shown), rows.end(),
                    [](const Row& a, const Row& b) {
                      if (a.session.blocks != b.session.blocks) return a.session.blocks > b.session.blocks;
                      return a.session.session < b.session.session;
                    });
  out->Gauge("kvpool_session_blocks",
             "Blocks charged to a session. The 16 sessions with the most have their number; "
             "session=\"other\" sums up "
             "the rest of a space.");
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& [space, session] = rows[i];
    if (i < shown) {
      out->Add({{"space", Id(daemon.spaces[space])}, {"session", absl::StrCat(session.session)}},
               session.blocks);
    } else {
      others[space] += session.blocks;
    }
  }
  for (size_t i = 0; i < others.size(); ++i) {
    out->Add({{"space", Id(daemon.spaces[i])}, {"session", "other"}}, static_cast<double>(others[i]));
  }
}

void AddSessions(const DaemonSnapshot& daemon, Families* out) {
  out->Gauge("kvpool_spaces", "Open spaces.");
  out->Add({}, static_cast<double>(daemon.spaces.size()));
  out->Gauge("kvpool_space_info", "1; what the space is.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    out->Add({{"space", Id(space)},
              {"tenant", space.tenant},
              {"kind", space.kind},
              {"policy", space.policy},
              {"model", space.model},
              {"architecture", space.architecture}},
             1);
  }
  out->Gauge("kvpool_sessions", "Sessions: open, or ended with members that still run.");
  EachSpace(daemon, out, &SpaceSnapshot::sessions);
  AddSessionBlocks(daemon, out);
  out->Gauge(
      "kvpool_members_stale",
      "Members that have not called: for 60 s while they hold blocks, for 5 s while they owe an answer.");
  EachSpace(daemon, out, &SpaceSnapshot::members_stale);
  out->Counter("kvpool_sessions_ended_total", "Sessions that ended, by reason.");
  for (const auto& [reason, count] : daemon.sessions_ended) {
    out->Add({{"reason", reason}}, static_cast<double>(count));
  }
  out->Counter("kvpool_reconnects_total", "Streams that took over from an older one of the same member.");
  out->Add({}, static_cast<double>(daemon.reconnects));
  out->Gauge("kvpool_draining", "1 after a drain was asked for.");
  out->Add({}, daemon.draining ? 1 : 0);
}

void AddVerbs(const DaemonSnapshot& daemon, Families* out) {
  for (const auto& family : kPoolFamilies) {
    out->Counter(family.name, family.help);
    EachSpace(daemon, out, [&](const SpaceSnapshot& space) { return space.pool.*family.value; });
  }
  out->Counter("kvpool_lease_shortfalls_total", "Leases of fewer blocks than asked for, by reason.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (size_t reason = 1; reason < std::size(kShortfalls); ++reason) {
      out->Add({{"space", Id(space)}, {"reason", kShortfalls[reason]}},
               static_cast<double>(space.counters.shortfalls[reason]));
    }
  }
  out->Gauge("kvpool_parked_verbs",
             "Verbs that wait for a step, run on a device, or wait behind such a verb.");
  EachSpace(daemon, out, &SpaceSnapshot::parked);
  out->Counter("kvpool_step_batches_total", "Batches of operations applied.");
  out->Add({}, static_cast<double>(daemon.totals.space.batches));
  out->Counter("kvpool_events_logged_total", "Matches, seals and hints that are in the event log.");
  out->Add({}, static_cast<double>(daemon.events_logged));
  out->Counter("kvpool_events_lost_total",
               "Matches, seals and hints that the event log had no room for, or could not write.");
  out->Add({}, static_cast<double>(daemon.events_lost));
  out->Counter("kvpool_step_operations_total", "Operations applied, by verb.");
  for (const auto& [verb, count] : daemon.step_operations) {
    out->Add({{"verb", verb}}, static_cast<double>(count));
  }
  // Verbs have counts and no times: a look at the clock before and after each would cost more than many verbs
  // take. kvpool_rpc_seconds has the time of whole batches, and kvpool_device_op_seconds that of the slow verbs.
  out->Counter(
      "kvpool_step_errors_total",
      "Operations refused or failed, by verb; those that failed on a device are in kvpool_device_ops_total.");
  for (const auto& [verb, count] : daemon.step_errors) {
    out->Add({{"verb", verb}}, static_cast<double>(count));
  }
  out->Counter("kvpool_refused_blocks_total",
               "Blocks that an operation was not applied to, although it was to others, by verb.");
  for (const auto& [verb, count] : daemon.refused_blocks) {
    out->Add({{"verb", verb}}, static_cast<double>(count));
  }
}

void AddReclaim(const DaemonSnapshot& daemon, Families* out) {
  out->Counter("kvpool_evicted_blocks_total", "Cached blocks reclaimed, by the policy of the time.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (const auto& [policy, evicted] : space.evicted_by_policy) {
      for (int reason = 0; reason < kEvictReasons; ++reason) {
        out->Add({{"space", Id(space)}, {"policy", policy}, {"reason", kReasons[reason]}},
                 static_cast<double>(evicted[reason]));
      }
    }
  }
  struct SpaceHistogram {
    HistogramSnapshot SpaceSnapshot::*value;
    const char* name;
    const char* help;
  };
  static constexpr SpaceHistogram kHistograms[] = {
      {&SpaceSnapshot::hold, "kvpool_space_mutex_hold_seconds",
       "Time of one hold of the space's mutex, for which its verbs wait."},
      {&SpaceSnapshot::hold_work, "kvpool_space_mutex_work_seconds",
       "Processor time of one hold of the space's mutex, with --metrics-detail=debug. What a hold takes "
       "beyond it "
       "the thread waited for a processor."},
      {&SpaceSnapshot::reclaim, "kvpool_reclaim_seconds", "Time of one round of background reclaim."},
      {&SpaceSnapshot::lifetime, "kvpool_block_lifetime_seconds", "From seal to eviction."},
      {&SpaceSnapshot::idle_before_evict, "kvpool_block_idle_before_evict_seconds",
       "From last use to eviction."},
      {&SpaceSnapshot::reuse_gap, "kvpool_block_reuse_gap_seconds", "From one use of a block to the next."},
  };
  for (const SpaceHistogram& histogram : kHistograms) {
    out->Histogram(histogram.name, histogram.help);
    for (const SpaceSnapshot& space : daemon.spaces) {
      out->Add({{"space", Id(space)}}, space.*histogram.value);
    }
  }
}

constexpr CounterFamily<BelowCounters> kBelowFamilies[] = {
    {&BelowCounters::demoted, "kvpool_tier_demoted_blocks_total", "Blocks copied to the tier."},
    {&BelowCounters::promoted, "kvpool_tier_promoted_blocks_total", "Blocks brought up from the tier."},
    {&BelowCounters::waits, "kvpool_tier_waits_total", "Matches that waited for blocks from the tier."},
    {&BelowCounters::forecasts, "kvpool_tier_forecasts_total",
     "Promotions whose time was known beforehand, and that came whole."},
};
constexpr CounterSeries<BelowCounters> kBelowLosses[] = {{&BelowCounters::moved, "moved"},
                                                         {&BelowCounters::dropped, "dropped"},
                                                         {&BelowCounters::unwritten, "left"},
                                                         {&BelowCounters::late, "late"},
                                                         {&BelowCounters::lost, "lost"},
                                                         {&BelowCounters::no_room, "no_room"},
                                                         {&BelowCounters::refused_waits, "refused_wait"},
                                                         {&BelowCounters::not_worth, "not_worth"}};
constexpr CounterSeries<BelowCounters> kForecastMs[] = {{&BelowCounters::forecast_ms, "expected"},
                                                        {&BelowCounters::taken_ms, "taken"},
                                                        {&BelowCounters::error_ms, "error"}};
static_assert(sizeof(BelowCounters) ==
                  (std::size(kBelowFamilies) + std::size(kBelowLosses) + std::size(kForecastMs)) *
                      sizeof(uint64_t),
              "a counter of BelowCounters has no line in kBelowFamilies, kBelowLosses or kForecastMs");

constexpr CounterSeries<TierCounters> kTierResults[] = {
    {&TierCounters::stored, "stored"},   {&TierCounters::loaded, "loaded"},
    {&TierCounters::evicted, "evicted"}, {&TierCounters::missed, "missed"},
    {&TierCounters::corrupt, "corrupt"}, {&TierCounters::late, "late"},
    {&TierCounters::full, "full"},       {&TierCounters::failed, "failed"},
    {&TierCounters::no_key, "no_key"}};
constexpr CounterSeries<TierCounters> kTierBytes[] = {{&TierCounters::stored_bytes, "write"},
                                                      {&TierCounters::loaded_bytes, "read"}};
static_assert(sizeof(TierCounters) == (std::size(kTierResults) + std::size(kTierBytes)) * sizeof(uint64_t),
              "a counter of TierCounters has no line in kTierResults or kTierBytes");

void AddTier(const DaemonSnapshot& daemon, Families* out) {
  if (!daemon.may_have_tiers) return;
  for (const auto& family : kBelowFamilies) {
    out->Counter(family.name, family.help);
    EachSpace(daemon, out, [&](const SpaceSnapshot& space) { return space.below.*family.value; });
  }
  out->Counter(
      "kvpool_tier_lost_blocks_total",
      "Blocks that did not go down (moved, dropped, left) or come up (late, lost, no_room, not_worth: to "
      "compute them is faster), by why; and matches that "
      "were not let wait (refused_wait).");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (const auto& loss : kBelowLosses) {
      out->Add({{"space", Id(space)}, {"why", loss.label}}, static_cast<double>(space.below.*loss.value));
    }
  }
  out->Counter(
      "kvpool_tier_forecast_seconds_total",
      "Of promotions whose time was known beforehand: what it was expected to be, what it was, and by how "
      "much they differed.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (const auto& of : kForecastMs) {
      out->Add({{"space", Id(space)}, {"what", of.label}}, static_cast<double>(space.below.*of.value) / 1000);
    }
  }
  // Each family has the series of all tiers, one behind the other.
  const auto each = [&](const std::function<void(const std::string& name, const TierSnapshot& tier)>& add) {
    for (const TierSnapshot& tier : daemon.tiers) {
      // One that goes may have the name of one that has come.
      if (tier.state != TierSet::State::kDetaching) add(tier.name, tier);
    }
  };
  if (daemon.tiers.empty()) return;
  out->Counter("kvpool_tier_values_total",
               "Values that a tier was asked for, given, or gave up, by result, since it was attached.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    for (const auto& result : kTierResults) {
      out->Add({{"tier", name}, {"result", result.label}},
               static_cast<double>(tier.usage.counters.*result.value));
    }
  });
  out->Counter("kvpool_tier_bytes_total", "Bytes read from a tier and written to it.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    for (const auto& direction : kTierBytes) {
      out->Add({{"tier", name}, {"direction", direction.label}},
               static_cast<double>(tier.usage.counters.*direction.value));
    }
  });
  out->Gauge("kvpool_tier_values",
             "Values in a tier; of one that nodes share, those that this daemon knows of.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    out->Add({{"tier", name}}, static_cast<double>(tier.usage.values));
  });
  // What others write to has a capacity, and bytes in it, that this daemon does not know.
  const bool bounded = std::any_of(daemon.tiers.begin(), daemon.tiers.end(),
                                   [](const TierSnapshot& tier) { return tier.usage.capacity_bytes > 0; });
  if (bounded) {
    out->Gauge("kvpool_tier_used_bytes", "Bytes of the values in a tier.");
    each([&](const std::string& name, const TierSnapshot& tier) {
      if (tier.usage.capacity_bytes > 0) out->Add({{"tier", name}}, static_cast<double>(tier.usage.bytes));
    });
    out->Gauge("kvpool_tier_capacity_bytes", "Bytes that a tier may take.");
    each([&](const std::string& name, const TierSnapshot& tier) {
      const uint64_t capacity = tier.usage.capacity_bytes;
      if (capacity > 0) out->Add({{"tier", name}}, static_cast<double>(capacity));
    });
  }
  out->Gauge("kvpool_tier_nodes",
             "Servers that a tier consists of, by state: up, or down: they don't answer and are left alone.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    const TierUsage& usage = tier.usage;
    if (usage.nodes == 0) return;
    out->Add({{"tier", name}, {"state", "up"}}, static_cast<double>(usage.nodes - usage.nodes_down));
    out->Add({{"tier", name}, {"state", "down"}}, static_cast<double>(usage.nodes_down));
  });
  out->Gauge("kvpool_tier_waiting", "Reads and writes that a tier has not answered.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    out->Add({{"tier", name}}, static_cast<double>(tier.usage.waiting));
  });
  out->Gauge("kvpool_tier_latency_seconds",
             "What each load of late has taken beside the time for its bytes; 0: not known.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    out->Add({{"tier", name}}, tier.load.seconds);
  });
  out->Gauge("kvpool_tier_bytes_per_second", "How fast bytes of loads have come of late; 0: not known.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    out->Add({{"tier", name}}, tier.load.bytes_per_second);
  });
  out->Histogram("kvpool_tier_load_seconds",
                 "From when a value was asked for to the answer, the wait included.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    out->Add({{"tier", name}}, tier.usage.load);
  });
  out->Histogram("kvpool_tier_store_seconds",
                 "From when a value was given to the answer, the wait included.");
  each([&](const std::string& name, const TierSnapshot& tier) {
    out->Add({{"tier", name}}, tier.usage.store);
  });
}

void AddDecisions(const DaemonSnapshot& daemon, Families* out) {
  static constexpr CounterSeries<SpaceSnapshot> kOutcomes[] = {
      {&SpaceSnapshot::decided_in_time, "in_time"},
      {&SpaceSnapshot::decided_late, "late"},
      {&SpaceSnapshot::decisions_not_asked, "not_asked"}};
  out->Counter("kvpool_policy_decisions_total",
               "Decisions of a policy that decides outside the lock, by outcome: in_time, late, not_asked.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (const auto& outcome : kOutcomes) {
      out->Add({{"space", Id(space)}, {"policy", space.policy}, {"outcome", outcome.label}},
               static_cast<double>(space.*outcome.value));
    }
  }
  out->Counter("kvpool_policy_victims_total",
               "Blocks evicted by a policy that decides outside the lock: by a decision, or by LRU as there "
               "was none.");
  for (const SpaceSnapshot& space : daemon.spaces) {
    for (const auto& victims : kVictims) {
      out->Add({{"space", Id(space)}, {"policy", space.policy}, {"by", victims.label}},
               static_cast<double>(space.pool.*victims.value));
    }
  }
  out->Histogram("kvpool_policy_decision_seconds", "Time that one decision takes outside the lock.");
  for (const SpaceSnapshot& space : daemon.spaces) out->Add({{"space", Id(space)}}, space.decision_time);
  out->Gauge("kvpool_policy_breaker_state",
             "Whether a policy that decides outside the lock is asked. 0: it is. 1: one decision is tried. "
             "2: it is not.");
  EachSpace(daemon, out, &SpaceSnapshot::breaker_state);
}

void AddDeviceOperations(const DaemonSnapshot& daemon, Families* out) {
  using Operations = DeviceOperationsSnapshot;
  out->Histogram("kvpool_device_op_seconds",
                 "Time of Score, Select, Prune, Compact and PlanBudgets on the device, by verb and policy; "
                 "queueing aside.");
  for (const Operations& device : daemon.device_operations) {
    for (const auto& [labels, seconds] : device.seconds) {
      out->Add({{"device", device.device}, {"op", labels.first}, {"policy", labels.second}}, seconds);
    }
  }
  out->Counter("kvpool_device_ops_total", "Operations that ran on the device, by verb and code.");
  for (const Operations& device : daemon.device_operations) {
    for (const auto& [labels, count] : device.operations) {
      out->Add({{"device", device.device}, {"op", labels.first}, {"code", labels.second}},
               static_cast<double>(count));
    }
  }
  out->Counter("kvpool_device_ops_refused_total",
               "Operations refused because too many waited, by the limit: queue (of the device) or session.");
  for (const Operations& device : daemon.device_operations) {
    for (const auto& refusals : kRefusals) {
      out->Add({{"device", device.device}, {"limit", refusals.label}},
               static_cast<double>(device.counters.*refusals.value));
    }
  }
  out->Gauge("kvpool_device_ops_queued", "Operations that wait for the device, the running one among them.");
  EachScoringDevice(daemon, out, &Operations::queued);
  out->Gauge("kvpool_feature_cache_bytes", "Memory of the features of full blocks that are kept.");
  EachScoringDevice(daemon, out, [](const Operations& device) { return device.features.bytes; });
  for (const auto& family : kFeatureFamilies) {
    out->Counter(family.name, family.help);
    EachScoringDevice(daemon, out, [&](const Operations& device) { return device.features.*family.value; });
  }
  for (const auto& family : kDeviceFamilies) {
    out->Counter(family.name, family.help);
    EachScoringDevice(daemon, out, [&](const Operations& device) { return device.counters.*family.value; });
  }
}

void AddGuard(const DaemonSnapshot& daemon, Families* out) {
  out->Histogram(
      "kvpool_guard_drift",
      "How far a layer's attention output moved by what a policy dropped, in lengths of the output: the "
      "mean of each measured Prune and Compact.");
  for (const auto& [policy, totals] : daemon.guard) out->Add({{"policy", policy}}, totals.drift);
  out->Counter(
      "kvpool_guard_operations_total",
      "Prune and Compact that dropped tokens by a policy, by what became of them: measured, failed (to be "
      "measured), passed_over (not in the sample), no_window or unsuited. None without --guard-share.");
  for (const auto& [policy, totals] : daemon.guard) {
    for (size_t i = 0; i < kGuardOutcomes; ++i) {
      out->Add({{"policy", policy}, {"outcome", kGuardOutcomeNames[i]}},
               static_cast<double>(totals.operations[i]));
    }
  }
  out->Counter("kvpool_guard_refused_total", "Prune and Compact refused as their policy was off.");
  for (const auto& [policy, totals] : daemon.guard)
    out->Add({{"policy", policy}}, static_cast<double>(totals.refused));
  out->Gauge("kvpool_guard_off_spaces",
             "Spaces in which the policy is off, as its drift was above --guard-bound.");
  for (const auto& [policy, totals] : daemon.guard) out->Add({{"policy", policy}}, totals.off_spaces);
}

void AddTransport(const RpcStats::Totals& rpc, const AttachStats& attach, Families* out) {
  out->Histogram("kvpool_rpc_seconds", "From the arrival of an RPC, or of a batch of Step, to its answer.");
  for (const auto& [method, stats] : rpc.methods) out->Add({{"method", method}}, stats.seconds);
  out->Counter("kvpool_rpc_errors_total", "RPCs, and batches of Step, that failed as a whole.");
  for (const auto& [method, stats] : rpc.methods) {
    for (const auto& [code, count] : stats.errors) {
      out->Add({{"method", method}, {"code", code}}, static_cast<double>(count));
    }
  }
  out->Counter("kvpool_openings_refused_total",
               "OpenSession and AddMember, in a stream or not, that were refused.");
  for (const auto& [reason, count] : rpc.refused_openings) {
    out->Add({{"reason", reason}}, static_cast<double>(count));
  }
  out->Counter("kvpool_rpc_connections_refused_total",
               "Connections to the gRPC socket refused, or closed since they said nothing or spoke no "
               "HTTP/2, by reason.");
  for (const auto& [reason, count] : rpc.refused_connections) {
    out->Add({{"reason", reason}}, static_cast<double>(count));
  }
  out->Counter(
      "kvpool_calls_paced_total",
      "Batches of Step that waited, and unary verbs that were refused, for verbs-a-second of their rule.");
  out->Add({}, static_cast<double>(rpc.paced));
  out->Gauge("kvpool_attach_connections", "Open attach connections.");
  out->Add({}, static_cast<double>(attach.connections));
  out->Counter("kvpool_attach_refused_total",
               "Attach connections refused or closed for a fault of theirs, by reason.");
  for (const auto& [reason, count] : attach.refused) {
    out->Add({{"reason", reason}}, static_cast<double>(count));
  }
}

// The names of Prometheus' own client libraries, which common dashboards and alerts know.
void AddProcess(const ProcessFacts& process, Families* out) {
  out->Counter("process_cpu_seconds_total", "Processor time of the daemon, user and system.");
  out->Add({}, process.cpu_seconds);
  out->Gauge("process_start_time_seconds", "Start of the process, Unix time.");
  out->Add({}, process.start_time_seconds);
  out->Gauge("process_resident_memory_bytes",
             "Memory of the daemon in RAM; slabs of host memory are part of it.");
  out->Add({}, process.resident_bytes);
  out->Gauge(
      "kvpool_bookkeeping_resident_bytes",
      "Of the memory in RAM, what is no slab, library or file: tables of all spaces, sessions, buffers.");
  out->Add({}, process.anonymous_bytes);
  out->Gauge("kvpool_heap_bytes",
             "What the daemon's code has allocated and not freed. What is in RAM beyond it the allocator "
             "keeps for later.");
  out->Add({}, process.heap_bytes);
  out->Gauge("process_virtual_memory_bytes", "Addresses that the daemon has reserved.");
  out->Add({}, process.virtual_bytes);
  out->Gauge("process_open_fds", "Open file descriptors.");
  out->Add({}, process.open_fds);
  out->Gauge("process_max_fds", "Most file descriptors that may be open.");
  out->Add({}, process.max_fds);
  out->Gauge("process_threads", "Threads of the daemon.");
  out->Add({}, process.threads);
}

}  // namespace

std::vector<MetricFamily> CollectMetrics(const MetricSources& sources) {
  Families out;
  // The series of a space end with it. A closed space's counts under a label that lives on would be counted
  // twice by rate().
  const DaemonSnapshot daemon = sources.daemon();
  AddMemory(daemon, &out);
  AddRecovery(daemon, &out);
  AddChecks(daemon, &out);
  AddSessions(daemon, &out);
  AddVerbs(daemon, &out);
  AddReclaim(daemon, &out);
  AddDecisions(daemon, &out);
  AddTier(daemon, &out);
  AddDeviceOperations(daemon, &out);
  AddGuard(daemon, &out);
  AddTransport(sources.rpc(), sources.attach(), &out);
  if (const std::optional<bool> keeper_up = sources.keeper_up(); keeper_up.has_value()) {
    out.Gauge("kvpool_keeper_up",
              "1 while a keeper has all that another daemon would go on with; 0 once it is lost. A daemon "
              "without one has no such "
              "metric.");
    out.Add({}, *keeper_up ? 1 : 0);
  }
  out.Counter(
      "kvpool_metrics_connections_refused_total",
      "Connections to the metrics address that were closed without an answer, or not the whole of it, by "
      "reason.");
  for (const auto& [reason, count] : sources.scrapes_refused())
    out.Add({{"reason", reason}}, static_cast<double>(count));
  AddProcess(ReadProcessFacts(), &out);
  const LogDropped dropped = LogLinesDropped();
  out.Counter("kvpool_log_dropped_total", "Lines of the log that were dropped, as nobody read it.");
  out.Add({}, static_cast<double>(dropped.lines));
  out.Counter("kvpool_audit_dropped_total", "How many of them were audit lines.");
  out.Add({}, static_cast<double>(dropped.audit));
  out.Gauge("kvpool_build_info", "1; what this daemon is.");
  out.Add({{"version", sources.build.version}, {"cuda", sources.build.cuda}}, 1);
  out.Gauge("kvpool_start_time_seconds", "Start of the daemon, Unix time.");
  out.Add({}, sources.start_time_seconds);
  return out.Take();
}

}  // namespace kvpool
