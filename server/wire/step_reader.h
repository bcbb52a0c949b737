// Reads the batches of a stream, one after another, into the same messages.
//
// Nearly all batches are some dozens of leases, seals, matches and releases. Protocol Buffers makes three or four
// objects for each of them and destroys these before the next batch. Such a batch is read here field by field,
// into the objects that the batch before left. Any other batch, and whatever is unknown, wrong or unusual, is
// left to Protocol Buffers. So this reader decides nothing: it may read less than Protocol Buffers does, but what it
// reads it reads alike.
#ifndef KVPOOL_SERVER_WIRE_STEP_READER_H_
#define KVPOOL_SERVER_WIRE_STEP_READER_H_

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "kvpool/v1/engine.pb.h"

namespace kvpool {

class StepReader {
 public:
  // Bounds on what is kept from one batch to the next, which is less than a MiB.
  static constexpr size_t kMaxKeptOperations = 128, kMaxKeptOperationBytes = 2048;

  // False: the bytes are not a StepRequest.
  bool Read(std::string_view bytes);
  // What was read last, good until the next Read. REQUIRES: that answered true.
  const v1::StepRequest& request() const { return by_protobuf_ != nullptr ? *by_protobuf_ : kept_; }
  // Was it read without Protocol Buffers?
  bool read_here() const { return by_protobuf_ == nullptr; }
  // Gives back the memory of a batch that is not kept. What was read last is no longer good.
  void Renew() { by_protobuf_ = nullptr; }

 private:
  bool ReadHere(std::string_view bytes);
  // The operation at `index` of kept_, as an earlier batch left it.
  v1::Operation* Operation(int index);

  v1::StepRequest kept_;
  std::vector<std::unique_ptr<v1::Operation>> spare_;  // The last batch had fewer than one before it.
  std::unique_ptr<v1::StepRequest> by_protobuf_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_WIRE_STEP_READER_H_
