// The operator's Erase: nothing that is cached of a tenant is found any more.
//
//   1  nothing of its spaces goes down or comes up from then on, of those opened meanwhile too, and what was under way has ended
//   2  its cached blocks leave, pinned ones too, in slices; a space that nobody uses is closed
//   3  its values leave the tier, those of spaces that are closed, too
//   4  spaces and tier are gone through once more, for the answer to say what is found
//
// What a session holds stays, and is named: a kernel may be reading it.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/roots_first.h"
#include "server/daemon/space_terms.h"
#include "server/daemon/tier_mover.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/tiers/tier.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// Blocks that are looked at in one hold of a space's mutex.
constexpr uint32_t kErasedSlice = 1024;
constexpr size_t kMostHoldersNamed = 100;
constexpr size_t kMostTenantsNamed = 4;

// No block of the tenant's spaces goes to a tier or comes from it as long as this lives, those of spaces that are opened
// meanwhile included.
class Suspension {
 public:
  Suspension(Registry* registry, const std::string& tenant) : registry_(*registry), tenant_(tenant) {
    registry_.Suspend(tenant_);
  }
  ~Suspension() { registry_.Resume(tenant_); }
  Suspension(const Suspension&) = delete;
  Suspension& operator=(const Suspension&) = delete;

 private:
  Registry& registry_;
  const std::string tenant_;
};

// Calls `look` with the state and every block that the space has, under its mutex, a slice at a time.
template <typename Look>
void ForEachBlock(Space* space, Look look) {
  for (uint32_t next = 1;;) {
    space->GiveWay();
    SpaceLock lock(*space);
    const BlockPool& pool = space->state.pool;
    for (const uint32_t end = next + kErasedSlice; next < end; ++next) {
      if (next >= pool.end_block()) return;
      const absl::StatusOr<BlockView> view = pool.View(BlockId{next}, space->NowMs());
      if (view.ok()) look(space->state, *view);
    }
  }
}

bool IsSealed(const BlockView& view) {
  return view.state == BlockState::kSealed || view.state == BlockState::kCached;
}

// What is left in a space, and who has it.
void Check(Space* space, std::map<uint64_t, v1::ErasureHolder>* holders, v1::EraseResponse* response) {
  ForEachBlock(space, [&](const SpaceState& state, const BlockView& view) {
    if (view.state == BlockState::kFree || view.state == BlockState::kWithheld) return;
    // Whatever is behind a cached block is cached, too: none of these is there for the sake of a held one.
    if (view.state == BlockState::kCached) {
      response->set_found_blocks(response->found_blocks() + 1);
      return;
    }
    response->set_held_blocks(response->held_blocks() + 1);
    const Session* const session = view.owner == kNobody ? nullptr : state.sessions.of(view.owner);
    const uint64_t id = session == nullptr ? 0 : session->terms.id;
    v1::ErasureHolder& holder = (*holders)[id];
    holder.set_space(space->facts.id);
    if (session != nullptr) {
      holder.set_session(id);
      holder.set_client_name(session->terms.client_name);
      holder.set_pid(session->members.front()->identity.credentials.pid);
    }
    if (IsSealed(view)) {
      holder.set_shared_blocks(holder.shared_blocks() + 1);
    } else {
      holder.set_leased_blocks(holder.leased_blocks() + 1);
    }
  });
}

// Bytes of blocks that nobody has, those of a slab that is leaving included.
uint64_t UnwrittenBytes(const SpaceFacts& facts, const SpaceState& state) {
  const auto counts = state.pool.counts();
  const uint64_t blocks =
      uint64_t{counts[static_cast<int>(BlockState::kFree)]} + counts[static_cast<int>(BlockState::kWithheld)];
  const uint64_t of_slab = state.growth.leaving().has_value() ? state.growth.leaving()->block_count : 0;
  return (blocks + of_slab) * facts.layout.block_bytes() * facts.devices.size();
}

// `below`: what is known of a tier, with a comma in front.
absl::Status NoSuchTenant(const std::string& tenant, const std::string& below,
                          const std::vector<std::string>& others) {
  return absl::NotFoundError(
      absl::StrCat("tenant is \"", tenant, "\": it has no open space", below,
                   others.empty() ? "" : absl::StrCat("; did you mean ", absl::StrJoin(others, ", "), "?")));
}

}  // namespace

void Daemon::EraseFrom(Space* space, v1::EraseResponse* response, std::vector<TierKey>* names) {
  std::vector<ChainedBlock> pinned;
  const bool below = space->facts.tier_space.has_value() && tiers_ != nullptr;
  uint64_t blocks = 0;
  ForEachBlock(space, [&](const SpaceState& state, const BlockView& view) {
    blocks = state.pool.capacity();
    if (!IsSealed(view)) return;
    if (view.pinned) pinned.push_back({view.ref, view.parent});
    if (below) names->push_back(TierKeyOf(space->facts, view.key));
  });
  // One pass from the leaves ends all, as none is of a block with a pinned child by then. Once only: an engine may pin again what
  // was unpinned, as often as it likes. What stays for that is found afterwards.
  const std::vector<BlockRef> unpinned = RootsFirst(pinned);
  for (size_t end = unpinned.size(); end > 0 && !stopping_;) {
    space->GiveWay();
    SpaceLock lock(*space);
    const size_t begin = end - std::min<size_t>(end, kReclaimSlice);
    space->state.pool.Unpin(absl::MakeConstSpan(unpinned).subspan(begin, end - begin));
    end = begin;
  }
  // Engines that go on seal and release meanwhile: what they add has an end here, and is found afterwards.
  const uint64_t evicted = EvictFrom(space, EvictReason::kOperator, nullptr, blocks);
  const uint64_t bytes = evicted * space->facts.layout.block_bytes() * space->facts.devices.size();
  response->set_blocks(response->blocks() + evicted);
  response->set_bytes(response->bytes() + bytes);
}

bool Daemon::EraseBelow(Tier* tier, const TierOwner& owner, const std::vector<TierKey>& names,
                        v1::EraseResponse* response, std::string* known) {
  const TierErased erased = tier->Erase(owner, names, &stopping_);
  v1::ErasedTier* of_tier = response->add_tiers();
  of_tier->set_tier(std::string(tier->name()));
  of_tier->set_values(erased.values);
  of_tier->set_bytes(erased.bytes);
  of_tier->set_failed(erased.failed);
  of_tier->set_remains(erased.remains);
  const absl::StatusOr<uint64_t> counted = tier->CountOf(owner);
  const uint64_t found = counted.value_or(0);
  of_tier->set_found(found);
  const std::string name = absl::StrCat("tier ", std::string(tier->name()), ": ");
  if (!counted.ok()) {
    response->add_remains(absl::StrCat(name, "it is not known what is left: ", counted.status().message()));
  }
  if (!erased.remains.empty()) response->add_remains(absl::StrCat(name, erased.remains));
  if (erased.failed > 0)
    response->add_remains(absl::StrCat(name, erased.failed, " values of which it is not certain"));
  if (found > 0) response->add_remains(absl::StrCat(name, found, " values of it are there"));
  absl::StrAppend(known, ", and tier ", std::string(tier->name()), " knows of nothing of it",
                  erased.wiped ? ", also in what is free there, which was wiped" : "",
                  erased.remains.empty() ? "" : absl::StrCat(" (", erased.remains, ")"));
  return erased.values + erased.failed + found == 0 && erased.complete && counted.ok();
}

absl::Status Daemon::Erase(const v1::EraseRequest& request, v1::EraseResponse* response) {
  RETURN_IF_ERROR(ValidateErase(request));
  const auto began = std::chrono::steady_clock::now();
  const std::string& tenant = request.tenant();
  const Suspension suspension(registry_.get(), tenant);
  std::vector<std::shared_ptr<Space>> spaces = registry_->Spaces();
  std::vector<std::string> others;
  for (const std::shared_ptr<Space>& space : spaces) {
    const bool alike = space->facts.tenant_name == tenant && space->facts.tenant != tenant;
    if (alike && others.size() < kMostTenantsNamed) others.push_back(space->facts.tenant);
  }
  // Not by the name alone, as Evict: each uid's tenant of that name is another one.
  std::erase_if(spaces, [&](const auto& space) { return space->facts.tenant != tenant; });
  response->set_spaces(static_cast<uint32_t>(spaces.size()));
  // Those that are being detached have its values still.
  const std::vector<TierSet::Listed> tiers =
      tiers_ == nullptr ? std::vector<TierSet::Listed>() : tiers_->list();
  if (spaces.empty() && tiers.empty()) return NoSuchTenant(tenant, "", others);
  if (tier_mover_ != nullptr) tier_mover_->AwaitRound();
  std::vector<TierKey> names;
  for (const std::shared_ptr<Space>& space : spaces) EraseFrom(space.get(), response, &names);
  if (stopping_) return absl::UnavailableError("the daemon is ending: erase again");
  while (const std::shared_ptr<Space> idle = registry_->CloseIdle(UINT64_MAX, {}, &tenant)) {
    Retire(idle);
    response->set_closed(response->closed() + 1);
  }
  // Those that others close at this moment.
  for (const std::shared_ptr<Space>& closing : registry_->ClosingOf(tenant)) Destroy(closing.get());
  std::string known;  // What is known of tiers that have nothing of it.
  bool nothing = spaces.empty();
  for (const TierSet::Listed& listed : tiers) {
    nothing &= EraseBelow(&listed.tier->tier(), OwnerBelow(options_, tenant), names, response, &known);
  }
  if (nothing) return NoSuchTenant(tenant, known, others);
  std::map<uint64_t, v1::ErasureHolder> holders;
  // One that was opened since counts, too.
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    if (space->facts.tenant != tenant) continue;
    Check(space.get(), &holders, response);
    SpaceLock lock(*space);
    response->set_unwritten_bytes(response->unwritten_bytes() + UnwrittenBytes(space->facts, space->state));
  }
  for (const auto& [id, holder] : holders) {
    if (static_cast<size_t>(response->holders_size()) < kMostHoldersNamed) *response->add_holders() = holder;
  }
  if (response->held_blocks() > 0) {
    response->add_remains(absl::StrCat(response->held_blocks(),
                                       " blocks are held, or in front of held ones, by ", holders.size(),
                                       " holders: kvpoolctl end ends a session"));
  }
  if (response->found_blocks() > 0) {
    response->add_remains(
        absl::StrCat(response->found_blocks(), " blocks were sealed or released since: erase again"));
  }
  if (response->unwritten_bytes() > 0) {
    response->add_remains(absl::StrCat(response->unwritten_bytes(),
                                       " bytes of free blocks are not overwritten; only engines of this "
                                       "tenant map them, until its spaces are closed"));
  }
  response->set_seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  LogInfo("tenant erased", {{"tenant", tenant},
                            {"blocks", response->blocks()},
                            {"held_blocks", response->held_blocks()},
                            {"found_blocks", response->found_blocks()}});
  return absl::OkStatus();
}

}  // namespace kvpool
