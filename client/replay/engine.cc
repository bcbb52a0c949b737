#include "client/replay/engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/prefix_hasher.h"
#include "client/replay/exact_lru.h"
#include "client/session.h"
#include "cuda/block_stamper.h"
#include "proto/support/status_macros.h"

namespace kvpool::replay {
namespace {

// A daemon that does not answer for so long is stuck.
constexpr auto kStuck = std::chrono::seconds(60);
// How long a request that holds its hits waits for blocks. Two requests that wait for each other's blocks
// both give theirs back after this and begin again.
constexpr auto kLeasePatience = std::chrono::milliseconds(200);
// The pause between looks at the board, or at a pool without room.
constexpr auto kPause = std::chrono::milliseconds(1);

Deadline In(std::chrono::nanoseconds time) { return std::chrono::steady_clock::now() + time; }

class Stopwatch {
 public:
  uint64_t ElapsedNs() const { return static_cast<uint64_t>(SteadyNs() - start_ns_); }

 private:
  const int64_t start_ns_ = SteadyNs();
};

uint64_t Digest(const PrefixKey& key) {
  uint64_t digest;
  std::memcpy(&digest, key.data(), sizeof(digest));
  return digest;
}

absl::StatusOr<std::unique_ptr<BlockStamper>> OpenStamper(const std::string& device) {
  if (device == "host") return MakeHostStamper();
  // "GPU-8-4-4-4-12"
  return OpenCudaStamper(
      std::string(absl::HexStringToBytes(absl::StrReplaceAll(device, {{"GPU-", ""}, {"-", ""}}))));
}

class Engine {
 public:
  Engine(const EngineOptions& options, Board* board, std::unique_ptr<Session> session,
         std::unique_ptr<BlockStamper> stamper)
      : options_(options),
        board_(board),
        slot_(&board->slot(options.engine)),
        session_(std::move(session)),
        stamper_(std::move(stamper)),
        hasher_(session_->hash_seed()) {}

  absl::Status Run(const std::vector<Request>& requests) {
    while (!board_->stopped()) {
      const std::optional<uint32_t> index = board_->Claim(options_.engine);
      if (!index.has_value()) {
        // Another engine may yet be killed, and its request open again.
        if (board_->done() == board_->size().requests) break;
        std::this_thread::sleep_for(kPause);
        continue;
      }
      const Request& request = requests[*index];
      WaitForArrival(request);
      bool served = false;
      while (!served && !board_->stopped()) {
        ASSIGN_OR_RETURN(served, Serve(request, &board_->record(*index)));
        if (!served) {
          slot_->retries.fetch_add(1, std::memory_order_relaxed);
          std::this_thread::sleep_for(kPause);
        }
      }
      if (served) board_->Done(*index);
    }
    slot_->refused.fetch_add(session_->counters().refused, std::memory_order_relaxed);
    return session_->Close(In(kStuck));
  }

 private:
  void WaitForArrival(const Request& request) const {
    if (options_.time_scale == 0) return;
    const auto offset =
        static_cast<int64_t>(static_cast<double>(request.timestamp_ms) * 1e6 * options_.time_scale);
    while (!board_->stopped()) {
      const int64_t left_ns = options_.start_ns + offset - SteadyNs();
      if (left_ns <= 0) return;
      // In pieces, so that a stop is noticed.
      std::this_thread::sleep_for(
          std::min(std::chrono::nanoseconds(left_ns), std::chrono::nanoseconds(kLeasePatience)));
    }
  }

  // False: the pool had no room, nothing is held.
  absl::StatusOr<bool> Serve(const Request& request, RequestRecord* record) {
    const std::vector<PrefixKey> keys = Keys(request);
    ASSIGN_OR_RETURN(MatchHit hit, Match(keys));
    Blocks shared = std::move(hit.groups[0]);
    RETURN_IF_ERROR(Hold(shared.refs(), kSealed));
    RETURN_IF_ERROR(Verify(shared.refs(), keys, "hit"));

    const size_t hits = shared.size();
    const size_t missing = keys.size() - hits;
    const size_t decode = options_.decode ? DecodeBlocks(request) : 0;
    Blocks leased;
    const absl::Status room = Lease(static_cast<uint32_t>(missing + decode), &leased);
    if (absl::IsDeadlineExceeded(room) || absl::IsResourceExhausted(room)) {
      LetGo(shared.refs());
      return false;
    }
    RETURN_IF_ERROR(room);
    RETURN_IF_ERROR(Hold(leased.refs(), kLeased));
    Blocks answer = leased.SplitFrom(missing);
    RETURN_IF_ERROR(Stamp(leased.refs(), absl::MakeSpan(keys).subspan(hits)));

    record->hit_blocks = static_cast<uint32_t>(hits);
    record->deduplicated_blocks = 0;
    if (missing > 0) {
      RETURN_IF_ERROR(SealAndShare(keys, &shared, std::move(leased), record));
    }
    RETURN_IF_ERROR(Verify(shared.refs(), keys, "shared"));
    LetGo(answer.refs());
    LetGo(shared.refs());
    const Stopwatch watch;
    answer.Release();
    shared.Release();
    Count(Verb::kRelease, watch.ElapsedNs());
    return true;
  }

  std::vector<PrefixKey> Keys(const Request& request) const {
    std::vector<PrefixKey> keys;
    keys.reserve(request.hash_ids.size());
    const PrefixKey* parent = &hasher_.root();
    for (const uint64_t id : request.hash_ids) {
      // The trace has ids in place of tokens.
      const uint32_t tokens[] = {static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)};
      keys.push_back(hasher_.Next(*parent, tokens));
      parent = &keys.back();
    }
    return keys;
  }

  absl::StatusOr<MatchHit> Match(const std::vector<PrefixKey>& keys) {
    const Stopwatch watch;
    const GroupKeys group{.keys = KeyBytes(keys), .key_bytes = sizeof(PrefixKey)};
    ASSIGN_OR_RETURN(PendingMatch pending,
                     session_->Match(absl::MakeConstSpan(&group, 1), {.wait_ms = options_.wait_ms}));
    ASSIGN_OR_RETURN(MatchHit hit, pending.Wait(In(kStuck)));
    Count(Verb::kMatch, watch.ElapsedNs());
    if (hit.groups.size() != 1 || hit.groups[0].size() > keys.size()) {
      return absl::InternalError(absl::StrCat("a match of ", keys.size(), " keys in 1 group answered ",
                                              hit.groups.size(), " groups"));
    }
    slot_->late_tokens.fetch_add(hit.below_tokens, std::memory_order_relaxed);
    return hit;
  }

  absl::Status Lease(uint32_t count, Blocks* out) {
    if (count == 0) return absl::OkStatus();
    const Stopwatch watch;
    Verb verb = Verb::kLeaseLocal;
    absl::StatusOr<Blocks> blocks = session_->Lease(count);
    if (absl::IsResourceExhausted(blocks.status())) {
      verb = Verb::kLeaseWait;
      blocks = session_->LeaseWithin(count, In(kLeasePatience));
    }
    RETURN_IF_ERROR(blocks.status());
    Count(verb, watch.ElapsedNs());
    *out = *std::move(blocks);
    return absl::OkStatus();
  }

  // Seals `own`, and appends to `shared` what is then held under the keys: its blocks, or those that were
  // there first.
  absl::Status SealAndShare(const std::vector<PrefixKey>& keys, Blocks* shared, Blocks own,
                            RequestRecord* record) {
    const size_t hits = shared->size();
    std::vector<char> sealed_before;
    for (const PrefixKey& key : absl::MakeSpan(keys).subspan(hits))
      sealed_before.push_back(board_->sealed(Digest(key)));
    // From here on others may hold them, too.
    RETURN_IF_ERROR(Hold(own.refs(), kSealed));
    const Stopwatch watch;
    ASSIGN_OR_RETURN(
        PendingSeal pending,
        session_->Seal({.blocks = own.refs(),
                        .keys = KeyBytes(absl::MakeSpan(keys).subspan(hits)),
                        .parent_key = hits == 0 ? std::string_view()
                                                : KeyBytes(absl::MakeSpan(keys).subspan(hits - 1, 1))}));
    Count(Verb::kSealLocal, watch.ElapsedNs());
    ASSIGN_OR_RETURN(SealOutcome outcome, pending.Wait(In(kStuck)));
    Count(Verb::kSealAnswer, watch.ElapsedNs());
    for (const v1::Refusal& refusal : outcome.refused) {
      // The key's block can't be had yet.
      if (refusal.code() == static_cast<int>(absl::StatusCode::kUnavailable)) continue;
      return absl::InternalError(
          absl::StrCat("seal of block ", Index(own[refusal.index()].id), " refused: ", refusal.message()));
    }
    // They are in sequence order, own and shared ones together, so that the release touches the tail first.
    std::vector<BlockRef> sequence;
    std::vector<BlockRef> unused;
    for (size_t i = 0; i < own.size(); ++i) {
      // What was refused is private, and in its place as well.
      const bool is_private = outcome.canonical[i] == kNullRef;
      sequence.push_back(is_private ? own[i] : outcome.canonical[i]);
      if (is_private) continue;
      if (outcome.canonical[i] == own[i]) {
        if (sealed_before[i]) slot_->sealed_again.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      unused.push_back(own[i]);
      ++record->deduplicated_blocks;
    }
    for (const PrefixKey& key : absl::MakeSpan(keys).subspan(hits)) board_->Sealed(Digest(key));
    LetGo(unused);
    RETURN_IF_ERROR(Hold(sequence, kSealed));
    own.Detach();
    outcome.duplicates.Detach();
    shared->Append(Blocks(session_.get(), sequence));
    session_->Release(unused);
    return absl::OkStatus();
  }

  enum Kind { kSealed, kLeased };

  // Writes down that this engine holds them, and counts those that another one holds.
  absl::Status Hold(absl::Span<const BlockRef> refs, Kind kind) {
    for (const BlockRef& ref : refs) {
      const uint32_t block = Index(ref.id);
      if (block >= board_->size().blocks) {
        return absl::InternalError(absl::StrCat("block ", block, " of a pool that had room for ",
                                                board_->size().blocks, " at the start"));
      }
      if (kind == kLeased ? board_->HoldLeased(options_.engine, block)
                          : board_->HoldSealed(options_.engine, block))
        continue;
      slot_->double_owners.fetch_add(1, std::memory_order_relaxed);
      std::fprintf(stderr,
                   "DOUBLE OWNER: engine %u (pid %d): %s block %u generation %u is held by another engine\n",
                   options_.engine, getpid(), kind == kLeased ? "leased" : "sealed", block, ref.generation);
    }
    return absl::OkStatus();
  }

  // Before they are released: after that they may be another's.
  void LetGo(absl::Span<const BlockRef> refs) {
    for (const BlockRef& ref : refs) board_->LetGo(options_.engine, Index(ref.id));
  }

  std::vector<StampedBlock> Stamped(absl::Span<const BlockRef> refs, absl::Span<const PrefixKey> keys) const {
    std::vector<StampedBlock> blocks;
    blocks.reserve(refs.size());
    for (size_t i = 0; i < refs.size(); ++i) {
      blocks.push_back({.address = session_->address(refs[i].id),
                        .key_digest = Digest(keys[i]),
                        // What came from a tier was stamped in another block.
                        .block_ref = options_.wait_ms > 0 ? 0 : refs[i].Pack()});
    }
    return blocks;
  }

  absl::Status Stamp(absl::Span<const BlockRef> refs, absl::Span<const PrefixKey> keys) {
    return stamper_->Write(Stamped(refs, keys), options_.layout.block_bytes());
  }

  absl::Status Verify(absl::Span<const BlockRef> refs, absl::Span<const PrefixKey> keys, const char* when) {
    ASSIGN_OR_RETURN(const std::vector<uint64_t> wrong,
                     stamper_->Verify(Stamped(refs, keys), options_.layout.block_bytes()));
    slot_->checked_blocks.fetch_add(refs.size(), std::memory_order_relaxed);
    for (size_t i = 0; i < wrong.size(); ++i) {
      if (wrong[i] == 0) continue;
      slot_->corrupt_blocks.fetch_add(1, std::memory_order_relaxed);
      std::fprintf(stderr,
                   "CORRUPTION: engine %u (pid %d): %s block %u generation %u has %llu wrong words of %llu\n",
                   options_.engine, getpid(), when, Index(refs[i].id), refs[i].generation,
                   static_cast<unsigned long long>(wrong[i]),
                   static_cast<unsigned long long>(options_.layout.block_bytes() / 8));
    }
    return absl::OkStatus();
  }

  void Count(Verb verb, uint64_t ns) { slot_->verbs[static_cast<size_t>(verb)].Add(ns); }

  const EngineOptions& options_;
  Board* const board_;
  EngineSlot* const slot_;
  const std::unique_ptr<Session> session_;
  const std::unique_ptr<BlockStamper> stamper_;
  const PrefixHasher hasher_;
};

// A daemon that ends while the session is being opened ends that, too.
absl::StatusOr<std::unique_ptr<Session>> OpenSession(const SessionOptions& options, bool awaits_daemon) {
  const Deadline give_up = In(kStuck);
  while (true) {
    absl::StatusOr<std::unique_ptr<Session>> session = Session::Open(options);
    if (session.ok() || !awaits_daemon || std::chrono::steady_clock::now() >= give_up) return session;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

int64_t SteadyNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

absl::Status RunEngine(const EngineOptions& options, const std::vector<Request>& requests, Board* board) {
  SessionOptions session_options;
  session_options.socket = options.socket;
  session_options.client_name = absl::StrCat("kvpool-replay engine ", options.engine);
  session_options.layout = options.layout;
  session_options.fingerprint.set_digest(options.run);
  (*session_options.fingerprint.mutable_facts())["made by"] = "kvpool-replay";
  session_options.magazine_blocks = options.magazine_blocks;
  // Blocks are stamped and verified while they are held, by calls that return when it is done.
  session_options.give_back = GiveBack::kAnyTime;
  ASSIGN_OR_RETURN(std::unique_ptr<Session> session, OpenSession(session_options, options.awaits_daemon));
  ASSIGN_OR_RETURN(std::unique_ptr<BlockStamper> stamper, OpenStamper(options.device));
  board->slot(options.engine).sessions.fetch_add(1, std::memory_order_relaxed);
  return Engine(options, board, std::move(session), std::move(stamper)).Run(requests);
}

}  // namespace kvpool::replay
