#include "server/sim/read_workload.h"

#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "proto/formats/trace.h"
#include "proto/support/status_macros.h"
#include "server/sim/read_event_log.h"
#include "server/sim/synthetic.h"

namespace kvpool::sim {
namespace {

constexpr uint32_t kMostObjectBlocks = 65536;
constexpr int kMaxLineBytes = 4096;
constexpr absl::string_view kSyntheticPrefix = "synthetic:";

template <typename Key>
class Numbers {
 public:
  uint32_t Of(const Key& key) {
    return numbers_.try_emplace(key, static_cast<uint32_t>(numbers_.size())).first->second;
  }
  uint32_t size() const { return static_cast<uint32_t>(numbers_.size()); }

 private:
  absl::flat_hash_map<Key, uint32_t> numbers_;
};

struct CloseGzip {
  void operator()(gzFile file) const { gzclose(file); }
};

struct Object {
  std::string key;
  double time_ms;
  uint64_t bytes;
};

absl::StatusOr<Object> ParseObject(absl::string_view line) {
  const std::vector<absl::string_view> fields = absl::StrSplit(line, ',');
  if (fields.size() < 3) {
    return absl::InvalidArgumentError(absl::StrCat(fields.size(), " fields, key,time,size are 3"));
  }
  Object object{.key = std::string(absl::StripAsciiWhitespace(fields[0]))};
  if (!absl::SimpleAtod(fields[1], &object.time_ms) || !(object.time_ms >= 0 && object.time_ms < 1e15)) {
    return absl::InvalidArgumentError(
        absl::StrCat("time: \"", fields[1], "\" is not a number of milliseconds, 0 to 1e15"));
  }
  if (!absl::SimpleAtoi(fields[2], &object.bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("size: \"", fields[2], "\" is not a whole number of bytes"));
  }
  return object;
}

void AddObject(const Object& object, uint64_t block_bytes, Numbers<std::pair<std::string, uint32_t>>* numbers,
               Workload* w) {
  const uint64_t blocks =
      block_bytes == 0 ? 1 : std::max<uint64_t>(1, (object.bytes + block_bytes - 1) / block_bytes);
  const auto kept = static_cast<uint32_t>(std::min<uint64_t>(blocks, kMostObjectBlocks));
  w->requests.push_back({.now_ms = static_cast<uint64_t>(object.time_ms),
                         .first = w->contents.size(),
                         .blocks = kept,
                         .tokens = kept});
  for (uint32_t i = 0; i < kept; ++i) w->contents.push_back(numbers->Of({object.key, i}));
}

absl::StatusOr<Workload> ReadCsv(const std::string& path, const WorkloadOptions& options) {
  const std::unique_ptr<std::remove_pointer_t<gzFile>, CloseGzip> file(gzopen(path.c_str(), "rb"));
  if (file == nullptr) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  Workload w{.name = path};
  Numbers<std::pair<std::string, uint32_t>> numbers;
  char buffer[kMaxLineBytes];
  for (uint64_t number = 1; gzgets(file.get(), buffer, sizeof(buffer)) != nullptr; ++number) {
    const absl::string_view line = absl::StripAsciiWhitespace(buffer);
    if (line.empty() || line.front() == '#') continue;
    const absl::StatusOr<Object> object = ParseObject(line);
    // The first line may name the columns.
    if (!object.ok() && number == 1) continue;
    if (!object.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ":", number, ": ", object.status().message()));
    }
    if (!w.requests.empty() && object->time_ms < static_cast<double>(w.requests.back().now_ms)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ":", number, ": time: ", object->time_ms,
                                                     " is before ", w.requests.back().now_ms,
                                                     " of the line in front"));
    }
    AddObject(*object, options.block_bytes, &numbers, &w);
    if (options.max_requests != 0 && w.requests.size() == options.max_requests) break;
  }
  if (!gzeof(file.get()) && options.max_requests == 0) {
    return absl::DataLossError(absl::StrCat(path, ": cannot be read to its end"));
  }
  w.distinct = numbers.size();
  return w;
}

absl::StatusOr<Workload> ReadJsonLines(const std::string& path, const WorkloadOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<replay::Request> requests,
                   replay::ReadTrace(path, {.max_requests = options.max_requests}));
  Workload w{.name = path, .tokens_per_block = replay::kTokensPerBlock};
  Numbers<uint64_t> numbers;
  for (const replay::Request& r : requests) {
    w.requests.push_back({.now_ms = r.timestamp_ms,
                          .first = w.contents.size(),
                          .blocks = static_cast<uint32_t>(r.hash_ids.size()),
                          .tokens = r.input_tokens});
    for (const uint64_t id : r.hash_ids) w.contents.push_back(numbers.Of(id));
  }
  w.distinct = numbers.size();
  return w;
}

absl::StatusOr<Workload> ReadAll(const std::string& path, const WorkloadOptions& options) {
  const bool csv = absl::EndsWith(path, ".csv") || absl::EndsWith(path, ".csv.gz");
  if (csv) return ReadCsv(path, options);
  if (IsEventLog(path)) return ReadEventLog(path, options);
  absl::string_view kind = path;
  if (!absl::ConsumePrefix(&kind, kSyntheticPrefix)) return ReadJsonLines(path, options);
  SyntheticOptions synthetic{.seed = options.seed};
  if (options.max_requests != 0) synthetic.requests = static_cast<uint32_t>(options.max_requests);
  return MakeSynthetic({kind.data(), kind.size()}, synthetic);
}

}  // namespace

absl::StatusOr<Workload> ReadWorkload(const std::string& path, const WorkloadOptions& options) {
  ASSIGN_OR_RETURN(Workload w, ReadAll(path, options));
  const auto all = static_cast<double>(w.requests.size());
  const auto begin = static_cast<size_t>(options.from * all), end = static_cast<size_t>(options.to * all);
  if (begin >= end) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": no requests from ", options.from, " to ",
                                                   options.to, " of ", w.requests.size()));
  }
  w.requests.resize(end);
  w.requests.erase(w.requests.begin(), w.requests.begin() + static_cast<std::ptrdiff_t>(begin));
  w.warm_up = static_cast<uint32_t>(options.warm_up * static_cast<double>(w.requests.size()));
  return w;
}

}  // namespace kvpool::sim
