#include "server/tiers/aes_gcm.h"

#include <openssl/evp.h>

#include <algorithm>
#include <memory>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// OpenSSL counts the bytes of a call in an int.
constexpr size_t kMostInACall = size_t{1} << 30;

using CipherContext = std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)>;

const unsigned char* BytesOf(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

// `out` is null for what is not encrypted.
void UpdateGcm(EVP_CIPHER_CTX* context, std::string_view in, char* out) {
  while (!in.empty()) {
    const size_t part = std::min(in.size(), kMostInACall);
    int bytes = 0;
    const bool goes_on = EVP_CipherUpdate(context, reinterpret_cast<unsigned char*>(out), &bytes, BytesOf(in),
                                          static_cast<int>(part)) == 1;
    KVPOOL_CHECK(goes_on && bytes == static_cast<int>(part), "OpenSSL's AES-256-GCM stops before %zu bytes",
                 in.size());
    in.remove_prefix(part);
    if (out != nullptr) out += part;
  }
}

// A context with the key, the iv and `more` in it.
CipherContext BeginGcm(bool encrypts, const AesGcmKey& key, const AesGcmIv& iv, std::string_view more) {
  CipherContext context(EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free);
  const bool begins = context != nullptr && EVP_CipherInit_ex(context.get(), EVP_aes_256_gcm(), nullptr,
                                                              key.data(), iv.data(), encrypts) == 1;
  KVPOOL_CHECK(begins, "OpenSSL has no AES-256-GCM of a key of %zu bytes", key.size());
  UpdateGcm(context.get(), more, nullptr);
  return context;
}

}  // namespace

AesGcmTag AesGcmEncrypt(const AesGcmKey& key, const AesGcmIv& iv, std::string_view more, std::string_view in,
                        char* out) {
  const CipherContext context = BeginGcm(/*encrypts=*/true, key, iv, more);
  UpdateGcm(context.get(), in, out);
  AesGcmTag tag;
  unsigned char none[EVP_MAX_BLOCK_LENGTH];
  int bytes = 0;
  const bool ends = EVP_CipherFinal_ex(context.get(), none, &bytes) == 1 &&
                    EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_GET_TAG, tag.size(), tag.data()) == 1;
  KVPOOL_CHECK(ends, "OpenSSL's AES-256-GCM has no tag for %zu bytes", in.size());
  return tag;
}

bool AesGcmDecrypt(const AesGcmKey& key, const AesGcmIv& iv, std::string_view more, const AesGcmTag& tag,
                   std::string_view in, char* out) {
  const CipherContext context = BeginGcm(/*encrypts=*/false, key, iv, more);
  UpdateGcm(context.get(), in, out);
  AesGcmTag expected = tag;
  const bool takes =
      EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_SET_TAG, expected.size(), expected.data()) == 1;
  KVPOOL_CHECK(takes, "OpenSSL's AES-256-GCM takes no tag of %zu bytes", expected.size());
  unsigned char none[EVP_MAX_BLOCK_LENGTH];
  int bytes = 0;
  return EVP_CipherFinal_ex(context.get(), none, &bytes) == 1;
}

AesGcmTag AesGmac(const AesGcmKey& key, std::string_view text) {
  return AesGcmEncrypt(key, {}, text, "", nullptr);
}

}  // namespace kvpool
