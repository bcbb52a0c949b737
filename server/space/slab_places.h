// Where the slabs of a space lie, for the next daemon: in memory whose descriptor a keeper has.
//
// Without it slabs lie one behind the other, in the order of their indices, and there is no hole. A keeper gets it before the first
// hole comes about, and has it as long as the space. A daemon that does not know it would take the slabs behind a hole for those in
// front: it does not know the kind of this thing either, and does not start (keeper_link.h).
//
// The place of a slab is stored before the keeper has the slab, and not changed while it has. So a daemon may be killed between any
// two steps: slabs are where they were, whatever there is in places of indices that no slab has.
#ifndef KVPOOL_SERVER_SPACE_SLAB_PLACES_H_
#define KVPOOL_SERVER_SPACE_SLAB_PLACES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"
#include "server/base/shared_memory.h"

namespace kvpool {

class SlabPlaces {
 public:
  // For slabs with indices below `slabs`.
  static absl::StatusOr<std::unique_ptr<SlabPlaces>> Make(uint32_t slabs);
  // INVALID_ARGUMENT, DATA_LOSS: the descriptor is of something else.
  static absl::StatusOr<std::unique_ptr<SlabPlaces>> Map(UniqueFd fd);

  int fd() const { return memory_.fd(); }
  // REQUIRES: slab < slabs.
  void Set(uint32_t slab, uint32_t first_block);
  // None: no slab had this index.
  std::optional<uint32_t> FirstBlockOf(uint32_t slab) const;

 private:
  explicit SlabPlaces(SharedMemory memory) : memory_(std::move(memory)) {}
  uint32_t slabs() const;
  // Each first block is stored as the next number, so that 0 is none.
  uint32_t* places() const;

  SharedMemory memory_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_SLAB_PLACES_H_
