#include "server/scoring/kept_digest.h"

#include <openssl/evp.h>

#include <cstring>
#include <map>
#include <memory>
#include <string_view>

#include "absl/base/casts.h"
#include "proto/support/check.h"
#include "proto/support/low_layout.h"

namespace kvpool {
namespace {

class Digest {
 public:
  Digest() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    Check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
  }
  void Add(std::string_view bytes) { Check(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size())); }
  void Add(uint32_t value) {
    const char bytes[] = {static_cast<char>(value), static_cast<char>(value >> 8),
                          static_cast<char>(value >> 16), static_cast<char>(value >> 24)};
    Add(std::string_view(bytes, sizeof(bytes)));
  }
  void AddString(std::string_view text) {
    Add(static_cast<uint32_t>(text.size()));
    Add(text);
  }
  std::string Take() {
    unsigned char out[EVP_MAX_MD_SIZE];
    unsigned int bytes = 0;
    Check(EVP_DigestFinal_ex(context_.get(), out, &bytes));
    return std::string(reinterpret_cast<const char*>(out), bytes);
  }

 private:
  static void Check(int done) { KVPOOL_CHECK(done == 1, "OpenSSL cannot digest with SHA-256"); }
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

void AddKept(const v1::Policy& policy, uint32_t rows, absl::Span<const uint32_t> positions, Digest* to) {
  Digest& digest = *to;
  digest.Add("kvpool.kept.v1");
  digest.AddString(policy.name());
  const std::map<std::string, std::string> params(policy.params().begin(), policy.params().end());
  digest.Add(static_cast<uint32_t>(params.size()));
  for (const auto& [name, value] : params) {
    digest.AddString(name);
    digest.AddString(value);
  }
  digest.Add(rows);
  digest.Add(static_cast<uint32_t>(positions.size() / rows));
  for (const uint32_t position : positions) digest.Add(position);
}

}  // namespace

std::string KeptDigest(const v1::Policy& policy, uint32_t rows, absl::Span<const uint32_t> positions) {
  Digest digest;
  AddKept(policy, rows, positions, &digest);
  return digest.Take();
}

std::string KeptDigest(const v1::Compact& compact, uint32_t rows, absl::Span<const uint32_t> positions) {
  Digest digest;
  AddKept(compact.policy(), rows, positions, &digest);
  if (compact.disposition() == v1::DISPOSITION_MERGE) {
    const v1::MergeTerms& terms = compact.merge();
    digest.Add("merge");
    digest.Add(static_cast<uint32_t>(terms.thresholds_size()));
    for (const float threshold : terms.thresholds()) digest.Add(absl::bit_cast<uint32_t>(threshold));
    digest.Add(absl::bit_cast<uint32_t>(terms.smoothing()));
  } else if (compact.disposition() == v1::DISPOSITION_LOW) {
    digest.Add("low");
    digest.Add(compact.low().bits() == 0 ? LowLayout::kDefaultBits : compact.low().bits());
  } else if (compact.disposition() == v1::DISPOSITION_LESS) {
    const v1::LessTerms& terms = compact.less();
    digest.Add("less");
    digest.Add(terms.rank());
    digest.Add(terms.hidden());
    digest.AddString(terms.weights_name());
    digest.Add(terms.has_previous() ? 1U : 0U);
  }
  return digest.Take();
}

}  // namespace kvpool
