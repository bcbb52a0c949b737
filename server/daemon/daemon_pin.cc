// PinPrefix: a prefix may be a million blocks long, so that it is walked, pinned and let go of slice by slice.
#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/space/block_info.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// So many blocks are visited in one hold of the space's mutex.
constexpr size_t kChainSlice = 1024;

bool IsResident(BlockState state) { return state == BlockState::kSealed || state == BlockState::kCached; }

absl::Status LeftMeanwhile(const Space& space, BlockRef block) {
  return absl::AbortedError(absl::StrCat("space ", space.facts.id, ": block ", Index(block.id),
                                         " of the prefix left meanwhile; ask again"));
}

// The chain of the block that the key names, root first.
absl::StatusOr<std::vector<BlockRef>> WalkChain(Space* space, const Clock& clock,
                                                const v1::PinPrefixRequest& request) {
  std::vector<BlockRef> chain;  // The block that the key names is the first.
  for (bool more = true; more; space->GiveWay()) {
    SpaceLock lock(*space);
    const BlockPool& pool = space->state.pool;
    const uint64_t now = clock.NowMs();
    if (chain.empty()) {
      const BlockRef block = FindByKey(pool, request.key(), request.group());
      if (block == kNullRef) return absl::NotFoundError("key is resident in no space asked");
      chain.push_back(block);
    }
    // As long as a block is resident those in front of it are, too.
    absl::StatusOr<BlockView> view = pool.View(chain.back().id, now);
    if (!view.ok() || view->ref != chain.back() || !IsResident(view->state)) {
      return LeftMeanwhile(*space, chain.back());
    }
    for (size_t i = 0; i < kChainSlice && view.ok() && view->parent != kNullBlock; ++i) {
      view = pool.View(view->parent, now);
      if (view.ok()) chain.push_back(view->ref);
    }
    more = view.ok() && view->parent != kNullBlock;
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

absl::Status PinChain(Space* space, const Clock& clock, absl::Span<const BlockRef> chain, uint64_t ttl_ms) {
  // Of a longer prefix the root comes first.
  for (size_t end = 0; end < chain.size(); space->GiveWay()) {
    end = std::min(chain.size(), end + kChainSlice);
    SpaceLock lock(*space);
    BlockPool& pool = space->state.pool;
    const uint64_t now = clock.NowMs();
    Verdict verdict = Verdict::kDone;
    pool.Pin(now, now + ttl_ms, chain.subspan(end - 1, 1), {&verdict, 1});
    if (verdict == Verdict::kDone) continue;
    if (verdict == Verdict::kStale || verdict == Verdict::kWrongState) {
      return LeftMeanwhile(*space, chain[end - 1]);
    }
    return absl::ResourceExhaustedError(absl::StrCat(
        "space ", space->facts.id, ": block ", Index(chain.back().id), " and the ", chain.size() - 1,
        " in front of it can't be pinned: ", pool.pinned(), " of ", pool.pin_budget(), " blocks are pinned, ",
        pool.available(), " available, ", pool.promised(), " promised to sessions"));
  }
  return absl::OkStatus();
}

uint64_t UnpinChain(Space* space, absl::Span<const BlockRef> chain) {
  uint64_t unpinned = 0;
  for (; !chain.empty(); space->GiveWay()) {
    const absl::Span<const BlockRef> tail = chain.subspan(chain.size() - std::min(chain.size(), kChainSlice));
    chain.remove_suffix(tail.size());
    SpaceLock lock(*space);
    unpinned += space->state.pool.Unpin(tail);
  }
  return unpinned;
}

}  // namespace

absl::Status Daemon::PinPrefix(const v1::PinPrefixRequest& request, v1::PinPrefixResponse* response) {
  RETURN_IF_ERROR(ValidatePinPrefix(request));
  if (request.space() != 0 && registry_->FindSpace(request.space()) == nullptr)
    return absl::NotFoundError(absl::StrCat("space ", request.space(), " does not exist"));
  absl::Status refused = absl::NotFoundError("key is resident in no space asked");
  for (const std::shared_ptr<Space>& space : SpacesOf(request.space(), "")) {
    const absl::StatusOr<std::vector<BlockRef>> chain = WalkChain(space.get(), *clock_, request);
    if (absl::IsNotFound(chain.status())) continue;
    RETURN_IF_ERROR(chain.status());
    if (request.ttl_ms() == 0) {
      response->set_pinned(response->pinned() + UnpinChain(space.get(), *chain));
    } else {
      RETURN_IF_ERROR(PinChain(space.get(), *clock_, *chain, request.ttl_ms()));
      response->set_pinned(response->pinned() + chain->size());
    }
    refused = absl::OkStatus();
  }
  return refused;
}

}  // namespace kvpool
