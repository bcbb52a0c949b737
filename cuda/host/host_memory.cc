#include "cuda/host/host_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace kvpool {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// The number after `key` at the start of a line: "MemAvailable:   123 kB", "inactive_file 123".
std::optional<uint64_t> Field(const std::string& text, absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::ConsumePrefix(&line, key)) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t value = 0;
    if (!words.empty() && absl::SimpleAtoi(words[0], &value)) return value;
  }
  return std::nullopt;
}

// The number in a file; nullopt for "max" and for a file that is not there.
std::optional<uint64_t> Number(const std::string& path) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(ReadFile(path), &value)) return std::nullopt;
  return value;
}

struct GroupFiles {
  const char* limit;
  const char* usage;
  const char*
      cache;  // Field of memory.stat: page cache not in use, which the kernel drops before it says no.
};
constexpr GroupFiles kVersion2 = {"/memory.max", "/memory.current", "inactive_file "};
constexpr GroupFiles kVersion1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file "};

void ApplyGroup(const std::string& folder, const GroupFiles& files, HostMemory* memory) {
  const std::optional<uint64_t> limit = Number(absl::StrCat(folder, files.limit));
  const std::optional<uint64_t> usage = Number(absl::StrCat(folder, files.usage));
  if (!limit.has_value() || !usage.has_value()) return;
  const uint64_t cache = Field(ReadFile(absl::StrCat(folder, "/memory.stat")), files.cache).value_or(0);
  const uint64_t held = *usage - std::min(*usage, cache);
  memory->total_bytes = std::min<uint64_t>(memory->total_bytes, *limit);
  memory->available_bytes = std::min<uint64_t>(memory->available_bytes, *limit - std::min(*limit, held));
}

// Every group from this process's own up to the root, each of which may have a limit. In a container the path
// named may not exist under the mount, whose root then is the container's own group.
void ApplyGroups(const std::string& mount, std::string path, const GroupFiles& files, HostMemory* memory) {
  while (true) {
    ApplyGroup(absl::StrCat(mount, path), files, memory);
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return;
    path.resize(slash);
  }
}

}  // namespace

absl::StatusOr<HostMemory> ReadHostMemory(const std::string& root) {
  const std::string meminfo_path = absl::StrCat(root, "/proc/meminfo");
  const std::string meminfo = ReadFile(meminfo_path);
  const std::optional<uint64_t> total_kib = Field(meminfo, "MemTotal:");
  const std::optional<uint64_t> available_kib = Field(meminfo, "MemAvailable:");
  if (!total_kib.has_value() || !available_kib.has_value()) {
    return absl::UnavailableError(absl::StrCat(meminfo_path, ": no MemTotal or no MemAvailable"));
  }
  HostMemory memory = {.total_bytes = *total_kib << 10, .available_bytes = *available_kib << 10};
  constexpr uint64_t kHugePageKib = 2048;
  if (Field(meminfo, "Hugepagesize:") == kHugePageKib) {
    memory.huge_free_bytes = Field(meminfo, "HugePages_Free:").value_or(0) * (kHugePageKib << 10);
  }
  const std::string groups = ReadFile(absl::StrCat(root, "/proc/self/cgroup"));
  for (absl::string_view line : absl::StrSplit(groups, '\n')) {
    // hierarchy:controllers:path
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::string path(absl::StripSuffix(parts[2], "/"));
    if (parts[0] == "0") ApplyGroups(absl::StrCat(root, "/sys/fs/cgroup"), path, kVersion2, &memory);
    if (parts[1] == "memory")
      ApplyGroups(absl::StrCat(root, "/sys/fs/cgroup/memory"), path, kVersion1, &memory);
  }
  return memory;
}

}  // namespace kvpool
