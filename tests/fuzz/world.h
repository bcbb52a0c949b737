// A daemon without sockets and the processes that talk to it, driven by the bytes of a fuzzer: batches, unary calls,
// openings, deaths, operators, devices and time, in any order. Messages are made of choices, which fit mostly, or
// parsed from bytes. What the daemon answers feeds the oracle of holdings.h.
#ifndef KVPOOL_TESTS_FUZZ_WORLD_H_
#define KVPOOL_TESTS_FUZZ_WORLD_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/daemon/daemon.h"
#include "tests/fuzz/holdings.h"
#include "tests/fuzz/input.h"
#include "tests/support/fake_clock.h"
#include "tests/support/memory_device.h"

namespace kvpool::fuzz {

class World {
 public:
  explicit World(Input* input);
  ~World();
  // Acts until the input is used up.
  void Run();

 private:
  class Peer;
  struct SessionFacts {
    uint64_t space = 0;
    uint32_t living = 0;  // Member processes.
  };
  struct SentOperation {
    v1::Operation operation;
    std::vector<bool> dropped;  // A release: the holds that ended when it was sent.
    uint64_t batch = 0;         // Where it was sent, by batches_.
  };
  // The answer to a unary call, which may come with a later one.
  struct LateAnswer {
    uint64_t sequence = 0;
    std::optional<v1::OperationResult> result;
  };
  struct Process {
    std::vector<std::shared_ptr<LateAnswer>> calls;  // Unary calls without an answer so far.
    AttachId attach{};
    uint64_t process = 0;  // Connections of one process have one number.
    std::shared_ptr<Peer> peer;
    std::string attach_token;
    std::shared_ptr<Member> member;  // Null before its session is open.
    std::shared_ptr<StreamListener> listener;
    std::string member_token;
    uint64_t session = 0, space = 0;
    uint64_t sequence = 0, acknowledged = 0;
    bool hung_up = false;
    std::vector<uint64_t> prompt;   // The blocks of one sequence, as far as it knows.
    std::vector<uint64_t> scratch;  // Leased, and for arrays.
    // What was sent and has no answer that counts yet, by sequence and index.
    std::map<std::pair<uint64_t, uint32_t>, SentOperation> sent;
    std::set<std::pair<uint64_t, uint32_t>> answered;
  };

  void Act();
  Process* Any();
  void Attach();
  void Open(Process* process);
  void RawOpen(Process* process);
  void OpenWith(Process* process, v1::OpenSession request);
  void Join(Process* process);
  void RawJoin(Process* process);
  void JoinWith(Process* process, v1::AddMember request);
  // The process is a member from now on.
  void Adopt(Process* process, const std::string& member_token, uint64_t session, uint64_t space);
  void Step(Process* process);
  // What an engine does for a prompt: it finds what is cached, leases and seals the rest, and may give it all back.
  void Prompt(Process* process);
  // Sends the operations and hears the answer.
  v1::StepResponse Send(Process* process, v1::StepRequest request);
  void RawStep(Process* process);
  void Call(Process* process);
  void RawCall(Process* process);
  void SendCall(Process* process, const v1::Call& call, v1::Operation operation);
  void TakePending(Process* process);
  void HearCalls(Process* process);
  void MapSlabs(Process* process);
  void HangUp(Process* process);
  // With all its connections.
  void Die(Process* process);
  void Operate();
  template <typename Request, typename Response>
  void Ask(absl::Status (Daemon::*verb)(const Request&, Response*));
  // Holds devices up, lets them go on, step by step or at once, or makes them fail.
  void TurnDevice();
  // Unless they are held up, devices are done before the next action.
  void RunDevices();
  // False: there was none to run, or one is running.
  bool RunPart(uint32_t rank);
  // Where a device has been asked to do something: others may act before it is done.
  absl::Status InPart();

  static std::string SomeReplacement(uint8_t choice);
  v1::Operation MakeOperation(const Process& process);
  void AddBlocks(google::protobuf::RepeatedField<uint64_t>* blocks);
  std::string Keys(uint32_t count);
  uint64_t ChooseSequence(Process* process);
  uint64_t SomeRef();
  // Some that were learned one after the other.
  std::vector<uint64_t> NeighbouringRefs();

  void Sent(Process* process, uint64_t sequence, uint32_t index, const v1::Operation& operation);
  void Answered(Process* process, uint64_t sequence, uint32_t index, const v1::OperationResult& result);
  void Heard(Process* process, const v1::StepResponse& response);
  // An answer gives the session a hold.
  void Gave(uint64_t session, uint64_t space, uint64_t ref, bool leased);
  void Learn(uint64_t ref);

  Input& input_;
  FakeClock clock_;
  MemoryDevice::Script script_;
  std::unique_ptr<Daemon> daemon_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::map<uint64_t, SessionFacts> sessions_;
  Holdings holdings_;
  uint64_t batches_ = 0;  // So many were sent.
  // By (session, ref): holds that completions have taken (below 0) and given, of what a result of the same response leases. Sessions
  // may name blocks before they have them.
  std::map<std::pair<uint64_t, uint64_t>, int> ahead_;
  std::vector<uint64_t> refs_;  // Some that answers named.
  uint64_t next_process_ = 100;
  v1::Layout layout_;              // Those who share a space have it.
  uint32_t ranks_ = 1;             // Each on a device of its own.
  bool scored_ = false;            // Blocks have a layout that can be scored, on host memory.
  bool hybrid_ = false;            // A second group of layers has a window.
  bool held_ = false;              // Parts wait until they are let go one by one.
  std::array<bool, 2> running_{};  // Indexed by rank.
  uint32_t acts_in_part_ = 0;      // So many actions come in the middle of what a device does next.
  absl::Status device_failure_;
};

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_WORLD_H_
