// What waits for one thread, or a few, of several owners that take turns: whoever has a thousand items waiting has one served
// before another's first. Within an owner the order is that in which they came.
//
// So an item that is the n-th of its owner is served behind n - 1 of its owner's and at most n of each other owner's, however
// many those have.
#ifndef KVPOOL_SERVER_BASE_FAIR_QUEUE_H_
#define KVPOOL_SERVER_BASE_FAIR_QUEUE_H_

#include <cstddef>
#include <deque>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace kvpool {

// Not thread-safe.
template <typename Item>
class FairQueue {
 public:
  void Push(const std::string& owner, Item item) {
    LineOf(owner).push_back(std::move(item));
    ++size_;
  }
  // It goes before all others of its owner.
  void PushFront(const std::string& owner, Item item) {
    LineOf(owner).push_front(std::move(item));
    ++size_;
  }
  // The next item that `may` be served, of the owner who was not served for longest; none: there is none.
  template <typename May>
  std::optional<Item> Pop(May may) {
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      for (auto item = line->items.begin(); item != line->items.end(); ++item) {
        if (!may(*item)) continue;
        std::optional<Item> next(std::move(*item));
        line->items.erase(item);
        --size_;
        if (line->items.empty()) {
          places_.erase(line->owner);
          lines_.erase(line);
        } else {
          lines_.splice(lines_.end(), lines_, line);
        }
        return next;
      }
    }
    return std::nullopt;
  }
  std::optional<Item> Pop() {
    return Pop([](const Item&) { return true; });
  }
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  size_t size(const std::string& owner) const {
    const auto found = places_.find(owner);
    return found == places_.end() ? 0 : found->second->items.size();
  }
  template <typename Predicate>
  size_t Count(Predicate predicate) const {
    size_t count = 0;
    for (const Line& line : lines_) {
      for (const Item& item : line.items) count += predicate(item) ? 1 : 0;
    }
    return count;
  }

 private:
  // Of one owner that has items waiting.
  struct Line {
    std::string owner;
    std::deque<Item> items;
  };
  std::deque<Item>& LineOf(const std::string& owner) {
    const auto [place, is_new] = places_.try_emplace(owner);
    if (is_new) place->second = lines_.insert(lines_.end(), Line{.owner = owner, .items = {}});
    return place->second->items;
  }

  std::list<Line> lines_;  // The first was not served for longest.
  absl::flat_hash_map<std::string, typename std::list<Line>::iterator> places_;
  size_t size_ = 0;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_FAIR_QUEUE_H_
