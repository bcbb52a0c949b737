// Verbs that are sent as the caller wrote them: device operations and episodes.
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "client/session/session_rep.h"
#include "proto/support/status_macros.h"

namespace kvpool {
namespace {

using Refs = google::protobuf::RepeatedField<uint64_t>;

void Name(const Refs& refs, std::vector<BlockRef>* blocks) {
  for (const uint64_t ref : refs) blocks->push_back(BlockRef::Unpack(ref));
}

template <typename Request>  // Score, Prune or Compact.
std::vector<BlockRef> BlocksNamedBy(const Request& request) {
  std::vector<BlockRef> blocks;
  Name(request.sequence().blocks(), &blocks);
  for (const v1::Signal& signal : request.signals().signals()) Name(signal.data().blocks(), &blocks);
  Name(request.signals().window().data().blocks(), &blocks);
  if constexpr (std::is_same_v<Request, v1::Compact>) Name(request.low().blocks(), &blocks);
  return blocks;
}

std::vector<BlockRef> BlocksNamedBy(const v1::Select& request) {
  std::vector<BlockRef> blocks;
  Name(request.sequence().blocks(), &blocks);
  Name(request.window().data().blocks(), &blocks);
  Name(request.into().blocks(), &blocks);
  return blocks;
}

std::vector<BlockRef> BlocksNamedBy(const v1::PlanBudgets& request) {
  std::vector<BlockRef> blocks;
  for (const v1::GroupSequence& group : request.sequences()) {
    Name(group.sequence().blocks(), &blocks);
    Name(group.window().data().blocks(), &blocks);
  }
  return blocks;
}

}  // namespace

absl::StatusOr<std::shared_ptr<AnswerState>> Session::SendOperation(std::unique_ptr<v1::Operation> operation,
                                                                    std::vector<BlockRef> blocks,
                                                                    uint64_t after) {
  const size_t names = blocks.size() + operation->ByteSizeLong() / Command::kBytesOfName;
  if (names > StepBatches::kBatchNames / 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("the request names ", blocks.size(), " blocks and has ", operation->ByteSizeLong(),
                     " bytes: blocks and bytes / ", Command::kBytesOfName, " may be ",
                     StepBatches::kBatchNames / 2, " together; arrays can be in blocks"));
  }
  ASSIGN_OR_RETURN(Command * command, rep_->NewCommand(Command::Verb::kOnDevice));
  // The daemon reads these blocks and may release them: until then they must not go back to the magazine.
  rep_->magazine->Share(blocks);
  command->after = rep_->FenceOf(after);
  command->blocks = std::move(blocks);
  command->operation = std::move(operation);
  command->answer = rep_->NewAnswer(this);
  std::shared_ptr<AnswerState> answer = command->answer;
  rep_->Send(StepStream::Urgency::kAwaited);
  return answer;
}

absl::StatusOr<Pending<v1::ScoreResult>> Session::Score(const v1::Score& request, uint64_t after) {
  auto operation = std::make_unique<v1::Operation>();
  *operation->mutable_score() = request;
  ASSIGN_OR_RETURN(auto answer, SendOperation(std::move(operation), BlocksNamedBy(request), after));
  return Pending<v1::ScoreResult>(std::move(answer));
}

absl::StatusOr<Pending<v1::SelectResult>> Session::Select(const v1::Select& request, uint64_t after) {
  auto operation = std::make_unique<v1::Operation>();
  *operation->mutable_select() = request;
  ASSIGN_OR_RETURN(auto answer, SendOperation(std::move(operation), BlocksNamedBy(request), after));
  return Pending<v1::SelectResult>(std::move(answer));
}

absl::StatusOr<Pending<v1::PruneResult>> Session::Prune(const v1::Prune& request, uint64_t after) {
  auto operation = std::make_unique<v1::Operation>();
  *operation->mutable_prune() = request;
  ASSIGN_OR_RETURN(auto answer, SendOperation(std::move(operation), BlocksNamedBy(request), after));
  return Pending<v1::PruneResult>(std::move(answer));
}

absl::StatusOr<Pending<v1::CompactResult>> Session::Compact(const v1::Compact& request, uint64_t after) {
  auto operation = std::make_unique<v1::Operation>();
  *operation->mutable_compact() = request;
  ASSIGN_OR_RETURN(auto answer, SendOperation(std::move(operation), BlocksNamedBy(request), after));
  return Pending<v1::CompactResult>(std::move(answer));
}

absl::StatusOr<Pending<v1::PlanBudgetsResult>> Session::PlanBudgets(const v1::PlanBudgets& request,
                                                                    uint64_t after) {
  auto operation = std::make_unique<v1::Operation>();
  *operation->mutable_plan_budgets() = request;
  ASSIGN_OR_RETURN(auto answer, SendOperation(std::move(operation), BlocksNamedBy(request), after));
  return Pending<v1::PlanBudgetsResult>(std::move(answer));
}

absl::StatusOr<Pending<v1::PutEpisodeResult>> Session::PutEpisode(const v1::PutEpisode& request,
                                                                  uint64_t after) {
  auto operation = std::make_unique<v1::Operation>();
  *operation->mutable_put_episode() = request;
  std::vector<BlockRef> blocks;
  for (const v1::Sequence& sequence : request.sequences()) Name(sequence.blocks(), &blocks);
  ASSIGN_OR_RETURN(auto answer, SendOperation(std::move(operation), std::move(blocks), after));
  return Pending<v1::PutEpisodeResult>(std::move(answer));
}

absl::StatusOr<Pending<EpisodeHit>> Session::ChooseEpisode(const v1::ChooseEpisode& request) {
  auto operation = std::make_unique<v1::Operation>();
  *operation->mutable_choose_episode() = request;
  ASSIGN_OR_RETURN(auto answer, SendOperation(std::move(operation), {}, /*after=*/0));
  return Pending<EpisodeHit>(std::move(answer));
}

}  // namespace kvpool
