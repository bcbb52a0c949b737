// All that an owner has in a bucket goes: what is listed is deleted, page by page, until a listing finds nothing.
//
// Values that other nodes write meanwhile may be among it, or may come after it. Uploads that were begun and not ended are
// aborted first: they could end after the listing, and their parts are the owner's bytes as well.
#ifndef KVPOOL_SERVER_TIERS_S3_ERASURE_H_
#define KVPOOL_SERVER_TIERS_S3_ERASURE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "server/tiers/s3_client.h"
#include "server/tiers/s3_listing.h"
#include "server/tiers/tier.h"

namespace kvpool {

// Not thread-safe.
class S3Erasure : public std::enable_shared_from_this<S3Erasure> {
 public:
  struct Options {
    std::string prefix;              // The owner's.
    std::vector<std::string> names;  // Others that may be there.
    // These are gone.
    std::function<void(absl::Span<const std::string> names)> gone;
  };
  // The client outlives it.
  S3Erasure(S3Client* client, Options options) : client_(*client), options_(std::move(options)) {}

  void Begin();
  // Nobody waits any more: it ends as it is.
  void GiveUp();
  bool over() const { return over_; }
  // REQUIRES: over().
  const TierErased& answer() const { return answer_; }

 private:
  // Between two of them others may have written: then it is not complete.
  static constexpr int kMostPasses = 3;
  // A store that lists more pages than this lists nonsense.
  static constexpr int kMostPages = 100000;
  // Requests at once, where each is about one name.
  static constexpr size_t kTogether = 16;
  // One name, and the upload of it, if it is about that.
  struct Single {
    std::string object, upload_id;
    uint64_t bytes = 0;
    bool counts = false;  // It was listed.
  };

  S3Request Request(const std::string& method) const;
  void OnUploads(const S3Response* response);
  void List();
  void OnPage(std::optional<S3Page> page, const S3Response* response);
  void DeletePage();
  void OnDeleted(const S3Response& response);
  // All singles_, then `then`.
  void DeleteSingles(std::function<void()> then);
  void OnSingle(const Single& single, const S3Response* response);
  void Gone(const std::vector<S3Object>& objects);
  void NextPage();
  // It can't go on.
  void Stop(const S3Response* response);
  void End(bool complete);

  S3Client& client_;
  const Options options_;
  S3Page page_;
  std::vector<Single> singles_;
  std::function<void()> then_;
  size_t unanswered_ = 0;
  int passes_ = 0, pages_ = 0;
  size_t found_ = 0;            // This pass did.
  bool batch_refused_ = false;  // The store has no DeleteObjects.
  bool parts_stay_ = false, versions_stay_ = false;
  bool over_ = false;
  TierErased answer_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_ERASURE_H_
