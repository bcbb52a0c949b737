// Which file may be started as the daemon that follows this one.
//
// An operator names it, and it runs as the daemon's user: so it is a kvpoold, and nobody but root and that user can have
// put it there, or can change it. A kvpoold is known by a mark in its file, which also says what it can take over, so that
// one that can't is refused before anything has ended.
#ifndef KVPOOL_SERVER_PROGRAM_H_
#define KVPOOL_SERVER_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"
#include "server/space/space_table.h"

namespace kvpool {

struct ProgramNeeds {
  // The tables that it has to read. Those of this build may come to be kept at any time, if anything is.
  std::vector<TableVersion> tables;
};

struct NextProgram {
  UniqueFd file;
  bool takes_place =
      false;  // It takes over locks and listeners (place.h). One of before is kept out by them.
};

// Opens the file to be started by its descriptor. INVALID_ARGUMENT: the path is not absolute. NOT_FOUND: it can't be
// opened. PERMISSION_DENIED: others than root and this process's user own it, or may write to it. FAILED_PRECONDITION: it is
// no kvpoold that this one's keeper can start, or reads another version of the state; the error names both.
absl::StatusOr<NextProgram> OpenProgram(const std::string& path, const ProgramNeeds& needs);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_PROGRAM_H_
