// A RESP store of one server or of a cluster, seen as one: each request goes to the node that has its slot. Where the nodes
// of a cluster say that a slot has moved, or is moving (MOVED, ASK), the request is sent on.
//
// The map of a cluster is asked for (CLUSTER SLOTS) at the beginning, after a MOVED, and while a node can't be reached. Not
// thread-safe.
#ifndef KVPOOL_SERVER_TIERS_RESP_ROUTER_H_
#define KVPOOL_SERVER_TIERS_RESP_ROUTER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "server/tiers/resp_cluster.h"
#include "server/tiers/resp_connection.h"
#include "server/tiers/resp_node.h"

namespace kvpool {

enum class RespCluster : uint8_t { kAuto, kOn, kOff };

class RespRouter {
 public:
  using Clock = RespConnection::Clock;
  // A request is sent on so often: slots move one after another.
  static constexpr int kMostHops = 5;
  struct Options {
    RespEndpoint seed;  // One node; it names the others.
    RespCluster cluster = RespCluster::kAuto;
    RespSettings settings;
    RespNode::Options node;
    std::chrono::milliseconds refresh_pause{500};  // The map is asked for no sooner.
  };
  // `loop` outlives it.
  RespRouter(RespLoop* loop, const Options& options);

  // It is answered by Pump, or by the loop, never from here.
  void Send(RespRequest request);
  // The next call is due at what it answers.
  Clock::time_point Pump(Clock::time_point now);
  size_t nodes() const { return nodes_.size(); }
  // Those whose breaker is not closed.
  size_t nodes_down() const;

 private:
  enum class Kind : uint8_t { kUnknown, kSingle, kCluster };

  // Null: there are too many.
  RespNode* NodeAt(const RespEndpoint& endpoint);
  void OnReply(RespNode* node, RespRequest request, const RespReply* reply);
  void Refresh(Clock::time_point now);
  void OnSlots(const RespEndpoint& from, const RespReply* reply);
  void RouteWaiting();
  // Those that are neither in the map nor in use.
  void DropNodes();

  RespLoop& loop_;
  const Options options_;
  Kind kind_;
  ClusterMap map_;
  std::map<RespEndpoint, std::unique_ptr<RespNode>> nodes_;
  std::vector<RespRequest> waiting_;  // It is not known yet where they go.
  std::vector<RespRequest> failed_;
  bool stale_ = true, refreshing_ = false;
  Clock::time_point refresh_at_;
  uint64_t refreshes_ = 0;  // Nodes take turns at being asked.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_RESP_ROUTER_H_
