// The pool against its model, over a million random steps. A failure prints the seed and the shortest diary
// that still fails.
//
// Each diary is played in a child process: a broken invariant aborts, and that is a finding to
// shrink as well.
#include "tests/pool/diary.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/replacement/policy.h"

namespace kvpool::diary {
namespace {

constexpr uint32_t kStepsPerDiary = 8000;
// Diaries of each setting; fewer where a sanitizer slows each step.
constexpr uint32_t kDiaries = KVPOOL_DIARIES;
// Steps between two walks through everything.
constexpr uint32_t kStepsPerCheck = 64;

// The child reports through shared memory, since it may abort.
struct Report {
  uint32_t steps;       // steps finished
  uint64_t liveliness;  // The least of the blocks sealed, found sealed, matched and evicted.
  uint64_t moved;
};
class SharedReport {
 public:
  SharedReport()
      : report_(static_cast<Report*>(
            mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedReport() { munmap(report_, sizeof(Report)); }
  SharedReport(const SharedReport&) = delete;
  SharedReport& operator=(const SharedReport&) = delete;
  volatile Report* operator->() const { return report_; }

 private:
  Report* const report_;
};

// True if `play` answers true and nothing aborts.
template <typename Play>
bool InChild(bool quiet, Play play) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (quiet) (void)!freopen("/dev/null", "w", stderr);
    const bool fine = play();
    std::fflush(nullptr);
    _exit(fine ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool Step(Pair* pair, const Entry& entry, uint32_t step) {
  std::string difference = pair->Apply(entry);
  if (difference.empty()) difference = pair->Difference();
  if (difference.empty() && step % kStepsPerCheck == 0) {
    difference = pair->DifferenceOfKeys();
    pair->pool().CheckInvariants();
  }
  if (difference.empty()) return true;
  std::fprintf(stderr, "%s\n  %s\n", Print(entry).c_str(), difference.c_str());
  return false;
}

bool Play(const Setting& setting, uint64_t seed, SharedReport* report) {
  Pair pair(setting);
  Generator generator(setting, seed);
  for (uint32_t step = 0; step < kStepsPerDiary; ++step) {
    (*report)->steps = step;
    if (!Step(&pair, generator.Next(pair.model()), step)) return false;
  }
  const PoolCounters& c = pair.pool().counters();
  (*report)->moved = c.moved;
  (*report)->liveliness =
      std::min({c.sealed, c.deduplicated, c.hit_blocks, c.evicted[0] + c.evicted[1] + c.evicted[2]});
  return true;
}

bool Replay(const Setting& setting, const Diary& diary) {
  Pair pair(setting);
  for (const Entry& entry : diary) {
    if (!Step(&pair, entry, 0)) return false;
  }
  return true;
}

// Answers the entries up to the one that failed, which it finds by applying them again.
Diary Remember(const Setting& setting, uint64_t seed, uint32_t failed_step) {
  Pair pair(setting);
  Generator generator(setting, seed);
  Diary diary;
  for (uint32_t step = 0; step <= failed_step; ++step) {
    diary.push_back(generator.Next(pair.model()));
    if (step < failed_step) pair.Apply(diary.back());
  }
  return diary;
}

// Leaves out ever smaller pieces as long as it still fails.
Diary Shorten(const Setting& setting, Diary diary) {
  int attempts_left = 3000;
  for (size_t piece = diary.size() / 2; piece > 0; piece = piece == 1 ? 0 : piece / 2) {
    for (size_t at = 0; at < diary.size() && attempts_left-- > 0;) {
      Diary shorter(diary.begin(), diary.begin() + at);
      shorter.insert(shorter.end(), diary.begin() + std::min(at + piece, diary.size()), diary.end());
      if (InChild(/*quiet=*/true, [&] { return Replay(setting, shorter); })) {
        at += piece;
      } else {
        diary = std::move(shorter);
      }
    }
  }
  return diary;
}

class DiaryTest : public ::testing::TestWithParam<Setting> {};

TEST_P(DiaryTest, PoolAndModelAgree) {
  const Setting& setting = GetParam();
  const char* const given = std::getenv("KVPOOL_DIARY_SEED");
  const uint64_t first_seed = given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
  const uint32_t diaries = setting.diaries == 0 ? kDiaries : std::min(kDiaries, setting.diaries);
  std::printf("seeds %lu to %lu (KVPOOL_DIARY_SEED sets the first), %u steps each\n", first_seed,
              first_seed + diaries - 1, kStepsPerDiary);
  SharedReport report;
  uint64_t moved = 0;
  for (uint64_t seed = first_seed; seed < first_seed + diaries; ++seed) {
    if (InChild(/*quiet=*/false, [&] { return Play(setting, seed, &report); })) {
      moved += report->moved;
      EXPECT_GE(report->liveliness, kStepsPerDiary / 200) << "the generator lets the pool fall asleep";
      continue;
    }
    const Diary diary = Shorten(setting, Remember(setting, seed, report->steps));
    std::string text;
    for (const Entry& entry : diary) absl::StrAppend(&text, "    ", Print(entry), "\n");
    InChild(/*quiet=*/false, [&] { return Replay(setting, diary); });
    FAIL() << "seed " << seed << " fails at step " << report->steps << "; " << diary.size()
           << " steps are enough:\n"
           << text;
  }
  std::printf("%lu blocks moved\n", moved);
  // One diary, as a sanitizer's build plays it, may move none.
  if (diaries > 2 && setting.blocks > 4) EXPECT_GT(moved, 0u);
}

// Some pools are so small that everything collides, others have room for long chains.
std::vector<Setting> Settings() {
  const uint32_t nearly_last = UINT32_MAX - 60;
  std::vector<Setting> settings = {
      {.name = "Four",
       .options = {.max_blocks = 5, .windows = {0}, .pin_budget = 0.5},
       .blocks = 4,
       .key_depth = 3},
      {.name = "Eight",
       .options = {.max_blocks = 12, .slab_blocks = 3, .windows = {0}, .pin_budget = 0.5},
       .key_depth = 4},
      {.name = "OneSession", .options = {.max_blocks = 17, .windows = {0}}, .blocks = 16, .sessions = 1},
      {.name = "Crowd",
       .options = {.max_blocks = 25, .slab_blocks = 4, .windows = {0}},
       .blocks = 16,
       .sessions = 12},
      {.name = "Chains",
       .options = {.max_blocks = 65, .slab_blocks = 8, .windows = {0}, .pin_budget = 1},
       .blocks = 64,
       .key_depth = 8},
      {.name = "Window", .options = {.max_blocks = 17, .windows = {2}}, .blocks = 16},
      {.name = "FullAndWindow",
       .options = {.max_blocks = 33, .slab_blocks = 5, .windows = {0, 2}, .pin_budget = 0.4},
       .blocks = 24,
       .tokens = {1, 1}},
      {.name = "BlockSizes",
       .options = {.max_blocks = 49, .windows = {0, 1, 0, 3}},
       .blocks = 48,
       .tokens = {1, 1, 2, 3},
       .key_depth = 7},
      {.name = "Growing",
       .options = {.max_blocks = 65, .slab_blocks = 16, .windows = {0, 0}},
       .blocks = 0,
       .tokens = {2, 1}},
      {.name = "LastGeneration",
       .options = {.max_blocks = 65,
                   .slab_blocks = 7,
                   .windows = {0},
                   .pin_budget = 0.5,
                   .first_generation = nearly_last},
       .blocks = 32,
       .key_depth = 4},
  };
  settings.push_back({.name = "Switching",
                      .options = {.max_blocks = 65, .windows = {0}, .pin_budget = 0.5},
                      .blocks = 64,
                      .key_depth = 8,
                      .switches = true});
  settings.push_back({.name = "SwitchingFullAndWindow",
                      .options = {.max_blocks = 33, .windows = {0, 2}, .pin_budget = 0.4},
                      .blocks = 24,
                      .tokens = {1, 1},
                      .switches = true});
  // Every other policy is checked against the guards by the model, and against its naive twin where
  // it has one.
  for (const PolicyEntry& policy : ReplacementPolicies()) {
    if (policy.name == "lru") continue;
    const std::string name(policy.name);
    settings.push_back({.name = name + "_Chains",
                        .options = {.max_blocks = 65, .slab_blocks = 8, .windows = {0}, .pin_budget = 0.5},
                        .blocks = 64,
                        .key_depth = 8,
                        .policy = name,
                        .diaries = 2});
    settings.push_back({.name = name + "_FullAndWindow",
                        .options = {.max_blocks = 33, .windows = {0, 2}, .pin_budget = 0.4},
                        .blocks = 24,
                        .tokens = {1, 1},
                        .policy = name,
                        .diaries = 1});
  }
  return settings;
}

INSTANTIATE_TEST_SUITE_P(Pool, DiaryTest, ::testing::ValuesIn(Settings()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvpool::diary
