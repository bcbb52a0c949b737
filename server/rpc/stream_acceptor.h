// Takes connections from the Unix socket and hands those that say what they are to whoever serves them: gRPC, or Step frames.
//
// gRPC's own listener stops for good when accept4 once fails with EMFILE, counts nobody, and keeps
// connections that never say a word. Here a connection is:
//
//   state         meaning                      leaves by
//   silent        no byte has come             the preface of HTTP/2 or of Step frames -> handed over
//                                              timeout, other bytes, displaced by a newcomer -> closed
//   handed over   another's, in Connections    its descriptor is closed, or belongs to another file by now
//
// Silent connections are few, and a newcomer displaces the oldest, since clients speak first and at once. Each that is closed here
// is counted (kvpool_rpc_connections_refused_total), and has a line in the log within RefusalLog's bounds; one that hangs up by
// itself has neither.
#ifndef KVPOOL_SERVER_RPC_STREAM_ACCEPTOR_H_
#define KVPOOL_SERVER_RPC_STREAM_ACCEPTOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"
#include "server/access/refusal_log.h"
#include "server/base/acceptor.h"
#include "server/base/clock.h"
#include "server/base/peer_process.h"
#include "server/base/sockets.h"
#include "server/rpc/connections.h"
#include "server/rpc/rpc_stats.h"

namespace kvpool {

struct StreamAcceptorOptions {
  std::string path;
  std::optional<uint32_t> group;
  Listen listen = ListenUnix;
  uint64_t preface_timeout_ms = 5000;
  uint32_t max_silent = 64;
  int fd_ceiling = 0;  // AttachServerOptions::fd_ceiling.
  const Clock* clock = MonotonicClock();
};

class StreamAcceptor {
 public:
  // Takes a connected, non-blocking socket, which is in `connections` by then, and of which nothing was read; called on the thread of
  // RunOnce.
  using HandOver = std::function<void(UniqueFd, std::shared_ptr<const PeerCredentials>)>;
  // Without a thread: tests call RunOnce. `connections` and `stats` outlive the acceptor.
  static absl::StatusOr<std::unique_ptr<StreamAcceptor>> Open(const StreamAcceptorOptions& options,
                                                              Connections* connections, RpcStats* stats,
                                                              HandOver to_grpc, HandOver to_frames);
  // The same with a thread of its own.
  static absl::StatusOr<std::unique_ptr<StreamAcceptor>> Start(const StreamAcceptorOptions& options,
                                                               Connections* connections, RpcStats* stats,
                                                               HandOver to_grpc, HandOver to_frames);
  // Accepts no more, and joins.
  ~StreamAcceptor();
  // Waits so long at most, or (-1) for as long as it takes, and does what has come up. False: it is to stop.
  bool RunOnce(int timeout_ms);

 private:
  struct Silent {
    UniqueFd socket;
    std::shared_ptr<PeerCredentials> peer;
    uint64_t deadline_ms;
  };

  StreamAcceptor(StreamAcceptorOptions options, Connections* connections, RpcStats* stats, HandOver to_grpc,
                 HandOver to_frames, UniqueFd listener)
      : options_(std::move(options)),
        connections_(connections),
        stats_(stats),
        to_grpc_(std::move(to_grpc)),
        to_frames_(std::move(to_frames)),
        listener_(std::move(listener)) {}
  absl::Status Begin();
  absl::Status Watch(int fd, uint64_t key);
  void Accept();
  void OnReadable(uint64_t id);
  // Adds a connection that is to be handed over. False: it is not to be.
  bool Admit(int fd, const std::shared_ptr<PeerCredentials>& peer);
  // Closes the oldest silent connection.
  void CloseOldest(ConnectionRefusal why, const absl::Status& status);
  // `peer` may be null: it is not known.
  void Refuse(ConnectionRefusal why, std::shared_ptr<const PeerCredentials> peer, const absl::Status& status);

  const StreamAcceptorOptions options_;
  Connections* const connections_;
  RpcStats* const stats_;
  const HandOver to_grpc_, to_frames_;
  const UniqueFd listener_;
  UniqueFd epoll_, stop_;
  Acceptor acceptor_;
  RefusalLog refusals_{"gRPC connection refused"};
  uint64_t next_id_ = 2;
  std::map<uint64_t, Silent> silent_;  // Keyed by id, which grows: the oldest is first.
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_STREAM_ACCEPTOR_H_
