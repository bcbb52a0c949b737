#include "client/tools/text.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/support/check.h"

namespace kvpool::tools {
namespace {

// Columns that UTF-8 text takes: continuation bytes take none.
size_t Width(absl::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(),
                                           [](char c) { return (static_cast<uint8_t>(c) & 0xc0) != 0x80; }));
}

// Three digits that mean something.
std::string Digits(double value) {
  return absl::StrFormat("%.*f", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value);
}

}  // namespace

std::string HumanBytes(uint64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1023.5 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  const bool whole = value == std::floor(value);
  return absl::StrCat(whole ? absl::StrFormat("%.0f", value) : Digits(value), " ", kUnits[unit]);
}

std::string HumanCount(uint64_t count) {
  std::string digits = absl::StrCat(count);
  for (ptrdiff_t at = static_cast<ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return digits;
}

std::string HumanCount(uint64_t count, absl::string_view noun) {
  return absl::StrCat(HumanCount(count), " ", noun, count == 1 ? "" : "s");
}

std::string HumanSeconds(double seconds) {
  if (seconds < 999.5e-9) return absl::StrFormat("%.0f ns", seconds * 1e9);
  if (seconds < 999.5e-6) return Digits(seconds * 1e6) + " us";
  if (seconds < 999.5e-3) return Digits(seconds * 1e3) + " ms";
  if (seconds < 60) return Digits(seconds) + " s";
  const auto whole = static_cast<uint64_t>(seconds);
  if (whole < 3600) return absl::StrFormat("%d min %d s", whole / 60, whole % 60);
  if (whole < 86400) return absl::StrFormat("%d h %d min", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%d d %d h", whole / 86400, whole / 3600 % 24);
}

std::string Percent(double part, double whole) {
  return whole <= 0 ? "-" : absl::StrFormat("%.1f %%", 100 * part / whole);
}

std::string Hex(absl::string_view bytes) { return absl::BytesToHexString(bytes); }

std::string JsonQuote(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted.append({'\\', c});
    } else if (static_cast<uint8_t>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", c);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string Printable(absl::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (static_cast<uint8_t>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return out;
}

Table::Table(std::vector<std::string> titles) : titles_(std::move(titles)) {
  for (std::string& title : titles_) {
    right_.push_back(title[0] == '>');
    if (right_.back()) title.erase(0, 1);
  }
}

void Table::Add(std::vector<std::string> cells) {
  KVPOOL_CHECK(cells.size() == titles_.size(), "%zu cells in a table of %zu columns", cells.size(),
               titles_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::Text() const {
  std::vector<size_t> widths;
  for (size_t column = 0; column < titles_.size(); ++column) {
    widths.push_back(Width(titles_[column]));
    for (const auto& row : rows_) widths.back() = std::max(widths.back(), Width(row[column]));
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (size_t column = 0; column < cells.size(); ++column) {
      const std::string padding(widths[column] - Width(cells[column]), ' ');
      absl::StrAppend(&text, column == 0 ? "" : "  ", right_[column] ? padding : "", cells[column],
                      right_[column] ? "" : padding);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::string text = line(titles_);
  for (const auto& row : rows_) text += line(row);
  return text;
}

}  // namespace kvpool::tools
