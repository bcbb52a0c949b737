#include "server/devices.h"

#include <unistd.h>

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
  absl::string_view rest(text.data(), text.size());
  Quantity quantity{.number = 0, .unit = 0};
  for (const auto& unit : kUnits) {
    if (absl::ConsumeSuffix(&rest, absl::string_view(unit.suffix.data(), unit.suffix.size()))) {
      quantity.unit = unit.bytes;
      break;
    }
  }
  if (!absl::SimpleAtod(rest, &quantity.number) || !(quantity.number >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", absl::string_view(text.data(), text.size()),
                     "\" is no size; write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB"));
  }
  return quantity;
}

absl::StatusOr<uint64_t> ToBytes(std::string_view text, const Quantity& quantity) {
  const double bytes = quantity.number * static_cast<double>(quantity.unit == 0 ? 1 : quantity.unit);
  if (bytes < 1 || bytes > static_cast<double>(kMaxBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", absl::string_view(text.data(), text.size()),
                                                   "\" is ", bytes, " bytes; the limits are 1 and ",
                                                   kMaxBytes));
  }
  return static_cast<uint64_t>(bytes);
}

absl::Status AddHost(const std::string& capacity, OpenedDevices* opened) {
  const uint64_t ram =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  ASSIGN_OR_RETURN(const uint64_t bytes, ParseCapacity(capacity, ram));
  opened->devices.push_back(MakeHostDevice({.capacity_bytes = bytes}));
  opened->capacity_bytes.push_back(bytes);
  return absl::OkStatus();
}

absl::Status AddCuda(const std::string& ordinal_or_uuid, const std::string& capacity, OpenedDevices* opened) {
  ASSIGN_OR_RETURN(std::unique_ptr<Device> device, OpenCudaDevice(ordinal_or_uuid));
  ASSIGN_OR_RETURN(const uint64_t bytes, ParseCapacity(capacity, device->total_bytes()));
  opened->devices.push_back(std::move(device));
  opened->capacity_bytes.push_back(bytes);
  return absl::OkStatus();
}

absl::StatusOr<OpenedDevices> OpenAuto(const std::string& capacity) {
  OpenedDevices opened;
  const absl::StatusOr<int> gpus = CudaDeviceCount();
  if (gpus.ok() && *gpus > 0) {
    opened.choice = absl::StrCat("auto: ", *gpus, " GPU(s)");
    for (int i = 0; i < *gpus; ++i) RETURN_IF_ERROR(AddCuda(absl::StrCat(i), capacity, &opened));
    return opened;
  }
  opened.choice = absl::StrCat("auto: host, because ",
                               gpus.ok() ? "the driver shows no GPU" : std::string(gpus.status().message()));
  RETURN_IF_ERROR(AddHost(capacity, &opened));
  return opened;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  ASSIGN_OR_RETURN(const Quantity quantity, ParseQuantity(text));
  return ToBytes(text, quantity);
}

absl::StatusOr<uint64_t> ParseCapacity(std::string_view text, uint64_t total_bytes) {
  absl::string_view percent(text.data(), text.size());
  double number;
  if (absl::ConsumeSuffix(&percent, "%") && absl::SimpleAtod(percent, &number) && number > 0 &&
      number <= 100) {
    return static_cast<uint64_t>(number / 100 * static_cast<double>(total_bytes));
  }
  ASSIGN_OR_RETURN(const Quantity quantity, ParseQuantity(text));
  if (quantity.unit == 0 && quantity.number > 0 && quantity.number <= 1) {
    return static_cast<uint64_t>(quantity.number * static_cast<double>(total_bytes));
  }
  ASSIGN_OR_RETURN(const uint64_t bytes, ToBytes(text, quantity));
  if (bytes > total_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("capacity \"", absl::string_view(text.data(), text.size()),
                                                   "\" is ", bytes, " bytes; the device has ", total_bytes));
  }
  return bytes;
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
          "\"", part,
          "\" is no device; write auto, host, cuda:N or cuda:GPU-…, or a comma list of the last three"));
    }
  }
  return opened;
}

}  // namespace kvpool
