#include "server/devices.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

constexpr uint64_t kMaxBytes = uint64_t{1} << 50;  // A pebibyte: beyond it someone mistyped.

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

// A number, which may have a fraction ("1.5GiB" is common), and its unit in bytes.
struct Quantity {
  double number;
  uint64_t unit;  // 0: none was given.
};

absl::StatusOr<Quantity> ParseQuantity(std::string_view text) {
  static constexpr struct {
    std::string_view suffix;
    uint64_t bytes;
  } kUnits[] = {{"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40},
                {"KB", 1000},        {"MB", 1000000},     {"GB", 1000000000},  {"TB", 1000000000000}};
  absl::string_view rest = View(text);
  Quantity quantity{.number = 0, .unit = 0};
  for (const auto& unit : kUnits) {
    if (absl::ConsumeSuffix(&rest, absl::string_view(unit.suffix.data(), unit.suffix.size()))) {
      quantity.unit = unit.bytes;
      break;
    }
  }
  if (!absl::SimpleAtod(rest, &quantity.number) || !(quantity.number >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", View(text),
                     "\" is no size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"));
  }
  return quantity;
}

absl::StatusOr<uint64_t> ToBytes(std::string_view text, const Quantity& quantity) {
  const double bytes = quantity.number * static_cast<double>(quantity.unit == 0 ? 1 : quantity.unit);
  if (bytes < 1 || bytes > static_cast<double>(kMaxBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", View(text), "\" is ", bytes, " bytes; the limits are 1 and ", kMaxBytes));
  }
  return static_cast<uint64_t>(bytes);
}

// Adds a device, of which `memory` is there. One that was named before has given some of it.
absl::Status Add(std::unique_ptr<Device> device, uint64_t bytes, const MemoryLimit& memory,
                 const std::string& capacity, OpenedDevices* opened) {
  if (bytes < device->granularity_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("--capacity=", capacity, ": ", bytes, " bytes of ",
                                                   device->id(), "; the least is ",
                                                   device->granularity_bytes()));
  }
  uint64_t together = bytes;
  for (size_t i = 0; i < opened->devices.size(); ++i) {
    if (opened->devices[i]->id() == device->id()) together += opened->capacity_bytes[i];
  }
  if (together > memory.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("--capacity=", capacity, ": ", together, " bytes of ",
                                                   device->id(), " together; there are ", memory.bytes, " (",
                                                   memory.source, ")"));
  }
  opened->devices.push_back(std::move(device));
  opened->capacity_bytes.push_back(bytes);
  opened->memory.push_back(memory);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> CapacityOf(const std::string& capacity, const MemoryLimit& memory) {
  absl::StatusOr<uint64_t> bytes = ParseCapacity(capacity, memory.bytes);
  if (bytes.ok()) return bytes;
  return absl::InvalidArgumentError(
      absl::StrCat("--capacity: ", bytes.status().message(), " (", memory.source, ")"));
}

absl::Status AddHost(const std::string& capacity, OpenedDevices* opened) {
  const MemoryLimit memory = UsableMemory();
  ASSIGN_OR_RETURN(const uint64_t bytes, CapacityOf(capacity, memory));
  return Add(MakeHostDevice({.capacity_bytes = bytes}), bytes, memory, capacity, opened);
}

absl::Status AddCuda(const std::string& ordinal_or_uuid, const std::string& capacity, OpenedDevices* opened) {
  absl::StatusOr<std::unique_ptr<Device>> device = OpenCudaDevice(ordinal_or_uuid);
  if (!device.ok()) {
    return absl::Status(device.status().code(),
                        absl::StrCat("--device: cuda:", ordinal_or_uuid, ": ", device.status().message()));
  }
  const MemoryLimit memory{.bytes = (*device)->total_bytes(), .source = (*device)->name()};
  ASSIGN_OR_RETURN(const uint64_t bytes, CapacityOf(capacity, memory));
  return Add(*std::move(device), bytes, memory, capacity, opened);
}

absl::StatusOr<OpenedDevices> OpenAuto(const std::string& capacity) {
  OpenedDevices opened;
  const absl::StatusOr<int> gpus = CudaDeviceCount();
  if (gpus.ok() && *gpus > 0) {
    opened.choice = absl::StrCat("auto: ", *gpus, " GPU(s)");
    for (int i = 0; i < *gpus; ++i) RETURN_IF_ERROR(AddCuda(absl::StrCat(i), capacity, &opened));
    return opened;
  }
  const std::string why = gpus.ok() ? "the driver shows no GPU" : std::string(gpus.status().message());
  // Host memory instead of the GPU that was meant would look well everywhere but in the engine's speed.
  const std::string promised = PromisedGpu();
  if (!promised.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--device=auto: ", promised, " promises a GPU, but ", why,
                                                   "; say --device=host if host memory is meant"));
  }
  opened.choice = absl::StrCat("auto: host, because ", why);
  RETURN_IF_ERROR(AddHost(capacity, &opened));
  return opened;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  ASSIGN_OR_RETURN(const Quantity quantity, ParseQuantity(text));
  return ToBytes(text, quantity);
}

// A total may be the greatest number there is, which as a double is one more.
static uint64_t ShareOf(double share, uint64_t total_bytes) {
  return share < 1 ? static_cast<uint64_t>(share * static_cast<double>(total_bytes)) : total_bytes;
}

absl::StatusOr<uint64_t> ParseCapacity(std::string_view text, uint64_t total_bytes) {
  absl::string_view percent = View(text);
  if (absl::ConsumeSuffix(&percent, "%")) {
    double number;
    if (!absl::SimpleAtod(percent, &number) || !(number > 0 && number <= 100)) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", View(text), "\" is no share; the limits are above 0% and 100%"));
    }
    return ShareOf(number / 100, total_bytes);
  }
  ASSIGN_OR_RETURN(const Quantity quantity, ParseQuantity(text));
  if (quantity.unit == 0 && quantity.number > 0 && quantity.number <= 1) {
    return ShareOf(quantity.number, total_bytes);
  }
  ASSIGN_OR_RETURN(const uint64_t bytes, ToBytes(text, quantity));
  if (bytes > total_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", View(text), "\" is ", bytes, " bytes; there are ", total_bytes));
  }
  return bytes;
}

absl::Status CheckSlabBytes(uint64_t slab_bytes, const OpenedDevices& opened) {
  if (slab_bytes == 0) return absl::OkStatus();
  for (size_t i = 0; i < opened.devices.size(); ++i) {
    const uint64_t least = opened.devices[i]->granularity_bytes(), most = opened.capacity_bytes[i];
    if (slab_bytes >= least && slab_bytes <= most) continue;
    return absl::InvalidArgumentError(absl::StrCat("--slab-bytes=", slab_bytes, ": the limits on ",
                                                   opened.devices[i]->id(), " are ", least,
                                                   " and its capacity, ", most));
  }
  return absl::OkStatus();
}

absl::StatusOr<OpenedDevices> OpenDevices(const std::string& specification, const std::string& capacity) {
  if (specification == "auto") return OpenAuto(capacity);
  OpenedDevices opened;
  opened.choice = specification;
  for (absl::string_view part : absl::StrSplit(specification, ',')) {
    if (part == "host") {
      RETURN_IF_ERROR(AddHost(capacity, &opened));
    } else if (absl::ConsumePrefix(&part, "cuda:") && !part.empty()) {
      RETURN_IF_ERROR(AddCuda(std::string(part), capacity, &opened));
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          "--device: \"", part,
          "\" is no device; write auto, host, cuda:N or cuda:GPU-…, or a comma list of the last three"));
    }
  }
  return opened;
}

}  // namespace kvpool
