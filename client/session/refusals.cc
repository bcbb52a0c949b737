#include "client/session/refusals.h"

#include <iterator>
#include <utility>

#include "proto/support/check.h"

namespace kvpool {
namespace {

using Verb = v1::Operation::VerbCase;
using google::protobuf::RepeatedPtrField;

constexpr RefusalFate kCaller = RefusalFate::kCaller;
constexpr RefusalFate kRecorded = RefusalFate::kRecorded;
constexpr RefusalFate kEndsSession = RefusalFate::kEndsSession;
constexpr RefusalFate kHarmless = RefusalFate::kHarmless;

const RepeatedPtrField<v1::Refusal>* RefusalsOf(const v1::OperationResult& result) {
  switch (result.result_case()) {
    case v1::OperationResult::kSeal:
      return &result.seal().refused();
    case v1::OperationResult::kRelease:
      return &result.release().refused();
    case v1::OperationResult::kRef:
      return &result.ref().refused();
    case v1::OperationResult::kPin:
      return &result.pin().refused();
    case v1::OperationResult::kSetRetention:
      return &result.set_retention().refused();
    default:
      return nullptr;
  }
}

}  // namespace

const RefusalRule& RefusalRuleOf(Verb verb) {
  static constexpr RefusalRule kLease{"lease", kRecorded, kHarmless,
                                      "no block was leased: the next lease says that there are too few"};
  static constexpr RefusalRule kSeal{"seal", kCaller, kCaller, "PendingSeal"};
  static constexpr RefusalRule kMatch{"match", kCaller, kHarmless, "PendingMatch"};
  static constexpr RefusalRule kRelease{
      "release", kEndsSession, kRecorded,
      "as a whole: its blocks would stay held for ever; of a block: it was not held, nothing is lost"};
  static constexpr RefusalRule kRef{
      "ref", kEndsSession, kEndsSession,
      "the caller has the new holds already: to give them back would take those of others"};
  static constexpr RefusalRule kTouch{"touch", kHarmless, kHarmless, "advice to the replacement policy"};
  static constexpr RefusalRule kFence{
      "fence", kRecorded, kHarmless,
      "what waits for the step goes on waiting, and nothing is freed too early"};
  static constexpr RefusalRule kPin{"pin", kRecorded, kRecorded, "blocks may leave that were to stay"};
  static constexpr RefusalRule kUnpin{"unpin", kRecorded, kHarmless, "the pins end with their time"};
  static constexpr RefusalRule kSetRetention{"set_retention", kRecorded, kRecorded,
                                             "blocks may leave that were to stay"};
  static constexpr RefusalRule kWarmupDone{"warmup_done", kCaller, kHarmless, "Session::FinishWarmup"};
  static constexpr RefusalRule kCloseSession{"close_session", kCaller, kHarmless, "Session::Close"};
  static constexpr RefusalRule kScore{"score", kCaller, kHarmless, "Pending<ScoreResult>"};
  static constexpr RefusalRule kSelect{"select", kCaller, kHarmless, "Pending<SelectResult>"};
  static constexpr RefusalRule kPrune{"prune", kCaller, kHarmless, "Pending<PruneResult>"};
  static constexpr RefusalRule kCompact{"compact", kCaller, kHarmless, "Pending<CompactResult>"};
  static constexpr RefusalRule kPlanBudgets{"plan_budgets", kCaller, kHarmless, "Pending<PlanBudgetsResult>"};
  static constexpr RefusalRule kPutEpisode{"put_episode", kCaller, kHarmless, "Pending<PutEpisodeResult>"};
  static constexpr RefusalRule kChooseEpisode{"choose_episode", kCaller, kHarmless, "Pending<EpisodeHit>"};
  switch (verb) {
    case v1::Operation::kLease:
      return kLease;
    case v1::Operation::kSeal:
      return kSeal;
    case v1::Operation::kMatch:
      return kMatch;
    case v1::Operation::kRelease:
      return kRelease;
    case v1::Operation::kRef:
      return kRef;
    case v1::Operation::kTouch:
      return kTouch;
    case v1::Operation::kFence:
      return kFence;
    case v1::Operation::kPin:
      return kPin;
    case v1::Operation::kUnpin:
      return kUnpin;
    case v1::Operation::kSetRetention:
      return kSetRetention;
    case v1::Operation::kWarmupDone:
      return kWarmupDone;
    case v1::Operation::kCloseSession:
      return kCloseSession;
    case v1::Operation::kScore:
      return kScore;
    case v1::Operation::kSelect:
      return kSelect;
    case v1::Operation::kPrune:
      return kPrune;
    case v1::Operation::kCompact:
      return kCompact;
    case v1::Operation::kPlanBudgets:
      return kPlanBudgets;
    case v1::Operation::kPutEpisode:
      return kPutEpisode;
    case v1::Operation::kChooseEpisode:
      return kChooseEpisode;
    case v1::Operation::kOpenSession:  // These two are unary calls of the client, which waits for them.
    case v1::Operation::kAddMember:
    case v1::Operation::VERB_NOT_SET:
      break;
  }
  KVPOOL_CHECK(false, "verb %d is not sent on the stream", verb);
}

uint64_t RefusedBlocks(const v1::OperationResult& result) {
  const RepeatedPtrField<v1::Refusal>* refusals = RefusalsOf(result);
  return refusals == nullptr ? 0 : static_cast<uint64_t>(refusals->size());
}

absl::Status WhyRefused(const v1::OperationResult& result) {
  const RepeatedPtrField<v1::Refusal>* refusals = RefusalsOf(result);
  if (refusals == nullptr || refusals->empty()) return absl::OkStatus();
  const v1::Refusal& first = refusals->Get(0);
  return absl::Status(static_cast<absl::StatusCode>(first.code()), first.message());
}

void RefusalRecord::Add(Refusal refusal) {
  MutexLock lock(&mu_);
  if (refusals_.size() == kKept) refusals_.pop_front();
  refusals_.push_back(std::move(refusal));
}

std::vector<Refusal> RefusalRecord::Take() {
  MutexLock lock(&mu_);
  std::vector<Refusal> refusals(std::make_move_iterator(refusals_.begin()),
                                std::make_move_iterator(refusals_.end()));
  refusals_.clear();
  return refusals;
}

}  // namespace kvpool
