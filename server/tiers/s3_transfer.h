// A connection's worth of libcurl, and the request that is on it: what libcurl calls. Known to S3Client alone.
#ifndef KVPOOL_SERVER_TIERS_S3_TRANSFER_H_
#define KVPOOL_SERVER_TIERS_S3_TRANSFER_H_

#include <curl/curl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "proto/support/check.h"
#include "server/tiers/s3_request.h"

namespace kvpool {

template <typename Value>
void SetCurl(CURL* easy, CURLoption option, Value value) {
  const CURLcode code = curl_easy_setopt(easy, option, value);
  KVPOOL_CHECK(code == CURLE_OK, "libcurl does not take option %d: %s", static_cast<int>(option),
               curl_easy_strerror(code));
}

// The text, if it is a word: then it may be logged, whoever said it. Otherwise nothing.
std::string S3Word(std::string_view text);

struct S3Transfer {
  S3Transfer() = default;
  S3Transfer(const S3Transfer&) = delete;
  S3Transfer& operator=(const S3Transfer&) = delete;
  ~S3Transfer() {
    curl_slist_free_all(headers);
    curl_easy_cleanup(easy);
  }
  bool over() const { return request.over != nullptr && *request.over; }
  void AddHeader(const std::string& line) { headers = curl_slist_append(headers, line.c_str()); }
  // All that does not depend on the request.
  void SetOptions(const S3ClientOptions& options);

  static size_t OnHeader(char* data, size_t size, size_t count, void* self);
  static size_t OnBody(char* data, size_t size, size_t count, void* self);
  static size_t OnSend(char* data, size_t size, size_t count, void* self);
  static int OnSeek(void* self, curl_off_t offset, int origin);
  static int OnConnected(void* self, char*, char*, int, int);
  static curl_socket_t OnSocket(void* self, curlsocktype purpose, curl_sockaddr* address);

  CURL* const easy = curl_easy_init();
  curl_slist* headers = nullptr;
  S3Request request;
  S3Response response;
  bool busy = false;
  bool connected = false;  // What is before that has a timeout of libcurl's.
  bool cut = false;        // No more is wanted.
  uint64_t sent = 0;
  size_t headers_bytes = 0;
  S3Request::Clock::time_point progress;  // When something moved last.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_S3_TRANSFER_H_
