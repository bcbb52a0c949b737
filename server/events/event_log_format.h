// The form of an event log on file. See event_log.h.
#ifndef KVPOOL_SERVER_EVENTS_EVENT_LOG_FORMAT_H_
#define KVPOOL_SERVER_EVENTS_EVENT_LOG_FORMAT_H_

#include <array>
#include <bit>
#include <cstdint>

namespace kvpool {

static_assert(std::endian::native == std::endian::little, "the file's byte order");

// Version 2. Version 1 is the same without hints.
inline constexpr std::array<char, 16> kEventMagic = {'k', 'v', 'p', 'o', 'o', 'l', '-', 'e',
                                                     'v', 'e', 'n', 't', 's', '-', '2', '\n'};
inline constexpr std::array<char, 16> kEventMagic1 = {'k', 'v', 'p', 'o', 'o', 'l', '-', 'e',
                                                      'v', 'e', 'n', 't', 's', '-', '1', '\n'};

struct EventFileHeader {
  std::array<char, 16> magic = kEventMagic;
  uint64_t log = 0;   // The same in all files of one run of the daemon.
  uint32_t part = 0;  // Counts them.
  uint32_t reserved = 0;
};
static_assert(sizeof(EventFileHeader) == 32);

enum class EventKind : uint8_t {
  kMatch = 1,  // Words: the keys asked for, in order, as far as they are of one layer group.
  kSeal = 2,   // Words: the key in front, or 0, then those sealed.
  kLost = 3,   // No words: `session` many events are missing here.
  kHint =
      4,  // Words: the keys of blocks of one layer group that were released with a hint, in the order given.
};

struct EventHeader {
  EventKind kind = EventKind::kMatch;
  uint8_t group = 0;
  uint8_t reuse = 0;     // Of a hint: UseHint's (server/replacement/policy.h).
  uint8_t category = 0;  // As well.
  uint32_t words = 0;
  uint64_t time_ms = 0;  // On the daemon's monotonic clock.
  uint64_t space = 0;
  uint64_t session = 0;
  uint32_t tokens_per_block = 0;
  uint32_t reserved2 = 0;
};
static_assert(sizeof(EventHeader) == 40);

// Most keys of one verb, and one in front.
inline constexpr uint32_t kMostEventWords = 65537;

}  // namespace kvpool

#endif  // KVPOOL_SERVER_EVENTS_EVENT_LOG_FORMAT_H_
