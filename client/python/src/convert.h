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
#include "client/release_hint.h"
#include "client/session.h"

namespace kvpool::python {

namespace nb = nanobind;

// A status on its way to Python, where it is an exception of kvpool/errors.py. Thrown with or without the GIL.
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
// What a use after release raises.
StatusError ReleasedError(const std::string& what);
// A view that a buffer can't describe, or of memory that it can't reach.
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

// Seconds; none: for ever.
using Timeout = std::optional<double>;
Deadline DeadlineOf(Timeout timeout);

// Waits without the GIL, and with an eye on Ctrl-C: `attempt(deadline)` answers a Status or StatusOr, DEADLINE_EXCEEDED as long
// as it may be asked again.
template <typename Attempt>
auto Await(Timeout timeout, Attempt attempt) {
  const Deadline end = DeadlineOf(timeout);
  while (true) {
    const Deadline slice = std::min(end, std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
    auto result = [&] {
      nb::gil_scoped_release released;
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

// "signals[2] is 'mass'; must be a Signal", to be thrown.
nb::builtin_exception TypeErrorOf(const std::string& field, nb::handle value, const char* must);
inline std::string EntryOf(const char* field, size_t index) { return absl::StrCat(field, "[", index, "]"); }

// A list of integers, or an array of them.
std::vector<uint32_t> TokensOf(nb::handle tokens);
// The same of floats.
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
// The other way round.
std::string NameOf(std::string_view full_name, std::string_view prefix);

// "never" for REUSE_NEVER. INVALID_ARGUMENT: a hint that is none.
ReleaseHint HintOf(const std::string& reuse, uint32_t category);
// Of `seconds`, at least one where they are not 0; INVALID_ARGUMENT: no number, or beyond what a clock can say.
std::chrono::milliseconds TimeOf(double seconds, const char* field);

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_CONVERT_H_
