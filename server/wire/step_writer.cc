#include "server/wire/step_writer.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "server/wire/field_tags.h"

namespace kvpool {
namespace {

using Blocks = google::protobuf::RepeatedField<uint64_t>;

constexpr size_t kMostOfVarint = 10;
// What a result has at most beside its blocks: tags and sizes of the result and of the verb, and the verb's numbers.
constexpr size_t kMostOfResult = 64;
// What a group of a match has at most beside its blocks.
constexpr size_t kMostOfGroup = 32;

size_t SizeOf(uint64_t number) {
  return (static_cast<size_t>(std::bit_width(number | 1)) * 9 + 64) / 64;  // Seven bits a byte.
}
// A field that is 0 is not written.
size_t SizeOfVarint(uint64_t number) { return number == 0 ? 0 : 1 + SizeOf(number); }
size_t SizeOfPacked(const Blocks& blocks) {
  const size_t bytes = static_cast<size_t>(blocks.size()) * sizeof(uint64_t);
  return bytes == 0 ? 0 : 1 + SizeOf(bytes) + bytes;
}

// Where the next byte goes. There is room for what is written.
class BytesOut {
 public:
  explicit BytesOut(char* at) : at_(at) {}

  char* at() const { return at_; }
  void Skip(size_t bytes) { at_ += bytes; }
  void Tag(uint8_t tag) { *at_++ = static_cast<char>(tag); }
  void Number(uint64_t number) {
    for (; number >= 0x80; number >>= 7) *at_++ = static_cast<char>(number | 0x80);
    *at_++ = static_cast<char>(number);
  }
  void VarintField(uint8_t tag, uint64_t number) {
    if (number == 0) return;
    Tag(tag);
    Number(number);
  }
  void PackedField(uint8_t tag, const Blocks& blocks) {
    if (blocks.empty()) return;
    const size_t bytes = static_cast<size_t>(blocks.size()) * sizeof(uint64_t);
    Tag(tag);
    Number(bytes);
    static_assert(std::endian::native == std::endian::little);
    std::memcpy(at_, blocks.data(), bytes);
    at_ += bytes;
  }
  void Fixed64Field(uint8_t tag, uint64_t number) {
    if (number == 0) return;
    Tag(tag);
    std::memcpy(at_, &number, sizeof(number));
    at_ += sizeof(number);
  }
  // A verb's result of `size` bytes, in a result that has nothing else, in a response.
  void OpenResult(uint8_t verb, size_t size) {
    Tag(SizedTag(v1::StepResponse::kResultsFieldNumber));
    Number(1 + SizeOf(size) + size);
    Tag(verb);
    Number(size);
  }

 private:
  char* at_;
};

// ---- One each for the verbs that are written here.

void Write(const v1::LeaseResult& lease, BytesOut* bytes) {
  using R = v1::LeaseResult;
  const auto shortfall = static_cast<uint64_t>(lease.shortfall());
  bytes->OpenResult(SizedTag(v1::OperationResult::kLeaseFieldNumber),
                    SizeOfPacked(lease.blocks()) + SizeOfVarint(shortfall) +
                        SizeOfVarint(lease.free_blocks()) + (lease.sink_block() == 0 ? 0 : 9));
  bytes->PackedField(SizedTag(R::kBlocksFieldNumber), lease.blocks());
  bytes->VarintField(VarintTag(R::kShortfallFieldNumber), shortfall);
  bytes->VarintField(VarintTag(R::kFreeBlocksFieldNumber), lease.free_blocks());
  bytes->Fixed64Field(Fixed64Tag(R::kSinkBlockFieldNumber), lease.sink_block());
}

void Write(const v1::SealResult& seal, BytesOut* bytes) {
  bytes->OpenResult(SizedTag(v1::OperationResult::kSealFieldNumber), SizeOfPacked(seal.canonical()));
  bytes->PackedField(SizedTag(v1::SealResult::kCanonicalFieldNumber), seal.canonical());
}

size_t SizeOfGroup(const v1::GroupHit& group) {
  return SizeOfVarint(group.group()) + SizeOfPacked(group.blocks());
}

void Write(const v1::MatchResult& match, BytesOut* bytes) {
  using R = v1::MatchResult;
  const auto miss = static_cast<uint64_t>(match.miss());
  size_t size = SizeOfVarint(match.tokens()) + SizeOfVarint(miss);
  for (const v1::GroupHit& group : match.groups()) {
    const size_t of_group = SizeOfGroup(group);
    size += 1 + SizeOf(of_group) + of_group;
  }
  bytes->OpenResult(SizedTag(v1::OperationResult::kMatchFieldNumber), size);
  bytes->VarintField(VarintTag(R::kTokensFieldNumber), match.tokens());
  for (const v1::GroupHit& group : match.groups()) {
    bytes->Tag(SizedTag(R::kGroupsFieldNumber));
    bytes->Number(SizeOfGroup(group));
    bytes->VarintField(VarintTag(v1::GroupHit::kGroupFieldNumber), group.group());
    bytes->PackedField(SizedTag(v1::GroupHit::kBlocksFieldNumber), group.blocks());
  }
  bytes->VarintField(VarintTag(R::kMissFieldNumber), miss);
}

// ---- All results

size_t BytesOf(int blocks) { return static_cast<size_t>(blocks) * sizeof(uint64_t); }

// At least as many bytes as this result takes if it is written here. 0: it is left to Protocol Buffers.
size_t MostHere(const v1::OperationResult& result) {
  if (result.code() != 0 || result.parked() || !result.message().empty()) return 0;
  switch (result.result_case()) {
    case v1::OperationResult::kLease:
      return kMostOfResult + BytesOf(result.lease().blocks_size());
    case v1::OperationResult::kSeal:
      if (!result.seal().refused().empty()) return 0;
      return kMostOfResult + BytesOf(result.seal().canonical_size());
    case v1::OperationResult::kMatch: {
      if (result.match().below_tokens() != 0 || result.match().may_be_below()) return 0;
      size_t most = kMostOfResult;
      for (const v1::GroupHit& group : result.match().groups())
        most += kMostOfGroup + BytesOf(group.blocks_size());
      return most;
    }
    case v1::OperationResult::kRelease:
      return result.release().refused().empty() ? kMostOfResult : 0;
    default:
      return 0;
  }
}

// REQUIRES: MostHere(result) is not 0.
void WriteHere(const v1::OperationResult& result, BytesOut* bytes) {
  switch (result.result_case()) {
    case v1::OperationResult::kLease:
      return Write(result.lease(), bytes);
    case v1::OperationResult::kSeal:
      return Write(result.seal(), bytes);
    case v1::OperationResult::kMatch:
      return Write(result.match(), bytes);
    default:
      return bytes->OpenResult(SizedTag(v1::OperationResult::kReleaseFieldNumber), 0);
  }
}

}  // namespace

size_t MostOfStep(const v1::StepResponse& response) {
  size_t most = 2 * (1 + kMostOfVarint);  // The sequence and the count of free blocks.
  for (const v1::OperationResult& result : response.results()) {
    const size_t here = MostHere(result);
    most += here != 0 ? here : 1 + kMostOfVarint + result.ByteSizeLong();
  }
  return most;
}

void WriteStep(const v1::StepResponse& response, std::string* bytes) {
  if (response.code() != 0 || !response.message().empty() || !response.completions().empty() ||
      !response.notices().empty()) {
    response.SerializeToString(bytes);
    return;
  }
  bytes->resize(MostOfStep(response));
  BytesOut out(bytes->data());
  out.VarintField(VarintTag(v1::StepResponse::kSequenceFieldNumber), response.sequence());
  for (const v1::OperationResult& result : response.results()) {
    if (MostHere(result) != 0) {
      WriteHere(result, &out);
      continue;
    }
    out.Tag(SizedTag(v1::StepResponse::kResultsFieldNumber));
    out.Number(static_cast<size_t>(result.GetCachedSize()));
    auto* const at = reinterpret_cast<uint8_t*>(out.at());
    out.Skip(static_cast<size_t>(result.SerializeWithCachedSizesToArray(at) - at));
  }
  out.VarintField(VarintTag(v1::StepResponse::kFreeBlocksFieldNumber), response.free_blocks());
  bytes->resize(static_cast<size_t>(out.at() - bytes->data()));
}

}  // namespace kvpool
