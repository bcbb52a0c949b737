// The verbs that act on blocks, applied to the pool of one space.
//
//   lease match                   only for a ready session that is past its warm-up
//   seal release ref touch        for any open session. Blocks that the verb can't be applied to are refused one
//   pin unpin set_retention       by one, the others are done. A seal answers no canonical block that the session
//                                 has not mapped
//
// Refs go from the packed field of the request to the pool and back without allocation per block: the vectors
// here are used again. Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_VERBS_H_
#define KVPOOL_SERVER_SPACE_VERBS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "kvpool/v1/engine.pb.h"
#include "server/pool/block_pool.h"
#include "server/space/session.h"
#include "server/space/space_state.h"
#include "server/space/turn.h"

namespace kvpool {

class EventLog;

class BlockVerbs {
 public:
  // `event_log` may be null.
  BlockVerbs(SpaceState* state, EventLog* event_log) : state_(*state), event_log_(event_log) {}

  // Applies a part of the verb: Turn::kNames blocks, of which `done` were done before; a match is whole, and a long one
  // pauses by itself. Answers how many are done now, or nothing at the end. REQUIRES:
  // ValidateOperation(operation) is OK, the verb is one of those above, and the session has not ended, since the
  // part before neither.
  std::optional<size_t> Apply(Turn& turn, Session* session, const v1::Operation& operation, size_t done,
                              v1::OperationResult* result);
  // How long a prefix is resident; nothing: the session has ended meanwhile. It holds nothing, and is no lookup that counts.
  std::optional<uint64_t> ResidentTokens(Turn& turn, const Session& session, const v1::Match& match) const;
  // The next operations to be applied, of which nothing was checked yet: prefetches what they begin with. Within one
  // the pool does so itself.
  void Prefetch(const Session& session, absl::Span<const v1::Operation* const> next);
  // Gives the blocks back when step `due` is passed and no device operation uses them: see LateReleases. Answers
  // now what is refused: blocks that the session does not hold. Does a part, from the ref at `from` on, and answers where
  // the next one begins; nullopt: it was the last.
  std::optional<size_t> ReleaseLate(Session* session, const v1::Release& release, uint64_t due, size_t from,
                                    v1::OperationResult* result);
  // The verdict in words. REQUIRES: it is neither kDone nor kDuplicate, or the block is the session's sink.
  absl::Status WhyRefused(const Session& session, BlockRef ref, Verdict verdict) const;

 private:
  using Refs = google::protobuf::RepeatedField<uint64_t>;
  using Refusals = google::protobuf::RepeatedPtrField<v1::Refusal>;

  // A part of what a verb names.
  struct Part {
    size_t begin = 0, end = 0;
    size_t size() const { return end - begin; }
  };
  static Part PartOf(const v1::Operation& operation, size_t blocks, size_t done);
  // True: there is more to be leased, or to be given back.
  bool Lease(Session* session, const v1::Lease& lease, TimeMs now, v1::OperationResult* result);
  // Gives back a part of what was leased. True: there is more.
  bool GiveBack(Session* session, TimeMs now, v1::LeaseResult* answer);
  void Seal(Session* session, const v1::Seal& seal, const Part& part, TimeMs now, v1::SealResult* result);
  void RefuseForNow(Session* session, uint32_t index, const SealEntry& entry, Verdict verdict,
                    Refusals* refusals);
  // False: the session ended meanwhile.
  bool Match(Turn& turn, Session* session, const v1::Match& match, v1::OperationResult* result);
  void ShortMatch(Turn& turn, Session* session, const v1::Match& match, v1::MatchResult* answer);
  // Says what of the match is below the pool, and brings it up if that is wished.
  // `keys`: how many the match names.
  void ReportBelow(Turn& turn, const Session& session, const v1::Match& match, size_t keys,
                   v1::MatchResult* answer);
  void SampleReuse(TimeMs now, const v1::Match& match);
  // Only released blocks that are sealed are recorded.
  void LogHint(const Session& session, TimeMs now, const UseHint& hint);
  void LogSeal(const Session& session, TimeMs now, const v1::Seal& seal, const BlockKey* in_front);

  // Unpacks into refs_, with kNullRef in place of the sink, and makes verdicts_ as long.
  void Unpack(const Session& session, const Refs& wire, const Part& part);
  void AppendKeys(std::string_view keys, uint32_t key_bytes, uint32_t group);
  // By verdicts_, whose first is that of wire[first].
  void Refuse(Session* session, const Refs& wire, size_t first, Refusals* refusals);
  void RefuseOne(Session* session, uint32_t index, BlockRef ref, Verdict verdict, Refusals* refusals);
  std::string Explain(const Session& session, BlockRef ref, Verdict verdict) const;

  SpaceState& state_;
  EventLog* const event_log_;
  uint32_t matches_ = 0;
  std::vector<BlockRef> refs_;
  std::vector<Verdict> verdicts_;
  std::vector<BlockKey> keys_;
  std::vector<SealEntry> entries_;
  std::vector<SealVerdict> outcomes_;
  std::vector<bool> had_before_;  // Parallel to them: it has left the pool, which remembers it.
  std::vector<GroupQuery> queries_;
  MatchOutcome match_;
  std::vector<uint64_t> event_words_;
  std::vector<BlockRef> next_refs_;
  std::vector<BlockKey> next_keys_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_VERBS_H_
