// What crosses between Python and C++: errors, times, tokens, keys, names of enums.
#ifndef KVPOOL_CLIENT_PYTHON_SRC_CONVERT_H_
#define KVPOOL_CLIENT_PYTHON_SRC_CONVERT_H_

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/python/src/gil.h"
#include "client/release_hint.h"
#include "client/session.h"

namespace kvpool::python {

namespace nb = nanobind;

// A status on its way to Python, where it is an exception of kvpool/errors.py. Thrown with
// or without the GIL.
class StatusError : public std::exception {
 public:
  // `type`: name of the exception; empty: by the code.
  explicit StatusError(absl::Status status, std::string type = {})
      : status_(std::move(status)), message_(status_.message()), type_(std::move(type)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  const absl::Status& status() const { return status_; }
  const std::string& type() const { return type_; }

 private:
  absl::Status status_;
  std::string message_, type_;
};
// The error of a use after release.
StatusError ReleasedError(const std::string& what);
// The error of a view that a buffer can't describe, or whose memory it can't reach.
StatusError BufferError(const std::string& why);
void RegisterErrors();

inline void Check(const absl::Status& status) {
  if (!status.ok()) throw StatusError(status);
}
template <typename Value>
Value ValueOf(absl::StatusOr<Value> value) {
  Check(value.status());
  return *std::move(value);
}

// Seconds; none: no limit.
using Timeout = std::optional<double>;
Deadline DeadlineOf(Timeout timeout);

// Waits without the GIL, and checks for Ctrl-C meanwhile. `attempt(deadline)` answers a Status or StatusOr,
// and DEADLINE_EXCEEDED as long as it may be called again.
template <typename Attempt>
auto Await(Timeout timeout, Attempt attempt) {
  const Deadline end = DeadlineOf(timeout);
  while (true) {
    const Deadline slice = std::min(end, std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
    auto result = [&] {
      const GilRelease released;
      return attempt(slice);
    }();
    if (result.ok() || slice == end) return result;
    absl::Status status;
    if constexpr (std::is_same_v<decltype(result), absl::Status>) {
      status = result;
    } else {
      status = result.status();
    }
    if (!absl::IsDeadlineExceeded(status)) return result;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// "signals[2] is 'mass'; must be a Signal"; the caller throws it.
nb::builtin_exception TypeErrorOf(const std::string& field, nb::handle value, const char* must);
inline std::string EntryOf(const char* field, size_t index) { return absl::StrCat(field, "[", index, "]"); }

// A list of integers, or an array of them.
std::vector<uint32_t> TokensOf(nb::handle tokens);
// A place in a sequence: an int, and no bool, from 0 on.
uint64_t PositionOf(nb::handle position, const char* field);
// The same as TokensOf for floats.
std::vector<float> FloatsOf(nb::handle values, const char* field);
// bytes, or a list of bytes of one length; the length is `key_bytes`, 32 if there are none.
std::string KeysOf(nb::handle keys, uint32_t* key_bytes);
inline nb::bytes BytesOf(std::string_view bytes) { return nb::bytes(bytes.data(), bytes.size()); }
inline uint64_t StepOf(std::optional<uint64_t> after) { return after.value_or(kCurrentStep); }

// The words of an enum: "unspecified, mass, latest".
std::string WordsOf(const google::protobuf::EnumDescriptor& type, std::string_view prefix);
// "mass" for SIGNAL_KIND_MASS; INVALID_ARGUMENT for other words, with those that there are.
template <typename Enum>
Enum EnumOf(const std::string& name, const char* prefix, const char* field,
            bool (*parse)(google::protobuf::ConstStringParam, Enum*)) {
  Enum value;
  if (!parse(absl::StrCat(prefix, absl::AsciiStrToUpper(name)), &value)) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat(field, ": there is no '", name, "'; must be one of ",
                     WordsOf(*google::protobuf::GetEnumDescriptor<Enum>(), prefix))));
  }
  return value;
}
// The inverse: SIGNAL_KIND_MASS gives "mass".
std::string NameOf(std::string_view full_name, std::string_view prefix);

// `reuse` is a word: "never" for REUSE_NEVER. INVALID_ARGUMENT: the hint breaks a limit.
ReleaseHint HintOf(const std::string& reuse, uint32_t category);
// `seconds` in ms, rounded up to 1 unless they are 0. INVALID_ARGUMENT: not a number, or
// beyond a clock's range.
std::chrono::milliseconds TimeOf(double seconds, const char* field);

// A dtype by its name in PyTorch and NumPy, or in the proto.
v1::Dtype DtypeOf(std::string name);

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_CONVERT_H_
