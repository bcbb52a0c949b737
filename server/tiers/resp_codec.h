// The protocol of Redis and Valkey, RESP2: commands out, replies in. A reply is bytes of somebody else's: each length in it
// is checked against a limit before anything is done by it.
#ifndef KVPOOL_SERVER_TIERS_RESP_CODEC_H_
#define KVPOOL_SERVER_TIERS_RESP_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace kvpool {

struct RespReply {
  enum class Kind : uint8_t { kText, kError, kInteger, kBytes, kNil, kArray };
  Kind kind = Kind::kNil;
  std::string_view text;  // Points into what was parsed: a line without its mark, or a string's bytes.
  // The end of a string, behind `text`, that lies elsewhere (RespRequest::into), and its CRC-32C.
  uint64_t rest_bytes = 0;
  uint32_t rest_crc = 0;
  int64_t number = 0;
  std::vector<RespReply> items;

  bool Is(std::string_view word) const { return kind == Kind::kText && text == word; }
  // The first word of an error, as far as it is one ("OOM", "MOVED"); what is behind it may be anything.
  std::string_view code() const;
};

// What the reply to a command may be.
struct RespLimits {
  uint64_t bytes = 64;  // The longest string in it.
  size_t items = 0;     // So many replies may be in arrays, all together.
};

enum class RespParse : uint8_t { kWhole, kPart, kBroken };

inline constexpr size_t kMostRespLine = 4096;
inline constexpr int kMostRespDepth = 4;

// Reads one reply from the front of `bytes`; `used` is its length. kPart: there is more to come, of which at least `used` bytes
// in all. kBroken: it is no reply, or none within the limits.
RespParse ParseRespReply(std::string_view bytes, const RespLimits& limits, RespReply* reply, size_t* used);

// An array of strings, which every command is.
void AppendRespCommand(absl::Span<const std::string_view> words, std::string* out);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_RESP_CODEC_H_
