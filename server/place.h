// What belongs to a daemon's place and not to its process: its locks, its listening sockets, its epoch. With a keeper they
// outlive the daemon, and the next one has them from the start.
//
//   lock       of a file: held as long as any process has the descriptor, so that no other daemon takes the place meanwhile
//   listener   goes on to collect connections, which wait in its backlog for the next daemon
//   epoch      a page with the last one that a daemon had
//
// A program of before takes its locks before it asks the keeper, which would have them. So the keeper is given locks and listeners
// only once this daemon serves: until then one of before may have to come back. Before such a program is named as the next
// one they are taken back (Withdraw).
#ifndef KVPOOL_SERVER_PLACE_H_
#define KVPOOL_SERVER_PLACE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"
#include "server/base/shared_memory.h"
#include "server/base/sockets.h"
#include "server/keeper/keeper_link.h"

namespace kvpool {

class Place {
 public:
  // Null: there is no keeper, and all of it ends with the process. `keeper` outlives the place.
  explicit Place(KeeperLink* keeper);
  Place(Place&&) = default;
  Place& operator=(Place&&) = delete;
  // Removes the files of locks, unless another daemon follows.
  ~Place();

  // Locks the file until the end. Errors are those of FileLock::Take.
  absl::Status Lock(const std::string& path);
  // The listener that an earlier daemon bound, if it is what clients of the path connect to, and was bound with these
  // options. Otherwise ListenUnix. REQUIRES: as that.
  absl::StatusOr<UniqueFd> Listen(const ListenOptions& options);
  // `least`, or more: greater than that of every daemon before.
  uint64_t NextEpoch(uint64_t least);
  // The daemon after this one knows that epoch. It comes before any peer does.
  absl::Status KeepEpoch();
  // The daemon serves: the next one gets what it has taken and bound.
  void Keep();
  // The next daemon takes and binds for itself.
  void Withdraw();
  // No daemon follows: who connects is turned away, and the locks are this process's alone.
  void Close();
  // An earlier daemon's locks or listeners are here: if this one's start fails, its files are for the next one.
  bool inherited() const { return inherited_; }

 private:
  struct Item {
    KeptKind kind{};
    std::string facts;
    UniqueFd fd;
    Kept kept;
    bool given = false;
  };
  std::optional<KeptThing> FindLock(const std::string& path);
  std::optional<KeptThing> FindListener(const ListenOptions& options);

  KeeperLink* keeper_;
  std::vector<KeptThing> left_;  // What the earlier daemon had and this one has not asked for.
  std::vector<FileLock> locks_;
  std::vector<Item> items_;
  std::optional<SharedMemory> epochs_;
  Kept epochs_kept_;
  uint64_t epoch_ = 0;
  bool inherited_ = false;
  bool served_ = false;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_PLACE_H_
