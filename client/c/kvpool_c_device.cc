// The C ABI of device operations.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "client/c/kvpool.h"
#include "client/c/kvpool_c_session.h"
#include "client/session.h"
#include "kvpool/v1/engine.pb.h"
#include "proto/support/status_macros.h"

namespace {

using kvpool::Answer;
using kvpool::Pending;
using kvpool::v1::CompactResult;
using kvpool::v1::PlanBudgetsResult;
using kvpool::v1::PruneResult;
using kvpool::v1::PutEpisodeResult;
using kvpool::v1::ScoreResult;
using kvpool::v1::SelectResult;

using AnyPending =
    std::variant<Pending<ScoreResult>, Pending<SelectResult>, Pending<PruneResult>, Pending<CompactResult>,
                 Pending<PlanBudgetsResult>, Pending<PutEpisodeResult>>;

ScoreResult* PartOf(kvpool::v1::OperationResult* result, const ScoreResult&) {
  return result->mutable_score();
}
SelectResult* PartOf(kvpool::v1::OperationResult* result, const SelectResult&) {
  return result->mutable_select();
}
PruneResult* PartOf(kvpool::v1::OperationResult* result, const PruneResult&) {
  return result->mutable_prune();
}
CompactResult* PartOf(kvpool::v1::OperationResult* result, const CompactResult&) {
  return result->mutable_compact();
}
PlanBudgetsResult* PartOf(kvpool::v1::OperationResult* result, const PlanBudgetsResult&) {
  return result->mutable_plan_budgets();
}
PutEpisodeResult* PartOf(kvpool::v1::OperationResult* result, const PutEpisodeResult&) {
  return result->mutable_put_episode();
}

absl::StatusOr<AnyPending> Send(kvpool::Session* session, const kvpool::v1::Operation& operation) {
  if (operation.has_score()) return session->Score(operation.score(), operation.after());
  if (operation.has_select()) return session->Select(operation.select(), operation.after());
  if (operation.has_prune()) return session->Prune(operation.prune(), operation.after());
  if (operation.has_compact()) return session->Compact(operation.compact(), operation.after());
  if (operation.has_plan_budgets()) return session->PlanBudgets(operation.plan_budgets(), operation.after());
  if (operation.has_put_episode()) return session->PutEpisode(operation.put_episode(), operation.after());
  return absl::InvalidArgumentError(
      "request: none of score, select, prune, compact, plan_budgets and put_episode");
}

}  // namespace

struct kvpool_operation {
  AnyPending pending;
  kvpool::v1::OperationResult result;
  std::string serialised;
  bool done = false;
};

namespace kvpool {

int StartOperation(kvpool_session* session, const v1::Operation& request, kvpool_operation** operation) {
  absl::StatusOr<AnyPending> pending = Send(session->session.get(), request);
  if (!pending.ok()) return Answer(pending.status());
  *operation = new kvpool_operation{.pending = *std::move(pending), .result = {}, .serialised = {}};
  return Answer(absl::OkStatus());
}

}  // namespace kvpool

int kvpool_prune_start(kvpool_session* session, const kvpool_prune_arguments* arguments,
                       kvpool_operation** operation) {
  const auto read = kvpool::ReadStruct(arguments, "kvpool_prune_arguments");
  if (!read.ok()) return Answer(read.status());
  kvpool::v1::Operation request;
  request.set_after(read->after);
  kvpool::v1::Prune* prune = request.mutable_prune();
  prune->mutable_sequence()->set_group(read->group);
  prune->mutable_sequence()->mutable_blocks()->Add(read->blocks, read->blocks + read->block_count);
  prune->mutable_sequence()->set_last_block_tokens(read->last_block_tokens);
  if (read->policy != nullptr) prune->mutable_policy()->set_name(read->policy);
  prune->set_budget_tokens(read->budget_tokens);
  prune->set_dry_run(read->dry_run != 0);
  return kvpool::StartOperation(session, request, operation);
}

int kvpool_operation_start(kvpool_session* session, const void* request, size_t request_bytes,
                           kvpool_operation** operation) {
  kvpool::v1::Operation parsed;
  if (!parsed.ParseFromArray(request, static_cast<int>(request_bytes))) {
    return Answer(absl::InvalidArgumentError(
        absl::StrCat("request: ", request_bytes, " bytes are no kvpool.v1.Operation")));
  }
  return kvpool::StartOperation(session, parsed, operation);
}

int kvpool_operation_ready(const kvpool_operation* operation) {
  return operation->done ||
         std::visit([](const auto& pending) { return pending.Ready(); }, operation->pending);
}

int kvpool_operation_wait(kvpool_operation* operation, uint32_t timeout_ms, const void** result,
                          size_t* result_bytes) {
  if (!operation->done) {
    const absl::Status status = std::visit(
        [&](auto& pending) -> absl::Status {
          ASSIGN_OR_RETURN(auto answer, pending.Wait(kvpool::In(timeout_ms)));
          *PartOf(&operation->result, answer) = std::move(answer);
          return absl::OkStatus();
        },
        operation->pending);
    if (!status.ok()) return Answer(status);
    operation->result.SerializeToString(&operation->serialised);
    operation->done = true;
  }
  if (result != nullptr) {
    *result = operation->serialised.data();
    *result_bytes = operation->serialised.size();
  }
  return Answer(absl::OkStatus());
}

int kvpool_operation_table(const kvpool_operation* operation, kvpool_block* blocks, size_t capacity,
                           size_t* count) {
  if (!operation->done) return Answer(absl::FailedPreconditionError("kvpool_operation_wait comes first"));
  const auto& table =
      operation->result.has_prune() ? operation->result.prune().table() : operation->result.compact().table();
  *count = static_cast<size_t>(table.size());
  if (blocks == nullptr) return Answer(absl::OkStatus());
  if (*count > capacity) {
    return Answer(
        absl::ResourceExhaustedError(absl::StrCat(*count, " blocks stay, there is room for ", capacity)));
  }
  std::copy(table.begin(), table.end(), blocks);
  return Answer(absl::OkStatus());
}

void kvpool_operation_free(kvpool_operation* operation) { delete operation; }
