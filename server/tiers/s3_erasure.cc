#include "server/tiers/s3_erasure.h"

#include <openssl/evp.h>

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/tiers/s3_value.h"
#include "server/tiers/s3_xml.h"

namespace kvpool {
namespace {

// Base64; empty: OpenSSL must not sum by MD5 here, as where FIPS 140 is enforced.
std::string Md5(std::string_view text) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned bytes = 0;
  if (EVP_Digest(text.data(), text.size(), digest, &bytes, EVP_md5(), nullptr) != 1) return "";
  return absl::Base64Escape({reinterpret_cast<const char*>(digest), bytes});
}

// It may do this at another time.
bool MayPassLater(const S3Response* response) { return response == nullptr || response->status >= 500; }

bool NotImplemented(const S3Response* response) {
  return response != nullptr && (response->status == 501 || response->status == 405);
}

}  // namespace

S3Request S3Erasure::Request(const std::string& method) const {
  return {.method = method, .over = std::shared_ptr<const bool>(shared_from_this(), &over_)};
}

void S3Erasure::Begin() {
  for (const std::string& name : options_.names) {
    if (!absl::StartsWith(name, options_.prefix)) singles_.push_back({.object = name});
  }
  DeleteSingles([this] {
    S3Request request = Request("GET");
    request.query = {{"uploads", ""}, {"prefix", options_.prefix}};
    request.done = [self = shared_from_this()](const S3Response* response) { self->OnUploads(response); };
    client_.Send(std::move(request));
  });
}

void S3Erasure::OnUploads(const S3Response* response) {
  if (response != nullptr && response->status == 200) {
    for (const std::string_view upload : XmlElements(response->body, "Upload")) {
      Single single{.object = XmlText(upload, "Key"), .upload_id = XmlText(upload, "UploadId")};
      // A store that does not know the prefix lists others' as well.
      if (absl::StartsWith(single.object, options_.prefix) && !single.upload_id.empty())
        singles_.push_back(std::move(single));
    }
    parts_stay_ = XmlText(response->body, "IsTruncated") == "true";
  } else if (!NotImplemented(response)) {
    parts_stay_ = true;
  }
  DeleteSingles([this] { List(); });
}

void S3Erasure::List() {
  ListS3(&client_, options_.prefix, page_.next,
         [self = shared_from_this()](std::optional<S3Page> page, const S3Response* response) {
           if (!self->over_) self->OnPage(std::move(page), response);
         });
}

void S3Erasure::OnPage(std::optional<S3Page> page, const S3Response* response) {
  if (!page.has_value() || ++pages_ > kMostPages) return Stop(response);
  page_ = *std::move(page);
  // Nothing goes that is not the owner's, whatever the store lists.
  std::erase_if(page_.objects,
                [this](const S3Object& object) { return !absl::StartsWith(object.name, options_.prefix); });
  found_ += page_.objects.size();
  if (page_.objects.empty()) return NextPage();
  DeletePage();
}

void S3Erasure::DeletePage() {
  std::string text = "<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  for (const S3Object& object : page_.objects)
    absl::StrAppend(&text, "<Object><Key>", XmlEscape(object.name), "</Key></Object>");
  text += "</Delete>";
  const std::string md5 = Md5(text);
  if (batch_refused_ || md5.empty()) {
    for (const S3Object& object : page_.objects)
      singles_.push_back({.object = object.name, .bytes = object.bytes, .counts = true});
    return DeleteSingles([this] { NextPage(); });
  }
  S3Request request = Request("POST");
  request.query = {{"delete", ""}};
  request.headers = {{"content-md5", md5}};
  request.text = std::move(text);
  request.patient = true;
  request.done = [self = shared_from_this()](const S3Response* response) {
    if (response != nullptr && response->status == 200) return self->OnDeleted(*response);
    if (MayPassLater(response) && !NotImplemented(response)) return self->Stop(response);
    self->batch_refused_ = true;
    self->DeletePage();
  };
  client_.Send(std::move(request));
}

void S3Erasure::OnDeleted(const S3Response& response) {
  absl::flat_hash_set<std::string> failed;
  for (const std::string_view error : XmlElements(response.body, "Error")) {
    if (XmlText(error, "Code") != "NoSuchKey") failed.insert(XmlText(error, "Key"));
  }
  for (const std::string_view deleted : XmlElements(response.body, "Deleted"))
    versions_stay_ |= XmlText(deleted, "DeleteMarker") == "true";
  std::vector<S3Object> gone;
  for (const S3Object& object : page_.objects) {
    if (!failed.contains(object.name)) gone.push_back(object);
  }
  answer_.failed += page_.objects.size() - gone.size();
  Gone(gone);
  NextPage();
}

void S3Erasure::DeleteSingles(std::function<void()> then) {
  then_ = std::move(then);
  while (!over_ && !singles_.empty() && unanswered_ < kTogether) {
    Single single = std::move(singles_.back());
    singles_.pop_back();
    S3Request request = Request("DELETE");
    request.object = single.object;
    if (!single.upload_id.empty()) request.query = {{"uploadId", single.upload_id}};
    request.done = [self = shared_from_this(), single](const S3Response* response) {
      self->OnSingle(single, response);
    };
    ++unanswered_;
    client_.Send(std::move(request));
  }
  if (!over_ && unanswered_ == 0) std::exchange(then_, nullptr)();
}

void S3Erasure::OnSingle(const Single& single, const S3Response* response) {
  --unanswered_;
  const bool gone = response != nullptr && (response->status / 100 == 2 || response->status == 404);
  if (!single.upload_id.empty()) {
    parts_stay_ |= !gone;
  } else if (gone) {
    versions_stay_ |= response->delete_marker;
    if (single.counts) Gone({{.name = single.object, .bytes = single.bytes}});
  } else {
    ++answer_.failed;
  }
  DeleteSingles(std::exchange(then_, nullptr));
}

void S3Erasure::Gone(const std::vector<S3Object>& objects) {
  std::vector<std::string> names;
  for (const S3Object& object : objects) {
    names.push_back(object.name);
    answer_.bytes += object.bytes - std::min<uint64_t>(object.bytes, kS3HeaderBytes);
  }
  answer_.values += names.size();
  options_.gone(names);
}

void S3Erasure::NextPage() {
  if (!page_.next.empty()) return List();
  if (found_ == 0 || answer_.failed > 0) return End(answer_.failed == 0);
  if (++passes_ == kMostPasses) {
    answer_.remains = "values that other nodes go on writing";
    return End(false);
  }
  found_ = 0;
  List();
}

void S3Erasure::Stop(const S3Response* response) {
  answer_.remains = absl::StrCat("the bucket, which could not be listed to its end or emptied: ",
                                 response == nullptr ? "it does not answer" : client_.Explain(*response));
  End(false);
}

void S3Erasure::GiveUp() {
  if (!over_) End(false);
}

void S3Erasure::End(bool complete) {
  over_ = true;
  answer_.complete = complete;
  const auto add = [this](const std::string& what) {
    absl::StrAppend(&answer_.remains, answer_.remains.empty() ? "" : "; ", what);
  };
  if (parts_stay_) {
    add("parts of values that were never whole, which could not be listed or taken away: they stay until the "
        "bucket's lifecycle aborts such uploads");
  }
  if (versions_stay_) {
    add("earlier versions of what was deleted, which the bucket keeps: nobody finds them by name, and they "
        "stay until its lifecycle ends them");
  }
}

}  // namespace kvpool
