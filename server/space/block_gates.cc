#include "server/space/block_gates.h"

#include "proto/support/check.h"

namespace kvpool {

BlockGates::Id BlockGates::first(uint32_t block) const {
  const auto line = lines_.find(block);
  return line == lines_.end() ? 0 : line->second.first->who->id;
}

bool BlockGates::may_go(Id id) const {
  const auto stander = standers_.find(id);
  return stander != standers_.end() && stander->second.behind == 0;
}

BlockGates::Id BlockGates::Enter() {
  const Id id = ++last_id_;
  standers_[id].id = id;
  return id;
}

std::vector<BlockGates::Place>& BlockGates::Room(Id id, size_t blocks, Stander** who) {
  *who = &standers_.at(id);
  std::vector<Place>& room = (*who)->places.emplace_back();
  room.reserve(blocks);
  return room;
}

void BlockGates::StandLast(Id id, absl::Span<const uint32_t> blocks) {
  Stander* who;
  std::vector<Place>& room = Room(id, blocks.size(), &who);
  for (const uint32_t block : blocks) {
    Line& line = lines_[block];
    if (line.last != nullptr && line.last->who == who) continue;
    Place* const place = &room.emplace_back(Place{.who = who, .block = block});
    if (line.first == nullptr) {
      line = {.first = place, .last = place};
      continue;
    }
    line.last->next = place;
    line.last = place;
    ++who->behind;
  }
}

void BlockGates::StandFirst(Id id, absl::Span<const uint32_t> blocks) {
  Stander* who;
  std::vector<Place>& room = Room(id, blocks.size(), &who);
  for (const uint32_t block : blocks) {
    Line& line = lines_[block];
    if (line.first != nullptr && line.first->who == who) continue;
    Place* const place = &room.emplace_back(Place{.who = who, .block = block, .next = line.first});
    if (line.first == nullptr) {
      line.last = place;
    } else {
      ++line.first->who->behind;
    }
    line.first = place;
  }
}

bool BlockGates::Leave(Id id, size_t most, std::vector<Id>* next) {
  const auto stander = standers_.find(id);
  KVPOOL_CHECK(stander != standers_.end(), "%lu stands nowhere", id);
  std::vector<std::vector<Place>>& rooms = stander->second.places;
  for (; !rooms.empty(); rooms.pop_back()) {
    for (std::vector<Place>& room = rooms.back(); !room.empty(); room.pop_back(), --most) {
      if (most == 0) return true;
      LeaveOne(room.back(), next);
    }
  }
  standers_.erase(stander);
  return false;
}

void BlockGates::LeaveOne(const Place& place, std::vector<Id>* next) {
  const auto found = lines_.find(place.block);
  Line& line = found->second;
  if (line.first != &place) {
    // There are no more in front of it than came since it began to leave.
    Place* before = line.first;
    while (before->next != &place) before = before->next;
    before->next = place.next;
    if (place.next == nullptr) line.last = before;
    return;
  }
  if (place.next == nullptr) {
    lines_.erase(found);
    return;
  }
  line.first = place.next;
  Stander* const follower = place.next->who;
  if (--follower->behind == 0) next->push_back(follower->id);
}

}  // namespace kvpool
