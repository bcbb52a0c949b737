#include "server/tiers/resp_codec.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

// The longest integer that 64 bits hold, with its sign.
constexpr size_t kMostDigits = 20;
constexpr size_t kMostCode = 32;

struct Reader {
  std::string_view bytes;
  const RespLimits& limits;
  size_t at = 0;
  size_t items = 0;

  // The line from `at` on, without its end; `at` is behind that.
  RespParse Line(std::string_view* line) {
    const std::string_view rest = bytes.substr(at);
    const size_t end = rest.substr(0, kMostRespLine + 2).find("\r\n");
    if (end == std::string_view::npos) {
      if (rest.size() >= kMostRespLine + 2) return RespParse::kBroken;
      at = bytes.size() + 1;
      return RespParse::kPart;
    }
    *line = rest.substr(0, end);
    at += end + 2;
    return RespParse::kWhole;
  }

  static bool Number(std::string_view digits, int64_t* number) {
    if (digits.empty() || digits.size() > kMostDigits) return false;
    // SimpleAtoi takes blanks, and a plus.
    if (digits[0] != '-' && !absl::ascii_isdigit(static_cast<unsigned char>(digits[0]))) return false;
    if (!absl::ascii_isdigit(static_cast<unsigned char>(digits.back()))) return false;
    return absl::SimpleAtoi(absl::string_view(digits.data(), digits.size()), number);
  }

  RespParse String(int64_t length, RespReply* reply) {
    if (length == -1) {
      reply->kind = RespReply::Kind::kNil;
      return RespParse::kWhole;
    }
    if (length < 0 || static_cast<uint64_t>(length) > limits.bytes) return RespParse::kBroken;
    const auto size = static_cast<size_t>(length);
    if (bytes.size() - at < size + 2) {
      at += size + 2;
      return RespParse::kPart;
    }
    if (bytes.substr(at + size, 2) != "\r\n") return RespParse::kBroken;
    reply->kind = RespReply::Kind::kBytes;
    reply->text = bytes.substr(at, size);
    at += size + 2;
    return RespParse::kWhole;
  }

  RespParse Array(int64_t length, int depth, RespReply* reply) {
    if (length == -1) {
      reply->kind = RespReply::Kind::kNil;
      return RespParse::kWhole;
    }
    if (length < 0 || depth == kMostRespDepth) return RespParse::kBroken;
    if (static_cast<uint64_t>(length) > limits.items - items) return RespParse::kBroken;
    items += static_cast<size_t>(length);
    reply->kind = RespReply::Kind::kArray;
    for (int64_t i = 0; i < length; ++i) {
      const RespParse part = Reply(depth + 1, &reply->items.emplace_back());
      if (part != RespParse::kWhole) return part;
    }
    return RespParse::kWhole;
  }

  RespParse Reply(int depth, RespReply* reply) {
    std::string_view line;
    if (const RespParse part = Line(&line); part != RespParse::kWhole) return part;
    if (line.empty()) return RespParse::kBroken;
    const char mark = line[0];
    line.remove_prefix(1);
    if (mark == '+' || mark == '-') {
      reply->kind = mark == '+' ? RespReply::Kind::kText : RespReply::Kind::kError;
      reply->text = line;
      return RespParse::kWhole;
    }
    if (mark != ':' && mark != '$' && mark != '*') return RespParse::kBroken;
    int64_t number = 0;
    if (!Number(line, &number)) return RespParse::kBroken;
    if (mark == '$') return String(number, reply);
    if (mark == '*') return Array(number, depth, reply);
    reply->kind = RespReply::Kind::kInteger;
    reply->number = number;
    return RespParse::kWhole;
  }
};

}  // namespace

std::string_view RespReply::code() const {
  if (kind != Kind::kError) return {};
  const std::string_view word = text.substr(0, std::min(text.find(' '), kMostCode));
  const bool plain = std::all_of(word.begin(), word.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
  return plain ? word : std::string_view();
}

RespParse ParseRespReply(std::string_view bytes, const RespLimits& limits, RespReply* reply, size_t* used) {
  *reply = RespReply();
  Reader reader{.bytes = bytes, .limits = limits};
  const RespParse parsed = reader.Reply(0, reply);
  *used = reader.at;
  return parsed;
}

void AppendRespCommand(absl::Span<const std::string_view> words, std::string* out) {
  absl::StrAppend(out, "*", words.size(), "\r\n");
  for (const std::string_view word : words) {
    absl::StrAppend(out, "$", word.size(), "\r\n");
    out->append(word);
    out->append("\r\n");
  }
}

}  // namespace kvpool
