// What two models with bursts have of one pool, against two halves of it: figures in virtual time, the same on every machine.
// bench_goodput makes them, in a process of its own: the daemon's classes and the client's have the same names.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/support/check.h"
#include "tests/bench/engines.h"
#include "tests/bench/figures.h"

namespace kvpool::bench {
void BenchGoodput(Figures* figures) {
  FILE* const lines = popen(KVPOOL_BENCH_GOODPUT, "r");
  KVPOOL_CHECK(lines != nullptr, "%s does not start", KVPOOL_BENCH_GOODPUT);
  char line[512];
  while (fgets(line, sizeof(line), lines) != nullptr) {
    const std::vector<std::string> fields = absl::StrSplit(absl::StripAsciiWhitespace(line), '\t');
    if (fields.size() == 1) {
      figures->Note(absl::StrCat("goodput: ", fields[0]));
      continue;
    }
    // Which model, then saved and in time, each of the halves and of the one pool.
    std::vector<double> percent(4);
    KVPOOL_CHECK(fields.size() == 5, "\"%s\" has %zu fields", line, fields.size());
    for (size_t i = 0; i < percent.size(); ++i) {
      KVPOOL_CHECK(absl::SimpleAtod(fields[i + 1], &percent[i]), "%s is no number", fields[i + 1].c_str());
    }
    figures->Add(absl::StrCat(fields[0], ": saved, halves"), percent[0], "%");
    figures->Add(absl::StrCat(fields[0], ": saved"), percent[1], "%", AtLeast(percent[0]));
    figures->Add(absl::StrCat(fields[0], ": in time, halves"), percent[2], "%");
    figures->Add(absl::StrCat(fields[0], ": in time"), percent[3], "%", AtLeast(percent[2]));
  }
  const int status = pclose(lines);
  KVPOOL_CHECK(status == 0, "%s ended with status %d", KVPOOL_BENCH_GOODPUT, status);
}

}  // namespace kvpool::bench
