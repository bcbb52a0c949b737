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
//
// A keeper that is told to end, by SIGTERM or SIGINT, tells the daemon and ends as it does; SIGHUP is for the daemon. One
// that is killed costs nothing at once: the daemon goes on alone. One whose daemon has hung up and lives lets go of what it
// keeps, which serves nobody any more. Signals to the keeper's process group are the keeper's: the daemon has a group of its
// own, or a SIGINT of the terminal would come to it twice and cut its grace. The keeper reads nothing but frames of its
// child.
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

// Runs this program again and again with these arguments, until it has died `most_deaths` times within kDeathsWithin;
// answers the exit status. REQUIRES: no other thread runs.
int RunKeeper(const std::vector<std::string>& arguments, uint32_t most_deaths);

// In a daemon that a keeper has started: its end of the socket pair. Invalid in all others.
UniqueFd TakeKeeperSocket();

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KEEPER_KEEPER_H_
