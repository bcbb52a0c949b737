#include "tests/service/goodput.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/daemon/daemon.h"
#include "tests/service/service_fixture.h"
#include "tests/support/access.h"
#include "tests/support/fake_clock.h"
#include "tests/support/memory_device.h"

namespace kvpool::goodput {
namespace {

constexpr uint64_t kHousekeepMs = 100;  // The housekeeper's own pace.
constexpr int kRoundsTogether = 4;

// One engine and its queue.
class Server {
 public:
  Server(Daemon* daemon, const Arrivals* requests, const ServeOptions* options, std::string model)
      : daemon_(*daemon),
        requests_(*requests),
        options_(*options),
        engine_(daemon, model, PeerCredentials{NextPid(), 1000, 1000}, /*gives_back=*/true) {
    v1::OpenSession open;
    v1::Layout* const layout = open.mutable_layout();
    layout->set_encoding(v1::ENCODING_OPAQUE);
    layout->set_block_bytes(kBlockBytes);
    v1::LayerGroup* const group = layout->add_groups();
    group->set_name("full");
    group->add_layers(0);
    group->set_tokens_per_block(replay::kTokensPerBlock);
    open.mutable_fingerprint()->set_digest(model);
    open.set_guaranteed_blocks(options_.guaranteed_blocks);
    engine_.peer->on_slab = [this](const v1::Slab&, UniqueFd) { slabs_came_ = true; };
    const absl::Status opened = engine_.Open(open);
    KVPOOL_CHECK(opened.ok(), "%s", opened.ToString().c_str());
  }

  // False: there were none to map.
  bool MapSlabs() { return std::exchange(slabs_came_, false) && engine_.MapSlabs(); }
  bool done() const { return next_ == requests_.size(); }
  bool waits_for_memory() const { return state_ == State::kLacksBlocks; }
  // When it has something to do by itself; UINT64_MAX: it is done, or waits for blocks.
  uint64_t due_ms() const {
    if (done() || state_ == State::kLacksBlocks) return UINT64_MAX;
    return state_ == State::kComputes ? ready_ms_ : requests_[next_].timestamp_ms;
  }
  // REQUIRES: due_ms() <= now_ms, or it waits for memory.
  void GoOn(uint64_t now_ms) {
    switch (state_) {
      case State::kIdle:
        Begin(now_ms);
        break;
      case State::kLacksBlocks:
        LeaseRest(now_ms);
        break;
      case State::kComputes:
        End(now_ms);
        break;
    }
  }
  const Outcome& outcome() const { return outcome_; }
  uint64_t space() const { return engine_.opened.space(); }

 private:
  enum class State { kIdle, kLacksBlocks, kComputes };

  static int64_t NextPid() {
    static int64_t next = 100;
    return next++;
  }
  const replay::Request& request() const { return requests_[next_]; }

  void Begin(uint64_t now_ms) {
    began_ms_ = now_ms;
    keys_.clear();
    for (const uint64_t id : request().hash_ids) keys_.push_back(Key(absl::StrCat(id)));
    const v1::MatchResult match = engine_.Match(keys_);
    shared_.assign(match.groups(0).blocks().begin(), match.groups(0).blocks().end());
    own_.clear();
    LeaseRest(now_ms);
  }

  void LeaseRest(uint64_t now_ms) {
    const size_t missing = keys_.size() - shared_.size();
    // A lease that comes short wakes the housekeeper.
    for (bool more = true; more && own_.size() < missing;) {
      const v1::LeaseResult lease = engine_.LeaseAsked(static_cast<uint32_t>(missing - own_.size()), 0);
      own_.insert(own_.end(), lease.blocks().begin(), lease.blocks().end());
      if (own_.size() == missing) break;
      // Each of these wakes it for the next: what others are asked for, what they gave, the slab that is made of it.
      for (int i = 0; i < kRoundsTogether && !slabs_came_; ++i) daemon_.HousekeepOnce();
      more = MapSlabs() || lease.blocks_size() > 0;
    }
    if (own_.size() < missing) {
      state_ = State::kLacksBlocks;
      return;
    }
    const uint64_t hits = replay::TokensInBlocks(request(), shared_.size());
    const double us = options_.cost.us(hits, request().input_tokens - hits);
    ready_ms_ = now_ms + static_cast<uint64_t>(std::ceil(us / 1000));
    state_ = State::kComputes;
    outcome_.waited_for_memory_ms += now_ms - began_ms_;
    ++outcome_.requests;
    outcome_.tokens += request().input_tokens;
    outcome_.hit_tokens += hits;
    outcome_.compute_us += us;
    outcome_.saved_us += options_.cost.us(0, request().input_tokens) - us;
  }

  void End(uint64_t now_ms) {
    if (!own_.empty()) {
      const size_t hits = shared_.size();
      const v1::SealResult sealed =
          engine_.Seal(own_, {keys_.begin() + static_cast<ptrdiff_t>(hits), keys_.end()},
                       hits == 0 ? "" : keys_[hits - 1]);
      KVPOOL_CHECK(sealed.refused().empty(), "%s", sealed.ShortDebugString().c_str());
    }
    shared_.insert(shared_.end(), own_.begin(), own_.end());
    engine_.Release(shared_);
    if (now_ms - request().timestamp_ms <= options_.ttft_ms) ++outcome_.in_time;
    ++next_;
    state_ = State::kIdle;
  }

  Daemon& daemon_;
  const Arrivals& requests_;
  const ServeOptions& options_;
  Engine engine_;
  bool slabs_came_ = false;
  size_t next_ = 0;
  State state_ = State::kIdle;
  uint64_t began_ms_ = 0, ready_ms_ = 0;
  std::vector<std::string> keys_;
  std::vector<uint64_t> shared_, own_;  // Blocks of the request.
  Outcome outcome_;
};

}  // namespace

Outcome& Outcome::operator+=(const Outcome& other) {
  requests += other.requests;
  in_time += other.in_time;
  tokens += other.tokens;
  hit_tokens += other.hit_tokens;
  compute_us += other.compute_us;
  saved_us += other.saved_us;
  waited_for_memory_ms += other.waited_for_memory_ms;
  slabs_given += other.slabs_given;
  return *this;
}

std::vector<Arrivals> SplitInBursts(const Arrivals& requests, const BurstOptions& options) {
  std::mt19937_64 dice(options.seed);
  std::vector<Arrivals> models(2);
  std::unordered_map<uint64_t, size_t> model_of;  // The key is a conversation.
  size_t bursting = dice() % 2;
  uint64_t burst_end_ms = options.burst_ms / 2 + dice() % options.burst_ms;
  for (const replay::Request& request : requests) {
    while (request.timestamp_ms >= burst_end_ms) {
      bursting = 1 - bursting;
      burst_end_ms += options.burst_ms / 2 + dice() % options.burst_ms;
    }
    // The first block is the system prompt, the same for all.
    const size_t block = std::min<size_t>(1, request.hash_ids.size() - 1);
    const auto [found, begins] = model_of.try_emplace(request.hash_ids[block], bursting);
    if (begins && dice() % options.one_in == 0) found->second = 1 - bursting;
    models[found->second].push_back(request);
  }
  return models;
}

std::vector<Outcome> Serve(const std::vector<Arrivals>& models, const ServeOptions& options) {
  FakeClock clock;
  MemoryDevice::Script script;
  DaemonOptions daemon_options;
  daemon_options.access = MakeAccess();
  daemon_options.housekeeping_thread = false;
  daemon_options.policy = options.policy;
  daemon_options.slab_bytes = kSlabBlocks * kBlockBytes;
  daemon_options.device_capacity_bytes = {options.slabs * daemon_options.slab_bytes};
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("mem", kGranuleBytes, &script));
  const absl::StatusOr<std::unique_ptr<Daemon>> started =
      Daemon::Start(daemon_options, std::move(devices), &clock);
  KVPOOL_CHECK(started.ok(), "%s", started.status().ToString().c_str());
  Daemon& daemon = **started;

  std::vector<std::unique_ptr<Server>> servers;
  for (const Arrivals& requests : models) {
    servers.push_back(
        std::make_unique<Server>(&daemon, &requests, &options, absl::StrCat("model ", servers.size())));
    servers.back()->MapSlabs();
    if (options.weight == 0) continue;
    v1::SetShareRequest share;
    share.set_space(servers.back()->space());
    share.set_keep_guaranteed(true);
    share.set_weight(options.weight);
    v1::SetShareResponse response;
    const absl::Status status = daemon.SetShare(share, &response);
    KVPOOL_CHECK(status.ok(), "%s", status.ToString().c_str());
  }
  for (uint64_t now_ms = 0, round_ms = 0;;) {
    uint64_t next_ms = round_ms;
    bool all_done = true;
    for (const auto& server : servers) {
      next_ms = std::min(next_ms, server->due_ms());
      all_done = all_done && server->done();
    }
    if (all_done) break;
    next_ms = std::max(next_ms, now_ms);
    clock.Advance(next_ms - now_ms);
    now_ms = next_ms;
    const bool round = now_ms >= round_ms;
    if (round) {
      daemon.HousekeepOnce();
      for (const auto& server : servers) server->MapSlabs();
      round_ms += kHousekeepMs;
    }
    for (const auto& server : servers) {
      if (server->due_ms() <= now_ms || (round && server->waits_for_memory())) server->GoOn(now_ms);
    }
  }
  std::vector<Outcome> outcomes;
  const DaemonSnapshot snapshot = daemon.Snapshot();
  for (size_t i = 0; i < servers.size(); ++i) {
    outcomes.push_back(servers[i]->outcome());
    outcomes.back().slabs_given = snapshot.spaces.at(i).give_back.slabs;
  }
  return outcomes;
}

std::vector<Outcome> ServeByHalves(const std::vector<Arrivals>& models, const ServeOptions& options) {
  ServeOptions half = options;
  half.slabs /= 2;
  std::vector<Outcome> outcomes;
  for (const Arrivals& requests : models) outcomes.push_back(Serve({requests}, half).front());
  return outcomes;
}

Outcome Sum(const std::vector<Outcome>& outcomes) {
  Outcome sum;
  for (const Outcome& outcome : outcomes) sum += outcome;
  return sum;
}

}  // namespace kvpool::goodput
