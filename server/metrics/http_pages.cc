#include "server/metrics/http_pages.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvpool {
namespace {

absl::string_view PhraseOf(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    default:
      return "Service Unavailable";
  }
}

std::string BytesOf(const HttpPage& page, bool with_text = true) {
  return absl::StrCat("HTTP/1.1 ", page.status, " ", PhraseOf(page.status),
                      "\r\nConnection: close\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n",
                      page.status == 405 ? "Allow: GET\r\n" : "", "Content-Length: ", page.text.size(),
                      "\r\n\r\n", with_text ? absl::string_view(page.text) : "");
}

struct RequestLine {
  absl::string_view method, target;
};

// RFC 9112, section 3. Of none: there is no such line.
std::optional<RequestLine> LineOf(absl::string_view head) {
  if (head.substr(0, 2) == "\r\n") head.remove_prefix(2);  // Section 2.2 has servers pass over it.
  if (head.find("\r\n\r\n") == absl::string_view::npos) return std::nullopt;
  const absl::string_view line = head.substr(0, head.find("\r\n"));
  const bool printable = std::all_of(line.begin(), line.end(), [](char c) { return c >= ' ' && c <= '~'; });
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (!printable || first == absl::string_view::npos || first == 0 || last <= first + 1) return std::nullopt;
  const RequestLine request = {.method = line.substr(0, first),
                               .target = line.substr(first + 1, last - first - 1)};
  const absl::string_view version = line.substr(last + 1);
  if (version != "HTTP/1.1" && version != "HTTP/1.0") return std::nullopt;
  if (request.target.find(' ') != absl::string_view::npos) return std::nullopt;
  return request;
}

// "/metrics" of "/metrics?a=b" and of "http://host/metrics".
std::string PathOf(absl::string_view target) {
  target = target.substr(0, target.find_first_of("?#"));
  const size_t scheme = target.find("://");
  if (target.empty() || target[0] == '/' || scheme == absl::string_view::npos) return std::string(target);
  const size_t path = target.find('/', scheme + 3);
  return path == absl::string_view::npos ? "/" : std::string(target.substr(path));
}

}  // namespace

HttpPages::HttpPages(PageAt page_at) : page_at_(std::move(page_at)) {}

std::optional<std::string> HttpPages::Answer(const std::string& head) const {
  const std::optional<RequestLine> request = LineOf(head);
  if (!request.has_value()) return BytesOf({.status = 400, .text = "this is no HTTP request\n"});
  if (request->method != "GET")
    return BytesOf({.status = 405, .text = "only GET is served\n"}, /*with_text=*/request->method != "HEAD");
  const std::optional<HttpPage> page = page_at_(PathOf(request->target));
  if (!page.has_value()) return std::nullopt;
  return BytesOf(*page);
}

}  // namespace kvpool
