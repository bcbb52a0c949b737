// kvpool-bench: the figures that kvpool promises, measured on this machine.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

constexpr Section kSections[] = {
    {"pool", "the block pool alone, one thread: operations, bookkeeping, growth of cost with size",
     BenchPool},
};

struct Flags {
  std::vector<std::string> only;  // Empty: all.
  bool json = false;
};

struct Machine {
  std::string cpu = "unknown";
  long cores = 0;
};

Machine ThisMachine() {
  Machine machine = {.cores = sysconf(_SC_NPROCESSORS_ONLN)};
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::vector<std::string> field = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (field.size() != 2 || absl::StripAsciiWhitespace(field[0]) != "model name") continue;
    machine.cpu = std::string(absl::StripAsciiWhitespace(field[1]));
    break;
  }
  return machine;
}

std::string BoundText(const Figure& figure) {
  if (!figure.bound) return "";
  return absl::StrCat(figure.bound->at_least ? ">= " : "<= ", figure.bound->limit);
}

void PrintTable(const Machine& machine, const Figures& figures) {
  std::printf("%s, %ld cores; commit %s; build %s\n", machine.cpu.c_str(), machine.cores, KVPOOL_COMMIT,
              KVPOOL_BUILD);
  for (const std::string& note : figures.notes()) std::printf("%s\n", note.c_str());
  std::printf("\n%-10s %-44s %14s %-10s %12s\n", "section", "figure", "value", "unit", "bound");
  for (const Figure& f : figures.all()) {
    if (!f.skipped.empty()) {
      std::printf("%-10s %-44s not measured: %s\n", f.section.c_str(), f.name.c_str(), f.skipped.c_str());
      continue;
    }
    std::printf("%-10s %-44s %14.6g %-10s %12s %s\n", f.section.c_str(), f.name.c_str(), f.value,
                f.unit.c_str(), BoundText(f).c_str(),
                !f.bound  ? ""
                : f.met() ? "met"
                          : "MISSED");
  }
}

std::string Quoted(std::string_view text) {
  return absl::StrCat("\"", absl::Utf8SafeCEscape(absl::string_view(text.data(), text.size())), "\"");
}

void PrintJson(const Machine& machine, const Figures& figures) {
  std::vector<std::string> rows;
  for (const Figure& f : figures.all()) {
    std::string row = absl::StrCat("    {\"section\": ", Quoted(f.section), ", \"name\": ", Quoted(f.name));
    if (!f.skipped.empty()) {
      absl::StrAppend(&row, ", \"skipped\": ", Quoted(f.skipped), "}");
    } else {
      absl::StrAppend(&row, ", \"value\": ", f.value, ", \"unit\": ", Quoted(f.unit));
      if (f.bound) {
        absl::StrAppend(&row, f.bound->at_least ? ", \"at_least\": " : ", \"at_most\": ", f.bound->limit,
                        ", \"met\": ", f.met() ? "true" : "false");
      }
      absl::StrAppend(&row, "}");
    }
    rows.push_back(std::move(row));
  }
  const std::string notes = absl::StrJoin(
      figures.notes(), ", ", [](std::string* out, const std::string& note) { out->append(Quoted(note)); });
  std::printf(
      "{\n  \"cpu\": %s,\n  \"cores\": %ld,\n  \"commit\": %s,\n  \"build\": %s,\n  \"notes\": [%s],\n"
      "  \"figures\": [\n%s\n  ]\n}\n",
      Quoted(machine.cpu).c_str(), machine.cores, Quoted(KVPOOL_COMMIT).c_str(), Quoted(KVPOOL_BUILD).c_str(),
      notes.c_str(), absl::StrJoin(rows, ",\n").c_str());
}

int Usage(std::string_view problem) {
  std::fprintf(stderr, "%.*s\nusage: kvpool-bench [--json] [--only=SECTION,...]\nsections:\n",
               static_cast<int>(problem.size()), problem.data());
  for (const Section& section : kSections) {
    std::fprintf(stderr, "  %-10s %s\n", std::string(section.name).c_str(),
                 std::string(section.summary).c_str());
  }
  return 2;
}

bool Wanted(const Flags& flags, std::string_view section) {
  for (const std::string& only : flags.only) {
    if (only == section) return true;
  }
  return flags.only.empty();
}

int Main(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--json") {
      flags.json = true;
    } else if (arg.starts_with("--only=")) {
      flags.only = absl::StrSplit(argv[i] + std::strlen("--only="), ',');
    } else {
      return Usage(absl::StrCat("unknown argument \"", argv[i], "\""));
    }
  }
  for (const std::string& only : flags.only) {
    bool known = false;
    for (const Section& section : kSections) known |= section.name == only;
    if (!known) return Usage(absl::StrCat("--only: no section \"", only, "\""));
  }
  Figures figures;
  for (const Section& section : kSections) {
    if (!Wanted(flags, section.name)) continue;
    std::fprintf(stderr, "%s ...\n", std::string(section.name).c_str());
    figures.BeginSection(section.name);
    section.run(&figures);
  }
  (flags.json ? PrintJson : PrintTable)(ThisMachine(), figures);
  for (const Figure& figure : figures.all()) {
    if (!figure.met()) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvpool::bench

int main(int argc, char** argv) { return kvpool::bench::Main(argc, argv); }
