#include "server/space/space.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/base/random_bytes.h"
#include "server/replacement/policy.h"
#include "server/scoring/lost_gpu.h"
#include "server/space/kept_facts.h"

namespace kvpool {
namespace {

// Device memory that ran out for other reasons than the budget is asked for again after this.
constexpr uint64_t kGrowthRetryMs = 10000;
constexpr auto kWayPause = std::chrono::microseconds(20);
// A thread that was let in may be stopped by the kernel before it lets go.
constexpr int kMostWayPauses = 64;
// One call waits so long before it looks whether another is done.
constexpr auto kLongRest = std::chrono::microseconds(100);

// A GPU's context that is gone took with it what blocks hold: a corrupted pool is never served.
void CheckNotLost(const absl::Status& status, uint64_t space, const std::string& doing) {
  EndIfGpuIsLost(status, absl::StrCat("space ", space, ": ", doing));
}

uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// What this thread has had of a processor. It is a call of the kernel: 0.5 to 1.5 us.
uint64_t WorkedNs() {
  timespec worked;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &worked);
  return static_cast<uint64_t>(worked.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(worked.tv_nsec);
}

}  // namespace

Space::Space(SpaceFacts facts, const PoolOptions& options, Parts parts)
    : facts(std::move(facts)),
      table(std::move(parts.table)),
      state(&this->facts, options, std::move(parts.policy), parts.clock->NowMs()),
      verbs(&state, parts.event_log),
      device_verbs(&state, &verbs, std::move(parts.runners)),
      batches(&state, &verbs, &device_verbs),
      budget_(parts.budget),
      freed_(parts.freed),
      owner_(parts.owner),
      clock_(parts.clock),
      keeper_(parts.keeper),
      measure_work_(parts.measure_work) {
  if (parts.verify) state.checks.TurnOn();
}

// --------------------------------------------------------------------------------------------------- turns

void Space::Lock() {
  if (!mu.TryLock()) {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mu.Lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    let_in_.fetch_add(1, std::memory_order_relaxed);
  }
  locked_ns_ = NowNs();
  if (measure_work_) worked_ns_ = WorkedNs();
}

void Space::Unlock() {
  if (measure_work_) state.hold_work.Observe(static_cast<double>(WorkedNs() - worked_ns_) * 1e-9);
  state.hold.Observe(static_cast<double>(NowNs() - locked_ns_) * 1e-9);
  state.pool.Commit();
  mu.Unlock();
}

void Space::GiveWay() {
  const uint32_t waiting = waiting_.load(std::memory_order_relaxed);
  const uint32_t let_in = let_in_.load(std::memory_order_relaxed);
  // Some kernels let a thread that computes go on to the next tick, 4 ms, whoever wakes up beside it, unless it enters
  // the kernel by itself.
  std::this_thread::yield();
  for (int i = 0; i < kMostWayPauses && waiting_.load(std::memory_order_relaxed) > 0 &&
                  let_in_.load(std::memory_order_relaxed) - let_in < waiting;
       ++i) {
    std::this_thread::sleep_for(kWayPause);
  }
}

uint64_t SpaceTurn::LockAndReadClock(Space& space) {
  space.Lock();
  return space.NowMs();
}

SpaceTurn::SpaceTurn(Space& space, Settlement* settlement)
    : Settlement(space), Turn(LockAndReadClock(space), &settlement->pending()) {}

SpaceTurn::~SpaceTurn() {
  space_.state.EndTurn(*this);
  space_.Unlock();
}

void SpaceTurn::Pause(Rest rest) {
  Outside([rest] {
    if (rest == Rest::kLong) std::this_thread::sleep_for(kLongRest);
  });
}

void SpaceTurn::Outside(absl::FunctionRef<void()> work) {
  space_.state.EndTurn(*this);
  space_.Unlock();
  work();
  space_.GiveWay();
  now = LockAndReadClock(space_);
  WorkBegins();
}

void Space::Settle(Settlement* settlement) {
  const Deferred& deferred = settlement->pending();
  if (deferred.send) SendFrames(settlement);
  if (!deferred.dropped.empty()) AnswerDropped(settlement);
  for (const auto& listener : deferred.wake) listener->OnPending();
  for (const auto& listener : deferred.superseded) listener->OnSuperseded();
  for (const Deferred::Answer& answer : deferred.answers) {
    for (const Waiter& waiter : answer.waiters) waiter(answer.result);
  }
  for (const Deferred::Hangup& hangup : deferred.hangups) hangup.peer->Close(hangup.reason);
  if (!deferred.ended.empty() || !deferred.gone.empty() || !deferred.promotions.empty() ||
      deferred.housekeep || deferred.reclaim) {
    owner_->AfterTurn(this, deferred);
  }
}

void Space::AnswerDropped(Settlement* settlement) {
  // The turns below may defer anything but this: a session ends once.
  for (Deferred::Dropped& dropped : std::exchange(settlement->pending().dropped, {})) {
    while (true) {
      std::vector<ParkedVerb> verbs = dropped.verbs.PopSome(Turn::kNames);
      if (verbs.empty()) break;
      {
        SpaceTurn turn(*this, settlement);
        state.sessions.AnswerDropped(turn, dropped, std::move(verbs));
      }
      GiveWay();
    }
  }
}

void Space::SendFrames(Settlement* settlement) {
  {
    SpaceLock lock(*this);
    if (!state.sessions.outbox().BeginSending()) return;
  }
  while (true) {
    std::optional<OutgoingFrame> out;
    {
      SpaceLock lock(*this);
      out = state.sessions.outbox().Next();
    }
    if (!out.has_value()) return;
    const std::shared_ptr<Session> session = out->session;
    const uint32_t slab = out->frame.slab().slab();
    if (const absl::Status status = SendFrame(*std::move(out)); !status.ok()) {
      CheckNotLost(status, facts.id, absl::StrCat("sending slab ", slab));
      SpaceTurn turn(*this, settlement);
      state.sessions.End(turn, session.get(), EndKind::kUnsentSlab,
                         absl::StrCat("session ", session->terms.id, " ended: slab ", slab,
                                      " could not be sent: ", std::string(status.message())),
                         nullptr);
    }
  }
}

absl::Status Space::SendFrame(OutgoingFrame out) {
  UniqueFd fd;
  if (out.slab != nullptr) {
    if (facts.kind == v1::SPACE_KIND_IPC) {
      ASSIGN_OR_RETURN(const IpcHandle handle, out.slab->ipc_handle());
      out.frame.mutable_slab()->set_ipc_handle(handle.data(), handle.size());
    } else {
      ASSIGN_OR_RETURN(fd, out.slab->Export());
    }
  }
  out.peer->Send(out.frame, std::move(fd));
  return absl::OkStatus();
}

// --------------------------------------------------------------------------------------------------- slabs

void Space::ApplyTerms() {
  const uint32_t limit = state.give_back.limit_blocks();
  state.growth.set_limit(limit == 0 ? UINT32_MAX : limit, NowMs());
  weight_.store(state.give_back.weight(), std::memory_order_relaxed);
  priority_.store(state.give_back.priority(), std::memory_order_relaxed);
}

void Space::BeginOpening(const GiveBack::Terms& of_rule) {
  ++state.give_back.openings;
  state.give_back.of_rule = of_rule;
  ApplyTerms();
}

void Space::KeepTerms(const std::string& rule, const GiveBack::Terms& of_rule) {
  state.give_back.kept = of_rule;
  state.give_back.rule = rule;
  KeepShares();
  if (state.give_back.openings > 0) return;
  state.give_back.of_rule = of_rule;
  ApplyTerms();
}

void Space::KeepShares() {
  if (table == nullptr) return;
  const GiveBack& give_back = state.give_back;
  KeptShares shares{.share_blocks = give_back.share_blocks,
                    .operator_limit_blocks = give_back.of_operator.limit_blocks,
                    .operator_weight = give_back.of_operator.weight,
                    .rule_limit_blocks = give_back.kept.limit_blocks,
                    .rule_weight = give_back.kept.weight,
                    .operator_priority = static_cast<uint32_t>(give_back.of_operator.priority),
                    .rule_priority = static_cast<uint32_t>(give_back.kept.priority),
                    .asked_priority = static_cast<uint32_t>(give_back.kept.asked)};
  shares.rule_bytes = static_cast<uint32_t>(give_back.rule.copy(shares.rule, sizeof(shares.rule)));
  table->KeepShares(shares);
}

void Space::EndOpening() {
  if (--state.give_back.openings > 0) return;
  state.give_back.of_rule = state.give_back.kept;
  ApplyTerms();
}

absl::Status Space::MakeSlab(Settlement* settlement) {
  const SpaceGeometry& geometry = facts.geometry;
  const auto closed = [this] {
    return absl::UnavailableError(absl::StrCat("space ", facts.id, " is closed"));
  };
  uint64_t left_bytes = 0;
  uint32_t made = 0;
  Growth::Place place;
  CancelGiveBack();
  {
    SpaceLock lock(*this);
    Growth& growth = state.growth;
    if (growth.closed()) return closed();
    if (growth.leaving().has_value()) {
      return absl::FailedPreconditionError(
          absl::StrCat("space ", facts.id, " gives a slab back: ", state.give_back.Obstacle()));
    }
    if (growth.complete()) {
      growth.set_may_grow(false);
      const uint32_t has = growth.made_blocks();
      if (!growth.has_hole() || has >= growth.max_blocks()) {
        return absl::ResourceExhaustedError(
            absl::StrCat("space ", facts.id, " has all of its ", has, " blocks"));
      }
      const Growth::Place next = growth.NextPlace();
      return absl::ResourceExhaustedError(
          absl::StrCat("space ", facts.id, " may have ", growth.max_blocks() - has,
                       " more blocks, and the slab that it gave back from block ", next.first_block,
                       " on has ", next.room_blocks));
    }
    made = growth.made_blocks();
    place = growth.NextPlace();
    const uint32_t most = growth.max_blocks() - made;
    left_bytes = uint64_t{std::min(most, place.room_blocks)} * geometry.block_stride_bytes;
  }
  const DeviceBudget::Want want{.tenant = facts.tenant,
                                .bytes = std::min(geometry.slab_bytes, left_bytes),
                                .unit = place.whole ? left_bytes : geometry.unit_bytes};
  const absl::StatusOr<uint64_t> bytes = budget_->Take(facts.rank_devices, want);
  absl::StatusOr<SlabRow> row = bytes.ok() ? MakeRow(place, *bytes) : bytes.status();
  if (!row.ok()) {
    if (bytes.ok()) budget_->Give(facts.rank_devices, facts.tenant, *bytes);
    SpaceLock lock(*this);
    state.growth.Block(clock_->NowMs() + (bytes.ok() ? kGrowthRetryMs : 0));
    // The budget is for the housekeeper to watch; a device that says no is news, once.
    if (bytes.ok() && state.counters.growth_failures++ == 0) {
      LogWarning("space can't grow", {{"space", facts.id}, {"error", row.status()}});
    }
    return row.status();
  }
  freed_->OnMade(facts.rank_devices, row->bytes);
  ExpectBlocks(made + row->block_count);
  LogInfo("slab made", {{"space", facts.id}, {"bytes", *bytes}, {"ranks", facts.devices.size()}});
  const bool room = budget_->Room(facts.rank_devices, facts.tenant) >= geometry.unit_bytes;
  {
    SpaceTurn turn(*this, settlement);
    if (!state.growth.closed()) {
      slab_bytes_.fetch_add(row->bytes, std::memory_order_relaxed);
      state.sessions.AddSlab(turn, *std::move(row));
      state.growth.set_may_grow(room && !state.growth.complete());
      return absl::OkStatus();
    }
  }
  DestroyRow(*std::move(row), Slabs::kStayWithOthers);
  return closed();
}

void Space::ExpectBlocks(uint32_t blocks) {
  ExpectMemory(blocks);
  while (true) {
    {
      SpaceLock lock(*this);
      if (state.pool.Prepare(blocks, BlockPool::kPrepareSlice)) return;
    }
    GiveWay();
  }
}

void Space::CancelGiveBack() {
  while (true) {
    {
      SpaceLock lock(*this);
      const bool gives = !state.growth.closed() && !state.growth.leaving().has_value();
      if (!gives || !state.give_back.Cancel()) return;
    }
    GiveWay();
  }
}

GiveBack::Next Space::GiveBackStep(Settlement* settlement) {
  std::vector<GiveBack::Copy> copies;
  std::optional<SlabRow> row;
  GiveBack::Next next;
  {
    SpaceTurn turn(*this, settlement);
    if (state.growth.closed()) return GiveBack::Next::kDone;
    std::vector<Eviction> evictions;
    next = state.give_back.Step(turn, &copies, &evictions);
    state.Observe(evictions);
    if (next == GiveBack::Next::kDestroy) {
      row = state.growth.TakeLeft();
      ++state.give_back.destroying;
    }
  }
  if (next == GiveBack::Next::kPlaces) {
    const absl::Status kept = KeepPlaces();
    if (!kept.ok()) LogWarning("space gives its last slab alone", {{"space", facts.id}, {"error", kept}});
    SpaceLock lock(*this);
    state.give_back.OnPlaces(kept.ok(), clock_->NowMs());
    return GiveBack::Next::kGoOn;
  }
  if (next == GiveBack::Next::kCopy) {
    const absl::Status copied = CopyAll(copies);
    CheckNotLost(copied, facts.id, "moving blocks");
    SpaceTurn turn(*this, settlement);
    return state.give_back.OnCopied(turn, copies, copied.ok()) ? GiveBack::Next::kGoOn
                                                               : GiveBack::Next::kWait;
  }
  if (!row.has_value()) return next;
  const uint64_t bytes = row->bytes;
  slab_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  DestroyRow(*std::move(row), Slabs::kClosed);
  LogInfo("slab given back", {{"space", facts.id}, {"bytes", bytes}, {"ranks", facts.devices.size()}});
  SpaceLock lock(*this);
  state.give_back.OnDestroyed();
  return GiveBack::Next::kGoOn;
}

absl::Status Space::CopyAll(absl::Span<const GiveBack::Copy> copies) {
  std::vector<Device::Copy> of_rank;
  for (size_t rank = 0; rank < facts.devices.size(); ++rank) {
    of_rank.clear();
    for (const GiveBack::Copy& copy : copies) of_rank.push_back(copy.by_rank[rank]);
    RETURN_IF_ERROR(facts.devices[rank]->CopyAll(of_rank));
  }
  return absl::OkStatus();
}

absl::StatusOr<SlabRow> Space::MakeRow(const Growth::Place& place, uint64_t bytes) {
  SlabRow row;
  row.index = place.index;
  row.first_block = place.first_block;
  row.bytes = bytes;
  row.block_count = facts.geometry.blocks_in(bytes);
  row.id = RandomBytes(kSlabIdBytes);
  for (size_t rank = 0; rank < facts.devices.size(); ++rank) {
    Device* device = facts.devices[rank];
    absl::StatusOr<std::unique_ptr<Slab>> slab =
        facts.kind == v1::SPACE_KIND_IPC ? device->MakeIpcSlab(bytes) : device->MakeSlab(bytes);
    if (!slab.ok()) {
      CheckNotLost(slab.status(), facts.id, absl::StrCat("rank ", rank));
      return absl::Status(slab.status().code(),
                          absl::StrCat("rank ", rank, ": ", std::string(slab.status().message())));
    }
    row.by_rank.push_back(*std::move(slab));
  }
  RETURN_IF_ERROR(KeepRow(&row));
  return row;
}

absl::Status Space::KeepRow(SlabRow* row) {
  // What an IPC handle stands for ends with its process.
  if (keeper_ == nullptr || facts.kind == v1::SPACE_KIND_IPC) return absl::OkStatus();
  if (places_ != nullptr) places_->Set(row->index, row->first_block);
  if (row->index == 0) {
    ASSIGN_OR_RETURN(kept_table_, keeper_->Keep(KeptKind::kTable, "", table->fd()));
  }
  for (uint32_t rank = 0; rank < row->by_rank.size(); ++rank) {
    ASSIGN_OR_RETURN(const UniqueFd fd, row->by_rank[rank]->Export());
    KeptSlab kept{.space = facts.id, .bytes = row->bytes, .slab = row->index, .rank = rank, .id = {}};
    row->id.copy(kept.id, sizeof(kept.id));
    ASSIGN_OR_RETURN(row->kept.emplace_back(), keeper_->Keep(KeptKind::kSlab, FactBytes(kept), fd.get()));
  }
  return absl::OkStatus();
}

absl::Status Space::KeepPlaces() {
  if (keeper_ == nullptr || places_ != nullptr) return absl::OkStatus();
  const SpaceGeometry& geometry = facts.geometry;
  ASSIGN_OR_RETURN(
      std::unique_ptr<SlabPlaces> places,
      SlabPlaces::Make(geometry.max_blocks / std::max(1u, geometry.blocks_in(geometry.unit_bytes)) + 1));
  {
    SpaceLock lock(*this);
    for (const SlabRow& row : state.growth.slabs()) places->Set(row.index, row.first_block);
  }
  const KeptPlaces of{.space = facts.id};
  ASSIGN_OR_RETURN(kept_places_, keeper_->Keep(KeptKind::kPlaces, FactBytes(of), places->fd()));
  places_ = std::move(places);
  return absl::OkStatus();
}

void Space::DestroyRow(SlabRow row, Slabs slabs) {
  // While the keeper holds it, the memory is not free, and the next daemon would find it.
  row.kept.clear();
  if (keeper_ != nullptr) keeper_->AwaitDropped();
  // Copies to a tier and comparisons read slabs outside of the mutex, and hold them meanwhile: what those read stays until they let
  // go of it.
  freed_->Destroy(facts, row.bytes, std::move(row.by_rank), slabs == Slabs::kClosed);
}

void Space::DestroySlabs(Slabs slabs) {
  MutexLock growth(&growth_mu);
  std::vector<SlabRow> rows;
  {
    SpaceLock lock(*this);
    rows = state.growth.TakeSlabs();
    slab_bytes_.store(0, std::memory_order_relaxed);
  }
  kept_table_ = Kept();
  kept_places_ = Kept();
  for (SlabRow& row : rows) DestroyRow(std::move(row), slabs);
}

}  // namespace kvpool
