// One Score, Prune, Compact or PlanBudgets on its way through the device.
//
//   prepared   under the space's mutex: refs checked, policy bound, everything planned, destinations leased
//   queued     on the device's runner; still held by its session (ParkedVerbs::Start)
//   run        by the runner's thread, under no lock: fills `result` and what is to be released
//   over       under the space's mutex again: holds given back, the verb answered, those behind it let go
//
// From prepared to over it is counted in Session::device_operations, so that no end of the session frees a block that
// it reads or writes; its session keeps the space. Between queued and over it is the runner's alone.
#ifndef KVPOOL_SERVER_DEVICE_OPERATION_H_
#define KVPOOL_SERVER_DEVICE_OPERATION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "cuda/kv_compute.h"
#include "cuda/scorers/select.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/block_ref.h"
#include "server/session.h"

namespace kvpool {

// Arrays of an engine that are copied to the computing side before the scorer reads them.
struct StagedArray {
  std::vector<KvPiece> pieces;
  uint64_t offset = 0;  // From the start of the staging buffer.
};

// Signals whose pointers count from the start of the staging buffer plus kStagingOrigin: so that an array at its
// start is there too.
struct StagedSignals {
  std::vector<StagedArray> arrays;
  scorers::Signals relative;
  size_t bytes = 0;
};
inline constexpr uint64_t kStagingOrigin = 64;
// The same with the pointers that a buffer at `address` makes of them.
scorers::Signals Relocate(const scorers::Signals& relative, uint64_t address);

// One sequence to read.
struct SequenceWork {
  uint32_t group = 0;
  bool fresh = false;
  std::vector<uint64_t> refs;       // As given.
  std::vector<uint64_t> addresses;  // Of its blocks, on the device.
  scorers::KvView kv;               // kv.blocks are the addresses.
  StagedSignals signals;
  scorers::ScorePlan plan;  // Of a sequence that is scored, and not only moved.
};

struct DeviceOperation {
  uint64_t id = 0;  // Among those of its session.
  std::shared_ptr<Session> session;
  v1::Operation request;
  std::string_view policy;  // Of the metrics: a policy's name, or that of a method.
  uint64_t space = 0;
  std::vector<SequenceWork> sequences;  // One, but for PlanBudgets.
  // Of Prune and Compact.
  scorers::Protection protection;
  std::vector<scorers::IndexRange> protect;
  uint32_t budget_tokens = 0;
  std::vector<BlockRef> destinations;  // Leased for Compact.
  std::vector<uint64_t> destination_addresses;

  std::atomic<bool> abandoned{false};  // Its session has ended: what it would answer nobody hears.

  // ---- What came of it
  absl::Status status;
  v1::OperationResult result;
  std::vector<BlockRef> released;  // Holds of the session to give back: victims, sources.
  uint32_t destinations_used = 0;  // The first so many; the others go back.
  // Of Score with block scores: where each block is among those of the sequence, for the replacement policy.
  std::vector<float> places;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DEVICE_OPERATION_H_
