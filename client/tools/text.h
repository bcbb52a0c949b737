// Numbers and tables for people.
#ifndef KVPOOL_CLIENT_TOOLS_TEXT_H_
#define KVPOOL_CLIENT_TOOLS_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kvpool::tools {

std::string HumanBytes(uint64_t bytes);                          // "512 B", "1.5 GiB"
std::string HumanCount(uint64_t count);                          // "12,031"
std::string HumanCount(uint64_t count, absl::string_view noun);  // "1 block", "12,031 blocks"
std::string HumanSeconds(double seconds);                        // "850 ns", "1.2 ms", "42 s", "3 h 12 min"
std::string Percent(double part, double whole);                  // "36.6 %"; "-" if `whole` is 0
std::string Hex(absl::string_view bytes);
std::string JsonQuote(absl::string_view text);  // A JSON string, quotes included.

// Aligned columns: text to the left, columns whose title starts with '>' to the right. Bytes that came from
// others are made printable, so that a client's name can't move the cursor.
class Table {
 public:
  explicit Table(std::vector<std::string> titles);
  void Add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  std::string Text() const;

 private:
  std::vector<std::string> titles_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

// Replaces control characters by '?'.
std::string Printable(absl::string_view text);

}  // namespace kvpool::tools

#endif  // KVPOOL_CLIENT_TOOLS_TEXT_H_
