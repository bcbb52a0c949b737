// What the attach server's thread does: its connections, the processes behind them, and who is let in.
#ifndef KVPOOL_SERVER_ATTACH_ATTACH_LOOP_H_
#define KVPOOL_SERVER_ATTACH_ATTACH_LOOP_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/attach_socket.h"
#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"
#include "server/access/refusal_log.h"
#include "server/attach/attach_mailbox.h"
#include "server/attach/attach_options.h"
#include "server/base/acceptor.h"
#include "server/base/clock.h"
#include "server/base/peer_process.h"

namespace kvpool {

// From where the loop knows the time, who is at the other end of a socket, and what became of a frame. Tests have a clock that
// stands still, processes that end, or get the pid of another, and a system short of descriptors, when they say so.
struct AttachSenses {
  const Clock* clock = MonotonicClock();
  std::function<absl::StatusOr<PeerCredentials>(int socket)> credentials = CredentialsOf;
  std::function<absl::StatusOr<UniqueFd>(int socket, const PeerCredentials&)> pidfd = PidfdOf;
  std::function<absl::StatusOr<SendOutcome>(int socket, const v1::AttachFrame&, int fd)> send = SendFrame;
};

// It has no thread of its own: all belongs to the one that calls RunOnce, except Stop and the counters.
class AttachLoop {
 public:
  // UNAVAILABLE: there are no descriptors for it.
  static absl::StatusOr<std::unique_ptr<AttachLoop>> Open(AttachServerOptions options, AttachEvents events,
                                                          UniqueFd listener,
                                                          std::shared_ptr<AttachMailbox> mailbox,
                                                          AttachSenses senses = {});
  // Tells every peer that the daemon shuts down, and hangs up.
  ~AttachLoop();

  // When something is to be done although nobody says anything: milliseconds from now; -1: never.
  int TimeoutMs() const;
  // Waits for events, so long at most, and does what they and the time ask for. False: Stop was called.
  bool RunOnce(int timeout_ms);
  // From any thread.
  void Stop();
  // Closes all connections without a word, which leaves the sessions to a daemon that comes. REQUIRES: RunOnce is called
  // no more.
  void HangUp();

  AttachStats Stats() const {
    MutexLock lock(&stats_mu_);
    return stats_;
  }

 private:
  struct Outgoing {
    v1::AttachFrame frame;
    UniqueFd fd;
  };

  enum class ConnectionState { kSilent, kGreeted, kBound, kClosing };

  struct Connection {
    uint64_t id = 0;  // Ids grow: the oldest connection has the smallest.
    UniqueFd socket;
    PeerCredentials peer;
    ConnectionState state = ConnectionState::kSilent;
    uint64_t since_ms = 0;     // When it came into its state.
    uint64_t deadline_ms = 0;  // When a silent or closing connection is closed; other states have none.
    uint64_t process = 0;      // Set once greeted.
    AttachId attach{0};        // Set once greeted.
    bool final = false;        // Its hello's member_token was refused for good.
    std::deque<Outgoing> out;
  };

  struct Process {
    uint64_t id = 0;
    int64_t pid = 0;
    std::shared_ptr<const UniqueFd> pidfd;
    std::set<uint64_t> connections;  // Its greeted and bound connections.
    std::vector<AttachId> attached;  // The daemon waits for the end of these.
  };

  AttachLoop(AttachServerOptions options, AttachEvents events, UniqueFd listener,
             std::shared_ptr<AttachMailbox> mailbox, AttachSenses senses)
      : options_(std::move(options)),
        events_(std::move(events)),
        listener_(std::move(listener)),
        mailbox_(std::move(mailbox)),
        senses_(std::move(senses)) {}
  absl::Status WatchAll();
  absl::Status Watch(int fd, uint64_t key, uint32_t events);
  uint64_t NowMs() const { return senses_.clock->NowMs(); }
  void Accept();
  void Admit(UniqueFd socket);
  // Sends `closed` on a socket that never became a connection.
  void TurnAway(UniqueFd socket, std::string_view label, const std::string& reason);
  // Makes room for one more silent (or greeted) connection of `uid`; false: there is none.
  bool MakeRoom(ConnectionState state, uint32_t uid);
  void OnEvents(Connection* connection, uint32_t events);
  void OnFrame(Connection* connection, const v1::AttachFrame& frame);
  void OnHello(Connection* connection, const v1::AttachHello& hello);
  void OnProcessEnded(Process* process);
  void ReadLetters();
  void CloseLate();
  // Goes on with those whose descriptor could not travel, once their pause is over.
  void SendPaused();
  // The process behind the peer, watched from now on.
  absl::StatusOr<Process*> WatchPeer(const Connection& connection);
  void Unwatch(Process* process);
  // The end of the process, if it is watched, does not matter to this attachment.
  void NotAwaited(uint64_t process, AttachId attach);

  void Move(Connection* connection, ConnectionState state);
  void Queue(Connection* connection, Outgoing outgoing);
  // Sends what the socket takes. True: the connection is still there.
  bool Flush(Connection* connection);
  void Close(Connection* connection, std::string_view label, const std::string& reason);
  // Tells the daemon, once, that the connection is no more.
  void Detach(Connection* connection);
  void Forget(Connection* connection);
  void Count(std::string_view label);

  Connection* Find(uint64_t id) {
    const auto found = connections_.find(id);
    return found == connections_.end() ? nullptr : &found->second;
  }

  const AttachServerOptions options_;
  const AttachEvents events_;
  const UniqueFd listener_;
  const std::shared_ptr<AttachMailbox> mailbox_;
  const AttachSenses senses_;
  UniqueFd epoll_, stop_;
  Acceptor acceptor_;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Connection> connections_;
  std::unordered_map<uint64_t, Process> processes_;
  std::unordered_map<int64_t, uint64_t> process_of_pid_;
  RefusalLog refusals_{"attach refused"};
  std::set<uint64_t> silent_, greeted_, closing_;  // Ids by state, oldest first.
  std::set<uint64_t> paused_;                      // Ids of those whose next frame waits for `resume_ms_`.
  uint64_t resume_ms_ = 0;                         // Set while any is paused.

  mutable Mutex stats_mu_;
  AttachStats stats_ ABSL_GUARDED_BY(stats_mu_);
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ATTACH_ATTACH_LOOP_H_
