#include "server/space/episode_verbs.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// A session has at most so many: a question is compared with each under the space's mutex, and 64 of 4,096
// numbers take some 0.2 ms.
constexpr uint32_t kMaxEpisodes = 64;

std::vector<BlockRef> RefsOf(const v1::Sequence& sequence) {
  std::vector<BlockRef> refs;
  refs.reserve(sequence.blocks_size());
  for (const uint64_t ref : sequence.blocks()) refs.push_back(BlockRef::Unpack(ref));
  return refs;
}

}  // namespace

absl::Status EpisodeVerbs::CheckHeld(const Session& session, const v1::Sequence& sequence) const {
  const uint32_t per_block =
      state_.facts.layout.groups(static_cast<int>(sequence.group())).tokens_per_block();
  if (sequence.last_block_tokens() > per_block) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequence.last_block_tokens is ", sequence.last_block_tokens(), "; must be 0 to ", per_block));
  }
  const std::vector<BlockRef> refs = RefsOf(sequence);
  std::vector<Verdict> verdicts(refs.size(), Verdict::kDone);
  state_.pool.CheckHeld(session.holder, sequence.group(), refs, absl::MakeSpan(verdicts));
  for (size_t i = 0; i < refs.size(); ++i) {
    if (verdicts[i] == Verdict::kDone && refs[i] != session.sink) continue;
    const absl::Status why = verbs_.WhyRefused(session, refs[i], verdicts[i]);
    return absl::Status(why.code(), absl::StrCat("sequence.blocks[", i, "]: ", std::string(why.message())));
  }
  return absl::OkStatus();
}

absl::Status EpisodeVerbs::Hold(const Session& session, absl::Span<const BlockRef> blocks, uint64_t now) {
  std::vector<Verdict> verdicts(blocks.size(), Verdict::kDone);
  state_.pool.Ref(session.holder, blocks, absl::MakeSpan(verdicts));
  const auto refused = std::find_if(verdicts.begin(), verdicts.end(),
                                    [](Verdict verdict) { return verdict != Verdict::kDone; });
  if (refused == verdicts.end()) return absl::OkStatus();
  const absl::Status why = verbs_.WhyRefused(session, blocks[refused - verdicts.begin()], *refused);
  std::vector<BlockRef> held;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (verdicts[i] == Verdict::kDone) held.push_back(blocks[i]);
  }
  verdicts.assign(held.size(), Verdict::kDone);
  state_.pool.Release(session.holder, now, held, absl::MakeSpan(verdicts));
  return why;
}

absl::Status EpisodeVerbs::Put(Session* session, const v1::PutEpisode& request, uint64_t now,
                               v1::PutEpisodeResult* result) {
  EpisodeSets& sets = session->episodes;
  const EpisodeSets::Set* const old = sets.Find(request.name());
  // The request does not name the blocks that it lets go of, so it was not kept behind what reads them.
  if (old != nullptr && session->parked.AnyOnDevice(old->blocks)) {
    return absl::FailedPreconditionError(
        absl::StrCat("put_episode.name: blocks of \"", request.name(),
                     "\" are in use by a device operation that is not over; replace it after that"));
  }
  EpisodeSets::Set set{.name = request.name(),
                       .sequences = {request.sequences().begin(), request.sequences().end()}};
  if (!request.sequences().empty()) {
    const uint32_t others = sets.size() - (old != nullptr);
    if (others >= kMaxEpisodes) {
      return absl::ResourceExhaustedError(absl::StrCat("session ", session->terms.id, " has ", others,
                                                       " episodes; the limit is ", kMaxEpisodes));
    }
    if (others > 0 && static_cast<uint64_t>(request.centroid_size()) != sets.dim()) {
      return absl::InvalidArgumentError(absl::StrCat("put_episode.centroid has ", request.centroid_size(),
                                                     " numbers; the session's others have ", sets.dim()));
    }
    for (const v1::Sequence& sequence : request.sequences()) {
      RETURN_IF_ERROR(CheckHeld(*session, sequence));
      const std::vector<BlockRef> refs = RefsOf(sequence);
      set.blocks.insert(set.blocks.end(), refs.begin(), refs.end());
    }
    const size_t blocks = sets.blocks() - (old == nullptr ? 0 : old->blocks.size()) + set.blocks.size();
    if (blocks > kMaxNames) {
      return absl::ResourceExhaustedError(absl::StrCat("the episodes of session ", session->terms.id,
                                                       " would have ", blocks, " blocks; the limit is ",
                                                       kMaxNames));
    }
    RETURN_IF_ERROR(Hold(*session, set.blocks, now));
  }
  std::vector<BlockRef> released;
  if (old != nullptr) released = old->blocks;
  std::vector<Verdict> verdicts(released.size(), Verdict::kDone);
  state_.pool.Release(session->holder, now, released, absl::MakeSpan(verdicts));
  if (request.sequences().empty()) {
    sets.Remove(request.name());
  } else {
    sets.Put(std::move(set), request.centroid());
  }
  result->set_episodes(sets.size());
  result->set_released(static_cast<uint32_t>(std::count(verdicts.begin(), verdicts.end(), Verdict::kDone)));
  return absl::OkStatus();
}

absl::Status EpisodeVerbs::Choose(Session* session, const v1::ChooseEpisode& request, uint64_t now,
                                  v1::ChooseEpisodeResult* result) {
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
  RETURN_IF_ERROR(Hold(*session, nearest.set->blocks, now));
  result->set_name(nearest.set->name);
  result->set_similarity(static_cast<float>(nearest.cosine));
  result->mutable_sequences()->Add(nearest.set->sequences.begin(), nearest.set->sequences.end());
  return absl::OkStatus();
}

}  // namespace kvpool
