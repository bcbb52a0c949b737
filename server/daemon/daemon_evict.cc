// The operator's Evict.
//
//   by count            the policy chooses
//   by key or session   victims are chosen on a snapshot, taken in slices so that verbs get in between, and
//                       reclaimed by ref, leaves first: one that changed hands meanwhile is skipped
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/roots_first.h"
#include "server/space/block_info.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

constexpr uint32_t kViewSlice = 1024;

struct Judged {
  BlockRef ref;
  BlockId parent = kNullBlock;
  bool resident = false;
  bool sealed_by_session = false;
};

// All blocks that a space has now, each as it was when its slice was taken; index 0 is the null block.
std::vector<Judged> SnapshotBlocks(Space* space, uint64_t session, uint64_t now) {
  uint32_t end = 0;
  {
    SpaceLock lock(*space);
    end = space->state.pool.end_block();
  }
  std::vector<Judged> blocks(end);  // Its memory is faulted in here, outside the mutex.
  for (uint32_t next = 1; next < end;) {
    space->GiveWay();
    SpaceLock lock(*space);
    for (uint32_t i = 0; i < kViewSlice && next < end; ++i, ++next) {
      const BlockId id{next};
      const absl::StatusOr<BlockView> view = space->state.pool.View(id, now);
      if (!view.ok()) continue;  // It is not there, or not any more.
      Judged& judged = blocks[next];
      judged.ref = view->ref;
      judged.parent = view->parent;
      judged.resident = view->state == BlockState::kSealed || view->state == BlockState::kCached;
      judged.sealed_by_session = space->state.sessions.sealer(id) == static_cast<uint32_t>(session);
    }
  }
  return blocks;
}

// The root and all blocks behind it.
std::vector<BlockRef> Behind(const std::vector<Judged>& blocks, BlockRef root) {
  enum : uint8_t { kUnknown, kBehind, kElsewhere };
  std::vector<uint8_t> place(blocks.size(), kUnknown);
  place[0] = kElsewhere;
  if (Index(root.id) < blocks.size()) place[Index(root.id)] = kBehind;
  std::vector<uint32_t> path;
  std::vector<BlockRef> behind;
  for (uint32_t id = 1; id < blocks.size(); ++id) {
    if (!blocks[id].resident) continue;
    // Goes up the chain to a block whose place is known. Slices of different times may make a cycle, so the
    // path is bounded.
    uint32_t at = id;
    path.clear();
    while (at < blocks.size() && place[at] == kUnknown && path.size() < blocks.size()) {
      path.push_back(at);
      place[at] = kElsewhere;
      at = Index(blocks[at].parent);
    }
    if (at < blocks.size() && place[at] == kBehind) {
      for (const uint32_t passed : path) place[passed] = kBehind;
    }
    if (place[id] == kBehind) behind.push_back(blocks[id].ref);
  }
  return behind;
}

// Resident blocks that the request names by key, session or both, each behind the one in front of it. None: no block of the
// space has the key.
std::optional<std::vector<BlockRef>> Choose(Space* space, const v1::EvictRequest& request, uint64_t now) {
  BlockRef root = kNullRef;
  if (!request.key().empty()) {
    SpaceLock lock(*space);
    root = FindByKey(space->state.pool, request.key(), request.group());
    if (root == kNullRef) return std::nullopt;
  }
  const std::vector<Judged> blocks = SnapshotBlocks(space, request.session(), now);
  std::vector<BlockRef> victims;
  if (root == kNullRef) {
    for (const Judged& judged : blocks) {
      if (judged.resident) victims.push_back(judged.ref);
    }
  } else if (Index(root.id) < blocks.size() && blocks[Index(root.id)].ref == root) {
    victims = Behind(blocks, root);
  }
  std::vector<ChainedBlock> chained;
  for (const BlockRef ref : victims) {
    const Judged& judged = blocks[Index(ref.id)];
    if (request.session() == 0 || judged.sealed_by_session) chained.push_back({ref, judged.parent});
  }
  return RootsFirst(chained);
}

}  // namespace

absl::Status Daemon::Evict(const v1::EvictRequest& request, v1::EvictResponse* response) {
  RETURN_IF_ERROR(ValidateEvict(request));
  if (request.space() != 0 && registry_->FindSpace(request.space()) == nullptr) {
    return absl::NotFoundError(absl::StrCat("space ", request.space(), " does not exist"));
  }
  std::shared_ptr<Session> session;
  if (request.session() != 0) {
    session = registry_->FindSession(request.session());
    if (session == nullptr) {
      return absl::NotFoundError(absl::StrCat("session ", request.session(), " does not exist"));
    }
  }
  const std::vector<std::shared_ptr<Space>> spaces = SpacesOf(request.space(), request.tenant());
  if (spaces.empty() && !request.tenant().empty()) {
    return absl::NotFoundError(
        absl::StrCat("tenant \"", request.tenant(), "\" has no open space",
                     request.space() == 0 ? "" : absl::StrCat(" with the number ", request.space())));
  }
  if (session != nullptr && absl::c_find(spaces, session->space) == spaces.end()) {
    return absl::NotFoundError(absl::StrCat("session ", request.session(), " is in space ",
                                            session->space->facts.id, ", which space and tenant leave out"));
  }
  uint64_t left = request.count() == 0 ? std::numeric_limits<uint64_t>::max() : request.count();
  const uint64_t now = clock_->NowMs();
  bool key_found = request.key().empty();
  for (const std::shared_ptr<Space>& space : spaces) {
    if (session != nullptr && session->space != space) continue;
    const bool chosen = !request.key().empty() || session != nullptr;
    std::vector<BlockRef> victims;
    if (chosen) {
      std::optional<std::vector<BlockRef>> named = Choose(space.get(), request, now);
      if (!named.has_value()) continue;
      victims = *std::move(named);
      key_found = true;
    }
    const uint64_t evicted =
        EvictFrom(space.get(), EvictReason::kOperator, chosen ? &victims : nullptr, left);
    left -= evicted;
    response->set_evicted(response->evicted() + evicted);
    if (left == 0) break;
    uint64_t held_back = victims.size() - (chosen ? evicted : 0);
    if (!chosen) {
      SpaceLock lock(*space);
      const auto counts = space->state.pool.counts();
      held_back = uint64_t{counts[static_cast<int>(BlockState::kSealed)]} +
                  counts[static_cast<int>(BlockState::kCached)];
    }
    response->set_held_back(response->held_back() + held_back);
  }
  if (key_found) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("key ", absl::BytesToHexString(request.key()), " of group ",
                                          request.group(), " is resident in no space asked"));
}

uint64_t Daemon::EvictFrom(Space* space, EvictReason reason, const std::vector<BlockRef>* victims,
                           uint64_t count) {
  Settlement settlement(*space);
  std::vector<Eviction> evictions;
  uint64_t evicted = 0;
  size_t end = victims == nullptr ? 0 : victims->size();
  while (evicted < count && !stopping_ && (victims == nullptr || end > 0)) {
    const uint32_t slice = static_cast<uint32_t>(std::min<uint64_t>(kReclaimSlice, count - evicted));
    space->GiveWay();
    SpaceTurn turn(*space, &settlement);
    SpaceState& state = space->state;
    evictions.clear();
    if (victims == nullptr) {
      const uint32_t left = state.pool.Reclaim(turn.now, slice, reason, &evictions);
      if (left == 0) break;
      evicted += left;
    } else {
      // The leaves are last. What stays for a child that is held would stay in another pass, too.
      const size_t begin = end - std::min<size_t>(end, slice);
      const auto judged = absl::MakeConstSpan(*victims).subspan(begin, end - begin);
      evicted += state.pool.Reclaim(turn.now, judged, reason, &evictions);
      end = begin;
    }
    state.Observe(evictions);
    state.pressure.AfterVerbs(turn);
  }
  return evicted;
}

}  // namespace kvpool
