#include "server/tiers/s3_client.h"

#include <curl/curl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/support/check.h"
#include "server/base/log.h"
#include "server/base/random_bytes.h"
#include "server/tiers/s3_transfer.h"
#include "server/tiers/s3_xml.h"

namespace kvpool {
namespace {

constexpr auto kLongestWait = std::chrono::seconds(60);

bool MayPass(int status) {
  return status == 429 || status == 500 || status == 502 || status == 503 || status == 504;
}

// Codes of keys that another reading of their file may mend.
bool RefusesKeys(std::string_view code) {
  static constexpr std::string_view kCodes[] = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken",
                                                "SignatureDoesNotMatch", "TokenRefreshRequired"};
  return std::find(std::begin(kCodes), std::end(kCodes), code) != std::end(kCodes);
}

}  // namespace

struct S3Client::Curl {
  ~Curl() {
    for (const auto& transfer : transfers) {
      if (transfer->busy) curl_multi_remove_handle(multi, transfer->easy);
    }
    transfers.clear();
    curl_multi_cleanup(multi);
  }
  CURLM* const multi = curl_multi_init();
  std::vector<std::unique_ptr<S3Transfer>> transfers;
};

// ------------------------------------------------------------------------------------------- the client

absl::StatusOr<std::unique_ptr<S3Client>> S3Client::Open(const Options& options,
                                                         std::unique_ptr<AwsCredentialSource> credentials) {
  static const CURLcode global = curl_global_init(CURL_GLOBAL_DEFAULT);
  KVPOOL_CHECK(global == CURLE_OK, "libcurl does not begin: %s", curl_easy_strerror(global));
  if (!options.ca_file.empty() && access(options.ca_file.c_str(), R_OK) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--tier: ca=", options.ca_file, ": ",
                                                   absl::ErrnoToStatus(errno, "it can't be read").message()));
  }
  return std::unique_ptr<S3Client>(new S3Client(options, std::move(credentials)));
}

S3Client::S3Client(const Options& options, std::unique_ptr<AwsCredentialSource> credentials)
    : options_(options),
      credentials_(std::move(credentials)),
      breaker_(options.first_pause, options.longest_pause),
      curl_(std::make_unique<Curl>()) {
  KVPOOL_CHECK(curl_->multi != nullptr, "no memory for libcurl");
  const std::string seed = RandomBytes(sizeof(uint32_t));
  uint32_t word = 0;
  std::memcpy(&word, seed.data(), sizeof(word));
  random_.seed(word);
  curl_multi_setopt(curl_->multi, CURLMOPT_MAXCONNECTS, static_cast<long>(options.connections));
}

S3Client::~S3Client() = default;

void S3Client::Wake() { curl_multi_wakeup(curl_->multi); }

void S3Client::Send(S3Request request) {
  queues_[static_cast<size_t>(request.rank)].push_back(std::move(request));
}

bool S3Client::Next(int busy, S3Request* request) {
  if (busy >= options_.connections) return false;
  const bool loads_alone = busy >= options_.connections - options_.connections / kForLoads;
  for (std::deque<S3Request>& queue : queues_) {
    if (loads_alone && &queue != &queues_[static_cast<size_t>(S3Request::Rank::kLoad)]) break;
    while (!queue.empty()) {
      *request = std::move(queue.front());
      queue.pop_front();
      if (request->over == nullptr || !*request->over) return true;
    }
  }
  return false;
}

void S3Client::FailQueue() {
  std::vector<S3Request> lost;
  for (auto& [due, request] : std::exchange(again_, {})) lost.push_back(std::move(request));
  for (std::deque<S3Request>& queue : queues_) {
    for (S3Request& request : std::exchange(queue, {})) lost.push_back(std::move(request));
  }
  answered_ |= !lost.empty();
  for (const S3Request& request : lost) {
    if (request.over == nullptr || !*request.over) request.done(nullptr);
  }
}

void S3Client::Start(S3Request request) {
  S3Transfer* transfer = nullptr;
  for (const auto& known : curl_->transfers) {
    if (!known->busy) transfer = known.get();
  }
  if (transfer == nullptr) {
    curl_->transfers.push_back(std::make_unique<S3Transfer>());
    transfer = curl_->transfers.back().get();
    KVPOOL_CHECK(transfer->easy != nullptr, "no memory for libcurl");
  }
  const auto now = Clock::now();
  const AwsCredentials& credentials = credentials_->Current(now);
  request.credentials = credentials_->generation();
  const uint64_t bytes = request.text.size() + request.bytes;
  AwsRequest signs{.method = request.method,
                   .path = PathOf(options_.endpoint, request.object),
                   .query = request.query,
                   .headers = request.headers,
                   .payload_sha256 = request.payload_sha256};
  if (signs.payload_sha256.empty()) {
    signs.payload_sha256 = request.value == nullptr ? Sha256Hex(request.text) : std::string(kUnsignedPayload);
  }
  signs.headers.emplace_back("host", HostOf(options_.endpoint));
  signs.headers.emplace_back("x-amz-content-sha256", signs.payload_sha256);
  signs.headers.emplace_back("x-amz-date", AwsDate(absl::Now()));
  if (!credentials.session_token.empty())
    signs.headers.emplace_back("x-amz-security-token", credentials.session_token);

  transfer->SetOptions(options_);
  for (const auto& [name, value] : signs.headers) transfer->AddHeader(absl::StrCat(name, ": ", value));
  transfer->AddHeader(absl::StrCat(
      "Authorization: ", AwsAuthorization(signs, {.region = options_.region, .service = "s3"}, credentials)));
  // A store that refuses a value says so before it has all of it, without being asked first.
  transfer->AddHeader("Expect:");
  CURL* const easy = transfer->easy;
  SetCurl(easy, CURLOPT_HTTPHEADER, transfer->headers);
  const std::string query = AwsQuery(request.query);
  const std::string url =
      absl::StrCat(options_.endpoint.tls ? "https://" : "http://", HostOf(options_.endpoint),
                   AwsEncode(signs.path, true), query.empty() ? "" : "?", query);
  SetCurl(easy, CURLOPT_URL, url.c_str());
  if (request.method == "HEAD") {
    SetCurl(easy, CURLOPT_NOBODY, 1L);
  } else if (request.method == "PUT" || request.method == "POST") {
    SetCurl(easy, CURLOPT_UPLOAD, 1L);
    SetCurl(easy, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(bytes));
    SetCurl(easy, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  } else {
    SetCurl(easy, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  transfer->request = std::move(request);
  transfer->response = {};
  transfer->busy = true;
  transfer->connected = transfer->cut = false;
  transfer->sent = transfer->headers_bytes = 0;
  transfer->progress = now;
  const CURLMcode code = curl_multi_add_handle(curl_->multi, easy);
  KVPOOL_CHECK(code == CURLM_OK, "libcurl does not take a request: %s", curl_multi_strerror(code));
}

void S3Client::Try() {
  trying_ = true;
  S3Request request{.method = "HEAD"};
  request.done = [this](const S3Response* response) {
    trying_ = false;
    if (response == nullptr || MayPass(response->status)) return breaker_.Open(Clock::now());
    breaker_.Close();
    LogInfo("tier's node is back", {{"node", TextOf(options_.endpoint)}});
  };
  request.attempts = kMostAttempts;
  Start(std::move(request));
}

void S3Client::Failed(std::string_view why) {
  last_failure_ = std::string(why);
  if (!breaker_.Failed()) return;
  LogWarning("tier's node is left alone", {{"node", TextOf(options_.endpoint)}, {"why", why}});
  breaker_.Open(Clock::now());
}

std::optional<S3Client::Clock::duration> S3Client::Again(const S3Request& request, const S3Response& response,
                                                         Clock::time_point now) {
  if (request.attempts >= kMostAttempts) return std::nullopt;
  // The answer to HEAD has no room for a code.
  if (RefusesKeys(response.code) || (response.status == 403 && response.code.empty())) {
    credentials_->Refused();
    credentials_->Current(now);
    if (request.credentials != credentials_->generation()) return Clock::duration::zero();
    return std::nullopt;
  }
  // 400 with this code: the store waited for bytes.
  if (!MayPass(response.status) && response.code != "RequestTimeout") return std::nullopt;
  // Daemons that were told at the same time to be slower come back at different times.
  const double part = std::uniform_real_distribution<double>(0.5, 1.5)(random_);
  const auto pause = std::chrono::duration_cast<Clock::duration>(
      options_.retry_pause * (part * static_cast<double>(1 << request.attempts)));
  // now + pause may be beyond what a time can be.
  return request.deadline - now > pause ? std::optional(pause) : std::nullopt;
}

void S3Client::End(S3Transfer* transfer, std::string_view why) {
  answered_ = true;
  CURL* const easy = transfer->easy;
  long status = 0;
  curl_off_t length = -1;
  curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
  curl_easy_getinfo(easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
  curl_multi_remove_handle(curl_->multi, easy);
  curl_slist_free_all(std::exchange(transfer->headers, nullptr));
  transfer->busy = false;
  S3Request request = std::exchange(transfer->request, {});
  S3Response response = std::exchange(transfer->response, {});
  const bool over = request.over != nullptr && *request.over;
  if (!why.empty() && !transfer->cut) {
    Failed(why);
    if (!over) request.done(nullptr);
    return;
  }
  // It was given up before the store said anything.
  if (status == 0) return;
  response.status = static_cast<int>(status);
  response.content_length = length;
  if (status >= 300) response.code = S3Word(XmlText(response.body, "Code"));
  const auto now = Clock::now();
  if (!over) {
    if (const auto pause = Again(request, response, now)) {
      ++request.attempts;
      again_.emplace(now + *pause, std::move(request));
      return;
    }
  }
  if (MayPass(response.status)) {
    Failed(absl::StrCat("HTTP status ", response.status));
  } else {
    breaker_.Replied();
  }
  if (!over) request.done(&response);
}

S3Client::Clock::time_point S3Client::EndStuck(Clock::time_point now) {
  auto due = Clock::time_point::max();
  for (size_t i = 0; i < curl_->transfers.size(); ++i) {
    S3Transfer* const transfer = curl_->transfers[i].get();
    if (!transfer->busy || !transfer->connected) continue;
    const auto end = transfer->progress + options_.io_timeout * (transfer->request.patient ? kPatience : 1);
    if (end <= now) {
      End(transfer, "nothing moves");
    } else {
      due = std::min(due, end);
    }
  }
  return due;
}

S3Client::Clock::time_point S3Client::Work(Clock::time_point now) {
  auto due = Clock::time_point::max();
  while (!again_.empty() && again_.begin()->first <= now) {
    Send(std::move(again_.begin()->second));
    again_.erase(again_.begin());
  }
  if (!breaker_.closed()) FailQueue();
  if (breaker_.state() == CircuitBreaker::State::kOpen) {
    if (now < breaker_.open_until()) {
      due = breaker_.open_until();
    } else {
      breaker_.TryAgain();
    }
  }
  if (breaker_.state() == CircuitBreaker::State::kHalfOpen && !trying_) Try();
  if (breaker_.closed()) {
    auto busy = static_cast<int>(std::count_if(curl_->transfers.begin(), curl_->transfers.end(),
                                               [](const auto& t) { return t->busy; }));
    for (S3Request request; Next(busy, &request); ++busy) Start(std::move(request));
  }
  int running = 0;
  curl_multi_perform(curl_->multi, &running);
  int left = 0;
  while (const CURLMsg* const message = curl_multi_info_read(curl_->multi, &left)) {
    if (message->msg != CURLMSG_DONE) continue;
    S3Transfer* transfer = nullptr;
    curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
    const CURLcode code = message->data.result;
    End(transfer, code == CURLE_OK ? "" : curl_easy_strerror(code));
  }
  due = std::min(due, EndStuck(Clock::now()));
  if (!again_.empty()) due = std::min(due, again_.begin()->first);
  return due;
}

void S3Client::Turn(Clock::time_point until) {
  answered_ = false;
  const auto due = std::min(until, Work(Clock::now()));
  // Whoever has an answer may have more to send.
  if (answered_) return;
  const auto now = Clock::now();
  const auto wait =
      std::clamp<Clock::duration>(due - std::min(due, now), Clock::duration::zero(), kLongestWait);
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(wait).count();
  curl_multi_poll(curl_->multi, nullptr, 0, static_cast<int>(ms), nullptr);
}

// -------------------------------------------------------------------------------------------- the probe

absl::Status S3Client::Probe(const std::string& prefix, std::chrono::milliseconds most) {
  const auto over = std::make_shared<bool>(false);
  const auto deadline = Clock::now() + most;
  absl::Status status = absl::OkStatus();
  S3Request request{.query = {{"list-type", "2"}, {"max-keys", "1"}, {"prefix", prefix}},
                    .deadline = deadline,
                    .over = over};
  request.done = [this, &status, &over](const S3Response* response) {
    *over = true;
    if (response == nullptr) {
      status = absl::UnavailableError(last_failure_);
    } else if (MayPass(response->status)) {
      status = absl::UnavailableError(Explain(*response));
    } else if (response->status == 200 ? XmlElements(response->body, "ListBucketResult").empty()
                                       : response->code.empty() && response->status != 301) {
      // What stands in front of a store may say such a thing while the store is away.
      status = absl::UnavailableError(
          absl::StrCat("what answers is no S3 store (HTTP status ", response->status, ")"));
    } else if (response->status != 200) {
      status = absl::FailedPreconditionError(Explain(*response));
    }
  };
  Send(std::move(request));
  while (!*over && Clock::now() < deadline) Turn(deadline);
  if (!*over) status = absl::UnavailableError(absl::StrCat("it did not answer within ", most.count(), " ms"));
  *over = true;
  return status;
}

std::string S3Client::Explain(const S3Response& response) const {
  const std::string bucket = absl::StrCat("bucket \"", options_.endpoint.bucket, "\"");
  const std::string& code = response.code;
  const std::string said =
      absl::StrCat(" (HTTP status ", response.status, code.empty() ? "" : ", ", code, ")");
  if (code == "NoSuchBucket") return absl::StrCat("there is no ", bucket, said);
  if (code == "InvalidAccessKeyId") return absl::StrCat("it does not know the access key", said);
  if (code == "SignatureDoesNotMatch") {
    return absl::StrCat("the secret key is not that of the access key, or region=", options_.region,
                        " is not the store's", said);
  }
  if (code == "ExpiredToken" || code == "InvalidToken" || code == "TokenRefreshRequired")
    return absl::StrCat("the session token is not good any more", said);
  if (code == "RequestTimeTooSkewed") {
    const std::string here = absl::FormatTime(absl::Now(), absl::UTCTimeZone());
    const std::string there =
        response.date < 0 ? "another time"
                          : absl::FormatTime(absl::FromUnixSeconds(response.date), absl::UTCTimeZone());
    return absl::StrCat("the clocks differ by more than it takes: here it is ", here, ", there ", there,
                        said);
  }
  if (code == "AuthorizationHeaderMalformed" || response.status == 301 || response.status == 307) {
    const std::string other = XmlText(response.body, "Region");
    const std::string region = response.region.empty() ? S3Word(other) : response.region;
    return absl::StrCat("region=", options_.region, " is not that of ", bucket,
                        region.empty() ? "" : absl::StrCat(", which is ", region), said);
  }
  if (response.status == 403)
    return absl::StrCat("these credentials may not do this in ", bucket,
                        ": they need s3:ListBucket of it, and s3:GetObject, s3:PutObject and s3:DeleteObject "
                        "of what is in it",
                        said);
  return absl::StrCat("it says no", said);
}

}  // namespace kvpool
