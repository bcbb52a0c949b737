#include "server/devices.h"

#include <map>
#include <set>
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

// What --capacity says, by device.
class Capacities {
 public:
  static absl::StatusOr<Capacities> Parse(std::string_view text) {
    Capacities capacities;
    capacities.text_ = std::string(text);
    if (!absl::StrContains(View(text), "=")) return capacities;
    for (absl::string_view part : absl::StrSplit(View(text), ',')) {
      const std::pair<std::string, std::string> named = absl::StrSplit(part, absl::MaxSplits('=', 1));
      if (named.first.empty() || !absl::StrContains(part, "=")) {
        return absl::InvalidArgumentError(absl::StrCat(
            "\"", part, "\" is no DEVICE=SIZE; write one size for all devices, or one for each: ",
            "cuda:0=40GiB,host=64GiB"));
      }
      if (!capacities.by_device_.insert(named).second) {
        return absl::InvalidArgumentError(absl::StrCat(named.first, " has two sizes"));
      }
    }
    return capacities;
  }

  const std::string& text() const { return text_; }
  std::vector<std::string> sizes() const {
    if (by_device_.empty()) return {text_};
    std::vector<std::string> sizes;
    for (const auto& [device, size] : by_device_) sizes.push_back(size);
    return sizes;
  }

  absl::StatusOr<uint64_t> Of(const std::string& device, const MemoryLimit& memory) {
    const auto named = by_device_.find(device);
    if (!by_device_.empty() && named == by_device_.end()) {
      return absl::InvalidArgumentError(absl::StrCat("--capacity=", text_, " has no size for ", device));
    }
    asked_.insert(device);
    const absl::StatusOr<uint64_t> bytes =
        ParseCapacity(by_device_.empty() ? text_ : named->second, memory.bytes);
    if (bytes.ok()) return bytes;
    return absl::InvalidArgumentError(
        absl::StrCat("--capacity: ", bytes.status().message(), " (", memory.source, ")"));
  }

  // INVALID_ARGUMENT: it names a device that nobody has asked for.
  absl::Status CheckAllAsked(const std::string& devices) const {
    for (const auto& [device, size] : by_device_) {
      if (asked_.contains(device)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--capacity=", text_, " names ", device, "; the devices are ", devices));
    }
    return absl::OkStatus();
  }

 private:
  std::string text_;
  std::map<std::string, std::string> by_device_;  // Empty: the text is each device's.
  std::set<std::string> asked_;
};

// Adds a device, of which `memory` is there. One that was named before has given some of it.
absl::Status Add(std::unique_ptr<Device> device, uint64_t bytes, const MemoryLimit& memory,
                 const Capacities& capacities, OpenedDevices* opened) {
  if (bytes < device->granularity_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("--capacity=", capacities.text(), ": ", bytes,
                                                   " bytes of ", device->id(), "; the least is ",
                                                   device->granularity_bytes()));
  }
  uint64_t together = bytes;
  for (size_t i = 0; i < opened->devices.size(); ++i) {
    if (opened->devices[i]->id() == device->id()) together += opened->capacity_bytes[i];
  }
  if (together > memory.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("--capacity=", capacities.text(), ": ", together,
                                                   " bytes of ", device->id(), " together; there are ",
                                                   memory.bytes, " (", memory.source, ")"));
  }
  opened->devices.push_back(std::move(device));
  opened->capacity_bytes.push_back(bytes);
  opened->memory.push_back(memory);
  return absl::OkStatus();
}

absl::Status AddHost(Capacities* capacities, OpenedDevices* opened) {
  const MemoryLimit memory = UsableMemory();
  ASSIGN_OR_RETURN(const uint64_t bytes, capacities->Of("host", memory));
  return Add(MakeHostDevice({.capacity_bytes = bytes}), bytes, memory, *capacities, opened);
}

absl::Status AddCuda(const std::string& ordinal_or_uuid, Capacities* capacities, OpenedDevices* opened) {
  const std::string name = absl::StrCat("cuda:", ordinal_or_uuid);
  absl::StatusOr<std::unique_ptr<Device>> device = OpenCudaDevice(ordinal_or_uuid);
  if (!device.ok()) {
    return absl::Status(device.status().code(),
                        absl::StrCat("--device: ", name, ": ", device.status().message()));
  }
  const MemoryLimit memory{.bytes = (*device)->total_bytes(), .source = (*device)->name()};
  ASSIGN_OR_RETURN(const uint64_t bytes, capacities->Of(name, memory));
  return Add(*std::move(device), bytes, memory, *capacities, opened);
}

absl::StatusOr<OpenedDevices> OpenAuto(Capacities* capacities) {
  OpenedDevices opened;
  const absl::StatusOr<int> gpus = CudaDeviceCount();
  if (gpus.ok() && *gpus > 0) {
    opened.choice = absl::StrCat("auto: ", *gpus, " GPU(s)");
    for (int i = 0; i < *gpus; ++i) RETURN_IF_ERROR(AddCuda(absl::StrCat(i), capacities, &opened));
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
  RETURN_IF_ERROR(AddHost(capacities, &opened));
  return opened;
}

absl::StatusOr<OpenedDevices> OpenNamed(const std::string& specification, Capacities* capacities) {
  OpenedDevices opened;
  opened.choice = specification;
  for (absl::string_view part : absl::StrSplit(specification, ',')) {
    if (part == "host") {
      RETURN_IF_ERROR(AddHost(capacities, &opened));
    } else if (absl::ConsumePrefix(&part, "cuda:") && !part.empty()) {
      RETURN_IF_ERROR(AddCuda(std::string(part), capacities, &opened));
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          "--device: \"", part,
          "\" is no device; write auto, host, cuda:N or cuda:GPU-…, or a comma list of the last three"));
    }
  }
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

absl::Status CheckCapacity(std::string_view capacity) {
  ASSIGN_OR_RETURN(const Capacities capacities, Capacities::Parse(capacity));
  for (const std::string& size : capacities.sizes())
    RETURN_IF_ERROR(ParseCapacity(size, UINT64_MAX).status());
  return absl::OkStatus();
}

absl::StatusOr<OpenedDevices> OpenDevices(const std::string& specification, const std::string& capacity) {
  ASSIGN_OR_RETURN(Capacities capacities, Capacities::Parse(capacity));
  ASSIGN_OR_RETURN(OpenedDevices opened,
                   specification == "auto" ? OpenAuto(&capacities) : OpenNamed(specification, &capacities));
  RETURN_IF_ERROR(capacities.CheckAllAsked(opened.choice));
  return opened;
}

}  // namespace kvpool
