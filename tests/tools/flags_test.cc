// Flags, numbers and tables of the tools.
#include "proto/cli/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "client/tools/text.h"
#include "proto/cli/version.h"
#include "tests/support/daemon_process.h"

namespace kvpool::tools {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

struct Values {
  std::string text = "x";
  bool on = false, off = true;
  uint64_t count = 7;
  double share = 0;
  absl::Duration time = absl::Seconds(1);
  std::string key;
  std::vector<std::string> names;
  Flags flags;

  Values() {
    flags.Add("text", &text, "some text");
    flags.Add("on", &on, "a switch");
    flags.Add("off", &off, "another");
    flags.Add("count", &count, {.min = 1, .max = 10}, "a count");
    flags.Add("share", &share, 1, "a share");
    flags.Add("time", &time, {.max = absl::Hours(1)}, "a time");
    flags.AddBytes("key", &key, 4, "a key");
    flags.AddRepeated("name", &names, "names");
  }
  std::string Error(std::vector<std::string> arguments) {
    const auto rest = flags.Parse(arguments);
    return rest.ok() ? "accepted" : std::string(rest.status().message());
  }
};

TEST(Flags, AnotherDefaultIsShownAndGivesWayToWhatIsGiven) {
  Values v;
  v.flags.SetDefault("time", "10m");
  EXPECT_EQ(v.time, absl::Minutes(10));
  EXPECT_THAT(v.flags.Help(), HasSubstr("a time [10m]"));
  ASSERT_TRUE(v.flags.Parse({"--time=2s", "--count=3"}).ok());
  EXPECT_EQ(v.time, absl::Seconds(2));
  v.flags.SetDefault("count", "5");
  EXPECT_EQ(v.count, 3);
}

// The writer writes once it is read: without O_NONBLOCK the opening of either end waits for the other.
TEST(Flags, ATextMayComeThroughAPipeOnlyWhereThatMayBeWaitedFor) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const auto refused = ReadFlagFile("key", path);
  EXPECT_EQ(refused.status(),
            absl::InvalidArgumentError("--key=" + path + ": cannot read it: it is no regular file"));
  std::thread writer([&] { std::ofstream(path) << "text"; });
  const auto text = ReadFlagFileOrPipe("key", path);
  writer.join();
  EXPECT_EQ(*text, "text");
}

TEST(Flags, BothFormsAndWhatIsLeft) {
  Values v;
  const auto rest =
      v.flags.Parse({"--text=a=b", "--on", "--no-off", "--count", "9", "--share=.5", "--time=1m30s",
                     "--key=00fF", "--name=a", "--name", "b", "command", "--count=99"});
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_THAT(*rest, ElementsAre("command", "--count=99"));
  EXPECT_EQ(v.text, "a=b");
  EXPECT_TRUE(v.on);
  EXPECT_FALSE(v.off);
  EXPECT_EQ(v.count, 9u);
  EXPECT_EQ(v.share, .5);
  EXPECT_EQ(v.time, absl::Seconds(90));
  EXPECT_EQ(v.key, std::string("\0\xff", 2));
  EXPECT_THAT(v.names, ElementsAre("a", "b"));
  EXPECT_TRUE(v.flags.given("on"));
  EXPECT_FALSE(v.flags.given("command"));
  EXPECT_THAT(*v.flags.Parse({"--on=false", "--", "--text"}), ElementsAre("--text"));
  EXPECT_FALSE(v.on);
  EXPECT_EQ(v.Error({"--key=base64:AP8="}), "accepted");
  EXPECT_EQ(v.key, std::string("\0\xff", 2));
}

TEST(Flags, ErrorsNameFlagValueAndLimit) {
  Values v;
  EXPECT_EQ(v.Error({"--count=11"}), "--count: \"11\" is not a whole number of 1 to 10");
  EXPECT_EQ(v.Error({"--count=-1"}), "--count: \"-1\" is not a whole number of 1 to 10");
  EXPECT_EQ(v.Error({"--share=nan"}), "--share: \"nan\" is not a number of 0 to 1");
  EXPECT_EQ(v.Error({"--time=5"}), "--time: \"5\" is not a time like 300ms, 10s or 2h");
  EXPECT_EQ(v.Error({"--time=2h"}), "--time: \"2h\" is not a time of 1ms to 1h");
  EXPECT_EQ(v.Error({"--key=123"}), "--key: \"123\" is not an even number of hex digits");
  EXPECT_EQ(v.Error({"--key=0102030405"}), "--key: 5 bytes; 1 to 4 are allowed");
  EXPECT_EQ(v.Error({"--on=maybe"}), "--on: \"maybe\" is not true or false");
  EXPECT_EQ(v.Error({"--text"}), "--text: a value is missing");
  EXPECT_EQ(v.Error({"--no-text"}), "no flag --no-text; see --help");
  EXPECT_EQ(v.Error({"--nothing=1"}), "no flag --nothing; see --help");
}

TEST(Flags, PlacesOfValuesThatCount) {
  Values v;
  ASSERT_TRUE(v.flags.Parse({"--text=a", "--on"}, "f:1").ok());
  ASSERT_TRUE(v.flags.Parse({"--count=2"}, "f:2").ok());
  ASSERT_TRUE(v.flags.Parse({"--no-on"}).ok());
  EXPECT_THAT(v.flags.places(), UnorderedElementsAre(Pair("text", "f:1"), Pair("count", "f:2")));
}

TEST(Flags, HelpShowsDefaults) {
  const Values v;
  EXPECT_THAT(v.flags.Help(), HasSubstr("  --count=N    a count [7]\n"));
  EXPECT_THAT(v.flags.Help(), HasSubstr("  --on         a switch\n"));
}

TEST(Flags, DashesAndUnderscoresAreTheSame) {
  std::string low_mark;
  Flags flags;
  flags.Add("low-mark", &low_mark, "a mark");
  EXPECT_TRUE(flags.Parse({"--low_mark=a_b"}).ok());
  EXPECT_EQ(low_mark, "a_b");
  EXPECT_TRUE(flags.Parse({"--low-mark", "c"}).ok());
  EXPECT_EQ(low_mark, "c");
}

TEST(Version, OneLine) {
  EXPECT_THAT(VersionText("prog"),
              ::testing::MatchesRegex("prog [0-9.]+ \\(commit [^ ]+\\), CUDA: built (with|without)\n"));
}

TEST(Text, NumbersForPeople) {
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(4096), "4 KiB");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes((1u << 20) - 1), "1.00 MiB");
  EXPECT_EQ(HumanBytes(~uint64_t{0}), "16 EiB");
  EXPECT_EQ(HumanCount(0), "0");
  EXPECT_EQ(HumanCount(999), "999");
  EXPECT_EQ(HumanCount(1234567), "1,234,567");
  EXPECT_EQ(HumanCount(1, "block"), "1 block");
  EXPECT_EQ(HumanCount(1200, "block"), "1,200 blocks");
  EXPECT_EQ(HumanSeconds(45e-9), "45 ns");
  EXPECT_EQ(HumanSeconds(1.25e-3), "1.25 ms");
  EXPECT_EQ(HumanSeconds(99.96), "1 min 39 s");
  EXPECT_EQ(HumanSeconds(11530), "3 h 12 min");
  EXPECT_EQ(JsonQuote("a\"\\\n"), R"("a\"\\\u000a")");
  EXPECT_EQ(Percent(1, 0), "-");
  EXPECT_EQ(Percent(1, 3), "33.3 %");
}

TEST(Text, TablesAlignAndKeepTheTerminalSafe) {
  Table table({"NAME", ">COUNT", "NOTE"});
  table.Add({"a\x1b[2J", "7", "é"});
  table.Add({"bb", "1,000", "x"});
  EXPECT_EQ(table.Text(),
            "NAME   COUNT  NOTE\n"
            "a?[2J      7  é\n"
            "bb     1,000  x\n");
}

}  // namespace
}  // namespace kvpool::tools
