#include "server/tiers/segment.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/support/status_macros.h"
#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

constexpr char kMagic[8] = {'k', 'v', 'p', 't', 'i', 'e', 'r', '\n'};
constexpr uint32_t kFormVersion = 2;  // Version 1 had the records within N.slots.

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t slots;
  uint64_t slot_bytes;
  uint32_t crc;  // It covers what is in front of it.
  uint32_t zero;
};
static_assert(sizeof(Header) == 32);

struct DiskRecord {
  uint8_t space[32];
  uint8_t block[32];
  uint64_t stamp;
  uint32_t bytes;
  uint32_t value_crc;
  uint8_t group, raw;
  uint8_t owner[16];  // Zero where an earlier version wrote it.
  uint8_t zero[22];
  uint32_t slot;
  uint32_t crc;  // It covers what is in front of it.
};
static_assert(sizeof(DiskRecord) == 128);

constexpr uint64_t kValuesAt = kTierPageBytes;
constexpr absl::string_view kSlotsSuffix = ".slots";
uint64_t RecordAt(uint32_t slot) { return uint64_t{slot} * sizeof(DiskRecord); }
uint64_t RecordsBytes(uint32_t slots) { return uint64_t{slots} * sizeof(DiskRecord); }
uint64_t SlotsFileBytes(uint64_t slot_bytes, uint32_t slots) { return kValuesAt + slots * slot_bytes; }

DiskRecord ToDisk(uint32_t slot, const Segment::Record& record) {
  DiskRecord disk{};
  std::copy(record.key.space.begin(), record.key.space.end(), disk.space);
  std::copy(record.key.block.begin(), record.key.block.end(), disk.block);
  disk.stamp = record.stamp;
  disk.bytes = record.bytes;
  disk.value_crc = record.crc;
  disk.group = record.key.group;
  disk.raw = record.key.raw ? 1 : 0;
  std::copy(record.key.owner.begin(), record.key.owner.end(), disk.owner);
  disk.slot = slot;
  disk.crc = Crc32c(&disk, offsetof(DiskRecord, crc));
  return disk;
}

// False: the slot is empty, or its record was damaged.
bool FromDisk(const DiskRecord& disk, uint32_t slot, Segment::Record* record) {
  if (disk.crc != Crc32c(&disk, offsetof(DiskRecord, crc)) || disk.slot != slot || disk.bytes == 0)
    return false;
  std::copy(std::begin(disk.space), std::end(disk.space), record->key.space.begin());
  std::copy(std::begin(disk.block), std::end(disk.block), record->key.block.begin());
  record->key.group = disk.group;
  record->key.raw = disk.raw != 0;
  std::copy(std::begin(disk.owner), std::end(disk.owner), record->key.owner.begin());
  record->stamp = disk.stamp;
  record->bytes = disk.bytes;
  record->crc = disk.value_crc;
  return true;
}

absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags) {
  UniqueFd fd(open(path.c_str(), flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("opening ", path));
  return fd;
}

absl::StatusOr<uint64_t> SizeOf(const UniqueFd& fd, const std::string& path) {
  struct stat facts {};
  if (fstat(fd.get(), &facts) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("looking at ", path));
  return static_cast<uint64_t>(facts.st_size);
}

}  // namespace

uint32_t Segment::SlotsIn(uint64_t bytes, uint64_t slot_bytes) {
  const uint64_t each = slot_bytes + sizeof(DiskRecord);
  const uint64_t slots = bytes > 2 * kTierPageBytes ? (bytes - 2 * kTierPageBytes) / each : 0;
  return static_cast<uint32_t>(std::clamp<uint64_t>(slots, 1, UINT32_MAX));
}

uint64_t Segment::FileBytes(uint64_t slot_bytes, uint32_t slots) {
  return SlotsFileBytes(slot_bytes, slots) + WholePages(RecordsBytes(slots));
}

std::string Segment::RecordsPath(const std::string& path) {
  return absl::StrCat(absl::StripSuffix(path, kSlotsSuffix), ".records");
}

Segment::Segment(FileIo* io, std::string path, UniqueFd file, UniqueFd records, uint64_t slot_bytes,
                 uint32_t slots)
    : io_(io),
      path_(std::move(path)),
      values_(std::move(file)),
      records_(std::move(records)),
      slot_bytes_(slot_bytes),
      slots_(slots) {
  // Some file systems take the flag and refuse what comes then.
  absl::StatusOr<UniqueFd> direct = OpenFile(path_, O_DIRECT);
  std::unique_ptr<char, decltype(&std::free)> page(
      static_cast<char*>(std::aligned_alloc(kTierPageBytes, kTierPageBytes)), &std::free);
  if (direct.ok() && io_->Read(direct->get(), page.get(), kTierPageBytes, 0).ok())
    values_ = *std::move(direct);
}

absl::StatusOr<std::unique_ptr<Segment>> Segment::Make(FileIo* io, const std::string& path,
                                                       uint64_t slot_bytes, uint32_t slots) {
  const std::string made = path + ".new";
  ASSIGN_OR_RETURN(UniqueFd file, OpenFile(made, O_CREAT | O_TRUNC));
  absl::StatusOr<UniqueFd> records = OpenFile(RecordsPath(path), O_CREAT | O_TRUNC);
  Header header{.slots = slots, .slot_bytes = slot_bytes};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kFormVersion;
  header.crc = Crc32c(&header, offsetof(Header, crc));
  absl::Status status = records.status();
  if (status.ok()) status = io->Allocate(records->get(), RecordsBytes(slots));
  if (status.ok()) status = io->Allocate(file.get(), SlotsFileBytes(slot_bytes, slots));
  if (status.ok()) status = io->Write(file.get(), &header, sizeof(header), 0);
  if (status.ok()) status = io->Rename(made, path);
  if (!status.ok()) {
    io->Remove(made).IgnoreError();
    io->Remove(RecordsPath(path)).IgnoreError();
    return status;
  }
  return std::unique_ptr<Segment>(
      new Segment(io, path, std::move(file), *std::move(records), slot_bytes, slots));
}

absl::StatusOr<std::unique_ptr<Segment>> Segment::Open(FileIo* io, const std::string& path,
                                                       std::vector<Filled>* filled) {
  ASSIGN_OR_RETURN(UniqueFd file, OpenFile(path, 0));
  Header header{};
  RETURN_IF_ERROR(io->Read(file.get(), &header, sizeof(header), 0));
  ASSIGN_OR_RETURN(const uint64_t file_bytes, SizeOf(file, path));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.version != kFormVersion ||
      header.crc != Crc32c(&header, offsetof(Header, crc)) || header.slots == 0 || header.slot_bytes == 0 ||
      header.slot_bytes % kTierPageBytes != 0 || header.slot_bytes > file_bytes ||
      header.slots > file_bytes || SlotsFileBytes(header.slot_bytes, header.slots) != file_bytes) {
    return absl::DataLossError(absl::StrCat(path, " is no segment of version ", kFormVersion));
  }
  const std::string records_path = RecordsPath(path);
  absl::StatusOr<UniqueFd> records = OpenFile(records_path, 0);
  if (absl::IsNotFound(records.status())) return absl::DataLossError(absl::StrCat(path, " has no records"));
  RETURN_IF_ERROR(records.status());
  ASSIGN_OR_RETURN(const uint64_t records_bytes, SizeOf(*records, records_path));
  if (records_bytes != RecordsBytes(header.slots)) {
    return absl::DataLossError(
        absl::StrCat(records_path, " has ", records_bytes, " bytes; must have ", RecordsBytes(header.slots)));
  }
  std::unique_ptr<Segment> segment(
      new Segment(io, path, std::move(file), *std::move(records), header.slot_bytes, header.slots));
  ASSIGN_OR_RETURN(*filled, segment->ReadRecords());
  return segment;
}

absl::Status Segment::Remove(FileIo* io, const std::string& path) {
  // Records without slots are nothing; the next daemon removes them if this can't.
  RETURN_IF_ERROR(io->Remove(path));
  io->Remove(RecordsPath(path)).IgnoreError();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Segment::Filled>> Segment::ReadRecords() const {
  std::vector<DiskRecord> records(slots_);
  RETURN_IF_ERROR(io_->Read(records_.get(), records.data(), RecordsBytes(slots_), 0));
  std::vector<Filled> filled;
  for (uint32_t slot = 0; slot < slots_; ++slot) {
    Record record;
    if (FromDisk(records[slot], slot, &record) && record.bytes <= slot_bytes_)
      filled.push_back({slot, record});
  }
  return filled;
}

uint64_t Segment::ValueAt(uint32_t slot) const { return kValuesAt + slot * slot_bytes_; }

absl::Status Segment::Empty(uint32_t slot) {
  static constexpr DiskRecord kEmpty{};
  return io_->Write(records_.get(), &kEmpty, sizeof(kEmpty), RecordAt(slot));
}

absl::Status Segment::Wipe(uint32_t slot, uint32_t count) {
  return io_->Zero(values_.get(), count * slot_bytes_, ValueAt(slot));
}

absl::Status Segment::Sync() {
  absl::Status status = io_->Sync(values_.get());
  status.Update(io_->Sync(records_.get()));
  return status;
}

absl::Status Segment::Fill(uint32_t slot, const Record& record, const TierBuffer& value) {
  RETURN_IF_ERROR(io_->Write(values_.get(), value.data(), WholePages(value.bytes()), ValueAt(slot)));
  return Restamp(slot, record);
}

absl::Status Segment::Restamp(uint32_t slot, const Record& record) {
  const DiskRecord disk = ToDisk(slot, record);
  return io_->Write(records_.get(), &disk, sizeof(disk), RecordAt(slot));
}

absl::Status Segment::Read(uint32_t slot, const Record& record, TierBuffer* into) {
  RETURN_IF_ERROR(io_->Read(values_.get(), into->data(), WholePages(record.bytes), ValueAt(slot)));
  if (Crc32c(into->data(), record.bytes) == record.crc) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("slot ", slot, " of ", path_, ": wrong checksum"));
}

}  // namespace kvpool
