// An engine process of kvpool-bench.
//
//   serve SOCKET SEED SECONDS   requests of 64 blocks, many at once; prints "operations seconds"
//   echo SOCKET FILE ""         a gRPC server that answers every message with the file's bytes
//   open SOCKET BLOCKS MODEL    opens a session that is guaranteed so many blocks of a model's own space, prints "ready",
//                               and waits to be killed
//   flood SOCKET VERB CALLERS   floods the daemon with a verb, as another tenant than the others (flooder.h)
//   probe SOCKET CHAINS ""      for each line that it is told matches one key a millisecond until the next line (prober.h), of so
//                               many chains of the million; prints how many matches, and the ms of the 99th percentile and
//                               of the longest
//   hold SOCKET COUNT SEED      shares 16 blocks, then leases COUNT, fills them, prints "ready", and waits to be killed
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/prefix_hasher.h"
#include "proto/support/check.h"
#include "tests/bench/echo_server.h"
#include "tests/bench/engines.h"
#include "tests/bench/flooder.h"
#include "tests/bench/prober.h"

namespace kvpool::bench {
namespace {

constexpr size_t kRequestsInFlight = 48;
constexpr std::chrono::seconds kWarmup{2};
constexpr size_t kDocuments = 4096;  // Keys are made before the clock runs.

std::vector<PrefixKey> KeysOf(const Session& session, uint32_t seed, size_t blocks) {
  std::vector<uint32_t> tokens(blocks * kTokensPerBlock, seed);
  return PrefixHasher(session.hash_seed()).Chain(tokens, kTokensPerBlock);
}

// A request as an engine serves it: its prefix is asked for when it is added, and when the answer is there the missing blocks
// are leased and sealed, and all are given back.
struct Request {
  const std::vector<PrefixKey>* keys;
  PendingMatch match;
};

// Block operations that the daemon did for the request: keys matched, blocks leased, sealed and given back.
uint64_t Serve(Session* session, Request request) {
  auto hit = request.match.Wait(Patience());
  Check(hit.status());
  const std::vector<PrefixKey>& keys = *request.keys;
  Blocks& cached = hit->groups[0];
  const size_t hits = cached.size();
  const auto missing = static_cast<uint32_t>(keys.size() - hits);
  if (missing == 0) return 2 * keys.size();
  auto blocks = session->LeaseWithin(missing, Patience());
  Check(blocks.status());
  const std::string_view bytes = KeyBytes(keys);
  auto seal = session->Seal(
      {.blocks = blocks->refs(),
       .keys = bytes.substr(hits * sizeof(PrefixKey)),
       .parent_key =
           hits == 0 ? std::string_view() : bytes.substr((hits - 1) * sizeof(PrefixKey), sizeof(PrefixKey))});
  while (absl::IsResourceExhausted(seal.status())) {
    Check(session->Flush(Patience()));
    seal = session->Seal({.blocks = blocks->refs(), .keys = bytes.substr(hits * sizeof(PrefixKey))});
  }
  Check(seal.status());
  return 2 * keys.size() + 2 * missing;
}

int ServeFor(const std::string& socket, uint32_t seed, double seconds) {
  SessionOptions options = EngineOptions(socket);
  options.magazine_blocks = 4096;
  options.guaranteed_blocks = 4096;
  const std::unique_ptr<Session> session = OpenSession(options);
  std::vector<std::vector<PrefixKey>> documents;
  for (size_t i = 0; i < kDocuments; ++i) {
    documents.push_back(KeysOf(*session, static_cast<uint32_t>(seed * kDocuments + i), kRequestBlocks));
  }
  std::mt19937 random(seed);
  std::printf("ready\n");
  std::fflush(stdout);
  std::getchar();
  std::deque<Request> added;
  const auto serve_until = [&](std::chrono::steady_clock::time_point end) {
    uint64_t operations = 0;
    while (std::chrono::steady_clock::now() < end) {
      while (added.size() < kRequestsInFlight) {
        const std::vector<PrefixKey>& keys = documents[random() % documents.size()];
        auto match = session->Match(KeyBytes(keys));
        if (absl::IsResourceExhausted(match.status())) break;
        Check(match.status());
        added.push_back({&keys, *std::move(match)});
      }
      operations += Serve(session.get(), std::move(added.front()));
      added.pop_front();
    }
    Check(session->Flush(Patience()));
    return operations;
  };
  // Uncounted: the space grows, the pool fills.
  serve_until(std::chrono::steady_clock::now() + kWarmup);
  std::printf("counting\n");
  std::fflush(stdout);
  const auto start = std::chrono::steady_clock::now();
  const uint64_t operations = serve_until(
      start + std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
  const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  KVPOOL_CHECK(session->counters().refused == 0, "the daemon refused blocks");
  std::printf("%lu %f\n", operations, taken);
  return 0;
}

int HoldUntilKilled(const std::string& socket, uint32_t count, uint32_t seed) {
  SessionOptions options = EngineOptions(socket);
  options.magazine_blocks = 0;
  const std::unique_ptr<Session> session = OpenSession(options);
  const std::vector<PrefixKey> keys = KeysOf(*session, seed, 16);
  auto shared = session->LeaseWithin(16, Patience());
  Check(shared.status());
  for (size_t i = 0; i < keys.size(); ++i)
    std::memcpy(session->data((*shared)[i]), keys[i].data(), keys[i].size());
  auto seal = session->Seal({.blocks = shared->refs(), .keys = KeyBytes(keys)});
  Check(seal.status());
  Check(seal->Wait(Patience()).status());
  auto held = session->LeaseWithin(count, Patience());
  Check(held.status());
  for (const BlockRef block : held->refs()) std::memset(session->data(block), 0xee, kBlockBytes);
  std::printf("ready\n");
  std::fflush(stdout);
  std::getchar();
  return 0;
}

int OpenUntilKilled(const std::string& socket, uint32_t blocks, const std::string& model) {
  SessionOptions options = EngineOptions(socket);
  options.fingerprint.set_digest(model);
  options.guaranteed_blocks = blocks;
  options.magazine_blocks = 0;
  const std::unique_ptr<Session> session = OpenSession(options);
  std::printf("ready\n");
  std::fflush(stdout);
  std::getchar();
  return 0;
}

int Probe(const std::string& socket, uint64_t chains) {
  // It stands for an engine with processors of its own: its threads wait for none that the daemon computes on. Without the
  // right to that it waits as others do.
  const sched_param first{.sched_priority = 1};
  (void)sched_setscheduler(0, SCHED_FIFO, &first);
  const std::unique_ptr<Session> session = OpenSession(SmallBlocks(socket));
  std::printf("ready\n");
  std::fflush(stdout);
  while (std::getchar() != EOF) {
    Prober prober(session.get(), chains);
    const int told = std::getchar();
    const std::vector<double> ms = prober.Stop();
    if (told == EOF) break;
    std::printf("%zu %f %f\n", ms.size(), Percentile(ms, 0.99), Percentile(ms, 1));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvpool::bench

int main(int argc, char** argv) {
  const std::string verb = argc == 5 ? argv[1] : "";
  if (verb == "serve") {
    return kvpool::bench::ServeFor(argv[2], static_cast<uint32_t>(std::atoi(argv[3])), std::atof(argv[4]));
  }
  if (verb == "hold") {
    return kvpool::bench::HoldUntilKilled(argv[2], static_cast<uint32_t>(std::atoi(argv[3])),
                                          static_cast<uint32_t>(std::atoi(argv[4])));
  }
  if (verb == "open") {
    return kvpool::bench::OpenUntilKilled(argv[2], static_cast<uint32_t>(std::atoi(argv[3])), argv[4]);
  }
  if (verb == "probe") return kvpool::bench::Probe(argv[2], static_cast<uint64_t>(std::atoll(argv[3])));
  if (verb == "flood") return kvpool::bench::Flood(argv[2], argv[3], std::atoi(argv[4]));
  if (verb == "echo") return kvpool::bench::ServeEcho(argv[2], argv[3]);
  std::fprintf(stderr, "bench_engine is started by kvpool-bench\n");
  return 2;
}
