// A Redis or Valkey server, or a cluster of them, as a tier that nodes share (resp_value.h: how a value lies there).
//
// One thread has all sockets and everything that is under way, so that nothing of it needs a lock; whoever asks leaves the
// question in a queue. One is enough: what a node of the store moves goes through one thread of its own.
//
// What is there is known only to the store, which others write to and which evicts by rules of its own. Exists answers from
// what was stored, found or asked about a moment ago (known_keys.h); other keys are asked about, for the next one who wants
// to know. While no node of the store can be reached, nothing is there.
#ifndef KVPOOL_SERVER_TIERS_RESP_TIER_H_
#define KVPOOL_SERVER_TIERS_RESP_TIER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "server/base/histogram.h"
#include "server/tiers/known_keys.h"
#include "server/tiers/resp_router.h"
#include "server/tiers/resp_value.h"
#include "server/tiers/tier.h"

namespace kvpool {

class RespTier final : public Tier {
 public:
  struct Options {
    RespEndpoint endpoint;
    RespCluster cluster = RespCluster::kAuto;
    RespTls tls;
    std::string user, password;
    std::string prefix = "kvpool";
    std::chrono::milliseconds ttl{0};  // Values are gone after so long; 0: when the store evicts them.
    int connections = 4;               // A node has so many at most.
    std::chrono::milliseconds connect_timeout{3000}, io_timeout{5000};
    std::chrono::milliseconds first_pause{500}, longest_pause{30000};  // See RespNode.
    std::chrono::milliseconds refresh_pause{500};                      // See RespRouter.
    KnownKeys::Options known{.there = std::chrono::seconds(60), .not_there = std::chrono::seconds(2)};
  };
  // Values that may wait. The buffers that they come in have a bound in bytes besides.
  static constexpr size_t kMostWaiting = 16384;
  // Keys that are to be asked about.
  static constexpr size_t kMostAsked = 65536;
  static constexpr uint64_t kMostValueBytes = UINT32_MAX;

  // It does not wait for the store, which may come later. INVALID_ARGUMENT: a file that TLS needs.
  static absl::StatusOr<std::unique_ptr<RespTier>> Open(const Options& options);
  // What is under way is answered as failed, at once.
  ~RespTier() override;

  std::string_view name() const override { return "resp"; }
  uint64_t most_value_bytes() const override { return kMostValueBytes; }
  std::string path() const override { return TextOf(options_.endpoint); }
  std::string describe() const override;
  void Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) override
      ABSL_LOCKS_EXCLUDED(known_mu_);
  void Load(std::vector<TierLoad> loads, Deadline deadline, Done done) override ABSL_LOCKS_EXCLUDED(mu_);
  void Store(std::vector<TierStore> stores, Done done) override ABSL_LOCKS_EXCLUDED(mu_);
  void Drain() override ABSL_LOCKS_EXCLUDED(mu_);
  // UNLINK of what this daemon knows of: who else wrote what is for the others to say.
  TierErased Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                   const std::atomic<bool>* stop = nullptr) override ABSL_LOCKS_EXCLUDED(mu_, known_mu_);
  absl::StatusOr<uint64_t> CountOf(const TierOwner& owner) override ABSL_LOCKS_EXCLUDED(known_mu_);
  TierUsage usage() override ABSL_LOCKS_EXCLUDED(mu_, known_mu_);

 private:
  // A value on its way.
  struct Task {
    TierKey key;
    std::shared_ptr<TierBuffer> into;         // One of the two is there,
    std::shared_ptr<const TierBuffer> value;  // and goes when it is answered.
    bool replaces = false;                    // See TierStore.
    Deadline deadline = Deadline::max();
    std::chrono::steady_clock::time_point since;
    size_t index = 0;
    std::shared_ptr<const Done> done;
    bool over = false;      // It is answered.
    bool believed = false;  // The store was not asked.
    uint64_t asked = 0;     // See KnownKeys::Learn.
    // What follows is the thread's.
    std::multimap<Deadline, std::shared_ptr<Task>>::iterator timer;  // Good if `timed`.
    bool timed = false;
    std::string stem;  // See PieceKeyStem.
    uint16_t slot = 0;
    uint32_t pieces = 0, unanswered = 0;
    bool set = false;  // The SET of a piece was sent.
    TierResult worst = TierResult::kDone;
    std::vector<PieceHeader> headers;  // A load's, as far as they came; of no pieces where one is damaged.
    std::vector<bool> came;            // Did anything?
    std::vector<std::array<char, kPieceHeaderBytes>> written;  // A store's.
  };
  using TaskRef = std::shared_ptr<Task>;
  // One call of Erase. All but `over` is the thread's until that is set.
  struct Erasure {
    TierOwner owner;
    std::vector<TierKey> keys;
    std::vector<TaskRef> before;  // Stores that were under way: their values are unlinked behind them.
    bool begun = false, gathered = false;
    size_t next = 0;
    absl::flat_hash_set<TierKey> unanswered;
    TierErased answer;
    bool over = false;
    std::atomic<bool> gave_up{false};  // Its caller does not wait any more.
  };
  using ErasureRef = std::shared_ptr<Erasure>;
  using OnPiece = void (RespTier::*)(const TaskRef& task, uint32_t piece, const RespReply* reply);

  RespTier(const Options& options, std::shared_ptr<SSL_CTX> tls);
  void Enqueue(std::vector<TaskRef> tasks) ABSL_LOCKS_EXCLUDED(mu_);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void AnswerAll(const std::vector<TaskRef>& came);
  // The load or store of a task begins.
  void Begin(const TaskRef& task);
  void Answer(const TaskRef& task, TierResult result) ABSL_LOCKS_EXCLUDED(mu_, known_mu_);
  // A request about one piece of a value, still without its bytes; `on_piece` gets the reply.
  RespRequest Request(const TaskRef& task, RespRequest::Rank rank, uint32_t piece, OnPiece on_piece);
  void LoadPiece(const TaskRef& task, uint32_t piece);
  void OnLoaded(const TaskRef& task, uint32_t piece, const RespReply* reply);
  TierResult Loaded(const Task& task) const;
  void OnAsked(const TaskRef& task, uint32_t piece, const RespReply* reply);
  void Write(const TaskRef& task);
  void StorePiece(const TaskRef& task, uint32_t piece);
  void OnStored(const TaskRef& task, uint32_t piece, const RespReply* reply);
  // Nobody waits for it: where the store does not say that it did it, the value is in doubt.
  void Unlink(const TaskRef& task, uint32_t first);
  void AskAbout(const TierKey& key);
  void Advance(const ErasureRef& erasure) ABSL_LOCKS_EXCLUDED(mu_, known_mu_);
  void End(const ErasureRef& erasure) ABSL_LOCKS_EXCLUDED(mu_);
  // Looks how many pieces there are, from those on that a value of one request has not. The store may have evicted some in the
  // middle: it looks as far as the largest value goes that was moved here. The last ones are unlinked first: as
  // long as a piece is there the first ones are, by which the next erasure finds it.
  void FindPieces(const ErasureRef& erasure, const TierKey& key, uint32_t first);
  void UnlinkPieces(const ErasureRef& erasure, const TierKey& key, uint32_t first, uint64_t unlinked);
  // A command about kPiecesTogether pieces, which answers with a number of them.
  void AboutPieces(const ErasureRef& erasure, const TierKey& key, std::string_view command, uint32_t first,
                   std::function<void(uint64_t)> done) ABSL_LOCKS_EXCLUDED(known_mu_);
  void Settle(const ErasureRef& erasure, const TierKey& key);
  void Doubt(const TierKey& key) ABSL_LOCKS_EXCLUDED(known_mu_);
  // What is known of many is looked at, and changed, in parts.
  absl::flat_hash_set<TierKey> KnownOf(const TierOwner& owner) ABSL_LOCKS_EXCLUDED(known_mu_);
  void ForAll(absl::Span<const TierKey> keys, void (KnownKeys::*verb)(const TierKey& key))
      ABSL_LOCKS_EXCLUDED(known_mu_);
  TierResult ResultOf(const RespReply& error);

  const Options options_;
  Mutex mu_;
  Mutex known_mu_;
  CondVar idle_, erased_;
  std::vector<TaskRef> inbox_ ABSL_GUARDED_BY(mu_);
  size_t waiting_ ABSL_GUARDED_BY(mu_) = 0;                // Tasks that are not answered.
  std::vector<ErasureRef> erasures_ ABSL_GUARDED_BY(mu_);  // Those that are not over.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  TierCounters counters_ ABSL_GUARDED_BY(mu_);
  Histogram load_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
  Histogram store_seconds_ ABSL_GUARDED_BY(mu_){kTierBounds};
  KnownKeys known_ ABSL_GUARDED_BY(known_mu_);
  std::vector<TierKey> asks_ ABSL_GUARDED_BY(known_mu_);
  size_t asked_ ABSL_GUARDED_BY(known_mu_) = 0;  // Keys whose answer is to come.
  std::atomic<size_t> nodes_{0}, nodes_down_{0};
  RespLoop loop_;
  // The thread's.
  RespRouter router_;
  std::multimap<Deadline, TaskRef> deadlines_;
  absl::flat_hash_set<TaskRef> under_way_;
  uint32_t most_pieces_ = 0;  // The most that a value had which was loaded or stored.
  std::chrono::steady_clock::time_point warn_again_;
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_RESP_TIER_H_
