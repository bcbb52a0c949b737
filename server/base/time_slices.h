// How long a thread of this process may compute before others on its processor get their turn.
#ifndef KVPOOL_SERVER_BASE_TIME_SLICES_H_
#define KVPOOL_SERVER_BASE_TIME_SLICES_H_

namespace kvpool {

enum class Slices {
  kShort,     // They are for all threads: one leaves sooner than the kernel's default of some ms.
  kShortest,  // They are for those that serve verbs: when one wakes, a thread of short slices makes way at once.
};

// Asks the scheduler for such slices, for this thread and those that it starts. A thread that asks for less at a time is served
// sooner when it wakes, and leaves sooner: a verb waits less for a processor on which a scrape or an opening computes, and
// engines beside the daemon wait less for theirs. A kernel before 6.12 lets a thread ask and does nothing; where the
// request is refused, or the process has a scheduling policy of another kind, all stays as it was.
void AskFor(Slices slices);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_TIME_SLICES_H_
