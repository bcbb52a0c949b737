#include "server/space/pressure.h"

#include <algorithm>
#include <utility>

namespace kvpool {
namespace {

// Sessions are asked for unused leases at most this often.
constexpr uint64_t kAskAgainMs = 100;
// So many are reclaimed by the thread that used them up, after its answer: 5 us, as long as it takes
// to wake another.
constexpr uint32_t kReclaimHere = 64;

}  // namespace

void Pressure::AfterVerbs(Turn& turn) {
  growth_.Review(turn.now);
  if (growth_.NeedsSlab() || growth_.waits_for_own(turn.now)) turn.deferred.housekeep = true;
  if (pool_.untidy()) turn.deferred.housekeep = true;
  if (std::exchange(lease_was_short_, false) && turn.now - asked_ms_ >= kAskAgainMs) AskForLeases(turn.now);
  if (IsReclaimDue()) (FewToReclaim() ? turn.deferred.reclaim : turn.deferred.housekeep) = true;
  Update(turn);
}

bool Pressure::IsReclaimDue() const {
  return growth_.reclaims_ahead() && !growth_.may_grow() && growth_.free_blocks() < growth_.low_blocks();
}

bool Pressure::FewToReclaim() const {
  return growth_.high_blocks() - growth_.free_blocks() <= kReclaimHere && !pool_.decides_outside();
}

void Pressure::Update(Turn& turn) {
  const uint32_t available = pool_.available();
  if (on_ ? available < growth_.high_blocks() : available >= growth_.low_blocks()) return;
  on_ = !on_;
  for (Session* session : sessions_) {
    if (session->ended) continue;
    sessions_.PostAll(session, v1::NOTICE_KIND_PRESSURE, {.on = on_, .value = available});
  }
  if (on_) AskForLeases(turn.now);
}

void Pressure::AskForLeases(uint64_t now) {
  asked_ms_ = now;
  // What is available may all be promised: then it is not for the one who came short.
  const uint32_t high = growth_.high_blocks();
  const uint32_t missing = std::max(growth_.low_blocks(), high - std::min(high, pool_.available()));
  for (Session* session : sessions_) {
    if (session->ended || session->holder == kNobody) continue;
    const BlockPool::Holdings holdings = pool_.holdings(session->holder);
    const uint32_t guaranteed = holdings.limits.guaranteed;
    if (holdings.leased <= 1 || holdings.charged <= guaranteed) continue;
    sessions_.PostAll(
        session, v1::NOTICE_KIND_REVOKE,
        {.value = std::min(missing, holdings.charged - guaranteed), .detail = "the space is under pressure"});
  }
}

}  // namespace kvpool
