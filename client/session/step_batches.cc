#include "client/session/step_batches.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/session/refusals.h"

namespace kvpool {
namespace {

void SetBlocks(const std::vector<BlockRef>& refs, google::protobuf::RepeatedField<uint64_t>* out) {
  out->Reserve(out->size() + static_cast<int>(refs.size()));
  for (const BlockRef ref : refs) out->AddAlreadyReserved(ref.Pack());
}

ReleaseHint HintOf(const v1::Release& release) {
  return {.reuse = release.reuse(), .category = release.category()};
}

absl::Status StatusOf(int32_t code, const std::string& message) {
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

// The blocks that an operation without an answer of its own names.
uint64_t BlocksNamed(const v1::Operation& operation) {
  const int named = operation.release().blocks_size() + operation.ref().blocks_size() +
                    operation.touch().blocks_size() + operation.pin().blocks_size() +
                    operation.unpin().blocks_size() + operation.set_retention().blocks_size();
  return static_cast<uint64_t>(named);
}

template <typename T>
void Subtract(std::atomic<T>* counter, T amount) {
  counter->fetch_sub(amount, std::memory_order_relaxed);
}

}  // namespace

void StepBatches::StartStream() {
  next_to_write_ = 0;
  first_on_stream_ = true;
  fence_sent_ = 0;
  // This daemon may be an older one than the batches were made for, and these are but samples.
  takes_prefills_ = false;
  for (const auto& batch : unanswered_) batch->request.clear_prefills();
}

bool StepBatches::HasWork() const {
  if (next_to_write_ < unanswered_.size() || first_on_stream_) return true;
  if (unanswered_.size() >= kUnansweredBatches) return false;
  return parts_.commands->size() > 0 || !returns_.empty() || parts_.magazine->NeedsCare() ||
         parts_.state->completed_step.load(std::memory_order_seq_cst) > fence_sent_;
}

const v1::StepRequest* StepBatches::Next() {
  if (next_to_write_ == unanswered_.size()) {
    if (unanswered_.size() >= kUnansweredBatches || !HasWork()) return nullptr;
    std::unique_ptr<Batch> batch;
    if (spare_.empty()) {
      batch = std::make_unique<Batch>();
    } else {
      batch = std::move(spare_.back());
      spare_.pop_back();
    }
    FillOwn(batch.get());
    FillFromCommands(batch.get());
    // HasWork was wrong: a refill, for example, is no longer due.
    if (batch->request.operations_size() == 0 && !first_on_stream_ && batch->flushes.empty()) {
      spare_.push_back(std::move(batch));
      return nullptr;
    }
    if (takes_prefills_) parts_.state->prefills.Take(&batch->request);
    batch->request.set_sequence(next_sequence_++);
    unanswered_.push_back(std::move(batch));
  }
  Batch& batch = *unanswered_[next_to_write_++];
  batch.request.set_acknowledged(acknowledged_);
  if (first_on_stream_) {
    batch.request.set_member_token(parts_.member_token);
  } else {
    batch.request.clear_member_token();
  }
  first_on_stream_ = false;
  SessionState& state = *parts_.state;
  state.batches.fetch_add(1, std::memory_order_relaxed);
  state.operations.fetch_add(batch.request.operations_size(), std::memory_order_relaxed);
  return &batch.request;
}

// Operations that no command asked for. A fence goes first: the same batch may have operations
// that wait for it.
void StepBatches::FillOwn(Batch* batch) {
  SessionState& state = *parts_.state;
  const uint64_t completed = state.completed_step.load(std::memory_order_acquire);
  if (completed > fence_sent_) {
    fence_sent_ = completed;
    batch->request.add_operations()->mutable_fence()->set_step(completed);
  }
  parts_.magazine->TakeSurplus(&returns_);
  if (!returns_.empty()) {
    const size_t count = std::min<size_t>(returns_.size(), kBatchNames / 4);
    const std::vector<BlockRef> part(returns_.end() - static_cast<ptrdiff_t>(count), returns_.end());
    returns_.resize(returns_.size() - count);
    AddRelease(batch, part);
  }
  const uint32_t wanted = parts_.magazine->Wanted(state.pressure.load(std::memory_order_relaxed));
  if (wanted > 0) {
    batch->request.add_operations()->mutable_lease()->set_count(std::min<uint32_t>(wanted, kBatchNames / 4));
  }
  batch->answers.resize(batch->request.operations_size());
}

void StepBatches::FillFromCommands(Batch* batch) {
  // FillOwn uses at most half a batch, and the ring takes no command that is larger than the other half.
  size_t names = kBatchNames / 2;
  while (Command* command = parts_.commands->Front()) {
    if (command->verb == Command::Verb::kMatch && command->answer == nullptr) {
      parts_.commands->Pop();  // LetMatchesGo has answered it.
      continue;
    }
    const size_t more = command->names();
    if (names + more > kBatchNames && names > kBatchNames / 2) break;
    if (static_cast<size_t>(batch->request.operations_size()) + 1 > kBatchOperations) break;
    names += more;
    if (command->verb == Command::Verb::kFlush) {
      batch->flushes.push_back(std::move(command->answer));
    } else {
      AddOperation(batch, *command);
      batch->answers.resize(batch->request.operations_size());
      if (command->answer != nullptr) batch->answers.back() = std::move(command->answer);
    }
    parts_.commands->Pop();
  }
  parts_.state->blocks.fetch_add(names - kBatchNames / 2, std::memory_order_relaxed);
}

void StepBatches::AddOperation(Batch* batch, const Command& command) {
  v1::StepRequest& request = batch->request;
  const int last = request.operations_size() - 1;
  // Neighbours of one kind become one operation, because many engines release block by block.
  if (command.verb == Command::Verb::kRelease && last >= 0 && request.operations(last).has_release() &&
      request.operations(last).after() == command.after &&
      HintOf(request.operations(last).release()) == command.hint) {
    SetBlocks(command.blocks, request.mutable_operations(last)->mutable_release()->mutable_blocks());
    return;
  }
  v1::Operation& operation = *request.add_operations();
  operation.set_after(command.after);
  switch (command.verb) {
    case Command::Verb::kMatch: {
      size_t offset = 0;
      operation.mutable_match()->set_wait_ms(command.wait_ms);
      operation.mutable_match()->set_prefetch(command.prefetch);
      for (const Command::Keys& keys : command.groups) {
        v1::GroupKeys& group = *operation.mutable_match()->add_groups();
        const size_t bytes = size_t{keys.count} * keys.key_bytes;
        group.set_group(keys.group);
        group.set_key_bytes(keys.key_bytes);
        group.set_keys(command.keys.data() + offset, bytes);
        offset += bytes;
        batch->match_keys += keys.count;
      }
      break;
    }
    case Command::Verb::kSeal: {
      v1::Seal& seal = *operation.mutable_seal();
      seal.set_group(command.groups[0].group);
      seal.set_key_bytes(command.groups[0].key_bytes);
      seal.set_keys_per_block(command.groups[0].count);
      seal.set_keys(command.keys);
      seal.set_parent_key(command.parent_key);
      seal.set_leave_duplicates(command.leave_duplicates);
      SetBlocks(command.blocks, seal.mutable_blocks());
      break;
    }
    case Command::Verb::kRelease:
      SetBlocks(command.blocks, operation.mutable_release()->mutable_blocks());
      operation.mutable_release()->set_reuse(command.hint.reuse);
      operation.mutable_release()->set_category(command.hint.category);
      break;
    case Command::Verb::kRef:
      SetBlocks(command.blocks, operation.mutable_ref()->mutable_blocks());
      break;
    case Command::Verb::kTouch:
      SetBlocks(command.blocks, operation.mutable_touch()->mutable_blocks());
      break;
    case Command::Verb::kPin:
      SetBlocks(command.blocks, operation.mutable_pin()->mutable_blocks());
      operation.mutable_pin()->set_ttl_ms(command.ttl_ms);
      break;
    case Command::Verb::kUnpin:
      SetBlocks(command.blocks, operation.mutable_unpin()->mutable_blocks());
      break;
    case Command::Verb::kSetRetention:
      SetBlocks(command.blocks, operation.mutable_set_retention()->mutable_blocks());
      operation.mutable_set_retention()->set_priority(command.priority);
      operation.mutable_set_retention()->set_ttl_ms(command.ttl_ms);
      operation.mutable_set_retention()->set_half_life_ms(command.half_life_ms);
      break;
    case Command::Verb::kWarmupDone:
      operation.mutable_warmup_done();
      break;
    case Command::Verb::kClose:
      operation.mutable_close_session();
      break;
    case Command::Verb::kOnDevice:
      operation.Swap(command.operation.get());
      operation.set_after(command.after);
      break;
    case Command::Verb::kFlush:
      break;
  }
}

void StepBatches::AddRelease(Batch* batch, const std::vector<BlockRef>& refs) {
  SetBlocks(refs, batch->request.add_operations()->mutable_release()->mutable_blocks());
  parts_.state->blocks.fetch_add(refs.size(), std::memory_order_relaxed);
}

void StepBatches::OnResponse(v1::StepResponse* response) {
  takes_prefills_ = takes_prefills_ || response->takes_prefills();
  for (const v1::Notice& notice : response->notices()) OnNotice(notice);
  for (v1::Completion& completion : *response->mutable_completions()) {
    Parked parked;
    const auto known = parked_.find({completion.sequence(), completion.index()});
    if (known != parked_.end()) {
      parked = std::move(known->second);
      parked_.erase(known);
    }
    // The batch's own answer was lost. Sent again, it will only tell that the operation was parked.
    for (const auto& batch : unanswered_) {
      if (batch->request.sequence() != completion.sequence()) continue;
      if (completion.index() >= batch->answers.size()) continue;
      const v1::Operation& operation = batch->request.operations(static_cast<int>(completion.index()));
      batch->completed.resize(batch->answers.size());
      if (batch->completed[completion.index()]) continue;
      batch->completed[completion.index()] = true;
      parked = {operation.verb_case(), BlocksNamed(operation), std::move(batch->answers[completion.index()])};
    }
    if (parked.verb == v1::Operation::VERB_NOT_SET) continue;  // It came twice.
    v1::OperationResult& result = *completion.mutable_result();
    const absl::Status status = StatusOf(result.code(), result.message());
    OnRefusals(parked.verb, parked.blocks, result);
    if (parked.answer != nullptr) Deliver(parked.answer, status, &result);
  }
  if (response->sequence() != 0 && !unanswered_.empty() && next_to_write_ > 0 &&
      unanswered_.front()->request.sequence() == response->sequence()) {
    std::unique_ptr<Batch> batch = std::move(unanswered_.front());
    unanswered_.pop_front();
    --next_to_write_;
    acknowledged_ = response->sequence();
    const absl::Status batch_status = StatusOf(response->code(), response->message());
    parts_.state->credit.store(response->free_blocks(), std::memory_order_release);
    const bool over = batch_status.code() == absl::StatusCode::kAborted ||
                      batch_status.code() == absl::StatusCode::kUnauthenticated;
    const bool lost = batch_status.code() == absl::StatusCode::kOutOfRange;
    for (int i = 0; i < batch->request.operations_size(); ++i) {
      v1::OperationResult none;
      none.set_code(response->code());
      none.set_message(response->message());
      v1::OperationResult* const result = i < response->results_size() ? response->mutable_results(i) : &none;
      const v1::Operation& operation = batch->request.operations(i);
      // Otherwise the session ends with the batch, which is what is told.
      if (!over && !lost) OnRefusals(operation.verb_case(), BlocksNamed(operation), *result);
      OnResult(batch.get(), i, result);
    }
    for (const auto& flush : batch->flushes) Deliver(flush, batch_status, nullptr);
    Subtract(&parts_.state->match_keys_pending, batch->match_keys);
    batch->request.Clear();
    batch->answers.clear();
    batch->flushes.clear();
    batch->completed.clear();
    batch->match_keys = 0;
    spare_.push_back(std::move(batch));
    if (over) {
      parts_.state->End(absl::AbortedError(batch_status.message()));
    } else if (lost) {
      // Whether it was applied is not known, so nobody can tell who holds the blocks that it leased or
      // released. Going on could use a block that another session has by now.
      parts_.state->End(absl::UnavailableError(
          absl::StrCat("detached: the daemon has lost the answer to batch ", response->sequence(),
                       ", and what became of it is not known (", batch_status.message(), ")")));
    }
  }
  parts_.state->signal.Notify();
}

void StepBatches::OnResult(Batch* batch, int index, v1::OperationResult* result) {
  const v1::Operation& operation = batch->request.operations(index);
  const absl::Status status = StatusOf(result->code(), result->message());
  if (operation.has_lease()) {
    OnLease(result->lease(), status);
  } else if (operation.has_fence() && status.ok()) {
    const uint64_t passed = result->fence().passed();
    if (passed > parts_.state->passed_step.load(std::memory_order_relaxed)) {
      parts_.state->passed_step.store(passed, std::memory_order_release);
    }
  }
  std::shared_ptr<AnswerState>& answer = batch->answers[index];
  if (result->parked()) {
    if (!batch->completed.empty() && batch->completed[index]) return;
    parked_[{batch->request.sequence(), static_cast<uint32_t>(index)}] = {
        operation.verb_case(), BlocksNamed(operation), std::move(answer)};
  } else if (answer != nullptr) {
    Deliver(answer, status, result);
  }
}

void StepBatches::OnRefusals(v1::Operation::VerbCase verb, uint64_t blocks,
                             const v1::OperationResult& result) {
  SessionState& state = *parts_.state;
  const absl::Status status = StatusOf(result.code(), result.message());
  const uint64_t refused = status.ok() ? RefusedBlocks(result) : std::max<uint64_t>(blocks, 1);
  if (refused == 0) return;
  // The session ended before the operation was applied: that is what is told.
  if (status.code() == absl::StatusCode::kAborted && !state.open.load(std::memory_order_acquire)) return;
  const RefusalRule& rule = RefusalRuleOf(verb);
  // The call that waits hears of it.
  if (!status.ok() && rule.whole == RefusalFate::kCaller) return;
  state.refused.fetch_add(refused, std::memory_order_relaxed);
  const absl::Status why = status.ok() ? WhyRefused(result) : status;
  switch (status.ok() ? rule.blocks : rule.whole) {
    case RefusalFate::kCaller:
    case RefusalFate::kHarmless:
      return;
    case RefusalFate::kRecorded:
      return state.refusals.Add(
          {.verb = std::string(rule.verb), .blocks = status.ok() ? refused : blocks, .status = why});
    case RefusalFate::kEndsSession:
      return state.End(absl::FailedPreconditionError(
          absl::StrCat("detached: the daemon refused ", std::string(rule.verb), " of ", refused,
                       " blocks, of which nobody was to hear (", std::string(rule.why),
                       "); the first: ", why.ToString())));
  }
}

void StepBatches::OnLease(const v1::LeaseResult& result, const absl::Status& status) {
  SessionState& state = *parts_.state;
  std::vector<BlockRef> refs;
  refs.reserve(result.blocks_size());
  for (const uint64_t ref : result.blocks()) refs.push_back(BlockRef::Unpack(ref));
  if (result.sink_block() != 0) state.sink.store(result.sink_block(), std::memory_order_release);
  state.shortfall.store(status.ok() ? result.shortfall() : v1::SHORTFALL_PRESSURE, std::memory_order_relaxed);
  state.leased.fetch_add(refs.size(), std::memory_order_relaxed);
  parts_.magazine->Refill(refs);
  state.refills_answered.fetch_add(1, std::memory_order_seq_cst);
}

void StepBatches::OnNotice(const v1::Notice& notice) {
  SessionState& state = *parts_.state;
  switch (notice.kind()) {
    case v1::NOTICE_KIND_PRESSURE:
      state.pressure.store(notice.on(), std::memory_order_seq_cst);
      break;
    case v1::NOTICE_KIND_REVOKE:
      if (notice.on()) parts_.magazine->Revoke(notice.value());
      break;
    case v1::NOTICE_KIND_DRAIN:
      state.draining.store(notice.on(), std::memory_order_seq_cst);
      break;
    case v1::NOTICE_KIND_ENDED:
      state.End(absl::AbortedError(notice.detail()));
      break;
    case v1::NOTICE_KIND_CAPACITY:  // The attach socket says the same once this member has mapped it.
    case v1::NOTICE_KIND_UNSPECIFIED:
    case v1::NoticeKind_INT_MIN_SENTINEL_DO_NOT_USE_:
    case v1::NoticeKind_INT_MAX_SENTINEL_DO_NOT_USE_:
      break;
  }
  if (parts_.on_notice) parts_.on_notice(notice);
}

void StepBatches::Deliver(const std::shared_ptr<AnswerState>& answer, const absl::Status& status,
                          v1::OperationResult* result) {
  answer->status = status;
  if (result != nullptr) answer->result.Swap(result);
  if (answer->phase.exchange(AnswerState::kReady, std::memory_order_seq_cst) == AnswerState::kAbandoned) {
    const std::vector<BlockRef> holds = answer->Holds();
    returns_.insert(returns_.end(), holds.begin(), holds.end());
  }
}

void StepBatches::LetMatchesGo() {
  for (const auto& batch : unanswered_) {
    for (size_t i = 0; i < batch->answers.size(); ++i) {
      const v1::Operation& operation = batch->request.operations(static_cast<int>(i));
      if (!operation.has_match() || batch->answers[i] == nullptr ||
          batch->answers[i]->phase == AnswerState::kAbandoned) {
        continue;
      }
      auto nobody = std::make_shared<AnswerState>();
      nobody->session = batch->answers[i]->session;
      nobody->rep = batch->answers[i]->rep;
      nobody->phase = AnswerState::kAbandoned;
      v1::OperationResult nothing = NothingCached(operation.match().groups_size());
      Deliver(std::exchange(batch->answers[i], std::move(nobody)), absl::OkStatus(), &nothing);
    }
  }
  for (size_t i = 0; i < parts_.commands->size(); ++i) {
    Command* const command = parts_.commands->At(i);
    if (command->verb != Command::Verb::kMatch || command->answer == nullptr) continue;
    v1::OperationResult nothing = NothingCached(static_cast<int>(command->groups.size()));
    Subtract(&parts_.state->match_keys_pending, static_cast<uint64_t>(command->names()));
    Deliver(std::exchange(command->answer, nullptr), absl::OkStatus(), &nothing);
  }
  parts_.state->signal.Notify();
}

void StepBatches::Abort(const absl::Status& reason) {
  for (const auto& batch : unanswered_) {
    for (const auto& answer : batch->answers) {
      if (answer != nullptr) Deliver(answer, reason, nullptr);
    }
    for (const auto& flush : batch->flushes) Deliver(flush, reason, nullptr);
    Subtract(&parts_.state->match_keys_pending, batch->match_keys);
  }
  unanswered_.clear();
  next_to_write_ = 0;
  for (const auto& [id, parked] : parked_) {
    if (parked.answer != nullptr) Deliver(parked.answer, reason, nullptr);
  }
  parked_.clear();
  while (Command* command = parts_.commands->Front()) {
    if (command->answer != nullptr) Deliver(command->answer, reason, nullptr);
    command->answer.reset();
    parts_.commands->Pop();
  }
  returns_.clear();
  parts_.state->signal.Notify();
}

}  // namespace kvpool
