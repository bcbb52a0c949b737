// Replies of servers, cluster maps and pieces of values: what is taken, and what is not.
#include "server/tiers/resp_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/tiers/known_keys.h"
#include "server/tiers/resp_cluster.h"
#include "server/tiers/resp_value.h"
#include "tests/tiers/tier_fixture.h"

namespace kvpool {
namespace {

constexpr RespLimits kLimits{.bytes = 10, .items = 6};

RespParse Parse(std::string_view text, RespReply* reply, size_t* used) {
  return ParseRespReply(text, kLimits, reply, used);
}
RespParse Parse(std::string_view text) {
  RespReply reply;
  size_t used = 0;
  return Parse(text, &reply, &used);
}

TEST(RespCodec, EveryKindOfReply) {
  RespReply reply;
  size_t used = 0;
  ASSERT_EQ(Parse("+OK\r\nmore", &reply, &used), RespParse::kWhole);
  EXPECT_TRUE(reply.Is("OK"));
  EXPECT_EQ(used, 5);
  ASSERT_EQ(Parse("-OOM command not allowed\r\n", &reply, &used), RespParse::kWhole);
  EXPECT_EQ(reply.code(), "OOM");
  ASSERT_EQ(Parse("-nothing known\r\n", &reply, &used), RespParse::kWhole);
  EXPECT_EQ(reply.code(), "");
  ASSERT_EQ(Parse(":-12\r\n", &reply, &used), RespParse::kWhole);
  EXPECT_EQ(reply.number, -12);
  ASSERT_EQ(Parse("$4\r\na\r\nb\r\n", &reply, &used), RespParse::kWhole);
  EXPECT_EQ(reply.text, "a\r\nb");
  ASSERT_EQ(Parse("$-1\r\n", &reply, &used), RespParse::kWhole);
  EXPECT_EQ(reply.kind, RespReply::Kind::kNil);
  ASSERT_EQ(Parse("*2\r\n*1\r\n:1\r\n$0\r\n\r\n", &reply, &used), RespParse::kWhole);
  EXPECT_EQ(reply.items[0].items[0].number, 1);
  EXPECT_EQ(reply.items[1].kind, RespReply::Kind::kBytes);
}

TEST(RespCodec, AnyPartOfAReplyIsAPart) {
  const std::string whole = "*3\r\n$5\r\nhello\r\n*1\r\n:12\r\n-ERR no\r\n";
  for (size_t size = 0; size < whole.size(); ++size) {
    RespReply reply;
    size_t used = 0;
    EXPECT_EQ(Parse(whole.substr(0, size), &reply, &used), RespParse::kPart) << size;
    EXPECT_GT(used, size);
    EXPECT_LE(used, whole.size());
  }
  EXPECT_EQ(Parse(whole), RespParse::kWhole);
}

TEST(RespCodec, WhatIsNoReplyOrTooLongIsBroken) {
  for (const char* const text : {"OK\r\n",       "\r\n",
                                 "%1\r\n",       "$11\r\n",
                                 "$-2\r\n",      "$\r\n",
                                 "$1x\r\n",      "$+1\r\n",
                                 "$ 1\r\n",      "$99999999999999999999\r\n",
                                 "$1\r\nabc",    "*7\r\n",
                                 "*-2\r\n",      "*9223372036854775807\r\n",
                                 ":\r\n",        ":1.5\r\n",
                                 ":--1\r\n",     "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
                                 "*4\r\n*3\r\n", "*1\r\n$11\r\n"}) {
    EXPECT_EQ(Parse(text), RespParse::kBroken) << text;
  }
  EXPECT_EQ(Parse("+" + std::string(kMostRespLine + 1, 'x')), RespParse::kBroken);
}

TEST(RespCodec, RandomBytesAreNeverMoreThanAReply) {
  std::mt19937 random(7);
  const std::string alphabet = "+-:$*0123456789\r\n\r\n\r\nab";
  for (int i = 0; i < 200000; ++i) {
    std::string text(random() % 40, ' ');
    for (char& c : text) c = alphabet[random() % alphabet.size()];
    RespReply reply;
    size_t used = 0;
    if (Parse(text, &reply, &used) == RespParse::kWhole) {
      ASSERT_LE(used, text.size());
    }
  }
}

// ---- Clusters

TEST(RespCluster, SlotsAreThoseOfRedis) {
  // From the specification, and by CLUSTER KEYSLOT.
  EXPECT_EQ(RespSlotOf("123456789"), 0x31c3);
  EXPECT_EQ(RespSlotOf("a{123456789}b{c}"), 0x31c3);
  EXPECT_EQ(RespSlotOf("foo{}{bar}"), 8363);
  EXPECT_EQ(RespSlotOf("foo{{bar}}zap"), 4015);
}

TEST(RespCluster, EndpointsAreWrittenWithTheirPort) {
  EXPECT_EQ(ParseRespEndpoint("a.b:1"), (RespEndpoint{"a.b", 1}));
  EXPECT_EQ(TextOf(*ParseRespEndpoint("[::1]:6379")), "[::1]:6379");
  for (const char* const text : {"", ":", "a", "a:", ":1", "::1:1", "a b:1", "a:1x", "a:99999", "a/b:1"}) {
    EXPECT_FALSE(ParseRespEndpoint(text).has_value()) << text;
  }
}

RespReply Reply(std::string_view text) {
  RespReply reply;
  size_t used = 0;
  EXPECT_EQ(ParseRespReply(text, ClusterMap::kLimits, &reply, &used), RespParse::kWhole) << text;
  return reply;
}

TEST(RespCluster, RedirectsSayWhere) {
  const RespEndpoint from{"here", 1};
  const auto moved = ParseRespRedirect(Reply("-MOVED 3999 127.0.0.1:6381\r\n"), from);
  ASSERT_TRUE(moved.has_value());
  EXPECT_EQ(moved->slot, 3999);
  EXPECT_EQ(TextOf(moved->to), "127.0.0.1:6381");
  EXPECT_TRUE(ParseRespRedirect(Reply("-ASK 1 ::1:6381\r\n"), from)->asking);
  EXPECT_EQ(TextOf(ParseRespRedirect(Reply("-MOVED 1 :6381\r\n"), from)->to), "here:6381");
  for (const char* const text : {"-MOVED\r\n", "-MOVED 1\r\n", "-MOVED 16384 a:1\r\n", "-MOVED x a:1\r\n",
                                 "-MOVED 1 a:0\r\n", "-MOVED 1 a\r\n", "-MOVED 1 a b:1\r\n", "-ERR\r\n"}) {
    EXPECT_FALSE(ParseRespRedirect(Reply(text), from).has_value()) << text;
  }
}

TEST(RespCluster, TheMapIsThatOfClusterSlots) {
  const RespEndpoint from{"here", 1};
  const auto map =
      ClusterMap::Parse(Reply("*2\r\n*3\r\n:0\r\n:99\r\n*4\r\n$1\r\na\r\n:7\r\n$2\r\nid\r\n*0\r\n"
                              "*3\r\n:100\r\n:16382\r\n*2\r\n$-1\r\n:8\r\n"),
                        from);
  ASSERT_TRUE(map.has_value());
  EXPECT_EQ(TextOf(*map->OwnerOf(99)), "a:7");
  EXPECT_EQ(TextOf(*map->OwnerOf(100)), "here:8");
  EXPECT_EQ(map->OwnerOf(16383), nullptr);
  for (const char* const text :
       {"+OK\r\n", "*1\r\n:1\r\n", "*1\r\n*2\r\n:0\r\n:1\r\n",
        "*1\r\n*3\r\n:1\r\n:0\r\n*2\r\n$1\r\na\r\n:7\r\n", "*1\r\n*3\r\n:-1\r\n:0\r\n*2\r\n$1\r\na\r\n:7\r\n",
        "*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$1\r\na\r\n:7\r\n", "*1\r\n*3\r\n:0\r\n:1\r\n*1\r\n$1\r\na\r\n",
        "*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n:1\r\n:7\r\n", "*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\n/\r\n:7\r\n",
        "*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\na\r\n:65536\r\n"}) {
    EXPECT_FALSE(ClusterMap::Parse(Reply(text), from).has_value()) << text;
  }
}

TEST(RespCluster, TooManyNodesAreNoMap) {
  std::string text = absl::StrCat("*", ClusterMap::kMostNodes + 1, "\r\n");
  for (size_t i = 0; i <= ClusterMap::kMostNodes; ++i) {
    absl::StrAppend(&text, "*3\r\n:", i, "\r\n:", i, "\r\n*2\r\n$1\r\na\r\n:", i + 1, "\r\n");
  }
  EXPECT_FALSE(ClusterMap::Parse(Reply(text), {"here", 1}).has_value());
}

// ---- Values

std::string PieceOf(const TierKey& key, const TierBuffer& value, uint32_t piece) {
  const auto headers = MakePieceHeaders(key, value);
  std::string string(headers[piece].data(), headers[piece].size());
  return string.append(value.data() + piece * kMostPieceBytes, PieceBytes(value.bytes(), piece));
}

TEST(RespValue, APieceIsThatOfItsKeyAndNumber) {
  const auto value = ValueOf(1, 2 * kMostPieceBytes + 100);
  EXPECT_EQ(PiecesOf(value->bytes()), 3);
  for (uint32_t piece = 0; piece < 3; ++piece) {
    const auto header = CheckPiece(KeyOf(1), piece, PieceOf(KeyOf(1), *value, piece));
    ASSERT_TRUE(header.has_value());
    EXPECT_EQ(header->pieces, 3);
    EXPECT_EQ(header->value_bytes, value->bytes());
    EXPECT_FALSE(CheckPiece(KeyOf(2), piece, PieceOf(KeyOf(1), *value, piece)).has_value());
  }
  EXPECT_FALSE(CheckPiece(KeyOf(1), 0, PieceOf(KeyOf(1), *value, 1)).has_value());
}

TEST(RespValue, OneWriteIdForOneContent) {
  const auto id = [](uint32_t key, const std::shared_ptr<TierBuffer>& value) {
    return CheckPiece(KeyOf(key), 0, PieceOf(KeyOf(key), *value, 0))->write_id;
  };
  const auto value = ValueOf(1, kMostPieceBytes + 100);
  EXPECT_EQ(id(1, value), id(1, ValueOf(1, kMostPieceBytes + 100)));
  const uint64_t before = id(1, value);
  ++value->data()[kMostPieceBytes + 99];
  EXPECT_NE(id(1, value), before);
}

TEST(RespValue, EachByteOfAPieceIsChecked) {
  const std::string whole = PieceOf(KeyOf(1), *ValueOf(1, 100), 0);
  ASSERT_TRUE(CheckPiece(KeyOf(1), 0, whole).has_value());
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string torn = whole;
    ++torn[i];
    EXPECT_FALSE(CheckPiece(KeyOf(1), 0, torn).has_value()) << i;
    EXPECT_FALSE(CheckPiece(KeyOf(1), 0, whole.substr(0, i)).has_value()) << i;
  }
  EXPECT_FALSE(CheckPiece(KeyOf(1), 0, whole + "x").has_value());
}

// ---- What is known

TEST(RespKnown, WhatIsKnownIsBelievedForItsTime) {
  KnownKeys known({.there = std::chrono::seconds(60), .not_there = std::chrono::seconds(2)});
  const KnownKeys::Clock::time_point now{};
  EXPECT_EQ(known.Find(KeyOf(1), now), TierPresence::kUnknown);
  known.Learn(KeyOf(1), true, now, known.erased());
  known.Learn(KeyOf(2), false, now, known.erased());
  EXPECT_EQ(known.there(), 1);
  EXPECT_EQ(known.Find(KeyOf(1), now + std::chrono::seconds(59)), TierPresence::kYes);
  EXPECT_EQ(known.Find(KeyOf(2), now + std::chrono::seconds(1)), TierPresence::kNo);
  EXPECT_EQ(known.Find(KeyOf(2), now + std::chrono::seconds(2)), TierPresence::kUnknown);
  EXPECT_EQ(known.Find(KeyOf(1), now + std::chrono::seconds(60)), TierPresence::kUnknown);
  EXPECT_EQ(known.there(), 0);
}

TEST(RespKnown, AKeyIsAskedAboutOnce) {
  KnownKeys known({.there = std::chrono::seconds(60), .not_there = std::chrono::seconds(2)});
  const KnownKeys::Clock::time_point now{};
  EXPECT_TRUE(known.Ask(KeyOf(1), now));
  EXPECT_FALSE(known.Ask(KeyOf(1), now));
  EXPECT_EQ(known.Find(KeyOf(1), now), TierPresence::kUnknown);
  known.Forget(KeyOf(1));
  EXPECT_TRUE(known.Ask(KeyOf(1), now));
}

TEST(RespKnown, AnAnswerFromBeforeAnErasureIsNotBelieved) {
  KnownKeys known({.there = std::chrono::seconds(60), .not_there = std::chrono::seconds(2)});
  const KnownKeys::Clock::time_point now{};
  EXPECT_TRUE(known.Ask(KeyOf(1), now));
  const uint64_t before = known.erased();
  known.Erased(KeyOf(1));
  known.Learn(KeyOf(1), true, now, before);
  EXPECT_EQ(known.Find(KeyOf(1), now), TierPresence::kUnknown);
  EXPECT_TRUE(known.Ask(KeyOf(1), now)) << "it is asked about again";
  known.Learn(KeyOf(2), true, now, before);
  EXPECT_EQ(known.Find(KeyOf(2), now), TierPresence::kYes) << "another key";
  known.Learn(KeyOf(1), true, now, known.erased());
  EXPECT_EQ(known.Find(KeyOf(1), now), TierPresence::kYes) << "it was written again";
  // It is remembered by its number alone where there are too many.
  const uint64_t then = known.erased();
  for (uint32_t i = 0; i <= KnownKeys::kMost; ++i) known.Erased(KeyOf(i));
  known.Learn(KeyOf(3), true, now, then);
  EXPECT_EQ(known.Find(KeyOf(3), now), TierPresence::kUnknown);
}

TEST(RespKnown, AWalkFindsAllWhateverHappensMeanwhile) {
  KnownKeys known({.there = std::chrono::seconds(60), .not_there = std::chrono::seconds(2)});
  const KnownKeys::Clock::time_point now{};
  // Even numbers are one owner's.
  for (uint32_t i = 0; i < 20; ++i) known.Learn(KeyOf(i), i != 4, now, known.erased());
  for (uint32_t i = 100; i < 110; ++i) known.Doubt(KeyOf(i));
  KnownKeys::Walk walk, other;
  std::vector<TierKey> found, of_other;
  const auto step = [&] {
    const size_t before = found.size();
    const bool more = known.Step(&walk, OwnerOf(0), 3, &found);
    EXPECT_LE(found.size() - before, 3);
    return more;
  };
  ASSERT_TRUE(step());
  ASSERT_TRUE(known.Step(&other, OwnerOf(1), 3, &of_other));
  // What they come to next goes, and is used: then it is the last.
  known.Forget(KeyOf(3));
  known.Forget(KeyOf(4));
  for (const uint32_t i : {6u, 0u, 19u, 5u}) EXPECT_EQ(known.Find(KeyOf(i), now), TierPresence::kYes);
  known.Settle(KeyOf(100));
  while (step()) {
  }
  while (known.Step(&other, OwnerOf(1), 3, &of_other)) {
  }
  const auto numbers = [](const std::vector<TierKey>& keys) {
    std::set<uint32_t> all;
    for (uint32_t i = 0; i < 110; ++i) {
      if (std::find(keys.begin(), keys.end(), KeyOf(i)) != keys.end()) all.insert(i);
    }
    return all;
  };
  EXPECT_THAT(numbers(found), testing::ElementsAre(0, 2, 6, 8, 10, 12, 14, 16, 18, 102, 104, 106, 108));
  EXPECT_THAT(numbers(of_other),
              testing::ElementsAre(1, 5, 7, 9, 11, 13, 15, 17, 19, 101, 103, 105, 107, 109));
  // It is over: what goes now is nothing to it.
  known.Forget(KeyOf(19));
}

TEST(RespKnown, TheLeastRecentlyUsedOneGoesFirst) {
  KnownKeys known({.there = std::chrono::seconds(60), .not_there = std::chrono::seconds(2)});
  const KnownKeys::Clock::time_point now{};
  for (uint32_t i = 0; i < KnownKeys::kMost; ++i) known.Learn(KeyOf(i), true, now, known.erased());
  EXPECT_EQ(known.Find(KeyOf(0), now), TierPresence::kYes);
  known.Learn(KeyOf(KnownKeys::kMost), true, now, known.erased());
  EXPECT_EQ(known.there(), KnownKeys::kMost);
  EXPECT_EQ(known.Find(KeyOf(0), now), TierPresence::kYes);
  EXPECT_EQ(known.Find(KeyOf(1), now), TierPresence::kUnknown);
}

}  // namespace
}  // namespace kvpool
