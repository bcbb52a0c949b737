#include "proto/formats/trace.h"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"

namespace kvpool::replay {
namespace {

// As published, and as it is kept beside a checkout.
constexpr const char* kConversationTraces[] = {"conversation_trace.jsonl",
                                               "mooncake_conversation_trace.jsonl.gz"};
// A request of 65,536 blocks, the most that one verb may name, has ids of at most 20 digits.
constexpr size_t kMaxLineBytes = 2 << 20;
constexpr uint64_t kMaxBlocks = 65536;
constexpr uint64_t kMaxTokens = kMaxBlocks * kTokensPerBlock;

// What an error quotes of the input.
std::string Quoted(absl::string_view text) {
  constexpr size_t kMost = 24;
  return absl::StrCat("\"", absl::CEscape(text.substr(0, kMost)), text.size() > kMost ? "…" : "", "\"");
}

// A reader of one JSON line: only as much of JSON as lines of a trace can hold.
class LineReader {
 public:
  explicit LineReader(absl::string_view text) : rest_(text) {}

  // Skips white space, then takes `c` if it is next.
  bool Take(char c) {
    SkipSpace();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }
  absl::Status Expect(char c) {
    if (Take(c)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("expected '", std::string(1, c), "' before ",
                                                   rest_.empty() ? "the end of the line" : Quoted(rest_)));
  }
  bool AtEnd() {
    SkipSpace();
    return rest_.empty();
  }
  absl::string_view rest() const { return rest_; }

  absl::StatusOr<std::string> TakeString() {
    RETURN_IF_ERROR(Expect('"'));
    for (size_t i = 0; i < rest_.size(); ++i) {
      if (rest_[i] == '\\') {
        ++i;
      } else if (rest_[i] == '"') {
        std::string text(rest_.substr(0, i));
        rest_.remove_prefix(i + 1);
        return text;
      }
    }
    return absl::InvalidArgumentError(absl::StrCat("string without an end: ", Quoted(rest_)));
  }

  absl::StatusOr<uint64_t> TakeCount(absl::string_view field, uint64_t limit) {
    SkipSpace();
    const size_t end = std::min(rest_.find_first_of(",]} \t\r"), rest_.size());
    const absl::string_view text = rest_.substr(0, end);
    uint64_t value;
    if (!absl::SimpleAtoi(text, &value) || value > limit) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": ", Quoted(text), " is not a whole number of 0 to ", limit));
    }
    rest_.remove_prefix(end);
    return value;
  }

  // Skips one value of any kind.
  absl::Status SkipValue() {
    int depth = 0;
    do {
      SkipSpace();
      if (rest_.empty()) return absl::InvalidArgumentError("the line ends inside a value");
      const char c = rest_.front();
      if (c == '"') {
        RETURN_IF_ERROR(TakeString().status());
        continue;
      }
      if (depth == 0 && absl::string_view("]},:").find(c) != absl::string_view::npos) {
        return absl::InvalidArgumentError(absl::StrCat("no value before ", Quoted(rest_)));
      }
      depth += (c == '[' || c == '{') ? 1 : (c == ']' || c == '}') ? -1 : 0;
      const bool punctuation = absl::string_view("[]{},:").find(c) != absl::string_view::npos;
      rest_.remove_prefix(punctuation ? 1 : std::min(rest_.find_first_of("[]{},: \t\r"), rest_.size()));
    } while (depth > 0);
    return absl::OkStatus();
  }

 private:
  void SkipSpace() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size())); }

  absl::string_view rest_;
};

enum Field : uint32_t { kTimestamp = 1, kInput = 2, kOutput = 4, kHashIds = 8 };

absl::Status ReadHashIds(LineReader* reader, std::vector<uint64_t>* ids) {
  RETURN_IF_ERROR(reader->Expect('['));
  if (reader->Take(']')) return absl::OkStatus();
  do {
    if (ids->size() == kMaxBlocks) {
      return absl::InvalidArgumentError(absl::StrCat("hash_ids: more than ", kMaxBlocks, " ids"));
    }
    ASSIGN_OR_RETURN(const uint64_t id, reader->TakeCount(absl::StrCat("hash_ids[", ids->size(), "]"),
                                                          std::numeric_limits<uint64_t>::max()));
    ids->push_back(id);
  } while (reader->Take(','));
  return reader->Expect(']');
}

absl::Status ReadField(LineReader* reader, absl::string_view name, Request* request, uint32_t* seen) {
  const Field field = name == "timestamp"       ? kTimestamp
                      : name == "input_length"  ? kInput
                      : name == "output_length" ? kOutput
                      : name == "hash_ids"      ? kHashIds
                                                : Field{};
  if (*seen & field) return absl::InvalidArgumentError(absl::StrCat(name, ": given twice"));
  *seen |= field;
  switch (field) {
    case kTimestamp: {
      ASSIGN_OR_RETURN(request->timestamp_ms, reader->TakeCount(name, std::numeric_limits<int64_t>::max()));
      return absl::OkStatus();
    }
    case kInput: {
      ASSIGN_OR_RETURN(request->input_tokens, reader->TakeCount(name, kMaxTokens));
      return absl::OkStatus();
    }
    case kOutput: {
      ASSIGN_OR_RETURN(request->output_tokens, reader->TakeCount(name, kMaxTokens));
      return absl::OkStatus();
    }
    case kHashIds:
      return ReadHashIds(reader, &request->hash_ids);
  }
  return reader->SkipValue();
}

absl::Status CheckRequest(const Request& request, uint32_t seen) {
  const std::pair<Field, const char*> fields[] = {{kTimestamp, "timestamp"},
                                                  {kInput, "input_length"},
                                                  {kOutput, "output_length"},
                                                  {kHashIds, "hash_ids"}};
  for (const auto& [field, name] : fields) {
    if (!(seen & field)) return absl::InvalidArgumentError(absl::StrCat(name, ": missing"));
  }
  if (request.input_tokens == 0) return absl::InvalidArgumentError("input_length: 0, at least 1 is needed");
  const uint64_t blocks = (uint64_t{request.input_tokens} + kTokensPerBlock - 1) / kTokensPerBlock;
  if (request.hash_ids.size() != blocks) {
    return absl::InvalidArgumentError(absl::StrCat("hash_ids: ", request.hash_ids.size(),
                                                   " ids, but input_length ", request.input_tokens, " makes ",
                                                   blocks, " blocks of ", kTokensPerBlock, " tokens"));
  }
  return absl::OkStatus();
}

struct CloseGzip {
  void operator()(gzFile file) const { gzclose(file); }
};

bool IsFile(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

}  // namespace

uint64_t TokensInBlocks(const Request& request, uint64_t blocks) {
  return std::min<uint64_t>(request.input_tokens, blocks * kTokensPerBlock);
}

absl::StatusOr<Request> ParseRequest(absl::string_view line) {
  LineReader reader(line);
  Request request;
  uint32_t seen = 0;
  RETURN_IF_ERROR(reader.Expect('{'));
  if (!reader.Take('}')) {
    do {
      ASSIGN_OR_RETURN(const std::string name, reader.TakeString());
      RETURN_IF_ERROR(reader.Expect(':'));
      RETURN_IF_ERROR(ReadField(&reader, name, &request, &seen));
    } while (reader.Take(','));
    RETURN_IF_ERROR(reader.Expect('}'));
  }
  if (!reader.AtEnd()) {
    return absl::InvalidArgumentError(absl::StrCat("text after the object: ", Quoted(reader.rest())));
  }
  RETURN_IF_ERROR(CheckRequest(request, seen));
  return request;
}

absl::StatusOr<std::vector<Request>> ReadTrace(const std::string& path, const ReadTraceOptions& options) {
  errno = 0;
  const std::unique_ptr<gzFile_s, CloseGzip> file(gzopen(path.c_str(), "rb"));
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be opened"));
  std::vector<Request> requests;
  std::string buffer(kMaxLineBytes, '\0');
  for (uint64_t line = 1; options.max_requests == 0 || requests.size() < options.max_requests; ++line) {
    const auto at = [&](absl::string_view what) { return absl::StrCat(path, ":", line, ": ", what); };
    const char* text = gzgets(file.get(), buffer.data(), static_cast<int>(buffer.size()));
    if (text == nullptr) {
      int code;
      const char* why = gzerror(file.get(), &code);
      if (code != Z_OK && code != Z_STREAM_END)
        return absl::DataLossError(at(code == Z_ERRNO ? strerror(errno) : why));
      break;
    }
    absl::string_view view(text);
    if (view.size() + 1 == buffer.size() && view.back() != '\n') {
      return absl::InvalidArgumentError(
          at(absl::StrCat("the line is longer than ", kMaxLineBytes, " bytes")));
    }
    if (view.find_first_not_of(" \t\r\n") == absl::string_view::npos) continue;
    absl::StatusOr<Request> request = ParseRequest(view);
    if (!request.ok()) return absl::InvalidArgumentError(at(request.status().message()));
    if (!requests.empty() && request->timestamp_ms < requests.back().timestamp_ms) {
      return absl::InvalidArgumentError(
          at(absl::StrCat("timestamp: ", request->timestamp_ms, " is before ", requests.back().timestamp_ms,
                          " of the request in front")));
    }
    requests.push_back(*std::move(request));
  }
  if (requests.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": no requests in it"));
  return requests;
}

absl::StatusOr<std::string> FindConversationTrace(const std::string& fallback) {
  std::string looked;
  const char* configured = std::getenv("KVPOOL_TRACES");
  for (const std::string& place : {std::string(configured == nullptr ? "" : configured), fallback}) {
    if (place.empty()) continue;
    if (IsFile(place)) return place;
    for (const char* name : kConversationTraces) {
      std::string path = absl::StrCat(place, "/", name);
      if (IsFile(path)) return path;
      absl::StrAppend(&looked, looked.empty() ? "" : ", ", path);
    }
  }
  return absl::NotFoundError(absl::StrCat("no conversation trace at ", looked,
                                          "; name the file, or the folder it is in, in KVPOOL_TRACES"));
}

}  // namespace kvpool::replay
