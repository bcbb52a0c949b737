#include "server/space/member_log.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// Pages of it come when they are first used, and it begins anew whenever all was heard: most members use few.
constexpr size_t kBytes = 4 << 20;
// An operation on a device may bring megabytes of signals. A session that has one that large does not go on.
constexpr size_t kMostParkedBytes = 256 << 10;
constexpr char kMagic[8] = {'k', 'v', 'p', 'm', 'e', 'm', 'b', '3'};
// A batch that has ended so many daemons may be what ends them: it is not said to another.
constexpr uint64_t kMostTornBatches = 3;

// The process may be killed between any two stores: what is in front of it is there before what is behind it.
void Ordered() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Whether holds are to be given back once the member has heard of it.
bool Owes(const v1::OperationResult& result) {
  return result.prune().released() > 0 || result.compact().released_blocks_size() > 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemberLog>> MemberLog::Make() {
  ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Make("kvpool-member", kBytes));
  std::unique_ptr<MemberLog> log(new MemberLog(std::move(memory)));
  std::memcpy(log->header().magic, kMagic, sizeof(kMagic));
  return log;
}

absl::StatusOr<std::unique_ptr<MemberLog>> MemberLog::Map(UniqueFd fd) {
  ASSIGN_OR_RETURN(SharedMemory memory, SharedMemory::Map(std::move(fd)));
  std::unique_ptr<MemberLog> log(new MemberLog(std::move(memory)));
  if (log->memory_.bytes() != kBytes || std::memcmp(log->header().magic, kMagic, sizeof(kMagic)) != 0 ||
      !log->Sound()) {
    return absl::DataLossError("the log of a member is damaged");
  }
  return log;
}

void MemberLog::OnEntered(uint32_t index) {
  header().index = index;
  Ordered();
  header().made = turn();
}

bool MemberLog::Sound() const {
  Header& h = header();
  if (h.end < h.begin) h.end = h.begin;  // Add was about to say so.
  if (h.end - h.begin > room()) return false;
  for (uint64_t at = h.begin; at < h.end;) {
    if (h.end - at < sizeof(Entry)) return false;
    const Entry entry = EntryAt(at);
    if (entry.bytes > room() || entry.size() > h.end - at) return false;
    at += entry.size();
  }
  return true;
}

void MemberLog::Put(uint64_t at, const void* from, uint64_t bytes) const {
  char* const base = memory_.data() + sizeof(Header);
  const uint64_t place = at % room(), first = std::min(bytes, room() - place);
  std::memcpy(base + place, from, first);
  std::memcpy(base, static_cast<const char*>(from) + first, bytes - first);
}

void MemberLog::Get(uint64_t at, void* to, uint64_t bytes) const {
  const char* const base = memory_.data() + sizeof(Header);
  const uint64_t place = at % room(), first = std::min(bytes, room() - place);
  std::memcpy(to, base + place, first);
  std::memcpy(static_cast<char*>(to) + first, base, bytes - first);
}

MemberLog::Entry MemberLog::EntryAt(uint64_t at) const {
  Entry entry;
  Get(at, &entry, sizeof(entry));
  return entry;
}

bool MemberLog::Append(Entry entry, std::string_view bytes) {
  Header& h = header();
  entry.turn = turn();
  entry.bytes = static_cast<uint32_t>(bytes.size());
  if (h.begin == h.end) {
    // Its first pages are used over and over.
    h.begin = (h.end + room() - 1) / room() * room();
    Ordered();
    h.end = h.begin;
  }
  if (entry.size() > room() - (h.end - h.begin)) return false;
  Put(h.end, &entry, sizeof(entry));
  Put(h.end + sizeof(entry), bytes.data(), bytes.size());
  Ordered();
  h.end += entry.size();
  Ordered();
  AddSlot(entry);
  return true;
}

void MemberLog::AddSlot(const Entry& entry) {
  const uint64_t number = first_slot_ + slots_.size();
  slots_.push_back({.size = entry.size(), .kind = entry.kind, .on_stream = entry.on_stream != 0});
  switch (entry.kind) {
    case Kind::kAnswer:
      answers_.emplace_back(entry.sequence, number);
      return;
    case Kind::kParked:
      parked_[{entry.sequence, entry.index}] = number;
      return;
    case Kind::kHeard:
      slots_.back().dead_since = entry.turn;
      if (const auto owing = owing_.find({entry.sequence, entry.index}); owing != owing_.end()) {
        SlotOf(owing->second).dead_since = entry.turn;
        owing_.erase(owing);
      }
      return;
    case Kind::kLent: {
      // An operation that begins anew writes others: what it had before was given back.
      uint64_t& lent = lent_.try_emplace({entry.sequence, entry.index}, number).first->second;
      if (lent != number) SlotOf(lent).dead_since = entry.turn;
      lent = number;
      return;
    }
    case Kind::kCompletion:
      if (const auto lent = lent_.find({entry.sequence, entry.index}); lent != lent_.end()) {
        SlotOf(lent->second).dead_since = entry.turn;
        lent_.erase(lent);
      }
      if (const auto verb = parked_.find({entry.sequence, entry.index}); verb != parked_.end()) {
        SlotOf(verb->second).dead_since = entry.turn;
        parked_.erase(verb);
      }
      // A unary call's is a part of its answer, and goes with that.
      if (entry.on_stream == 0) {
        answers_.emplace_back(entry.sequence, number);
      } else {
        completions_[{entry.sequence, entry.index}] = number;
      }
      return;
  }
}

void MemberLog::Trim() {
  Header& h = header();
  while (!slots_.empty() && slots_.front().dead_since != 0) {
    // What ends it may be torn: then it is there still.
    const Slot& front = slots_.front();
    const bool comes_back = front.kind == Kind::kParked || front.kind == Kind::kLent || front.owes;
    if (comes_back && front.dead_since >= turn()) break;
    h.begin += slots_.front().size;
    Ordered();
    unfinished_ -= slots_.front().unfinished;
    slots_.pop_front();
    ++first_slot_;
  }
  UpdateLossy();
}

void MemberLog::Add(uint64_t sequence, std::string_view answer) {
  if (Append({.sequence = sequence, .kind = Kind::kAnswer}, answer)) return;
  header().unlogged = std::max(header().unlogged, sequence);
}

void MemberLog::Park(uint64_t sequence, uint32_t index, bool on_stream, const v1::Operation& operation) {
  if (operation.ByteSizeLong() > kMostParkedBytes ||
      !Append({.sequence = sequence, .kind = Kind::kParked, .index = index, .on_stream = on_stream},
              operation.SerializeAsString())) {
    Lose({sequence, index}, on_stream);
  }
}

void MemberLog::Lend(uint64_t sequence, uint32_t index, absl::Span<const BlockRef> blocks) {
  if (blocks.empty()) return;
  std::string refs;
  for (const BlockRef block : blocks) {
    const uint64_t packed = block.Pack();
    refs.append(reinterpret_cast<const char*>(&packed), sizeof(packed));
  }
  if (!Append({.sequence = sequence, .kind = Kind::kLent, .index = index}, refs))
    header().unlogged = UINT64_MAX;
}

void MemberLog::Owe(Id id) {
  const uint64_t number = first_slot_ + slots_.size() - 1;
  SlotOf(number).owes = true;
  owing_[id] = number;
}

void MemberLog::Hear(uint64_t sequence, uint32_t index) {
  const auto owing = owing_.find({sequence, index});
  if (owing == owing_.end()) return;
  if (!Append({.sequence = sequence, .kind = Kind::kHeard, .index = index}, "")) {
    // Another daemon would give back again.
    header().unlogged = UINT64_MAX;
    SlotOf(owing->second).dead_since = turn();
    owing_.erase(owing);
  }
  Trim();
}

void MemberLog::Return() {
  for (const auto& [id, number] : lent_) SlotOf(number).dead_since = turn();
  lent_.clear();
}

void MemberLog::Complete(uint64_t sequence, uint32_t index, const v1::OperationResult& result) {
  const Id id{sequence, index};
  const auto verb = parked_.find(id);
  const auto lost = lost_.find(id);
  if (verb == parked_.end() && lost == lost_.end()) return;
  const bool on_stream = verb == parked_.end() ? lost->second : SlotOf(verb->second).on_stream;
  if (Append({.sequence = sequence, .kind = Kind::kCompletion, .index = index, .on_stream = on_stream},
             result.SerializeAsString())) {
    if (Owes(result)) Owe(id);
    return Regain(id);
  }
  if (verb != parked_.end()) {
    Slot& slot = SlotOf(verb->second);
    slot.dead_since = turn();
    slot.unfinished = true;
    ++unfinished_;
    parked_.erase(verb);
  }
  if (on_stream) return Lose(id, on_stream);
  // It is a part of its answer.
  header().unlogged = std::max(header().unlogged, sequence);
  Regain(id);
}

void MemberLog::Lose(Id id, bool on_stream) {
  lost_[id] = on_stream;
  UpdateLossy();
}

void MemberLog::Regain(Id id) {
  lost_.erase(id);
  Ordered();
  UpdateLossy();
}

void MemberLog::Confirm(uint64_t sequence, uint32_t index) {
  const auto completion = completions_.find({sequence, index});
  if (completion == completions_.end()) return Regain({sequence, index});
  Slot& slot = SlotOf(completion->second);
  if (!slot.owes) slot.dead_since = turn();
  completions_.erase(completion);
  Trim();
}

void MemberLog::Fold(uint64_t sequence, uint32_t index) {
  const auto completion = completions_.find({sequence, index});
  if (completion == completions_.end()) {
    if (!lost_.contains({sequence, index})) return;
    header().unlogged = std::max(header().unlogged, sequence);
    return Regain({sequence, index});
  }
  answers_.emplace_back(sequence, completion->second);
  completions_.erase(completion);
}

void MemberLog::RaiseFloor(uint64_t floor) {
  header().floor = floor;
  Ordered();
  while (!answers_.empty() && answers_.front().first <= floor) {
    Slot& slot = SlotOf(answers_.front().second);
    if (!slot.owes) slot.dead_since = turn();
    answers_.pop_front();
  }
  Trim();
}

void MemberLog::SetFence(uint64_t step) {
  Header& h = header();
  if (h.fence_turn != turn()) {
    h.fence_before = h.fence;
    Ordered();
    h.fence_turn = turn();
    Ordered();
  }
  h.fence = step;
}

void MemberLog::Set(Mark* mark, bool on) {
  if (on == mark->is_on()) return;
  if (on) {
    // What ceased in this very turn was there before, and is again.
    if (mark->off >= turn()) mark->off = mark->on < turn() ? 0 : turn() - 1;
    Ordered();
    if (mark->on <= mark->off) mark->on = turn();
  } else {
    mark->off = turn();
  }
  Ordered();
}

void MemberLog::Forget(Mark* mark) const {
  const uint64_t torn = turn();
  if (mark->off >= torn) mark->off = 0;
  if (mark->on >= torn) mark->on = 0;
}

void MemberLog::ForgetTorn() {
  Header& h = header();
  const uint64_t torn = turn();
  for (uint64_t at = h.begin; at < h.end; at += EntryAt(at).size()) {
    if (EntryAt(at).turn < torn) continue;
    h.end = at;
    break;
  }
  // A close that was torn before its end was written has left the other half.
  if (h.ended == 0 || h.ended >= torn) h.ended = h.unmaps = 0;
  // What began in that turn never did. What was done in it was not, and its beginning is what counts.
  if (h.begun >= torn) {
    h.begun = h.done = 0;
    ++h.torn_batches;
  }
  if (h.done >= torn) h.done = 0;
  if (h.made >= torn) h.made = 0;
  if (h.warmup_done >= torn) h.warmup_done = 0;
  if (h.fence_turn >= torn) h.fence = h.fence_before;
  Forget(&h.unsettled);
  Forget(&h.lossy);
}

WhyLost MemberLog::WhyOver(uint64_t half_turn) const {
  const Header& h = header();
  if (h.made <= half_turn) return {SessionLoss::kTorn, "a turn was too large to be undone"};
  if (h.torn_batches >= kMostTornBatches) {
    return {SessionLoss::kTorn,
            absl::StrCat("its batch was under way when ", h.torn_batches, " daemons ended")};
  }
  if (h.ended != 0) return {SessionLoss::kEnded, "it had ended"};
  if (h.begun > h.done) return {SessionLoss::kTorn, "a large batch of it was half done"};
  if (h.unsettled.is_on()) return {SessionLoss::kNotKept, "it had late releases or episodes"};
  if (h.lossy.is_on()) return {SessionLoss::kNoRoom, "more of it waited than there was room to keep"};
  if (h.unlogged > h.floor) return {SessionLoss::kNoRoom, "an answer to it was too large to be kept"};
  return {};
}

std::vector<MemberLog::Item> MemberLog::Items() {
  const Header& h = header();
  std::vector<Item> items;
  std::set<Id> heard;
  for (uint64_t at = h.begin; at < h.end;) {
    const Entry entry = EntryAt(at);
    AddSlot(entry);
    if (entry.kind == Kind::kHeard) heard.emplace(entry.sequence, entry.index);
    Item item{.kind = entry.kind,
              .index = entry.index,
              .sequence = entry.sequence,
              .turn = entry.turn,
              .on_stream = entry.on_stream != 0,
              .bytes = std::string(entry.bytes, '\0')};
    Get(at + sizeof(entry), item.bytes.data(), entry.bytes);
    v1::OperationResult result;
    if (entry.kind == Kind::kCompletion && result.ParseFromString(item.bytes) && Owes(result))
      Owe({entry.sequence, entry.index});
    items.push_back(std::move(item));
    at += entry.size();
  }
  std::erase_if(items, [&](const Item& item) {
    return (item.kind == Kind::kParked && !parked_.contains({item.sequence, item.index})) ||
           (item.kind == Kind::kLent && !lent_.contains({item.sequence, item.index})) ||
           (item.kind == Kind::kCompletion && heard.contains({item.sequence, item.index})) ||
           item.kind == Kind::kHeard || (item.kind == Kind::kAnswer && item.sequence <= h.floor);
  });
  return items;
}

}  // namespace kvpool
