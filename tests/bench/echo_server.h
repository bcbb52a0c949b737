#ifndef KVPOOL_TESTS_BENCH_ECHO_SERVER_H_
#define KVPOOL_TESTS_BENCH_ECHO_SERVER_H_

#include <string>

namespace kvpool::bench {

// What gRPC alone costs: an async server on one thread that answers each message of its stream with the bytes given, whatever
// it says. Prints "ready" and serves until it is killed.
int ServeEcho(const std::string& socket, const std::string& answer_file);

}  // namespace kvpool::bench

#endif  // KVPOOL_TESTS_BENCH_ECHO_SERVER_H_
