// Space::Recover, and what follows from it.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/log.h"
#include "server/base/peer_process.h"
#include "server/space/space.h"

namespace kvpool {
namespace {

// Each may give back a slice of blocks.
constexpr size_t kOldMembersSlice = 16;

// A verb that was parked, and the turn in which it was.
struct Recalled {
  uint64_t turn = 0;
  ParkedVerb verb;
};

// What the member's log has becomes what the member has, but for its parked verbs, which are added to `parked`. False: it
// can't.
bool RecallLog(Member* member, std::vector<Recalled>* parked, std::vector<BlockRef>* lent) {
  member->fence = member->log->fence();
  member->warmup_done = member->log->warmup_done();
  member->answers.RecallFloor(member->log->floor());
  for (MemberLog::Item& item : member->log->Items()) {
    switch (item.kind) {
      case MemberLog::Kind::kAnswer: {
        v1::StepResponse answer;
        if (!answer.ParseFromString(item.bytes)) return false;
        member->answers.Recall(item.sequence, std::move(item.bytes));
        break;
      }
      case MemberLog::Kind::kCompletion: {
        v1::OperationResult result;
        if (!result.ParseFromString(item.bytes)) return false;
        member->answers.Complete(item.sequence, item.index, result, item.on_stream);
        if (item.on_stream) member->completions.Add(item.sequence, item.index, result);
        member->owed.Add(item.sequence, item.index, item.on_stream, OwedReleases::Of(result));
        break;
      }
      case MemberLog::Kind::kParked: {
        ParkedVerb verb{
            .member = member, .sequence = item.sequence, .index = item.index, .on_stream = item.on_stream};
        // Versions before this one did not say which verb it was that they had begun.
        if (!verb.operation.ParseFromString(item.bytes) || verb.operation.verb_case() == 0) return false;
        parked->push_back({item.turn, std::move(verb)});
        break;
      }
      case MemberLog::Kind::kLent:
        for (size_t at = 0; at + sizeof(uint64_t) <= item.bytes.size(); at += sizeof(uint64_t)) {
          uint64_t packed = 0;
          std::memcpy(&packed, item.bytes.data() + at, sizeof(packed));
          lent->push_back(BlockRef::Unpack(packed));
        }
        break;
      case MemberLog::Kind::kHeard:
        break;
    }
  }
  return true;
}

// The verbs of all members wait again, in the order in which they came. An operation that was on a device starts anew, once the
// session is ready, and a match that waited for a tier is answered with what is resident; what stood behind one still does.
// True: there are such.
bool ParkAgain(Turn& turn, Session* session, std::vector<Recalled> parked) {
  // Verbs of one turn are of one member.
  std::stable_sort(parked.begin(), parked.end(),
                   [](const Recalled& a, const Recalled& b) { return a.turn < b.turn; });
  bool go_on = false;
  for (Recalled& recalled : parked) {
    recalled.verb.bytes = ParkedVerbs::BytesOf(recalled.verb.operation, session->terms.ranks);
    const uint64_t due = session->parked.WaitOf(recalled.verb.operation).due;
    if (due > session->passed) {
      session->parked.Name(due, BlockIdsOf(recalled.verb.operation));
      session->parked.Park(due, std::move(recalled.verb));
    } else if (Batches::StandLast(turn, &recalled.verb).ok()) {
      session->parked.ParkBehind(std::move(recalled.verb));
      go_on = true;
    }
  }
  return go_on;
}

// None, where a later build has kept one that this one does not know.
v1::PriorityClass PriorityOf(uint32_t kept) {
  return v1::PriorityClass_IsValid(static_cast<int>(kept)) ? static_cast<v1::PriorityClass>(kept)
                                                           : v1::PRIORITY_CLASS_UNSPECIFIED;
}

}  // namespace

RecoveredPool Space::Recover(Inheritance inheritance, std::vector<std::shared_ptr<Session>>* resumed) {
  MutexLock growth(&growth_mu);
  kept_table_ = std::move(inheritance.table);
  places_ = std::move(inheritance.places);
  kept_places_ = std::move(inheritance.kept_places);
  const auto begin = std::chrono::steady_clock::now();
  uint64_t bytes = 0;
  std::vector<BlockRange> there;
  for (const SlabRow& row : inheritance.rows) {
    // The null block is no part of the pool's capacity, and may be all of the first slab.
    if (row.end_block() > 1) there.push_back({std::max(1u, row.first_block), row.end_block()});
    bytes += row.bytes;
  }
  std::sort(there.begin(), there.end(),
            [](const BlockRange& a, const BlockRange& b) { return a.first < b.first; });
  slab_bytes_.store(bytes, std::memory_order_relaxed);
  SpaceTurn turn(*this);
  // Before anybody may ask for its memory.
  const KeptShares shares = table->shares();
  state.give_back.share_blocks = std::min(shares.share_blocks, facts.geometry.max_blocks - 1);
  state.give_back.of_operator = {.limit_blocks = shares.operator_limit_blocks,
                                 .weight = shares.operator_weight,
                                 .priority = PriorityOf(shares.operator_priority)};
  state.give_back.kept = {.limit_blocks = shares.rule_limit_blocks,
                          .weight = shares.rule_weight,
                          .priority = PriorityOf(shares.rule_priority),
                          .asked = PriorityOf(shares.asked_priority)};
  state.give_back.rule.assign(shares.rule, std::min<size_t>(shares.rule_bytes, sizeof(shares.rule)));
  state.give_back.of_rule = state.give_back.kept;
  ApplyTerms();
  // Before the pool forgets which turn was torn.
  for (Resumable& old : inheritance.sessions) {
    for (Resumable::Member& member : old.members) {
      member.log->Follow(&state.pool);
      member.log->ForgetTorn();
      member.old->keeps = !member.log->unmaps();
    }
  }
  const RecoveredPool found = state.pool.Recover(turn.now, there);
  if (places_ != nullptr) state.give_back.OnPlaces(true, NowMs());
  state.growth.Adopt(std::move(inheritance.rows), turn.now);
  for (Resumable& old : inheritance.sessions) {
    if (WhyLost why = Resume(turn, found, &old); !why.lost()) {
      resumed->push_back(old.session);
    } else {
      const SessionTerms& terms = old.session->terms;
      inheritance.lost.push_back({.id = terms.id, .client_name = terms.client_name, .why = std::move(why)});
      // A daemon that comes after this one may find a part of its logs.
      for (const Resumable::Member& member : old.members) {
        if (member.log != nullptr) member.log->OnEnded();
      }
      for (const auto& member : old.session->members) member->log->OnEnded();
    }
  }
  std::erase_if(inheritance.members, [&](const std::shared_ptr<OldMember>& member) {
    return std::any_of(resumed->begin(), resumed->end(),
                       [&](const auto& session) { return session->terms.id == member->session; });
  });
  RecoveredPool ended = found;
  ended.sessions.clear();
  for (const RecoveredPool::Session& session : found.sessions) {
    if (state.sessions.of(session.holder) == nullptr) ended.sessions.push_back(session);
  }
  state.sessions.AddMappingProcesses(inheritance.members.size(), CountKeeping(inheritance.members));
  state.old_sessions.Adopt(ended, std::move(inheritance.members));
  LookWhetherItDoubts();
  Recovered& recovered = state.sessions.recovered();
  for (LostSession& lost : inheritance.lost) {
    LogInfo("session not resumed", {{"session", lost.id}, {"reason", lost.why.text}});
    recovered.Lose(std::move(lost));
  }
  recovered.any = true;
  recovered.blocks = found;
  recovered.blocks.sessions.clear();
  // What sessions that go on have leased is leased again.
  recovered.blocks.quarantined = state.pool.counts()[static_cast<size_t>(BlockState::kQuarantined)];
  recovered.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return found;
}

WhyLost Space::Resume(Turn& turn, const RecoveredPool& found, Resumable* old) {
  Session* const session = old->session.get();
  // One whose entering was torn was told nothing.
  std::erase_if(old->members, [](const auto& member) { return !member.log->entered(); });
  std::sort(old->members.begin(), old->members.end(),
            [](const auto& a, const auto& b) { return a.log->index() < b.log->index(); });
  for (Resumable::Member& member : old->members) {
    if (WhyLost over = member.log->WhyOver(found.half_turn); over.lost()) return over;
    const MemberIdentity& identity = member.identity;
    if (ProcessEnded(identity.credentials.pidfd->get())) {
      return {SessionLoss::kDied,
              absl::StrCat("member ", member.log->index(), " (pid ", identity.credentials.pid, ") died")};
    }
    if (member.log->index() != session->members.size() ||
        !session->CheckRole(identity.scheduler, identity.rank).ok()) {
      return {SessionLoss::kIncomplete, "not all of its members were kept"};
    }
    session->AddMember(std::move(member.identity))->KeepIn(std::move(member.log));
  }
  const auto holds =
      std::find_if(found.sessions.begin(), found.sessions.end(),
                   [&](const RecoveredPool::Session& other) { return other.id == session->terms.id; });
  if (holds == found.sessions.end() || session->members.empty())
    return {SessionLoss::kIncomplete, "it was never ready"};
  const BlockRef sink = session->members.front()->log->sink();
  if (sink == kNullRef || state.pool.holds(holds->holder, sink.id) == 0)
    return {SessionLoss::kIncomplete, "it was never ready"};
  if (std::count(session->by_rank.begin(), session->by_rank.end(), nullptr) > 0) {
    return {SessionLoss::kIncomplete, "not all of its members were kept"};
  }
  std::vector<Recalled> parked;
  std::vector<BlockRef> lent;
  for (const auto& member : session->members) {
    if (!RecallLog(member.get(), &parked, &lent))
      return {SessionLoss::kDamaged, "the log of a member is damaged"};
  }
  session->UpdatePassed();
  if (!state.pool.Resume(holds->holder, session->limits()))
    return {SessionLoss::kDamaged, "the records of its blocks are damaged"};
  // All of this is done in the turn of the recovery, or not at all.
  const Turn::Unbroken unbroken(turn);
  // Blocks that operations would have written: none of them was ever over.
  std::vector<Verdict> verdicts(lent.size());
  state.pool.Release(holds->holder, turn.now, lent, absl::MakeSpan(verdicts));
  for (const auto& member : session->members) member->log->Return();
  session->holder = holds->holder;
  session->sink = sink;
  if (ParkAgain(turn, session, std::move(parked))) batches.GoOnWhenReady(old->session);
  session->CountParked();
  state.sessions.Resume(turn, session);
  return {};
}

void Space::CollectOldSessions() {
  std::vector<std::shared_ptr<OldMember>> members;
  {
    SpaceLock lock(*this);
    members = state.old_sessions.members();
  }
  std::erase_if(members, [](const auto& member) { return !ProcessEnded(member->pidfd->get()); });
  const absl::Span<const std::shared_ptr<OldMember>> ended(members);
  for (size_t from = 0; from < ended.size(); from += kOldMembersSlice) {
    const auto slice = ended.subspan(from, kOldMembersSlice);
    {
      SpaceTurn turn(*this);
      state.sessions.RemoveMappingProcesses(turn, slice.size(), CountKeeping(slice));
      state.old_sessions.OnEnded(slice);
    }
    GiveWay();
  }
}

}  // namespace kvpool
