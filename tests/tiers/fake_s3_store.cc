#include "tests/tiers/fake_s3_store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/tiers/s3_server.h"

namespace kvpool {

bool S3Asked::Is(absl::string_view method, absl::string_view part) const {
  return absl::StartsWith(line, absl::StrCat(method, " ")) && absl::StrContains(line, part);
}

std::string S3Asked::Header(absl::string_view name) const {
  const size_t at = head.find(absl::StrCat("\r\n", name, ": "));
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 4;
  return head.substr(begin, head.find("\r\n", begin) - begin);
}

std::string Answer(int status, const std::string& body, const std::string& headers) {
  return absl::StrCat("HTTP/1.1 ", status, " X\r\nContent-Length: ", body.size(), "\r\n", headers, "\r\n",
                      body);
}

std::string ErrorOf(int status, const std::string& code, const std::string& headers) {
  return Answer(status, absl::StrCat("<Error><Code>", code, "</Code></Error>"), headers);
}

std::string PageOf(const std::vector<std::string>& names) {
  std::string body = "<ListBucketResult><IsTruncated>false</IsTruncated>";
  for (const std::string& name : names)
    absl::StrAppend(&body, "<Contents><Key>", name, "</Key><Size>100</Size></Contents>");
  return Answer(200, body + "</ListBucketResult>");
}

FakeS3Store::FakeS3Store(Say say) : say_(std::move(say)) {
  listener_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener_.get(), 64) != 0 ||
      getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::abort();
  }
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Run(); });
}

FakeS3Store::~FakeS3Store() {
  stop_ = true;
  thread_.join();
}

S3Tier::Options FakeS3Store::options() const {
  setenv("AWS_ACCESS_KEY_ID", kTestAccessKey, 1);
  setenv("AWS_SECRET_ACCESS_KEY", kTestSecretKey, 1);
  S3Tier::Options options;
  options.client = {.endpoint = {.tls = false, .host = "127.0.0.1", .port = port_, .bucket = kTestBucket},
                    .connect_timeout = kTestLimit,
                    .io_timeout = kTestLimit,
                    .first_pause = std::chrono::milliseconds(1),
                    .longest_pause = std::chrono::milliseconds(1),
                    .retry_pause = std::chrono::milliseconds(1)};
  return options;
}

void FakeS3Store::Run() {
  std::vector<Client> clients;
  while (!stop_) {
    std::vector<pollfd> fds = {{listener_.get(), POLLIN, 0}};
    for (const Client& client : clients) fds.push_back({client.fd.get(), POLLIN, 0});
    poll(fds.data(), fds.size(), 5);
    for (size_t i = clients.size(); i-- > 0;) {
      if (fds[i + 1].revents != 0 && !Serve(&clients[i]))
        clients.erase(clients.begin() + static_cast<ptrdiff_t>(i));
    }
    if (fds[0].revents != 0) {
      clients.push_back({UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)), ""});
      ++connections_;
    }
    most_at_once_ = std::max(most_at_once_.load(), clients.size());
  }
}

bool FakeS3Store::Serve(Client* client) {
  char bytes[65536];
  const ssize_t got = recv(client->fd.get(), bytes, sizeof(bytes), 0);
  if (got <= 0) return false;
  client->input.append(bytes, static_cast<size_t>(got));
  const size_t end = client->input.find("\r\n\r\n");
  if (end == std::string::npos) return true;
  S3Asked asked{.line = client->input.substr(0, client->input.find("\r\n")),
                .head = client->input.substr(0, end + 2)};
  size_t length = 0;
  if (!absl::SimpleAtoi(asked.Header("Content-Length"), &length)) length = 0;
  if (client->input.size() < end + 4 + length) return true;
  asked.body = client->input.substr(end + 4, length);
  client->input.erase(0, end + 4 + length);
  const std::optional<std::string> answer = say_(asked);
  ++said_;
  return answer.has_value() && send(client->fd.get(), answer->data(), answer->size(), MSG_NOSIGNAL) >= 0;
}

}  // namespace kvpool
