#include "tests/support/fake_cuda/ptx/operations.h"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <concepts>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "tests/support/fake_cuda/ptx/image.h"
#include "tests/support/fake_cuda/ptx/warp.h"

namespace kvpool::fake::ptx {
namespace {

using Table = std::unordered_map<std::string, Operation>;

template <typename T>
constexpr char kLetter = std::is_same_v<T, bool> ? 'p'
                         : sizeof(T) == 2        ? 'h'
                         : sizeof(T) == 4        ? 'w'
                                                 : 'd';

// ----------------------------------------------------------------------------------------- lane by lane

// to = f(from...), for each lane by itself.
template <auto f, typename D, typename... S>
void Compute(Warp& warp, const Instruction& in) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    D* const to = warp.at<D>(in.to[0]);
    const std::tuple<const S*...> from(warp.at<S>(in.from[i])...);
    if (warp.active != kAllLanes) {
      warp.Each([&](uint32_t lane) { to[lane] = static_cast<D>(f(std::get<i>(from)[lane]...)); });
      return;
    }
    D results[kLanes];  // apart from the operands, so that the loop becomes vector instructions
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      results[lane] = static_cast<D>(f(std::get<i>(from)[lane]...));
    std::memcpy(to, results, sizeof results);
  }
  (std::index_sequence_for<S...>());
}
template <auto f, typename D, typename... S>
void Add(Table& table, const std::string& opcode) {
  table[opcode] = {&Compute<f, D, S...>, {kLetter<D>, kLetter<S>...}};
}

void SetPredicate(Warp& warp, Place place, uint32_t hits) {
  auto& to = *warp.at<uint32_t>(place);
  to = (to & ~warp.active) | (hits & warp.active);
}

template <auto f, typename S>
void Compare(Warp& warp, const Instruction& in) {
  const S* const a = warp.at<S>(in.from[0]);
  const S* const b = warp.at<S>(in.from[1]);
  alignas(uint64_t) uint8_t hit[kLanes];
  // Of the lanes that are not active, too: their values are thrown away.
  for (uint32_t i = 0; i < kLanes; ++i) hit[i] = f(a[i], b[i]);
  uint32_t hits = 0;
  for (uint32_t i = 0; i < kLanes; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, hit + i, sizeof eight);
    hits |= static_cast<uint32_t>(eight * 0x0102040810204080u >> 56)
            << i;  // collects the lowest bits of eight bytes
  }
  SetPredicate(warp, in.to[0], hits);
}
template <auto f, typename S>
void AddCompare(Table& table, const std::string& opcode) {
  table[opcode] = {&Compare<f, S>, {'p', kLetter<S>, kLetter<S>}};
}

template <typename T>
void Select(Warp& warp, const Instruction& in) {
  T* const to = warp.at<T>(in.to[0]);
  const T* const a = warp.at<T>(in.from[0]);
  const T* const b = warp.at<T>(in.from[1]);
  const uint32_t which = *warp.at<uint32_t>(in.from[2]);
  warp.Each([&](uint32_t i) { to[i] = (which >> i & 1) != 0 ? a[i] : b[i]; });
}

template <auto f>
void CombinePredicates(Warp& warp, const Instruction& in) {
  const uint32_t a = *warp.at<uint32_t>(in.from[0]);
  const uint32_t b = in.from[1] == kNoPlace ? 0 : *warp.at<uint32_t>(in.from[1]);
  SetPredicate(warp, in.to[0], f(a, b));
}

constexpr auto kCopy = [](auto a) { return a; };
constexpr auto kPlus = [](auto a, auto b) { return a + b; };
constexpr auto kMinus = [](auto a, auto b) { return a - b; };
constexpr auto kTimes = [](auto a, auto b) { return a * b; };
// A GPU's integer division by zero yields all ones, and the remainder is the dividend.
constexpr auto kOver = [](auto a, auto b) {
  using T = decltype(a);
  if (b == 0) return static_cast<T>(-1);
  // The least number by -1 would be a trap here.
  if (std::is_signed_v<T> && b == static_cast<T>(-1))
    return static_cast<T>(std::make_unsigned_t<T>(0) - std::make_unsigned_t<T>(a));
  return static_cast<T>(a / b);
};
constexpr auto kRest = [](auto a, auto b) {
  using T = decltype(a);
  if (b == 0) return a;
  return std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
};
constexpr auto kLeast = [](auto a, auto b) {
  if constexpr (std::is_floating_point_v<decltype(a)>)
    return std::fmin(a, b);
  else
    return a < b ? a : b;
};
constexpr auto kGreatest = [](auto a, auto b) {
  if constexpr (std::is_floating_point_v<decltype(a)>)
    return std::fmax(a, b);
  else
    return a < b ? b : a;
};
constexpr auto kIsEqual = [](auto a, auto b) { return a == b; };
constexpr auto kIsNotEqual = [](auto a, auto b) { return a != b; };
constexpr auto kIsLess = [](auto a, auto b) { return a < b; };
constexpr auto kIsLessOrEqual = [](auto a, auto b) { return a <= b; };
constexpr auto kIsGreater = [](auto a, auto b) { return a > b; };
constexpr auto kIsGreaterOrEqual = [](auto a, auto b) { return a >= b; };

// "ltu" holds where a is less than b or either is NaN, as "not greater or equal" does.
constexpr auto kIsNotLess = [](auto a, auto b) { return !(a < b); };
constexpr auto kIsNotLessOrEqual = [](auto a, auto b) { return !(a <= b); };
constexpr auto kIsNotGreater = [](auto a, auto b) { return !(a > b); };
constexpr auto kIsNotGreaterOrEqual = [](auto a, auto b) { return !(a >= b); };
constexpr auto kIsApart = [](auto a, auto b) { return a < b || a > b; };
constexpr auto kIsNotApart = [](auto a, auto b) { return !(a < b || a > b); };
constexpr auto kSaturate = [](float a) { return !(a > 0) ? 0 : a > 1 ? 1 : a; };

// ---------------------------------------------------------------------------------------------- integers

template <typename T>
constexpr uint32_t kBitsOf = sizeof(T) * 8;

constexpr auto kShiftLeft = [](auto a, uint32_t n) {
  return n < kBitsOf<decltype(a)> ? static_cast<decltype(a)>(a << n) : decltype(a){0};
};
constexpr auto kShiftRight = [](auto a, uint32_t n) {
  return n < kBitsOf<decltype(a)> ? static_cast<decltype(a)>(a >> n) : decltype(a){0};
};
constexpr auto kShiftRightSigned = [](auto a, uint32_t n) {
  return a >> (n < kBitsOf<decltype(a)> ? n : kBitsOf<decltype(a)> - 1);
};
template <typename Twice>
constexpr auto kUpperHalf =
    [](auto a, auto b) { return static_cast<decltype(a)>(Twice{a} * Twice{b} >> kBitsOf<decltype(a)>); };

template <typename T>
void AddBits(Table& table, const std::string& bits) {
  Add<[](T a, T b) { return a & b; }, T, T, T>(table, "and.b" + bits);
  Add<[](T a, T b) { return a | b; }, T, T, T>(table, "or.b" + bits);
  Add<[](T a, T b) { return a ^ b; }, T, T, T>(table, "xor.b" + bits);
  Add<[](T a) { return ~a; }, T, T>(table, "not.b" + bits);
  Add<kShiftLeft, T, T, uint32_t>(table, "shl.b" + bits);
  for (const char* type : {"shr.b", "shr.u"}) {
    Add<kShiftRight, T, T, uint32_t>(table, type + bits);
  }
  using S = std::make_signed_t<T>;
  Add<kShiftRightSigned, S, S, uint32_t>(table, "shr.s" + bits);
  for (const char* type : {"b", "u", "s"}) {
    Add<kCopy, T, T>(table, "mov." + (type + bits));
    AddCompare<kIsEqual, T>(table, "setp.eq." + (type + bits));
    AddCompare<kIsNotEqual, T>(table, "setp.ne." + (type + bits));
    table["selp." + (type + bits)] = {&Select<T>, {kLetter<T>, kLetter<T>, kLetter<T>, 'p'}};
  }
  // Signed and unsigned have the same bits.
  for (const char* type : {"u", "s"}) {
    Add<kPlus, T, T, T>(table, "add." + (type + bits));
    Add<kMinus, T, T, T>(table, "sub." + (type + bits));
    Add<kTimes, T, T, T>(table, "mul.lo." + (type + bits));
    Add<[](T a, T b, T c) { return a * b + c; }, T, T, T, T>(table, "mad.lo." + (type + bits));
  }
  Add<[](T a) { return T{0} - a; }, T, T>(table, "neg.s" + bits);
  Add<[](T a) { return static_cast<uint32_t>(std::popcount(a)); }, uint32_t, T>(table, "popc.b" + bits);
}

template <typename T>
void AddOrdered(Table& table, const std::string& type) {
  AddCompare<kIsLess, T>(table, "setp.lt." + type);
  AddCompare<kIsLessOrEqual, T>(table, "setp.le." + type);
  AddCompare<kIsGreater, T>(table, "setp.gt." + type);
  AddCompare<kIsGreaterOrEqual, T>(table, "setp.ge." + type);
  Add<kLeast, T, T, T>(table, "min." + type);
  Add<kGreatest, T, T, T>(table, "max." + type);
}

template <typename T>
void AddInteger(Table& table, const std::string& type) {
  AddOrdered<T>(table, type);
  Add<kOver, T, T, T>(table, "div." + type);
  Add<kRest, T, T, T>(table, "rem." + type);
  using Twice = std::conditional_t<
      sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
      std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                         std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;
  Add<kUpperHalf<Twice>, T, T, T>(table, "mul.hi." + type);
  if constexpr (sizeof(T) < 8) {
    Add<[](T a, T b) { return Twice{a} * Twice{b}; }, Twice, T, T>(table, "mul.wide." + type);
    Add<[](T a, T b, Twice c) { return Twice{a} * Twice{b} + c; }, Twice, T, T, Twice>(table,
                                                                                       "mad.wide." + type);
  }
  Add<[](T a) { return static_cast<float>(a); }, float, T>(table, "cvt.rn.f32." + type);
  Add<[](T a) { return static_cast<double>(a); }, double, T>(table, "cvt.rn.f64." + type);
  Add<[](T a) { return static_cast<uint16_t>(a); }, uint16_t, T>(table, "cvt.u16." + type);
  Add<[](T a) { return static_cast<uint32_t>(a); }, uint32_t, T>(table, "cvt.u32." + type);
  Add<[](T a) { return static_cast<int32_t>(a); }, int32_t, T>(table, "cvt.s32." + type);
  Add<[](T a) { return static_cast<uint64_t>(a); }, uint64_t, T>(table, "cvt.u64." + type);
  Add<[](T a) { return static_cast<int64_t>(a); }, int64_t, T>(table, "cvt.s64." + type);
}

// Bits [first, first + count); those behind the last are 0.
uint32_t ExtractedBits(uint32_t a, uint32_t first, uint32_t count) {
  return static_cast<uint32_t>(uint64_t{a} >> std::min(first & 0xff, 32u) &
                               ((uint64_t{1} << std::min(count & 0xff, 32u)) - 1));
}

// Each nibble of `which` chooses one of the eight bytes, or with its upper bit set that byte's sign, eight times.
uint32_t PermutedBytes(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t permuted = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t nibble = which >> (4 * i);
    const auto byte = static_cast<uint8_t>(bytes >> (8 * (nibble & 7)));
    permuted |= uint32_t{(nibble & 8) == 0 ? byte : byte >= 0x80 ? uint8_t{0xff} : uint8_t{0}} << (8 * i);
  }
  return permuted;
}

// --------------------------------------------------------------------------------------- floating point

// Towards zero, into the range of D; 0 for NaN.
template <typename D, typename S>
D Truncated(S x) {
  if (std::isnan(x)) return 0;
  x = std::trunc(x);
  if (x <= static_cast<S>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (x >= static_cast<S>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return static_cast<D>(x);
}

template <typename T>
void AddFloat(Table& table, const std::string& type) {
  AddOrdered<T>(table, type);
  AddCompare<kIsEqual, T>(table, "setp.eq." + type);
  AddCompare<kIsApart, T>(table, "setp.ne." + type);
  AddCompare<kIsNotApart, T>(table, "setp.equ." + type);
  AddCompare<kIsNotEqual, T>(table, "setp.neu." + type);
  AddCompare<kIsNotGreaterOrEqual, T>(table, "setp.ltu." + type);
  AddCompare<kIsNotGreater, T>(table, "setp.leu." + type);
  AddCompare<kIsNotLessOrEqual, T>(table, "setp.gtu." + type);
  AddCompare<kIsNotLess, T>(table, "setp.geu." + type);
  AddCompare<[](T a, T b) { return a == a && b == b; }, T>(table, "setp.num." + type);
  AddCompare<[](T a, T b) { return a != a || b != b; }, T>(table, "setp.nan." + type);
  for (const char* rounding : {"", "rn."}) {
    Add<kPlus, T, T, T>(table, "add." + (rounding + type));
    Add<kMinus, T, T, T>(table, "sub." + (rounding + type));
    Add<kTimes, T, T, T>(table, "mul." + (rounding + type));
  }
  Add<[](T a, T b, T c) { return std::fma(a, b, c); }, T, T, T, T>(table, "fma.rn." + type);
  Add<[](T a, T b) { return a / b; }, T, T, T>(table, "div.rn." + type);
  Add<[](T a) { return std::sqrt(a); }, T, T>(table, "sqrt.rn." + type);
  Add<[](T a) { return 1 / a; }, T, T>(table, "rcp.rn." + type);
  Add<[](T a) { return -a; }, T, T>(table, "neg." + type);
  Add<[](T a) { return std::abs(a); }, T, T>(table, "abs." + type);
  Add<[](T sign, T magnitude) { return std::copysign(magnitude, sign); }, T, T, T>(table, "copysign." + type);
  Add<kCopy, T, T>(table, "mov." + type);
  table["selp." + type] = {&Select<T>, {kLetter<T>, kLetter<T>, kLetter<T>, 'p'}};
  Add<Truncated<uint32_t, T>, uint32_t, T>(table, "cvt.rzi.u32." + type);
  Add<Truncated<int32_t, T>, int32_t, T>(table, "cvt.rzi.s32." + type);
  Add<Truncated<uint64_t, T>, uint64_t, T>(table, "cvt.rzi.u64." + type);
  Add<Truncated<int64_t, T>, int64_t, T>(table, "cvt.rzi.s64." + type);
}

// nvcc's expf splits its argument with this rounding.
void FmaDownwards(Warp& warp, const Instruction& in) {
  volatile const float* const a = warp.at<float>(in.from[0]);
  volatile const float* const b = warp.at<float>(in.from[1]);
  volatile const float* const c = warp.at<float>(in.from[2]);
  volatile float* const to = warp.at<float>(in.to[0]);
  std::fesetround(FE_DOWNWARD);
  for (uint32_t rest = warp.active; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<uint32_t>(std::countr_zero(rest));
    to[i] = std::fma(a[i], b[i], c[i]);
  }
  std::fesetround(FE_TONEAREST);
}

float FloatOfF16(uint16_t x) {
  const uint32_t exponent = x >> 10 & 0x1f, fraction = x & 0x3ff;
  const float magnitude = exponent == 0x1f ? (fraction == 0 ? std::numeric_limits<float>::infinity()
                                                            : std::numeric_limits<float>::quiet_NaN())
                                           : std::bit_cast<float>((x & 0x7fffu) << 13) * 0x1p112f;
  return (x & 0x8000) != 0 ? -magnitude : magnitude;
}

float FloatOfBf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

// The nearest of the numbers with `fraction` bits behind the first, of which the least step is 2^`least`; halves to even.
float Rounded(float x, int fraction, int least) {
  if (!std::isfinite(x) || x == 0) return x;
  const int step = std::max(std::ilogb(x) - fraction, least);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(double{x}, -step)), step));
}
uint16_t F16Of(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::abs(Rounded(x, 10, -24));
  if (magnitude > 65504) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::ldexp(magnitude, 24));
  const int exponent = std::ilogb(magnitude);
  return sign | static_cast<uint16_t>((exponent + 14) * 1024 + std::ldexp(magnitude, 10 - exponent));
}
uint16_t Bf16Of(float x) {
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(Rounded(x, 7, -133)) >> 16);
}
template <auto f>
constexpr auto kPairOf = [](float upper, float lower) { return uint32_t{f(upper)} << 16 | f(lower); };

// "ftz": what is subnormal is zero.
float Flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// ------------------------------------------------------------------------------------------- whole warps

enum class Shuffle : uint8_t { kUp, kDown, kButterfly, kIndex };

template <Shuffle mode>
void ShuffleLanes(Warp& warp, const Instruction& in) {
  const uint32_t mask = warp.at<uint32_t>(in.from[3])[std::countr_zero(warp.active)];
  if (!warp.HaveMet(mask)) return;
  const auto* value = warp.at<uint32_t>(in.from[0]);
  const auto* b = warp.at<uint32_t>(in.from[1]);
  const auto* c = warp.at<uint32_t>(in.from[2]);
  uint32_t result[kLanes];
  uint32_t in_range = 0;
  for (uint32_t rest = warp.active; rest != 0; rest &= rest - 1) {
    const auto lane = static_cast<uint32_t>(std::countr_zero(rest));
    const uint32_t distance = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
    const uint32_t limit = (lane & segment) | (clamp & ~segment);
    const uint32_t from = mode == Shuffle::kUp          ? lane - distance
                          : mode == Shuffle::kDown      ? lane + distance
                          : mode == Shuffle::kButterfly ? lane ^ distance
                                                        : (lane & segment) | (distance & ~segment);
    const bool there =
        mode == Shuffle::kUp ? static_cast<int32_t>(from) >= static_cast<int32_t>(limit) : from <= limit;
    in_range |= uint32_t{there} << lane;
    if (there && (warp.active >> from & 1) == 0) {
      return warp.Fail(CUDA_ERROR_LAUNCH_FAILED, lane, "takes the value of a lane that does not take part");
    }
    result[lane] = value[there ? from : lane];
  }
  auto* to = warp.at<uint32_t>(in.to[0]);
  warp.Each([&](uint32_t i) { to[i] = result[i]; });
  if (in.to[1] != kNoPlace) SetPredicate(warp, in.to[1], in_range);
}

void Ballot(Warp& warp, const Instruction& in) {
  const uint32_t mask = warp.at<uint32_t>(in.from[1])[std::countr_zero(warp.active)];
  if (!warp.HaveMet(mask)) return;
  const uint32_t votes = *warp.at<uint32_t>(in.from[0]) & warp.active;
  auto* to = warp.at<uint32_t>(in.to[0]);
  warp.Each([&](uint32_t i) { to[i] = votes; });
}

// The fragments of mma.m16n8k16 and m16n8k8, as the PTX ISA has them ("Matrix Fragments for mma.m16n8k16 with floating point
// type"): a register has kInWord elements that lie side by side in k. With lane = 4 * group + own, register r of a has the row
// group + 8 * (r % 2) and the columns kInWord * own + 4 * kInWord * (r / 2) and the next, register r of b the column group and
// the rows kInWord * own + 4 * kInWord * r and the next, register r of c and d the row group + 8 * (r / 2) and the column
// 2 * own + r % 2. kFloatOf(word, i): its i-th element.
template <uint32_t kInWord, auto kFloatOf>
void MultiplyMatrices(Warp& warp, const Instruction& in) {
  constexpr uint32_t kM = 16, kN = 8, kK = 8 * kInWord;
  if (!warp.HaveMet(kAllLanes)) return;
  if (warp.active != kAllLanes) {
    return warp.Fail(CUDA_ERROR_LAUNCH_FAILED, static_cast<uint32_t>(std::countr_zero(warp.active)),
                     "multiplies matrices without all lanes of its warp");
  }
  float a[kM][kK], b[kK][kN], d[kM][kN];
  const auto spread = [&](Place place, const auto& element) {
    const uint32_t* const words = warp.at<uint32_t>(place);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      for (uint32_t i = 0; i < kInWord; ++i)
        element(lane / 4, lane % 4 * kInWord + i) = kFloatOf(words[lane], i);
    }
  };
  for (uint32_t r = 0; r < 4; ++r) {
    spread(in.from[r],
           [&](uint32_t group, uint32_t k) -> float& { return a[group + r % 2 * 8][k + r / 2 * (kK / 2)]; });
  }
  for (uint32_t r = 0; r < 2; ++r) {
    spread(in.from[4 + r], [&](uint32_t group, uint32_t k) -> float& { return b[k + r * (kK / 2)][group]; });
  }
  const auto of_result = [&](uint32_t r, uint32_t lane) -> float& {
    return d[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
  };
  for (uint32_t r = 0; r < 4; ++r) {
    const float* const c = warp.at<float>(in.from[6 + r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) of_result(r, lane) = c[lane];
  }
  for (uint32_t m = 0; m < kM; ++m) {
    for (uint32_t k = 0; k < kK; ++k) {
      for (uint32_t n = 0; n < kN; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (uint32_t r = 0; r < 4; ++r) {
    float* const to = warp.at<float>(in.to[r]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) to[lane] = of_result(r, lane);
  }
  ++warp.launch->counts->matrix_products;
}

float F16InWord(uint32_t word, uint32_t i) { return FloatOfF16(static_cast<uint16_t>(word >> 16 * i)); }
float Bf16InWord(uint32_t word, uint32_t i) { return FloatOfBf16(static_cast<uint16_t>(word >> 16 * i)); }
// The multiplication does not look at the lower 13 bits.
constexpr uint32_t kTf32Bits = 0xffffe000u;
float Tf32InWord(uint32_t word, uint32_t) { return std::bit_cast<float>(word & kTf32Bits); }

// To the nearest, halves away from zero.
uint32_t Tf32Of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::isfinite(x) ? (bits + 0x1000u) & kTf32Bits : bits;
}

// ------------------------------------------------------------------------------------------------ memory

// T: an element in memory; R: its register, which may be wider.
template <typename T, typename R>
void Load(Warp& warp, const Instruction& in) {
  uint64_t addresses[kLanes];
  if (!warp.Resolve(in, Touch::kRead, sizeof(T) * in.count, addresses)) return;
  for (uint32_t element = 0; element < in.count; ++element) {
    R* const to = warp.at<R>(in.to[element]);
    warp.Each([&](uint32_t i) {
      T value;
      std::memcpy(&value, reinterpret_cast<const T*>(addresses[i]) + element, sizeof value);
      to[i] = static_cast<R>(value);
    });
  }
}

template <typename T, typename R>
void Store(Warp& warp, const Instruction& in) {
  uint64_t addresses[kLanes];
  if (!warp.Resolve(in, Touch::kWrite, sizeof(T) * in.count, addresses)) return;
  for (uint32_t element = 0; element < in.count; ++element) {
    const R* const from = warp.at<R>(in.from[1 + element]);
    warp.Each([&](uint32_t i) {
      const T value = static_cast<T>(from[i]);
      std::memcpy(reinterpret_cast<T*>(addresses[i]) + element, &value, sizeof value);
    });
  }
}

template <typename T, typename R>
void AtomicAdd(Warp& warp, const Instruction& in) {
  if constexpr (std::is_same_v<T, R>) {
    uint64_t addresses[kLanes];
    if (!warp.Resolve(in, Touch::kAtomic, sizeof(T), addresses)) return;
    const R* const from = warp.at<R>(in.from[1]);
    for (uint32_t rest = warp.active; rest != 0; rest &= rest - 1) {
      const auto i = static_cast<uint32_t>(std::countr_zero(rest));
      const R before = __atomic_fetch_add(reinterpret_cast<T*>(addresses[i]), from[i], __ATOMIC_RELAXED);
      if (in.to[0] != kNoPlace) warp.at<R>(in.to[0])[i] = before;
    }
  }
}

template <typename T, typename R>
Execute AccessOf(Access access) {
  if constexpr (sizeof(T) > sizeof(R))
    return nullptr;
  else
    return access == Access::kLoad ? &Load<T, R> : access == Access::kStore ? &Store<T, R> : &AtomicAdd<T, R>;
}
template <typename T>
Execute AccessOf(Access access, uint32_t register_bytes) {
  return register_bytes == 2   ? AccessOf<T, uint16_t>(access)
         : register_bytes == 4 ? AccessOf<T, uint32_t>(access)
                               : AccessOf<T, uint64_t>(access);
}

template <typename Part, typename Whole>
void Pack(Warp& warp, const Instruction& in) {
  Whole* const to = warp.at<Whole>(in.to[0]);
  Whole packed[kLanes] = {};
  for (uint32_t part = 0; part < in.count; ++part) {
    const Part* const from = warp.at<Part>(in.from[part]);
    warp.Each(
        [&](uint32_t i) { packed[i] |= static_cast<Whole>(Whole{from[i]} << (sizeof(Part) * 8 * part)); });
  }
  warp.Each([&](uint32_t i) { to[i] = packed[i]; });
}
template <typename Part, typename Whole>
void Unpack(Warp& warp, const Instruction& in) {
  Whole whole[kLanes];
  const Whole* const from = warp.at<Whole>(in.from[0]);
  warp.Each([&](uint32_t i) { whole[i] = from[i]; });
  for (uint32_t part = 0; part < in.count; ++part) {
    Part* const to = warp.at<Part>(in.to[part]);
    warp.Each([&](uint32_t i) { to[i] = static_cast<Part>(whole[i] >> (sizeof(Part) * 8 * part)); });
  }
}

Table MakeTable() {
  Table table;
  AddBits<uint16_t>(table, "16");
  AddBits<uint32_t>(table, "32");
  AddBits<uint64_t>(table, "64");
  AddInteger<uint16_t>(table, "u16");
  AddInteger<int16_t>(table, "s16");
  AddInteger<uint32_t>(table, "u32");
  AddInteger<int32_t>(table, "s32");
  AddInteger<uint64_t>(table, "u64");
  AddInteger<int64_t>(table, "s64");
  AddFloat<float>(table, "f32");
  AddFloat<double>(table, "f64");
  Add<[](double a) { return static_cast<float>(a); }, float, double>(table, "cvt.rn.f32.f64");
  Add<[](float a) { return double{a}; }, double, float>(table, "cvt.f64.f32");
  Add<kSaturate, float, float>(table, "cvt.sat.f32.f32");
  Add<FloatOfF16, float, uint16_t>(table, "cvt.f32.f16");
  Add<kPairOf<F16Of>, uint32_t, float, float>(table, "cvt.rn.f16x2.f32");
  Add<kPairOf<Bf16Of>, uint32_t, float, float>(table, "cvt.rn.bf16x2.f32");
  Add<Tf32Of, uint32_t, float>(table, "cvt.rna.tf32.f32");
  Add<ExtractedBits, uint32_t, uint32_t, uint32_t, uint32_t>(table, "bfe.u32");
  Add<PermutedBytes, uint32_t, uint32_t, uint32_t, uint32_t>(table, "prmt.b32");
  table["fma.rm.f32"] = {&FmaDownwards, "wwww"};
  Add<[](float a) { return Flushed(std::exp2(Flushed(a))); }, float, float>(table, "ex2.approx.ftz.f32");
  Add<[](float a) { return std::exp2(a); }, float, float>(table, "ex2.approx.f32");
  Add<[](float a) { return std::log2(a); }, float, float>(table, "lg2.approx.f32");
  Add<[](float a) { return Flushed(std::log2(Flushed(a))); }, float, float>(table, "lg2.approx.ftz.f32");
  // The upper half of the result's bits; the rest is zero.
  Add<[](double a) { return std::bit_cast<double>(std::bit_cast<uint64_t>(1 / a) & 0xffffffff00000000u); },
      double, double>(table, "rcp.approx.ftz.f64");
  Add<kCopy, uint64_t, uint64_t>(table, "cvta.to.global.u64");
  table["mov.pred"] = {&CombinePredicates<[](uint32_t a, uint32_t) { return a; }>, "pp"};
  table["not.pred"] = {&CombinePredicates<[](uint32_t a, uint32_t) { return ~a; }>, "pp"};
  table["and.pred"] = {&CombinePredicates<[](uint32_t a, uint32_t b) { return a & b; }>, "ppp"};
  table["or.pred"] = {&CombinePredicates<[](uint32_t a, uint32_t b) { return a | b; }>, "ppp"};
  table["xor.pred"] = {&CombinePredicates<[](uint32_t a, uint32_t b) { return a ^ b; }>, "ppp"};
  table["shfl.sync.up.b32"] = {&ShuffleLanes<Shuffle::kUp>, "wwwww"};
  table["shfl.sync.down.b32"] = {&ShuffleLanes<Shuffle::kDown>, "wwwww"};
  table["shfl.sync.bfly.b32"] = {&ShuffleLanes<Shuffle::kButterfly>, "wwwww"};
  table["shfl.sync.idx.b32"] = {&ShuffleLanes<Shuffle::kIndex>, "wwwww"};
  table["vote.sync.ballot.b32"] = {&Ballot, "wpw"};
  return table;
}

}  // namespace

const Operation* FindOperation(const std::string& opcode) {
  static const Table& table = *new Table(MakeTable());
  const auto found = table.find(opcode);
  return found != table.end() ? &found->second : nullptr;
}

uint32_t BytesOfType(std::string_view type) {
  const std::string_view bits = type.substr(1);
  return bits == "8" ? 1 : bits == "16" ? 2 : bits == "32" ? 4 : bits == "64" ? 8 : 0;
}

Execute FindAccess(Access access, std::string_view type, uint32_t register_bytes) {
  const bool is_signed = type[0] == 's';
  switch (BytesOfType(type)) {
    case 1:
      return is_signed ? AccessOf<int8_t>(access, register_bytes) : AccessOf<uint8_t>(access, register_bytes);
    case 2:
      return is_signed ? AccessOf<int16_t>(access, register_bytes)
                       : AccessOf<uint16_t>(access, register_bytes);
    // Integers' bits are added; there is no atomic addition of floats here.
    case 4:
      return is_signed && access != Access::kAtomicAdd ? AccessOf<int32_t>(access, register_bytes)
                                                       : AccessOf<uint32_t>(access, register_bytes);
    case 8:
      return AccessOf<uint64_t>(access, register_bytes);
  }
  return nullptr;
}

Execute FindPack(uint32_t part_bytes, uint32_t whole_bytes) {
  if (part_bytes == 2) return whole_bytes == 4 ? &Pack<uint16_t, uint32_t> : &Pack<uint16_t, uint64_t>;
  return part_bytes == 4 && whole_bytes == 8 ? &Pack<uint32_t, uint64_t> : nullptr;
}
Execute FindUnpack(uint32_t part_bytes, uint32_t whole_bytes) {
  if (part_bytes == 2) return whole_bytes == 4 ? &Unpack<uint16_t, uint32_t> : &Unpack<uint16_t, uint64_t>;
  return part_bytes == 4 && whole_bytes == 8 ? &Unpack<uint32_t, uint64_t> : nullptr;
}

Execute FindMatrixProduct(std::string_view opcode) {
  if (opcode == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") return &MultiplyMatrices<2, F16InWord>;
  if (opcode == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
    return &MultiplyMatrices<2, Bf16InWord>;
  if (opcode == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32") return &MultiplyMatrices<1, Tf32InWord>;
  return nullptr;
}

void Branch(Warp& warp, const Instruction& in) {
  if (warp.active == warp.lanes) {
    warp.pc = in.target;
  } else {
    warp.groups.push_back({in.target, warp.active, Wait::kNothing});
    warp.lanes &= ~warp.active;
  }
  if (!warp.groups.empty()) warp.pick_at = 0;
}

void Return(Warp& warp, const Instruction&) {
  warp.ended |= warp.active;
  warp.lanes &= ~warp.active;
}

void Barrier(Warp& warp, const Instruction&) {
  warp.groups.push_back({warp.pc, warp.active, Wait::kBarrier});
  warp.lanes &= ~warp.active;
}

}  // namespace kvpool::fake::ptx
