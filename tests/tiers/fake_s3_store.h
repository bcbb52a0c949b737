// A store that answers what a test wants, instead of a real one.
#ifndef KVPOOL_TESTS_TIERS_FAKE_S3_STORE_H_
#define KVPOOL_TESTS_TIERS_FAKE_S3_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/support/unique_fd.h"
#include "server/tiers/s3_tier.h"

namespace kvpool {

// A request as it came.
struct S3Asked {
  std::string line, head, body;  // "GET /kvpool-test?list-type=2 HTTP/1.1", all of the header with it.

  bool Is(absl::string_view method, absl::string_view part = "") const;
  // The value of this name, as it was written; empty: there is none.
  std::string Header(absl::string_view name) const;
};

std::string Answer(int status, const std::string& body = "", const std::string& headers = "");
std::string ErrorOf(int status, const std::string& code, const std::string& headers = "");
// A listing that has these, of 100 bytes each, and is the last.
std::string PageOf(const std::vector<std::string>& names);

// Answers each request with what `say` makes of it, or hangs up.
class FakeS3Store {
 public:
  using Say = std::function<std::optional<std::string>(const S3Asked& asked)>;
  explicit FakeS3Store(Say say);
  ~FakeS3Store();
  int said() const { return said_; }
  int connections() const { return connections_; }
  size_t most_at_once() const { return most_at_once_; }
  // A tier of it, with short pauses and keys of the environment.
  S3Tier::Options options() const;

 private:
  struct Client {
    UniqueFd fd;
    std::string input;
  };
  void Run();
  // False: the connection is over.
  bool Serve(Client* client);

  const Say say_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<int> said_{0}, connections_{0};
  std::atomic<size_t> most_at_once_{0};
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_TIERS_FAKE_S3_STORE_H_
