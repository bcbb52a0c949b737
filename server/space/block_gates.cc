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
  lines_.reserve(lines_.size() + blocks);
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

void BlockGates::Leave(Id id, std::vector<Id>* next) {
  const auto stander = standers_.find(id);
  KVPOOL_CHECK(stander != standers_.end() && stander->second.behind == 0, "%lu stands behind others", id);
  for (const std::vector<Place>& room : stander->second.places) {
    for (const Place& place : room) {
      const auto line = lines_.find(place.block);
      if (place.next == nullptr) {
        lines_.erase(line);
        continue;
      }
      line->second.first = place.next;
      Stander* const follower = place.next->who;
      if (--follower->behind == 0) next->push_back(follower->id);
    }
  }
  standers_.erase(stander);
}

}  // namespace kvpool
