// One piece of memory that buffers are cut from: what makes memory fit for a device, such as locking its pages, is done once for
// all of it.
#ifndef KVPOOL_SERVER_TIERS_BUFFER_ARENA_H_
#define KVPOOL_SERVER_TIERS_BUFFER_ARENA_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/support/mutex.h"
#include "server/tiers/buffers.h"

namespace kvpool {

// Buffers take the lowest place that has room, so that those of one size lie side by side. There are at most as many gaps as
// buffers, and a search looks at all of them at worst: half a millisecond for 128 MiB of buffers of a page each.
class BufferArena final : public BufferMemory {
 public:
  // RESOURCE_EXHAUSTED and the like: the system has no room for so much. `bytes` is rounded up to whole pages. None of its pages
  // is there before it is touched or locked.
  static absl::StatusOr<std::shared_ptr<BufferArena>> Make(uint64_t bytes);
  ~BufferArena() override;
  BufferArena(const BufferArena&) = delete;
  BufferArena& operator=(const BufferArena&) = delete;

  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Pages that are not there yet come from these nodes of the machine's memory in turn, and from others where these are full.
  // Where the system does not let us say so they come from wherever it likes. At most kMostNodes - 1 is a node.
  static constexpr int kMostNodes = 64;
  void SpreadOver(absl::Span<const int> nodes);

  char* Take(uint64_t bytes) override;
  void Return(char* data, uint64_t bytes) override;

 private:
  BufferArena(char* data, uint64_t bytes) : data_(data), bytes_(bytes), gaps_{{0, bytes}} {}

  char* const data_;
  const uint64_t bytes_;
  Mutex mu_;
  std::map<uint64_t, uint64_t> gaps_
      ABSL_GUARDED_BY(mu_);  // Keyed by offset: bytes. No two touch each other.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_BUFFER_ARENA_H_
