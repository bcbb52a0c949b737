#include "client/session/session_rep.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "client/blocks.h"
#include "proto/support/default_socket.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

constexpr size_t kTokenBytes = 16;
// The pause between two attempts at a lease that pressure left short: nothing tells when another session
// releases.
constexpr std::chrono::milliseconds kLeaseRetry{2};

std::atomic<uint64_t> fork_count{0};

// An invitation is the session's id, 8 bytes little-endian, and the member token of whoever invites.
absl::Status ReadInvitation(std::string_view invitation, uint64_t* session, std::string* token) {
  if (invitation.size() != sizeof(uint64_t) + kTokenBytes) {
    return absl::InvalidArgumentError(absl::StrCat("invitation has ", invitation.size(), " bytes, not ",
                                                   sizeof(uint64_t) + kTokenBytes,
                                                   ": it is made by Session::Invitation"));
  }
  *session = 0;
  for (size_t i = 0; i < sizeof(uint64_t); ++i) {
    *session |= uint64_t{static_cast<uint8_t>(invitation[i])} << (8 * i);
  }
  *token = invitation.substr(sizeof(uint64_t));
  return absl::OkStatus();
}

template <typename Result>
Attachment::Geometry GeometryOf(const Result& result, bool warmup) {
  return {.block_stride_bytes = result.block_stride_bytes(),
          .max_blocks = result.max_blocks(),
          .slab_bytes = result.slab_bytes(),
          .warmup = warmup};
}

}  // namespace

uint64_t ForkCount() { return fork_count.load(std::memory_order_relaxed); }

absl::StatusOr<std::unique_ptr<SessionRep>> SessionRep::Open(const SessionOptions& options,
                                                             std::string_view invitation) {
  static std::once_flag watched;
  std::call_once(watched, [] {
    pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  });
  if (options.magazine_blocks > kMaxNames) {
    return absl::InvalidArgumentError(
        absl::StrCat("magazine_blocks ", options.magazine_blocks, " is above ", kMaxNames));
  }
  auto rep = std::make_unique<SessionRep>();
  rep->options = options;
  rep->joined = !invitation.empty();
  RETURN_IF_ERROR(rep->OpenOn(invitation, std::chrono::steady_clock::now() + options.open_timeout));
  return rep;
}

absl::Status SessionRep::OpenOn(std::string_view invitation, Deadline deadline) {
  const std::string socket = options.socket.empty() ? DefaultSocket(SocketUser::kClient) : options.socket;
  ASSIGN_OR_RETURN(attachment, Attachment::Connect({.socket = socket,
                                                    .client_name = options.client_name,
                                                    .give_back = options.give_back,
                                                    .holes = options.takes_holes()},
                                                   deadline));
  stream = std::make_unique<StepStream>(socket);
  Attachment::Geometry geometry;
  uint64_t epoch = 0;
  if (joined) {
    v1::AddMember request;
    request.set_attach_token(attachment->token());
    std::string token;
    RETURN_IF_ERROR(ReadInvitation(invitation, &session_id, &token));
    request.set_session(session_id);
    request.set_invitation(token);
    *request.mutable_role() = options.role;
    *request.mutable_layout() = options.layout;
    *request.mutable_fingerprint() = options.fingerprint;
    ASSIGN_OR_RETURN(const v1::AddMemberResult result, stream->AddMember(request, deadline));
    member_token = result.member_token();
    hash_seed = result.hash_seed();
    epoch = result.daemon_epoch();
    geometry = GeometryOf(result, options.warmup);
  } else {
    v1::OpenSession request;
    request.set_attach_token(attachment->token());
    *request.mutable_role() = options.role;
    request.set_tenant(options.tenant);
    request.set_client_name(options.client_name);
    *request.mutable_layout() = options.layout;
    *request.mutable_fingerprint() = options.fingerprint;
    request.set_ranks(options.ranks);
    for (const std::string& uuid : options.device_uuids) request.add_device_uuids(uuid);
    request.set_kind(options.kind);
    request.set_max_space_bytes(options.max_space_bytes);
    request.set_guaranteed_blocks(options.guaranteed_blocks);
    request.set_max_blocks(options.max_blocks);
    request.set_warmup(options.warmup);
    request.set_priority_class(options.priority_class);
    ASSIGN_OR_RETURN(const v1::OpenSessionResult result, stream->OpenSession(request, deadline));
    session_id = result.session();
    member_token = result.member_token();
    hash_seed = result.hash_seed();
    epoch = result.daemon_epoch();
    state.sink.store(result.sink_block());
    geometry = GeometryOf(result, options.warmup);
  }
  if (epoch != attachment->daemon_epoch()) {
    return absl::UnavailableError(
        absl::StrCat("the daemon was restarted while the session was opened (epoch ",
                     attachment->daemon_epoch(), ", now ", epoch, "): open it again"));
  }
  block_stride_bytes = geometry.block_stride_bytes;
  max_blocks = geometry.max_blocks;
  geometry.scheduler = options.role.scheduler();
  sole_member = !joined && options.ranks <= 1 && !options.role.scheduler();
  attachment->Start(geometry, member_token, &state, [this] { stream->OnDaemonChange(); });
  RETURN_IF_ERROR(AwaitMemory(deadline));

  magazine = std::make_unique<Magazine>(max_blocks, joined ? 0 : options.magazine_blocks);
  batches = std::make_unique<StepBatches>(StepBatches::Parts{.commands = &commands,
                                                             .magazine = magazine.get(),
                                                             .state = &state,
                                                             .on_notice = options.on_notice,
                                                             .member_token = member_token});
  stream->Start(batches.get(), &state);
  return AwaitReady(deadline);
}

// Waits until a rank has its first slab mapped, and a session of one member can use it. Where other members
// are still to come, blocks turn usable when these have mapped them; LeaseWithin waits for that.
absl::Status SessionRep::AwaitMemory(Deadline deadline) {
  if (options.role.scheduler()) return absl::OkStatus();
  const bool there = state.signal.Await(deadline, [this] {
    if (!state.open.load(std::memory_order_seq_cst)) return true;
    return state.mapped_slabs.load(std::memory_order_seq_cst) > 0 &&
           (!sole_member || state.capacity_blocks.load(std::memory_order_seq_cst) > 0);
  });
  RETURN_IF_ERROR(state.status());
  if (there) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("no memory after ", options.open_timeout.count(),
                                                  " ms: ", state.mapped_slabs.load(), " slabs mapped, ",
                                                  state.capacity_blocks.load(), " blocks usable"));
}

// The first lease succeeds when the session has mapped all slabs: from then on it has a sink block, and Match
// looks up.
absl::Status SessionRep::AwaitReady(Deadline deadline) {
  if (!sole_member || options.warmup) return absl::OkStatus();
  const uint32_t keep = std::min(options.guaranteed_blocks, std::max(1u, options.magazine_blocks));
  while (true) {
    const uint64_t refills = state.refills_answered.load(std::memory_order_seq_cst);
    const uint32_t stock = magazine->stock();
    if (state.sink.load(std::memory_order_acquire) != 0 && stock >= keep) return absl::OkStatus();
    magazine->Ask(std::max(1u, keep));
    stream->Wake(StepStream::Urgency::kNow);
    const bool in_time = AwaitRefill(refills, deadline);
    RETURN_IF_ERROR(state.status());
    if (!in_time) {
      return absl::DeadlineExceededError(
          absl::StrCat(options.guaranteed_blocks, " blocks are guaranteed, but after ",
                       options.open_timeout.count(), " ms only ", stock, " of the first ", keep,
                       " could be leased, for ", v1::Shortfall_Name(state.shortfall.load())));
    }
  }
}

absl::Status SessionRep::status() const {
  if (forked()) {
    return absl::FailedPreconditionError(
        "this process is a fork of the one that opened the session: it has neither its memory nor its "
        "threads");
  }
  if (state.closing.load(std::memory_order_acquire) && state.open.load(std::memory_order_acquire)) {
    return absl::FailedPreconditionError("the session is being closed");
  }
  return state.status();
}

uint32_t SessionRep::most_leased_blocks() const {
  const uint32_t all = max_blocks - std::min(max_blocks, 2u);  // Neither the null block nor the sink.
  return joined || options.max_blocks == 0 ? all : std::min(all, options.max_blocks);
}

absl::Status SessionRep::CheckLease(size_t count) const {
  if (count <= most_leased_blocks()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(count, " blocks asked; this session can never have more than ", most_leased_blocks()));
}

uint64_t SessionRep::FenceOf(uint64_t after) const {
  const uint64_t step = after == kCurrentStep ? current_step : after;
  const uint64_t passed = sole_member ? state.completed_step.load(std::memory_order_acquire)
                                      : state.passed_step.load(std::memory_order_acquire);
  return step <= passed ? 0 : step;
}

bool SessionRep::DrainOverflow() {
  if (overflow.empty()) return true;
  size_t sent = 0;
  while (sent < overflow.size()) {
    Command* command = commands.Vacant();
    if (command == nullptr) break;
    command->verb = overflow[sent].verb;
    command->after = overflow[sent].after;
    command->hint = overflow[sent].hint;
    command->blocks = std::move(overflow[sent].refs);
    command->groups.clear();
    commands.Publish();
    ++sent;
  }
  overflow.erase(overflow.begin(), overflow.begin() + static_cast<ptrdiff_t>(sent));
  stream->Wake(StepStream::Urgency::kNow);
  return overflow.empty();
}

absl::StatusOr<Command*> SessionRep::NewCommand(Command::Verb verb) {
  RETURN_IF_ERROR(status());
  Command* command = DrainOverflow() ? commands.Vacant() : nullptr;
  if (command == nullptr) {
    stream->Wake(StepStream::Urgency::kNow);
    return absl::ResourceExhaustedError(
        absl::StrCat(CommandRing::kCommands, " calls are queued already: the daemon has not taken them"));
  }
  command->verb = verb;
  command->after = 0;
  command->blocks.clear();
  command->groups.clear();
  command->keys.clear();
  command->parent_key.clear();
  command->operation.reset();
  return command;
}

void SessionRep::Send(StepStream::Urgency urgency) {
  commands.Publish();
  // kSoon is enough only while there is room.
  if (commands.size() > CommandRing::kCommands / 2) urgency = StepStream::Urgency::kNow;
  stream->Wake(urgency);
}

void SessionRep::Queue(Command::Verb verb, absl::Span<const BlockRef> refs, uint64_t after,
                       const ReleaseHint& hint) {
  // A command fits in half a batch.
  constexpr size_t kPart = StepBatches::kBatchNames / 2;
  for (size_t from = 0; from < refs.size(); from += kPart) {
    const absl::Span<const BlockRef> part = refs.subspan(from, kPart);
    Command* command = DrainOverflow() ? commands.Vacant() : nullptr;
    if (command != nullptr) {
      command->verb = verb;
      command->after = after;
      command->hint = hint;
      command->blocks.assign(part.begin(), part.end());
      command->groups.clear();
      Send(StepStream::Urgency::kSoon);
      continue;
    }
    if (overflow.empty() || overflow.back().verb != verb || overflow.back().after != after ||
        !(overflow.back().hint == hint) || overflow.back().refs.size() + part.size() > kPart) {
      overflow.push_back({.verb = verb, .after = after, .hint = hint, .refs = {}});
    }
    overflow.back().refs.insert(overflow.back().refs.end(), part.begin(), part.end());
    stream->Wake(StepStream::Urgency::kNow);
  }
}

void SessionRep::Release(absl::Span<const BlockRef> blocks, uint64_t after, const ReleaseHint& hint) {
  if (!usable()) return;
  const uint64_t fence = FenceOf(after);
  scratch.clear();
  const Magazine::PutOutcome put = magazine->Put(blocks, fence != 0, &scratch);
  if (put.refused > 0) {
    state.refused.fetch_add(put.refused, std::memory_order_relaxed);
    state.refusals.Add({.verb = "release",
                        .blocks = put.refused,
                        .status = absl::FailedPreconditionError("this member has released them already")});
  }
  if (put.surplus) stream->Wake(StepStream::Urgency::kSoon);
  if (!scratch.empty()) Queue(Command::Verb::kRelease, scratch, fence, hint);
}

std::shared_ptr<AnswerState> SessionRep::NewAnswer(Session* session) {
  auto answer = std::make_shared<AnswerState>();
  answer->session = session;
  answer->rep = this;
  return answer;
}

// A fork has neither the stream's thread nor a right to its bytes.
bool SessionRep::Await(Deadline deadline, absl::FunctionRef<bool()> done) {
  return forked() ? state.signal.Await(deadline, done) : stream->Await(deadline, done);
}

absl::Status SessionRep::Await(const AnswerState& answer, Deadline deadline) {
  if (Await(deadline, [&] { return answer.ready(); })) return answer.status;
  return absl::DeadlineExceededError("no answer from the daemon in time");
}

bool SessionRep::AwaitRefill(uint64_t refills_before, Deadline deadline) {
  const auto answered = [&] {
    return state.refills_answered.load(std::memory_order_seq_cst) != refills_before ||
           !state.open.load(std::memory_order_seq_cst);
  };
  if (!Await(deadline, answered)) return false;
  if (state.shortfall.load(std::memory_order_relaxed) != v1::SHORTFALL_NONE) {
    const uint32_t capacity = state.capacity_blocks.load(std::memory_order_seq_cst);
    state.signal.Await(std::min(deadline, std::chrono::steady_clock::now() + kLeaseRetry), [&] {
      return state.capacity_blocks.load(std::memory_order_seq_cst) != capacity ||
             !state.open.load(std::memory_order_seq_cst);
    });
  }
  return std::chrono::steady_clock::now() < deadline;
}

absl::Status SessionRep::Shortage(uint32_t count, uint32_t stock) const {
  return absl::ResourceExhaustedError(absl::StrCat(
      count, " blocks asked, ", stock, " in the magazine, ", state.credit.load(std::memory_order_relaxed),
      " more guaranteed; the last refill ended with ",
      v1::Shortfall_Name(state.shortfall.load(std::memory_order_relaxed))));
}

}  // namespace kvpool
