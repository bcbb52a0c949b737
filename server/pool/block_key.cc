#include <openssl/evp.h>

#include <cstring>
#include <memory>

#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "server/pool/block_pool.h"

namespace kvpool {
namespace {

// Each thread keeps a context: making one and fetching the algorithm costs several times the digest
// of 64 bytes.
class Sha256 {
 public:
  Sha256() : algorithm_(EVP_MD_fetch(nullptr, "SHA256", nullptr)), context_(EVP_MD_CTX_new()) {}
  ~Sha256() {
    EVP_MD_CTX_free(context_);
    EVP_MD_free(algorithm_);
  }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Digest(std::string_view bytes, uint8_t* out) {
    const bool done = EVP_DigestInit_ex2(context_, algorithm_, nullptr) == 1 &&
                      EVP_DigestUpdate(context_, bytes.data(), bytes.size()) == 1 &&
                      EVP_DigestFinal_ex(context_, out, nullptr) == 1;
    KVPOOL_CHECK(done, "OpenSSL cannot digest %zu bytes with SHA-256", bytes.size());
  }

 private:
  EVP_MD* const algorithm_;
  EVP_MD_CTX* const context_;
};

}  // namespace

BlockKey BlockKey::From(std::string_view key, uint32_t group) {
  KVPOOL_CHECK(!key.empty() && key.size() <= kMaxKeyBytes, "key of %zu bytes", key.size());
  KVPOOL_CHECK(group < kMaxGroups, "group %u", group);
  BlockKey out;
  out.group = static_cast<uint8_t>(group);
  out.raw = key.size() == out.bytes.size();
  if (out.raw) {
    std::memcpy(out.bytes.data(), key.data(), key.size());
  } else {
    thread_local Sha256 sha256;
    sha256.Digest(key, out.bytes.data());
  }
  return out;
}

}  // namespace kvpool
