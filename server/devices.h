// Opens the devices that the command line names.
#ifndef KVPOOL_SERVER_DEVICES_H_
#define KVPOOL_SERVER_DEVICES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/device.h"
#include "server/machine.h"

namespace kvpool {

struct OpenedDevices {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<uint64_t> capacity_bytes;  // Parallel to `devices`, as the next one.
  std::vector<MemoryLimit> memory;       // What shares are shares of.
  std::string choice;  // Why these, for the log: "auto: 2 GPU(s)", "auto: host, because …".
};

// Reads "8GiB", "512MiB", "1000000" or a share of `total_bytes`: "0.5", "50%". INVALID_ARGUMENT names the
// forms and the limits.
absl::StatusOr<uint64_t> ParseCapacity(std::string_view text, uint64_t total_bytes);
// The same without shares.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);

// `specification`: "auto" (every GPU that the driver shows; host where there is none and nothing promises one),
// or a comma list of "host", "cuda:N" and "cuda:GPU-…". `capacity`: what ParseCapacity reads, for each device, or a
// comma list of DEVICE=SIZE, with each device once by the name that it has in `specification` ("cuda:N", "host" for
// "auto"). INVALID_ARGUMENT: there is no such device, or not so much memory.
absl::StatusOr<OpenedDevices> OpenDevices(const std::string& specification, const std::string& capacity);
// INVALID_ARGUMENT: no device whatever could take this as its capacity.
absl::Status CheckCapacity(std::string_view capacity);
// The size of a slab, unless it is 0, is not below a device's granularity, and not above what it gives.
absl::Status CheckSlabBytes(uint64_t slab_bytes, const OpenedDevices& opened);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_DEVICES_H_
