// Tags of one byte: the number of a field and how it is encoded.
#ifndef KVPOOL_SERVER_WIRE_FIELD_TAGS_H_
#define KVPOOL_SERVER_WIRE_FIELD_TAGS_H_

#include <cstdint>

namespace kvpool {

constexpr uint8_t VarintTag(int field) { return static_cast<uint8_t>(field << 3 | 0); }
constexpr uint8_t Fixed64Tag(int field) { return static_cast<uint8_t>(field << 3 | 1); }
constexpr uint8_t SizedTag(int field) { return static_cast<uint8_t>(field << 3 | 2); }

}  // namespace kvpool

#endif  // KVPOOL_SERVER_WIRE_FIELD_TAGS_H_
