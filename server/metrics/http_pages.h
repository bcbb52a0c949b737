// From the bytes of an HTTP request to those of its answer, without a socket.
#ifndef KVPOOL_SERVER_METRICS_HTTP_PAGES_H_
#define KVPOOL_SERVER_METRICS_HTTP_PAGES_H_

#include <functional>
#include <optional>
#include <string>

namespace kvpool {

struct HttpPage {
  int status = 404;
  std::string text;  // Prometheus reads this format.
};

class HttpPages {
 public:
  // What is at a path. None: it is not there yet.
  using PageAt = std::function<std::optional<HttpPage>(const std::string& path)>;
  explicit HttpPages(PageAt page_at);
  // `head` is what a peer has sent, a request to the end of its headers at least, of which only the first line counts; without that
  // end the answer is 400, and 405 to all but GET. It says that the connection ends with it. None: the page is not there yet.
  std::optional<std::string> Answer(const std::string& head) const;

 private:
  const PageAt page_at_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_METRICS_HTTP_PAGES_H_
