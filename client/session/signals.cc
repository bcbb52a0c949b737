#include "client/signals.h"

#include <algorithm>
#include <cstring>

#include "proto/support/check.h"
#include "proto/support/status_macros.h"

namespace kvpool {

v1::Signal InlinedSignal(v1::SignalKind kind, absl::Span<const float> values, SignalAxes axes) {
  v1::Signal signal;
  signal.set_kind(kind);
  signal.set_per_layer(axes.per_layer);
  signal.set_per_head(axes.per_head);
  signal.mutable_data()->set_inlined(values.data(), values.size() * sizeof(float));
  return signal;
}

absl::StatusOr<BlockArray> BlockArray::Lease(Session* session, size_t bytes, Deadline deadline) {
  const size_t block_bytes = session->layout().block_bytes();
  const auto count = static_cast<uint32_t>((bytes + block_bytes - 1) / block_bytes);
  ASSIGN_OR_RETURN(Blocks blocks, session->LeaseWithin(count, deadline));
  return BlockArray(session, std::move(blocks));
}

BlockArray::Place BlockArray::At(size_t offset) const {
  KVPOOL_CHECK(offset < bytes(), "offset %zu in an array of %zu bytes", offset, bytes());
  const size_t in_block = offset % block_bytes_;
  return {.address = session_->address(blocks_[offset / block_bytes_].id) + in_block,
          .run = block_bytes_ - in_block};
}

void BlockArray::Write(size_t offset, std::string_view values) {
  KVPOOL_CHECK(values.size() <= bytes() && offset <= bytes() - values.size(),
               "%zu bytes at offset %zu of an array of %zu", values.size(), offset, bytes());
  while (!values.empty()) {
    const Place place = At(offset);
    const size_t part = std::min(place.run, values.size());
    std::memcpy(reinterpret_cast<char*>(place.address), values.data(), part);
    values.remove_prefix(part);
    offset += part;
  }
}

void BlockArray::Write(size_t offset, absl::Span<const float> values) {
  Write(offset,
        std::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
}

v1::Data BlockArray::Data(size_t offset) const {
  v1::Data data;
  for (const BlockRef block : blocks_.refs()) data.add_blocks(block.Pack());
  data.set_offset_bytes(offset);
  return data;
}

v1::Signal BlockArray::Signal(v1::SignalKind kind, SignalAxes axes, size_t offset) const {
  v1::Signal signal;
  signal.set_kind(kind);
  signal.set_per_layer(axes.per_layer);
  signal.set_per_head(axes.per_head);
  *signal.mutable_data() = Data(offset);
  return signal;
}

}  // namespace kvpool
