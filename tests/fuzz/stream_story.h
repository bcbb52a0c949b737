// Step streams as frames, byte by byte, through the acceptor of the gRPC socket to a whole daemon: prefaces, frames in pieces, sizes
// beyond all limits and bytes that are no frames, from peers that read late or never, half-close, hang up, and take each
// other's streams over. What peers hear feeds the oracle of stream_peer.h; a call that outlives its peers is a finding, too.
#ifndef KVPOOL_TESTS_FUZZ_STREAM_STORY_H_
#define KVPOOL_TESTS_FUZZ_STREAM_STORY_H_

#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/rpc/openings.h"
#include "server/rpc/step_call.h"
#include "server/rpc/stream_acceptor.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/stream_peer.h"
#include "tests/support/fake_clock.h"
#include "tests/support/memory_device.h"

namespace kvpool::fuzz {

class StreamStory {
 public:
  // `path` is the socket's.
  StreamStory(Input* input, const std::string& path);
  ~StreamStory();
  // Acts until the input is used up.
  void Run();

 private:
  static constexpr size_t kAll = SIZE_MAX;
  class SlabQueue;
  // A process that has an attach connection, and a session once it knows so.
  struct Engine {
    AttachId attach{};
    std::shared_ptr<SlabQueue> slabs;
    std::string attach_token, member_token;
    uint64_t session = 0;
    uint64_t sequence = 0, acknowledged = 0;
    bool hung_up = false, dead = false;
    std::vector<uint64_t> refs;  // Some that answers named.
  };
  struct Peer {
    StreamPeer stream;
    uint32_t number = 0;
    size_t engine = 0;
    bool has_spoken = false, has_asked = false;  // Its next batch is not its first.
  };

  void Act();
  Peer& Any() { return peers_[input_.Byte() % peers_.size()]; }
  // One that speaks, if it is let in.
  Peer* Speaker();
  Engine& EngineOf(const Peer& peer) { return engines_[peer.engine]; }

  // ---- Connections
  void Connect();
  // The first words.
  void Speak(Peer* peer);
  // The daemon's end of a connection has said what it is.
  void OnFrames(UniqueFd socket, std::shared_ptr<const PeerCredentials> credentials);
  void OnGrpc(const UniqueFd& socket);
  // Null: it has hung up.
  Peer* Behind(const UniqueFd& socket);
  void AcceptWithoutDescriptors();
  void HangUp();
  // So many bytes at most, or kAll that there are. False: there were none.
  bool Read(Peer* peer, size_t most);

  // ---- What streams carry
  std::string FirstToken(Peer* peer);
  void SayBatches(Peer* peer);
  void SayOpening(Peer* peer);
  void SayLarge(Peer* peer);
  void SayRaw(Peer* peer);
  void SayBytes(Peer* peer);
  void SayRequest(Peer* peer, const v1::StepRequest& request);
  v1::Operation MakeOperation(const Engine& engine);
  void AddBlocks(const Engine& engine, google::protobuf::RepeatedField<uint64_t>* blocks);
  void Heard(Engine* engine, const v1::StepResponse& response);

  // ---- Engines, operators, time
  void Attach();
  void OpenAtOnce(Engine* engine);
  void MapSlabs(Engine* engine);
  void EndEngine(Engine* engine);
  void Operate();

  // ---- What the daemon's threads do. False: nothing.
  bool RunDoor();
  bool RunWorkers() { return openings_->RunReady() || large_calls_->RunReady(); }
  // Openings and large calls wait while they are held.
  void RunAll();
  // All goes on until nothing is left to do, and everybody reads.
  void Settle();

  Input& input_;
  FakeClock clock_, door_clock_;
  MemoryDevice::Script script_;
  std::unique_ptr<Daemon> daemon_;
  RpcStats stats_;
  RefusalLog refusals_{"verb refused"};
  std::unique_ptr<Openings> openings_;
  std::unique_ptr<CallWorkers> large_calls_;
  std::unique_ptr<RpcQueue> queue_;
  StepSockets to_frames_;
  sockaddr_un address_{};
  Connections connections_{Connections::Limits{}};
  std::unique_ptr<StreamAcceptor> acceptor_;
  uint32_t connected_ = 0;
  std::vector<Engine> engines_;
  std::vector<Peer> peers_;
  bool held_ = false;
  bool paced_ = false;  // Batches may wait for longer than the story lasts.
};

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_STREAM_STORY_H_
