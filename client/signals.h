// What an engine tells about a sequence besides K and V: arrays in the request, or in blocks leased for them.
//
//   auto mass = BlockArray::Lease(session, tokens * sizeof(float), deadline);   // once, per sequence
//   mass->Write(0, values);                                                     // host memory; or kernels write it
//   *prune.mutable_signals()->add_signals() = mass->Signal(v1::SIGNAL_KIND_MASS);
//
// In a session of several ranks each rank writes what its own heads saw into its own part of
// the blocks; see v1::Data.
#ifndef KVPOOL_CLIENT_SIGNALS_H_
#define KVPOOL_CLIENT_SIGNALS_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/blocks.h"
#include "client/session.h"
#include "kvpool/v1/score.pb.h"

namespace kvpool {

// Which axes a signal has besides tokens; see v1::Signal.
struct SignalAxes {
  bool per_layer = false;
  bool per_head = false;
};

// At most 1 MiB of values, [layers][kv_heads][tokens] without the axes that are not set.
v1::Signal InlinedSignal(v1::SignalKind kind, absl::Span<const float> values, SignalAxes axes = {});

// An array in blocks leased for it: statistics, or a window of queries. Byte i lies in
// block i / layout.block_bytes.
class BlockArray {
 public:
  // Waits for blocks like Session::LeaseWithin.
  static absl::StatusOr<BlockArray> Lease(Session* session, size_t bytes, Deadline deadline);

  size_t bytes() const { return blocks_.size() * block_bytes_; }
  // The address of byte `offset`, for kernels; the array is contiguous for `run` bytes from there.
  struct Place {
    uint64_t address = 0;
    size_t run = 0;
  };
  Place At(size_t offset) const;
  // REQUIRES: host memory, and offset + values.size() <= bytes().
  void Write(size_t offset, std::string_view values);
  void Write(size_t offset, absl::Span<const float> values);

  v1::Data Data(size_t offset = 0) const;
  v1::Signal Signal(v1::SignalKind kind, SignalAxes axes = {}, size_t offset = 0) const;

 private:
  BlockArray(Session* session, Blocks blocks)
      : session_(session), block_bytes_(session->layout().block_bytes()), blocks_(std::move(blocks)) {}

  Session* session_;
  size_t block_bytes_;
  Blocks blocks_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SIGNALS_H_
