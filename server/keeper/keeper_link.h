// The daemon's end of a keeper: gives it what must outlive the process, and gets what an earlier daemon gave it.
//
//   KeptThing   from the keeper: what an earlier daemon left
//   Kept        the daemon's word that the keeper has a thing; its end lets the keeper drop it
//
// A keeper that is gone, or does not answer, is no error: the daemon goes on alone, and says so once. The keeper may live, and
// what it has is out of date from then on: it lacks members whose blocks nobody else may have. So the first thing that is
// kept is a page of memory in which the daemon writes that it goes on alone, before it does; a daemon that inherits such a page
// takes nothing.
//
// The link has a copy of all that is to be kept. Another keeper gets it whole, and a page of its own, which says "alone" until
// it has everything:
//
//   killed                     the next daemon finds
//   before the page is there   things without a page, and takes none of them
//   before the last thing      the page that says "alone"
//   after                      everything
//
// The page of the keeper before says that another one has the daemon's place, too: it may live still, and start a daemon.
#ifndef KVPOOL_SERVER_KEEPER_KEEPER_LINK_H_
#define KVPOOL_SERVER_KEEPER_KEEPER_LINK_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/mutex.h"
#include "proto/support/unique_fd.h"
#include "server/base/shared_memory.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {

class KeeperLink;

enum class KeptKind : uint16_t {
  kTable = 1,
  kSlab = 2,
  kMember = 3,
  kWord = 4,
  kLog = 5,
  kPlaces = 6,
  kLock = 256,  // This and what follows make up a daemon's place (server/place.h).
  kListener = 257,
  kEpoch = 258
};
// A daemon that does not know a kind from here on lets go of what is of it; without one that is below it can't go on.
inline constexpr uint16_t kFirstOptionalKind = 256;

// Why a daemon starts with nothing. The names are label values of a metric.
enum class ColdStart : uint8_t {
  kWarm,         // It does not.
  kNoKeeper,     // It has no keeper, or serves as one without.
  kNothingKept,  // Its keeper has nothing: it is the first, or was asked to start so.
  kWentAlone,    // The daemon before had gone on without its keeper.
  kGpuLost,      // A GPU was lost under it.
  kOtherDevices  // It had other devices.
};
inline constexpr std::array<const char*, 6> kColdStartNames = {"warm",       "no_keeper", "nothing_kept",
                                                               "went_alone", "gpu_lost",  "other_devices"};

// Move-only. Its destructor sends nothing by itself: the next call of the link does.
class Kept {
 public:
  Kept() = default;
  Kept(KeeperLink* link, uint64_t id) : link_(link), id_(id) {}
  Kept(Kept&& other) noexcept : link_(std::exchange(other.link_, nullptr)), id_(other.id_) {}
  Kept& operator=(Kept&& other) noexcept;
  ~Kept();
  // The thing stays kept as long as there is a keeper.
  void Forget() { link_ = nullptr; }

 private:
  KeeperLink* link_ = nullptr;
  uint64_t id_ = 0;
};

struct KeptThing {
  KeptKind kind{};
  std::string facts;
  UniqueFd fd;
  Kept kept;
};

struct KeeperLinkOptions {
  static constexpr std::chrono::milliseconds kPatience{5000};
  std::string another;  // The socket at which to look for another keeper; empty: there is none.
  std::chrono::milliseconds patience = kPatience;
  // Until it answers hello: it does not while the daemon before has not ended.
  std::chrono::milliseconds hello_patience = kPatience;
};

// Thread-safe. Its mutex is a leaf, and held while the keeper answers: some 20 us, and at most `patience`.
class KeeperLink {
 public:
  using Options = KeeperLinkOptions;
  static constexpr std::chrono::milliseconds kLookPause{1000};
  // Says hello on the socket of a keeper and receives what it keeps. A keeper that is silent for longer than `patience`
  // counts as gone. FAILED_PRECONDITION: it serves another daemon.
  static absl::StatusOr<std::unique_ptr<KeeperLink>> Join(UniqueFd socket, const Options& options = {});
  // There is no keeper, and may be one later.
  static std::unique_ptr<KeeperLink> Alone(const Options& options);
  // What there is of an earlier daemon's place, whatever becomes of the rest; once.
  std::vector<KeptThing> TakePlace();
  // Lets go of what was inherited if the daemon before went on alone, or had other devices, as its slabs lie elsewhere; and keeps the
  // page in which this one would say that it goes on alone. Nothing else is kept or taken before this, but for the place.
  absl::Status Trust(std::string devices);

  // What an earlier daemon left, in the order in which that one gave it; once.
  std::vector<KeptThing> TakeInherited() { return std::exchange(inherited_, {}); }
  // Returns when the keeper has a copy of the descriptor. RESOURCE_EXHAUSTED: it keeps no more, with its reason.
  absl::StatusOr<Kept> Keep(KeptKind kind, std::string_view facts, int fd);
  // This daemon serves: its start has not failed.
  void Serving();
  // It ends, and none is to follow it.
  void Ending();
  // Sees whether the keeper is gone, and then gives all to another one, if there is one. It is called now and then, by one
  // thread.
  void LookForAnother();
  // Sends what is to be dropped. The housekeeper calls it.
  void Flush();
  // The same, and waits until it was dropped: what nobody else has is free then.
  void AwaitDropped();
  // The next daemon takes nothing of this one, as what lies in memory may not be what was written there.
  void Distrust();
  // Nothing but its place is to outlive this daemon, which goes on.
  void Decline();
  bool declined() const { return declined_; }
  // An earlier daemon has left something.
  bool inherits() const { return !inherited_.empty(); }
  // Why it has not.
  ColdStart cold() const { return cold_; }
  // The keeper is gone, or does not answer, or was declined: nothing outlives this daemon.
  bool lost() const { return lost_.load(std::memory_order_relaxed); }
  // What the keeper said of the last upgrade, when this daemon came; and why it failed.
  UpgradeOutcome last_upgrade() const { return last_upgrade_; }
  const std::string& upgrade_failure() const { return upgrade_failure_; }
  // Once this process has ended with kHandsOver (keeper.h), the keeper starts this program in its place. UNAVAILABLE: the
  // keeper is gone. RESOURCE_EXHAUSTED: it does not, with its reason.
  absl::Status HandOverTo(int program, HandOver how);
  // Hangs up. The keeper goes on with what it has, for the next daemon; from now on nothing is kept or dropped.
  void Leave();

 private:
  friend class Kept;
  // What a keeper has, or would have.
  struct Thing {
    KeptKind kind{};
    std::string facts;
    UniqueFd fd;
  };
  explicit KeeperLink(const Options& options) : options_(options) {}
  absl::Status Inherit(UniqueFd socket);
  // Keeps a new page, in place of the one that there is.
  absl::Status KeepWord(uint32_t says) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // REQUIRES: a keeper is there.
  absl::Status Give(uint64_t id, KeptKind kind, std::string_view facts, int fd)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // NOT_FOUND: nobody listens there.
  absl::Status GiveToAnother();
  // Gives all to the keeper at the other end of socket_, which has `held`.
  absl::Status GiveAll(const std::vector<uint64_t>& held) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Drop(uint64_t id);
  // Sends the frame and waits for the answer. Otherwise the keeper is lost.
  absl::Status Ask(const KeeperFrame& frame, int fd, KeeperFrame* answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SendDrops() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Lose(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  Mutex mu_;
  UniqueFd socket_ ABSL_GUARDED_BY(mu_);  // Invalid while no keeper is there.
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<uint64_t, Thing> things_ ABSL_GUARDED_BY(mu_);  // But for the page.
  std::optional<SharedMemory> word_ ABSL_GUARDED_BY(mu_);
  uint32_t outlook_ ABSL_GUARDED_BY(mu_) = 0;  // What the page says while the keeper has everything.
  std::string devices_ ABSL_GUARDED_BY(mu_);   // The page names them.
  uint32_t keeper_ ABSL_GUARDED_BY(mu_) = 0;   // Its bits (keeper_frames.h).
  bool serving_ ABSL_GUARDED_BY(mu_) = false;
  bool left_ ABSL_GUARDED_BY(mu_) = false;
  std::chrono::steady_clock::time_point next_look_;  // Only the thread that looks has it.
  std::string last_failure_;                         // This too.
  std::atomic<bool> lost_{false}, declined_{false};
  Mutex drops_mu_;  // Taken under all others, as a Kept may end anywhere.
  std::vector<uint64_t> drops_ ABSL_GUARDED_BY(drops_mu_);
  ColdStart cold_ = ColdStart::kNothingKept;
  UpgradeOutcome last_upgrade_ = UpgradeOutcome::kNone;
  std::string upgrade_failure_;
  std::vector<KeptThing> inherited_;  // The last, as the end of a Kept is written down above.
};

// A connection to the keeper that listens at this path. NOT_FOUND: none does. PERMISSION_DENIED: it is another user's.
absl::StatusOr<UniqueFd> ConnectToKeeper(const std::string& path);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KEEPER_KEEPER_LINK_H_
