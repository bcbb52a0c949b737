#include "server/metrics/process_facts.h"

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

// Of tcmalloc; null where the allocator is another.
extern "C" int __attribute__((weak)) MallocExtension_GetNumericProperty(const char* property, size_t* value);

namespace kvpool {
namespace {

// The number behind `name` at the start of a line of `path`, or 0.
double NumberAfter(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  double number = 0;
  for (std::string word, rest; file >> word; std::getline(file, rest)) {
    if (word == name) return file >> number ? number : 0;
  }
  return 0;
}

double AllocatedBytes() {
  if (MallocExtension_GetNumericProperty != nullptr) {
    size_t bytes = 0;
    MallocExtension_GetNumericProperty("generic.current_allocated_bytes", &bytes);
    return static_cast<double>(bytes);
  }
  const struct mallinfo2 info = mallinfo2();
  return static_cast<double>(info.uordblks + info.hblkhd);
}

}  // namespace

ProcessFacts ReadProcessFacts() {
  ProcessFacts facts;
  std::string stat;
  std::getline(std::ifstream("/proc/self/stat"), stat);
  // Names of programs may have spaces and parentheses: what is behind the last one begins with field 3.
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(stat).substr(stat.rfind(')') + 1), ' ', absl::SkipEmpty());
  const auto field = [&fields](size_t number) {
    double value = 0;
    if (number - 3 < fields.size() && !absl::SimpleAtod(fields[number - 3], &value)) value = 0;
    return value;
  };
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  facts.cpu_seconds = (field(14) + field(15)) / ticks;
  facts.threads = field(20);
  facts.start_time_seconds = NumberAfter("/proc/stat", "btime") + field(22) / ticks;
  facts.virtual_bytes = field(23);
  facts.resident_bytes = field(24) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  facts.anonymous_bytes = NumberAfter("/proc/self/status", "RssAnon:") * 1024;
  facts.heap_bytes = AllocatedBytes();
  std::error_code error;
  const auto open = std::filesystem::directory_iterator("/proc/self/fd", error);
  // The listing itself has one open.
  if (!error) facts.open_fds = static_cast<double>(std::distance(begin(open), end(open)) - 1);
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) facts.max_fds = static_cast<double>(limit.rlim_cur);
  return facts;
}

}  // namespace kvpool
