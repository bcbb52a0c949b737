#include "server/space/long_match.h"

#include <algorithm>

#include "server/events/event_log.h"

namespace kvpool {
namespace {

// So many prefixes are tried whose windows were there when they were looked up.
constexpr int kTries = 4;

}  // namespace

v1::MissReason WireReason(MissReason reason) {
  switch (reason) {
    case MissReason::kNone:
      return v1::MISS_REASON_NONE;
    case MissReason::kNeverSeen:
      return v1::MISS_REASON_NEVER_SEEN;
    case MissReason::kEvicted:
      return v1::MISS_REASON_EVICTED;
    case MissReason::kCredit:
      return v1::MISS_REASON_CREDIT;
    case MissReason::kCap:
      return v1::MISS_REASON_CAP;
    case MissReason::kWindow:
      return v1::MISS_REASON_WINDOW;
  }
  return v1::MISS_REASON_NONE;
}

void AppendRefs(absl::Span<const BlockRef> refs, google::protobuf::RepeatedField<uint64_t>* wire) {
  wire->Reserve(wire->size() + static_cast<int>(refs.size()));
  for (const BlockRef ref : refs) wire->AddAlreadyReserved(ref.Pack());
}

void LogMatch(EventLog* log, uint64_t space, uint64_t session, TimeMs now, const GroupQuery& query,
              absl::Span<const uint64_t> words) {
  log->Add({.kind = EventKind::kMatch,
            .group = static_cast<uint8_t>(query.group),
            .words = static_cast<uint32_t>(words.size()),
            .time_ms = now,
            .space = space,
            .session = session,
            .tokens_per_block = query.tokens_per_block},
           words);
}

LongMatch::LongMatch(SpaceState* state, EventLog* log, Session* session, const v1::Match& match)
    : state_(*state), log_(log), session_(session), match_(match) {}

bool LongMatch::Run(Turn& turn, v1::MatchResult* answer) {
  if (!ReadKeys(turn)) return false;
  search_ = std::make_unique<MatchSearch>(state_.pool, queries_);
  steps_ = search_->asked_steps();
  taken_.resize(queries_.size());
  for (size_t q = 0; q < queries_.size(); ++q) windowed_ = windowed_ || search_->window(q) != 0;
  if (windowed_ && !Look(turn)) return false;
  if (!TakeRuns(turn) || !TakeWindows(turn) || !Trim(turn)) return false;
  if (steps_ < search_->asked_steps() && !CountMissed(turn)) return false;
  state_.pool.CountLookup({.blocks = keys_.size(),
                           .tokens = search_->asked_steps() * search_->step_tokens(),
                           .hit_tokens = steps_ * search_->step_tokens()});
  if (miss_ == MissReason::kCredit) state_.growth.CountPromises();
  answer->set_tokens(steps_ * search_->step_tokens());
  answer->set_miss(steps_ == search_->asked_steps() ? v1::MISS_REASON_NONE
                   : session_->ready                ? WireReason(miss_)
                                                    : v1::MISS_REASON_GROWING);
  for (size_t q = 0; q < queries_.size(); ++q) {
    AppendRefs(taken_[q], answer->mutable_groups(static_cast<int>(q))->mutable_blocks());
  }
  return true;
}

bool LongMatch::Pause(Turn& turn, size_t names) {
  turn.Worked(names);
  turn.Breathe();
  return !session_->ended;
}

bool LongMatch::ReadKeys(Turn& turn) {
  std::vector<size_t> ends;
  for (const v1::GroupKeys& group : match_.groups()) {
    const std::string_view bytes = group.keys();
    for (size_t at = 0; at < bytes.size(); at += group.key_bytes()) {
      keys_.push_back(BlockKey::From(bytes.substr(at, group.key_bytes()), group.group()));
      if (keys_.size() % Turn::kNames == 0 && !Pause(turn, Turn::kNames)) return false;
    }
    ends.push_back(keys_.size());
  }
  size_t begin = 0;
  for (int i = 0; i < match_.groups_size(); ++i) {
    const uint32_t group = match_.groups(i).group();
    const size_t end = ends[static_cast<size_t>(i)];
    queries_.push_back({group, absl::MakeConstSpan(keys_).subspan(begin, end - begin),
                        state_.facts.layout.groups(static_cast<int>(group)).tokens_per_block()});
    begin = end;
  }
  if (log_ == nullptr) return true;
  std::vector<uint64_t> words;
  for (const BlockKey& key : queries_[0].keys) {
    words.push_back(log_->Hash(key));
    if (words.size() % Turn::kNames == 0 && !Pause(turn, Turn::kNames)) return false;
  }
  LogMatch(log_, state_.facts.id, session_->terms.id, turn.now, queries_[0], words);
  return true;
}

bool LongMatch::Look(Turn& turn) {
  search_->Shorten(steps_);
  while (!search_->Look(Turn::kNames)) {
    if (!Pause(turn, Turn::kNames)) return false;
  }
  if (search_->steps() == steps_) return true;
  miss_ = search_->WhyNotLonger();
  steps_ = search_->steps();
  return true;
}

bool LongMatch::TakeRuns(Turn& turn) {
  std::vector<size_t> full;
  for (size_t q = 0; q < queries_.size(); ++q) {
    if (search_->window(q) != 0) continue;
    full.push_back(q);
    run_blocks_ += search_->BlocksPerStep(q);
  }
  if (full.empty()) return true;
  const uint64_t steps_per_part = std::max<uint64_t>(1, Turn::kNames / run_blocks_);
  MatchOutcome found;
  for (uint64_t at = 0; at < steps_;) {
    const uint64_t steps = std::min(steps_per_part, steps_ - at);
    std::vector<GroupQuery> part;
    for (const size_t q : full) {
      part.push_back(queries_[q]);
      part.back().keys = part.back().keys.subspan(BlocksOf(q, at), BlocksOf(q, steps));
    }
    if (!session_->ready) {
      steps_ = at;
      break;
    }
    state_.pool.MatchOn(session_->holder, turn.now, part, &found);
    for (size_t i = 0; i < full.size(); ++i) {
      taken_[full[i]].insert(taken_[full[i]].end(), found.blocks[i].begin(), found.blocks[i].end());
    }
    const uint64_t got = found.tokens / search_->step_tokens();
    at += got;
    if (got < steps) {
      steps_ = at;
      miss_ = found.miss;
    }
    if (!Pause(turn, steps * run_blocks_)) return false;
  }
  return !windowed_ || Look(turn);
}

bool LongMatch::TakeWindows(Turn& turn) {
  uint64_t window_blocks = 0;  // Those of one step.
  for (size_t q = 0; q < queries_.size(); ++q) {
    if (search_->window(q) != 0) window_blocks += search_->BlocksPerStep(q);
  }
  if (window_blocks == 0) return true;
  for (int tries = 0; steps_ > 0; ++tries) {
    if (tries == kTries || !session_->ready) {
      steps_ = 0;
      break;
    }
    uint64_t asked = 0, got = 0;
    for (size_t q = 0; q < queries_.size(); ++q) {
      if (search_->window(q) == 0) continue;
      asked += BlocksOf(q, steps_) - search_->First(q, steps_);
      // Behind one that came short the others are not tried.
      if (got + BlocksOf(q, steps_) - search_->First(q, steps_) == asked && !TakeWindow(turn, q, &got))
        return false;
    }
    if (got == asked) break;
    for (size_t q = 0; q < queries_.size(); ++q) {
      if (search_->window(q) != 0 && !GiveBack(turn, q, 0)) return false;
    }
    // A shorter prefix has its windows elsewhere. What it leaves has to be enough for them.
    const bool no_room = miss_ == MissReason::kCredit || miss_ == MissReason::kCap;
    if (!no_room) {
      --steps_;
    } else if (run_blocks_ > 0) {
      steps_ -= std::min(steps_, (asked - got + run_blocks_ - 1) / run_blocks_);
    } else {
      steps_ = std::min(steps_ - 1, got / window_blocks);
    }
    if (!Look(turn) || !Trim(turn)) return false;
  }
  return true;
}

// Keys that are no more than a window are found all or up to the first that is not there.
bool LongMatch::TakeWindow(Turn& turn, size_t q, uint64_t* got) {
  std::vector<BlockRef>& taken = taken_[q];
  taken.assign(static_cast<size_t>(search_->First(q, steps_)), kNullRef);
  MatchOutcome found;
  for (const size_t end = BlocksOf(q, steps_); taken.size() < end;) {
    const size_t part = std::min(end - taken.size(), Turn::kNames);
    GroupQuery query = queries_[q];
    query.keys = query.keys.subspan(taken.size(), part);
    if (!session_->ready) return true;
    state_.pool.MatchOn(session_->holder, turn.now, {&query, 1}, &found);
    const std::vector<BlockRef>& refs = found.blocks[0];
    taken.insert(taken.end(), refs.begin(), refs.end());
    *got += refs.size();
    if (refs.size() < part) miss_ = found.miss;
    if (!Pause(turn, part)) return false;
    if (refs.size() < part) return true;
  }
  return true;
}

bool LongMatch::Trim(Turn& turn) {
  for (size_t q = 0; q < queries_.size(); ++q) {
    if (!GiveBack(turn, q, BlocksOf(q, steps_))) return false;
  }
  return true;
}

bool LongMatch::GiveBack(Turn& turn, size_t q, size_t end) {
  std::vector<BlockRef>& taken = taken_[q];
  std::vector<BlockRef> held;
  std::vector<Verdict> verdicts;
  while (taken.size() > end) {
    const size_t begin = std::max(end, taken.size() - std::min(taken.size(), Turn::kNames));
    held.clear();
    for (size_t i = begin; i < taken.size(); ++i) {
      if (taken[i] != kNullRef) held.push_back(taken[i]);
    }
    verdicts.assign(held.size(), Verdict::kDone);
    state_.pool.Release(session_->holder, turn.now, held, absl::MakeSpan(verdicts));
    taken.resize(begin);
    if (!Pause(turn, held.size())) return false;
  }
  return true;
}

// A group without a window would have needed all keys behind the end, and one with a window those of its last one.
bool LongMatch::CountMissed(Turn& turn) {
  for (size_t q = 0; q < queries_.size(); ++q) {
    const uint64_t asked = search_->asked_steps();
    const size_t begin =
        search_->window(q) == 0 ? BlocksOf(q, steps_) : static_cast<size_t>(search_->First(q, asked));
    absl::Span<const BlockKey> keys = queries_[q].keys.subspan(begin, BlocksOf(q, asked) - begin);
    while (!keys.empty()) {
      const size_t part = std::min(keys.size(), Turn::kNames);
      state_.pool.CountMissed(turn.now, keys.first(part));
      keys.remove_prefix(part);
      if (!Pause(turn, part)) return false;
    }
  }
  return true;
}

}  // namespace kvpool
