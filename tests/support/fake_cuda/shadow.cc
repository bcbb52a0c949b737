#include "tests/support/fake_cuda/shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace kvpool::fake {
namespace {

constexpr size_t kCellBytes = 4;
constexpr uint8_t kWholeCell = 0xf;

void* Reserve(size_t bytes) {
  void* start =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start != MAP_FAILED) return start;
  std::perror("fake libcuda: memory for the checks of kernels");
  std::abort();
}

// The bytes of [begin, end) that are in the cell, as its mask.
uint8_t MaskIn(size_t cell, size_t begin, size_t end) {
  const size_t first = std::max(begin, cell * kCellBytes) - cell * kCellBytes;
  const size_t last = std::min(end, (cell + 1) * kCellBytes) - cell * kCellBytes;
  return static_cast<uint8_t>(((1u << last) - 1) & ~((1u << first) - 1));
}

}  // namespace

Shadow::Shadow(size_t bytes)
    : cells_bytes_((bytes + kCellBytes - 1) / kCellBytes * sizeof(Cell)),
      cells_(static_cast<Cell*>(Reserve(cells_bytes_))) {}
Shadow::~Shadow() { ::munmap(cells_, cells_bytes_); }

void Shadow::Forget() {
  if (touched_begin_ < touched_end_) std::fill(cells_ + touched_begin_, cells_ + touched_end_, Cell{});
  touched_begin_ = SIZE_MAX;
  touched_end_ = 0;
}

void Shadow::Wrote(size_t offset, size_t bytes) {
  const size_t end = offset + bytes;
  Touched(offset / kCellBytes, (end + kCellBytes - 1) / kCellBytes);
  for (size_t cell = offset / kCellBytes; cell * kCellBytes < end; ++cell) {
    cells_[cell].ever_written |= MaskIn(cell, offset, end);
  }
}

bool Shadow::WasWritten(size_t offset, size_t bytes) const {
  const size_t end = offset + bytes;
  for (size_t cell = offset / kCellBytes; cell * kCellBytes < end; ++cell) {
    if ((MaskIn(cell, offset, end) & ~cells_[cell].ever_written) != 0) return false;
  }
  return true;
}

const char* Shadow::Check(size_t offset, uint32_t bytes, Touch touch, uint32_t thread, const Moment& moment,
                          Footprint* footprint) {
  Cell* cell = cells_ + offset / kCellBytes;
  Touched(offset / kCellBytes, (offset + bytes + kCellBytes - 1) / kCellBytes);
  const auto by = static_cast<uint16_t>(thread);
  if (bytes < kCellBytes) {
    const auto mask = static_cast<uint8_t>(((1u << bytes) - 1) << (offset % kCellBytes));
    return CheckCell(cell, mask, touch, by, moment, footprint);
  }
  for (uint32_t done = 0; done < bytes; done += kCellBytes, ++cell) {
    if (const char* wrong = CheckCell(cell, kWholeCell, touch, by, moment, footprint)) return wrong;
  }
  return nullptr;
}

const char* Shadow::CheckCell(Cell* cell, uint8_t mask, Touch touch, uint16_t thread, const Moment& moment,
                              Footprint* footprint) {
  if (touch != Touch::kWrite && (mask & ~cell->ever_written) != 0) return "reads what nobody has written";
  const bool is_written = cell->written_at >= moment.launch;
  footprint->read_words += touch != Touch::kWrite && cell->read_at < moment.launch && !is_written;
  footprint->written_words += touch != Touch::kRead && !is_written;
  if (is_written && (cell->write_mask & mask) != 0 && !(touch == Touch::kAtomic && cell->atomic)) {
    if (cell->written_at < moment.block) return "races with a write of another thread block";
    if (cell->written_at == moment.now && cell->writer != thread) {
      return "races with a write of another thread: there is no barrier between them";
    }
  }
  if (touch == Touch::kRead) {
    if (cell->read_at == moment.now) {
      cell->many_readers |= cell->reader != thread;
      cell->read_mask |= mask;
    } else {
      cell->another_block =
          cell->read_at >= moment.launch && (cell->read_at < moment.block || cell->another_block);
      cell->many_readers = false;
      cell->read_at = moment.now;
      cell->read_mask = mask;
    }
    cell->reader = thread;
    return nullptr;
  }
  if (cell->read_at >= moment.launch && (cell->read_mask & mask) != 0) {
    if (cell->read_at < moment.block || cell->another_block)
      return "races with a read of another thread block";
    if (cell->read_at == moment.now && (cell->reader != thread || cell->many_readers)) {
      return "races with a read of another thread: there is no barrier between them";
    }
  }
  cell->write_mask = cell->written_at == moment.now ? cell->write_mask | mask : mask;
  cell->written_at = moment.now;
  cell->writer = thread;
  cell->atomic = touch == Touch::kAtomic;
  cell->ever_written |= mask;
  return nullptr;
}

}  // namespace kvpool::fake
