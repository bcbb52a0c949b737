// What peers ask of their sessions, and what they make of the answers.
#include <algorithm>
#include <optional>
#include <utility>

#include "proto/support/check.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/world.h"

namespace kvpool::fuzz {
namespace {

constexpr size_t kMaxRefs = 64;

}  // namespace

// ------------------------------------------------------------------------------------------------------ verbs

uint64_t World::SomeRef() {
  const uint8_t choice = input_.Byte();
  if (choice < 240 && !refs_.empty()) return refs_[choice % refs_.size()];
  if (choice < 250) return uint64_t{input_.Below(4)} << 32 | input_.Below(40);
  return input_.Word();
}

void World::AddBlocks(google::protobuf::RepeatedField<uint64_t>* blocks) {
  const uint8_t many = input_.Byte();
  if (many == UINT8_MAX) {
    // One block over and over: what counts is the number of names. At the limit each costs as much as a hundred stories.
    const uint8_t how = input_.Byte();
    return blocks->Resize(how < 224 ? 65 + how : 1 << (10 + how % 7), SomeRef());
  }
  for (uint32_t i = 0; i < many % 7u; ++i) blocks->Add(SomeRef());
}

std::vector<uint64_t> World::NeighbouringRefs() {
  std::vector<uint64_t> refs;
  const size_t first = input_.Byte(), count = std::min<size_t>(1 + input_.Below(6), refs_.size());
  for (size_t i = 0; i < count; ++i) refs.push_back(refs_[(first + i) % refs_.size()]);
  return refs;
}

std::string World::Keys(uint32_t count) {
  std::string keys;
  for (uint32_t i = 0; i < count; ++i) keys.append(32, static_cast<char>('a' + input_.Below(12)));
  return keys;
}

v1::Operation World::MakeOperation(const Process& process) {
  v1::Operation operation;
  if (input_.OneIn(3)) operation.set_after(input_.OneIn(20) ? input_.Number() : input_.Below(4));
  switch (scored_ && input_.OneIn(3) ? 16 : input_.Below(19)) {
    case 0:
    case 1:
      operation.mutable_lease()->set_count(
          static_cast<uint32_t>(input_.OneIn(16) ? input_.Number() : input_.Below(9)));
      operation.mutable_lease()->set_min(input_.Below(2));
      break;
    case 2:
    case 3: {
      v1::Seal* seal = operation.mutable_seal();
      AddBlocks(seal->mutable_blocks());
      seal->set_key_bytes(32);
      if (hybrid_) seal->set_group(input_.Below(2));
      if (input_.OneIn(8)) seal->set_keys_per_block(2);
      const uint32_t each = std::max(1u, seal->keys_per_block());
      if (seal->blocks_size() <= 64) seal->set_keys(Keys(each * seal->blocks_size()));
      if (input_.OneIn(2)) seal->set_parent_key(Keys(1));
      seal->set_leave_duplicates(input_.OneIn(3));
      break;
    }
    case 4: {
      v1::GroupKeys group;
      group.set_key_bytes(32);
      group.set_keys(Keys(1 + input_.Below(6)));
      if (hybrid_) group.set_group(input_.Below(2));
      *operation.mutable_match()->add_groups() = group;
      if (hybrid_ && input_.OneIn(2)) {
        group.set_group(1 - group.group());
        *operation.mutable_match()->add_groups() = group;
      }
      break;
    }
    case 5:
    case 6:
      AddBlocks(operation.mutable_release()->mutable_blocks());
      if (input_.OneIn(4)) {
        operation.mutable_release()->set_reuse(static_cast<v1::Reuse>(input_.Below(5)));
        operation.mutable_release()->set_category(input_.Below(17));
      }
      break;
    case 7:
      AddBlocks(operation.mutable_ref()->mutable_blocks());
      break;
    case 8:
      AddBlocks(operation.mutable_touch()->mutable_blocks());
      break;
    case 9:
    case 10:
      operation.mutable_fence()->set_step(input_.OneIn(20) ? input_.Number() : input_.Below(5));
      break;
    case 11:
      AddBlocks(operation.mutable_pin()->mutable_blocks());
      operation.mutable_pin()->set_ttl_ms(1 + input_.Number());
      break;
    case 12:
      AddBlocks(operation.mutable_unpin()->mutable_blocks());
      break;
    case 13:
      AddBlocks(operation.mutable_set_retention()->mutable_blocks());
      operation.mutable_set_retention()->set_priority(input_.Byte() % 102);
      operation.mutable_set_retention()->set_ttl_ms(1 + input_.Number());
      operation.mutable_set_retention()->set_half_life_ms(input_.Number());
      break;
    case 14:
      operation.mutable_warmup_done();
      break;
    case 15:
      if (input_.OneIn(4)) operation.mutable_close_session();
      break;
    case 16:
    case 17: {
      const uint64_t after = operation.after();
      const bool own = !process.prompt.empty() && !input_.OneIn(8);
      operation = DeviceOperationOn(&input_, own ? process.prompt : NeighbouringRefs(), process.scratch);
      operation.set_after(after);
      break;
    }
    default: {
      const uint8_t how = input_.Byte();
      if (how >= 252) {
        // As many names as may be parked: what is to come after that finds no room.
        operation.set_after(1 + input_.Below(8));
        operation.mutable_unpin()->mutable_blocks()->Resize((1 << 16) - 1 - input_.Below(2), SomeRef());
      } else if (how % 2 == 0) {
        v1::PutEpisode* put = operation.mutable_put_episode();
        put->set_name(std::string(1, static_cast<char>('a' + input_.Below(3))));
        put->add_centroid(1);
        put->add_centroid(input_.Byte());
        if (input_.OneIn(2)) {
          AddBlocks(put->add_sequences()->mutable_blocks());
        } else {
          put->add_sequences()->mutable_blocks()->Add(process.prompt.begin(), process.prompt.end());
        }
      } else {
        operation.mutable_choose_episode()->add_embedding(1);
        operation.mutable_choose_episode()->add_embedding(input_.Byte());
      }
    }
  }
  return operation;
}

uint64_t World::ChooseSequence(Process* process) {
  const uint8_t choice = input_.Byte();
  if (choice < 200) return ++process->sequence;
  if (choice < 220) return process->sequence;                          // Again.
  if (choice < 235) return process->sequence += 1 + input_.Below(70);  // Ahead of others that may come.
  if (choice < 250)
    return process->sequence - std::min<uint64_t>(process->sequence, input_.Below(70));  // Late.
  return process->sequence = input_.Number();
}

void World::Step(Process* process) {
  v1::StepRequest request;
  request.set_sequence(ChooseSequence(process));
  if (input_.OneIn(4))
    process->acknowledged = input_.OneIn(16) ? input_.Number() : process->sequence - input_.Below(3);
  request.set_acknowledged(process->acknowledged);
  const uint32_t operations = 1 + input_.Below(5);
  for (uint32_t i = 0; i < operations; ++i) *request.add_operations() = MakeOperation(*process);
  Send(process, std::move(request));
}

void World::Prompt(Process* process) {
  process->prompt.clear();
  const uint32_t count = 1 + input_.Below(6), group = hybrid_ ? input_.Below(2) : 0;
  const std::string keys = Keys(count);
  const auto ask = [&](auto fill) {
    v1::StepRequest request;
    request.set_sequence(++process->sequence);
    fill(request.add_operations());
    const v1::StepResponse response = Send(process, std::move(request));
    return response.results_size() == 0 ? v1::OperationResult() : response.results(0);
  };
  const v1::OperationResult found = ask([&](v1::Operation* operation) {
    v1::GroupKeys* const wanted = operation->mutable_match()->add_groups();
    wanted->set_group(group);
    wanted->set_key_bytes(32);
    wanted->set_keys(keys);
  });
  for (const v1::GroupHit& hit : found.match().groups()) {
    process->prompt.assign(hit.blocks().begin(), hit.blocks().end());
  }
  const auto cached = static_cast<uint32_t>(process->prompt.size());
  if (cached < count) {
    const v1::OperationResult leased =
        ask([&](v1::Operation* operation) { operation->mutable_lease()->set_count(count - cached); });
    for (const uint64_t ref : leased.lease().blocks()) process->prompt.push_back(ref);
  }
  const auto there = static_cast<uint32_t>(process->prompt.size());
  if (cached < there && input_.OneIn(4)) {
    process->scratch.assign(process->prompt.begin() + cached, process->prompt.end());
    process->prompt.resize(cached);
  } else if (cached < there) {
    const v1::OperationResult sealed = ask([&](v1::Operation* operation) {
      v1::Seal* const seal = operation->mutable_seal();
      seal->set_group(group);
      seal->set_key_bytes(32);
      seal->mutable_blocks()->Add(process->prompt.begin() + cached, process->prompt.end());
      seal->set_keys(keys.substr(cached * 32, (there - cached) * 32));
      if (cached > 0) seal->set_parent_key(keys.substr((cached - 1) * 32, 32));
    });
    // A sequence that was seen before is answered as it was then.
    if (sealed.seal().canonical_size() != static_cast<int>(there - cached)) return;
    for (uint32_t i = cached; i < there; ++i) {
      const uint64_t canonical = sealed.seal().canonical(static_cast<int>(i - cached));
      if (canonical != 0) process->prompt[i] = canonical;
    }
  }
  if (process->prompt.empty() || input_.OneIn(2)) return;
  ask([&](v1::Operation* operation) {
    operation->mutable_release()->mutable_blocks()->Add(process->prompt.begin(), process->prompt.end());
  });
  process->prompt.clear();
}

v1::StepResponse World::Send(Process* process, v1::StepRequest request) {
  ++batches_;
  for (int i = 0; i < request.operations_size(); ++i) {
    Sent(process, request.sequence(), i, request.operations(i));
  }
  Trace("step", process->session, request);
  v1::StepResponse response;
  std::string wire;
  const bool more = daemon_->Apply(process->member, request, &response, &wire);
  v1::StepResponse read;
  KVPOOL_CHECK(read.ParseFromString(wire), "an answer that does not parse");
  Heard(process, read);
  if (more) daemon_->FollowUp(process->member);
  return read;
}

void World::RawStep(Process* process) {
  v1::StepRequest request;
  if (!ParseNext(&input_, &request)) return;
  NameBlocks(refs_, &request);
  if (request.sequence() == 0) request.set_sequence(ChooseSequence(process));
  // Bytes may name anything, so what they release, now or when they are no longer parked, is not known here.
  holdings_.Ignore(process->session);
  Trace("raw step", process->session, request);
  v1::StepResponse response;
  std::string wire;
  const bool more = daemon_->Apply(process->member, request, &response, &wire);
  v1::StepResponse read;
  KVPOOL_CHECK(read.ParseFromString(wire), "an answer that does not parse");
  if (more) daemon_->FollowUp(process->member);
}

void World::RawCall(Process* process) {
  v1::Call call;
  v1::Operation operation;
  if (!ParseNext(&input_, &call) || !ParseNext(&input_, &operation)) return;
  // These have methods of their own, and what has no verb has none.
  if (operation.has_open_session() || operation.has_add_member() ||
      operation.verb_case() == v1::Operation::VERB_NOT_SET) {
    return;
  }
  NameBlocks(refs_, &operation);
  operation.clear_after();
  if (call.member_token().empty()) call.set_member_token(process->member_token);
  if (call.sequence() == 0) call.set_sequence(ChooseSequence(process));
  holdings_.Ignore(process->session);
  SendCall(process, call, std::move(operation));
}

void World::Call(Process* process) {
  v1::Call call;
  call.set_member_token(process->member_token);
  call.set_sequence(ChooseSequence(process));
  call.set_acknowledged(process->acknowledged);
  v1::Operation operation = MakeOperation(*process);
  Sent(process, call.sequence(), 0, operation);
  call.set_after(operation.after());
  operation.clear_after();
  SendCall(process, call, std::move(operation));
}

void World::SendCall(Process* process, const v1::Call& call, v1::Operation operation) {
  Trace("call", process->session, call);
  Trace("  of", process->session, operation);
  auto answer = std::make_shared<LateAnswer>();
  answer->sequence = call.sequence();
  daemon_->ApplyUnary(call, std::move(operation), [answer](const v1::OperationResult& result) {
    KVPOOL_CHECK(!answer->result.has_value(), "a call was answered twice");
    answer->result = result;
  });
  process->calls.push_back(std::move(answer));
}

void World::HearCalls(Process* process) {
  std::erase_if(process->calls, [&](const std::shared_ptr<LateAnswer>& call) {
    if (!call->result.has_value()) return false;
    Answered(process, call->sequence, 0, *call->result);
    return true;
  });
}

void World::TakePending(Process* process) {
  v1::StepResponse response;
  daemon_->TakePending(process->member, process->member->listener.get(), &response);
  Heard(process, response);
}

// ---------------------------------------------------------------------------------------------------- answers

void World::Learn(uint64_t ref) {
  if (ref == 0) return;
  if (refs_.size() < kMaxRefs) {
    refs_.push_back(ref);
  } else {
    refs_[ref % kMaxRefs] = ref;
  }
}

void World::Sent(Process* process, uint64_t sequence, uint32_t index, const v1::Operation& operation) {
  const uint64_t session = process->session, space = process->space;
  for (const auto* sequence_of : {&operation.prune().sequence(), &operation.compact().sequence()}) {
    for (const uint64_t ref : sequence_of->blocks()) holdings_.DropAll(session, space, ref);
  }
  // One that waits for its step may be applied long before its answer is heard.
  if (operation.has_close_session() && operation.after() != 0) holdings_.Ignore(session);
  if (operation.has_put_episode()) {
    // A set that is replaced or removed gives its holds back, which are beyond those counted here.
    return;
  }
  const auto [sent, fresh] =
      process->sent.try_emplace({sequence, index}, SentOperation{operation, {}, batches_});
  if (!fresh) return;
  for (const uint64_t ref : operation.release().blocks()) {
    sent->second.dropped.push_back(holdings_.Drop(session, space, ref));
  }
}

void World::Heard(Process* process, const v1::StepResponse& response) {
  if (response.code() != 0) {  // Nothing of the batch was applied.
    // What an earlier one of that sequence has left is there still.
    std::erase_if(process->sent, [&](const auto& entry) {
      return entry.first.first == response.sequence() && entry.second.batch == batches_;
    });
  }
  // Completions and calls' answers first: what they gave, a release of this batch may have taken already.
  for (const auto& each : processes_) HearCalls(each.get());
  for (const v1::Completion& completion : response.completions()) {
    KVPOOL_CHECK(!completion.result().parked(), "a completion that is parked");
    Answered(process, completion.sequence(), completion.index(), completion.result());
  }
  for (int i = 0; i < response.results_size(); ++i)
    Answered(process, response.sequence(), i, response.results(i));
  for (const auto& [named, holds] : ahead_) {
    // An answer to a call of another session may have put it there.
    const uint64_t space = sessions_.at(named.first).space;
    for (int i = 0; i < holds; ++i) holdings_.Add(named.first, space, named.second);
  }
  ahead_.clear();
}

void World::Gave(uint64_t session, uint64_t space, uint64_t ref, bool leased) {
  if (leased) {
    holdings_.Lease(session, space, ref);
  } else {
    holdings_.Add(session, space, ref);
  }
  const auto ahead = ahead_.find({session, ref});
  if (ahead == ahead_.end()) return;
  for (int i = 0; i < ahead->second; ++i) holdings_.Add(session, space, ref);
  for (int i = 0; i > ahead->second; --i) holdings_.Drop(session, space, ref);
  ahead_.erase(ahead);
}

void World::Answered(Process* process, uint64_t sequence, uint32_t index, const v1::OperationResult& result) {
  Trace("answer", process->session, result);
  if (result.parked()) return;
  const auto it = process->sent.find({sequence, index});
  if (it == process->sent.end()) return;
  if (!process->answered.insert({sequence, index}).second)
    return;  // A repetition got the first answer again.
  const auto [operation, dropped, batch] = std::move(it->second);
  process->sent.erase(it);
  if (result.code() != 0) return;
  const uint64_t session = process->session, space = process->space;
  if (result.has_close_session()) return holdings_.End(session);
  for (const uint64_t ref : result.lease().blocks()) {
    Gave(session, space, ref, /*leased=*/true);
    Learn(ref);
  }
  for (const v1::GroupHit& hit : result.match().groups()) {
    for (const uint64_t ref : hit.blocks()) Gave(session, space, ref, /*leased=*/false);
  }
  for (int i = 0; i < result.seal().canonical_size(); ++i) {
    const uint64_t canonical = result.seal().canonical(i);
    if (canonical != operation.seal().blocks(i)) holdings_.Add(session, space, canonical);
    Learn(canonical);
  }
  // What it had no hold on when the release was sent it may have had when it was applied: from a verb of the same batch, perhaps,
  // whose answer comes behind this one.
  std::vector<bool> refused_release(dropped.size());
  for (const v1::Refusal& refusal : result.release().refused()) refused_release[refusal.index()] = true;
  for (size_t i = 0; i < dropped.size(); ++i) {
    const uint64_t ref = operation.release().blocks(static_cast<int>(i));
    if (dropped[i] || holdings_.Drop(session, space, ref) || refused_release[i]) continue;
    --ahead_[{session, ref}];
  }
  if (result.has_ref()) {
    std::vector<bool> refused(operation.ref().blocks_size());
    for (const v1::Refusal& refusal : result.ref().refused()) refused[refusal.index()] = true;
    for (int i = 0; i < operation.ref().blocks_size(); ++i) {
      const uint64_t ref = operation.ref().blocks(i);
      if (refused[i]) continue;
      if (holdings_.Has(session, space, ref)) {
        holdings_.Add(session, space, ref);
      } else {
        ++ahead_[{session, ref}];
      }
    }
  }
  if (result.has_prune()) {
    process->prompt.assign(result.prune().table().begin(), result.prune().table().end());
  }
  const v1::CompactResult& compact = result.compact();
  if (result.has_compact()) process->prompt.assign(compact.table().begin(), compact.table().end());
  for (int i = static_cast<int>(compact.moved_from_block()); i < compact.table_size(); ++i) {
    holdings_.Lease(session, space, compact.table(i));
  }
  for (const v1::Sequence& chosen : result.choose_episode().sequences()) {
    for (const uint64_t ref : chosen.blocks()) holdings_.Add(session, space, ref);
  }
}

}  // namespace kvpool::fuzz
