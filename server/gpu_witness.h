// Whether the memory of a GPU outlives the process that made it, and nothing writes to it once that process has ended: what a
// keeper relies on, and no documentation of CUDA promises. So it is tried, with a process that is killed for it.
//
//   the daemon   starts its own program again, as the witness
//   the witness  makes two pieces of memory, writes one, hands both over, and writes the other again and again, by kernels and by
//                copies from host memory
//   the daemon   kills it, waits for its end, writes the second piece itself at once, and looks whether both stay as they are
#ifndef KVPOOL_SERVER_GPU_WITNESS_H_
#define KVPOOL_SERVER_GPU_WITNESS_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "cuda/device.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// Takes as long as it takes to open the GPU once more and to give that up again, and 120 ms; at most some 20 s for each step of
// the witness's. REQUIRES: `gpu` is one. DATA_LOSS: one of the pieces has changed, or the GPU is lost (IsSticky). Other
// errors: there was no witness, or its memory can't be had; nothing is known then.
absl::Status ProveThatMemoryOutlives(Device* gpu);

// What a process has that was started as the witness.
struct WitnessPart {
  UniqueFd socket;
  std::string device;
};
std::optional<WitnessPart> TakeWitnessPart();
// The rest of that process's life: it is killed, or ends with the daemon. Answers its exit status.
int BearWitness(const WitnessPart& part);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_GPU_WITNESS_H_
