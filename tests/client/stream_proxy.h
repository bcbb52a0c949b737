// Stands between engines and the daemon's gRPC socket and cuts connections when told: a stream that breaks
// while the attach socket, which goes straight to the daemon, lives.
#ifndef KVPOOL_TESTS_CLIENT_STREAM_PROXY_H_
#define KVPOOL_TESTS_CLIENT_STREAM_PROXY_H_

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"
#include "tests/support/daemon_process.h"

namespace kvpool {

class StreamProxy {
 public:
  explicit StreamProxy(const std::string& daemon_socket);
  ~StreamProxy();
  StreamProxy(const StreamProxy&) = delete;
  StreamProxy& operator=(const StreamProxy&) = delete;

  const std::string& socket() const { return socket_; }
  // Closes every connection, which loses what was under way, and returns how many there were.
  // New ones are accepted.
  int Cut() ABSL_LOCKS_EXCLUDED(mu_);
  // From its return on, the daemon's answers are held back, and lost with the next Cut.
  void HoldAnswers(bool hold) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run();
  // Copies what is there to read; false: that end is closed.
  static bool Copy(int from, int to);
  bool CopyAnswers(int daemon, int engine) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string daemon_socket_;
  TemporaryDirectory directory_;
  const std::string socket_ = directory_.path() + "/proxy.sock";
  UniqueFd listener_, wake_;
  std::atomic<bool> stop_{false};
  Mutex mu_;
  bool hold_answers_ ABSL_GUARDED_BY(mu_) = false;
  // The engine's end and the daemon's end of each connection.
  std::vector<std::pair<UniqueFd, UniqueFd>> connections_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_CLIENT_STREAM_PROXY_H_
