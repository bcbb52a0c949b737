// What a space found of itself when the daemon started, and what became of its sessions since: for metrics and operators.
//
//   session of the daemon before    back      all its members have come back
//                                   waiting   some have not yet
//                                   lost      it does not go on, for one of these reasons
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_RECOVERED_H_
#define KVPOOL_SERVER_SPACE_RECOVERED_H_

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/pool/pool_types.h"

namespace kvpool {

// Why a session does not go on. The names are label values of a metric.
enum class SessionLoss : uint8_t {
  kNone,
  kEnded,    // It had ended before.
  kTorn,     // A change of it was half done, and too large to be undone; or ended one daemon after another.
  kNotKept,  // Something of it was under way that is not kept.
  kNoRoom,   // Its members had more under way than there is room for.
  kDamaged,  // What was kept of it is damaged.
  kIncomplete,  // Not all of its members were kept, or had joined.
  kDied,        // A member has died.
  kAway,        // A member did not come back in time.
  kOther  // It was ended before all its members were back: by an operator, by a slab that one could not map.
};
inline constexpr std::array<const char*, 10> kSessionLossNames = {
    "none", "ended", "torn", "not_kept", "no_room", "damaged", "incomplete", "died", "away", "other"};
inline constexpr size_t kSessionLosses = kSessionLossNames.size();

struct WhyLost {
  SessionLoss loss = SessionLoss::kNone;
  std::string text;  // People read it.
  bool lost() const { return loss != SessionLoss::kNone; }
};

struct LostSession {
  uint64_t id = 0;
  std::string client_name;
  WhyLost why;
};

struct Recovered {
  // So many lost sessions are named, the first ones.
  static constexpr size_t kMostNamed = 64;

  // One that had ended before is none that was lost.
  void Lose(LostSession session) {
    if (session.why.loss == SessionLoss::kEnded) return;
    ++lost_sessions[static_cast<size_t>(session.why.loss)];
    if (named.size() < kMostNamed) named.push_back(std::move(session));
  }

  bool any = false;  // An earlier daemon had the space.
  RecoveredPool blocks;
  double seconds = 0;  // Time that reading the table took, for which nobody is answered.
  uint32_t waiting = 0, back = 0;
  std::array<uint32_t, kSessionLosses> lost_sessions{};  // Indexed by SessionLoss.
  std::vector<LostSession> named;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_RECOVERED_H_
