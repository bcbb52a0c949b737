#include "server/pool/policy_feed.h"

namespace kvpool {
namespace {

// How many events ahead of an insert what it reads is prefetched.
constexpr size_t kPrefetchEvents = 16;

}  // namespace

void PolicyFeed::TellEvents() const {
  const auto prefetch = [this](size_t i) {
    if (i < untold_ && events_[i].kind == Kind::kInsert) policy_->Prefetch(events_[i].block, events_[i].hash);
  };
  for (size_t i = 0; i < kPrefetchEvents; ++i) prefetch(i);
  for (size_t i = 0; i < untold_; ++i) {
    prefetch(i + kPrefetchEvents);
    const Event& event = events_[i];
    switch (event.kind) {
      case Kind::kInsert:
        policy_->OnInsert(event.block, {.hash = event.hash, .parent = event.parent, .now_ms = event.now_ms});
        break;
      case Kind::kHit:
        policy_->OnHit(event.block, event.now_ms);
        break;
      case Kind::kUsed:
        policy_->OnUsed(event.block, event.now_ms);
        break;
      case Kind::kOffer:
        policy_->OnOffer(event.block);
        break;
      case Kind::kWithdraw:
        policy_->OnWithdraw(event.block);
        break;
      case Kind::kEvict:
        policy_->OnEvict(event.block);
        break;
    }
  }
  untold_ = 0;
}

}  // namespace kvpool
