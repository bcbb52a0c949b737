#include "client/python/src/convert.h"

#include <nanobind/ndarray.h>

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvpool::python {
namespace {

// Names in kvpool/errors.py.
const char* ExceptionOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
      return "InvalidArgumentError";
    case absl::StatusCode::kNotFound:
      return "NotFoundError";
    case absl::StatusCode::kAlreadyExists:
      return "AlreadyExistsError";
    case absl::StatusCode::kPermissionDenied:
      return "PermissionDeniedError";
    case absl::StatusCode::kUnauthenticated:
      return "UnauthenticatedError";
    case absl::StatusCode::kResourceExhausted:
      return "ResourceExhaustedError";
    case absl::StatusCode::kFailedPrecondition:
      return "FailedPreconditionError";
    case absl::StatusCode::kAborted:
      return "SessionEndedError";
    case absl::StatusCode::kOutOfRange:
      return "OutOfRangeError";
    case absl::StatusCode::kUnimplemented:
      return "UnimplementedError";
    case absl::StatusCode::kUnavailable:
      return "UnavailableError";
    case absl::StatusCode::kDeadlineExceeded:
      return "DeadlineExceededError";
    case absl::StatusCode::kOk:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kDoNotUseReservedForFutureExpansionUseDefaultInSwitchInstead_:
      return "KvpoolError";
  }
  return "KvpoolError";
}

void Translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const StatusError& error) {
    const std::string& type = error.type();
    if (type == "BufferError") {
      PyErr_SetString(PyExc_BufferError, error.what());
      return;
    }
    const nb::object exception = nb::module_::import_("kvpool.errors")
                                     .attr(type.empty() ? ExceptionOf(error.status().code()) : type.c_str());
    PyErr_SetString(exception.ptr(), error.what());
  }
}

}  // namespace

StatusError ReleasedError(const std::string& what) {
  return StatusError(absl::FailedPreconditionError(what), "ReleasedError");
}
StatusError BufferError(const std::string& why) {
  return StatusError(absl::FailedPreconditionError(why), "BufferError");
}
void RegisterErrors() { nb::register_exception_translator(Translate); }

nb::builtin_exception TypeErrorOf(const std::string& field, nb::handle value, const char* must) {
  constexpr Py_ssize_t kShown = 100;  // Characters; the value may be a large array.
  const auto shown = nb::steal<nb::str>(PyUnicode_Substring(nb::repr(value).ptr(), 0, kShown));
  if (!shown.is_valid()) throw nb::python_error();
  return nb::type_error(absl::StrCat(field, " is ", shown.c_str(), "; must be ", must).c_str());
}

Deadline DeadlineOf(Timeout timeout) {
  constexpr double kForEver = 10.0 * 365 * 86400;  // More would overflow the clock.
  const double seconds = std::clamp(timeout.value_or(kForEver), 0.0, kForEver);
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                std::chrono::duration<double>(seconds));
}

std::vector<uint32_t> TokensOf(nb::handle tokens) {
  std::vector<uint32_t> ids;
  nb::ndarray<int64_t, nb::ro, nb::ndim<1>, nb::device::cpu> array;
  // Only int64, which tokenizers and PyTorch make. Other element types are converted one by one.
  if (nb::try_cast(tokens, array, false)) {
    ids.reserve(array.shape(0));
    const auto view = array.view();
    for (size_t i = 0; i < array.shape(0); ++i) {
      if (view(i) < 0 || view(i) > int64_t{0xffffffff}) {
        throw StatusError(
            absl::InvalidArgumentError(absl::StrCat("tokens[", i, "]: ", view(i), " is no u32")));
      }
      ids.push_back(static_cast<uint32_t>(view(i)));
    }
    return ids;
  }
  for (const nb::handle token : tokens) {
    const nb::object number = nb::steal(PyNumber_Index(token.ptr()));
    if (!number.is_valid()) throw nb::python_error();
    const long long id = PyLong_AsLongLong(number.ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (id < 0 || id > 0xffffffffLL) {
      throw StatusError(
          absl::InvalidArgumentError(absl::StrCat("tokens[", ids.size(), "]: ", id, " is no u32")));
    }
    ids.push_back(static_cast<uint32_t>(id));
  }
  return ids;
}

std::vector<float> FloatsOf(nb::handle values, const char* field) {
  nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  if (nb::try_cast(values, array)) return {array.data(), array.data() + array.shape(0)};
  if (!nb::isinstance<nb::iterable>(values))
    throw TypeErrorOf(field, values, "a list of numbers, or an array");
  std::vector<float> floats;
  for (const nb::handle value : values) {
    const double number = PyFloat_AsDouble(value.ptr());
    if (PyErr_Occurred() != nullptr) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
      PyErr_Clear();
      throw TypeErrorOf(EntryOf(field, floats.size()), value, "a number");
    }
    floats.push_back(static_cast<float>(number));
  }
  return floats;
}

uint64_t PositionOf(nb::handle position, const char* field) {
  constexpr const char* kMust = "an int";
  if (PyBool_Check(position.ptr())) throw TypeErrorOf(field, position, kMust);
  const auto index = nb::steal(PyNumber_Index(position.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    throw TypeErrorOf(field, position, kMust);
  }
  const uint64_t value = PyLong_AsUnsignedLongLong(index.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat(field, " is ", nb::str(index).c_str(), "; must be 0 to ", UINT64_MAX)));
  }
  return value;
}

std::string KeysOf(nb::handle keys, uint32_t* key_bytes) {
  if (nb::isinstance<nb::bytes>(keys)) {
    const auto bytes = nb::borrow<nb::bytes>(keys);
    return std::string(bytes.c_str(), bytes.size());
  }
  if (!nb::isinstance<nb::iterable>(keys)) throw TypeErrorOf("keys", keys, "bytes, or a list of bytes");
  std::string all;
  std::optional<size_t> size;
  size_t count = 0;
  for (const nb::handle key : keys) {
    if (!nb::isinstance<nb::bytes>(key)) throw TypeErrorOf(EntryOf("keys", count), key, "bytes");
    const auto bytes = nb::borrow<nb::bytes>(key);
    if (bytes.size() != size.value_or(bytes.size())) {
      throw StatusError(absl::InvalidArgumentError(
          absl::StrCat(EntryOf("keys", count), " has ", bytes.size(), " bytes; keys[0] has ", *size)));
    }
    size = bytes.size();
    all.append(bytes.c_str(), bytes.size());
    ++count;
  }
  if (size.has_value()) *key_bytes = static_cast<uint32_t>(*size);
  return all;
}

ReleaseHint HintOf(const std::string& reuse, uint32_t category) {
  const ReleaseHint hint = {.reuse = EnumOf<v1::Reuse>(reuse, "REUSE_", "reuse", &v1::Reuse_Parse),
                            .category = category};
  Check(CheckHint(hint));
  return hint;
}

std::chrono::milliseconds TimeOf(double seconds, const char* field) {
  constexpr double kMost = 1e12;  // Milliseconds of more would overflow.
  if (!(std::abs(seconds) <= kMost)) {
    const auto most = std::chrono::duration_cast<std::chrono::seconds>(Session::kMaxTtl).count();
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat(field, " is ", seconds, "; must be 0 to ", most, " seconds")));
  }
  const int64_t ms = std::llround(seconds * 1000);
  // A short time must not become 0, which means something else.
  if (ms == 0 && seconds != 0) return std::chrono::milliseconds(seconds > 0 ? 1 : -1);
  return std::chrono::milliseconds(ms);
}

std::string WordsOf(const google::protobuf::EnumDescriptor& type, std::string_view prefix) {
  std::vector<std::string> words;
  for (int i = 0; i < type.value_count(); ++i) words.push_back(NameOf(type.value(i)->name(), prefix));
  return absl::StrJoin(words, ", ");
}

std::string NameOf(std::string_view full_name, std::string_view prefix) {
  if (full_name.substr(0, prefix.size()) == prefix) full_name.remove_prefix(prefix.size());
  return absl::AsciiStrToLower(std::string(full_name));
}

v1::Dtype DtypeOf(std::string name) {
  if (name.rfind("torch.", 0) == 0) name = name.substr(6);
  if (name == "float32" || name == "f32") return v1::DTYPE_F32;
  if (name == "float16" || name == "half" || name == "f16") return v1::DTYPE_F16;
  if (name == "bfloat16" || name == "bf16") return v1::DTYPE_BF16;
  if (name == "float8_e4m3fn" || name == "fp8_e4m3") return v1::DTYPE_FP8_E4M3;
  if (name == "float8_e5m2" || name == "fp8_e5m2") return v1::DTYPE_FP8_E5M2;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("dtype: '", name, "' is none of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2")));
}

}  // namespace kvpool::python
