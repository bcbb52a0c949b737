// A part of a file tier: slots of one size, and a record for each that says what is in it.
//
//   N.slots     at 0       header: magic, version of the form, slot_bytes, slots, and a checksum of these
//               at 4096    slots, whole pages each
//   N.records   records, 128 bytes each: key, owner, size, stamp, checksum of the value, checksum of the record and its slot's number
//
// Values go past the page cache and records through it: the system lets nobody write to a file past the page cache while somebody
// writes to it through that, and would let one thread wait for another's value. Therefore they are two files.
//
// A record of zero bytes is an empty slot. A slot is emptied before it is filled again, and filling it writes the value, then
// the record. So whatever write was the last one, a record that its checksum covers names a value that was written whole; after a
// power cut, where writes may have been lost in any order, the value's own checksum says whether it is.
//
// Not thread-safe for one slot; different slots may be read and written at once.
#ifndef KVPOOL_SERVER_TIERS_SEGMENT_H_
#define KVPOOL_SERVER_TIERS_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"
#include "server/tiers/buffers.h"
#include "server/tiers/file_io.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

class Segment {
 public:
  struct Record {
    TierKey key;
    uint64_t stamp = 0;  // The order of writes and of uses, as far as these were written down.
    uint32_t bytes = 0;
    uint32_t crc = 0;
  };
  struct Filled {
    uint32_t slot = 0;
    Record record;
  };
  // How many slots of this size one of about `bytes` has: at least one.
  static uint32_t SlotsIn(uint64_t bytes, uint64_t slot_bytes);
  // Both files together.
  static uint64_t FileBytes(uint64_t slot_bytes, uint32_t slots);

  // `path` is that of its slots, N.slots, from here on.
  static std::string RecordsPath(const std::string& path);
  // Makes its files, empty; N.slots is there whole, with records beside it, or not at all. RESOURCE_EXHAUSTED: the disk is full.
  static absl::StatusOr<std::unique_ptr<Segment>> Make(FileIo* io, const std::string& path,
                                                       uint64_t slot_bytes, uint32_t slots);
  // Opens one that is there; `filled` gets what its records name. DATA_LOSS: it is none, or of another version.
  static absl::StatusOr<std::unique_ptr<Segment>> Open(FileIo* io, const std::string& path,
                                                       std::vector<Filled>* filled);
  static absl::Status Remove(FileIo* io, const std::string& path);

  // REQUIRES: the slot is empty.
  absl::Status Fill(uint32_t slot, const Record& record, const TierBuffer& value);
  absl::Status Empty(uint32_t slot);
  // The bytes of `count` slots become zero. REQUIRES: they are empty.
  absl::Status Wipe(uint32_t slot, uint32_t count);
  // What was emptied and wiped is so after a power cut, too.
  absl::Status Sync();
  // What the file itself says at this moment.
  absl::StatusOr<std::vector<Filled>> ReadRecords() const;
  // Writes the record again, with another stamp. REQUIRES: the slot has the value that it names.
  absl::Status Restamp(uint32_t slot, const Record& record);
  // DATA_LOSS: the value is not what the record says.
  absl::Status Read(uint32_t slot, const Record& record, TierBuffer* into);

  const std::string& path() const { return path_; }
  uint64_t slot_bytes() const { return slot_bytes_; }
  uint32_t slots() const { return slots_; }
  uint64_t file_bytes() const { return FileBytes(slot_bytes_, slots_); }

 private:
  Segment(FileIo* io, std::string path, UniqueFd file, UniqueFd records, uint64_t slot_bytes, uint32_t slots);
  uint64_t ValueAt(uint32_t slot) const;

  FileIo* const io_;
  const std::string path_;
  UniqueFd values_;  // It has O_DIRECT, where the file system does not refuse that.
  const UniqueFd records_;
  const uint64_t slot_bytes_;
  const uint32_t slots_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_SEGMENT_H_
