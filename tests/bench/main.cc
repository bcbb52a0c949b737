// kvpool-bench: the figures that kvpool promises, measured on this machine.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/tools/text.h"
#include "proto/cli/flags.h"
#include "proto/cli/version.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
namespace {

constexpr Section kSections[] = {
    {"pool", "the block pool alone, one thread: operations, bookkeeping, growth of cost with size",
     BenchPool},
    {"evict", "a victim at a million cached blocks by policy, and a decision of one that thinks", BenchEvict},
    {"score", "the host's pass over K and V against the memory's own speed; eviction per generated token",
     BenchScore},
    {"magazine", "Lease and Release of one block from the client's magazine, one thread", BenchMagazine},
    {"request", "a whole request of 64 blocks: the engine thread's own CPU time", BenchRequest},
    {"step", "the Step stream's round trip against a bare gRPC echo stream", BenchStep},
    {"keeper", "what a keeper costs verbs: pairs of a daemon with one and one without", BenchKeeper},
    {"traffic", "verbs of resident blocks beside blocks that go to a tier and come from it", BenchTraffic,
     true},
    {"two_clients", "block operations per second of two client processes and one daemon", BenchTwoClients},
    {"latency", "a verb beside operator calls, openings, ends and scrapes, at a million cached blocks",
     BenchLatency},
    {"flood", "a Match beside a flood of each verb by another tenant: reported, not bounded", BenchFlood},
    {"prune", "Prune of a live sequence through the daemon", BenchPrune},
    {"sessions", "what a daemon keeps of sessions that were closed", BenchSessions},
    {"kill", "from an engine's SIGKILL to its blocks leasable again", BenchKill},
    {"restart", "a million cached blocks when the daemon is killed, or upgraded, with a keeper",
     BenchRestart},
    {"goodput", "two models with bursts on one pool, against two halves of it, in virtual time",
     BenchGoodput},
    {"tiers", "values to and from files and a Redis, against fio and redis-benchmark", BenchTiers, true},
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
  std::printf("%s, %ld cores; commit %s; build %s\n", machine.cpu.c_str(), machine.cores, Commit(),
              KVPOOL_BUILD);
  for (const std::string& note : figures.notes()) std::printf("%s\n", note.c_str());
  std::printf("\n%-11s %-44s %14s %-10s %12s\n", "section", "figure", "value", "unit", "bound");
  for (const Figure& f : figures.all()) {
    if (!f.skipped.empty()) {
      std::printf("%-11s %-44s not measured: %s\n", f.section.c_str(), f.name.c_str(), f.skipped.c_str());
      continue;
    }
    std::printf("%-11s %-44s %14.6g %-10s %12s %s\n", f.section.c_str(), f.name.c_str(), f.value,
                f.unit.c_str(), BoundText(f).c_str(),
                !f.bound  ? ""
                : f.met() ? "met"
                          : "MISSED");
  }
}

void PrintJson(const Machine& machine, const Figures& figures) {
  std::vector<std::string> rows;
  for (const Figure& f : figures.all()) {
    std::string row = absl::StrCat("    {\"section\": ", tools::JsonQuote(f.section),
                                   ", \"name\": ", tools::JsonQuote(f.name));
    if (!f.skipped.empty()) {
      absl::StrAppend(&row, ", \"skipped\": ", tools::JsonQuote(f.skipped), "}");
    } else {
      absl::StrAppend(&row, ", \"value\": ", f.value, ", \"unit\": ", tools::JsonQuote(f.unit));
      if (f.bound) {
        absl::StrAppend(&row, f.bound->at_least ? ", \"at_least\": " : ", \"at_most\": ", f.bound->limit,
                        ", \"met\": ", f.met() ? "true" : "false");
      }
      absl::StrAppend(&row, "}");
    }
    rows.push_back(std::move(row));
  }
  const std::string notes =
      absl::StrJoin(figures.notes(), ", ",
                    [](std::string* out, const std::string& note) { out->append(tools::JsonQuote(note)); });
  std::printf(
      "{\n  \"cpu\": %s,\n  \"cores\": %ld,\n  \"commit\": %s,\n  \"build\": %s,\n  \"notes\": [%s],\n"
      "  \"figures\": [\n%s\n  ]\n}\n",
      tools::JsonQuote(machine.cpu).c_str(), machine.cores, tools::JsonQuote(Commit()).c_str(),
      tools::JsonQuote(KVPOOL_BUILD).c_str(), notes.c_str(), absl::StrJoin(rows, ",\n").c_str());
}

int Fail(absl::string_view problem) {
  std::fprintf(stderr, "kvpool-bench: %s\n", std::string(problem).c_str());
  return 2;
}

int Help(const Flags& flags) {
  std::printf(
      "kvpool-bench [FLAGS]: the figures that kvpool promises, measured on this "
      "machine\n\nFlags:\n%s\nSections:\n",
      flags.Help().c_str());
  for (const Section& section : kSections) {
    std::printf("  %-11s %s%s\n", std::string(section.name).c_str(), std::string(section.summary).c_str(),
                section.when_named ? " (when it is named)" : "");
  }
  std::printf("\nExit status: 0 every bound is met, 1 one is missed, 2 usage.\n");
  return 0;
}

int Main(const std::vector<std::string>& arguments) {
  std::string only, tier_path;
  uint32_t sessions = 2000, flood_ms = 500, latency_tries = 2;
  bool json = false, help = false, version = false;
  Flags flags;
  flags.Add("only", &only,
            "sections to measure, with commas between them; by default all that need not be named");
  flags.Add("sessions", &sessions, {.min = 1, .max = 10000000},
            "how many sessions the section of that name opens and closes");
  flags.Add("latency-tries", &latency_tries, {.min = 1, .max = 100},
            "how often a phase of latency is measured while the host takes the processors");
  flags.Add("flood-ms", &flood_ms, {.min = 100, .max = 60000},
            "how long each flood of the section of that name lasts");
  flags.Add("tier-path", &tier_path,
            "folder of a disk where the section of tiers has its files; that of temporary files by default");
  flags.Add("json", &json, "the figures as JSON");
  flags.Add("help", &help, "this text");
  flags.Add("version", &version, "what this build is");
  const absl::StatusOr<std::vector<std::string>> rest = flags.Parse(arguments);
  if (!rest.ok()) return Fail(rest.status().message());
  if (!rest->empty()) return Fail(absl::StrCat("unexpected argument ", rest->front(), "; see --help"));
  if (help) return Help(flags);
  if (version) {
    std::fputs(VersionText("kvpool-bench").c_str(), stdout);
    return 0;
  }
  const std::vector<std::string> wanted = absl::StrSplit(only, ',', absl::SkipEmpty());
  for (const std::string& name : wanted) {
    const bool known = std::any_of(std::begin(kSections), std::end(kSections),
                                   [&name](const Section& section) { return section.name == name; });
    if (!known) return Fail(absl::StrCat("--only: no section \"", name, "\"; see --help"));
  }
  Figures figures(sessions, flood_ms, latency_tries, tier_path);
  for (const Section& section : kSections) {
    const bool named = std::find(wanted.begin(), wanted.end(), section.name) != wanted.end();
    if (wanted.empty() ? section.when_named : !named) continue;
    std::fprintf(stderr, "%s ...\n", std::string(section.name).c_str());
    figures.BeginSection(section.name);
    section.run(&figures);
  }
  (json ? PrintJson : PrintTable)(ThisMachine(), figures);
  for (const Figure& figure : figures.all()) {
    if (!figure.met()) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvpool::bench

int main(int argc, char** argv) { return kvpool::bench::Main({argv + 1, argv + argc}); }
