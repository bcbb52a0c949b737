// GetPolicies and SetPolicy: which replacement policy a space has, and the change to another while
// verbs go on.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/or_exhausted.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/pool/hand_over.h"
#include "server/replacement/parts/weights.h"
#include "server/replacement/policy.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

void Fill(const SpaceState& state, v1::SpacePolicy* info) {
  info->set_space(state.facts.id);
  info->set_tenant(state.facts.tenant);
  info->set_policy(std::string(state.pool.policy().name()));
  const auto& counts = state.pool.counts();
  info->set_blocks(uint64_t{counts[static_cast<size_t>(BlockState::kSealed)]} +
                   counts[static_cast<size_t>(BlockState::kCached)]);
}

// So many blocks are copied in one hold of a space's mutex, and so many events caught up with in the last
// one: each takes under half a millisecond.
constexpr uint32_t kCopySlice = 4096, kEventSlice = 512;
// A daemon that is to end waits until the memory of so many blocks is there: some milliseconds.
constexpr uint32_t kReadySlice = 1u << 18;
// So many events of verbs are kept at the first attempt, which are 64 MiB, and twice as many at each further one.
constexpr uint32_t kKeptEvents = 1u << 21;
constexpr int kAttempts = 3;

std::string TablesOf(const std::string& policy, uint32_t max_blocks) {
  return absl::StrCat("tables of policy ", policy, " for a space of ", max_blocks,
                      " blocks, which max_space_bytes bounds");
}

// Lets the successor take over while verbs go on, and answers the old policy. Null: verbs did more meanwhile
// than the hand-over keeps, or it was stopped, and the old policy is still in place.
std::unique_ptr<ReplacementPolicy> Switch(Space* space, BlockPool::HandOver* under_way, const Clock& clock,
                                          const std::atomic<bool>& stop) {
  BlockPool::HandOver& hand_over = *under_way;
  for (bool copied = false; !copied;) {
    space->GiveWay();
    SpaceLock lock(*space);
    copied = hand_over.Copy(&space->state.pool, clock.NowMs(), kCopySlice);
    if (stop) return hand_over.GiveUp(&space->state.pool), nullptr;
  }
  const bool built = hand_over.Build(&stop);
  while (true) {
    space->GiveWay();
    {
      SpaceLock lock(*space);
      if (!built || hand_over.overrun()) return hand_over.GiveUp(&space->state.pool), nullptr;
      auto old = space->state.FinishHandOver(&hand_over, kEventSlice);
      if (old != nullptr) return old;
    }
    hand_over.CatchUp();
  }
}

}  // namespace

absl::Status Daemon::ChangePolicy(Space* space, const std::string& name) {
  const uint64_t began = clock_->NowMs();
  std::string previous;
  bool stand_in = false;
  uint32_t blocks = 0;
  {
    SpaceLock lock(*space);
    blocks = space->state.pool.end_block() - 1;
    previous = std::string(space->state.pool.policy().name());
    stand_in = space->state.pool.has_stand_in();
  }
  if (previous == name && !stand_in) return absl::OkStatus();
  // Policies are made and destroyed outside the mutex, where nobody waits.
  std::unique_ptr<ReplacementPolicy> old;
  uint32_t events = kKeptEvents;
  for (int attempt = 0; old == nullptr && attempt < kAttempts; ++attempt, events *= 2) {
    ASSIGN_OR_RETURN(std::unique_ptr<ReplacementPolicy> policy, MakePolicy(name, space->facts));
    const uint32_t max_blocks = space->facts.geometry.max_blocks;
    ASSIGN_OR_RETURN(std::unique_ptr<BlockPool::HandOver> hand_over,
                     OrExhausted(TablesOf(name, max_blocks), [&] {
                       return std::make_unique<BlockPool::HandOver>(
                           BlockPool::HandOver::Options{.max_blocks = max_blocks, .most_events = events},
                           std::move(policy));
                     }));
    for (uint32_t ready = 0; ready < blocks && !stopping_; ready += std::min(kReadySlice, blocks - ready))
      hand_over->Expect(ready + std::min(kReadySlice, blocks - ready));
    old = Switch(space, hand_over.get(), *clock_, stopping_);
    if (old == nullptr && stopping_)
      return absl::UnavailableError(
          absl::StrCat("space ", space->facts.id, " keeps ", previous, ": the daemon is ending"));
  }
  if (old == nullptr) {
    return absl::UnavailableError(absl::StrCat("space ", space->facts.id, " keeps ", previous,
                                               ": in each of ", kAttempts,
                                               " attempts verbs caused more events than are kept, ",
                                               events / 2, " at the last; try again under less load"));
  }
  v1::SpacePolicy info;
  {
    SpaceLock lock(*space);
    Fill(space->state, &info);
  }
  LogInfo("replacement policy changed", {{"space", info.space()},
                                         {"from", previous},
                                         {"to", info.policy()},
                                         {"blocks", info.blocks()},
                                         {"ms", clock_->NowMs() - began}});
  return absl::OkStatus();
}

void Daemon::ReplaceStandIns() {
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    if (stopping_.load(std::memory_order_relaxed)) return;
    MutexLock one_at_a_time(&switching_mu_);
    {
      SpaceLock lock(*space);
      if (!space->state.pool.has_stand_in()) continue;
    }
    const absl::Status changed = ChangePolicy(space.get(), NewSpacesPolicy());
    if (!changed.ok() && !stopping_) LogError("replacement policy not changed", {{"error", changed}});
  }
}

std::string Daemon::NewSpacesPolicy() {
  MutexLock lock(&new_spaces_mu_);
  return new_spaces_policy_;
}

absl::StatusOr<std::unique_ptr<ReplacementPolicy>> Daemon::MakePolicy(const std::string& name,
                                                                      const SpaceFacts& facts) const {
  PolicyOptions options{.max_blocks = facts.geometry.max_blocks,
                        .tokens_per_block = facts.layout.groups(0).tokens_per_block()};
  const auto& given = options_.policy_weights;
  if (given != nullptr && given->policy() == name) options.weights = given;
  ASSIGN_OR_RETURN(
      absl::StatusOr<std::unique_ptr<ReplacementPolicy>> made,
      OrExhausted(TablesOf(name, options.max_blocks), [&] { return MakeReplacementPolicy(name, options); }));
  return made;
}

absl::Status Daemon::GetPolicies(const v1::GetPoliciesRequest& request, v1::GetPoliciesResponse* response) {
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    SpaceLock lock(*space);
    Fill(space->state, response->add_spaces());
  }
  response->set_new_spaces(NewSpacesPolicy());
  for (const PolicyEntry& policy : ReplacementPolicies()) {
    v1::ReplacementPolicyInfo* info = response->add_available();
    info->set_name(std::string(policy.name));
    info->set_summary(std::string(policy.summary));
  }
  return absl::OkStatus();
}

absl::Status Daemon::SetPolicy(const v1::SetPolicyRequest& request, v1::SetPolicyResponse* response) {
  RETURN_IF_ERROR(ValidateSetPolicy(request));
  MutexLock one_at_a_time(&switching_mu_);
  // New spaces come first: one that is being made with the old policy is then among those found below.
  if (request.space() == 0) {
    MutexLock lock(&new_spaces_mu_);
    new_spaces_policy_ = request.policy();
  }
  const std::vector<std::shared_ptr<Space>> spaces = SpacesOf(request.space(), "");
  if (spaces.empty() && request.space() != 0) {
    return absl::NotFoundError(absl::StrCat("space ", request.space(), " does not exist"));
  }
  for (const std::shared_ptr<Space>& space : spaces) {
    v1::SpacePolicy* const info = response->add_spaces();
    {
      SpaceLock lock(*space);
      info->set_previous(std::string(space->state.pool.policy().name()));
    }
    RETURN_IF_ERROR(ChangePolicy(space.get(), request.policy()));
    SpaceLock lock(*space);
    Fill(space->state, info);
  }
  return absl::OkStatus();
}

}  // namespace kvpool
