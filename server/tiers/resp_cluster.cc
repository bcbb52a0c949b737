#include "server/tiers/resp_cluster.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace kvpool {
namespace {

constexpr size_t kMostHost = 253;  // The longest name that DNS has.

constexpr std::array<uint16_t, 256> MakeCrc16() {
  std::array<uint16_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte << 8;
    for (int bit = 0; bit < 8; ++bit) crc = crc << 1 ^ ((crc & 0x8000) != 0 ? 0x1021u : 0);
    table[byte] = static_cast<uint16_t>(crc);
  }
  return table;
}
constexpr std::array<uint16_t, 256> kCrc16 = MakeCrc16();

absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

bool IsHost(std::string_view host) {
  return !host.empty() && host.size() <= kMostHost && std::all_of(host.begin(), host.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_' ||
           c == ':' || c == '%';
  });
}

bool ParsePort(std::string_view text, uint16_t* port) {
  uint32_t number = 0;
  if (text.size() > 5 || !absl::SimpleAtoi(Absl(text), &number) || number == 0 || number > UINT16_MAX)
    return false;
  *port = static_cast<uint16_t>(number);
  return true;
}

// As servers write it: what is in front of the last colon, which may have colons itself.
std::optional<RespEndpoint> ParseAnnounced(std::string_view text, const RespEndpoint& from) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  RespEndpoint endpoint{.host = std::string(text.substr(0, colon))};
  if (endpoint.host.empty()) endpoint.host = from.host;
  if (!IsHost(endpoint.host) || !ParsePort(text.substr(colon + 1), &endpoint.port)) return std::nullopt;
  return endpoint;
}

}  // namespace

std::string TextOf(const RespEndpoint& endpoint) {
  const bool colons = endpoint.host.find(':') != std::string::npos;
  return absl::StrCat(colons ? "[" : "", endpoint.host, colons ? "]:" : ":", endpoint.port);
}

std::optional<RespEndpoint> ParseRespEndpoint(std::string_view text) {
  RespEndpoint endpoint;
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || !ParsePort(text.substr(colon + 1), &endpoint.port))
    return std::nullopt;
  std::string_view host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return std::nullopt;
  }
  if (!IsHost(host)) return std::nullopt;
  endpoint.host = std::string(host);
  return endpoint;
}

uint16_t RespSlotOf(std::string_view key) {
  if (const size_t open = key.find('{'); open != std::string_view::npos) {
    const size_t close = key.find('}', open + 1);
    if (close != std::string_view::npos && close > open + 1) key = key.substr(open + 1, close - open - 1);
  }
  uint32_t crc = 0;
  for (const char c : key) crc = (crc << 8 ^ kCrc16[(crc >> 8 ^ static_cast<uint8_t>(c)) & 0xff]) & 0xffff;
  return static_cast<uint16_t>(crc % kRespSlots);
}

std::optional<RespRedirect> ParseRespRedirect(const RespReply& reply, const RespEndpoint& from) {
  const std::string_view code = reply.code();
  if (code != "MOVED" && code != "ASK") return std::nullopt;
  const std::vector<absl::string_view> words = absl::StrSplit(Absl(reply.text), ' ');
  uint32_t slot = 0;
  if (words.size() < 3 || !absl::SimpleAtoi(words[1], &slot) || slot >= kRespSlots) return std::nullopt;
  const auto to = ParseAnnounced({words[2].data(), words[2].size()}, from);
  if (!to.has_value()) return std::nullopt;
  return RespRedirect{.asking = code == "ASK", .slot = static_cast<uint16_t>(slot), .to = *to};
}

std::optional<ClusterMap> ClusterMap::Parse(const RespReply& slots, const RespEndpoint& from) {
  using Kind = RespReply::Kind;
  if (slots.kind != Kind::kArray) return std::nullopt;
  ClusterMap map;
  // Each is the first slot, the last one, the master, and replicas, which are [host, port, id, …].
  for (const RespReply& range : slots.items) {
    if (range.kind != Kind::kArray || range.items.size() < 3) return std::nullopt;
    const RespReply &first = range.items[0], &last = range.items[1], &master = range.items[2];
    if (first.kind != Kind::kInteger || last.kind != Kind::kInteger || first.number < 0 ||
        last.number < first.number || last.number >= kRespSlots) {
      return std::nullopt;
    }
    if (master.kind != Kind::kArray || master.items.size() < 2) return std::nullopt;
    const RespReply &host = master.items[0], &port = master.items[1];
    if (port.kind != Kind::kInteger || port.number < 1 || port.number > UINT16_MAX) return std::nullopt;
    RespEndpoint node{.host = from.host, .port = static_cast<uint16_t>(port.number)};
    // No host, or "?": the one that was asked.
    if (host.kind == Kind::kBytes && !host.text.empty() && host.text != "?") {
      if (!IsHost(host.text)) return std::nullopt;
      node.host = std::string(host.text);
    } else if (host.kind != Kind::kNil && host.kind != Kind::kBytes) {
      return std::nullopt;
    }
    const uint16_t index = map.IndexOf(node);
    if (index == kNobody) return std::nullopt;
    std::fill(map.owners_.begin() + first.number, map.owners_.begin() + last.number + 1, index);
  }
  return map;
}

const RespEndpoint* ClusterMap::OwnerOf(uint16_t slot) const {
  const uint16_t owner = owners_[slot % kRespSlots];
  return owner == kNobody ? nullptr : &nodes_[owner];
}

void ClusterMap::Move(uint16_t slot, const RespEndpoint& to) { owners_[slot % kRespSlots] = IndexOf(to); }

uint16_t ClusterMap::IndexOf(const RespEndpoint& node) {
  const auto found = std::find(nodes_.begin(), nodes_.end(), node);
  if (found != nodes_.end()) return static_cast<uint16_t>(found - nodes_.begin());
  if (nodes_.size() == kMostNodes) return kNobody;
  nodes_.push_back(node);
  return static_cast<uint16_t>(nodes_.size() - 1);
}

}  // namespace kvpool
