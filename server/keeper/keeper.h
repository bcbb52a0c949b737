// The process that outlives the daemon: it starts kvpoold as its child, keeps the descriptors that the child gives it, and
// starts another when that one is killed.
//
//   the daemon                               the keeper
//   is killed, or fails                      starts another and shows it what it keeps, once the process is gone whole:
//                                            no thread of it writes to what is kept any more
//   fails at its first start                 ends with its exit status
//   fails kMostFailedStarts times in a row   gives up with status 1, and with it goes what it keeps
//   dies too often, however far it got       the same: what is kept may be what kills it
//   ends with status 0                       ends with 0
//   has named a program, and ends with       starts that one at once: this is no death. If it does not serve within
//   kHandsOver                               `most_start`, or ends before, the program of before is started again, and has
//                                            all that was kept when it ended
//
// A keeper that is told to end, by SIGTERM or SIGINT, tells the daemon, and ends as it does; one that has not ended after
// `most_end` is killed. SIGHUP is for the daemon. A keeper whose daemon has hung up and lives lets go of what it keeps, which
// serves nobody any more. Signals to the keeper's process group are the keeper's: the daemon has a group of its own, or a SIGINT
// of the terminal would come to it twice and cut its grace. A program is a descriptor here, so that whatever happens to its file meanwhile, what was looked at is what runs.
//
// One that is killed costs nothing: the daemon goes on alone, and looks for another at the keeper's socket. A keeper that is
// started while such a daemon serves waits for it there, and does for it what it does for a child; but how it has
// ended is known only by what it said. With starts_daemons = false a keeper does nothing but keep: daemons come to its socket by
// themselves, and the next one is answered when the last one has ended.
//
// At the socket it takes nothing from other users, serves one daemon at a time, and hears kMostCallers; of those that say
// nothing the oldest gives way.
#ifndef KVPOOL_SERVER_KEEPER_KEEPER_H_
#define KVPOOL_SERVER_KEEPER_KEEPER_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/support/unique_fd.h"

namespace kvpool {

inline constexpr int kMostFailedStarts = 5;
inline constexpr std::chrono::minutes kDeathsWithin{10};
inline constexpr size_t kMostCallers = 8;

// The exit status of a daemon that another one is to follow.
inline constexpr int kHandsOver = 75;

struct KeeperOptions {
  uint32_t most_deaths = 0;                 // It gives up at so many within kDeathsWithin.
  std::chrono::milliseconds most_start{0};  // So long a new program has until it serves.
  std::string socket;                       // Where daemons look for another keeper.
  std::vector<std::string> daemon_locks;    // Files that a daemon of this place has locked.
  std::chrono::milliseconds most_end{0};    // A daemon that was told to end is killed after it.
  bool starts_daemons = true;
};
// Runs this program, or one that took over, again and again with these arguments; answers the exit status. REQUIRES: no
// other thread runs.
int RunKeeper(const std::vector<std::string>& arguments, const KeeperOptions& options);

// What a daemon has of the keeper that has started it.
struct KeeperEnd {
  UniqueFd socket;      // Its end of the socket pair. Invalid: no keeper has started this process.
  std::string program;  // The path of the file that was started, which may have another by now.
};
// REQUIRES: no other thread runs.
KeeperEnd TakeKeeperEnd();

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KEEPER_KEEPER_H_
