// How fast a tier stores and loads, beside a program that does nothing but move the same bytes in the same way: fio for files,
// redis-benchmark for a Redis.
//
// Both have the same folder or server, sizes, and as much under way, and take turns within one run, round for round; what counts is
// the ratio of each pair. What a tier does for its bytes besides (checksums, keys, records) is in its figure. A file
// tier and fio have 4 threads, O_DIRECT and preallocated files, and neither syncs; a Redis writes nothing to disk. The
// last value of each buffer that was loaded is compared with what was stored.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "nlohmann/json.hpp"
#include "proto/support/check.h"
#include "proto/support/mutex.h"
#include "server/tiers/crc32c.h"
#include "server/tiers/file_tier.h"
#include "server/tiers/resp_tier.h"
#include "tests/bench/figures.h"
#include "tests/tiers/redis_server.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kSizes[] = {64 << 10, 256 << 10, 1 << 20, 4 << 20};
constexpr uint64_t kJudgedFrom = 1 << 20;
constexpr double kLeastRatio = .8;
// The first one warms both up, and does not count.
constexpr uint32_t kRounds = 10;
constexpr uint64_t kRoundBytes = 512 << 20;
constexpr uint32_t kThreads = 4;
constexpr uint32_t kConnections = 4, kPipeline = 4;
constexpr char kInstall[] = " is not installed: deploy/install_deps.sh test installs it";

struct Measured {
  double gb_per_s = 0;
  double cpu_s_per_gb = 0;  // User and system time of the process.
};

double CpuSeconds(int who) {
  rusage used{};
  getrusage(who, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

// What a program prints; the bench ends where it fails.
std::string OutputOf(const std::string& command) {
  FILE* const lines = popen(command.c_str(), "r");
  KVPOOL_CHECK(lines != nullptr, "%s does not start", command.c_str());
  std::string output;
  for (char some[4096]; const size_t got = fread(some, 1, sizeof(some), lines);) output.append(some, got);
  const int status = pclose(lines);
  KVPOOL_CHECK(status == 0, "%s ended with status %d", command.c_str(), status);
  return output;
}

bool Installed(const std::string& program) {
  return std::system(absl::StrCat("command -v ", program, " >/dev/null").c_str()) == 0;
}

std::string SizeText(uint64_t bytes) {
  return bytes < 1 << 20 ? absl::StrCat(bytes >> 10, " KiB") : absl::StrCat(bytes >> 20, " MiB");
}

// So many values under way, each in a buffer of its own. The next value of a buffer is asked for when the last one is answered.
class Flow {
 public:
  Flow(Tier* tier, uint64_t value_bytes, uint32_t under_way)
      : tier_(*tier), value_bytes_(value_bytes), under_way_(under_way) {
    for (uint32_t i = 0; i < under_way; ++i) {
      values_.push_back(ValueOf(i, value_bytes));
      into_.push_back(BufferStock(0).Take(value_bytes));
      std::memset(into_.back()->data(), 0, value_bytes);
    }
  }

  Measured Store(absl::Span<const uint32_t> numbers) {
    return Run(numbers, [this](uint32_t number, Tier::Done done) {
      tier_.Store({{KeyOf(number), values_[number % under_way_]}}, std::move(done));
    });
  }

  Measured Load(absl::Span<const uint32_t> numbers) {
    const Measured measured = Run(numbers, [this](uint32_t number, Tier::Done done) {
      tier_.Load({{KeyOf(number), into_[number % under_way_]}}, Tier::Deadline::max(), std::move(done));
    });
    for (uint32_t i = 0; i < under_way_; ++i) {
      KVPOOL_CHECK(std::memcmp(values_[i]->data(), into_[i]->data(), value_bytes_) == 0,
                   "%s: another value was loaded than was stored", std::string(tier_.name()).c_str());
    }
    return measured;
  }

 private:
  using Ask = std::function<void(uint32_t number, Tier::Done done)>;

  Measured Run(absl::Span<const uint32_t> numbers, const Ask& ask) {
    std::vector<std::vector<uint32_t>> left(under_way_);
    for (const uint32_t number : numbers) left[number % under_way_].push_back(number);
    Mutex mu;
    CondVar over;
    uint32_t flows = under_way_;
    std::function<void(uint32_t)> next = [&](uint32_t flow) {
      if (left[flow].empty()) {
        MutexLock lock(&mu);
        if (--flows == 0) over.SignalAll();
        return;
      }
      const uint32_t number = left[flow].back();
      left[flow].pop_back();
      ask(number, [&, flow](size_t, TierResult result) {
        KVPOOL_CHECK(result == TierResult::kDone, "%s: a value ended with result %d",
                     std::string(tier_.name()).c_str(), static_cast<int>(result));
        next(flow);
      });
    };
    for (std::vector<uint32_t>& flow : left) std::reverse(flow.begin(), flow.end());
    const double cpu = CpuSeconds(RUSAGE_SELF);
    const auto begin = Clock::now();
    for (uint32_t flow = 0; flow < under_way_; ++flow) next(flow);
    {
      MutexLock lock(&mu);
      while (flows > 0) over.Wait(&mu);
    }
    const std::chrono::duration<double> took = Clock::now() - begin;
    const double used = CpuSeconds(RUSAGE_SELF) - cpu;
    tier_.Drain();
    const double gb = static_cast<double>(numbers.size() * value_bytes_) * 1e-9;
    return {.gb_per_s = gb / took.count(), .cpu_s_per_gb = used / gb};
  }

  Tier& tier_;
  const uint64_t value_bytes_;
  const uint32_t under_way_;
  std::vector<std::shared_ptr<TierBuffer>> values_, into_;
};

// What one kind of work did in each round, the tier and the yardstick beside it.
struct Pairs {
  std::string name;
  std::vector<Measured> tier, yardstick;
};

// Who is the second may pay for what the first one left to the system: they take turns.
void Measure(uint32_t round, Pairs* pairs, const std::function<Measured()>& tier,
             const std::function<Measured()>& yardstick) {
  if (round % 2 == 0) pairs->tier.push_back(tier());
  pairs->yardstick.push_back(yardstick());
  if (round % 2 != 0) pairs->tier.push_back(tier());
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string Spread(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return absl::StrFormat("%.2f to %.2f", *least, *most);
}

void Report(const Pairs& pairs, uint64_t value_bytes, std::string_view yardstick, Figures* figures) {
  std::vector<double> tier, other, ratio, tier_cpu, other_cpu;
  // Without the first round.
  for (size_t round = 1; round < pairs.tier.size(); ++round) {
    tier.push_back(pairs.tier[round].gb_per_s);
    other.push_back(pairs.yardstick[round].gb_per_s);
    ratio.push_back(tier.back() / other.back());
    tier_cpu.push_back(pairs.tier[round].cpu_s_per_gb);
    other_cpu.push_back(pairs.yardstick[round].cpu_s_per_gb);
  }
  const std::string name = absl::StrCat(pairs.name, ", ", SizeText(value_bytes));
  const std::string by(yardstick);
  figures->Note(absl::StrFormat("%s: tier %s GB/s, %s %s GB/s, ratio %s; processor time %.2f and %.2f s/GB",
                                name, Spread(tier), by, Spread(other), Spread(ratio), Median(tier_cpu),
                                Median(other_cpu)));
  figures->Add(name, Median(tier), "GB/s");
  figures->Add(absl::StrCat(name, ", ", by), Median(other), "GB/s");
  figures->Add(absl::StrCat(name, ", tier / ", by), Median(ratio), "",
               value_bytes >= kJudgedFrom ? std::optional<Bound>(AtLeast(kLeastRatio)) : std::nullopt);
}

std::vector<uint32_t> Known(Tier* tier, const std::vector<uint32_t>& numbers) {
  const std::vector<bool> there = Exists(tier, numbers);
  std::vector<uint32_t> known;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (there[i]) known.push_back(numbers[i]);
  }
  return known;
}

void NoteMachine(Figures* figures) {
  double load[1] = {};
  if (getloadavg(load, 1) != 1) load[0] = -1;
  const auto value = ValueOf(0, kSizes[2]);
  constexpr int kTimes = 200;
  uint32_t crc = 0;
  const auto begin = Clock::now();
  for (int i = 0; i < kTimes; ++i) crc = Crc32c(value->data(), value->bytes(), crc);
  const std::chrono::duration<double> took = Clock::now() - begin;
  figures->Note(
      absl::StrFormat("load average %.2f before it; rounds of %u MiB, of which %u count, turn about; CRC-32C "
                      "alone %.1f GB/s (sum %08x)",
                      load[0], kRoundBytes >> 20, kRounds - 1,
                      static_cast<double>(value->bytes() * kTimes) * 1e-9 / took.count(), crc));
}

// ---------------------------------------------------------------------------------------------------- files

// Four threads write or read as many files of whole extents, past the page cache.
Measured Fio(const std::string& folder, std::string_view way, uint64_t value_bytes) {
  const std::string output = OutputOf(absl::StrCat(
      "fio --name=yardstick --directory=", folder, " --ioengine=psync --thread --numjobs=", kThreads,
      " --direct=1 --fallocate=native --rw=", std::string(way), " --bs=", value_bytes,
      " --size=", kRoundBytes / kThreads, " --group_reporting --output-format=json"));
  const auto facts = nlohmann::json::parse(output, nullptr, false);
  const auto fact = [&](const std::string& path) {
    const nlohmann::json::json_pointer at("/jobs/0/" + path);
    KVPOOL_CHECK(!facts.is_discarded() && facts.contains(at), "fio says %s", output.c_str());
    return facts[at].get<double>();
  };
  const double cpu_s = (fact("usr_cpu") + fact("sys_cpu")) * .01 * fact("job_runtime") * 1e-3;
  return {.gb_per_s = fact(std::string(way) + "/bw_bytes") * 1e-9,
          .cpu_s_per_gb = cpu_s / (static_cast<double>(kRoundBytes) * 1e-9)};
}

// A folder for one round, which goes with it.
class RoundFolder {
 public:
  explicit RoundFolder(const std::string& parent) : path_(parent + "/kvpool-bench.XXXXXX") {
    KVPOOL_CHECK(mkdtemp(path_.data()) != nullptr, "%s can't be made", path_.c_str());
  }
  ~RoundFolder() { std::filesystem::remove_all(path_); }
  RoundFolder(const RoundFolder&) = delete;
  RoundFolder& operator=(const RoundFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::unique_ptr<FileTier> OpenFileTier(const std::string& folder) {
  auto tier = FileTier::Open({.path = folder, .capacity_bytes = kRoundBytes, .threads = kThreads});
  KVPOOL_CHECK(tier.ok(), "%s", tier.status().ToString().c_str());
  return *std::move(tier);
}

void BenchFiles(const std::string& parent, uint64_t value_bytes, Figures* figures) {
  const auto count = static_cast<uint32_t>(kRoundBytes / value_bytes);
  Pairs fresh{.name = "file, store"}, over{.name = "file, store over others"}, load{.name = "file, load"};
  for (uint32_t round = 0; round < kRounds; ++round) {
    const RoundFolder folder(parent), other(parent);
    const std::unique_ptr<FileTier> tier = OpenFileTier(folder.path() + "/tier");
    Flow flow(tier.get(), value_bytes, kThreads);
    const auto write = [&] { return Fio(other.path(), "write", value_bytes); };
    Measure(
        round, &fresh, [&] { return flow.Store(Numbers(count)); }, write);
    // Each takes the place of an earlier one.
    Measure(
        round, &over, [&] { return flow.Store(Numbers(count, count)); }, write);
    const std::vector<uint32_t> there = Known(tier.get(), Numbers(count, count));
    Measure(
        round, &load, [&] { return flow.Load(there); },
        [&] { return Fio(other.path(), "read", value_bytes); });
  }
  for (const Pairs* const pairs : {&fresh, &over, &load}) Report(*pairs, value_bytes, "fio", figures);
}

void BenchFileTier(Figures* figures) {
  const std::string parent =
      figures->tier_path().empty() ? std::filesystem::temp_directory_path().string() : figures->tier_path();
  if (!Installed("fio")) return figures->Skip("file", absl::StrCat("fio", kInstall));
  {
    const RoundFolder folder(parent);
    if (!absl::StrContains(OpenFileTier(folder.path() + "/tier")->describe(), "O_DIRECT"))
      return figures->Skip("file",
                           absl::StrCat(parent, " takes no O_DIRECT; --tier-path names another folder"));
  }
  figures->Note(absl::StrCat("files in ", parent, ", ", kThreads,
                             " threads and as many values under way, O_DIRECT, no sync; fio: psync"));
  for (const uint64_t bytes : kSizes) BenchFiles(parent, bytes, figures);
}

// --------------------------------------------------------------------------------------------------- a Redis

Measured RedisBenchmark(const RedisServer& server, uint64_t value_bytes, uint32_t count,
                        const std::string& test) {
  // Of the processes of the bench no other ends meanwhile.
  const double cpu = CpuSeconds(RUSAGE_CHILDREN);
  const std::string output =
      OutputOf(absl::StrCat("redis-benchmark -p ", server.port(), " -c ", kConnections, " -P ", kPipeline,
                            " -d ", value_bytes, " -n ", count, " --csv ", test));
  const double used = CpuSeconds(RUSAGE_CHILDREN) - cpu;
  const std::vector<std::string> lines = absl::StrSplit(output, '\n');
  const std::vector<std::string> fields = absl::StrSplit(lines.size() < 2 ? "" : lines[1], ',');
  double rate = 0;
  KVPOOL_CHECK(fields.size() > 1 &&
                   absl::SimpleAtod(absl::StripPrefix(absl::StripSuffix(fields[1], "\""), "\""), &rate),
               "redis-benchmark says %s", output.c_str());
  return {.gb_per_s = rate * static_cast<double>(value_bytes) * 1e-9,
          .cpu_s_per_gb = used / (static_cast<double>(count * value_bytes) * 1e-9)};
}

void BenchRedis(uint64_t value_bytes, Figures* figures) {
  const auto count = static_cast<uint32_t>(kRoundBytes / value_bytes);
  const RedisServer server;
  const auto empty = [&] { KVPOOL_CHECK(server.Command({"FLUSHALL", "SYNC"}) == "OK", "no FLUSHALL"); };
  auto tier = RespTier::Open({.endpoint = server.endpoint(), .connections = kConnections});
  KVPOOL_CHECK(tier.ok(), "%s", tier.status().ToString().c_str());
  Flow flow(tier->get(), value_bytes, kConnections * kPipeline);
  Pairs store{.name = "resp, store"}, load{.name = "resp, load"};
  for (uint32_t round = 0; round < kRounds; ++round) {
    Measure(
        round, &store,
        [&] {
          empty();
          // What it has stored before is not stored again.
          return flow.Store(Numbers(count, round * count));
        },
        [&] {
          empty();
          // Of so many keys hardly one comes twice.
          return RedisBenchmark(server, value_bytes, count, "-r 1000000000 -t set");
        });
  }
  empty();
  const std::vector<uint32_t> numbers = Numbers(count, kRounds * count);
  flow.Store(numbers);
  const std::string filled = server.Command({"EVAL",
                                             "for i = 0, ARGV[1] - 1 do redis.call('SET', "
                                             "string.format('key:%012d', i), string.rep('x', ARGV[2])) end",
                                             "0", absl::StrCat(count), absl::StrCat(value_bytes)});
  KVPOOL_CHECK(filled == "(nil)", "redis says %s", filled.c_str());
  for (uint32_t round = 0; round < kRounds; ++round) {
    Measure(
        round, &load, [&] { return flow.Load(numbers); },
        [&] {
          return RedisBenchmark(server, value_bytes, count,
                                absl::StrCat("-r ", count, " GET key:__rand_int__"));
        });
  }
  Report(store, value_bytes, "redis-benchmark", figures);
  Report(load, value_bytes, "redis-benchmark", figures);
}

void BenchRespTier(Figures* figures) {
  if (RedisServer::Program().empty() || !Installed("redis-benchmark"))
    return figures->Skip("resp", absl::StrCat("redis-tools", kInstall));
  figures->Note(absl::StrCat("a Redis on this machine, ", kConnections, " connections; redis-benchmark has ",
                             kPipeline, " requests on each, and the tier as many values under way"));
  for (const uint64_t bytes : kSizes) BenchRedis(bytes, figures);
}

}  // namespace

void BenchTiers(Figures* figures) {
  NoteMachine(figures);
  BenchFileTier(figures);
  BenchRespTier(figures);
}

}  // namespace kvpool::bench
