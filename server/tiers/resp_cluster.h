// Which node of a cluster has which keys.
#ifndef KVPOOL_SERVER_TIERS_RESP_CLUSTER_H_
#define KVPOOL_SERVER_TIERS_RESP_CLUSTER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/tiers/resp_codec.h"

namespace kvpool {

inline constexpr uint16_t kRespSlots = 16384;

struct RespEndpoint {
  std::string host;  // A name or an address, without brackets.
  uint16_t port = 0;

  friend bool operator==(const RespEndpoint&, const RespEndpoint&) = default;
  friend auto operator<=>(const RespEndpoint&, const RespEndpoint&) = default;
};
// HOST:PORT, [ADDRESS]:PORT where the address has colons.
std::string TextOf(const RespEndpoint& endpoint);
// As a person writes it. Nothing: it is no endpoint.
std::optional<RespEndpoint> ParseRespEndpoint(std::string_view text);

// CRC-16 (XMODEM) of the key's hash tag, in 16384 slots.
uint16_t RespSlotOf(std::string_view key);

// Where an error sends a command: "MOVED 3999 127.0.0.1:6381". An empty host is that of the node that said so.
struct RespRedirect {
  bool asking = false;  // ASK: this once, and ASKING goes first.
  uint16_t slot = 0;
  RespEndpoint to;
};
std::optional<RespRedirect> ParseRespRedirect(const RespReply& reply, const RespEndpoint& from);

class ClusterMap {
 public:
  static constexpr size_t kMostNodes = 512;
  // What a reply to CLUSTER SLOTS may have.
  static constexpr RespLimits kLimits{.bytes = 512, .items = 65536};

  // Nothing: it is no such reply, or one of more nodes.
  static std::optional<ClusterMap> Parse(const RespReply& slots, const RespEndpoint& from);
  // Null: nobody that is known.
  const RespEndpoint* OwnerOf(uint16_t slot) const;
  void Move(uint16_t slot, const RespEndpoint& to);
  const std::vector<RespEndpoint>& nodes() const { return nodes_; }

 private:
  static constexpr uint16_t kNobody = UINT16_MAX;
  // Its place in nodes_; kNobody: there are too many.
  uint16_t IndexOf(const RespEndpoint& node);

  std::vector<RespEndpoint> nodes_;
  std::vector<uint16_t> owners_ = std::vector<uint16_t>(kRespSlots, kNobody);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_RESP_CLUSTER_H_
