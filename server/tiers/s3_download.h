// A value on its way out of a bucket: what an object's bytes amount to, as they come.
#ifndef KVPOOL_SERVER_TIERS_S3_DOWNLOAD_H_
#define KVPOOL_SERVER_TIERS_S3_DOWNLOAD_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "server/tiers/buffers.h"
#include "server/tiers/s3_value.h"
#include "server/tiers/tier.h"

namespace kvpool {

class S3Download {
 public:
  // A value of another size than the buffer's is a miss.
  S3Download(const TierKey& key, std::shared_ptr<TierBuffer> into) : key_(key), into_(std::move(into)) {}

  // The next bytes of an object that is so long, -1: nobody said. False: no more is wanted.
  bool Receive(int64_t object_bytes, std::string_view bytes);
  // What it was, once all has come that will.
  TierResult result() const;

 private:
  // False: the object is not what it should be, or is another value.
  bool ReceiveHeader(int64_t object_bytes);

  const TierKey key_;
  const std::shared_ptr<TierBuffer> into_;
  std::array<char, kS3HeaderBytes> header_bytes_;
  std::optional<S3Header> header_;
  uint64_t received_ = 0;  // Bytes, with the header.
  uint32_t crc_ = 0;
  std::optional<TierResult> verdict_;  // Whatever is still to come.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_DOWNLOAD_H_
