#include "server/tiers/s3_upload.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "server/tiers/crc32c.h"
#include "server/tiers/s3_value.h"
#include "server/tiers/s3_xml.h"

namespace kvpool {
namespace {

// Summed at a time: a millisecond or two. CRC-32C is ten times as fast as SHA-256.
constexpr uint64_t kCrcSlice = 8 << 20, kShaSlice = 1 << 20;
constexpr size_t kMostUploadIdBytes = 4096;

void Digest(EVP_MD_CTX* context, const void* data, size_t bytes) {
  KVPOOL_CHECK(EVP_DigestUpdate(context, data, bytes) == 1, "OpenSSL does not sum %zu bytes", bytes);
}

}  // namespace

S3Upload::S3Upload(S3Client* client, Options options, const TierKey& key,
                   std::shared_ptr<const TierBuffer> value, Done done)
    : client_(*client),
      options_(std::move(options)),
      key_(key),
      value_(std::move(value)),
      done_(std::move(done)) {
  const uint64_t bytes = value_->bytes();
  const uint64_t part_bytes = std::max(options_.part_bytes, (bytes + kMostParts - 1) / kMostParts);
  for (uint64_t begin = 0; begin == 0 || begin < bytes; begin += part_bytes)
    parts_.push_back({.begin = begin, .bytes = std::min(part_bytes, bytes - begin)});
}

bool S3Upload::Sum() {
  if (header_.empty()) {
    const uint64_t slice = std::min(kCrcSlice, value_->bytes() - crc_at_);
    crc_ = Crc32c(value_->data() + crc_at_, slice, crc_);
    crc_at_ += slice;
    if (crc_at_ < value_->bytes()) return false;
    const auto header = MakeS3Header(key_, {.value_bytes = value_->bytes(), .value_crc = crc_});
    header_.assign(header.begin(), header.end());
  }
  if (client_.endpoint().tls || sha_part_ == parts_.size()) return true;
  Part& part = parts_[sha_part_];
  if (sha_ == nullptr) {
    sha_.reset(EVP_MD_CTX_new());
    KVPOOL_CHECK(sha_ != nullptr && EVP_DigestInit_ex(sha_.get(), EVP_sha256(), nullptr) == 1,
                 "OpenSSL has no SHA-256 of part %zu", sha_part_);
    if (sha_part_ == 0) Digest(sha_.get(), header_.data(), header_.size());
    sha_at_ = 0;
  }
  const uint64_t slice = std::min(kShaSlice, part.bytes - sha_at_);
  Digest(sha_.get(), value_->data() + part.begin + sha_at_, slice);
  sha_at_ += slice;
  if (sha_at_ < part.bytes) return false;
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned bytes = 0;
  KVPOOL_CHECK(EVP_DigestFinal_ex(sha_.get(), digest, &bytes) == 1, "OpenSSL does not end a sum of part %zu",
               sha_part_);
  part.sha256 = absl::BytesToHexString({reinterpret_cast<const char*>(digest), bytes});
  sha_.reset();
  return ++sha_part_ == parts_.size();
}

S3Request S3Upload::Request(const std::string& method) {
  return {.rank = S3Request::Rank::kStore, .method = method, .object = options_.name, .over = options_.over};
}

S3Request S3Upload::PartRequest(size_t part) {
  S3Request request = Request("PUT");
  if (part == 0) request.text = header_;
  request.value = value_;
  request.begin = parts_[part].begin;
  request.bytes = parts_[part].bytes;
  request.payload_sha256 = parts_[part].sha256;
  return request;
}

void S3Upload::Begin() {
  const auto self = shared_from_this();
  if (parts_.size() == 1) {
    S3Request request = PartRequest(0);
    request.done = [self](const S3Response* response) { self->done_(response); };
    return client_.Send(std::move(request));
  }
  S3Request request = Request("POST");
  request.query = {{"uploads", ""}};
  request.done = [self](const S3Response* response) {
    if (response == nullptr || response->status != 200) return self->done_(response);
    self->upload_id_ = XmlText(response->body, "UploadId");
    // An answer that is none: as if it had not come.
    if (self->upload_id_.empty() || self->upload_id_.size() > kMostUploadIdBytes) return self->done_(nullptr);
    self->SendParts();
  };
  client_.Send(std::move(request));
}

void S3Upload::SendParts() {
  while (next_ < parts_.size() && unanswered_ < kPartsTogether && !failed_) {
    const size_t part = next_++;
    S3Request request = PartRequest(part);
    request.query = {{"partNumber", absl::StrCat(part + 1)}, {"uploadId", upload_id_}};
    request.done = [self = shared_from_this(), part](const S3Response* response) {
      self->OnPart(part, response);
    };
    ++unanswered_;
    client_.Send(std::move(request));
  }
}

void S3Upload::OnPart(size_t part, const S3Response* response) {
  --unanswered_;
  if (response == nullptr || response->status != 200 || response->etag.empty()) {
    if (!failed_) {
      answered_ = response != nullptr && response->status != 200;
      if (answered_) failure_ = *response;
    }
    failed_ = true;
  } else {
    parts_[part].etag = response->etag;
  }
  if (!failed_) SendParts();
  if (unanswered_ > 0) return;
  if (!failed_) return Complete();
  Abort();
  done_(answered_ ? &failure_ : nullptr);
}

void S3Upload::Complete() {
  S3Request request = Request("POST");
  request.query = {{"uploadId", upload_id_}};
  request.text = "<CompleteMultipartUpload>";
  for (size_t i = 0; i < parts_.size(); ++i) {
    absl::StrAppend(&request.text, "<Part><PartNumber>", i + 1, "</PartNumber><ETag>",
                    XmlEscape(parts_[i].etag), "</ETag></Part>");
  }
  request.text += "</CompleteMultipartUpload>";
  request.patient = true;
  request.done = [self = shared_from_this()](const S3Response* response) {
    // S3 begins to answer before it knows: an error may come with status 200.
    const bool there =
        response != nullptr && response->status == 200 && !XmlElements(response->body, "ETag").empty();
    if (!there) self->Abort();
    self->done_(there || (response != nullptr && response->status != 200) ? response : nullptr);
  };
  client_.Send(std::move(request));
}

void S3Upload::Abort() {
  S3Request request{.rank = S3Request::Rank::kAsk, .method = "DELETE", .object = options_.name};
  request.query = {{"uploadId", upload_id_}};
  // What is left all the same is for the bucket's lifecycle, or the next erasure.
  request.done = [](const S3Response*) {};
  client_.Send(std::move(request));
}

}  // namespace kvpool
