// How fast blocks go between a GPU and the buffers of a tier, in slices of 64 as the daemon moves them (server/daemon/tier_mover.h):
// from memory whose pages are locked, and from memory whose pages are not. Each slice is checked, byte by byte.
//
// Prints a line for each. Exit status: 0 measured, 1 something failed, 2 there is no GPU.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cuda/device.h"
#include "proto/support/status_macros.h"
#include "server/daemon/slab_copier.h"
#include "server/tiers/buffers.h"

namespace kvpool {
namespace {

constexpr size_t kSlice = 64;

struct Effort {
  std::vector<uint64_t> block_bytes = {64 << 10, 512 << 10, 2 << 20};
  int rounds = 51;
};

class Timings {
 public:
  explicit Timings(Effort effort) : effort_(std::move(effort)) {}

  absl::Status Run() {
    ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenCudaDevice("0"));
    devices_.push_back(std::move(device));
    ASSIGN_OR_RETURN(copier_, SlabCopier::Open(devices_));
    for (const uint64_t block_bytes : effort_.block_bytes) {
      const uint64_t bytes = kSlice * WholePages(block_bytes);
      for (const auto& [name, memory] :
           {std::pair<const char*, std::shared_ptr<BufferMemory>>{"locked", copier_->MakeMemory(bytes)},
            {"not locked", std::make_shared<HeapMemory>()}}) {
        RETURN_IF_ERROR(Measure(block_bytes, name, memory));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Measure(uint64_t block_bytes, const char* name, std::shared_ptr<BufferMemory> memory) {
    // Every second block of the slab, so that no two of them are one run.
    ASSIGN_OR_RETURN(const std::unique_ptr<Slab> slab, devices_[0]->MakeSlab(2 * kSlice * block_bytes));
    BufferStock stock(kSlice * WholePages(block_bytes), std::move(memory));
    std::vector<std::shared_ptr<TierBuffer>> buffers;
    std::vector<SlabCopier::Range> ranges;
    for (size_t i = 0; i < kSlice; ++i) {
      buffers.push_back(stock.Take(block_bytes));
      if (buffers.back() == nullptr) return absl::InternalError(absl::StrCat("no room for buffer ", i));
      ranges.push_back({.device = devices_[0].get(),
                        .slab_address = slab->address() + 2 * i * block_bytes,
                        .host = buffers.back()->data(),
                        .bytes = block_bytes});
    }
    std::vector<double> up_s, down_s;
    for (int round = 0; round < effort_.rounds; ++round) {
      for (size_t i = 0; i < kSlice; ++i) Fill(buffers[i]->data(), block_bytes, round, i);
      ASSIGN_OR_RETURN(const double up, Seconds(CopyDirection::kToDevice, ranges));
      for (size_t i = 0; i < kSlice; ++i) std::memset(buffers[i]->data(), 0, block_bytes);
      ASSIGN_OR_RETURN(const double down, Seconds(CopyDirection::kToHost, ranges));
      for (size_t i = 0; i < kSlice; ++i) {
        if (!Holds(buffers[i]->data(), block_bytes, round, i)) {
          return absl::DataLossError(
              absl::StrCat("block ", i, " of ", block_bytes, " bytes came back as another"));
        }
      }
      up_s.push_back(up);
      down_s.push_back(down);
    }
    const auto bytes = static_cast<double>(kSlice * block_bytes);
    absl::PrintF("     64 blocks of %4d KiB, %-10s %6.2f GB/s down, %6.2f GB/s up\n", block_bytes >> 10, name,
                 bytes / Median(&down_s) / 1e9, bytes / Median(&up_s) / 1e9);
    return absl::OkStatus();
  }

  absl::StatusOr<double> Seconds(CopyDirection direction, absl::Span<const SlabCopier::Range> ranges) {
    const auto begin = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(copier_->Copy(direction, ranges));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  static double Median(std::vector<double>* values) {
    const auto middle = values->begin() + static_cast<ptrdiff_t>(values->size() / 2);
    std::nth_element(values->begin(), middle, values->end());
    return *middle;
  }

  static uint64_t WordOf(int round, size_t block, uint64_t at) {
    return (static_cast<uint64_t>(round) << 40 | block << 32 | at) * 0x9e3779b97f4a7c15u + 1;
  }
  static void Fill(char* data, uint64_t bytes, int round, size_t block) {
    for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      const uint64_t word = WordOf(round, block, at);
      std::memcpy(data + at, &word, sizeof word);
    }
  }
  static bool Holds(const char* data, uint64_t bytes, int round, size_t block) {
    for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      const uint64_t word = WordOf(round, block, at);
      if (std::memcmp(data + at, &word, sizeof word) != 0) return false;
    }
    return true;
  }

  const Effort effort_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::unique_ptr<SlabCopier> copier_;
};

int Main(bool quick) {
  const Effort effort = quick ? Effort{.block_bytes = {64 << 10}, .rounds = 3} : Effort();
  const absl::Status status = Timings(effort).Run();
  if (status.ok()) return 0;
  std::printf("%s: %s\n", absl::IsUnavailable(status) ? "no such device here" : "FAILED",
              status.ToString().c_str());
  return absl::IsUnavailable(status) ? 2 : 1;
}

}  // namespace
}  // namespace kvpool

int main(int count, char** arguments) {
  return kvpool::Main(count > 1 && std::strcmp(arguments[1], "--quick") == 0);
}
