#include "server/tiers/s3_transfer.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/ascii.h"

namespace kvpool {
namespace {

// A listing of 1,000 names of 1,024 bytes, each with some 300 around it. Errors are short.
constexpr size_t kMostBodyBytes = 4 << 20, kMostErrorBytes = 64 << 10;
constexpr size_t kMostHeadersBytes = 64 << 10;
// What libcurl reads and writes at a time: with its 16 and 64 KiB a value of megabytes is many turns.
constexpr long kBufferBytes = 512 << 10;
constexpr size_t kMostWordBytes = 64, kMostEtagBytes = 256;

}  // namespace

std::string S3Word(std::string_view text) {
  const bool plain = !text.empty() && text.size() <= kMostWordBytes &&
                     std::all_of(text.begin(), text.end(), [](unsigned char c) {
                       return absl::ascii_isalnum(c) || c == '-' || c == '.' || c == '_';
                     });
  return plain ? std::string(text) : "";
}

size_t S3Transfer::OnHeader(char* data, size_t size, size_t count, void* self) {
  auto& transfer = *static_cast<S3Transfer*>(self);
  transfer.progress = S3Request::Clock::now();
  const size_t bytes = size * count;
  transfer.headers_bytes += bytes;
  if (transfer.headers_bytes > kMostHeadersBytes) return 0;
  std::string_view line(data, bytes);
  // Of 100 Continue there were some already.
  if (line.starts_with("HTTP/")) transfer.response = {};
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return bytes;
  const std::string name = absl::AsciiStrToLower({data, colon});
  const std::string value(absl::StripAsciiWhitespace({data + colon + 1, bytes - colon - 1}));
  S3Response& response = transfer.response;
  if (name == "etag" && value.size() <= kMostEtagBytes) response.etag = value;
  if (name == "x-amz-bucket-region") response.region = S3Word(value);
  if (name == "x-amz-delete-marker") response.delete_marker = value == "true";
  if (name == "date") response.date = curl_getdate(value.c_str(), nullptr);
  return bytes;
}

size_t S3Transfer::OnBody(char* data, size_t size, size_t count, void* self) {
  auto& transfer = *static_cast<S3Transfer*>(self);
  transfer.progress = S3Request::Clock::now();
  const size_t bytes = size * count;
  const auto stop = [&transfer] {
    transfer.cut = true;
    return CURL_WRITEFUNC_ERROR;
  };
  if (transfer.over()) return stop();
  S3Response& response = transfer.response;
  long status = 0;
  curl_off_t length = -1;
  curl_easy_getinfo(transfer.easy, CURLINFO_RESPONSE_CODE, &status);
  curl_easy_getinfo(transfer.easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
  response.status = static_cast<int>(status);
  response.content_length = length;
  if (status == 200 && transfer.request.receive != nullptr) {
    return transfer.request.receive(response, {data, bytes}) ? bytes : stop();
  }
  if (response.body.size() + bytes > (status == 200 ? kMostBodyBytes : kMostErrorBytes))
    return CURL_WRITEFUNC_ERROR;
  response.body.append(data, bytes);
  return bytes;
}

size_t S3Transfer::OnSend(char* data, size_t size, size_t count, void* self) {
  auto& transfer = *static_cast<S3Transfer*>(self);
  transfer.progress = S3Request::Clock::now();
  const S3Request& request = transfer.request;
  if (transfer.over()) {
    transfer.cut = true;
    return CURL_READFUNC_ABORT;
  }
  std::string_view rest = request.text;
  if (transfer.sent < rest.size()) {
    rest.remove_prefix(transfer.sent);
  } else {
    const uint64_t at = transfer.sent - request.text.size();
    rest = at < request.bytes
               ? std::string_view(request.value->data() + request.begin + at, request.bytes - at)
               : std::string_view();
  }
  rest = rest.substr(0, size * count);
  std::memcpy(data, rest.data(), rest.size());
  transfer.sent += rest.size();
  return rest.size();
}

int S3Transfer::OnSeek(void* self, curl_off_t offset, int origin) {
  // A connection that was kept had been closed meanwhile: all is sent again, on another.
  if (origin != SEEK_SET || offset < 0) return CURL_SEEKFUNC_CANTSEEK;
  static_cast<S3Transfer*>(self)->sent = static_cast<uint64_t>(offset);
  return CURL_SEEKFUNC_OK;
}

int S3Transfer::OnConnected(void* self, char*, char*, int, int) {
  auto& transfer = *static_cast<S3Transfer*>(self);
  transfer.connected = true;
  transfer.progress = S3Request::Clock::now();
  return CURL_PREREQFUNC_OK;
}

curl_socket_t S3Transfer::OnSocket(void*, curlsocktype, curl_sockaddr* address) {
  // Programs that the daemon starts get none of them.
  return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

void S3Transfer::SetOptions(const S3ClientOptions& options) {
  curl_easy_reset(easy);
  SetCurl(easy, CURLOPT_PRIVATE, this);
  SetCurl(easy, CURLOPT_PROTOCOLS_STR, options.endpoint.tls ? "https" : "http");
  SetCurl(easy, CURLOPT_HTTP_VERSION,
          CURL_HTTP_VERSION_1_1);  // Many values on one TCP connection share its window.
  SetCurl(easy, CURLOPT_PATH_AS_IS, 1L);
  SetCurl(easy, CURLOPT_PROXY, "");  // Keys and values go where it was said, whatever the environment says.
  SetCurl(easy, CURLOPT_NOSIGNAL, 1L);
  // A lookup of a name can't be told to stop, and nobody waits for it.
  SetCurl(easy, CURLOPT_QUICK_EXIT, 1L);
  SetCurl(easy, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options.connect_timeout.count()));
  SetCurl(easy, CURLOPT_BUFFERSIZE, kBufferBytes);
  SetCurl(easy, CURLOPT_UPLOAD_BUFFERSIZE, kBufferBytes);
  SetCurl(easy, CURLOPT_SSLVERSION, CURL_SSLVERSION_TLSv1_2);
  if (!options.ca_file.empty()) SetCurl(easy, CURLOPT_CAINFO, options.ca_file.c_str());
  SetCurl(easy, CURLOPT_USERAGENT, "kvpool");
  SetCurl(easy, CURLOPT_HEADERFUNCTION, &S3Transfer::OnHeader);
  SetCurl(easy, CURLOPT_HEADERDATA, this);
  SetCurl(easy, CURLOPT_WRITEFUNCTION, &S3Transfer::OnBody);
  SetCurl(easy, CURLOPT_WRITEDATA, this);
  SetCurl(easy, CURLOPT_READFUNCTION, &S3Transfer::OnSend);
  SetCurl(easy, CURLOPT_READDATA, this);
  SetCurl(easy, CURLOPT_SEEKFUNCTION, &S3Transfer::OnSeek);
  SetCurl(easy, CURLOPT_SEEKDATA, this);
  SetCurl(easy, CURLOPT_PREREQFUNCTION, &S3Transfer::OnConnected);
  SetCurl(easy, CURLOPT_PREREQDATA, this);
  SetCurl(easy, CURLOPT_OPENSOCKETFUNCTION, &S3Transfer::OnSocket);
}

}  // namespace kvpool
