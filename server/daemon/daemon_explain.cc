// Explain: why a block is here, why a key is not. The summary is a sentence for people; `details` has the
// facts behind it.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/status_macros.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/daemon/space_terms.h"
#include "server/replacement/policy.h"
#include "server/space/block_info.h"
#include "server/space/session.h"
#include "server/space/space.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

// So many blocks of a chain are shown one by one.
constexpr size_t kShownChain = 64;
// So many blocks of a chain are counted: a walk of a fraction of a millisecond, for which verbs wait.
constexpr size_t kMostCounted = 4096;

std::string Seconds(uint32_t ms) { return absl::StrCat(ms / 1000, ".", ms % 1000 / 100, " s"); }

std::string Count(uint64_t count, const char* noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string HexKey(const BlockKey& key) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()));
}

std::string SpaceName(const SpaceFacts& facts) {
  return absl::StrCat("space ", facts.id, " (tenant ", facts.tenant, ", fingerprint ",
                      absl::BytesToHexString(facts.fingerprint.digest()), ")");
}

std::string SessionName(const Session& session) {
  return absl::StrCat("session ", session.terms.id, " (", session.terms.client_name, ")");
}

std::vector<std::string> HoldersOf(const SpaceState& state, BlockId block) {
  std::vector<std::string> holders;
  for (const Session* session : state.sessions) {
    if (session->holder == kNobody) continue;
    const uint32_t holds = state.pool.holds(session->holder, block);
    if (holds == 0) continue;
    holders.push_back(absl::StrCat(SessionName(*session), session->ended ? ", ended," : "", " holds it ",
                                   Count(holds, "time")));
  }
  return holders;
}

std::string Summary(const SpaceState& state, const BlockView& view, const std::vector<std::string>& holders) {
  const std::string block = absl::StrCat("Block ", Index(view.ref.id), " of space ", state.facts.id);
  const Session* owner = state.sessions.of(view.owner);
  const std::string owner_name = owner == nullptr ? "a session that is gone" : SessionName(*owner);
  switch (view.state) {
    case BlockState::kFree:
      return absl::StrCat(block, " is free: nobody may touch it, and the next lease may answer it.");
    case BlockState::kLeased:
      if (owner != nullptr && owner->sink.id == view.ref.id) {
        return absl::StrCat(block, " is the sink of ", owner_name,
                            ": leased for its padding writes until it ends.");
      }
      return absl::StrCat(block, " is leased to ", owner_name,
                          ", which alone writes it; it is not sealed yet.");
    case BlockState::kSealed:
      return absl::StrCat(block, " is sealed and stays: it is held by ", Count(holders.size(), "session"),
                          " and ", Count(view.children, "block"), " behind it",
                          view.pinned ? ", and it is pinned." : ".");
    case BlockState::kCached:
      return absl::StrCat(
          block, " is cached: nobody holds it, its content is valid, it was used ", Seconds(view.idle_ms),
          " ago and leaves when the policy (", std::string(state.pool.policy().name()), ") chooses it",
          view.children > 0 ? absl::StrCat(", after the ", Count(view.children, "block"), " behind it.")
                            : ".");
    case BlockState::kQuarantined:
      return absl::StrCat(block, " is quarantined: ", owner_name,
                          " ended, and a process that could write the block still runs.");
    case BlockState::kWithheld:
      return absl::StrCat(block, " is free and withheld: the memory around it is to be given back.");
  }
  return block;
}

void ExplainBlock(const SpaceState& state, const BlockView& view, uint64_t now,
                  v1::ExplainResponse* response) {
  const std::vector<std::string> holders = HoldersOf(state, view.ref.id);
  response->set_summary(Summary(state, view, holders));
  FillBlock(state, view, response->add_blocks());
  for (const std::string& holder : holders) response->add_details(holder);
  if (view.state != BlockState::kSealed && view.state != BlockState::kCached) return;
  const uint32_t sealer = state.sessions.sealer(view.ref.id);
  response->add_details(absl::StrCat("sealed by session ", sealer, " ", Seconds(view.age_ms),
                                     " ago under key ", HexKey(view.key), " of group ", view.key.group,
                                     view.key.raw ? "" : " (SHA-256 of a key that has not 32 bytes)"));
  response->add_details(absl::StrCat("last used ", Seconds(view.idle_ms), " ago; priority ", view.priority,
                                     view.pinned ? "; pinned" : ""));
  const std::vector<BlockRef> chain = ChainOf(state.pool, view.ref, now, kMostCounted + 1);
  response->add_details(absl::StrCat(
      "block ",
      chain.size() <= kMostCounted ? absl::StrCat(chain.size()) : absl::StrCat("more than ", kMostCounted),
      " of its chain; ", Count(view.children, "resident block"), " right behind it"));
  // The blocks in front of it follow, the nearest first; the block itself is there already.
  for (size_t i = 1; i < std::min(chain.size(), kShownChain); ++i) {
    const absl::StatusOr<BlockView> front = state.pool.View(chain[chain.size() - 1 - i].id, now);
    if (front.ok()) FillBlock(state, *front, response->add_blocks());
  }
}

// The places where a key is, was, and is under another group.
struct KeySearch {
  std::vector<std::string> found;
  std::vector<std::string> evicted;
  std::vector<std::string> nearly;
  std::vector<std::string> below;
};

void SearchSpace(const SpaceState& state, const std::string& key, uint32_t group, uint64_t now,
                 KeySearch* search, v1::ExplainResponse* response) {
  const std::string where = SpaceName(state.facts);
  const BlockRef block = FindByKey(state.pool, key, group);
  if (block != kNullRef) {
    const absl::StatusOr<BlockView> view = state.pool.View(block.id, now);
    if (!view.ok()) return;
    if (search->found.empty()) {
      ExplainBlock(state, *view, now, response);
    } else {
      FillBlock(state, *view, response->add_blocks());
    }
    search->found.push_back(absl::StrCat("resident as block ", Index(block.id), " of ", where));
    return;
  }
  const absl::StatusOr<uint32_t> evicted_ms = state.pool.EvictedAgo(BlockKey::From(key, group), now);
  if (evicted_ms.ok()) {
    search->evicted.push_back(absl::StrCat("evicted from ", where, " ", Seconds(*evicted_ms), " ago"));
  }
  if (group < static_cast<uint32_t>(state.facts.layout.groups_size())) {
    const std::string below = state.below.Describe(BlockKey::From(key, group));
    if (!below.empty()) search->below.push_back(absl::StrCat("of ", where, ": ", below));
  }
  for (int other = 0; other < state.facts.layout.groups_size(); ++other) {
    if (static_cast<uint32_t>(other) == group) continue;
    if (FindByKey(state.pool, key, static_cast<uint32_t>(other)) == kNullRef) continue;
    search->nearly.push_back(absl::StrCat("resident in ", where, " under group ", other, " (\"",
                                          state.facts.layout.groups(other).name(), "\"), not ", group));
  }
}

}  // namespace

absl::Status Daemon::Explain(const v1::ExplainRequest& request, v1::ExplainResponse* response) {
  RETURN_IF_ERROR(ValidateExplain(request));
  const uint64_t now = clock_->NowMs();
  const std::shared_ptr<Space> asked = request.space() == 0 ? nullptr : registry_->FindSpace(request.space());
  if (request.space() != 0 && asked == nullptr) {
    return absl::NotFoundError(absl::StrCat("space ", request.space(), " does not exist"));
  }
  if (request.has_block()) {
    SpaceLock lock(*asked);
    ASSIGN_OR_RETURN(const BlockView view, asked->state.pool.View(BlockId{request.block()}, now));
    ExplainBlock(asked->state, view, now, response);
    return absl::OkStatus();
  }

  KeySearch search;
  std::vector<std::string> elsewhere;
  for (const std::shared_ptr<Space>& space : registry_->Spaces()) {
    SpaceLock lock(*space);
    if (asked == nullptr || asked == space) {
      SearchSpace(space->state, request.key(), request.group(), now, &search, response);
    } else if (space->facts.tenant == asked->facts.tenant &&
               FindByKey(space->state.pool, request.key(), request.group()) != kNullRef) {
      elsewhere.push_back(
          absl::StrCat("resident in ", SpaceName(space->facts), ", which space ", asked->facts.id,
                       " does not share, as the fingerprints differ: ",
                       DescribeFactDifferences(space->facts.fingerprint, asked->facts.fingerprint)));
    }
  }
  const std::string key =
      absl::StrCat("Key ", absl::BytesToHexString(request.key()), " of group ", request.group());
  if (response->summary().empty()) {
    const std::string reason = !search.evicted.empty()  ? absl::StrCat("it was ", search.evicted.front(), ".")
                               : !search.nearly.empty() ? absl::StrCat("it is ", search.nearly.front(), ".")
                               : !elsewhere.empty()
                                   ? absl::StrCat("it is ", elsewhere.front(), ".")
                                   : "it was never sealed here, or evicted too long ago to be remembered.";
    response->set_summary(absl::StrCat(key, " is not resident: ", reason));
  }
  for (const auto* facts : {&search.found, &search.evicted, &search.below, &search.nearly, &elsewhere}) {
    for (const std::string& fact : *facts) response->add_details(fact);
  }
  return absl::OkStatus();
}

}  // namespace kvpool
