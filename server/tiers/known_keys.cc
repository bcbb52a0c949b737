#include "server/tiers/known_keys.h"

#include <iterator>

#include "absl/hash/hash.h"

namespace kvpool {

KnownKeys::KnownKeys(const Options& options) : options_(options) {
  places_.reserve(kMost);
  erased_at_.reserve(kMost);
}

TierPresence KnownKeys::Find(const TierKey& key, Clock::time_point now) {
  const auto found = places_.find(absl::HashOf(key));
  if (found == places_.end() || found->second->state == State::kAsked) return TierPresence::kUnknown;
  if (now >= found->second->until) {
    Drop(found->second);
    return TierPresence::kUnknown;
  }
  const Place place = found->second, next = std::next(place);
  if (next != order_.end()) {
    for (Walk* const walk : walks_) {
      if (walk->at_ == place) walk->at_ = next;
    }
    order_.splice(order_.end(), order_, place);
  }
  return found->second->state == State::kThere ? TierPresence::kYes : TierPresence::kNo;
}

bool KnownKeys::Ask(const TierKey& key, Clock::time_point now) {
  const auto found = places_.find(absl::HashOf(key));
  if (found != places_.end() && found->second->state == State::kAsked && now < found->second->until)
    return false;
  // An answer that never comes is not waited for either.
  Set(key, State::kAsked, now + options_.there);
  return true;
}

void KnownKeys::Erased(const TierKey& key) {
  Forget(key);
  if (erased_at_.size() == kMost) {
    erased_at_.clear();
    erased_at_.reserve(kMost);
    erased_from_ = erased_;
  }
  erased_at_[absl::HashOf(key)] = ++erased_;
}

void KnownKeys::Doubt(const TierKey& key) {
  Erased(key);
  if (doubted_.size() < kMost) {
    doubted_.insert(key);
  } else {
    lost_doubts_ = true;
  }
}

void KnownKeys::Learn(const TierKey& key, bool there, Clock::time_point now, uint64_t asked) {
  if (there) {
    const auto at = erased_at_.find(absl::HashOf(key));
    if (asked < erased_from_ || (at != erased_at_.end() && asked < at->second)) return Forget(key);
  }
  Set(key, there ? State::kThere : State::kNotThere, now + (there ? options_.there : options_.not_there));
}

void KnownKeys::Forget(const TierKey& key) {
  const auto found = places_.find(absl::HashOf(key));
  if (found != places_.end()) Drop(found->second);
}

void KnownKeys::Set(const TierKey& key, State state, Clock::time_point until) {
  const uint64_t hash = absl::HashOf(key);
  if (const auto found = places_.find(hash); found != places_.end()) Drop(found->second);
  if (order_.size() == kMost) Drop(order_.begin());
  order_.push_back({.key = key, .hash = hash, .state = state, .until = until});
  places_[hash] = std::prev(order_.end());
  there_ += state == State::kThere;
}

bool KnownKeys::Step(Walk* walk, const TierOwner& owner, size_t most, std::vector<TierKey>* out) {
  if (!walk->begun_) {
    walk->begun_ = true;
    walk->at_ = order_.begin();
    walks_.push_back(walk);
  }
  for (; most > 0 && walk->at_ != order_.end(); ++walk->at_, --most) {
    if (walk->at_->state != State::kNotThere && walk->at_->key.owner == owner) out->push_back(walk->at_->key);
  }
  auto next = walk->doubted_.has_value() ? doubted_.upper_bound(*walk->doubted_) : doubted_.begin();
  for (; most > 0 && next != doubted_.end(); ++next, --most) {
    walk->doubted_ = *next;
    if (next->owner == owner) out->push_back(*next);
  }
  if (walk->at_ != order_.end() || next != doubted_.end()) return true;
  std::erase(walks_, walk);
  return false;
}

void KnownKeys::Drop(Place place) {
  for (Walk* const walk : walks_) {
    if (walk->at_ == place) ++walk->at_;
  }
  there_ -= place->state == State::kThere;
  places_.erase(place->hash);
  order_.erase(place);
}

}  // namespace kvpool
