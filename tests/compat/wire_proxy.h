// Stands between engines and a daemon on both sockets, and hands every message on as a function leaves it: so each side meets a
// peer that was built from other protos.
#ifndef KVPOOL_TESTS_COMPAT_WIRE_PROXY_H_
#define KVPOOL_TESTS_COMPAT_WIRE_PROXY_H_

#include <google/protobuf/message.h>

#include <functional>
#include <memory>
#include <string>

namespace kvpool {

class WireProxy {
 public:
  // Called for one message at a time, which it may change.
  using Pass = std::function<void(google::protobuf::Message*)>;

  WireProxy(const std::string& daemon_socket, Pass pass);
  // REQUIRES: the engines have closed their sessions.
  ~WireProxy();
  WireProxy(const WireProxy&) = delete;
  WireProxy& operator=(const WireProxy&) = delete;

  const std::string& socket() const;

 private:
  class Rep;
  const std::unique_ptr<Rep> rep_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_COMPAT_WIRE_PROXY_H_
