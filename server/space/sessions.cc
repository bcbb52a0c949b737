#include "server/space/sessions.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/scoring/device_operation.h"

namespace kvpool {
namespace {

// A member that owes the daemon something, or sits on blocks, and has not called for this long is stale.
constexpr uint64_t kStaleOwingMs = 5000;
constexpr uint64_t kStaleIdleMs = 60000;
// Sessions for whose sinks room is made in one hold of the mutex, each at some 20 us. Many may become ready at once.
constexpr uint32_t kSinksTogether = 8;

// "session 7 ended: member 0 (pid 4711)"
std::string EndedBy(const Member& member) {
  return absl::StrCat("session ", member.session->terms.id, " ended: member ", member.index, " (pid ",
                      member.identity.credentials.pid, ")");
}

v1::OperationResult Aborted(const std::string& reason) {
  v1::OperationResult result;
  result.set_code(static_cast<int>(absl::StatusCode::kAborted));
  result.set_message(reason);
  return result;
}

}  // namespace

// ---------------------------------------------------------------------------------------- coming and going

absl::Status Sessions::Enter(const Turn& turn, Session* session) {
  // The promise may rest on slabs that were made and are not in the pool yet, as far as no other pending
  // session counts on them.
  uint32_t coming = growth_.coming_blocks();
  for (const Session* other : pending_) coming -= std::min(coming, pool_.unmet(other->holder));
  absl::StatusOr<Holder> holder = pool_.AddSession(session->limits(), coming, session->terms.id);
  if (!holder.ok()) return holder.status();
  session->holder = *holder;
  if (static_cast<size_t>(*holder) >= by_holder_.size()) by_holder_.resize(static_cast<size_t>(*holder) + 1);
  by_holder_[static_cast<size_t>(*holder)] = session;
  if (pool_.unmet(*holder) > 0) pending_.push_back(session);
  sessions_.push_back(session);
  last_used_ms_ = turn.now;
  // What it was promised may be cached today: that is not where it should come from.
  growth_.Want(session->limits().guaranteed);
  return absl::OkStatus();
}

void Sessions::Resume(const Turn& turn, Session* session) {
  const auto slot = static_cast<size_t>(session->holder);
  if (slot >= by_holder_.size()) by_holder_.resize(slot + 1);
  by_holder_[slot] = session;
  session->resumed = session->awaited = true;
  ++recovered_.waiting;
  if (!pool_.Promise(session->holder)) pending_.push_back(session);
  growth_.Want(pool_.unmet(session->holder));
  sessions_.push_back(session);
  for (Member* member : session->by_rank) member->maps = true;
  mapping_processes_ += session->terms.ranks;
  last_used_ms_ = turn.now;
}

void Sessions::CameBack(Session* session) {
  if (!std::exchange(session->awaited, false)) return;
  --recovered_.waiting;
  ++recovered_.back;
}

void Sessions::LoseAwaited(Session* session, EndKind kind, const Member* member) {
  // Who closes it is there.
  if (kind == EndKind::kClosed) return CameBack(session);
  if (!std::exchange(session->awaited, false)) return;
  --recovered_.waiting;
  const bool away = kind == EndKind::kHangup && member != nullptr && !member->joined;
  const SessionLoss loss = kind == EndKind::kMemberDied ? SessionLoss::kDied
                           : away                       ? SessionLoss::kAway
                                                        : SessionLoss::kOther;
  recovered_.Lose({.id = session->terms.id,
                   .client_name = session->terms.client_name,
                   .why = {.loss = loss, .text = session->end_reason}});
}

void Sessions::OnJoined(Turn& turn, Member* member, bool pressure) {
  Session* session = member->session;
  if (session->ended) {
    // One that came back has not heard of it.
    turn.deferred.hangups.push_back({member->identity.peer, session->end_reason});
    return;
  }
  member->joined = true;
  member->last_call_ms = turn.now;
  if (session->announced > 0) TellReady(turn, member, session->announced - 1);
  if (draining_) Post(member, v1::NOTICE_KIND_DRAIN, {});
  if (pressure) Post(member, v1::NOTICE_KIND_PRESSURE, {.value = pool_.available()});
  SendSlabs(turn, session);
  UpdateReady(turn, session);
}

void Sessions::OnSlabAck(Turn& turn, Member* member, const v1::SlabAck& ack) {
  Session* session = member->session;
  if (session->ended) return;
  member->last_call_ms = turn.now;
  member->crossed = false;  // It speaks in the order of what it does.
  absl::Status status = member->slabs.Acknowledge(ack.slab());
  if (status.ok() && !ack.error().empty()) status = absl::AbortedError(ack.error());
  if (!status.ok()) {
    return End(turn, session, EndKind::kRefusedSlab,
               absl::StrCat(EndedBy(*member), " could not map slab ", ack.slab(), ": ",
                            std::string(status.message())),
               nullptr);
  }
  growth_.OnMapped(turn.now);
  SendSlabs(turn, session);
  UpdateReady(turn, session);
  EnterSlabs(turn);
}

void Sessions::OnHangup(Turn& turn, Member* member) {
  End(turn, member->session, EndKind::kHangup, absl::StrCat(EndedBy(*member), " hung up"), member);
  FreeIfNeverReady(turn, member->session);
  member->hung_up = true;
  if (!member->session->gone) return;
  member->answers.ForgetAll();
  member->completions.Clear();
  member->owed = OwedReleases();
}

void Sessions::OnUndelivered(Turn& turn, Member* member) {
  End(turn, member->session, EndKind::kHangup,
      absl::StrCat(EndedBy(*member), " did not wait for the answer to its opening"), nullptr);
  FreeIfNeverReady(turn, member->session);
}

void Sessions::FreeIfNeverReady(Turn& turn, Session* session) {
  if (session->sink == kNullRef) Free(turn, session);
}

void Sessions::OnProcessDead(Turn& turn, Member* member) {
  if (member->dead) return;
  member->dead = true;
  if (member->maps) --mapping_processes_;
  if (std::exchange(member->keeps, false)) --keeping_processes_;
  last_used_ms_ = turn.now;
  Session* session = member->session;
  End(turn, session, EndKind::kMemberDied, absl::StrCat(EndedBy(*member), " died"), member);
  if (session->all_dead()) Free(turn, session);
}

void Sessions::End(Turn& turn, Session* session, EndKind kind, const std::string& reason,
                   const Member* except) {
  if (session->ended) return;
  session->ended = true;
  session->ready = false;
  if (kind == EndKind::kClosed) session->closer = except;
  for (const auto& member : session->members) {
    if (member->log == nullptr) continue;
    if (member.get() == session->closer && member->identity.gives_back) member->log->OnUnmaps();
    member->log->OnEnded();
  }
  session->end_reason = reason;
  LoseAwaited(session, kind, except);
  if (session->holder != kNobody) pool_.EndSession(session->holder);
  session->episodes = {};
  std::erase(pending_, session);
  behind_.erase(session->terms.id);
  unequipped_.erase(session->terms.id);
  for (const auto& operation : session->device_operations) {
    // It goes on, or is skipped if it has not begun; nobody hears what came of it.
    operation->abandoned.store(true, std::memory_order_release);
  }
  for (ParkedVerb& verb : session->parked.TakeRunning()) Complete(turn, std::move(verb), Aborted(reason));
  // Late releases go with the rest: holds end with the session.
  Deferred::Dropped dropped = {.session = session->shared_from_this(),
                               .verbs = std::exchange(session->parked, ParkedVerbs())};
  session->CountParked();
  if (dropped.verbs.on_host().names() + dropped.verbs.on_device().names() > Turn::kNames) {
    turn.deferred.dropped.push_back(std::move(dropped));
  } else {
    AnswerDropped(turn, dropped, dropped.verbs.PopSome(Turn::kNames));
  }
  PostAll(session, v1::NOTICE_KIND_ENDED, {.detail = reason});
  for (const auto& member : session->members) {
    // A member that has not come back to this daemon has no connection.
    if (member.get() == except || member->identity.peer == nullptr) continue;
    turn.deferred.hangups.push_back({member->identity.peer, reason});
  }
  turn.deferred.ended.push_back({session->terms.id, kind, reason});
  EnterSlabs(turn);
}

void Sessions::AnswerDropped(Turn& turn, const Deferred::Dropped& dropped, std::vector<ParkedVerb> verbs) {
  const v1::OperationResult aborted = Aborted(dropped.session->end_reason);
  for (ParkedVerb& verb : verbs) Complete(turn, std::move(verb), aborted);
}

uint64_t Sessions::Free(Turn& turn, Session* session) {
  KVPOOL_CHECK(session->ended, "session %lu is open", session->terms.id);
  const auto it = std::find(sessions_.begin(), sessions_.end(), session);
  if (it == sessions_.end()) return 0;  // It closed itself before.
  const uint32_t sinks = session->sink != kNullRef ? 1 : 0;
  if (!session->device_operations.empty()) {
    session->free_when_over = true;
    return session->holder == kNobody ? 0 : pool_.holds(session->holder) - sinks;
  }
  uint64_t holds = 0;
  if (session->holder != kNobody) {
    holds = pool_.FreeQuarantine(session->holder) - sinks;
    by_holder_[static_cast<size_t>(session->holder)] = nullptr;
    session->holder = kNobody;
  }
  sessions_.erase(it);
  session->gone = true;
  // Its processes may live on, and with them this session: they have no use for old answers.
  for (const auto& member : session->members) {
    member->answers.ForgetAll();
    if (!member->maps || member->dead) continue;
    if (member->identity.gives_back && member.get() == session->closer) continue;
    member->keeps = true;
    ++keeping_processes_;
  }
  last_used_ms_ = turn.now;
  turn.deferred.gone.push_back(session->terms.id);
  return holds;
}

uint32_t Sessions::SetDraining(bool draining) {
  draining_ = draining;
  uint32_t open = 0;
  for (Session* session : sessions_) {
    if (session->ended) continue;
    ++open;
    PostAll(session, v1::NOTICE_KIND_DRAIN, {.on = draining});
  }
  return open;
}

uint32_t Sessions::stale_members(uint64_t now) const {
  uint32_t stale = 0;
  for (const Session* session : sessions_) {
    const bool holds = session->holder != kNobody && pool_.holdings(session->holder).charged > 1;
    for (const auto& member : session->members) {
      const uint64_t quiet_ms = now - std::min(now, member->last_call_ms);
      const bool owes =
          member->slabs.unacknowledged() > 0 || (session->ended && !member->dead) ||
          (session->parked.any_waiting() && !member->identity.scheduler && member->fence <= session->passed);
      stale += (owes && quiet_ms >= kStaleOwingMs) || (holds && !member->dead && quiet_ms >= kStaleIdleMs);
    }
  }
  return stale;
}

// --------------------------------------------------------------------------------------------------- slabs

void Sessions::AddSlab(Turn& turn, SlabRow row) {
  growth_.Add(std::move(row), turn.now);
  for (Session* session : sessions_) {
    SendSlabs(turn, session);
    UpdateBehind(session);
  }
  EnterSlabs(turn);
}

void Sessions::SendSlabs(Turn& turn, Session* session) {
  if (session->ended) return;
  const std::vector<SlabRow>& slabs = growth_.slabs();
  for (uint32_t in_flight = session->slabs_in_flight(); in_flight < kMaxSlabsInFlight; ++in_flight) {
    // The rank that is furthest behind: ranks advance together.
    Member* next = nullptr;
    for (Member* member : session->by_rank) {
      if (member == nullptr || !member->joined || member->slabs.sent() == slabs.size()) continue;
      if (next == nullptr || member->slabs.sent() < next->slabs.sent()) next = member;
    }
    if (next == nullptr) break;
    const SlabRow& row = slabs[next->slabs.sent()];
    const uint32_t rank = next->identity.rank;
    OutgoingFrame out;
    out.session = session->shared_from_this();
    out.peer = next->identity.peer;
    out.slab = row.by_rank[rank];
    v1::Slab* slab = out.frame.mutable_slab();
    slab->set_slab(row.index);
    slab->set_first_block(row.first_block);
    slab->set_block_count(row.block_count);
    slab->set_bytes(row.bytes);
    slab->set_device_uuid(facts_.devices[rank]->uuid_bytes());
    slab->set_id(row.id);
    outbox_.Push(std::move(out));
    if (!std::exchange(next->maps, true)) ++mapping_processes_;
    next->slabs.Send(row.index);
    turn.deferred.send = true;
  }
}

std::vector<std::string> Sessions::Keepers() const {
  constexpr size_t kMostNamed = 4;
  std::vector<std::string> keepers;
  size_t more = 0;
  for (const Session* session : sessions_) {
    for (const auto& member : session->members) {
      if (!member->maps || member->dead) continue;
      const char* why = nullptr;
      if (session->ended) {
        why = "has ended, and its process lives on";
      } else if (!member->identity.gives_back) {
        why = "lets no slab be unmapped";
      } else if (member->slabs.mapped() < growth_.slabs().size()) {
        why = "has not mapped all slabs";
      }
      if (why == nullptr) continue;
      if (keepers.size() == kMostNamed) {
        ++more;
        continue;
      }
      keepers.push_back(absl::StrCat("session ", session->terms.id, " (", session->terms.client_name,
                                     ", pid ", member->identity.credentials.pid, ") ", why));
    }
  }
  if (more > 0) keepers.push_back(absl::StrCat(more, " more processes let none go"));
  if (keeping_processes_ > 0) {
    keepers.push_back(absl::StrCat(keeping_processes_, " processes of sessions that are gone live on"));
  }
  return keepers;
}

std::string Sessions::RigidOne() const {
  for (const Session* session : sessions_) {
    for (const auto& member : session->members) {
      if (session->ended || member->dead || member->identity.holes) continue;
      return absl::StrCat("session ", session->terms.id, " (", session->terms.client_name, ", pid ",
                          member->identity.credentials.pid, ")");
    }
  }
  return "";
}

bool Sessions::PutInOrder() {
  const auto slabs = static_cast<uint32_t>(growth_.slabs().size());
  const bool settled = std::all_of(sessions_.begin(), sessions_.end(), [&](const Session* session) {
    if (session->ended) return true;
    return (session->announced == 0 || session->announced == slabs) &&
           std::all_of(session->by_rank.begin(), session->by_rank.end(), [&](const Member* member) {
             return member == nullptr || member->slabs.sent() == 0 || member->slabs.mapped() == slabs;
           });
  });
  if (settled) growth_.PutInOrder();
  return growth_.in_order();
}

void Sessions::AskToUnmap(Turn& turn, uint32_t place, uint64_t until_ms) {
  const uint32_t slab = growth_.leaving()->index;
  for (Session* session : sessions_) {
    for (const auto& member : session->members) {
      if (member->dead || session->ended) continue;
      // A scheduler maps nothing, and is told of the capacity.
      const bool told = member->joined && member->identity.scheduler && member->identity.gives_back;
      if (!member->maps && !told) continue;
      if (member->maps) member->slabs.Leave(slab);
      member->leaves = true;
      OutgoingFrame out;
      out.session = session->shared_from_this();
      out.peer = member->identity.peer;
      out.frame.mutable_slab_leave()->set_slab(slab);
      out.frame.mutable_slab_leave()->set_capacity_blocks(growth_.made_blocks());
      out.frame.mutable_slab_leave()->set_deadline_ms(until_ms > turn.now ? until_ms - turn.now : 1);
      outbox_.Push(std::move(out));
      turn.deferred.send = true;
    }
    if (session->announced > place) {
      --session->announced;
      PostAll(session, v1::NOTICE_KIND_CAPACITY, {.value = growth_.blocks_of(session->announced) - 1});
    }
    UpdateReady(turn, session);
  }
}

void Sessions::OnSlabLeft(Turn& turn, Member* member, const v1::SlabLeft& left) {
  if (member->session->ended) {
    member->leaves = false;
    return;
  }
  member->last_call_ms = turn.now;
  if (!member->maps) {  // A scheduler: it was only told of the capacity.
    member->leaves = false;
    return;
  }
  if (std::exchange(member->crossed, false)) return;
  const std::optional<SlabRow>& leaving = growth_.leaving();
  if (std::exchange(member->leaves, false) && leaving.has_value() && left.slab() == leaving->index) return;
  End(turn, member->session, EndKind::kRefusedSlab,
      absl::StrCat(EndedBy(*member), " says that it has unmapped slab ", left.slab(),
                   ", which it was not asked to"),
      nullptr);
}

void Sessions::TakeBack(Turn& turn) {
  for (Session* session : sessions_) {
    for (const auto& member : session->members) {
      // Nothing is sent again to one that maps nothing.
      if (std::exchange(member->leaves, false)) member->crossed = member->maps && !session->ended;
    }
  }
  AddSlab(turn, growth_.TakeLeft());
}

uint32_t Sessions::unmet_blocks() const {
  uint32_t blocks = 0;
  for (const Session* session : pending_) blocks += pool_.unmet(session->holder);
  return blocks;
}

bool Sessions::all_left() const {
  // Nobody kept anything when the slab was asked back. Those of a session that has closed since may map it.
  if (keeping_processes_ > 0) return false;
  return std::none_of(sessions_.begin(), sessions_.end(), [](const Session* session) {
    return std::any_of(session->members.begin(), session->members.end(),
                       [](const auto& member) { return member->leaves && member->maps && !member->dead; });
  });
}

void Sessions::EnterSlabs(Turn& turn) {
  PromisePending(turn);  // A session that ended was promised something.
  while (!growth_.all_entered()) {
    if (!behind_.empty() && turn.now - growth_.slabs()[growth_.entered()].made_ms < kPatienceMs) break;
    // Each is ready again when it has mapped the slab after all.
    for (const auto& [id, session] : behind_) session->ready = false;
    behind_.clear();
    growth_.EnterNext(turn.now);
    PromisePending(turn);
    for (Session* session : sessions_) UpdateReady(turn, session);
  }
  // A sink is any free block. So where one session gets none the others get none, however many there are.
  while (!unequipped_.empty()) {
    Session* const first = unequipped_.begin()->second;
    UpdateReady(turn, first);
    if (!unequipped_.empty() && unequipped_.begin()->second == first) break;
  }
  growth_.EndIfDone();
}

void Sessions::PromisePending(Turn& turn) {
  std::vector<Session*> met;
  for (; !pending_.empty() && pool_.Promise(pending_.front()->holder); pending_.pop_front()) {
    met.push_back(pending_.front());
  }
  for (Session* session : met) UpdateReady(turn, session);
}

void Sessions::UpdateReady(Turn& turn, Session* session) {
  if (session->ended) return;
  const uint32_t mapped = std::min(session->mapped(), growth_.entered());
  Announce(turn, session, mapped);
  const bool has_mapped = growth_.entered() > 0 && mapped == growth_.entered();
  // What is left of the guarantee of one that goes on comes when others give it back: its blocks are its own meanwhile.
  const bool met = session->resumed || pool_.unmet(session->holder) == 0;
  session->ready = has_mapped && met && LeaseSink(turn, session);
  if (session->ready) CameBack(session);
  if (has_mapped && met && !session->ready) {
    unequipped_.emplace(session->terms.id, session);
  } else {
    unequipped_.erase(session->terms.id);
  }
  UpdateBehind(session);
}

void Sessions::Announce(Turn& turn, Session* session, uint32_t mapped) {
  if (session->announced >= mapped) return;
  while (session->announced < mapped) {
    const uint32_t place = session->announced++;
    for (const auto& member : session->members) {
      // Those that come later are told then.
      if (member->joined) TellReady(turn, member.get(), place);
    }
  }
  PostAll(session, v1::NOTICE_KIND_CAPACITY, {.value = growth_.blocks_of(mapped) - 1});
}

void Sessions::TellReady(Turn& turn, Member* member, uint32_t place) {
  OutgoingFrame out;
  out.session = member->session->shared_from_this();
  out.peer = member->identity.peer;
  out.frame.mutable_slab_ready()->set_slab(growth_.slabs()[place].index);
  out.frame.mutable_slab_ready()->set_capacity_blocks(growth_.blocks_of(place + 1));
  outbox_.Push(std::move(out));
  turn.deferred.send = true;
}

// A sink stays where it is for as long as its session, and with it the slab: it belongs into the first one.
bool Sessions::MakeRoomForSink(const Turn& turn) {
  constexpr uint32_t kMostLooked = 2048;
  const uint32_t end = growth_.blocks_of(1);
  // As long as the space may grow nothing is evicted for it.
  if (growth_.may_grow() || growth_.entered() < 2 || pool_.lowest_free() < end) return true;
  if (rooms_made_ == kSinksTogether) {
    turn.deferred.housekeep = true;
    return false;
  }
  ++rooms_made_;
  std::optional<BlockView> coldest;
  for (uint32_t b = 1; b < std::min(end, kMostLooked); ++b) {
    absl::StatusOr<BlockView> view = pool_.View(BlockId{b}, turn.now);
    if (!view.ok() || view->state != BlockState::kCached || view->children > 0) continue;
    if (!coldest.has_value() || view->idle_ms > coldest->idle_ms) coldest = *view;
  }
  if (coldest.has_value()) pool_.Reclaim(turn.now, {&coldest->ref, 1}, EvictReason::kBackground, nullptr);
  return true;
}

bool Sessions::LeaseSink(const Turn& turn, Session* session) {
  if (session->sink != kNullRef) return true;
  if (!MakeRoomForSink(turn)) return false;
  std::vector<BlockRef> sink;
  if (growth_.Lease(session->holder, turn.now, 1, 1, &sink).growing) return false;
  // Its guarantee covers it.
  KVPOOL_CHECK(sink.size() == 1, "session %lu: no block for its sink", session->terms.id);
  session->sink = sink.front();
  if (MemberLog* const log = session->members.front()->log.get()) log->SetSink(session->sink);
  return true;
}

void Sessions::UpdateBehind(Session* session) {
  if (session->ready && !growth_.all_entered() && session->mapped() <= growth_.entered()) {
    behind_.emplace(session->terms.id, session);
  } else {
    behind_.erase(session->terms.id);
  }
}

// ------------------------------------------------------------------------------------- notices and results

void Sessions::Post(Member* member, v1::NoticeKind kind, NoticeBoard::Text text) {
  member->notices.Post(kind, std::move(text));
  Touch(member);
}

void Sessions::PostAll(Session* session, v1::NoticeKind kind, const NoticeBoard::Text& text) {
  for (const auto& member : session->members) Post(member.get(), kind, text);
}

void Sessions::Touch(Member* member) {
  if (!std::exchange(member->touched, true)) touched_.push_back(member);
}

void Sessions::CollectWakes(Turn& turn) {
  for (Member* member : touched_) {
    member->touched = false;
    if (member->listener != nullptr && member->pending()) turn.deferred.wake.push_back(member->listener);
  }
  touched_.clear();
  rooms_made_ = 0;
}

void Sessions::Complete(Turn& turn, ParkedVerb verb, const v1::OperationResult& result) {
  if (verb.member->log != nullptr) verb.member->log->Complete(verb.sequence, verb.index, result);
  verb.member->answers.Complete(verb.sequence, verb.index, result, verb.on_stream);
  // A session that is gone keeps nothing for a member that has hung up.
  if (verb.on_stream && !(verb.member->hung_up && verb.member->session->gone)) {
    verb.member->completions.Add(verb.sequence, verb.index, result);
    Touch(verb.member);
  }
  if (!verb.waiters.empty()) turn.deferred.answers.push_back({std::move(verb.waiters), result});
}

}  // namespace kvpool
