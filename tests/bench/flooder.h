// The tenant that floods a daemon: what `bench_engine flood` does.
#ifndef KVPOOL_TESTS_BENCH_FLOODER_H_
#define KVPOOL_TESTS_BENCH_FLOODER_H_

#include <string>

namespace kvpool::bench {

// Prints "ready", floods until it is told something, and then prints how many verbs were answered. `flood` is a verb of VerbRows(),
// or "large touch": batches that name very many blocks. `callers` streams have up to 8 batches of 64 verbs under way each;
// openings, closings and AddMember come as calls, one at a time of each caller.
int Flood(const std::string& socket, const std::string& flood, int callers);

}  // namespace kvpool::bench

#endif  // KVPOOL_TESTS_BENCH_FLOODER_H_
