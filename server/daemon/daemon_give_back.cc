// Memory that moves between spaces while engines are in them: who is asked for it, and who runs the steps.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/space/device_budget.h"
#include "server/space/freed_memory.h"
#include "server/space/session.h"
#include "server/space/slab_holders.h"
#include "server/space/space.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

// The housekeeper and openings run so many steps of one space before they look at others: 64 blocks move in one.
constexpr int kStepsTogether = 16;
constexpr auto kWaitPause = std::chrono::milliseconds(1), kLongestPause = std::chrono::milliseconds(8);
// A slab that goes to a space under pressure, or is beyond a tenant's share, is asked for so long.
constexpr uint64_t kLevelMs = 1000;
// The last slab of a space is to be worth so many times less than one more to another before it gives memory to that one: else a
// slab would go back and forth between two that are alike, since either is known to some percent (pool/reuse_curve.h).
constexpr double kMuchLess = 1.3;
// A space gives so many slabs at a time of what no session uses, or of what is another's own.
constexpr uint32_t kSlabsTogether = 8;
// While a space has less than its own, those that have more leave so much of a device to it, or it would evict until they have
// given: as much as some requests need, and a small part of the device.
constexpr uint64_t kReserveSlabs = 16;
constexpr uint64_t kReserveShare = 32;
// Spaces that an error names, the last one where it has so many bytes: an error travels in a trailer of 8 KiB.
constexpr size_t kMostSpacesNamed = 4;
constexpr size_t kMostNamedBytes = 1500;
// So many openings that wait say so in such a time.
constexpr uint32_t kMostWaitLines = 5;
constexpr uint64_t kWaitLinesMs = 10'000;

bool IsOnAny(const Space& space, absl::Span<const size_t> devices) {
  return std::any_of(devices.begin(), devices.end(), [&](size_t device) {
    return std::count(space.facts.rank_devices.begin(), space.facts.rank_devices.end(), device) > 0;
  });
}

bool IsOnAll(const Space& space, absl::Span<const size_t> devices) {
  return std::all_of(devices.begin(), devices.end(), [&](size_t device) {
    return IsOnAny(space, {&device, 1});
  });
}

// Where a space lacks room for so many bytes on each rank, of the device or of its tenant's share of it.
std::vector<size_t> FullDevices(const Space& needy, const DeviceBudget& budget, uint64_t bytes) {
  std::vector<size_t> full;
  const std::vector<size_t>& all = needy.facts.rank_devices;
  for (const size_t device : all) {
    const std::vector<size_t> ranks(std::count(all.begin(), all.end(), device), device);
    if (budget.Room(ranks, needy.facts.tenant) < bytes) full.push_back(device);
  }
  return full;
}

// Its devices have room for it, and its tenant's share of them has none.
bool OnlyItsTenantIsFull(const Space& space, const DeviceBudget& budget) {
  const SpaceFacts& facts = space.facts;
  const uint64_t unit = facts.geometry.unit_bytes;
  const auto has_room = [&](size_t device) {
    const auto ranks =
        static_cast<uint64_t>(std::count(facts.rank_devices.begin(), facts.rank_devices.end(), device));
    return budget.capacity(device) - budget.used(device) >= unit * ranks;
  };
  return budget.RoomOfTenant(facts.rank_devices, facts.tenant) < unit &&
         std::all_of(facts.rank_devices.begin(), facts.rank_devices.end(), has_room);
}

// What each block of a slab saves, for each of its bytes and each millisecond.
struct Worth {
  std::string_view tenant;        // It lives as long as its space.
  double tokens = 0;              // Tokens that are not computed.
  std::optional<double> seconds;  // What they would take; none: engines have reported too little.

  // In seconds, if both are known so and of one tenant: they are what engines say.
  bool IsLess(const Worth& other, double times) const {
    if (tenant == other.tenant && seconds.has_value() && other.seconds.has_value())
      return times * *seconds < *other.seconds;
    return times * tokens < other.tokens;
  }
};

struct Worths {
  Worth last, next;  // The last slab that it has, and one more.
};

Worths WorthsOf(const Space& space) ABSL_EXCLUSIVE_LOCKS_REQUIRED(space.mu) {
  const BlockPool& pool = space.state.pool;
  const uint64_t tokens = space.facts.layout.groups(0).tokens_per_block();
  // It is as deep in a prompt as those that are asked for are on average.
  const PoolCounters& counters = pool.counters();
  const uint64_t before = counters.lookups == 0 ? 0 : counters.lookup_tokens / counters.lookups / 2;
  // Times of short prompts may not depend on how many tokens there are.
  const std::optional<double> seconds = space.state.below.prefill.Saved(tokens, before);
  const auto worth_of = [&](double hits) {
    const double chance = hits / static_cast<double>(space.facts.geometry.block_stride_bytes);
    Worth worth{.tenant = space.facts.tenant,
                .tokens = chance * static_cast<double>(tokens),
                .seconds = std::nullopt};
    if (seconds.value_or(0) > 0) worth.seconds = chance * *seconds;
    return worth;
  };
  const SpaceGeometry& geometry = space.facts.geometry;
  const auto step = static_cast<uint32_t>(std::max<uint64_t>(1, geometry.blocks_in(geometry.slab_bytes)));
  const ReuseCurve::Slopes slopes = pool.reuse(step, space.state.growth.max_blocks(), space.NowMs());
  return {.last = worth_of(slopes.last), .next = worth_of(slopes.next)};
}

// A space that may give, and what is under way there.
struct Donor {
  std::shared_ptr<Space> space;
  uint32_t spare = 0;
  uint64_t slab_bytes = 0;
  uint64_t bytes = 0;  // What it has and is not giving.
  double part = 1;     // Which part of a device is its own (WeightedShares::PartOf).
  v1::PriorityClass priority = v1::PRIORITY_CLASS_STANDARD;

  // Is it asked later? Lower classes come first, then whoever has most for its part.
  bool operator<(const Donor& other) const {
    if (priority != other.priority) return priority > other.priority;
    return static_cast<double>(bytes) * other.part < static_cast<double>(other.bytes) * part;
  }
};

// What a space can have, in bytes for each of its ranks: no more than on the device where it is least. What another gives on one
// device is of no use while a second one stays full.
class OnDevices {
 public:
  explicit OnDevices(const SpaceFacts& needy) {
    for (const size_t device : needy.rank_devices) ++devices_[device].ranks;
  }
  // What is there.
  void AddRoom(const SpaceFacts& needy, const DeviceBudget& budget) {
    for (auto& [device, on] : devices_) {
      on.bytes += budget.Room(std::vector<size_t>(on.ranks, device), needy.tenant);
    }
  }
  // What was given back, and is not seen to be free.
  void AddUnfreed(const FreedMemory& freed) {
    for (auto& [device, on] : devices_) on.bytes += freed.unfreed_bytes(device) / on.ranks;
  }
  // What a slab of another brings.
  void Add(const SpaceFacts& giver, uint64_t slab_bytes) {
    for (const size_t device : giver.rank_devices) {
      const auto on = devices_.find(device);
      if (on != devices_.end()) on->second.bytes += slab_bytes / on->second.ranks;
    }
  }
  size_t tightest() const { return Least()->first; }
  uint64_t bytes() const { return Least()->second.bytes; }

 private:
  struct On {
    uint64_t ranks = 0, bytes = 0;
  };
  std::map<size_t, On>::const_iterator Least() const {
    return std::min_element(devices_.begin(), devices_.end(),
                            [](const auto& a, const auto& b) { return a.second.bytes < b.second.bytes; });
  }
  std::map<size_t, On> devices_;
};

// What is whose own of devices that several spaces are on, by their weights. Each class divides what higher ones do not have of a
// device, as if lower ones had nothing. A tenant counts as the greatest of its spaces' weights there, so that more spaces do not
// bring it more, and its part is divided among them.
class WeightedShares {
 public:
  WeightedShares(const std::vector<std::shared_ptr<Space>>& spaces, const DeviceBudget& budget)
      : budget_(budget) {
    for (const std::shared_ptr<Space>& space : spaces) {
      const uint64_t weight = WeightOf(*space);
      const std::set<size_t> devices(space->facts.rank_devices.begin(), space->facts.rank_devices.end());
      for (const size_t device : devices) {
        OfDevice& of_device = devices_[{device, space->priority()}];
        OfTenant& of_tenant = of_device.tenants[space->facts.tenant];
        of_device.weights += weight - std::min(weight, of_tenant.greatest);
        of_tenant.greatest = std::max(weight, of_tenant.greatest);
        of_tenant.weights += weight;
        of_device.given = of_device.given || space->weight() > 0;
      }
      for (const size_t device : space->facts.rank_devices)
        devices_[{device, space->priority()}].bytes += space->slab_bytes();
    }
  }
  static uint64_t WeightOf(const Space& space) { return std::max(1u, space.weight()); }
  // Has some space of the class a weight there? Else nothing is anybody's own.
  bool given(absl::Span<const size_t> devices, v1::PriorityClass priority) const {
    return std::any_of(devices.begin(), devices.end(), [&](size_t device) {
      const auto found = devices_.find({device, priority});
      return found != devices_.end() && found->second.given;
    });
  }
  // Which part of what its class has of a device is the space's own: above 0, and 1 where nobody else of it is.
  double PartOf(const Space& space, size_t device) const {
    const auto on = devices_.find({device, space.priority()});
    if (on == devices_.end()) return 1;
    const auto of_tenant = on->second.tenants.find(space.facts.tenant);
    if (of_tenant == on->second.tenants.end()) return 1;
    return static_cast<double>(of_tenant->second.greatest) / static_cast<double>(on->second.weights) *
           static_cast<double>(WeightOf(space)) / static_cast<double>(of_tenant->second.weights);
  }
  // That of the device where it is least.
  double PartOf(const Space& space) const {
    double least = 1;
    for (const size_t device : space.facts.rank_devices) least = std::min(least, PartOf(space, device));
    return least;
  }
  // Are so many bytes, on each rank, within the space's own on all of these devices that it is on?
  bool Within(const Space& space, uint64_t bytes, absl::Span<const size_t> devices) const {
    const std::vector<size_t>& all = space.facts.rank_devices;
    return std::all_of(devices.begin(), devices.end(), [&](size_t device) {
      const auto ranks = static_cast<uint64_t>(std::count(all.begin(), all.end(), device));
      if (ranks == 0) return true;
      const double own = static_cast<double>(LeftBy(device, space.priority())) * PartOf(space, device);
      return static_cast<double>(bytes * ranks) <= own;
    });
  }

 private:
  struct OfTenant {
    uint64_t greatest = 0, weights = 0;
  };
  struct OfDevice {
    std::map<std::string, OfTenant> tenants;
    uint64_t weights = 0;  // The sum of the tenants' greatest ones.
    uint64_t bytes = 0;    // What its spaces have.
    bool given = false;
  };
  // What classes above this one do not have of a device.
  uint64_t LeftBy(size_t device, v1::PriorityClass priority) const {
    uint64_t left = budget_.capacity(device);
    for (auto on = devices_.upper_bound({device, priority});
         on != devices_.end() && on->first.first == device; ++on) {
      left -= std::min(left, on->second.bytes);
    }
    return left;
  }
  const DeviceBudget& budget_;
  std::map<std::pair<size_t, v1::PriorityClass>, OfDevice> devices_;  // Keys are device and class.
};

}  // namespace

bool Daemon::OthersAsk(const Space& space) {
  const std::vector<size_t>& all = space.facts.rank_devices;
  MutexLock lock(&waits_mu_);
  for (const auto& [device, asked_bytes] : asked_bytes_) {
    const auto ranks = static_cast<uint64_t>(std::count(all.begin(), all.end(), device));
    const uint64_t free_bytes = budget_->capacity(device) - budget_->used(device);
    if (ranks > 0 && free_bytes < asked_bytes + ranks * space.facts.geometry.slab_bytes) return true;
  }
  return false;
}

bool Daemon::GiveBack(Space* space) {
  {
    SpaceLock lock(*space);
    if (!space->state.give_back.under_way()) return false;
  }
  Settlement settlement(*space);
  if (!space->growth_mu.TryLock()) return false;  // Whoever has it makes or destroys a slab.
  const uint64_t bytes = space->slab_bytes();
  auto next = GiveBack::Next::kGoOn;
  for (int i = 0; i < kStepsTogether && next == GiveBack::Next::kGoOn; ++i) {
    if (i > 0) space->GiveWay();
    next = space->GiveBackStep(&settlement);
  }
  // Others may grow now, which they should learn before they evict.
  const bool gave = space->slab_bytes() < bytes;
  space->growth_mu.Unlock();
  SayWhoIsLate(space);
  return gave || next == GiveBack::Next::kGoOn;
}

void Daemon::SayWhoIsLate(Space* space) {
  GiveBack::LateOnes late;
  {
    SpaceLock lock(*space);
    late = space->state.give_back.TakeLate(clock_->NowMs());
  }
  if (late.named.empty()) return;
  std::string who = absl::StrJoin(late.named, "; ", [](std::string* out, const auto& one) {
    absl::StrAppend(out, "session ", one.session, " (", one.client_name, ", pid ", one.pid, ") ",
                    one.leased == 0 ? "has yet to unmap a slab"
                                    : absl::StrCat("has leased ", one.leased, " blocks there"));
  });
  if (late.more > 0) absl::StrAppend(&who, "; ", late.more, " more");
  LogInfo("memory was not given back in time",
          {{"space", space->facts.id}, {"tenant", space->facts.tenant}, {"late", who}});
}

bool Daemon::AskOthers(const std::shared_ptr<Space>& needy, uint64_t bytes, v1::PriorityClass most_class,
                       steady_clock::time_point deadline, const std::atomic<bool>* given_up,
                       absl::FunctionRef<void()> on_wait) {
  const SpaceFacts& facts = needy->facts;
  const uint64_t enough = std::min(bytes, facts.geometry.slab_bytes);
  // No other space takes what comes free meanwhile, nor does this one give.
  {
    MutexLock lock(&waits_mu_);
    for (const size_t device : facts.rank_devices) asked_bytes_[device] += enough;
  }
  {
    SpaceLock lock(*needy);
    ++needy->state.give_back.asking;
  }
  std::map<std::shared_ptr<Space>, uint64_t> asked;  // Each until then, by the daemon's clock.
  auto pause = kWaitPause;
  bool come = false, over = false;
  while (true) {
    freed_->Collect();
    come = budget_->Room(facts.rank_devices, facts.tenant) >= enough;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now());
    over = left.count() <= 0;
    if (come || over || stopping_.load(std::memory_order_relaxed) || (given_up != nullptr && *given_up)) {
      break;
    }
    const bool at_share = budget_->RoomOfTenant(facts.rank_devices, facts.tenant) < enough;
    const std::vector<size_t> full = FullDevices(*needy, *budget_, enough);
    std::vector<Donor> donors;
    std::vector<std::shared_ptr<Space>> giving;
    OnDevices coming(facts), possible(facts);
    bool mapping = false;
    const uint64_t now = clock_->NowMs();
    const std::vector<std::shared_ptr<Space>> spaces = registry_->Spaces();
    const WeightedShares shares(spaces, *budget_);
    for (const std::shared_ptr<Space>& space : spaces) {
      if (space == needy || !IsOnAny(*space, full) || (at_share && space->facts.tenant != facts.tenant))
        continue;
      const v1::PriorityClass priority = space->priority();
      SpaceLock lock(*space);
      const class GiveBack& give_back = space->state.give_back;
      if (space->state.growth.closed()) continue;
      if (give_back.under_way() || give_back.destroying > 0) giving.push_back(space);
      // It may give once its members have mapped a slab that is on its way to them.
      const std::vector<SlabRow>& rows = space->state.growth.slabs();
      mapping =
          mapping || (priority <= most_class && !rows.empty() && now < rows.back().made_ms + kPatienceMs &&
                      !space->state.sessions.Keepers().empty());
      const uint64_t slab_bytes = space->facts.geometry.slab_bytes;
      const uint32_t spare = priority > most_class ? 0 : give_back.spare_slabs(),
                     leaving = (space->state.growth.leaving().has_value() ? 1 : 0) + give_back.destroying;
      // What it was asked for and has found a use for since does not come.
      const uint32_t leaves = space->state.growth.leaving().has_value() ? 1 : 0;
      const uint32_t to_go = std::min(give_back.pending_slabs() - leaves, spare), pending = leaving + to_go;
      possible.Add(space->facts, (leaving + spare) * slab_bytes);
      // What a held block keeps does not come, as far as one can tell.
      if (give_back.stuck(now)) continue;
      coming.Add(space->facts, pending * slab_bytes);
      if (spare <= to_go) continue;
      donors.push_back({.space = space,
                        .spare = spare - to_go,
                        .slab_bytes = slab_bytes,
                        .bytes = space->slab_bytes() - std::min(space->slab_bytes(), pending * slab_bytes),
                        .part = shares.PartOf(*space),
                        .priority = priority});
    }
    const bool unfreed = std::any_of(full.begin(), full.end(),
                                     [this](size_t device) { return freed_->unfreed_bytes(device) > 0; });
    // It is asked for behind those that give: what one of them gave meanwhile would be in neither else.
    const uint64_t room_now = budget_->Room(facts.rank_devices, facts.tenant);
    coming.AddRoom(facts, *budget_);
    possible.AddRoom(facts, *budget_);
    possible.AddUnfreed(*freed_);
    // Nobody's cache is drained for a guarantee that can't be met.
    if (possible.bytes() < bytes && !mapping) break;
    // Of the lowest class whoever has most for its weight gives first, where it is needed most.
    std::map<std::shared_ptr<Space>, uint32_t> slabs;
    while (coming.bytes() < bytes && !donors.empty()) {
      const size_t needed = coming.tightest();
      const auto elsewhere = std::partition(donors.begin(), donors.end(), [&](const Donor& donor) {
        return IsOnAny(*donor.space, {&needed, 1});
      });
      if (elsewhere == donors.begin()) break;
      const auto most = std::max_element(donors.begin(), elsewhere);
      coming.Add(most->space->facts, most->slab_bytes);
      most->bytes -= std::min(most->bytes, most->slab_bytes);
      ++slabs[most->space];
      if (--most->spare == 0) donors.erase(most);
    }
    for (const auto& [space, more] : slabs) {
      const uint64_t until_ms = now + static_cast<uint64_t>(left.count());
      uint64_t& latest = asked[space];
      latest = std::max(latest, until_ms);
      SpaceLock lock(*space);
      if (space->state.growth.closed()) continue;
      if (!space->state.give_back.under_way() && space->state.give_back.destroying == 0)
        giving.push_back(space);
      space->state.give_back.Ask(space->state.give_back.pending_slabs() + more, until_ms);
    }
    if (giving.empty() && !unfreed && !mapping) {
      if (room_now >= enough) continue;
      break;
    }
    bool more = false;
    for (const std::shared_ptr<Space>& space : giving) more |= GiveBack(space.get());
    if (more) {
      pause = kWaitPause;
      continue;
    }
    on_wait();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  for (const auto& [space, until_ms] : asked) {
    {
      SpaceLock lock(*space);
      space->state.give_back.Withdraw(/*in_vain=*/!come && over, until_ms);
    }
    SayWhoIsLate(space.get());
  }
  {
    SpaceLock lock(*needy);
    --needy->state.give_back.asking;
  }
  {
    MutexLock lock(&waits_mu_);
    for (const size_t device : facts.rank_devices) {
      if ((asked_bytes_[device] -= enough) == 0) asked_bytes_.erase(device);
    }
  }
  return come || budget_->Room(facts.rank_devices, facts.tenant) >= facts.geometry.unit_bytes;
}

absl::Status Daemon::SetShare(const v1::SetShareRequest& request, v1::SetShareResponse* response) {
  const std::shared_ptr<Space> space = registry_->FindSpace(request.space());
  if (space == nullptr) return absl::NotFoundError(absl::StrCat("space ", request.space(), " is not open"));
  if (request.weight() > kMostWeight) {
    return absl::InvalidArgumentError(
        absl::StrCat("weight is ", request.weight(), "; must be 0 to ", kMostWeight));
  }
  if (!v1::PriorityClass_IsValid(request.priority_class())) {
    return absl::InvalidArgumentError(
        absl::StrCat("priority_class is ", static_cast<int>(request.priority_class()), "; must be 0 to ",
                     static_cast<int>(v1::PriorityClass_MAX)));
  }
  SpaceLock lock(*space);
  class GiveBack& give_back = space->state.give_back;
  const GiveBack::Terms before = give_back.of_operator;
  const uint32_t share = request.keep_guaranteed() ? give_back.share_blocks : request.guaranteed_blocks();
  if (request.has_limit_blocks()) give_back.of_operator.limit_blocks = request.limit_blocks();
  if (request.has_weight()) give_back.of_operator.weight = request.weight();
  if (request.has_priority_class()) give_back.of_operator.priority = request.priority_class();
  space->ApplyTerms();
  const uint32_t most = space->state.growth.max_blocks() - 1;
  if (share > most) {
    const uint32_t limit = give_back.limit_blocks();
    give_back.of_operator = before;
    space->ApplyTerms();
    return absl::InvalidArgumentError(
        absl::StrCat("guaranteed_blocks is ", share, "; space ", request.space(), " can have at most ", most,
                     limit == 0 ? "" : absl::StrCat(" with the limit ", limit)));
  }
  response->set_previous_blocks(std::exchange(give_back.share_blocks, share));
  space->KeepShares();
  response->set_guaranteed_blocks(share);
  response->set_capacity_blocks(space->state.pool.capacity());
  response->set_limit_blocks(most);
  response->set_weight(static_cast<uint32_t>(WeightedShares::WeightOf(*space)));
  response->set_priority_class(space->priority());
  return absl::OkStatus();
}

std::string Daemon::WhoKeepsWhat(const Space& needy) {
  std::vector<std::shared_ptr<Space>> spaces = registry_->Spaces();
  std::erase_if(spaces, [&](const std::shared_ptr<Space>& space) {
    return space.get() == &needy || space->slab_bytes() == 0 || !IsOnAny(*space, needy.facts.rank_devices);
  });
  // Who has most is the first to be asked for it.
  std::stable_sort(spaces.begin(), spaces.end(),
                   [](const auto& a, const auto& b) { return a->slab_bytes() > b->slab_bytes(); });
  std::string why;
  uint64_t others = 0, bytes_of_others = 0;
  for (size_t i = 0; i < spaces.size(); ++i) {
    Space& space = *spaces[i];
    if (i >= kMostSpacesNamed || why.size() >= kMostNamedBytes) {
      ++others;
      bytes_of_others += space.slab_bytes();
      continue;
    }
    SlabHolders holders;
    bool more = true;
    while (true) {
      {
        SpaceLock lock(space);
        more = space.state.give_back.LookAtHolders(&holders);
      }
      if (!more) break;
      space.GiveWay();
    }
    SpaceLock lock(space);
    std::string obstacle = space.state.give_back.Obstacle(holders);
    if (space.priority() > needy.priority()) {
      absl::StrAppend(&obstacle, obstacle.empty() ? "" : "; ", "it is of class ",
                      PriorityClassName(space.priority()), ", above ", PriorityClassName(needy.priority()),
                      ": it gives to a guarantee alone");
    }
    absl::StrAppend(&why, "; space ", space.facts.id, " (tenant ", space.facts.tenant, ") has ",
                    space.slab_bytes(), " bytes on each rank", obstacle.empty() ? "" : ": ", obstacle);
  }
  if (others > 0) {
    absl::StrAppend(&why, "; ", others, " more spaces have ", bytes_of_others,
                    " bytes on each rank together");
  }
  return why;
}

void Daemon::SayThatItWaits(const Session& session, uint64_t missing_bytes) {
  uint64_t left_out = 0;
  {
    MutexLock lock(&waits_mu_);
    const uint64_t now = clock_->NowMs();
    if (now >= wait_lines_until_ms_) {
      wait_lines_until_ms_ = now + kWaitLinesMs;
      wait_lines_ = 0;
    }
    if (wait_lines_ == kMostWaitLines) {
      ++wait_lines_left_out_;
      return;
    }
    ++wait_lines_;
    left_out = std::exchange(wait_lines_left_out_, 0);
  }
  const Space& space = *session.space;
  // It begins with what divides it from the text in front of it.
  const std::string who = WhoKeepsWhat(space);
  LogInfo("opening waits for memory",
          {{"session", session.terms.id},
           {"space", space.facts.id},
           {"tenant", space.facts.tenant},
           {"client", session.terms.client_name},
           {"guaranteed_blocks", session.terms.guaranteed_blocks},
           {"missing_bytes", missing_bytes},
           {"left_out", left_out},
           {"others", std::string_view(who).substr(std::min<size_t>(2, who.size()))}});
}

std::vector<Daemon::Standing> Daemon::Standings(const std::vector<std::shared_ptr<Space>>& spaces) const {
  std::vector<Standing> standings(spaces.size());
  bool weighted = false, classes = false;
  for (const std::shared_ptr<Space>& space : spaces) {
    weighted = weighted || space->weight() > 0;
    classes = classes || space->priority() != spaces.front()->priority();
  }
  std::vector<bool> spares(spaces.size()), has_all(spaces.size());
  for (size_t i = 0; (classes || weighted) && i < spaces.size(); ++i) {
    SpaceLock lock(*spaces[i]);
    spares[i] = !spaces[i]->state.growth.closed() && spaces[i]->state.give_back.spare_slabs() > 0;
    has_all[i] = spaces[i]->state.growth.complete();
  }
  for (size_t i = 0; classes && i < spaces.size(); ++i) {
    const SpaceFacts& facts = spaces[i]->facts;
    const bool at_share = budget_->RoomOfTenant(facts.rank_devices, facts.tenant) < facts.geometry.unit_bytes;
    const std::vector<size_t> full = FullDevices(*spaces[i], *budget_, facts.geometry.unit_bytes);
    const std::vector<size_t>& lacking = full.empty() ? facts.rank_devices : full;
    for (size_t j = 0; j < spaces.size() && !standings[i].elsewhere; ++j) {
      standings[i].elsewhere = spares[j] && spaces[j]->priority() < spaces[i]->priority() &&
                               (!at_share || spaces[j]->facts.tenant == facts.tenant) &&
                               IsOnAll(*spaces[j], lacking);
    }
  }
  if (!weighted) return standings;
  const WeightedShares shares(spaces, *budget_);
  std::map<size_t, v1::PriorityClass> of_those_below;  // The highest class of one that is on the device.
  for (size_t i = 0; i < spaces.size(); ++i) {
    const Space& space = *spaces[i];
    const std::vector<size_t>& devices = space.facts.rank_devices;
    const v1::PriorityClass priority = space.priority();
    standings[i].weighted = shares.given(devices, priority);
    // One that has all it may have, by its limit or its largest size, has no use for more.
    standings[i].below = standings[i].weighted && !has_all[i] &&
                         shares.Within(space, space.slab_bytes() + space.facts.geometry.slab_bytes, devices);
    if (!standings[i].below) continue;
    standings[i].elsewhere = true;
    // What is left for a tenant at its share it can't use.
    if (OnlyItsTenantIsFull(space, *budget_)) continue;
    for (const size_t device : devices) of_those_below[device] = std::max(of_those_below[device], priority);
  }
  for (size_t i = 0; i < spaces.size(); ++i) {
    const v1::PriorityClass priority = spaces[i]->priority();
    uint64_t least = UINT64_MAX;
    bool reserved = false;
    for (const size_t device : spaces[i]->facts.rank_devices) {
      least = std::min(least, budget_->capacity(device));
      const auto below = of_those_below.find(device);
      if (below == of_those_below.end()) continue;
      const bool to_higher = below->second > priority;
      const bool to_equal = below->second == priority && standings[i].weighted;
      reserved = reserved || to_higher || to_equal;
      standings[i].leaves = standings[i].leaves || to_higher || (to_equal && !standings[i].below);
    }
    if (!reserved) continue;
    standings[i].reserve_bytes =
        std::min(least / kReserveShare, kReserveSlabs * spaces[i]->facts.geometry.slab_bytes);
  }
  return standings;
}

void Daemon::KeepWithinShares(const std::vector<std::shared_ptr<Space>>& spaces) {
  struct OfTenant {
    std::shared_ptr<Space> most;
    uint64_t above = 0;  // Bytes of each of its ranks.
    bool gives = false;  // One at a time: what it gives may do.
  };
  std::map<std::string_view, OfTenant> tenants;
  const uint64_t now = clock_->NowMs();
  for (const std::shared_ptr<Space>& space : spaces) {
    const SpaceFacts& facts = space->facts;
    const uint64_t above = budget_->Above(facts.rank_devices, facts.tenant);
    if (above == 0) continue;
    OfTenant& of_tenant = tenants[facts.tenant];
    SpaceLock lock(*space);
    const class GiveBack& give_back = space->state.give_back;
    if (space->state.growth.closed() || give_back.stuck(now)) continue;
    of_tenant.gives = of_tenant.gives || give_back.under_way() || give_back.destroying > 0;
    if (give_back.spare_slabs() == 0) continue;
    if (of_tenant.most != nullptr && of_tenant.most->slab_bytes() >= space->slab_bytes()) continue;
    of_tenant.most = space;
    of_tenant.above = above;
  }
  for (auto& [tenant, of_tenant] : tenants) {
    if (of_tenant.most == nullptr || of_tenant.gives) continue;
    const SpaceFacts& facts = of_tenant.most->facts;
    const bool unfreed = std::any_of(facts.rank_devices.begin(), facts.rank_devices.end(),
                                     [this](size_t device) { return freed_->unfreed_bytes(device) > 0; });
    if (unfreed) continue;
    const uint64_t slab = facts.geometry.slab_bytes, slabs = (of_tenant.above + slab - 1) / slab;
    SpaceLock lock(*of_tenant.most);
    class GiveBack& give_back = of_tenant.most->state.give_back;
    const uint32_t spare = give_back.spare_slabs();
    if (spare > 0) give_back.Ask(static_cast<uint32_t>(std::min<uint64_t>(slabs, spare)), now + kLevelMs);
  }
}

bool Daemon::LevelWorths(const std::shared_ptr<Space>& needy, uint64_t bytes) {
  Worth own;
  {
    SpaceLock lock(*needy);
    own = WorthsOf(*needy).next;
  }
  const SpaceFacts& facts = needy->facts;
  // What others gave beyond its tenant's share would be of no use to it.
  const bool at_share = budget_->RoomOfTenant(facts.rank_devices, facts.tenant) < bytes;
  const std::vector<size_t> full = FullDevices(*needy, *budget_, bytes);
  if (full.empty()) return false;
  const std::vector<std::shared_ptr<Space>> spaces = registry_->Spaces();
  const WeightedShares shares(spaces, *budget_);
  const v1::PriorityClass priority = needy->priority();
  const bool weighted = shares.given(full, priority);
  const bool is_below =
      weighted && shares.Within(*needy, needy->slab_bytes() + facts.geometry.slab_bytes, full);
  const bool for_reserve = bytes > facts.geometry.unit_bytes;
  std::shared_ptr<Space> giver;
  bool unused = false;
  Worth least;                 // What the last slab of that one is worth.
  std::optional<Donor> above;  // The one that has most for its weight, of those beyond their shares.
  std::optional<Donor> lower;  // The same of the lowest class there is below its own, whatever is whose.
  for (const std::shared_ptr<Space>& space : spaces) {
    // One that leaves a device full brings nothing, and would take its slab back.
    if (space == needy || !IsOnAll(*space, full) || (at_share && space->facts.tenant != facts.tenant))
      continue;
    const v1::PriorityClass of_space = space->priority();
    if (of_space > priority) continue;
    SpaceLock lock(*space);
    const class GiveBack& give_back = space->state.give_back;
    // One at a time, so that worths have time to change.
    if (space->state.growth.closed() || give_back.under_way() || give_back.spare_slabs() == 0) continue;
    if (of_space < priority) {
      const Donor donor{
          .space = space, .bytes = space->slab_bytes(), .part = shares.PartOf(*space), .priority = of_space};
      if (!lower.has_value() || *lower < donor) lower = donor;
      continue;
    }
    // What no session uses goes first, whatever its age: a process that is alive keeps such a space from being closed.
    const bool without_sessions = space->state.sessions.empty();
    if (weighted && !without_sessions) {
      // What is its own, and is used, it keeps, however long some of it was idle.
      const bool is_above = !shares.Within(*space, space->slab_bytes(), full);
      if (!is_above && (for_reserve || !space->state.growth.has_unused_slab())) continue;
      const Donor donor{
          .space = space, .bytes = space->slab_bytes(), .part = shares.PartOf(*space), .priority = of_space};
      if (is_below && is_above && (!above.has_value() || *above < donor)) above = donor;
    }
    if (for_reserve && !without_sessions) continue;
    const Worth worth = WorthsOf(*space).last;
    if (!without_sessions && (unused || !worth.IsLess(own, kMuchLess))) continue;
    if (giver != nullptr && without_sessions == unused && !worth.IsLess(least, 1)) continue;
    unused = without_sessions;
    least = worth;
    giver = space;
  }
  uint32_t most_slabs = unused && !lower.has_value() ? kSlabsTogether : 1;
  if (lower.has_value()) {
    giver = lower->space;
  } else if (above.has_value() && !unused) {
    giver = above->space;
    // Until it has them the needy one evicts what it would keep if it had its own, so they come together.
    const uint64_t given = giver->facts.geometry.slab_bytes, taken = facts.geometry.slab_bytes;
    const uint64_t lacking = bytes - std::min(bytes, budget_->Room(facts.rank_devices, facts.tenant));
    const uint64_t most = for_reserve ? std::min<uint64_t>(kSlabsTogether, lacking / given) : kSlabsTogether;
    while (most_slabs < most && (most_slabs + 1) * given <= giver->slab_bytes() &&
           !shares.Within(*giver, giver->slab_bytes() - most_slabs * given, full) &&
           shares.Within(*needy, needy->slab_bytes() + most_slabs * given + taken, full)) {
      ++most_slabs;
    }
  }
  if (giver == nullptr) return false;
  SpaceLock lock(*giver);
  const uint32_t slabs = std::min(giver->state.give_back.spare_slabs(), most_slabs);
  if (slabs > 0) giver->state.give_back.Ask(slabs, clock_->NowMs() + kLevelMs);
  return slabs > 0;
}

}  // namespace kvpool
