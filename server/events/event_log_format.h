// The file format of an event log. See event_log.h.
#ifndef KVPOOL_SERVER_EVENTS_EVENT_LOG_FORMAT_H_
#define KVPOOL_SERVER_EVENTS_EVENT_LOG_FORMAT_H_

#include <array>
#include <bit>
#include <cstdint>

#include "proto/support/limits.h"

namespace kvpool {

static_assert(std::endian::native == std::endian::little, "the file's byte order");

// Version 2; version 1 is the same without hints.
inline constexpr std::array<char, 16> kEventMagic = {'k', 'v', 'p', 'o', 'o', 'l', '-', 'e',
                                                     'v', 'e', 'n', 't', 's', '-', '2', '\n'};
inline constexpr std::array<char, 16> kEventMagic1 = {'k', 'v', 'p', 'o', 'o', 'l', '-', 'e',
                                                      'v', 'e', 'n', 't', 's', '-', '1', '\n'};

struct EventFileHeader {
  std::array<char, 16> magic = kEventMagic;
  uint64_t log = 0;   // The same in all files of one run of the daemon.
  uint32_t part = 0;  // Counts the files of that run.
  uint32_t reserved = 0;
};
static_assert(sizeof(EventFileHeader) == 32);

enum class EventKind : uint8_t {
  kMatch = 1,  // Words: the keys of one layer group that were asked for, in order.
  kSeal = 2,   // Words: the key in front, or 0, then the keys that were sealed.
  kLost = 3,   // No words. `session` is the number of events that are missing here.
  // Words: the keys of the blocks of one layer group that were released with a hint, in the order given.
  kHint = 4,
};

struct EventHeader {
  EventKind kind = EventKind::kMatch;
  uint8_t group = 0;
  uint8_t reuse = 0;     // Hints: UseHint::reuse (server/replacement/policy.h).
  uint8_t category = 0;  // Hints: UseHint::category.
  uint32_t words = 0;
  uint64_t time_ms = 0;  // The daemon's monotonic clock.
  uint64_t space = 0;
  uint64_t session = 0;
  uint32_t tokens_per_block = 0;
  uint32_t reserved2 = 0;
};
static_assert(sizeof(EventHeader) == 40);

// A verb's keys at most, and the one in front.
inline constexpr uint32_t kMostEventWords = kMaxNames + 1;

}  // namespace kvpool

#endif  // KVPOOL_SERVER_EVENTS_EVENT_LOG_FORMAT_H_
