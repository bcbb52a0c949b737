#include "server/tiers/s3_xml.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace kvpool {
namespace {

constexpr size_t kMostEntity = 8;  // &#x10FFFF;

// The next element of this name, which is taken off the front of `xml` with all before it.
std::optional<std::string_view> Next(std::string_view* xml, std::string_view name) {
  const std::string open = absl::StrCat("<", std::string(name)),
                    close = absl::StrCat("</", std::string(name), ">");
  while (true) {
    const size_t begin = xml->find(open);
    if (begin == std::string_view::npos) return std::nullopt;
    xml->remove_prefix(begin + open.size());
    if (xml->empty()) return std::nullopt;
    const char next = xml->front();
    // <Key> is not <KeyCount>.
    if (next != '>' && next != '/' && next != ' ' && next != '\t' && next != '\r' && next != '\n') continue;
    const size_t end = xml->find('>');
    if (end == std::string_view::npos) return std::nullopt;
    const bool empty = end > 0 && (*xml)[end - 1] == '/';
    xml->remove_prefix(end + 1);
    if (empty) return std::string_view();
    const size_t over = xml->find(close);
    if (over == std::string_view::npos) return std::nullopt;
    const std::string_view inner = xml->substr(0, over);
    xml->remove_prefix(over + close.size());
    return inner;
  }
}

void AppendUtf8(uint32_t code, std::string* out) {
  const auto byte = [out](uint32_t value) { out->push_back(static_cast<char>(value)); };
  if (code < 0x80) return byte(code);
  if (code < 0x800) {
    byte(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      byte(0xe0 | code >> 12);
    } else {
      byte(0xf0 | code >> 18);
      byte(0x80 | (code >> 12 & 0x3f));
    }
    byte(0x80 | (code >> 6 & 0x3f));
  }
  byte(0x80 | (code & 0x3f));
}

// False: it is no entity, and stays as it is.
bool AppendEntity(std::string_view name, std::string* out) {
  static constexpr std::pair<std::string_view, char> kNamed[] = {
      {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}};
  for (const auto& [known, c] : kNamed) {
    if (name != known) continue;
    out->push_back(c);
    return true;
  }
  if (name.size() < 2 || name[0] != '#') return false;
  const bool hex = name[1] == 'x' || name[1] == 'X';
  const std::string digits(name.substr(hex ? 2 : 1));
  uint32_t code = 0;
  if (!(hex ? absl::SimpleHexAtoi(digits, &code) : absl::SimpleAtoi(digits, &code)) || code > 0x10ffff)
    return false;
  AppendUtf8(code, out);
  return true;
}

std::string Unescape(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t at = text.find('&');
    out.append(text.substr(0, at));
    if (at == std::string_view::npos) break;
    text.remove_prefix(at + 1);
    const size_t end = text.substr(0, kMostEntity + 1).find(';');
    if (end != std::string_view::npos && AppendEntity(text.substr(0, end), &out)) {
      text.remove_prefix(end + 1);
    } else {
      out.push_back('&');
    }
  }
  return out;
}

}  // namespace

std::vector<std::string_view> XmlElements(std::string_view xml, std::string_view name) {
  std::vector<std::string_view> elements;
  while (const auto inner = Next(&xml, name)) elements.push_back(*inner);
  return elements;
}

std::string XmlText(std::string_view xml, std::string_view name) {
  return Unescape(Next(&xml, name).value_or(std::string_view()));
}

std::string XmlEscape(std::string_view text) {
  return absl::StrReplaceAll(
      std::string(text), {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&apos;"}});
}

}  // namespace kvpool
