#include "server/wire/step_reader.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "proto/support/limits.h"
#include "server/wire/field_tags.h"

namespace kvpool {
namespace {

// A match that asks for more groups is left to Protocol Buffers: the memory of each is kept.
constexpr int kMostReadGroups = 2;

// What is left of a message's bytes. Each Read answers false if what comes is not what Protocol Buffers usually
// writes; then it is not said how much was read.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : at_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  bool empty() const { return at_ == end_; }
  // REQUIRES: not empty.
  uint8_t ReadTag() { return static_cast<uint8_t>(*at_++); }
  // Numbers of more than 56 bits have a form that few encoders agree on.
  bool Read(uint64_t* number) {
    *number = 0;
    for (int shift = 0; shift < 56 && at_ != end_; shift += 7) {
      const auto byte = static_cast<uint8_t>(*at_++);
      *number |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }
  // As Protocol Buffers has it, a number that is too large loses its upper half.
  bool Read(uint32_t* number) {
    uint64_t wide;
    const bool read = Read(&wide);
    *number = static_cast<uint32_t>(wide);
    return read;
  }
  bool Read(std::string_view* bytes) {
    uint64_t size;
    if (!Read(&size) || size > static_cast<size_t>(end_ - at_)) return false;
    *bytes = {at_, size};
    at_ += size;
    return true;
  }
  // Appends a packed field.
  bool Read(google::protobuf::RepeatedField<uint64_t>* fixed) {
    std::string_view packed;
    if (!Read(&packed) || packed.size() % sizeof(uint64_t) != 0) return false;
    const int count = static_cast<int>(packed.size() / sizeof(uint64_t));
    if (count == 0) return true;  // There may be no array yet to copy to.
    fixed->Reserve(fixed->size() + count);
    static_assert(std::endian::native == std::endian::little);
    std::memcpy(fixed->AddNAlreadyReserved(count), packed.data(), packed.size());
    return true;
  }

 private:
  const char* at_;
  const char* const end_;
};

// Each of these sets every field of the message, whatever an earlier batch left there.

bool ReadLease(Bytes bytes, v1::Lease* lease) {
  uint32_t count = 0, min = 0;
  while (!bytes.empty()) {
    switch (bytes.ReadTag()) {
      case VarintTag(v1::Lease::kCountFieldNumber):
        if (!bytes.Read(&count)) return false;
        break;
      case VarintTag(v1::Lease::kMinFieldNumber):
        if (!bytes.Read(&min)) return false;
        break;
      default:
        return false;
    }
  }
  lease->set_count(count);
  lease->set_min(min);
  return true;
}

bool ReadPrefill(Bytes bytes, v1::PrefillSample* sample) {
  uint64_t tokens = 0, tokens_before = 0, microseconds = 0;
  while (!bytes.empty()) {
    switch (bytes.ReadTag()) {
      case VarintTag(v1::PrefillSample::kTokensFieldNumber):
        if (!bytes.Read(&tokens)) return false;
        break;
      case VarintTag(v1::PrefillSample::kTokensBeforeFieldNumber):
        if (!bytes.Read(&tokens_before)) return false;
        break;
      case VarintTag(v1::PrefillSample::kMicrosecondsFieldNumber):
        if (!bytes.Read(&microseconds)) return false;
        break;
      default:
        return false;
    }
  }
  sample->set_tokens(tokens);
  sample->set_tokens_before(tokens_before);
  sample->set_microseconds(microseconds);
  return true;
}

bool ReadSeal(Bytes bytes, v1::Seal* seal) {
  uint32_t group = 0, key_bytes = 0, keys_per_block = 0;
  uint64_t leave_duplicates = 0;
  std::string_view keys, parent_key;
  seal->mutable_blocks()->Clear();
  while (!bytes.empty()) {
    switch (bytes.ReadTag()) {
      case VarintTag(v1::Seal::kGroupFieldNumber):
        if (!bytes.Read(&group)) return false;
        break;
      case SizedTag(v1::Seal::kBlocksFieldNumber):
        if (!bytes.Read(seal->mutable_blocks())) return false;
        break;
      case VarintTag(v1::Seal::kKeyBytesFieldNumber):
        if (!bytes.Read(&key_bytes)) return false;
        break;
      case VarintTag(v1::Seal::kKeysPerBlockFieldNumber):
        if (!bytes.Read(&keys_per_block)) return false;
        break;
      case SizedTag(v1::Seal::kKeysFieldNumber):
        if (!bytes.Read(&keys)) return false;
        break;
      case SizedTag(v1::Seal::kParentKeyFieldNumber):
        if (!bytes.Read(&parent_key)) return false;
        break;
      case VarintTag(v1::Seal::kLeaveDuplicatesFieldNumber):
        if (!bytes.Read(&leave_duplicates)) return false;
        break;
      default:
        return false;
    }
  }
  seal->set_group(group);
  seal->set_key_bytes(key_bytes);
  seal->set_keys_per_block(keys_per_block);
  seal->mutable_keys()->assign(keys);
  seal->mutable_parent_key()->assign(parent_key);
  seal->set_leave_duplicates(leave_duplicates != 0);
  return true;
}

bool ReadGroupKeys(Bytes bytes, v1::GroupKeys* group_keys) {
  uint32_t group = 0, key_bytes = 0;
  std::string_view keys;
  while (!bytes.empty()) {
    switch (bytes.ReadTag()) {
      case VarintTag(v1::GroupKeys::kGroupFieldNumber):
        if (!bytes.Read(&group)) return false;
        break;
      case VarintTag(v1::GroupKeys::kKeyBytesFieldNumber):
        if (!bytes.Read(&key_bytes)) return false;
        break;
      case SizedTag(v1::GroupKeys::kKeysFieldNumber):
        if (!bytes.Read(&keys)) return false;
        break;
      default:
        return false;
    }
  }
  group_keys->set_group(group);
  group_keys->set_key_bytes(key_bytes);
  group_keys->mutable_keys()->assign(keys);
  return true;
}

bool ReadMatch(Bytes bytes, v1::Match* match) {
  match->mutable_groups()->Clear();
  while (!bytes.empty()) {
    std::string_view group;
    if (bytes.ReadTag() != SizedTag(v1::Match::kGroupsFieldNumber) || !bytes.Read(&group)) return false;
    if (match->groups_size() == kMostReadGroups) return false;
    if (!ReadGroupKeys(Bytes(group), match->add_groups())) return false;
  }
  return true;
}

bool ReadRelease(Bytes bytes, v1::Release* release) {
  uint32_t reuse = 0, category = 0;
  release->mutable_blocks()->Clear();
  while (!bytes.empty()) {
    switch (bytes.ReadTag()) {
      case SizedTag(v1::Release::kBlocksFieldNumber):
        if (!bytes.Read(release->mutable_blocks())) return false;
        break;
      case VarintTag(v1::Release::kReuseFieldNumber):
        if (!bytes.Read(&reuse)) return false;
        break;
      case VarintTag(v1::Release::kCategoryFieldNumber):
        if (!bytes.Read(&category)) return false;
        break;
      default:
        return false;
    }
  }
  release->set_reuse(static_cast<v1::Reuse>(reuse));
  release->set_category(category);
  return true;
}

// False, too, if there is not exactly one verb: several would have to be merged.
bool ReadOperation(Bytes bytes, v1::Operation* operation) {
  uint64_t after = 0;
  uint8_t verb = 0;
  std::string_view of_verb;
  while (!bytes.empty()) {
    const uint8_t tag = bytes.ReadTag();
    if (tag == VarintTag(v1::Operation::kAfterFieldNumber)) {
      if (!bytes.Read(&after)) return false;
    } else {
      if (verb != 0 || tag == 0 || !bytes.Read(&of_verb)) return false;
      verb = tag;
    }
  }
  operation->set_after(after);
  switch (verb) {
    case SizedTag(v1::Operation::kLeaseFieldNumber):
      return ReadLease(Bytes(of_verb), operation->mutable_lease());
    case SizedTag(v1::Operation::kSealFieldNumber):
      return ReadSeal(Bytes(of_verb), operation->mutable_seal());
    case SizedTag(v1::Operation::kMatchFieldNumber):
      return ReadMatch(Bytes(of_verb), operation->mutable_match());
    case SizedTag(v1::Operation::kReleaseFieldNumber):
      return ReadRelease(Bytes(of_verb), operation->mutable_release());
    default:
      return false;
  }
}

}  // namespace

bool StepReader::Read(std::string_view bytes) {
  by_protobuf_ = nullptr;
  if (ReadHere(bytes)) return true;
  by_protobuf_ = std::make_unique<v1::StepRequest>();
  return bytes.size() <= INT32_MAX &&
         by_protobuf_->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

v1::Operation* StepReader::Operation(int index) {
  if (index < kept_.operations_size()) return kept_.mutable_operations(index);
  if (spare_.empty()) return kept_.add_operations();
  kept_.mutable_operations()->AddAllocated(spare_.back().release());
  spare_.pop_back();
  return kept_.mutable_operations(index);
}

bool StepReader::ReadHere(std::string_view all) {
  Bytes bytes(all);
  std::string_view member_token;
  uint64_t sequence = 0, acknowledged = 0;
  int operations = 0;
  uint32_t prefills = 0;
  while (!bytes.empty()) {
    switch (bytes.ReadTag()) {
      case SizedTag(v1::StepRequest::kMemberTokenFieldNumber):
        if (!bytes.Read(&member_token) || member_token.size() > kMaxKeptOperationBytes) return false;
        break;
      case VarintTag(v1::StepRequest::kSequenceFieldNumber):
        if (!bytes.Read(&sequence)) return false;
        break;
      case VarintTag(v1::StepRequest::kAcknowledgedFieldNumber):
        if (!bytes.Read(&acknowledged)) return false;
        break;
      case SizedTag(v1::StepRequest::kOperationsFieldNumber): {
        std::string_view operation;
        if (!bytes.Read(&operation) || operation.size() > kMaxKeptOperationBytes ||
            operations == kMaxKeptOperations || !ReadOperation(Bytes(operation), Operation(operations++))) {
          return false;
        }
        break;
      }
      case SizedTag(v1::StepRequest::kPrefillsFieldNumber): {
        std::string_view prefill;
        if (!bytes.Read(&prefill) || prefills == kMaxPrefillSamples) return false;
        v1::PrefillSample* const sample = static_cast<int>(prefills) < kept_.prefills_size()
                                              ? kept_.mutable_prefills(static_cast<int>(prefills))
                                              : kept_.add_prefills();
        ++prefills;
        if (!ReadPrefill(Bytes(prefill), sample)) return false;
        break;
      }
      default:
        return false;
    }
  }
  while (static_cast<uint32_t>(kept_.prefills_size()) > prefills) kept_.mutable_prefills()->RemoveLast();
  kept_.mutable_member_token()->assign(member_token);
  kept_.set_sequence(sequence);
  kept_.set_acknowledged(acknowledged);
  while (kept_.operations_size() > operations) {
    spare_.emplace_back(kept_.mutable_operations()->ReleaseLast());
  }
  return true;
}

}  // namespace kvpool
