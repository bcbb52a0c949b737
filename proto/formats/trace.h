// Requests to LLM engines, in the form of public traces.
//
// The form is Mooncake's JSONL: one object a line with `timestamp` (ms since the start), `input_length` and
// `output_length` (tokens), and `hash_ids`: one id for each block of 512 prompt tokens, in order. Ids are
// chained over the prefix: equal ids mean equal content after equal content. The last block may be part full.
#ifndef KVPOOL_PROTO_FORMATS_TRACE_H_
#define KVPOOL_PROTO_FORMATS_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvpool::replay {

inline constexpr uint32_t kTokensPerBlock = 512;  // What a hash id stands for in the published traces.

struct Request {
  uint64_t timestamp_ms = 0;
  uint32_t input_tokens = 0;
  uint32_t output_tokens = 0;
  std::vector<uint64_t> hash_ids;
};

// Tokens of a request that its first `blocks` blocks hold.
uint64_t TokensInBlocks(const Request& request, uint64_t blocks);

// Reads one line. INVALID_ARGUMENT names field, value and limit. Fields that are not known are skipped.
absl::StatusOr<Request> ParseRequest(absl::string_view line);

struct ReadTraceOptions {
  uint64_t max_requests = 0;  // 0: all.
};
// Reads a file, plain or gzip. Errors start with "FILE:LINE: ". Empty lines are skipped;
// timestamps must not fall.
absl::StatusOr<std::vector<Request>> ReadTrace(const std::string& path, const ReadTraceOptions& options = {});

// Finds the public conversation trace: in $KVPOOL_TRACES (the file, or a folder with it), then in the folder
// `fallback`. NOT_FOUND: it is in neither; the message names both.
absl::StatusOr<std::string> FindConversationTrace(const std::string& fallback = "../shared/traces");

}  // namespace kvpool::replay

#endif  // KVPOOL_PROTO_FORMATS_TRACE_H_
