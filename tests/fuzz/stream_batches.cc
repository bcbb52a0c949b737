// What the peers of a story say on their streams, and what they keep of what they hear.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "proto/support/step_frames.h"
#include "tests/fuzz/messages.h"
#include "tests/fuzz/stream_story.h"

namespace kvpool::fuzz {
namespace {

constexpr size_t kMaxRefs = 32;

}  // namespace

std::string StreamStory::FirstToken(Peer* peer) {
  if (std::exchange(peer->has_asked, true)) return input_.OneIn(16) ? input_.Bytes(4) : "";
  return EngineOf(*peer).member_token;
}

void StreamStory::SayRequest(Peer* peer, const v1::StepRequest& request) {
  Trace("batch", EngineOf(*peer).session, request);
  std::string bytes = request.SerializeAsString();
  if (input_.OneIn(32) && !bytes.empty()) {
    bytes[input_.Byte() % bytes.size()] = static_cast<char>(input_.Byte());
  }
  peer->stream.SayFrame(bytes);
}

void StreamStory::SayBatches(Peer* peer) {
  Engine& engine = EngineOf(*peer);
  const uint8_t how = input_.Byte();
  for (uint32_t i = 1 + how % 4; i > 0; --i) {
    v1::StepRequest request;
    request.set_member_token(FirstToken(peer));
    ++engine.sequence;
    // Again, ahead of others that may come, or anything.
    const uint8_t which = input_.Byte();
    if (which >= 224) --engine.sequence;
    if (which >= 240) engine.sequence += 2 + input_.Below(8);
    if (which == UINT8_MAX) engine.sequence = input_.Number();
    request.set_sequence(engine.sequence);
    if (which % 4 == 3) engine.acknowledged = engine.sequence - input_.Below(4);
    request.set_acknowledged(engine.acknowledged);
    for (uint32_t operations = input_.Below(4); operations > 0; --operations) {
      *request.add_operations() = MakeOperation(engine);
    }
    SayRequest(peer, request);
  }
  // In pieces, all at once, or later.
  if (how / 4 % 4 == 2) return;
  peer->stream.Send(how / 4 % 4 == 3 ? 1 + input_.Byte() : kAll);
}

void StreamStory::AddBlocks(const Engine& engine, google::protobuf::RepeatedField<uint64_t>* blocks) {
  for (uint32_t i = input_.Below(4); i > 0; --i) {
    blocks->Add(engine.refs.empty() || input_.OneIn(16) ? input_.Number()
                                                        : engine.refs[input_.Byte() % engine.refs.size()]);
  }
}

v1::Operation StreamStory::MakeOperation(const Engine& engine) {
  v1::Operation operation;
  const uint8_t kind = input_.Byte();
  if (kind / 16 % 4 == 3) operation.set_after(1 + kind % 3);
  switch (kind % 16) {
    case 0:
    case 1:
    case 2:
      operation.mutable_lease()->set_count(input_.Below(9));
      break;
    case 3:
    case 4:
      AddBlocks(engine, operation.mutable_release()->mutable_blocks());
      break;
    case 5:
      AddBlocks(engine, operation.mutable_ref()->mutable_blocks());
      break;
    case 6:
    case 7:
      operation.mutable_fence()->set_step(input_.Below(5));
      break;
    case 8:
      AddBlocks(engine, operation.mutable_touch()->mutable_blocks());
      break;
    case 9:
    case 10: {
      v1::Seal* const seal = operation.mutable_seal();
      AddBlocks(engine, seal->mutable_blocks());
      seal->set_key_bytes(32);
      seal->set_keys(std::string(size_t{32} * seal->blocks_size(), static_cast<char>('a' + input_.Below(4))));
      break;
    }
    case 11: {
      v1::GroupKeys* const group = operation.mutable_match()->add_groups();
      group->set_key_bytes(32);
      group->set_keys(std::string(32, static_cast<char>('a' + input_.Below(4))));
      break;
    }
    case 12:
      operation.mutable_pin()->set_ttl_ms(input_.Number());
      AddBlocks(engine, operation.mutable_pin()->mutable_blocks());
      break;
    case 13:
      operation.mutable_warmup_done();
      break;
    case 14:
      if (input_.OneIn(8)) operation.mutable_close_session();
      break;
    default:
      if (ParseNext(&input_, &operation)) NameBlocks(engine.refs, &operation);
  }
  return operation;
}

void StreamStory::SayOpening(Peer* peer) {
  const uint8_t terms = input_.Byte();
  const Engine& engine = EngineOf(*peer);
  v1::StepRequest request;
  peer->has_asked = true;
  if (terms / 64 == 3) request.set_sequence(input_.Number());
  if (terms % 4 == 3) {
    const Engine& inviter = engines_[input_.Byte() % engines_.size()];
    v1::AddMember* const join = request.add_operations()->mutable_add_member();
    join->set_attach_token(engine.attach_token);
    join->set_session(inviter.session);
    join->set_invitation(inviter.member_token);
    join->mutable_role()->set_scheduler(true);
    *join->mutable_layout() = OpaqueLayout();
    join->mutable_fingerprint()->set_digest("model");
  } else {
    v1::OpenSession* const open = request.add_operations()->mutable_open_session();
    open->set_attach_token(engine.attach_token);
    *open->mutable_layout() = OpaqueLayout();
    open->mutable_fingerprint()->set_digest(terms % 4 == 2 ? "other" : "model");
    open->set_guaranteed_blocks(terms / 4 % 4 * 12);
    if (terms / 16 % 4 == 3) open->set_tenant("other");
  }
  // A second operation makes it no opening.
  if (terms / 64 == 2) *request.add_operations() = MakeOperation(engine);
  SayRequest(peer, request);
  peer->stream.Send(kAll);
}

// More than what is applied at once, or fits into the buffers on the way.
void StreamStory::SayLarge(Peer* peer) {
  Engine& engine = EngineOf(*peer);
  static constexpr std::array<int, 8> kNames = {100, 1000, 2047, 2049, 4096, 4097, 20000, 65535};
  const uint8_t how = input_.Byte();
  v1::StepRequest request;
  request.set_member_token(FirstToken(peer));
  request.set_sequence(++engine.sequence);
  v1::Operation* const operation = request.add_operations();
  operation->mutable_unpin()->mutable_blocks()->Resize(
      kNames[how % kNames.size()], engine.refs.empty() ? how : engine.refs[how % engine.refs.size()]);
  if (how / 32 == 7) operation->set_after(1);
  SayRequest(peer, request);
  peer->stream.Send(how / 8 % 4 == 3 ? 1 + input_.Number() : kAll);
}

// A frame of any bytes.
void StreamStory::SayRaw(Peer* peer) {
  const uint8_t size = input_.Byte();
  std::string bytes = input_.Bytes(size % 64);
  peer->has_asked = true;
  v1::StepRequest request;
  // What does not name a member would end the stream.
  if (size >= 64 && request.ParseFromString(bytes)) {
    if (size >= 128) request.set_member_token(EngineOf(*peer).member_token);
    NameBlocks(EngineOf(*peer).refs, &request);
    bytes = request.SerializeAsString();
  }
  peer->stream.SayFrame(bytes);
  peer->stream.Send(kAll);
}

// Sizes at all edges, and bytes that are no frame.
void StreamStory::SayBytes(Peer* peer) {
  static constexpr std::array<uint32_t, 10> kSizes = {0,
                                                      1,
                                                      255,
                                                      16 << 10,
                                                      kMaxStepRequestBytes,
                                                      kMaxStepRequestBytes + 1,
                                                      kStepEndBit - 1,
                                                      kStepEndBit,
                                                      kStepEndBit | 2,
                                                      UINT32_MAX};
  const uint8_t how = input_.Byte();
  if (how < 200) {
    const uint32_t size = kSizes[how % kSizes.size()];
    peer->stream.Say({reinterpret_cast<const char*>(&size), sizeof(size)});
  } else {
    peer->stream.Say(input_.Bytes(how % 16));
  }
  peer->has_asked = true;
  peer->stream.Send(kAll);
}

void StreamStory::Heard(Engine* engine, const v1::StepResponse& response) {
  Trace("answer", engine->session, response);
  for (const v1::OperationResult& result : response.results()) {
    if (result.has_open_session()) {
      engine->member_token = result.open_session().member_token();
      engine->session = result.open_session().session();
    }
    if (result.has_add_member()) engine->member_token = result.add_member().member_token();
    for (const uint64_t ref : result.lease().blocks()) {
      if (engine->refs.size() < kMaxRefs) engine->refs.push_back(ref);
    }
  }
}

}  // namespace kvpool::fuzz
