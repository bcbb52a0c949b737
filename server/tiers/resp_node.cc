#include "server/tiers/resp_node.h"

#include <algorithm>
#include <utility>

#include "server/base/log.h"

namespace kvpool {

RespNode::RespNode(RespLoop* loop, const RespSettings* settings, const Options& options,
                   const RespEndpoint& endpoint, Answer answer)
    : loop_(*loop),
      settings_(*settings),
      options_(options),
      endpoint_(endpoint),
      answer_(std::move(answer)),
      breaker_(options.first_pause, options.longest_pause) {}

bool RespNode::queued() const {
  return std::any_of(queues_.begin(), queues_.end(), [](const auto& queue) { return !queue.empty(); });
}

bool RespNode::idle() const {
  return !queued() && std::none_of(connections_.begin(), connections_.end(),
                                   [](const auto& connection) { return connection->busy(); });
}

bool RespNode::has_work() const {
  if (!queued()) return false;
  return !breaker_.closed() || connections_.empty() ||
         std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
           return connection->has_room() || connection->state() == RespConnection::State::kClosed;
         });
}

void RespNode::Enqueue(RespRequest request) {
  queues_[static_cast<size_t>(request.rank)].push_back(std::move(request));
}

void RespNode::Connect() {
  connections_.push_back(std::make_unique<RespConnection>(
      &loop_, &settings_, endpoint_, attempts_++, [this](RespRequest request, const RespReply* reply) {
        ++replies_;
        answer_(this, std::move(request), reply);
      }));
}

void RespNode::Open(Clock::time_point now) {
  if (breaker_.closed()) {
    LogWarning(
        "tier's node is left alone",
        {{"node", TextOf(endpoint_)}, {"why", connections_.empty() ? "" : connections_.front()->why()}});
  }
  breaker_.Open(now);
}

void RespNode::DropClosed(Clock::time_point now) {
  if (std::exchange(replies_, 0) > 0) breaker_.Replied();
  std::vector<RespRequest> lost;
  // The first one that is closed says why, if it opens the breaker.
  std::stable_partition(connections_.begin(), connections_.end(), [](const auto& connection) {
    return connection->state() == RespConnection::State::kClosed;
  });
  bool opens = false;
  for (const auto& connection : connections_) {
    if (connection->state() != RespConnection::State::kClosed) continue;
    for (RespRequest& request : connection->TakeLost()) lost.push_back(std::move(request));
    if (!connection->closed_idle()) opens |= breaker_.Failed();
  }
  if (opens) Open(now);
  std::erase_if(connections_,
                [](const auto& connection) { return connection->state() == RespConnection::State::kClosed; });
  // The one that was to try it is gone.
  if (breaker_.state() == CircuitBreaker::State::kHalfOpen && connections_.empty()) Open(now);
  for (RespRequest& request : lost) answer_(this, std::move(request), nullptr);
}

void RespNode::FailQueue() {
  for (std::deque<RespRequest>& queue : queues_) {
    for (RespRequest& request : std::exchange(queue, {})) answer_(this, std::move(request), nullptr);
  }
}

bool RespNode::Next(RespRequest* request) {
  for (std::deque<RespRequest>& queue : queues_) {
    while (!queue.empty()) {
      *request = std::move(queue.front());
      queue.pop_front();
      if (request->over == nullptr || !*request->over) return true;
    }
  }
  return false;
}

void RespNode::Assign() {
  while (queued()) {
    RespConnection* best = nullptr;
    bool coming = false;
    for (const auto& connection : connections_) {
      coming |= connection->state() < RespConnection::State::kReady;
      if (!connection->has_room()) continue;
      if (best == nullptr || connection->window() < best->window()) best = connection.get();
    }
    if (best == nullptr) {
      if (!coming && connections_.size() < static_cast<size_t>(options_.connections)) Connect();
      return;
    }
    RespRequest request;
    if (!Next(&request)) return;
    best->Send(std::move(request));
  }
}

RespNode::Clock::time_point RespNode::Pump(Clock::time_point now) {
  for (const auto& connection : connections_) connection->Check(now);
  DropClosed(now);
  if (breaker_.state() == CircuitBreaker::State::kOpen) {
    FailQueue();
    if (now < breaker_.open_until()) {
      Clock::time_point due = breaker_.open_until();
      for (const auto& connection : connections_) due = std::min(due, connection->due());
      return due;
    }
    breaker_.TryAgain();
    if (connections_.empty()) Connect();
  }
  if (breaker_.state() == CircuitBreaker::State::kHalfOpen) {
    FailQueue();
    if (std::any_of(connections_.begin(), connections_.end(), [](const auto& c) { return c->ready(); })) {
      breaker_.Close();
      LogInfo("tier's node is back", {{"node", TextOf(endpoint_)}});
    }
  }
  if (breaker_.closed()) Assign();
  Clock::time_point due = Clock::time_point::max();
  for (const auto& connection : connections_) {
    connection->Flush();
    // What is found closed only now is seen to at once.
    due = std::min(due, connection->state() == RespConnection::State::kClosed ? now : connection->due());
  }
  return due;
}

}  // namespace kvpool
