#include "server/space/slab_holders.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

// Sessions, slabs of one, pages of holds and blocks that are looked at under one hold of the space's mutex: some 0.1 ms.
constexpr uint32_t kLooksTogether = 512;
constexpr uint32_t kBlocksTogether = 1024;
constexpr uint32_t kBlocksOfALook = 1024;
// Some 30 ms of one space, for a refusal that anybody can ask for again.
constexpr uint32_t kMostSlices = 256;

}  // namespace

bool SlabHolders::Look(const BlockPool& pool, const Growth& growth, const Sessions& sessions, bool spare) {
  const auto slabs = static_cast<uint32_t>(growth.slabs().size());
  if (slabs == 0) return false;
  if (!begun()) {
    spare_ = spare;
    first_ = spare_ ? 1 : 0;
    of_slabs_ = slabs - first_;
  }
  if (++slices_ > kMostSlices) {
    cut_ = true;
    return false;
  }
  uint32_t steps = 0;
  for (; next_ < sessions.end_holder(); ++next_) {
    const Session* const session = sessions.of(Holder{static_cast<uint16_t>(next_)});
    if (++steps >= kLooksTogether || (session != nullptr && !LookAt(pool, growth, *session, &steps)))
      return true;
  }
  // What is pinned, or in front of what is held, nobody holds.
  const uint32_t begin = std::max(1u, growth.blocks_of(first_));
  at_ = std::min(at_, pool.end_block() - 1);
  for (uint32_t looked = 0; at_ >= begin; --at_) {
    if (++looked > kBlocksTogether) return true;
    const absl::StatusOr<BlockView> view = pool.View(BlockId{at_}, 0);
    if (!view.ok()) continue;
    if (view->pinned) {
      ++pinned_;
    } else if (view->state == BlockState::kLeased || view->state == BlockState::kSealed ||
               view->state == BlockState::kQuarantined) {
      ++in_use_;
    }
  }
  return false;
}

bool SlabHolders::LookAt(const BlockPool& pool, const Growth& growth, const Session& session,
                         uint32_t* steps) {
  const uint64_t id = session.terms.id;
  const std::vector<SlabRow>& slabs = growth.slabs();
  if (current_.session != id) {
    current_ = {.session = id,
                .client_name = session.terms.client_name,
                .promised = spare_ ? 0 : pool.guaranteed_free(session.holder)};
    slab_ = UINT32_MAX;
  }
  const BlockPool::Holdings holdings = pool.holdings(session.holder);
  const uint32_t held_at_all = holdings.leased + holdings.referenced;
  const uint32_t sink = Index(session.sink.id);
  if (slab_ == UINT32_MAX && sink >= std::max(1u, growth.blocks_of(first_))) ++sinks_;
  const uint32_t most = held_at_all - std::min(held_at_all, sink == 0 ? 0u : 1u);
  slab_ = std::min(slab_, static_cast<uint32_t>(slabs.size()));
  while (slab_ > first_ && current_.blocks < most) {
    if (*steps >= kLooksTogether) return false;
    const SlabRow& row = slabs[--slab_];
    *steps += 1 + row.block_count / kBlocksOfALook;
    uint32_t held = pool.held_in(session.holder, row.first_block, row.end_block());
    if (held > 0 && sink >= row.first_block && sink < row.end_block()) --held;
    if (held == 0) continue;
    current_.blocks += held;
    ++current_.slabs;
  }
  Add(std::move(current_));
  current_ = {};
  return true;
}

void SlabHolders::Add(Holding holding) {
  if (holding.weight() == 0) return;
  const auto at = std::find_if(named_.begin(), named_.end(),
                               [&](const Holding& other) { return other.weight() < holding.weight(); });
  named_.insert(at, std::move(holding));
  if (named_.size() <= kMostNamed) return;
  ++more_sessions_;
  more_blocks_ += named_.back().weight();
  named_.pop_back();
}

std::vector<std::string> SlabHolders::Describe() const {
  std::vector<std::string> who;
  uint64_t held = 0;
  const std::string slabs = absl::StrCat(of_slabs_, spare_ ? " slabs that could go" : " slabs");
  for (const Holding& holding : named_) {
    held += holding.blocks;
    std::string what = absl::StrCat("session ", holding.session, " (", holding.client_name, ")");
    if (holding.blocks > 0) {
      absl::StrAppend(&what, " holds ", holding.blocks, " blocks in ", holding.slabs, " of the ", slabs,
                      holding.promised > 0 ? " and" : "");
    }
    if (holding.promised > 0) absl::StrAppend(&what, " is promised ", holding.promised, " blocks");
    who.push_back(std::move(what));
  }
  if (more_sessions_ > 0)
    who.push_back(absl::StrCat(more_sessions_, " more sessions hold ", spare_ ? "" : "or are promised ",
                               more_blocks_, " blocks"));
  if (pinned_ > 0) who.push_back(absl::StrCat(pinned_, " blocks are pinned"));
  // Several may hold the same.
  if (in_use_ > sinks_ && held + more_blocks_ == 0)
    who.push_back(absl::StrCat(in_use_ - sinks_, " blocks are in front of such as are in use"));
  if (cut_) who.push_back("not everything was looked at");
  return who;
}

}  // namespace kvpool
