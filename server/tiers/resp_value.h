// How a value lies in a store of keys and strings: in pieces of at most 1 MiB.
//
//   PREFIX:1:{KEY}:N   the string of piece N. KEY is the tier key in hex and, as the hash tag, what the slot is computed from:
//                      all pieces are on one node. 1 is the version of this form.
//   string             PieceHeader, then the piece's part of the value
//
// Piece 0 is written last: while it is missing there is no value. The write id is a digest of the value's bytes, so that two
// nodes that write the same bytes write the same pieces, in whatever order; and pieces of two writes are not taken for one.
#ifndef KVPOOL_SERVER_TIERS_RESP_VALUE_H_
#define KVPOOL_SERVER_TIERS_RESP_VALUE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/tiers/buffers.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

inline constexpr uint64_t kMostPieceBytes = 1 << 20;
inline constexpr size_t kPieceHeaderBytes = 32;

inline uint32_t PiecesOf(uint64_t value_bytes) {
  return static_cast<uint32_t>(std::max<uint64_t>((value_bytes + kMostPieceBytes - 1) / kMostPieceBytes, 1));
}
// REQUIRES: piece < PiecesOf(value_bytes).
inline uint64_t PieceBytes(uint64_t value_bytes, uint32_t piece) {
  return std::min(value_bytes - piece * kMostPieceBytes, kMostPieceBytes);
}

// What all keys of a value begin with, the number is behind it.
std::string PieceKeyStem(const std::string& prefix, const TierKey& key);

struct PieceHeader {
  uint32_t piece = 0, pieces = 0;
  uint64_t write_id = 0, value_bytes = 0;
};

// The headers of all pieces of a value.
std::vector<std::array<char, kPieceHeaderBytes>> MakePieceHeaders(const TierKey& key,
                                                                  const TierBuffer& value);

// The header of a string that was stored as this piece of this key, and whose bytes are as they were then; nothing if they are
// not.
std::optional<PieceHeader> CheckPiece(const TierKey& key, uint32_t piece, std::string_view string);
// The same of a string whose bytes behind the header were summed where they are.
std::optional<PieceHeader> CheckPiece(const TierKey& key, uint32_t piece, std::string_view header_bytes,
                                      uint64_t bytes, uint32_t bytes_crc);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_RESP_VALUE_H_
