#include "client/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/session/session_rep.h"
#include "proto/support/check.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

// How long a session that is destroyed waits for the daemon to close it. Then it hangs up, which
// has the same effect.
constexpr std::chrono::seconds kCloseTimeout{5};

// A command is at most half a batch: see StepBatches.
constexpr size_t kCommandNames = StepBatches::kBatchNames / 2;

absl::Status CheckNames(const char* field, size_t names) {
  if (names > 0 && names <= kCommandNames) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", names, " blocks and keys, where 1 to ", kCommandNames, " are allowed"));
}

absl::Status CheckKeyBytes(uint32_t key_bytes) {
  if (key_bytes >= 1 && key_bytes <= kMaxKeyBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("key_bytes: ", key_bytes, ", where 1 to ", kMaxKeyBytes, " are allowed"));
}

// Nobody waits for the answers of Pin and SetRetention: a time or priority that the daemon would refuse is refused
// here, where the caller hears it.
absl::Status CheckTime(const char* field, std::chrono::milliseconds time, int64_t least_ms) {
  if (time.count() >= least_ms && time <= Session::kMaxTtl) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", time.count(), " ms; must be ", least_ms, " to ", Session::kMaxTtl.count()));
}

}  // namespace

// ---------------------------------------------------------------------------------------------- opening

Session::Session(std::unique_ptr<Rep> rep) : rep_(std::move(rep)) {}

absl::StatusOr<std::unique_ptr<Session>> Session::Open(const SessionOptions& options) {
  ASSIGN_OR_RETURN(auto rep, Rep::Open(options, {}));
  return std::unique_ptr<Session>(new Session(std::move(rep)));
}

absl::StatusOr<std::unique_ptr<Session>> Session::Join(const SessionOptions& options,
                                                       std::string_view invitation) {
  if (invitation.empty())
    return absl::InvalidArgumentError("invitation is empty: it is made by Session::Invitation");
  ASSIGN_OR_RETURN(auto rep, Rep::Open(options, invitation));
  return std::unique_ptr<Session>(new Session(std::move(rep)));
}

Session::~Session() {
  if (rep_->forked()) {
    // The threads to join, and the locks that they held, exist in the parent only.
    static_cast<void>(rep_.release());
    return;
  }
  const bool idle = rep_->current_step <= rep_->state.completed_step.load(std::memory_order_acquire);
  // Only a sole member knows that the whole session is idle: others may have work on the device, so there the
  // daemon waits for their pidfds after the hang-up. If Close fails, hanging up does what it would have done.
  if (idle && rep_->sole_member) Close(std::chrono::steady_clock::now() + kCloseTimeout).IgnoreError();
}

absl::Status Session::Close(Deadline deadline) {
  SessionState& state = rep_->state;
  if (state.closed.load(std::memory_order_acquire)) return absl::OkStatus();
  if (rep_->forked()) return rep_->status();
  if (rep_->close == nullptr) {
    ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kClose));
    rep_->close = command->answer = rep_->NewAnswer(this);
    // Before it is sent, as it can't be taken back.
    state.closing.store(true, std::memory_order_release);
    rep_->Send(StepStream::Urgency::kAwaited);
  }
  const absl::Status answered = rep_->Await(*rep_->close, deadline);
  // The session may be over without an answer: the attach socket has reported its end first, or a daemon that is gone has
  // closed it, and the next one does not know it.
  if (!answered.ok() && state.open.load(std::memory_order_acquire)) {
    if (absl::IsDeadlineExceeded(answered)) return answered;
    rep_->close.reset();
    state.closing.store(false, std::memory_order_release);
    return answered;
  }
  state.closed.store(true, std::memory_order_release);
  state.End(absl::AbortedError("the session was closed"));
  rep_->stream->Wake(StepStream::Urgency::kNow);
  return absl::OkStatus();
}

void Session::Dismantle() {
  if (rep_->forked()) return;
  rep_->state.End(absl::AbortedError("the session was closed"));
  rep_->fences.reset();
  rep_->attachment->Unmap();
  rep_->stream->Stop();
}

// ---------------------------------------------------------------------------------------------- properties

uint64_t Session::id() const { return rep_->session_id; }
const std::string& Session::hash_seed() const { return rep_->hash_seed; }
const v1::Layout& Session::layout() const { return rep_->options.layout; }
uint64_t Session::block_stride_bytes() const { return rep_->block_stride_bytes; }
uint32_t Session::max_blocks() const { return rep_->max_blocks; }
uint32_t Session::most_leased_blocks() const { return rep_->most_leased_blocks(); }
absl::Status Session::status() const { return rep_->status(); }
uint32_t Session::capacity_blocks() const {
  return rep_->state.capacity_blocks.load(std::memory_order_acquire);
}
uint32_t Session::mapped_blocks() const { return rep_->state.mapped_blocks.load(std::memory_order_acquire); }
std::vector<std::pair<uint32_t, uint32_t>> Session::mapped_ranges() const {
  std::vector<std::pair<uint32_t, uint32_t>> ranges;
  for (const MappedRange& range : rep_->state.mapped_ranges()) ranges.emplace_back(range.first, range.end);
  return ranges;
}
bool Session::is_mapped(BlockId block) const { return rep_->state.is_mapped(Index(block)); }
uint32_t Session::slabs_asked_back() const {
  return rep_->state.slabs_asked_back.load(std::memory_order_acquire);
}
std::optional<std::chrono::milliseconds> Session::asked_back_within() const {
  if (slabs_asked_back() == 0) return std::nullopt;
  const auto until = rep_->state.asked_back_until.load(std::memory_order_relaxed);
  if (until == SessionState::Time::max()) return std::nullopt;
  const auto left = until - std::chrono::steady_clock::now();
  return std::max(std::chrono::milliseconds(0), std::chrono::duration_cast<std::chrono::milliseconds>(left));
}
bool Session::under_pressure() const { return rep_->state.pressure.load(std::memory_order_acquire); }
bool Session::draining() const { return rep_->state.draining.load(std::memory_order_acquire); }
uint64_t Session::base() const { return rep_->attachment->base(); }

std::string Session::device_uuid() const {
  return base() == 0 ? std::string() : rep_->attachment->device_uuid();
}

BlockRef Session::sink_block() const {
  return BlockRef::Unpack(rep_->state.sink.load(std::memory_order_acquire));
}

std::string Session::Invitation() const {
  std::string invitation;
  for (size_t i = 0; i < sizeof(uint64_t); ++i) {
    invitation.push_back(static_cast<char>(rep_->session_id >> (8 * i)));
  }
  return invitation + rep_->member_token;
}

SessionCounters Session::counters() const {
  const SessionState& state = rep_->state;
  return {.batches = state.batches.load(std::memory_order_relaxed),
          .operations = state.operations.load(std::memory_order_relaxed),
          .blocks = state.blocks.load(std::memory_order_relaxed),
          .leased = state.leased.load(std::memory_order_relaxed),
          .refills = state.refills_answered.load(std::memory_order_relaxed),
          .refused = state.refused.load(std::memory_order_relaxed),
          .reconnects = state.reconnects.load(std::memory_order_relaxed)};
}

absl::Status Session::FinishWarmup() {
  RETURN_IF_ERROR(rep_->status());
  RETURN_IF_ERROR(rep_->attachment->FinishWarmup());
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kWarmupDone));
  const std::shared_ptr<AnswerState> answer = rep_->NewAnswer(this);
  command->answer = answer;
  rep_->Send(StepStream::Urgency::kAwaited);
  const Deadline deadline = std::chrono::steady_clock::now() + rep_->options.open_timeout;
  RETURN_IF_ERROR(rep_->Await(*answer, deadline));
  rep_->options.warmup = false;
  return rep_->AwaitReady(deadline);
}

absl::StatusOr<uint64_t> Session::GiveBackSlabs() {
  RETURN_IF_ERROR(rep_->status());
  return rep_->attachment->GiveBackSlabs();
}

// ---------------------------------------------------------------------------------------------- steps

uint64_t Session::BeginStep() {
  if (rep_->usable()) rep_->DrainOverflow();
  return ++rep_->current_step;
}
void Session::BeginStep(uint64_t step) { rep_->current_step = std::max(rep_->current_step, step); }
uint64_t Session::current_step() const { return rep_->current_step; }

uint64_t Session::passed_step() const {
  const SessionState& state = rep_->state;
  return (rep_->sole_member ? state.completed_step : state.passed_step).load(std::memory_order_acquire);
}

void Session::CompleteStep(uint64_t step) {
  std::atomic<uint64_t>& completed = rep_->state.completed_step;
  uint64_t before = completed.load(std::memory_order_relaxed);
  while (before < step && !completed.compare_exchange_weak(before, step, std::memory_order_seq_cst)) {
  }
  if (before < step && rep_->usable()) rep_->stream->Wake(StepStream::Urgency::kSoon);
}

absl::Status Session::CompleteStepOnStream(uint64_t step, void* cuda_stream) {
  RETURN_IF_ERROR(rep_->status());
  if (rep_->fences == nullptr) {
    if (rep_->attachment->base() == 0 || rep_->attachment->device_uuid().empty()) {
      return absl::FailedPreconditionError(
          "CompleteStepOnStream: this member's memory is not on a GPU; say CompleteStep");
    }
    ASSIGN_OR_RETURN(rep_->fences,
                     DeviceFences::Open(rep_->attachment->device_uuid(),
                                        {.on_done = [this](uint64_t done) { CompleteStep(done); },
                                         .on_error =
                                             [this](const absl::Status& error) {
                                               rep_->state.End(error);
                                               rep_->stream->Wake(StepStream::Urgency::kNow);
                                             }}));
  }
  return rep_->fences->Record(step, cuda_stream);
}

// ---------------------------------------------------------------------------------------------- leases

uint32_t Session::free_blocks() const {
  if (!rep_->usable()) return 0;
  const SessionState& state = rep_->state;
  const uint64_t credit = state.credit.load(std::memory_order_acquire);
  const uint64_t promised_away = state.match_keys_pending.load(std::memory_order_acquire);
  const uint64_t left = credit > promised_away ? credit - promised_away : 0;
  return rep_->magazine->stock() + static_cast<uint32_t>(left);
}

absl::Status Session::LeaseRefs(absl::Span<BlockRef> out) {
  if (!rep_->usable()) return rep_->status();
  // Nothing can come of it, but the daemon would evict what is cached, and the magazine keep what it got.
  RETURN_IF_ERROR(rep_->CheckLease(out.size()));
  rep_->DrainOverflow();
  const Magazine::Taken taken = rep_->magazine->Take(out);
  if (taken.ask) rep_->stream->Wake(StepStream::Urgency::kNow);
  if (taken.ok) return absl::OkStatus();
  return rep_->Shortage(static_cast<uint32_t>(out.size()), taken.stock);
}

absl::Status Session::LeaseRefsWithin(absl::Span<BlockRef> out, Deadline deadline) {
  while (true) {
    const uint64_t refills = rep_->state.refills_answered.load(std::memory_order_seq_cst);
    absl::Status leased = LeaseRefs(out);
    if (leased.code() != absl::StatusCode::kResourceExhausted) return leased;
    if (!rep_->CheckLease(out.size()).ok() || !rep_->AwaitRefill(refills, deadline)) return leased;
  }
}

bool Session::AwaitRefill(uint64_t refills, Deadline deadline) {
  return rep_->AwaitRefill(refills, deadline);
}

absl::StatusOr<Blocks> Session::Lease(uint32_t count) {
  RETURN_IF_ERROR(rep_->CheckLease(count));  // So many refs might not fit in memory.
  absl::StatusOr<Blocks> blocks(absl::in_place, this, count);
  absl::Status leased = LeaseRefs(blocks->slots());
  if (!leased.ok()) {
    blocks->Detach();
    blocks = std::move(leased);
  }
  return blocks;
}

absl::StatusOr<Blocks> Session::LeaseWithin(uint32_t count, Deadline deadline) {
  RETURN_IF_ERROR(rep_->CheckLease(count));
  absl::StatusOr<Blocks> blocks(absl::in_place, this, count);
  absl::Status leased = LeaseRefsWithin(blocks->slots(), deadline);
  if (!leased.ok()) {
    blocks->Detach();
    blocks = std::move(leased);
  }
  return blocks;
}

void Session::Release(absl::Span<const BlockRef> blocks, uint64_t after) { rep_->Release(blocks, after, {}); }

absl::Status Session::ReleaseWithHint(absl::Span<const BlockRef> blocks, const ReleaseHint& hint,
                                      uint64_t after) {
  RETURN_IF_ERROR(CheckHint(hint));
  rep_->Release(blocks, after, hint);
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------------- sharing

absl::StatusOr<PendingMatch> Session::Match(absl::Span<const GroupKeys> groups, const MatchOptions& options) {
  if (options.wait_ms > kMaxMatchWaitMs) {
    return absl::InvalidArgumentError(
        absl::StrCat("wait_ms: ", options.wait_ms, ", where at most ", kMaxMatchWaitMs, " are allowed"));
  }
  size_t names = 0;
  for (const GroupKeys& group : groups) {
    RETURN_IF_ERROR(CheckKeyBytes(group.key_bytes));
    if (group.keys.size() % group.key_bytes != 0) {
      return absl::InvalidArgumentError(absl::StrCat("keys of group ", group.group, ": ", group.keys.size(),
                                                     " bytes are no whole number of keys of ",
                                                     group.key_bytes));
    }
    names += group.keys.size() / group.key_bytes;
  }
  RETURN_IF_ERROR(CheckNames("Match.groups", names));
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kMatch));
  command->wait_ms = options.wait_ms;
  command->prefetch = options.prefetch;
  for (const GroupKeys& group : groups) {
    command->groups.push_back({.group = group.group,
                               .key_bytes = group.key_bytes,
                               .count = static_cast<uint32_t>(group.keys.size() / group.key_bytes)});
    command->keys.append(group.keys);
  }
  command->answer = rep_->NewAnswer(this);
  PendingMatch pending(command->answer);
  if (rep_->state.away.load(std::memory_order_seq_cst)) {
    command->answer->result = NothingCached(static_cast<int>(groups.size()));
    command->answer->phase = AnswerState::kReady;
    command->answer.reset();
    return pending;  // The slot stays vacant.
  }
  rep_->state.match_keys_pending.fetch_add(names, std::memory_order_relaxed);
  rep_->Send(StepStream::Urgency::kAwaited);
  return pending;
}

absl::Status Session::ReportPrefill(uint64_t tokens, uint64_t tokens_before, std::chrono::microseconds time) {
  const auto check = [](const char* what, auto value, uint64_t least, uint64_t most) {
    if (value >= 0 && static_cast<uint64_t>(value) >= least && static_cast<uint64_t>(value) <= most)
      return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("prefill.", what, " is ", value, "; must be ", least, " to ", most));
  };
  RETURN_IF_ERROR(check("tokens", tokens, 1, kMaxPrefillTokens));
  RETURN_IF_ERROR(check("tokens_before", tokens_before, 0, kMaxPrefillBefore));
  RETURN_IF_ERROR(check("microseconds", time.count(), 1, kMaxPrefillMicroseconds));
  rep_->state.prefills.Add(tokens, tokens_before, static_cast<uint64_t>(time.count()));
  return absl::OkStatus();
}

absl::StatusOr<PendingMatch> Session::Match(std::string_view keys, const MatchOptions& options) {
  const GroupKeys group{.group = 0, .keys = keys, .key_bytes = 32};
  return Match({&group, 1}, options);
}

absl::StatusOr<PendingSeal> Session::Seal(const SealArguments& arguments) {
  RETURN_IF_ERROR(CheckKeyBytes(arguments.key_bytes));
  const size_t count = arguments.blocks.size();
  const uint32_t per_block = arguments.keys_per_block;
  if (per_block < 1 || per_block > kMaxKeysPerBlock) {
    return absl::InvalidArgumentError(
        absl::StrCat("keys_per_block: ", per_block, ", where 1 to ", kMaxKeysPerBlock, " are allowed"));
  }
  RETURN_IF_ERROR(CheckNames("Seal.blocks and keys", count * (1 + per_block)));
  if (arguments.keys.size() != count * per_block * arguments.key_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("keys: ", arguments.keys.size(), " bytes for ", count,
                                                   " blocks of ", per_block, " keys of ", arguments.key_bytes,
                                                   " bytes"));
  }
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kSeal));
  rep_->magazine->Share(arguments.blocks);
  command->after = rep_->FenceOf(arguments.after);
  command->blocks.assign(arguments.blocks.begin(), arguments.blocks.end());
  command->groups.push_back({.group = arguments.group, .key_bytes = arguments.key_bytes, .count = per_block});
  command->keys.assign(arguments.keys);
  command->parent_key.assign(arguments.parent_key);
  command->leave_duplicates = arguments.leave_duplicates;
  command->answer = rep_->NewAnswer(this);
  command->answer->sealed.assign(arguments.blocks.begin(), arguments.blocks.end());
  PendingSeal pending(command->answer);
  rep_->Send(StepStream::Urgency::kSoon);
  return pending;
}

absl::StatusOr<Blocks> Session::Ref(absl::Span<const BlockRef> blocks) {
  RETURN_IF_ERROR(rep_->status());
  rep_->magazine->Share(blocks);
  std::vector<BlockRef>& named = rep_->scratch;
  named.assign(blocks.begin(), blocks.end());
  std::erase(named, kNullRef);  // The daemon has no such block: it would refuse, which ends the session.
  rep_->Queue(Command::Verb::kRef, named, /*after=*/0, {});
  return Blocks(this, blocks);
}

absl::Status Session::Touch(absl::Span<const BlockRef> blocks) {
  RETURN_IF_ERROR(CheckNames("Touch.blocks", blocks.size()));
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kTouch));
  command->blocks.assign(blocks.begin(), blocks.end());
  rep_->Send(StepStream::Urgency::kSoon);
  return absl::OkStatus();
}

absl::Status Session::Pin(absl::Span<const BlockRef> blocks, std::chrono::milliseconds ttl) {
  RETURN_IF_ERROR(CheckNames("Pin.blocks", blocks.size()));
  RETURN_IF_ERROR(CheckTime("Pin.ttl", ttl, 1));
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kPin));
  command->blocks.assign(blocks.begin(), blocks.end());
  command->ttl_ms = static_cast<uint64_t>(ttl.count());
  rep_->Send(StepStream::Urgency::kSoon);
  return absl::OkStatus();
}

absl::Status Session::Unpin(absl::Span<const BlockRef> blocks) {
  RETURN_IF_ERROR(CheckNames("Unpin.blocks", blocks.size()));
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kUnpin));
  command->blocks.assign(blocks.begin(), blocks.end());
  rep_->Send(StepStream::Urgency::kSoon);
  return absl::OkStatus();
}

absl::Status Session::SetRetention(absl::Span<const BlockRef> blocks, uint32_t priority,
                                   std::chrono::milliseconds ttl, std::chrono::milliseconds half_life) {
  RETURN_IF_ERROR(CheckNames("SetRetention.blocks", blocks.size()));
  if (priority > kMaxPriority) {
    return absl::InvalidArgumentError(
        absl::StrCat("SetRetention.priority is ", priority, "; must be 0 to ", kMaxPriority));
  }
  RETURN_IF_ERROR(CheckTime("SetRetention.ttl", ttl, 1));
  RETURN_IF_ERROR(CheckTime("SetRetention.half_life", half_life, 0));
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kSetRetention));
  command->blocks.assign(blocks.begin(), blocks.end());
  command->priority = priority;
  command->ttl_ms = static_cast<uint64_t>(ttl.count());
  command->half_life_ms = static_cast<uint64_t>(half_life.count());
  rep_->Send(StepStream::Urgency::kSoon);
  return absl::OkStatus();
}

absl::StatusOr<PendingFlush> Session::StartFlush() {
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kFlush));
  command->answer = rep_->NewAnswer(this);
  PendingFlush pending(command->answer);
  rep_->Send(StepStream::Urgency::kAwaited);
  return pending;
}

absl::Status Session::Flush(Deadline deadline) {
  ASSIGN_OR_RETURN(PendingFlush pending, StartFlush());
  return pending.Wait(deadline).status();
}

std::vector<Refusal> Session::TakeRefusals() { return rep_->state.refusals.Take(); }

// ---------------------------------------------------------------------------------------------------- Blocks

void Blocks::Release(uint64_t after) {
  if (refs_.empty()) return;
  session_->Release(refs_, after);
  refs_.clear();
}

void Blocks::Append(Blocks&& more) {
  if (more.empty()) return;
  KVPOOL_CHECK(empty() || session_ == more.session_, "blocks of two sessions in one list");
  session_ = more.session_;
  refs_.insert(refs_.end(), more.refs_.begin(), more.refs_.end());
  more.refs_.clear();
}

Blocks Blocks::SplitFrom(size_t count) {
  KVPOOL_CHECK(count <= refs_.size(), "split at %zu of %zu blocks", count, refs_.size());
  Blocks tail(session_, refs().subspan(count));
  refs_.resize(count);
  return tail;
}

absl::InlinedVector<BlockRef, 4> Blocks::Detach() {
  absl::InlinedVector<BlockRef, 4> refs = std::move(refs_);
  refs_.clear();
  return refs;
}

}  // namespace kvpool
