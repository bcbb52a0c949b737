#include "server/sim/read_event_log.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/events/event_log_format.h"

namespace kvpool::sim {
namespace {

struct Event {
  EventHeader header;
  std::vector<uint64_t> words;
};

// 0 if the header is not an event log's.
int VersionOf(const EventFileHeader& header) {
  return header.magic == kEventMagic ? 2 : header.magic == kEventMagic1 ? 1 : 0;
}

absl::StatusOr<EventFileHeader> ReadHeader(std::ifstream* file, const std::string& path) {
  EventFileHeader header;
  if (!file->read(reinterpret_cast<char*>(&header), sizeof(header)) || VersionOf(header) == 0) {
    return absl::DataLossError(absl::StrCat(path, ": no event log of kvpoold"));
  }
  return header;
}

absl::Status ReadEvents(std::ifstream* file, const std::string& path, int version,
                        std::vector<Event>* events) {
  const int last_kind = static_cast<int>(version == 1 ? EventKind::kLost : EventKind::kHint);
  for (Event event; file->read(reinterpret_cast<char*>(&event.header), sizeof(event.header));) {
    const auto kind = static_cast<int>(event.header.kind);
    if (kind < 1 || kind > last_kind || event.header.words > kMostEventWords) {
      return absl::DataLossError(absl::StrCat(path, ": record ", events->size() + 1, " is of kind ", kind,
                                              " with ", event.header.words, " words"));
    }
    const EventHeader& h = event.header;
    if (h.kind == EventKind::kHint &&
        (h.reuse > static_cast<uint8_t>(Reuse::kNever) || h.category > kMaxCategory)) {
      return absl::DataLossError(absl::StrCat(path, ": record ", events->size() + 1, " hints at reuse ",
                                              h.reuse, " and category ", h.category));
    }
    event.words.resize(event.header.words);
    const auto bytes = static_cast<std::streamsize>(event.words.size() * sizeof(uint64_t));
    if (!file->read(reinterpret_cast<char*>(event.words.data()), bytes)) break;
    events->push_back(event);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Event>> ReadParts(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  ASSIGN_OR_RETURN(const EventFileHeader header, ReadHeader(&file, path));
  std::vector<Event> events;
  const std::string before = path + ".1";
  if (IsEventLog(before)) {
    std::ifstream front(before, std::ios::binary);
    ASSIGN_OR_RETURN(const EventFileHeader front_header, ReadHeader(&front, before));
    if (front_header.log == header.log && front_header.part + 1 == header.part) {
      RETURN_IF_ERROR(ReadEvents(&front, before, VersionOf(front_header), &events));
    }
  }
  RETURN_IF_ERROR(ReadEvents(&file, path, VersionOf(header), &events));
  return events;
}

// The space asked for, or the only one.
absl::StatusOr<uint64_t> ChooseSpace(const std::vector<Event>& events, uint64_t asked,
                                     const std::string& path) {
  std::map<uint64_t, uint64_t> matches;
  for (const Event& event : events) {
    if (event.header.kind == EventKind::kMatch) ++matches[event.header.space];
  }
  if (asked == 0 && matches.size() == 1) return matches.begin()->first;
  if (matches.contains(asked)) return asked;
  std::string text;
  for (const auto& [space, count] : matches) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", space, " (", count, " matches)");
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": space ", asked, ": there are ", text.empty() ? "none" : text));
}

// Puts requests together from the events of one space.
class Requests {
 public:
  void Match(const Event& event) {
    const size_t r = Begin(event.header);
    requests_[r].blocks = event.header.words;
    for (const uint64_t word : event.words) Append(r, word);
  }
  void Seal(const Event& event) {
    // The blocks behind the last one that some request has are the answer of that request, if it ends there.
    size_t known = 0;
    while (known + 1 < event.words.size() && latest_.contains(event.words[known + 1])) ++known;
    if (known + 1 == event.words.size()) return;
    const auto front = latest_.find(event.words[known]);
    const bool ends_there =
        front != latest_.end() && chains_[front->second.request].back().word == event.words[known];
    const size_t r = ends_there ? front->second.request : Begin(event.header);
    for (size_t i = known + 1; i < event.words.size(); ++i) {
      Append(r, event.words[i]);
      ++requests_[r].answer_blocks;
    }
  }
  // Gives the hint to the last request that had the blocks. The tail decides which one that is, as many may
  // share the blocks in front of it.
  void Hint(const Event& event) {
    const UseHint hint = {.reuse = static_cast<Reuse>(event.header.reuse), .category = event.header.category};
    Use use;
    bool in_chain = false;
    for (size_t i = event.words.size(); i-- > 0;) {
      in_chain = in_chain && use.at > 0 && chains_[use.request][use.at - 1].word == event.words[i];
      if (in_chain) {
        --use.at;
      } else {
        const auto latest = latest_.find(event.words[i]);
        if (latest == latest_.end()) continue;
        use = latest->second;
        in_chain = true;
      }
      chains_[use.request][use.at].hint = hint;
      any_hint_ = true;
    }
  }
  Workload Finish(const std::string& name, uint32_t tokens_per_block) {
    Workload w{.name = name, .tokens_per_block = tokens_per_block, .requests = std::move(requests_)};
    absl::flat_hash_map<uint64_t, uint32_t> numbers;
    for (size_t r = 0; r < chains_.size(); ++r) {
      w.requests[r].first = w.contents.size();
      w.requests[r].tokens = w.requests[r].blocks * tokens_per_block;
      for (const Block& block : chains_[r]) {
        const auto next = static_cast<uint32_t>(numbers.size());
        w.contents.push_back(numbers.try_emplace(block.word, next).first->second);
        if (any_hint_) w.hints.push_back(block.hint);
      }
    }
    w.distinct = static_cast<uint32_t>(numbers.size());
    return w;
  }
  size_t size() const { return requests_.size(); }

 private:
  size_t Begin(const EventHeader& header) {
    if (requests_.empty()) began_ms_ = latest_ms_ = header.time_ms;
    latest_ms_ = std::max(latest_ms_, header.time_ms);
    requests_.push_back({.now_ms = latest_ms_ - began_ms_});
    chains_.emplace_back();
    return requests_.size() - 1;
  }

  void Append(size_t r, uint64_t word) {
    latest_[word] = {r, chains_[r].size()};
    chains_[r].push_back({word, {}});
  }

  struct Block {
    uint64_t word;
    UseHint hint;
  };
  struct Use {
    size_t request = 0;
    size_t at = 0;  // index in the request's chain
  };
  uint64_t began_ms_ = 0, latest_ms_ = 0;
  std::vector<Request> requests_;
  std::vector<std::vector<Block>> chains_;
  // The latest place of each key.
  absl::flat_hash_map<uint64_t, Use> latest_;
  bool any_hint_ = false;
};

}  // namespace

bool IsEventLog(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EventFileHeader header;
  return file.read(reinterpret_cast<char*>(&header), sizeof(header)) && VersionOf(header) != 0;
}

absl::StatusOr<Workload> ReadEventLog(const std::string& path, const WorkloadOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<Event> events, ReadParts(path));
  ASSIGN_OR_RETURN(const uint64_t space, ChooseSpace(events, options.space, path));
  Requests requests;
  uint64_t lost = 0;
  // The first match; its group and its tokens per block are the workload's.
  const EventHeader* first = nullptr;
  for (const Event& event : events) {
    if (event.header.kind == EventKind::kLost) {
      lost += event.header.session;
      continue;
    }
    if (event.header.space != space || event.words.empty()) continue;
    if (first == nullptr && event.header.kind == EventKind::kMatch) first = &event.header;
    if (first != nullptr && event.header.group != first->group) continue;
    if (options.max_requests != 0 && requests.size() == options.max_requests &&
        event.header.kind != EventKind::kHint) {
      break;
    }
    if (event.header.kind == EventKind::kMatch) {
      requests.Match(event);
    } else if (event.header.kind == EventKind::kSeal) {
      requests.Seal(event);
    } else {
      requests.Hint(event);
    }
  }
  if (first == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": space ", space, ": no match asks for any key"));
  }
  if (lost != 0) std::fprintf(stderr, "%s: %lu events were lost\n", path.c_str(), lost);
  return requests.Finish(path, first->tokens_per_block);
}

}  // namespace kvpool::sim
