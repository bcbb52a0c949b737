// What a start found of the daemon before, beside what its spaces say of themselves (server/space/recovered.h).
#ifndef KVPOOL_SERVER_DAEMON_START_REPORT_H_
#define KVPOOL_SERVER_DAEMON_START_REPORT_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/keeper/keeper_link.h"

namespace kvpool {

// Why a space that was kept is not there. The names are label values of a metric.
enum class SpaceLoss : uint8_t {
  kDamaged,     // Its table, or what is kept of its slabs.
  kSettings,    // Today's settings give it another shape, or other devices.
  kMemory,      // There is not enough memory for it today.
  kSuperseded,  // A newer space has its tenant and fingerprint; this one was being closed.
  kOther
};
inline constexpr std::array<const char*, 5> kSpaceLossNames = {"damaged", "settings", "memory", "superseded",
                                                               "other"};

struct LostSpace {
  uint64_t space = 0;  // 0: nothing of its table can be read.
  std::string tenant;
  SpaceLoss loss{};
  std::string text;            // People read it.
  uint32_t sealed_blocks = 0;  // Its table says so.
  uint32_t sessions = 0;
};

struct StartReport {
  // Why nothing was found; kWarm: something was.
  ColdStart cold = ColdStart::kWarm;
  double recovery_seconds = 0;                 // What was kept was read so long, all spaces together.
  std::optional<double> first_answer_seconds;  // The first verb was answered so long after the start.
  std::vector<LostSpace> lost;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DAEMON_START_REPORT_H_
