#include "server/program.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/support/status_macros.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {
namespace {

struct Mark {
  char magic[24];
  uint32_t keeper_version;
  uint32_t state_version;
  uint32_t
      oldest_state_read;  // Programs of state version 5 and before end without it, and read their own alone.
  char takes_place[8];    // Something else where the program does not.
};
constexpr std::string_view kTakesPlace = "+ place.";
constexpr uint32_t kFirstStateWithOldest = 6;
// It lies in the file as it is here.
[[gnu::used]] constexpr Mark kMark = {"kvpoold takes over from",
                                      kKeeperVersion,
                                      kSpaceTableVersion,
                                      kOldestTableRead,
                                      {'+', ' ', 'p', 'l', 'a', 'c', 'e', '.'}};
static_assert(std::string_view(kMark.takes_place, sizeof(kMark.takes_place)) == kTakesPlace);

constexpr size_t kPieceBytes = 1 << 20;

absl::Status Cannot(const std::string& path, const char* doing, int error) {
  return absl::NotFoundError(absl::StrCat(path, ": cannot ", doing, " it: ", strerror(error)));
}

// The mark in the file, if it has one.
absl::StatusOr<std::optional<Mark>> FindMark(const std::string& path, int file) {
  const std::string_view magic(kMark.magic, sizeof(kMark.magic));
  std::vector<char> bytes;
  for (off_t at = 0;;) {
    // Two pieces overlap by a mark, which may lie across their border.
    const size_t left = std::min(bytes.size(), sizeof(Mark) - 1);
    std::vector<char> piece(left + kPieceBytes);
    std::copy(bytes.end() - static_cast<ptrdiff_t>(left), bytes.end(), piece.begin());
    const ssize_t read = pread(file, piece.data() + left, kPieceBytes, at);
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return Cannot(path, "read", errno);
    if (read == 0) return std::nullopt;
    at += read;
    piece.resize(left + static_cast<size_t>(read));
    bytes.swap(piece);
    const std::string_view text(bytes.data(), bytes.size());
    const size_t found = text.find(magic);
    if (found == std::string_view::npos || found + sizeof(Mark) > text.size()) continue;
    Mark mark;
    memcpy(&mark, text.data() + found, sizeof(mark));
    return mark;
  }
}

}  // namespace

absl::StatusOr<NextProgram> OpenProgram(const std::string& path, const ProgramNeeds& needs) {
  if (path.empty() || path[0] != '/' || path.find('\0') != std::string::npos)
    return absl::InvalidArgumentError(absl::StrCat("binary is \"", path, "\"; must be an absolute path"));
  // A pipe without a writer would be waited for.
  UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return Cannot(path, "open", errno);
  struct stat facts;
  if (fstat(file.get(), &facts) != 0) return Cannot(path, "look at", errno);
  if (!S_ISREG(facts.st_mode) || (facts.st_mode & 0111) == 0)
    return absl::FailedPreconditionError(absl::StrCat(path, " is no executable file"));
  if (facts.st_uid != 0 && facts.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(path, " belongs to uid ", facts.st_uid,
                                                    "; must be root's, or uid ", geteuid(),
                                                    "'s, as which the daemon runs"));
  }
  if ((facts.st_mode & 022) != 0) {
    return absl::PermissionDeniedError(
        absl::StrFormat("%s has mode %04o: others may write to it", path, facts.st_mode & 07777));
  }
  ASSIGN_OR_RETURN(const std::optional<Mark> mark, FindMark(path, file.get()));
  if (!mark.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is no kvpoold, or one of before there were upgrades"));
  }
  if (mark->keeper_version != kKeeperVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, " speaks version ", mark->keeper_version,
                                                      " with its keeper; the one that runs speaks ",
                                                      kKeeperVersion, ": a restart is needed"));
  }
  const uint32_t oldest =
      mark->state_version < kFirstStateWithOldest ? mark->state_version : mark->oldest_state_read;
  for (const TableVersion& table : needs.tables) {
    if (ReadsTable(mark->state_version, oldest, table.version, table.oldest_reader)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(path, " reads versions ", oldest, " to ", mark->state_version,
                     " of the state; what is kept has version ", table.version,
                     ". A cold upgrade starts it without that, and all sessions end"));
  }
  return NextProgram{
      .file = std::move(file),
      .takes_place = std::string_view(mark->takes_place, sizeof(mark->takes_place)) == kTakesPlace};
}

}  // namespace kvpool
