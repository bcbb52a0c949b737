#include "server/metrics/http_pages.h"

#include <httplib.h>

#include <utility>

namespace kvpool {
namespace {

constexpr char kContentType[] = "text/plain; version=0.0.4; charset=utf-8";

// The peer, as the library sees it: it has sent a request without headers, and takes all that it is answered.
class LineStream final : public httplib::Stream {
 public:
  explicit LineStream(const std::string& request) : request_(request) {}
  std::string TakeAnswer() { return std::move(answer_); }

  bool is_readable() const override { return true; }
  bool is_writable() const override { return true; }
  ssize_t read(char* bytes, size_t size) override {
    const size_t taken = request_.copy(bytes, size, read_);
    read_ += taken;
    return static_cast<ssize_t>(taken);
  }
  ssize_t write(const char* bytes, size_t size) override {
    answer_.append(bytes, size);
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string& address, int& port) const override {}
  void get_local_ip_and_port(std::string& address, int& port) const override {}
  // The library answers 500 to those that select() could not wait for.
  socket_t socket() const override { return INVALID_SOCKET; }

 private:
  const std::string& request_;
  size_t read_ = 0;
  std::string answer_;
};

}  // namespace

// Only the library's requests and answers are used. Its sockets are not: in 0.11 it answers 500 where a descriptor is 1024 or more,
// counts its patience anew at each byte, stops listening at the first error of accept(), has one certificate for life, and its
// descriptors are inherited by programs that the daemon starts.
class HttpPages::Library final : private httplib::Server {
 public:
  explicit Library(PageAt page_at) : page_at_(std::move(page_at)) {
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      Serve(request, &response);
      return HandlerResponse::Handled;
    });
  }

  std::optional<std::string> Answer(const std::string& head) {
    // No header changes the answer, and the library reads some at a price: a Range by a regular expression that recurses for each
    // byte, and it answers as many copies of the page as one names; to compress a page takes longer than to make it.
    const bool whole = head.find("\r\n\r\n") != std::string::npos;
    const std::string line = (whole ? head.substr(0, head.find("\r\n")) : "") + "\r\n\r\n";
    LineStream stream(line);
    there_ = true;
    bool closed = false;
    process_request(stream, /*close_connection=*/true, closed, nullptr);
    if (!there_) return std::nullopt;
    return stream.TakeAnswer();
  }

 private:
  void Serve(const httplib::Request& request, httplib::Response* response) {
    std::optional<HttpPage> page = page_at_(request.path);
    there_ = page.has_value();
    if (!there_) return;
    if (page->status != 404 && request.method != "GET") {
      page = HttpPage{.status = 405, .text = "only GET is served\n"};
      response->set_header("Allow", "GET");
    }
    response->status = page->status;
    response->set_content(page->text, kContentType);
  }

  const PageAt page_at_;
  bool there_ = true;  // The page that is asked for.
};

HttpPages::HttpPages(PageAt page_at) : library_(std::make_unique<Library>(std::move(page_at))) {}

HttpPages::~HttpPages() = default;

std::optional<std::string> HttpPages::Answer(const std::string& head) { return library_->Answer(head); }

}  // namespace kvpool
