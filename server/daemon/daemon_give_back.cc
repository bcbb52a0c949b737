// Memory that moves between spaces while engines are in them: who is asked for it, and who runs the steps.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/space/device_budget.h"
#include "server/space/space.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

// The housekeeper and openings run so many steps of one space before they look at others: 64 blocks move in one.
constexpr int kStepsTogether = 16;
constexpr auto kPause = std::chrono::milliseconds(1);
// A slab that goes to a space under pressure is asked for so long.
constexpr uint64_t kLevelMs = 1000;
// Blocks that are about to leave a space are to have been idle for so many times as long as those of another, and so much
// longer, before it gives memory to that one: else a slab would go back and forth between two that are alike.
constexpr uint64_t kMuchOlder = 2;
constexpr uint64_t kOlderMs = 1000;
// Spaces that an error names.
constexpr size_t kMostNamed = 4;

bool Share(const Space& a, const Space& b) {
  return std::any_of(a.facts.rank_devices.begin(), a.facts.rank_devices.end(), [&](size_t device) {
    return std::count(b.facts.rank_devices.begin(), b.facts.rank_devices.end(), device) > 0;
  });
}

// How long the block that would leave next was not used; 0: the space has none, or its policy does not say.
uint64_t OldestMs(Space* space) ABSL_EXCLUSIVE_LOCKS_REQUIRED(space->mu) {
  std::vector<BlockPool::Departing> next;
  space->state.pool.NextToLeave(1, &next);
  if (next.empty()) return 0;
  const absl::StatusOr<BlockView> view = space->state.pool.View(next.front().ref.id, space->NowMs());
  return view.ok() ? view->idle_ms : 0;
}

// A space that may give, and what is under way there.
struct Donor {
  std::shared_ptr<Space> space;
  uint32_t spare = 0;
  uint64_t slab_bytes = 0;
  uint64_t bytes = 0;  // What it has and is not giving.
};

}  // namespace

bool Daemon::GiveBack(Space* space) {
  {
    SpaceLock lock(*space);
    if (!space->state.give_back.under_way()) return false;
  }
  Settlement settlement(*space);
  if (!space->growth_mu.TryLock()) return false;  // Whoever has it makes or destroys a slab.
  auto next = GiveBack::Next::kGoOn;
  for (int i = 0; i < kStepsTogether && next == GiveBack::Next::kGoOn; ++i) {
    if (i > 0) space->GiveWay();
    next = space->GiveBackStep(&settlement);
  }
  space->growth_mu.Unlock();
  return next == GiveBack::Next::kGoOn;
}

bool Daemon::AskOthers(const std::shared_ptr<Space>& needy, uint64_t bytes, steady_clock::time_point deadline,
                       const std::atomic<bool>* given_up) {
  const SpaceFacts& facts = needy->facts;
  const uint64_t enough = std::min(bytes, facts.geometry.slab_bytes);
  while (true) {
    const uint64_t room = budget_->Room(facts.rank_devices, facts.tenant);
    if (room >= enough) return true;
    const bool at_share = budget_->RoomOfTenant(facts.rank_devices, facts.tenant) < enough;
    std::vector<Donor> donors;
    std::vector<std::shared_ptr<Space>> giving;
    uint64_t coming = room;
    for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
      if (!Share(*space, *needy) || (at_share && space->facts.tenant != facts.tenant)) continue;
      SpaceLock lock(*space);
      if (space->state.growth.closed()) continue;
      const class GiveBack& give_back = space->state.give_back;
      if (give_back.under_way()) giving.push_back(space);
      if (space == needy) continue;
      const uint64_t slab_bytes = space->facts.geometry.slab_bytes;
      const uint32_t pending = give_back.pending_slabs();
      coming += pending * slab_bytes;
      const uint32_t spare = give_back.spare_slabs();
      if (spare <= pending) continue;
      donors.push_back({.space = space,
                        .spare = spare - pending,
                        .slab_bytes = slab_bytes,
                        .bytes = space->slab_bytes() - std::min(space->slab_bytes(), pending * slab_bytes)});
    }
    // Whoever has most gives first.
    std::vector<std::pair<std::shared_ptr<Space>, uint32_t>> asked;
    while (coming < bytes && !donors.empty()) {
      Donor& most = *std::max_element(donors.begin(), donors.end(),
                                      [](const Donor& a, const Donor& b) { return a.bytes < b.bytes; });
      coming += most.slab_bytes;
      most.bytes -= std::min(most.bytes, most.slab_bytes);
      const auto it =
          std::find_if(asked.begin(), asked.end(), [&](const auto& a) { return a.first == most.space; });
      if (it == asked.end()) {
        asked.emplace_back(most.space, 1);
        giving.push_back(most.space);
      } else {
        ++it->second;
      }
      if (--most.spare == 0) donors.erase(donors.begin() + (&most - donors.data()));
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now());
    const uint64_t until_ms = clock_->NowMs() + static_cast<uint64_t>(std::max<int64_t>(0, left.count()));
    for (const auto& [space, slabs] : asked) {
      SpaceLock lock(*space);
      space->state.give_back.Ask(space->state.give_back.pending_slabs() + slabs, until_ms);
    }
    const bool late = left.count() <= 0 || (given_up != nullptr && *given_up);
    if (giving.empty() || late) return room >= facts.geometry.unit_bytes;
    bool more = false;
    for (const std::shared_ptr<Space>& space : giving) more |= GiveBack(space.get());
    if (!more) std::this_thread::sleep_for(kPause);
  }
}

std::string Daemon::WhoKeepsWhat(const Space& needy) {
  std::string why;
  size_t named = 0;
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    if (space.get() == &needy || !Share(*space, needy)) continue;
    SpaceLock lock(*space);
    const std::string obstacle = space->state.give_back.Obstacle();
    if (obstacle.empty() || named == kMostNamed) continue;
    ++named;
    absl::StrAppend(&why, "; space ", space->facts.id, " (tenant ", space->facts.tenant, ") has ",
                    space->slab_bytes(), " bytes on each rank: ", obstacle);
  }
  return why;
}

void Daemon::LevelAges(const std::shared_ptr<Space>& needy) {
  uint64_t own_ms = 0;
  {
    SpaceLock lock(*needy);
    own_ms = OldestMs(needy.get());
  }
  std::shared_ptr<Space> oldest;
  uint64_t most_ms = kMuchOlder * own_ms + kOlderMs;
  const bool at_share = budget_->RoomOfTenant(needy->facts.rank_devices, needy->facts.tenant) <
                        needy->facts.geometry.unit_bytes;
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    if (space == needy || !Share(*space, *needy)) continue;
    if (at_share && space->facts.tenant != needy->facts.tenant) continue;
    SpaceLock lock(*space);
    const class GiveBack& give_back = space->state.give_back;
    // One slab at a time, so that ages have time to change.
    if (space->state.growth.closed() || give_back.under_way()) continue;
    const uint64_t idle_ms = OldestMs(space.get());
    if (idle_ms < most_ms || give_back.spare_slabs() == 0) continue;
    most_ms = idle_ms;
    oldest = space;
  }
  if (oldest == nullptr) return;
  SpaceLock lock(*oldest);
  oldest->state.give_back.Ask(1, clock_->NowMs() + kLevelMs);
}

}  // namespace kvpool
