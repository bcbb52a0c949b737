#include "server/machine.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace kvpool {
namespace {

// The tree of cgroups that has the memory controller, as /proc/self/mountinfo shows it.
struct MemoryTree {
  std::string mounted_at, mounted_from;  // The second is the path of the first's cgroup.
  bool v2 = false;

  const char* limit_file() const { return v2 ? "/memory.max" : "/memory.limit_in_bytes"; }
};

std::vector<MemoryTree> MemoryTrees(const std::string& root) {
  std::vector<MemoryTree> trees;
  std::ifstream file(root + "/proc/self/mountinfo");
  // 31 25 0:27 /docker/1a2b /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> mount = absl::StrSplit(halves[0], ' ');
    const std::vector<std::string> what = absl::StrSplit(halves[1], ' ');
    if (mount.size() < 5 || what.size() < 3) continue;
    const bool v2 = what[0] == "cgroup2";
    const std::vector<absl::string_view> options = absl::StrSplit(what[2], ',');
    if (v2 || (what[0] == "cgroup" && absl::c_linear_search(options, "memory"))) {
      trees.push_back({.mounted_at = mount[4], .mounted_from = mount[3], .v2 = v2});
    }
  }
  return trees;
}

// This process's cgroup in the tree, as /proc/self/cgroup names it: "/" for the root, and for a container's own.
std::string OwnCgroup(const MemoryTree& tree, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  // 0::/kubepods/pod1 in v2, 4:cpu,memory:/docker/1a2b in v1.
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (tree.v2 ? parts[0] == "0" : absl::c_linear_search(controllers, "memory")) return parts[2];
  }
  return "/";
}

// The part of the cgroup's path that is below what is mounted; "" where it is not in there.
std::string BelowMount(const std::string& cgroup, const std::string& mounted_from) {
  const std::string prefix = mounted_from == "/" ? "" : mounted_from;
  if (absl::StrContains(cgroup, "/..") || !absl::StartsWith(cgroup, prefix)) return "";
  const std::string below = cgroup.substr(prefix.size());
  return absl::StartsWith(below, "/") && below != "/" ? below : "";
}

}  // namespace

MemoryLimit UsableMemory(const std::string& root) {
  MemoryLimit least{
      .bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE)),
      .source = "RAM"};
  for (const MemoryTree& tree : MemoryTrees(root)) {
    // From the process's cgroup up to the topmost one that is mounted: each limits those in it.
    std::string below = BelowMount(OwnCgroup(tree, root), tree.mounted_from);
    while (true) {
      const std::string path = absl::StrCat(tree.mounted_at, below, tree.limit_file());
      std::ifstream file(root + path);
      uint64_t bytes;
      // v2 writes "max" for no limit, which is no number; v1 a number beyond any machine's memory.
      if (file >> bytes && bytes < least.bytes) least = {.bytes = bytes, .source = path};
      if (below.empty()) break;
      below.resize(below.rfind('/'));
    }
  }
  return least;
}

std::string PromisedGpu(const std::string& root) {
  const auto variable = [](const char* name) -> absl::string_view {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  const absl::string_view visible = variable("CUDA_VISIBLE_DEVICES");
  if (std::getenv("CUDA_VISIBLE_DEVICES") != nullptr && (visible.empty() || visible[0] == '-')) return "";
  if (!visible.empty()) return absl::StrCat("CUDA_VISIBLE_DEVICES=", visible);
  // Container runtimes set it: "void" and "none" say that there is no GPU, or that something else brings it.
  const absl::string_view granted = variable("NVIDIA_VISIBLE_DEVICES");
  if (!granted.empty() && granted != "void" && granted != "none") {
    return absl::StrCat("NVIDIA_VISIBLE_DEVICES=", granted);
  }
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/dev", error)) {
    const std::string name = entry.path().filename();
    if (absl::StartsWith(name, "nvidia")) return "/dev/" + name;
  }
  const std::string driver = "/proc/driver/nvidia";
  return std::filesystem::exists(root + driver, error) ? driver : "";
}

}  // namespace kvpool
