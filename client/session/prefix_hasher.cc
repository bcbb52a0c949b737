// OpenSSL's low-level SHA-256: deprecated in favour of EVP, which finds and sets up a digest at every call
// and so costs more than the two compressions of a block of 16 tokens. Both run on SHA-NI where the processor
// has it.
#define OPENSSL_SUPPRESS_DEPRECATED
#include "client/prefix_hasher.h"

#include <openssl/sha.h>

#include <bit>
#include <cstring>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// u32 and tokens are hashed as they lie in memory.
static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kRootLabel = "kvpool.prefix.v1";
constexpr std::string_view kPrunedLabel = "kvpool.pruned.v1";
constexpr std::string_view kSaltedLabel = "kvpool.salted.v1";

void AddLength(SHA256_CTX* context, size_t length) {
  const uint32_t value = static_cast<uint32_t>(length);
  SHA256_Update(context, &value, sizeof(value));
}

// One message: SHA256_Update's bookkeeping costs a tenth of a block's hash when it is called once.
constexpr size_t kInlineTokens = 256;

void HashBlock(const PrefixKey& parent, absl::Span<const uint32_t> tokens,
               absl::Span<const std::string_view> extra_keys, PrefixKey* key) {
  SHA256_CTX context;
  SHA256_Init(&context);
  if (tokens.size() <= kInlineTokens) {
    uint8_t head[sizeof(PrefixKey) + sizeof(uint32_t) * (1 + kInlineTokens)];
    const uint32_t count = static_cast<uint32_t>(tokens.size());
    std::memcpy(head, parent.data(), sizeof(parent));
    std::memcpy(head + sizeof(parent), &count, sizeof(count));
    if (count > 0)
      std::memcpy(head + sizeof(parent) + sizeof(count), tokens.data(), count * sizeof(uint32_t));
    SHA256_Update(&context, head, sizeof(parent) + sizeof(count) + count * sizeof(uint32_t));
  } else {
    SHA256_Update(&context, parent.data(), parent.size());
    AddLength(&context, tokens.size());
    SHA256_Update(&context, tokens.data(), tokens.size() * sizeof(uint32_t));
  }
  for (const std::string_view extra : extra_keys) {
    AddLength(&context, extra.size());
    SHA256_Update(&context, extra.data(), extra.size());
  }
  SHA256_Final(key->data(), &context);
}

}  // namespace

std::string_view KeyBytes(absl::Span<const PrefixKey> keys) {
  static_assert(sizeof(PrefixKey) == 32);
  return {reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(PrefixKey)};
}

PrefixHasher::PrefixHasher(std::string_view seed, std::string_view salt, uint64_t salt_from)
    : salt_from_(salt_from) {
  if (salt_from > 0) {
    soft_salt_ = salt;
    salt = {};
  }
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, kRootLabel.data(), kRootLabel.size());
  SHA256_Update(&context, seed.data(), seed.size());
  AddLength(&context, salt.size());
  SHA256_Update(&context, salt.data(), salt.size());
  SHA256_Final(root_.data(), &context);
}

PrefixKey PrefixHasher::Next(const PrefixKey& parent, absl::Span<const uint32_t> tokens,
                             absl::Span<const std::string_view> extra_keys) const {
  KVPOOL_CHECK(!needs_positions(), "a salt that counts from a token on needs the block's position");
  PrefixKey key;
  HashBlock(parent, tokens, extra_keys, &key);
  return key;
}

PrefixKey PrefixHasher::NextAt(const PrefixKey& parent, uint64_t position, absl::Span<const uint32_t> tokens,
                               absl::Span<const std::string_view> extra_keys) const {
  const bool salted = needs_positions() && position <= salt_from_ && salt_from_ - position < tokens.size();
  PrefixKey key;
  HashBlock(salted ? Salted(parent) : parent, tokens, extra_keys, &key);
  return key;
}

PrefixKey PrefixHasher::Salted(const PrefixKey& parent) const {
  PrefixKey key;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, kSaltedLabel.data(), kSaltedLabel.size());
  SHA256_Update(&context, parent.data(), parent.size());
  AddLength(&context, soft_salt_.size());
  SHA256_Update(&context, soft_salt_.data(), soft_salt_.size());
  SHA256_Final(key.data(), &context);
  return key;
}

PrefixKey PrefixHasher::BehindPruning(const PrefixKey& parent, absl::Span<const uint32_t> tokens,
                                      std::string_view digest) const {
  PrefixKey key;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, kPrunedLabel.data(), kPrunedLabel.size());
  SHA256_Update(&context, parent.data(), parent.size());
  AddLength(&context, tokens.size());
  SHA256_Update(&context, tokens.data(), tokens.size() * sizeof(uint32_t));
  AddLength(&context, digest.size());
  SHA256_Update(&context, digest.data(), digest.size());
  SHA256_Final(key.data(), &context);
  return needs_positions() ? Salted(key) : key;
}

std::vector<PrefixKey> PrefixHasher::Chain(absl::Span<const uint32_t> tokens, uint32_t tokens_per_block,
                                           absl::Span<const std::string_view> extra_keys) const {
  KVPOOL_CHECK(tokens_per_block > 0, "a block of no tokens has no key");
  std::vector<PrefixKey> keys(tokens.size() / tokens_per_block);
  const PrefixKey* parent = &root_;
  for (size_t i = 0; i < keys.size(); ++i) {
    const size_t position = i * tokens_per_block;
    keys[i] = NextAt(*parent, position, tokens.subspan(position, tokens_per_block), extra_keys);
    parent = &keys[i];
  }
  return keys;
}

}  // namespace kvpool
