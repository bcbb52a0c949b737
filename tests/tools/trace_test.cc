// The trace reader: what it takes, and what its errors say.
#include "proto/formats/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace kvpool::replay {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ErrorOf(const std::string& line) {
  const absl::StatusOr<Request> request = ParseRequest(line);
  return request.ok() ? "accepted" : std::string(request.status().message());
}

class TraceFile : public ::testing::Test {
 protected:
  TraceFile() {
    std::string name = (std::filesystem::temp_directory_path() / "kvpool-trace-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~TraceFile() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& text) {
    std::ofstream(folder_ / "t.jsonl") << text;
    return (folder_ / "t.jsonl").string();
  }
  std::string WriteGzip(const std::string& text) {
    const std::string path = (folder_ / "t.jsonl.gz").string();
    const gzFile file = gzopen(path.c_str(), "wb");
    gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
    gzclose(file);
    return path;
  }

  std::filesystem::path folder_;
};

constexpr char kTwo[] =
    "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 52, \"hash_ids\": [0, 1]}\n"
    "\n"
    "{\"timestamp\":3000,\"input_length\":1024,\"output_length\":3,\"hash_ids\":[0,18446744073709551615]}\n";

TEST(ParseRequest, ReadsFieldsInAnyOrderAndSkipsOthers) {
  const auto request = ParseRequest(
      R"( {"hash_ids":[7, 8],"x":{"a":[1,"]",{"b":null}],"c":-1.5e3},"output_length":0, "y":"\"}", "z": true,)"
      R"("input_length":1000,"timestamp":12} )");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->timestamp_ms, 12u);
  EXPECT_EQ(request->input_tokens, 1000u);
  EXPECT_EQ(request->output_tokens, 0u);
  EXPECT_THAT(request->hash_ids, ElementsAre(7u, 8u));
  EXPECT_EQ(TokensInBlocks(*request, 1), 512u);
  EXPECT_EQ(TokensInBlocks(*request, 2), 1000u);
}

TEST(ParseRequest, ErrorsNameFieldValueAndLimit) {
  EXPECT_EQ(ErrorOf(R"({"timestamp":0,"input_length":-4,"output_length":1,"hash_ids":[1]})"),
            "input_length: \"-4\" is not a whole number of 0 to 33554432");
  EXPECT_EQ(ErrorOf(R"({"timestamp":0,"input_length":4,"output_length":1,"hash_ids":[1, 2.5]})"),
            "hash_ids[1]: \"2.5\" is not a whole number of 0 to 18446744073709551615");
  EXPECT_EQ(ErrorOf(R"({"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]})"),
            "hash_ids: 1 ids, but input_length 513 makes 2 blocks of 512 tokens");
  EXPECT_EQ(ErrorOf(R"({"timestamp":0,"input_length":5,"hash_ids":[1]})"), "output_length: missing");
  EXPECT_EQ(ErrorOf(R"({"timestamp":0,"timestamp":0})"), "timestamp: given twice");
  EXPECT_EQ(ErrorOf(R"({"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]})"),
            "input_length: 0, at least 1 is needed");
}

TEST(ParseRequest, RefusesWhatIsNotAnObject) {
  for (const char* line : {"", "[]", "{", "{\"a", "{\"a\"", "{\"a\":", "{\"a\":}", "{\"a\":,\"b\":1}",
                           "{\"a\":[1}", "{\"hash_ids\":[1", "{\"hash_ids\":[1,]}", "{} x", "{\"a\":\"\\"}) {
    EXPECT_NE(ErrorOf(line), "accepted") << line;
  }
  EXPECT_THAT(ErrorOf("{} x"), HasSubstr("text after the object: \"x\""));
}

TEST_F(TraceFile, PlainAndGzipReadTheSame) {
  for (const std::string& path : {Write(kTwo), WriteGzip(kTwo)}) {
    const auto requests = ReadTrace(path);
    ASSERT_TRUE(requests.ok()) << requests.status();
    ASSERT_EQ(requests->size(), 2u);
    EXPECT_THAT((*requests)[1].hash_ids, ElementsAre(0u, 18446744073709551615u));
    EXPECT_EQ(ReadTrace(path, {.max_requests = 1})->size(), 1u);
  }
}

TEST_F(TraceFile, ErrorsNameFileAndLine) {
  const std::string broken = Write(std::string(kTwo) + "{\"timestamp\":1}\n");
  EXPECT_THAT(ReadTrace(broken).status().message(), HasSubstr("t.jsonl:4: input_length: missing"));
  const std::string falling = Write(
      "{\"timestamp\":9,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}\n"
      "{\"timestamp\":8,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}\n");
  EXPECT_THAT(ReadTrace(falling).status().message(), HasSubstr(":2: timestamp: 8 is before 9"));
  EXPECT_THAT(ReadTrace(Write("\n")).status().message(), HasSubstr("no requests in it"));
  EXPECT_THAT(ReadTrace("/nowhere/t.jsonl").status().message(),
              HasSubstr("/nowhere/t.jsonl: cannot be opened"));
  EXPECT_THAT(ReadTrace(Write(std::string(3 << 20, ' '))).status().message(),
              HasSubstr(":1: the line is longer"));
}

TEST_F(TraceFile, ThePublicTraceIsFoundUnderItsName) {
  const char* saved = std::getenv("KVPOOL_TRACES");
  const std::string before = saved == nullptr ? "" : saved;
  setenv("KVPOOL_TRACES", folder_.c_str(), 1);
  EXPECT_THAT(FindConversationTrace("/nowhere").status().message(),
              HasSubstr((folder_ / "conversation_trace.jsonl").string()));
  std::ofstream(folder_ / "conversation_trace.jsonl") << kTwo;
  EXPECT_EQ(FindConversationTrace("/nowhere").value_or(""), (folder_ / "conversation_trace.jsonl").string());
  const std::string path = Write(kTwo);
  setenv("KVPOOL_TRACES", path.c_str(), 1);
  EXPECT_EQ(FindConversationTrace("/nowhere").value_or(""), path);
  if (saved == nullptr) {
    unsetenv("KVPOOL_TRACES");
  } else {
    setenv("KVPOOL_TRACES", before.c_str(), 1);
  }
}

TEST_F(TraceFile, ATruncatedArchiveIsNotAShortTrace) {
  const std::string path = WriteGzip(kTwo);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 12);
  const auto requests = ReadTrace(path);
  ASSERT_FALSE(requests.ok());
  EXPECT_THAT(requests.status().message(), HasSubstr("t.jsonl.gz:"));
}

}  // namespace
}  // namespace kvpool::replay
