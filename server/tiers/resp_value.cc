#include "server/tiers/resp_value.h"

#include <bit>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

constexpr char kPieceMagic[4] = {'K', 'V', 'P', '1'};

// A header as it is stored; all numbers are little-endian.
struct Stored {
  char magic[4];
  uint32_t checksum;  // CRC-32C of the piece's bytes, then of the key, then of this with a checksum of 0.
  uint32_t piece, pieces;
  uint64_t write_id, value_bytes;
};
static_assert(sizeof(Stored) == kPieceHeaderBytes && std::endian::native == std::endian::little);

std::string KeyBytes(const TierKey& key) {
  std::string bytes;
  bytes.append(key.space.begin(), key.space.end());
  bytes.append(key.block.begin(), key.block.end());
  bytes.push_back(static_cast<char>(key.group));
  bytes.push_back(static_cast<char>(key.raw));
  return bytes;
}

uint32_t Checksum(Stored header, std::string_view key_bytes, uint32_t bytes_crc) {
  header.checksum = 0;
  return Crc32c(&header, sizeof(header), Crc32c(key_bytes.data(), key_bytes.size(), bytes_crc));
}

}  // namespace

std::string PieceKeyStem(const std::string& prefix, const TierKey& key) {
  return absl::StrCat(prefix, ":1:{", absl::BytesToHexString(KeyBytes(key)), "}:");
}

std::vector<std::array<char, kPieceHeaderBytes>> MakePieceHeaders(const TierKey& key,
                                                                  const TierBuffer& value) {
  const uint32_t pieces = PiecesOf(value.bytes());
  std::vector<uint32_t> crcs(pieces);
  for (uint32_t i = 0; i < pieces; ++i) {
    crcs[i] = Crc32c(value.data() + i * kMostPieceBytes, PieceBytes(value.bytes(), i));
  }
  const std::string key_bytes = KeyBytes(key);
  // FNV-1a, a word at a time: the same on every node.
  uint64_t write_id = 0xcbf29ce484222325;
  for (const uint32_t crc : crcs) write_id = (write_id ^ crc) * 0x100000001b3;
  std::vector<std::array<char, kPieceHeaderBytes>> headers(pieces);
  for (uint32_t i = 0; i < pieces; ++i) {
    Stored header{
        .checksum = 0, .piece = i, .pieces = pieces, .write_id = write_id, .value_bytes = value.bytes()};
    std::memcpy(header.magic, kPieceMagic, sizeof(kPieceMagic));
    header.checksum = Checksum(header, key_bytes, crcs[i]);
    std::memcpy(headers[i].data(), &header, sizeof(header));
  }
  return headers;
}

std::optional<PieceHeader> CheckPiece(const TierKey& key, uint32_t piece, std::string_view header_bytes,
                                      uint64_t bytes, uint32_t bytes_crc) {
  Stored header;
  if (header_bytes.size() != sizeof(header)) return std::nullopt;
  std::memcpy(&header, header_bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kPieceMagic, sizeof(kPieceMagic)) != 0 || header.piece != piece)
    return std::nullopt;
  if (header.pieces <= piece || header.pieces != PiecesOf(header.value_bytes)) return std::nullopt;
  if (bytes != PieceBytes(header.value_bytes, piece)) return std::nullopt;
  if (header.checksum != Checksum(header, KeyBytes(key), bytes_crc)) return std::nullopt;
  return PieceHeader{.piece = piece,
                     .pieces = header.pieces,
                     .write_id = header.write_id,
                     .value_bytes = header.value_bytes};
}

std::optional<PieceHeader> CheckPiece(const TierKey& key, uint32_t piece, std::string_view string) {
  const std::string_view header = string.substr(0, kPieceHeaderBytes);
  string.remove_prefix(header.size());
  return CheckPiece(key, piece, header, string.size(), Crc32c(string.data(), string.size()));
}

}  // namespace kvpool
