// One node of a RESP store: its connections, what waits for them, and the circuit breaker in front of it.
//
// A connection that fails is a failure to the breaker (circuit_breaker.h), and so is one that does not come up when the node is tried again:
// one is made for that. Not thread-safe.
#ifndef KVPOOL_SERVER_TIERS_RESP_NODE_H_
#define KVPOOL_SERVER_TIERS_RESP_NODE_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "server/tiers/circuit_breaker.h"
#include "server/tiers/resp_connection.h"

namespace kvpool {

class RespNode {
 public:
  using Clock = RespConnection::Clock;
  // What became of a request; null: it was not sent, or its connection failed.
  using Answer = std::function<void(RespNode* node, RespRequest request, const RespReply* reply)>;
  struct Options {
    int connections = 4;
    std::chrono::milliseconds first_pause{500}, longest_pause{30000};
  };

  // All that are pointed to outlive it.
  RespNode(RespLoop* loop, const RespSettings* settings, const Options& options, const RespEndpoint& endpoint,
           Answer answer);

  const RespEndpoint& endpoint() const { return endpoint_; }
  CircuitBreaker::State breaker() const { return breaker_.state(); }
  bool idle() const;
  // Pump would do something at once.
  bool has_work() const;
  // It is answered by Pump, or by the loop.
  void Enqueue(RespRequest request);
  // Sends what there is room for, and answers what failed. The next call is due at what it answers.
  Clock::time_point Pump(Clock::time_point now);

 private:
  void Open(Clock::time_point now);
  void Connect();
  void DropClosed(Clock::time_point now);
  void FailQueue();
  bool Next(RespRequest* request);
  void Assign();
  bool queued() const;

  RespLoop& loop_;
  const RespSettings& settings_;
  const Options options_;
  const RespEndpoint endpoint_;
  const Answer answer_;
  std::vector<std::unique_ptr<RespConnection>> connections_;
  std::array<std::deque<RespRequest>, 3> queues_;  // Indexed by rank.
  CircuitBreaker breaker_;
  uint32_t attempts_ = 0;
  uint64_t replies_ = 0;  // Those to requests.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_RESP_NODE_H_
