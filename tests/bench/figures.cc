#include "tests/bench/figures.h"

#include "absl/strings/str_cat.h"

namespace kvpool::bench {

void Figures::Add(std::string_view name, double value, std::string_view unit, std::optional<Bound> bound) {
  figures_.push_back({.section = section_,
                      .name = std::string(name),
                      .value = value,
                      .unit = std::string(unit),
                      .bound = bound,
                      .skipped = ""});
}

void Figures::Skip(std::string_view name, std::string_view why) {
  figures_.push_back({.section = section_,
                      .name = std::string(name),
                      .value = 0,
                      .unit = "",
                      .bound = {},
                      .skipped = std::string(why)});
}

void Figures::Note(std::string_view text) {
  notes_.push_back(absl::StrCat(section_, ": ", absl::string_view(text.data(), text.size())));
}

}  // namespace kvpool::bench
