#include "client/replay/board.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <utility>

#include "proto/support/check.h"

namespace kvpool::replay {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

const char* VerbName(Verb verb) {
  switch (verb) {
    case Verb::kMatch:
      return "match";
    case Verb::kLeaseLocal:
      return "lease_local";
    case Verb::kLeaseWait:
      return "lease_wait";
    case Verb::kSealLocal:
      return "seal_local";
    case Verb::kSealAnswer:
      return "seal_answer";
    case Verb::kRelease:
      return "release";
  }
  KVPOOL_CHECK(false, "verb %d", static_cast<int>(verb));
}

void Durations::Add(uint64_t ns) {
  ns = std::max<uint64_t>(ns, 1);
  const int octave = std::bit_width(ns) - 1;
  const auto eighth = static_cast<int>(octave >= 3 ? (ns >> (octave - 3)) & 7 : (ns << (3 - octave)) & 7);
  auto& count = counts_[static_cast<size_t>(std::min(octave * 8 + eighth, kClasses - 1))];
  // One writer: no locked instruction needed.
  count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (ns > max_ns()) max_ns_.store(ns, std::memory_order_relaxed);
}

uint64_t Durations::count() const {
  uint64_t sum = 0;
  for (const auto& count : counts_) sum += count.load(std::memory_order_relaxed);
  return sum;
}

uint64_t Durations::QuantileNs(double q) const {
  const double rank = q * static_cast<double>(count());
  double seen = 0;
  for (int i = 0; i < kClasses; ++i) {
    seen += static_cast<double>(counts_[static_cast<size_t>(i)].load(std::memory_order_relaxed));
    if (seen > 0 && seen >= rank) {
      return std::min(max_ns(), static_cast<uint64_t>(std::ldexp(1 + (i % 8 + 1) / 8.0, i / 8)));
    }
  }
  return 0;
}

void Durations::Merge(const Durations& other) {
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i].load(std::memory_order_relaxed);
  max_ns_.store(std::max(max_ns(), other.max_ns()), std::memory_order_relaxed);
}

struct Board::Header {
  uint32_t requests;
  uint32_t engines;
  uint32_t blocks;
  uint32_t keys;
  // No request in front of the lower 32 bits is open. The upper 32 move with each Reopen, so that an engine
  // that looked before it can't move the mark past what was opened.
  std::atomic<uint64_t> first_open;
  std::atomic<uint32_t> hold_from;
  std::atomic<uint32_t> stop;
};

namespace {

// Half of them stay empty, so that a search is short.
size_t PlacesFor(uint32_t keys) { return std::bit_ceil(2 * size_t{keys} + 1); }

}  // namespace

// What no engine touches takes no memory, until the engine is killed: its row is read whole then.
size_t Board::BytesFor(Size size) {
  return sizeof(Header) + 64 + size.engines * sizeof(EngineSlot) + size.requests * sizeof(RequestRecord) +
         PlacesFor(size.keys) * sizeof(uint64_t) + size_t{size.engines} * size.blocks;
}

absl::StatusOr<Board> Board::Create(Size size) {
  // Engines inherit it over exec: no MFD_CLOEXEC.
  UniqueFd fd(memfd_create("kvpool-replay", 0));
  const size_t bytes = BytesFor(size);
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return absl::ErrnoToStatus(errno, "shared memory of the replay");
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, "shared memory of the replay");
  auto* header = static_cast<Header*>(memory);  // All zero: open requests, empty counts.
  header->requests = size.requests;
  header->engines = size.engines;
  header->blocks = size.blocks;
  header->keys = size.keys;
  header->hold_from = size.requests;
  return Board(std::move(fd), memory, bytes);
}

absl::StatusOr<Board> Board::Open(UniqueFd fd) {
  struct stat status;
  if (fstat(fd.get(), &status) != 0) return absl::ErrnoToStatus(errno, "--engine-board");
  const auto bytes = static_cast<size_t>(status.st_size);
  if (bytes < sizeof(Header))
    return absl::InvalidArgumentError("--engine-board: not a replay's shared memory");
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, "--engine-board");
  return Board(std::move(fd), memory, bytes);
}

Board::Board(UniqueFd fd, void* memory, size_t bytes) : fd_(std::move(fd)), memory_(memory), bytes_(bytes) {
  header_ = static_cast<Header*>(memory);
  size_ = {.requests = header_->requests,
           .engines = header_->engines,
           .blocks = header_->blocks,
           .keys = header_->keys};
  KVPOOL_CHECK(BytesFor(size_) == bytes, "%zu bytes of shared memory", bytes);
  auto* slots = static_cast<char*>(memory) + (sizeof(Header) + 63) / 64 * 64;
  slots_ = reinterpret_cast<EngineSlot*>(slots);
  sealed_ = reinterpret_cast<std::atomic<uint64_t>*>(slots + size_.engines * sizeof(EngineSlot));
  records_ = reinterpret_cast<RequestRecord*>(sealed_ + PlacesFor(size_.keys));
  holds_ = reinterpret_cast<std::atomic<uint8_t>*>(records_ + size_.requests);
}

Board::Board(Board&& other) noexcept
    : fd_(std::move(other.fd_)),
      memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_),
      size_(other.size_),
      header_(other.header_),
      records_(other.records_),
      slots_(other.slots_),
      sealed_(other.sealed_),
      holds_(other.holds_) {}

Board::~Board() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

std::optional<uint32_t> Board::Claim(uint32_t engine) {
  uint64_t mark = header_->first_open.load(std::memory_order_acquire);
  const uint32_t end = header_->hold_from.load(std::memory_order_acquire);
  for (auto i = static_cast<uint32_t>(mark); i < end; ++i) {
    uint32_t open = 0;
    if (!records_[i].state.compare_exchange_strong(open, engine + 1, std::memory_order_acq_rel)) continue;
    // Another engine may have moved the mark, or a Reopen: then theirs stands.
    header_->first_open.compare_exchange_strong(mark, (mark >> 32 << 32) + i + 1, std::memory_order_acq_rel);
    return i;
  }
  return std::nullopt;
}

void Board::Done(uint32_t request) { records_[request].state.store(kDone, std::memory_order_release); }

void Board::Stop() { header_->stop.store(1, std::memory_order_release); }
bool Board::stopped() const { return header_->stop.load(std::memory_order_acquire) != 0; }

bool Board::OthersHold(uint32_t engine, uint32_t block, Hold least) const {
  for (uint32_t other = 0; other < size_.engines; ++other) {
    if (other == engine || slots_[other].doomed.load(std::memory_order_seq_cst)) continue;
    if (hold(other, block).load(std::memory_order_seq_cst) >= least) return true;
  }
  return false;
}

// The store comes before the loads in the one order that all processes see, so that two engines can't overlook each other.
bool Board::HoldLeased(uint32_t engine, uint32_t block) {
  hold(engine, block).store(kLeased, std::memory_order_seq_cst);
  return !OthersHold(engine, block, kSealed);
}

bool Board::HoldSealed(uint32_t engine, uint32_t block) {
  hold(engine, block).store(kSealed, std::memory_order_seq_cst);
  return !OthersHold(engine, block, kLeased);
}

void Board::LetGo(uint32_t engine, uint32_t block) {
  hold(engine, block).store(kNone, std::memory_order_seq_cst);
}

std::atomic<uint64_t>& Board::PlaceOf(uint64_t digest) const {
  const size_t places = PlacesFor(size_.keys);
  for (size_t at = digest % places;; at = (at + 1) % places) {
    const uint64_t found = sealed_[at].load(std::memory_order_acquire);
    if (found == 0 || found == digest) return sealed_[at];
  }
}

void Board::Sealed(uint64_t digest) {
  digest |= 1;  // 0 is an empty place.
  // Another engine may take the empty place for another key first.
  for (uint64_t found = 0; found != digest;) {
    found = 0;
    if (PlaceOf(digest).compare_exchange_strong(found, digest, std::memory_order_acq_rel)) return;
  }
}

bool Board::sealed(uint64_t digest) const { return PlaceOf(digest | 1).load(std::memory_order_acquire) != 0; }

void Board::Doom(uint32_t engine) { slots_[engine].doomed.store(true, std::memory_order_seq_cst); }

uint32_t Board::Reopen(uint32_t engine) {
  for (uint32_t block = 0; block < size_.blocks; ++block) {
    std::atomic<uint8_t>& held = hold(engine, block);
    if (held.load(std::memory_order_relaxed) != kNone) held.store(kNone, std::memory_order_seq_cst);
  }
  slots_[engine].doomed.store(false, std::memory_order_seq_cst);
  uint32_t reopened = 0;
  uint32_t first = size_.requests;
  for (uint32_t i = 0; i < size_.requests; ++i) {
    uint32_t claimed = engine + 1;
    if (!records_[i].state.compare_exchange_strong(claimed, 0, std::memory_order_acq_rel)) continue;
    first = std::min(first, i);
    ++reopened;
  }
  uint64_t mark = header_->first_open.load(std::memory_order_acquire);
  uint64_t moved;
  do {
    moved = ((mark >> 32) + 1) << 32 | std::min(static_cast<uint32_t>(mark), first);
  } while (!header_->first_open.compare_exchange_weak(mark, moved, std::memory_order_acq_rel));
  return reopened;
}

void Board::HoldFrom(uint64_t request) {
  header_->hold_from.store(static_cast<uint32_t>(std::min<uint64_t>(request, size_.requests)),
                           std::memory_order_release);
}

bool Board::busy(uint32_t engine) const {
  return std::any_of(records_, records_ + size_.requests, [&](const RequestRecord& record) {
    return record.state.load(std::memory_order_relaxed) == engine + 1;
  });
}

uint32_t Board::done() const {
  return static_cast<uint32_t>(std::count_if(
      records_, records_ + size_.requests,
      [](const RequestRecord& record) { return record.state.load(std::memory_order_acquire) == kDone; }));
}

}  // namespace kvpool::replay
