#include "server/tiers/s3_download.h"

#include <algorithm>
#include <cstring>

#include "server/tiers/crc32c.h"

namespace kvpool {

bool S3Download::ReceiveHeader(int64_t object_bytes) {
  header_ = ReadS3Header(key_, {header_bytes_.data(), header_bytes_.size()});
  const bool whole =
      header_.has_value() &&
      (object_bytes < 0 || (object_bytes >= static_cast<int64_t>(kS3HeaderBytes) &&
                            static_cast<uint64_t>(object_bytes) - kS3HeaderBytes == header_->value_bytes));
  if (!whole) {
    verdict_ = TierResult::kCorrupt;
  } else if (header_->value_bytes != into_->bytes()) {
    verdict_ = TierResult::kMiss;
  }
  return !verdict_.has_value();
}

bool S3Download::Receive(int64_t object_bytes, std::string_view bytes) {
  if (verdict_.has_value()) return false;
  if (received_ < kS3HeaderBytes) {
    const size_t part = std::min(bytes.size(), kS3HeaderBytes - static_cast<size_t>(received_));
    std::memcpy(header_bytes_.data() + received_, bytes.data(), part);
    received_ += part;
    bytes.remove_prefix(part);
    if (received_ < kS3HeaderBytes) return true;
    if (!ReceiveHeader(object_bytes)) return false;
  }
  const uint64_t at = received_ - kS3HeaderBytes;
  if (bytes.size() > into_->bytes() - at) {
    verdict_ = TierResult::kCorrupt;
    return false;
  }
  std::memcpy(into_->data() + at, bytes.data(), bytes.size());
  crc_ = Crc32c(bytes.data(), bytes.size(), crc_);
  received_ += bytes.size();
  return true;
}

TierResult S3Download::result() const {
  if (verdict_.has_value()) return *verdict_;
  const bool whole =
      header_.has_value() && received_ - kS3HeaderBytes == header_->value_bytes && crc_ == header_->value_crc;
  return whole ? TierResult::kDone : TierResult::kCorrupt;
}

}  // namespace kvpool
