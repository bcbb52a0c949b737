#include "server/tiers/resp_router.h"

#include <algorithm>
#include <utility>

#include "server/base/log.h"

namespace kvpool {

RespRouter::RespRouter(RespLoop* loop, const Options& options)
    : loop_(*loop),
      options_(options),
      kind_(options.cluster == RespCluster::kOff ? Kind::kSingle : Kind::kUnknown) {
  NodeAt(options_.seed);
}

RespNode* RespRouter::NodeAt(const RespEndpoint& endpoint) {
  const auto found = nodes_.find(endpoint);
  if (found != nodes_.end()) return found->second.get();
  if (nodes_.size() > ClusterMap::kMostNodes) return nullptr;
  auto node = std::make_unique<RespNode>(&loop_, &options_.settings, options_.node, endpoint,
                                         [this](RespNode* from, RespRequest request, const RespReply* reply) {
                                           OnReply(from, std::move(request), reply);
                                         });
  return (nodes_[endpoint] = std::move(node)).get();
}

size_t RespRouter::nodes_down() const {
  return static_cast<size_t>(std::count_if(nodes_.begin(), nodes_.end(), [](const auto& node) {
    return node.second->breaker() != CircuitBreaker::State::kClosed;
  }));
}

void RespRouter::Send(RespRequest request) {
  if (kind_ == Kind::kUnknown) return waiting_.push_back(std::move(request));
  if (kind_ == Kind::kSingle) return NodeAt(options_.seed)->Enqueue(std::move(request));
  const RespEndpoint* owner = map_.OwnerOf(request.slot);
  RespNode* const node = owner == nullptr ? nullptr : NodeAt(*owner);
  if (node != nullptr) return node->Enqueue(std::move(request));
  stale_ = true;
  failed_.push_back(std::move(request));
}

void RespRouter::OnReply(RespNode* node, RespRequest request, const RespReply* reply) {
  if (reply == nullptr) stale_ = true;
  const auto redirect = reply == nullptr ? std::nullopt : ParseRespRedirect(*reply, node->endpoint());
  if (redirect.has_value()) {
    // A server that was taken for a single one says by this that it is none.
    if (!redirect->asking) stale_ = true;
    if (!redirect->asking && kind_ == Kind::kCluster) map_.Move(redirect->slot, redirect->to);
    RespNode* const to = ++request.hops > kMostHops ? nullptr : NodeAt(redirect->to);
    if (to != nullptr) {
      request.asking = redirect->asking;
      return to->Enqueue(std::move(request));
    }
  } else if (reply != nullptr && (reply->code() == "CLUSTERDOWN" || reply->code() == "READONLY")) {
    stale_ = true;
  }
  request.done(reply);
}

void RespRouter::Refresh(Clock::time_point now) {
  if (options_.cluster == RespCluster::kOff) stale_ = false;
  if (!stale_ || refreshing_ || now < refresh_at_) return;
  refresh_at_ = now + options_.refresh_pause;
  std::vector<RespNode*> reachable;
  for (const auto& [endpoint, node] : nodes_) {
    if (node->breaker() == CircuitBreaker::State::kClosed) reachable.push_back(node.get());
  }
  RespNode* const node =
      reachable.empty() ? NodeAt(options_.seed) : reachable[++refreshes_ % reachable.size()];
  if (node == nullptr) return;
  RespRequest request{.rank = RespRequest::Rank::kLoad, .limits = ClusterMap::kLimits};
  AppendRespCommand({"CLUSTER", "SLOTS"}, &request.head);
  request.done = [this, from = node->endpoint()](const RespReply* reply) { OnSlots(from, reply); };
  refreshing_ = true;
  stale_ = false;
  node->Enqueue(std::move(request));
}

void RespRouter::OnSlots(const RespEndpoint& from, const RespReply* reply) {
  refreshing_ = false;
  auto map = reply == nullptr ? std::nullopt : ClusterMap::Parse(*reply, from);
  if (map.has_value()) {
    map_ = *std::move(map);
    kind_ = Kind::kCluster;
    // When one is lost, any of the others is asked who has its slots.
    for (const RespEndpoint& node : map_.nodes()) NodeAt(node);
  } else if (reply != nullptr && options_.cluster == RespCluster::kAuto && kind_ == Kind::kUnknown &&
             (reply->code() == "ERR" || reply->code() == "NOPERM")) {
    // Cluster support is disabled, or this user is not let ask: then it is one server, until it says MOVED.
    kind_ = Kind::kSingle;
  } else if (kind_ != Kind::kSingle) {
    stale_ = true;
  }
  if (kind_ != Kind::kUnknown) return RouteWaiting();
  for (RespRequest& request : std::exchange(waiting_, {})) failed_.push_back(std::move(request));
}

void RespRouter::RouteWaiting() {
  for (RespRequest& request : std::exchange(waiting_, {})) Send(std::move(request));
}

void RespRouter::DropNodes() {
  if (kind_ != Kind::kCluster || stale_ || refreshing_) return;
  const auto& known = map_.nodes();
  std::erase_if(nodes_, [&](const auto& node) {
    return node.second->idle() && std::find(known.begin(), known.end(), node.first) == known.end();
  });
}

RespRouter::Clock::time_point RespRouter::Pump(Clock::time_point now) {
  Refresh(now);
  DropNodes();
  Clock::time_point due = Clock::time_point::max();
  for (const auto& [endpoint, node] : nodes_) due = std::min(due, node->Pump(now));
  for (const RespRequest& request : std::exchange(failed_, {})) request.done(nullptr);
  if (stale_ && !refreshing_ && options_.cluster != RespCluster::kOff) due = std::min(due, refresh_at_);
  // Nodes hand requests to each other, and a request that failed may be followed by another.
  const bool more = !failed_.empty() || std::any_of(nodes_.begin(), nodes_.end(),
                                                    [](const auto& node) { return node.second->has_work(); });
  return more ? now : due;
}

}  // namespace kvpool
