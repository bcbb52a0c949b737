// The batches of the Step stream: turns commands into batches, keeps those that have no answer yet, and hands
// answers to whoever waits for them.
//
// At most 16 batches are unanswered, which is what the daemon reads; more commands wait in their ring. A
// batch keeps its sequence number until it is answered: after a broken stream all unanswered ones are sent
// again, in order, and the daemon applies each once. Used by one thread at a time: whoever drives the stream.
#ifndef KVPOOL_CLIENT_SESSION_STEP_BATCHES_H_
#define KVPOOL_CLIENT_SESSION_STEP_BATCHES_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/session/command.h"
#include "client/session/magazine.h"
#include "client/session/session_state.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/limits.h"

namespace kvpool {

class StepBatches {
 public:
  static constexpr size_t kUnansweredBatches = 16;
  static constexpr size_t kBatchOperations = kMaxBatchOperations;
  static constexpr size_t kBatchNames = kMaxNames;

  struct Parts {
    CommandRing* commands = nullptr;
    Magazine* magazine = nullptr;
    SessionState* state = nullptr;
    std::function<void(const v1::Notice&)> on_notice;  // May be empty.
    std::string member_token;
  };
  explicit StepBatches(Parts parts) : parts_(std::move(parts)) {}

  // Begins a new stream: unanswered batches are sent again from the start. The first batch on it names the
  // member, and is empty if there is nothing to send. The fence is said again, as another daemon may not know it.
  void StartStream();
  // The next batch to write, valid until its answer; null: there is none, or too many are unanswered.
  const v1::StepRequest* Next();
  // Takes an answer apart; `response` is consumed.
  void OnResponse(v1::StepResponse* response);
  // The daemon is gone, maybe for a while: matches without an answer found nothing, nor do those that were not sent. What
  // they find after all is given back.
  void LetMatchesGo();
  // The session is over: answers every waiting call, and every later one, with `reason`.
  void Abort(const absl::Status& reason);
  // Whether there is something to send, room or not.
  bool HasWork() const;
  bool all_answered() const { return unanswered_.empty(); }

 private:
  struct Batch {
    v1::StepRequest request;
    std::vector<std::shared_ptr<AnswerState>> answers;  // Parallel to the operations.
    std::vector<std::shared_ptr<AnswerState>> flushes;  // These wait for this batch's answer.
    std::vector<bool>
        completed;  // Parallel, or empty: the operation's completion came before the batch's own answer.
    uint64_t match_keys = 0;
  };
  using ParkedId = std::pair<uint64_t, uint32_t>;  // The batch's sequence, and the index in it.
  struct Parked {
    v1::Operation::VerbCase verb = v1::Operation::VERB_NOT_SET;
    uint64_t blocks = 0;
    std::shared_ptr<AnswerState> answer;  // Null: nobody waits.
  };

  void FillFromCommands(Batch* batch);
  void FillOwn(Batch* batch);
  void AddOperation(Batch* batch, const Command& command);
  void AddRelease(Batch* batch, const std::vector<BlockRef>& refs);
  void OnResult(Batch* batch, int index, v1::OperationResult* result);
  // Sees to it that a refusal is heard: refusals.h says by whom. `blocks` are those that the operation names.
  void OnRefusals(v1::Operation::VerbCase verb, uint64_t blocks, const v1::OperationResult& result);
  void OnLease(const v1::LeaseResult& result, const absl::Status& status);
  void OnNotice(const v1::Notice& notice);
  void Deliver(const std::shared_ptr<AnswerState>& answer, const absl::Status& status,
               v1::OperationResult* result);

  const Parts parts_;
  std::deque<std::unique_ptr<Batch>> unanswered_;  // Ordered by sequence.
  size_t next_to_write_ = 0;                       // Index in unanswered_ of the next one for this stream.
  bool first_on_stream_ = true;
  bool takes_prefills_ = false;  // This stream's daemon has said so.
  uint64_t next_sequence_ = 1;
  uint64_t acknowledged_ = 0;
  uint64_t fence_sent_ = 0;
  std::map<ParkedId, Parked> parked_;  // These wait for a completion.
  // Holds that nobody waits for, or that go back: the next batch releases them.
  std::vector<BlockRef> returns_;
  std::vector<std::unique_ptr<Batch>> spare_;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_STEP_BATCHES_H_
