// A value on its way into a bucket: in one PUT, or in parts where it has more than a part's bytes.
//
//   summed, slice by slice ──► PUT ─────────────────────────────────────► over
//                        └───► CreateMultipartUpload ──► UploadPart, some at a time ──► CompleteMultipartUpload
//                                                                │ one fails
//                                                                └──► AbortMultipartUpload, once none is under way
//
// Only at its end is there an object, and then all of it. Over TLS a value is not signed, as that protects it; in the clear the signature
// has its SHA-256.
#ifndef KVPOOL_SERVER_TIERS_S3_UPLOAD_H_
#define KVPOOL_SERVER_TIERS_S3_UPLOAD_H_

#include <openssl/evp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/tiers/buffers.h"
#include "server/tiers/s3_client.h"
#include "server/tiers/tier_key.h"

namespace kvpool {

// Not thread-safe.
class S3Upload : public std::enable_shared_from_this<S3Upload> {
 public:
  // What the store said that ended it: of status 200, it is there. Null: it said nothing.
  using Done = std::function<void(const S3Response* response)>;
  struct Options {
    std::string name;
    uint64_t part_bytes = 64 << 20;
    std::shared_ptr<const bool> over;  // It is true once nobody waits any more.
  };
  // S3 takes no more parts.
  static constexpr uint64_t kMostParts = 10000;
  // So many of one value's are on connections at once.
  static constexpr size_t kPartsTogether = 4;

  // The client outlives it.
  S3Upload(S3Client* client, Options options, const TierKey& key, std::shared_ptr<const TierBuffer> value,
           Done done);

  // Sums some more of the value: a millisecond's work. True: it is summed, and Begin is next.
  bool Sum();
  void Begin();
  const std::shared_ptr<const bool>& over() const { return options_.over; }

 private:
  struct Part {
    uint64_t begin = 0, bytes = 0;
    std::string sha256;  // Hex, with the header in front of the first; empty: it is not signed.
    std::string etag;
  };
  S3Request Request(const std::string& method);
  S3Request PartRequest(size_t part);
  void SendParts();
  void OnPart(size_t part, const S3Response* response);
  void Complete();
  void Abort();

  S3Client& client_;
  const Options options_;
  const TierKey key_;
  const std::shared_ptr<const TierBuffer> value_;
  const Done done_;
  std::vector<Part> parts_;
  std::string header_;
  // Summing.
  uint32_t crc_ = 0;
  uint64_t crc_at_ = 0, sha_at_ = 0;
  size_t sha_part_ = 0;
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> sha_{nullptr, &EVP_MD_CTX_free};
  // Parts.
  std::string upload_id_;
  size_t next_ = 0, unanswered_ = 0;
  bool failed_ = false, answered_ = false;
  S3Response failure_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_UPLOAD_H_
