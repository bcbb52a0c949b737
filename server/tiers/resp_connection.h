// A connection to a node of a RESP store: TCP, TLS if asked for, AUTH and PING, then commands and replies in one order.
//
//   resolving -> connecting -> greeting -> ready -> closed
//
// What does not come forward in time, and a node that says what nobody asked for, is closed; what was on it is answered without
// a reply. Not thread-safe: one thread has all connections of a RespLoop.
#ifndef KVPOOL_SERVER_TIERS_RESP_CONNECTION_H_
#define KVPOOL_SERVER_TIERS_RESP_CONNECTION_H_

#include <openssl/ssl.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"
#include "server/tiers/buffers.h"
#include "server/tiers/resp_cluster.h"
#include "server/tiers/resp_codec.h"

namespace kvpool {

// A command on its way, and where its reply goes.
struct RespRequest {
  using Done = std::function<void(const RespReply* reply)>;  // Null: there was none.
  // Who is served first, where not all can be.
  enum class Rank : uint8_t { kLoad, kAsk, kStore };

  Rank rank = Rank::kAsk;
  uint16_t slot = 0;
  // The bytes are a head, a part of a value, and a tail.
  std::string head, tail;
  std::shared_ptr<const TierBuffer> value;
  uint64_t begin = 0, bytes = 0;
  RespLimits limits;
  uint64_t reply_bytes = 0;          // So long the reply is likely to be.
  std::shared_ptr<const bool> over;  // It is true once nobody waits any more; null: never.
  // A string that is longer than into_bytes by `kept` has its first `kept` bytes in the reply's text, and the others here, where
  // they are read to at once. It is written to as long as `over`, which is there, is false.
  char* into = nullptr;
  uint64_t into_bytes = 0, kept = 0;
  std::shared_ptr<bool> sent;  // Becomes true once it is on a connection; null: nobody asks.
  Done done;
  // So many others were asked before, and sent it on.
  int hops = 0;
  bool asking = false;

  // What it takes of the memory between both ends.
  uint64_t cost() const { return head.size() + tail.size() + bytes + reply_bytes; }
};

struct RespTls {
  bool on = false;
  std::string ca_file;              // Empty: the system's.
  std::string cert_file, key_file;  // Empty: the client shows none.
};
// What every connection of a store has in common.
struct RespSettings {
  std::shared_ptr<SSL_CTX> tls;  // Null: in the clear.
  std::string user, password;    // Neither: no AUTH.
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(3);
  std::chrono::milliseconds io_timeout = std::chrono::seconds(5);
};
// INVALID_ARGUMENT says which file, and what OpenSSL says of it.
absl::StatusOr<std::shared_ptr<SSL_CTX>> MakeRespTls(const RespTls& tls);

class RespConnection;

// The epoll of a thread, and what wakes it.
class RespLoop {
 public:
  RespLoop();
  // Waits for events and hands them to their connections.
  void Wait(std::chrono::steady_clock::time_point until);
  // Thread-safe.
  void Wake() { waker_->Wake(); }

 private:
  friend class RespConnection;
  struct Waker {
    UniqueFd fd;
    std::atomic<bool> woken{false};  // Nobody needs to say it again.
    void Wake();
  };
  UniqueFd epoll_;
  // Lookups of names may end after the loop.
  std::shared_ptr<Waker> waker_ = std::make_shared<Waker>();
  std::shared_ptr<std::atomic<int>> lookups_ = std::make_shared<std::atomic<int>>(0);
  absl::flat_hash_map<uint64_t, RespConnection*> connections_;
  uint64_t last_id_ = 0;
};

class RespConnection {
 public:
  using Clock = std::chrono::steady_clock;
  using Answer = std::function<void(RespRequest request, const RespReply* reply)>;
  enum class State : uint8_t { kResolving, kConnecting, kGreeting, kReady, kClosed };
  // So many bytes may be between both ends, and one request more.
  static constexpr uint64_t kWindowBytes = 4 << 20;

  // `attempt` chooses among the addresses of a name. `answer` gets each request back with its reply. All that are pointed to
  // outlive it.
  RespConnection(RespLoop* loop, const RespSettings* settings, const RespEndpoint& endpoint, uint32_t attempt,
                 Answer answer);
  ~RespConnection();
  RespConnection(const RespConnection&) = delete;
  RespConnection& operator=(const RespConnection&) = delete;

  State state() const { return state_; }
  bool ready() const { return state_ == State::kReady; }
  bool busy() const { return !in_flight_.empty(); }
  bool has_room() const { return ready() && window_ < kWindowBytes; }
  uint64_t window() const { return window_; }  // Bytes of what is on it.
  // Why it is closed: a constant phrase, or the code of an error. Nothing that the node says besides.
  const std::string& why() const { return why_; }
  // It is closed because it was idle for too long for the node, not by a fault.
  bool closed_idle() const { return closed_idle_; }
  // Replies to requests that have come.
  uint64_t replies() const { return replies_; }
  // REQUIRES: ready().
  void Send(RespRequest request);
  // What can be written is.
  void Flush();
  // Its next step is due by then.
  Clock::time_point due() const;
  // Closes what is overdue, and goes on with a name that is looked up. The owner calls it when the loop was woken, or due() is past.
  void Check(Clock::time_point now);
  // What was on it. REQUIRES: it is closed.
  std::deque<RespRequest> TakeLost();

 private:
  friend class RespLoop;
  // What may be read before it is understood: one reply of the largest kind, and some of what is behind it. No more than
  // kReadBytes is read in advance: of a value that has a place of its own so much is copied.
  static constexpr size_t kInputBytes = (1 << 20) + (256 << 10);
  static constexpr size_t kReadBytes = 32 << 10;
  struct Lookup {
    Mutex mu;
    bool over ABSL_GUARDED_BY(mu) = false;
    std::vector<sockaddr_storage> found ABSL_GUARDED_BY(mu);
  };
  struct Chunk {
    std::string text;
    std::shared_ptr<const TierBuffer> value;
    uint64_t begin = 0, bytes = 0;
    std::string_view rest() const {
      return value == nullptr ? std::string_view(text).substr(begin)
                              : std::string_view(value->data() + begin, bytes);
    }
  };
  enum class Io : uint8_t { kDone, kAgain, kClosed };

  static std::vector<sockaddr_storage> Resolve(const RespEndpoint& endpoint, int flags);
  void Connect(const std::vector<sockaddr_storage>& addresses);
  void OnEvents(uint32_t events);
  // The socket is connected: TLS, if any, and the greeting.
  bool Begin();
  bool Handshake();
  void Put(const RespRequest& request);
  void PutText(std::string_view text);
  Io Write();
  Io ReadSome();
  void ReadAll();
  // False: it is closed.
  bool Understand();
  // The reply in front, which is not whole yet, is the string that its request has a place for: what came of it goes there, and what
  // is to come will.
  void BeginPlace(const RespRequest& request, size_t reply_bytes);
  // Reads that reply: its end is in its place, and left out of `input`.
  RespParse EndPlace(std::string_view input, const RespRequest& request, RespReply* reply,
                     size_t* used) const;
  void Greeted(const RespReply& reply);
  void Watch();
  void Close(std::string why);

  RespLoop& loop_;
  const RespSettings& settings_;
  const RespEndpoint endpoint_;
  const uint32_t attempt_;
  const Answer answer_;
  const uint64_t id_;
  State state_ = State::kResolving;
  std::string why_;
  bool closed_idle_ = false;
  std::shared_ptr<Lookup> lookup_;
  UniqueFd fd_;
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl_{nullptr, &SSL_free};
  bool tls_done_ = false, tls_wants_write_ = false;
  uint32_t watched_ = 0;
  int greetings_ = 0;  // Replies of the greeting that are still to come.
  std::deque<Chunk> output_;
  std::unique_ptr<char[]> input_;
  size_t input_begin_ = 0, input_end_ = 0, input_needs_ = 1;
  // Of the reply in front so many bytes of line and text are in the input, if its rest is placed, and so many are to be.
  size_t placed_behind_ = 0;
  uint64_t place_left_ = 0;
  uint32_t place_crc_ = 0;  // It covers what was placed.
  struct InFlight {
    RespRequest request;
    Clock::time_point since;
  };
  std::deque<InFlight> in_flight_;
  uint64_t window_ = 0;
  uint64_t replies_ = 0;
  Clock::time_point since_, progress_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_RESP_CONNECTION_H_
