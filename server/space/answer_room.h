// How much larger than what it names an answer may be. Nearly all results have some bytes for each block or key that their verb
// names, and a batch names at most kMaxNames. The table of an episode and a plan of budgets have as many as they have, so
// that all of them in one answer have a bound of their own; one that is beyond it is not looked up or made.
#ifndef KVPOOL_SERVER_SPACE_ANSWER_ROOM_H_
#define KVPOOL_SERVER_SPACE_ANSWER_ROOM_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvpool {

class AnswerRoom {
 public:
  // The largest table has half of it. With what is answered to 65,536 names it stays below gRPC's 4 MiB.
  static constexpr size_t kMaxBytes = 1 << 20;

  AnswerRoom() = default;
  // Of an operation whose result is a completion: so many bytes have not been acknowledged.
  static AnswerRoom OfCompletions(size_t bytes, size_t limit) {
    return AnswerRoom(bytes, limit, "of completions that have not been acknowledged");
  }

  // RESOURCE_EXHAUSTED: a result of so many bytes is beyond the bound, and takes nothing of it.
  absl::Status Take(const char* what, size_t bytes) {
    if (taken_ <= limit_ && bytes <= limit_ - taken_) {
      taken_ += bytes;
      return absl::OkStatus();
    }
    return absl::ResourceExhaustedError(absl::StrCat(what, ": a result of ", bytes, " bytes beside ", taken_,
                                                     " ", beside_, "; limit ", limit_));
  }

 private:
  AnswerRoom(size_t taken, size_t limit, const char* beside)
      : taken_(taken), limit_(limit), beside_(beside) {}

  size_t taken_ = 0, limit_ = kMaxBytes;
  const char* beside_ = "of others in the same answer";
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_ANSWER_ROOM_H_
