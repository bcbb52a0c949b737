// What a keeper keeps: descriptors under the ids that a daemon gave them. It knows nothing of what they are.
#ifndef KVPOOL_SERVER_KEEPER_INVENTORY_H_
#define KVPOOL_SERVER_KEEPER_INVENTORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "proto/support/unique_fd.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {

class Inventory {
 public:
  // `keeper` has the bits that daemons are told (keeper_frames.h).
  explicit Inventory(size_t most, uint32_t keeper = kKnowsEnding) : most_(most), keeper_(keeper) {}

  // Reads one frame of a daemon's and answers it. UNAVAILABLE: the daemon hung up. INVALID_ARGUMENT,
  // FAILED_PRECONDITION: what it says is not understood, and it must not be served.
  absl::Status Serve(int socket);
  // Another daemon comes.
  void OnDaemon();
  // It was told what is here: from then on it may have changed that.
  bool greeted() const { return greeted_; }
  // The daemon has said that it serves.
  bool serving() const { return serving_; }
  // It ends, and none is to follow it.
  bool ending() const { return ending_; }
  // What is here is of no use to anybody: the next daemon starts cold.
  void Clear() { things_.clear(); }

  // ---- Upgrades
  // The program that the daemon wants to come next. Invalid: it has not said so, or that was taken already.
  bool handing_over() const { return next_program_.valid(); }
  UniqueFd TakeNextProgram() { return std::move(next_program_); }
  // That program is on trial: what is here now is there again if it fails. Whether the daemon asked for a cold start
  // decides what the program is shown.
  void BeginTrial();
  void EndTrial(bool failed);
  // Each daemon that comes is told.
  void SetLastUpgrade(UpgradeOutcome outcome, std::string_view why);

  size_t size() const { return things_.size(); }

 private:
  struct Thing {
    KeeperFrame frame;
    std::shared_ptr<const UniqueFd> fd;  // Also in before_trial_.
  };
  using Things = std::map<uint64_t, Thing>;
  absl::Status Show(int socket);
  absl::Status Keep(int socket, KeeperFrame frame, UniqueFd fd, const absl::Status& received);

  const size_t most_;
  const uint32_t keeper_;
  Things things_, before_trial_;
  bool greeted_ = false, serving_ = false, ending_ = false;
  UniqueFd next_program_;
  HandOver hand_over_ = HandOver::kWarm;
  KeeperFrame last_upgrade_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KEEPER_INVENTORY_H_
