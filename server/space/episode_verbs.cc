#include "server/space/episode_verbs.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"
#include "server/space/in_parts.h"
#include "server/wire/operation.h"

namespace kvpool {
namespace {

std::vector<BlockRef> RefsOf(const v1::Sequence& sequence) {
  std::vector<BlockRef> refs;
  refs.reserve(sequence.blocks_size());
  for (const uint64_t ref : sequence.blocks()) refs.push_back(BlockRef::Unpack(ref));
  return refs;
}

// The size of a choice's result, serialised: it may be some bytes less.
size_t BytesOf(const EpisodeSets::Set& set) {
  constexpr size_t kTagAndSize = 6;
  size_t bytes = kTagAndSize + set.name.size() + kTagAndSize;
  for (const v1::Sequence& sequence : set.sequences) bytes += kTagAndSize + sequence.ByteSizeLong();
  return bytes;
}

}  // namespace

absl::StatusOr<bool> EpisodeVerbs::AnyInUse(Turn& turn, const Session& session, Blocks blocks) {
  bool in_use = false;
  RETURN_IF_ERROR(InParts(turn, session, blocks,
                          [&](size_t, Blocks part) { in_use = in_use || session.parked.AnyOnDevice(part); }));
  return in_use;
}

absl::Status EpisodeVerbs::CheckHeld(Turn& turn, const Session& session, const v1::Sequence& sequence) const {
  const uint32_t per_block =
      state_.facts.layout.groups(static_cast<int>(sequence.group())).tokens_per_block();
  if (sequence.last_block_tokens() > per_block) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequence.last_block_tokens is ", sequence.last_block_tokens(), "; must be 0 to ", per_block));
  }
  const std::vector<BlockRef> refs = RefsOf(sequence);
  return InParts(turn, session, Blocks(refs), [&](size_t first, Blocks part) {
    std::vector<Verdict> verdicts(part.size(), Verdict::kDone);
    state_.pool.CheckHeld(session.holder, sequence.group(), part, absl::MakeSpan(verdicts));
    for (size_t i = 0; i < part.size(); ++i) {
      if (verdicts[i] == Verdict::kDone && part[i] != session.sink) continue;
      const absl::Status why = verbs_.WhyRefused(session, part[i], verdicts[i]);
      return absl::Status(why.code(),
                          absl::StrCat("sequence.blocks[", first + i, "]: ", std::string(why.message())));
    }
    return absl::OkStatus();
  });
}

absl::Status EpisodeVerbs::Hold(Turn& turn, const Session& session, Blocks blocks) {
  std::vector<BlockRef> held;
  held.reserve(blocks.size());
  const absl::Status status = InParts(turn, session, blocks, [&](size_t, Blocks part) {
    std::vector<Verdict> verdicts(part.size(), Verdict::kDone);
    state_.pool.Ref(session.holder, part, absl::MakeSpan(verdicts));
    absl::Status refused;
    for (size_t i = 0; i < part.size(); ++i) {
      if (verdicts[i] == Verdict::kDone) {
        held.push_back(part[i]);
      } else if (refused.ok()) {
        refused = verbs_.WhyRefused(session, part[i], verdicts[i]);
      }
    }
    return refused;
  });
  // Those of a session that has ended ended with it.
  if (!status.ok() && !session.ended) RETURN_IF_ERROR(GiveBack(turn, session, held).status());
  return status;
}

absl::StatusOr<uint32_t> EpisodeVerbs::GiveBack(Turn& turn, const Session& session, Blocks blocks) {
  uint32_t released = 0;
  while (!blocks.empty()) {
    const Blocks part = blocks.subspan(blocks.size() - std::min(blocks.size(), Turn::kNames));
    blocks.remove_suffix(part.size());
    std::vector<Verdict> verdicts(part.size(), Verdict::kDone);
    state_.pool.Release(session.holder, turn.now, part, absl::MakeSpan(verdicts));
    released += static_cast<uint32_t>(std::count(verdicts.begin(), verdicts.end(), Verdict::kDone));
    turn.Worked(part.size());
    turn.Breathe();
    if (session.ended) return absl::AbortedError(session.end_reason);
  }
  return released;
}

absl::Status EpisodeVerbs::Put(Turn& turn, Session* session, const v1::PutEpisode& request,
                               v1::PutEpisodeResult* result) {
  EpisodeSets& sets = session->episodes;
  std::vector<BlockRef> replaced;
  const bool replaces = sets.Find(request.name()) != nullptr;
  if (replaces) replaced = sets.Find(request.name())->blocks;
  // The request does not name the blocks that it lets go of, so it was not kept behind what reads them.
  ASSIGN_OR_RETURN(const bool in_use, AnyInUse(turn, *session, replaced));
  if (in_use) {
    return absl::FailedPreconditionError(
        absl::StrCat("put_episode.name: blocks of \"", request.name(),
                     "\" are in use by a device operation that is not over; replace it after that"));
  }
  EpisodeSets::Set set{.name = request.name(),
                       .sequences = {request.sequences().begin(), request.sequences().end()}};
  if (!request.sequences().empty()) {
    const uint32_t others = sets.size() - replaces;
    if (others >= kMaxEpisodes) {
      return absl::ResourceExhaustedError(absl::StrCat("session ", session->terms.id, " has ", others,
                                                       " episodes; the limit is ", kMaxEpisodes));
    }
    if (others > 0 && static_cast<uint64_t>(request.centroid_size()) != sets.dim()) {
      return absl::InvalidArgumentError(absl::StrCat("put_episode.centroid has ", request.centroid_size(),
                                                     " numbers; the session's others have ", sets.dim()));
    }
    for (const v1::Sequence& sequence : request.sequences()) {
      RETURN_IF_ERROR(CheckHeld(turn, *session, sequence));
      const std::vector<BlockRef> refs = RefsOf(sequence);
      set.blocks.insert(set.blocks.end(), refs.begin(), refs.end());
    }
    const size_t blocks = sets.blocks() - replaced.size() + set.blocks.size();
    if (blocks > kMaxNames) {
      return absl::ResourceExhaustedError(absl::StrCat("the episodes of session ", session->terms.id,
                                                       " would have ", blocks, " blocks; the limit is ",
                                                       kMaxNames));
    }
    RETURN_IF_ERROR(Hold(turn, *session, set.blocks));
  }
  if (request.sequences().empty()) {
    sets.Remove(request.name());
  } else {
    sets.Put(std::move(set), request.centroid());
  }
  session->largest_episode = sets.largest();
  result->set_episodes(sets.size());
  ASSIGN_OR_RETURN(const uint32_t released, GiveBack(turn, *session, replaced));
  result->set_released(released);
  return absl::OkStatus();
}

absl::Status EpisodeVerbs::Choose(Turn& turn, Session* session, const v1::ChooseEpisode& request,
                                  AnswerRoom* room, v1::ChooseEpisodeResult* result) {
  const EpisodeSets& sets = session->episodes;
  EpisodeSets::Nearest nearest;
  if (sets.size() == 0) {
    return absl::NotFoundError(absl::StrCat("session ", session->terms.id, " has no episodes"));
  }
  if (request.name().empty()) {
    ASSIGN_OR_RETURN(nearest, sets.Find(request.embedding()));
  } else {
    nearest.set = sets.Find(request.name());
    if (nearest.set == nullptr) {
      return absl::NotFoundError(absl::StrCat("choose_episode.name: session ", session->terms.id, " has ",
                                              sets.size(), " episodes, none of this name"));
    }
  }
  RETURN_IF_ERROR(room->Take("choose_episode", BytesOf(*nearest.set)));
  RETURN_IF_ERROR(Hold(turn, *session, nearest.set->blocks));
  result->set_name(nearest.set->name);
  result->set_similarity(static_cast<float>(nearest.cosine));
  result->mutable_sequences()->Add(nearest.set->sequences.begin(), nearest.set->sequences.end());
  return absl::OkStatus();
}

}  // namespace kvpool
