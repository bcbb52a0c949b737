#include "server/wire/operation.h"

#include <algorithm>

#include "proto/support/limits.h"

namespace kvpool {
namespace {

// The weight of arrays and keys inside an operation, by which a session may have some 64 MiB of them parked for the
// device, and 16 MiB of others.
constexpr size_t kBytesOfName = 256;
// So many numbers are compared or moved in the time that a block or key takes.
constexpr size_t kNumbersOfName = 128;

void AddData(const v1::Data& data, BlockLists* lists) {
  if (!data.blocks().empty()) lists->push_back(&data.blocks());
}

void AddSequence(const v1::Sequence& sequence, const v1::Signals* signals, BlockLists* lists) {
  lists->push_back(&sequence.blocks());
  if (signals == nullptr) return;
  for (const v1::Signal& signal : signals->signals()) AddData(signal.data(), lists);
  AddData(signals->window().data(), lists);
}

}  // namespace

const google::protobuf::RepeatedField<uint64_t>& BlocksOf(const v1::Operation& operation) {
  switch (operation.verb_case()) {
    case v1::Operation::kSeal:
      return operation.seal().blocks();
    case v1::Operation::kRelease:
      return operation.release().blocks();
    case v1::Operation::kRef:
      return operation.ref().blocks();
    case v1::Operation::kTouch:
      return operation.touch().blocks();
    case v1::Operation::kPin:
      return operation.pin().blocks();
    case v1::Operation::kUnpin:
      return operation.unpin().blocks();
    case v1::Operation::kSetRetention:
      return operation.set_retention().blocks();
    case v1::Operation::kLease:
    case v1::Operation::kMatch:
    case v1::Operation::kFence:
    case v1::Operation::kWarmupDone:
    case v1::Operation::kCloseSession:
    case v1::Operation::kOpenSession:
    case v1::Operation::kAddMember:
    case v1::Operation::kScore:
    case v1::Operation::kSelect:
    case v1::Operation::kPrune:
    case v1::Operation::kCompact:
    case v1::Operation::kPlanBudgets:
    case v1::Operation::kPutEpisode:
    case v1::Operation::kChooseEpisode:
    case v1::Operation::VERB_NOT_SET:
      return v1::Release::default_instance().blocks();
  }
  return v1::Release::default_instance().blocks();
}

BlockLists BlockListsOf(const v1::Operation& operation) {
  BlockLists lists;
  if (operation.has_score()) {
    AddSequence(operation.score().sequence(), &operation.score().signals(), &lists);
  } else if (operation.has_select()) {
    AddSequence(operation.select().sequence(), nullptr, &lists);
    AddData(operation.select().window().data(), &lists);
    AddData(operation.select().into(), &lists);
  } else if (operation.has_prune()) {
    AddSequence(operation.prune().sequence(), &operation.prune().signals(), &lists);
  } else if (operation.has_compact()) {
    AddSequence(operation.compact().sequence(), &operation.compact().signals(), &lists);
    if (!operation.compact().low().blocks().empty()) lists.push_back(&operation.compact().low().blocks());
    AddData(operation.compact().less().weights(), &lists);
    AddData(operation.compact().less().previous(), &lists);
    AddData(operation.compact().less().state(), &lists);
  } else if (operation.has_plan_budgets()) {
    for (const v1::GroupSequence& group : operation.plan_budgets().sequences()) {
      AddSequence(group.sequence(), nullptr, &lists);
      AddData(group.window().data(), &lists);
    }
  } else if (operation.has_put_episode()) {
    for (const v1::Sequence& sequence : operation.put_episode().sequences()) {
      AddSequence(sequence, nullptr, &lists);
    }
  }
  return lists;
}

size_t CountBlocks(const v1::Operation& operation) {
  if (!NamesLists(operation.verb_case())) return BlocksOf(operation).size();
  size_t count = 0;
  for (const auto* list : BlockListsOf(operation)) count += list->size();
  return count;
}

size_t WeightOf(const v1::Operation& operation) {
  if (operation.has_seal()) {
    // Each batch is weighed by each of its operations: Protobuf's count of all bytes takes longer.
    const v1::Seal& seal = operation.seal();
    const auto blocks = static_cast<size_t>(seal.blocks_size());
    return blocks +
           (blocks * sizeof(uint64_t) + seal.keys().size() + seal.parent_key().size()) / kBytesOfName;
  }
  const size_t blocks = CountBlocks(operation);
  return NamesLists(operation.verb_case()) ? blocks + operation.ByteSizeLong() / kBytesOfName : blocks;
}

size_t NumbersOf(const v1::Operation& operation) {
  // All centroids of the session are looked at or moved.
  if (operation.has_put_episode()) {
    return static_cast<size_t>(operation.put_episode().centroid_size()) * kMaxEpisodes / kNumbersOfName;
  }
  if (operation.has_choose_episode()) {
    return static_cast<size_t>(operation.choose_episode().embedding_size()) * kMaxEpisodes / kNumbersOfName;
  }
  if (!operation.has_plan_budgets()) return 0;
  // A layer is planned in the time that a block or key takes.
  const v1::PlanBudgets& plan = operation.plan_budgets();
  return std::max<size_t>(std::min(plan.layers(), kMaxLayers), static_cast<size_t>(plan.statistics_size()));
}

std::vector<uint32_t> BlockIdsOf(const v1::Operation& operation) {
  std::vector<uint32_t> ids;
  ids.reserve(CountBlocks(operation));
  ForEachBlock(operation, [&](uint32_t block) { ids.push_back(block); });
  return ids;
}

}  // namespace kvpool
