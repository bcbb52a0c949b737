#include "server/daemon/tier_mover.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>
#include <utility>

#include "proto/support/named_thread.h"
#include "server/base/log.h"
#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

constexpr auto kPause = std::chrono::milliseconds(20);
// A tier that takes nothing, and blocks that could not be copied, are left alone for so long.
constexpr uint64_t kGiveUpMs = 1000;
// Spaces that were closed are not looked for among those that are left alone: all are asked again now and then.
constexpr size_t kMostGivenUp = 1024;
// No space has this id.
constexpr uint64_t kAllSpaces = 0;

}  // namespace

TierMover::TierMover(Options options, Spaces spaces)
    : tiers_(*options.tiers),
      spaces_(std::move(spaces)),
      buffer_bytes_(options.buffer_bytes),
      copier_(std::move(options.copier)),
      down_(options.buffer_bytes, copier_->MakeMemory(options.buffer_bytes)),
      up_(options.buffer_bytes, copier_->MakeMemory(options.buffer_bytes)) {
  if (options.thread) thread_ = NamedThread("tier-mover", [this] { Run(); });
}

TierMover::~TierMover() { Stop(); }

void TierMover::Stop() {
  {
    MutexLock lock(&mail_->mu);
    mail_->stopping = true;
    mail_->changed.SignalAll();
    mail_->round_over.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  tiers_.Drain();
}

void TierMover::Run() {
  while (true) {
    const bool more = RunOnce();
    MutexLock lock(&mail_->mu);
    const auto deadline = std::chrono::steady_clock::now() + kPause;
    while (!more && !mail_->news && !mail_->stopping && mail_->changed.WaitUntil(&mail_->mu, deadline)) {
    }
    if (mail_->stopping) return;
  }
}

void TierMover::AwaitRound() {
  if (!thread_.joinable()) {
    RunOnce();
    return;
  }
  MutexLock lock(&mail_->mu);
  const uint64_t next = mail_->rounds_begun + 1;
  mail_->news = true;
  mail_->changed.Signal();
  while (mail_->rounds_over < next && !mail_->stopping) mail_->round_over.Wait(&mail_->mu);
}

void TierMover::Wake() {
  MutexLock lock(&mail_->mu);
  mail_->news = true;
  mail_->changed.Signal();
}

bool TierMover::RunOnce() {
  {
    MutexLock lock(&mail_->mu);
    ++mail_->rounds_begun;
  }
  now_ = tiers_.view();
  const bool more = RunRound();
  now_ = nullptr;
  MutexLock lock(&mail_->mu);
  mail_->rounds_over = mail_->rounds_begun;
  mail_->round_over.SignalAll();
  return more;
}

bool TierMover::RunRound() {
  std::vector<Job> came;
  {
    MutexLock lock(&mail_->mu);
    came.swap(mail_->jobs);
    mail_->news = false;
    if (mail_->give_up_ms.size() > kMostGivenUp) mail_->give_up_ms.clear();
  }
  std::move(came.begin(), came.end(), std::back_inserter(jobs_));
  bool more = false;
  for (Job& job : jobs_) more |= Advance(&job);
  std::erase_if(jobs_, [](const Job& job) { return job.promotion == nullptr; });
  // Each comes first at times: buffers go to whoever asks before the others.
  if (!jobs_.empty()) std::rotate(jobs_.begin(), jobs_.begin() + 1, jobs_.end());
  absl::erase_if(fetching_, [](const auto& fetch) { return fetch.second.expired(); });
  if (const auto now = std::chrono::steady_clock::now(); now >= down_at_ || !thread_.joinable()) {
    std::vector<std::shared_ptr<Space>> spaces = spaces_();
    if (!spaces.empty()) {
      std::rotate(spaces.begin(), spaces.begin() + static_cast<ptrdiff_t>(++rounds_ % spaces.size()),
                  spaces.end());
    }
    spaces_seen_ = std::max<size_t>(spaces.size(), 1);
    std::vector<uint64_t> writers;
    for (const auto& [tier, writes] : now_->entries()) {
      if (writes) writers.push_back(tier->id());
    }
    // One that has come, or is written to again, was given nothing of spaces that no session uses.
    if (writers != writers_) looked_at_.clear();
    writers_ = std::move(writers);
    bool left = false;
    no_buffers_ = false;
    for (const std::shared_ptr<Space>& space : spaces) left |= MoveDown(space);
    if (looked_at_.size() > spaces.size())
      looked_at_.clear();  // Some are closed; the others are looked at anew.
    if (!left || no_buffers_) down_at_ = now + kPause;
    more |= left;
  }
  return more;
}

bool TierMover::JobsWait() {
  MutexLock lock(&mail_->mu);
  return mail_->news || mail_->stopping;
}

uint64_t TierMover::ValueBytes(const Space& space) {
  return space.facts.layout.block_bytes() * space.facts.devices.size();
}

void TierMover::Place(const Space& space, Placed* block) {
  const Growth& growth = space.state.growth;
  const SlabRow& row = growth.RowOf(block->ref.id);
  block->slabs = row.by_rank;
  for (size_t rank = 0; rank < row.by_rank.size(); ++rank) {
    block->at.push_back(growth.AddressOf(block->ref.id, rank));
  }
}

void TierMover::AddRanges(const Space& space, const Placed& block, char* value,
                          std::vector<SlabCopier::Range>* ranges) {
  const uint64_t rank_bytes = space.facts.layout.block_bytes();
  for (size_t rank = 0; rank < block.at.size(); ++rank) {
    ranges->push_back({.device = space.facts.devices[rank],
                       .slab_address = block.at[rank],
                       .host = value + rank * rank_bytes,
                       .bytes = rank_bytes});
  }
}

// ------------------------------------------------------------------------------------------------------- up

void TierMover::Promote(std::shared_ptr<Space> space, std::shared_ptr<Promotion> promotion) {
  MutexLock lock(&mail_->mu);
  if (mail_->stopping) return;
  mail_->jobs.push_back({.space = std::move(space), .promotion = std::move(promotion)});
  mail_->news = true;
  mail_->changed.Signal();
}

bool TierMover::Advance(Job* job) {
  bool moved = false;
  bool erasing = false;
  {
    SpaceLock lock(*job->space);
    erasing = !job->space->state.below.on();
  }
  if (erasing) {
    // Nobody shares what is on its way either.
    for (const Promotion::Block& block : job->promotion->blocks) {
      fetching_.erase(TierKeyOf(job->space->facts, block.key));
    }
  } else if (job->space->NowMs() < job->promotion->until_ms) {
    const bool open = job->begun || Begin(job);
    if (open) moved = AskFor(job);
    if (open && BringUp(job, &moved)) return moved;
  }
  Finish(job);
  return true;
}

BlockRef TierMover::Hold(SpaceTurn& turn, Space* space, Holder holder, const BlockKey& key, Job* job) {
  // What is held stays, whatever others do meanwhile.
  turn.Worked(Turn::kNames);
  turn.Breathe();
  if (space->state.growth.closed()) return kNullRef;
  const GroupQuery query{.group = key.group, .keys = {&key, 1}};
  MatchOutcome found;
  space->state.pool.MatchOn(holder, turn.now, {&query, 1}, &found);
  if (found.blocks.empty() || found.blocks[0].empty()) return kNullRef;
  job->held.push_back(found.blocks[0].back());
  return found.blocks[0].back();
}

bool TierMover::Begin(Job* job) {
  job->begun = true;
  Space& space = *job->space;
  SpaceTurn turn(space);
  if (space.state.growth.closed()) return false;
  const absl::StatusOr<Holder> own = space.state.below.holder();
  if (!own.ok()) return false;
  const BlockKey* before = nullptr;
  for (const Promotion::Block& block : job->promotion->blocks) {
    // A child that is resident or comes up keeps the rest of its chain.
    if (block.parent.has_value() && (before == nullptr || !(*before == *block.parent))) {
      Hold(turn, &space, *own, *block.parent, job);
    }
    before = &block.key;
  }
  return !space.state.growth.closed();
}

bool TierMover::GaveUp(const Fetch& fetch, uint64_t until_ms) {
  MutexLock lock(&mail_->mu);
  return fetch.over && fetch.result == TierResult::kLate && fetch.until_ms < until_ms;
}

bool TierMover::AskFor(Job* job) {
  const Promotion& promotion = *job->promotion;
  std::vector<TierLoad> loads;
  // A value that nobody waits for any more is nobody's, also where others of its batch are out for long.
  auto asked = std::make_shared<std::vector<std::weak_ptr<Fetch>>>();
  while (job->fetches.size() < std::min(promotion.blocks.size(), job->next + 2 * kSlice)) {
    const TierKey key = TierKeyOf(job->space->facts, promotion.blocks[job->fetches.size()].key);
    std::shared_ptr<Fetch> fetch = fetching_[key].lock();
    if (fetch == nullptr || GaveUp(*fetch, promotion.until_ms)) {
      fetch = std::make_shared<Fetch>();
      fetch->until_ms = promotion.until_ms;
      fetch->buffer = up_.Take(ValueBytes(*job->space));
      if (fetch->buffer == nullptr) break;
      fetching_[key] = fetch;
      loads.push_back({key, fetch->buffer});
      asked->push_back(fetch);
    }
    job->fetches.push_back(std::move(fetch));
  }
  if (loads.empty()) return false;
  const uint64_t now = job->space->NowMs();
  const std::chrono::milliseconds left(promotion.until_ms - std::min(promotion.until_ms, now));
  tiers_.Load(std::move(loads), std::chrono::steady_clock::now() + left,
              [asked, mail = mail_](size_t index, TierResult result) {
                const std::shared_ptr<Fetch> fetch = (*asked)[index].lock();
                if (fetch == nullptr) return;
                MutexLock lock(&mail->mu);
                fetch->result = result;
                fetch->over = true;
                mail->news = true;
                mail->changed.Signal();
              });
  return true;
}

bool TierMover::BringUp(Job* job, bool* moved) {
  const std::vector<Promotion::Block>& blocks = job->promotion->blocks;
  Space& space = *job->space;
  size_t end = job->next;
  bool lost = false;
  {
    MutexLock lock(&mail_->mu);
    while (end < job->fetches.size() && end - job->next < kSlice && job->fetches[end]->over && !lost) {
      lost = job->fetches[end]->result != TierResult::kDone;
      if (!lost) ++end;
    }
  }
  if (lost && GaveUp(*job->fetches[end], job->promotion->until_ms)) {
    // Whoever asked first had less time: it is asked for again.
    job->fetches.resize(end);
    lost = false;
    *moved = true;
  }
  if (end == job->next && !lost) return true;
  std::vector<Placed> placed(end - job->next);
  Holder holder = kNobody;
  bool no_room = false;
  if (!placed.empty()) {
    SpaceTurn turn(space);
    SpaceState& state = space.state;
    if (state.growth.closed()) return false;
    const absl::StatusOr<Holder> own = state.below.holder();
    if (!own.ok()) return false;
    holder = *own;
    std::vector<BlockRef> leased;
    uint32_t count = 0;
    for (size_t i = 0; i < placed.size(); ++i) {
      placed[i].key = blocks[job->next + i].key;
      placed[i].ref = Hold(turn, &space, holder, placed[i].key, job);  // It may have come by another way.
      count += placed[i].ref == kNullRef;
    }
    if (state.growth.closed()) return false;
    // A slab that is on its way is waited for.
    const bool growing = state.growth.Lease(holder, turn.now, count, 0, &leased).growing;
    no_room = leased.size() < count && !growing;
    lost = lost && leased.size() == count;
    size_t filled = 0, used = 0;
    for (; filled < placed.size(); ++filled) {
      if (placed[filled].ref != kNullRef) continue;
      if (used == leased.size()) break;
      placed[filled].ref = leased[used++];
      Place(space, &placed[filled]);
    }
    placed.resize(filled);
    if (no_room) state.below.counters.no_room += blocks.size() - job->next - filled;
    state.pressure.AfterVerbs(turn);
  }
  // Nobody but their holder knows these blocks.
  std::vector<SlabCopier::Range> ranges;
  for (size_t i = 0; i < placed.size(); ++i) {
    AddRanges(space, placed[i], job->fetches[job->next + i]->buffer->data(), &ranges);
  }
  const absl::Status copied = copier_->Copy(CopyDirection::kToDevice, ranges);
  SpaceTurn turn(space);
  SpaceState& state = space.state;
  if (!copied.ok()) {
    for (const Placed& block : placed) {
      if (block.at.empty()) continue;
      Verdict verdict;
      state.pool.Release(holder, turn.now, {&block.ref, 1}, {&verdict, 1});
    }
    ++state.below.counters.lost;
    TellOfFailure(space, copied);
    return false;
  }
  for (const Placed& block : placed) {
    const Promotion::Block& wanted = blocks[job->next];
    job->fetches[job->next++].reset();
    if (block.at.empty()) continue;  // It was there.
    turn.Worked(Turn::kNames);
    turn.Breathe();
    const SealEntry entry{.block = block.ref, .keys = {&block.key, 1}};
    SealVerdict outcome;
    state.pool.Seal(holder, turn.now, wanted.parent.has_value() ? &*wanted.parent : nullptr, {&entry, 1},
                    {&outcome, 1});
    if (outcome.verdict != Verdict::kDone) {
      // It has come by another way: that one is held, if it may be.
      Verdict verdict;
      state.pool.Release(holder, turn.now, {&block.ref, 1}, {&verdict, 1});
    }
    if (outcome.canonical != kNullRef) job->held.push_back(outcome.canonical);
    if (outcome.verdict == Verdict::kDone) {
      state.checks.Sealed(outcome.canonical);
      // Other tiers may be to have it as well.
      state.below.Sealed(outcome.canonical, block.key);
    }
    state.below.counters.promoted += outcome.verdict == Verdict::kDone;
  }
  *moved = *moved || !placed.empty();
  if (lost && !blocks[job->next].tried) ++state.below.counters.lost;
  return !lost && !no_room && job->next < blocks.size();
}

void TierMover::Finish(Job* job) {
  Space& space = *job->space;
  SpaceTurn turn(space);
  SpaceState& state = space.state;
  const uint64_t now = space.NowMs();
  if (now >= job->promotion->until_ms) {
    state.below.counters.late += job->promotion->blocks.size() - job->next;
  }
  const bool whole = job->next == job->promotion->blocks.size();
  space.batches.AnswerWaiting(turn, state.below.End(*job->promotion, now, whole));
  // Those who waited hold them now.
  if (!job->held.empty()) {
    std::vector<Verdict> verdicts(job->held.size());
    state.pool.Release(*state.below.holder(), turn.now, job->held, absl::MakeSpan(verdicts));
  }
  state.pressure.AfterVerbs(turn);
  job->promotion = nullptr;
}

// ----------------------------------------------------------------------------------------------------- down

bool TierMover::GivenUp(const Space& space, uint64_t tier) {
  for (const uint64_t id : {space.facts.id, kAllSpaces}) {
    const auto found = mail_->give_up_ms.find({id, tier});
    if (found != mail_->give_up_ms.end() && space.NowMs() < found->second) return true;
  }
  return false;
}

uint64_t TierMover::PartOfEach(const Space& space) const {
  const auto parts = static_cast<uint64_t>(std::popcount(now_->writers()));
  const uint64_t part = parts > 1 ? buffer_bytes_ / parts : buffer_bytes_ - buffer_bytes_ / TierSet::kMost;
  return std::max(part, WholePages(ValueBytes(space)));
}

TierSet::Members TierMover::Taking(const Space& space, std::array<uint64_t, TierSet::kMost>* room) {
  const uint64_t most = PartOfEach(space);
  MutexLock lock(&mail_->mu);
  TierSet::Members taking = 0;
  for (const auto& [tier, writes] : now_->entries()) {
    if (!writes) continue;
    // One that is slow leaves the others their part of the buffers.
    const size_t slot = tier->slot();
    (*room)[slot] = most - std::min(most, mail_->bytes_down[slot]);
    if ((*room)[slot] >= WholePages(ValueBytes(space)) && !GivenUp(space, tier->id()))
      taking |= TierView::BitOf(slot);
  }
  return taking;
}

std::vector<TierMover::Copy> TierMover::Wanted(const Space& space, absl::Span<const Below::Going> blocks) {
  std::vector<TierView::Offered> offered;
  uint32_t leaving = 0;
  for (const Below::Going& going : blocks) {
    offered.push_back({.key = TierKeyOf(space.facts, going.block.key),
                       .why = going.offer,
                       .uses = going.uses,
                       .place = going.offer == TierOffer::kLeaves ? leaving++ : 0,
                       .owed = going.owed});
  }
  std::vector<TierSet::Members> to(offered.size());
  now_->Wanted(offered, ValueBytes(space), spaces_seen_, absl::MakeSpan(to));
  std::vector<Copy> copies;
  absl::flat_hash_map<TierKey, size_t> listed;  // One that is listed may be next to leave as well.
  MutexLock lock(&mail_->mu);
  for (size_t i = 0; i < offered.size(); ++i) {
    const auto under_way = mail_->going_down.find(offered[i].key);
    if (under_way != mail_->going_down.end()) to[i] &= static_cast<TierSet::Members>(~under_way->second);
    if (to[i] == 0) continue;
    const auto [copy, is_first] = listed.try_emplace(offered[i].key, copies.size());
    if (is_first) {
      copies.push_back({blocks[i], to[i]});
    } else {
      copies[copy->second].to |= to[i];
    }
  }
  return copies;
}

uint32_t TierMover::Ahead(const Space& space) {
  const Growth& growth = space.state.growth;
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(2 * (growth.high_blocks() - growth.low_blocks()), kAhead, kMostAhead));
}

bool TierMover::NextUnused(const Space& space, std::vector<Below::Going>* out) {
  const BlockPool& pool = space.state.pool;
  uint32_t& at = looked_at_[space.facts.id];
  at = std::min(at, pool.end_block() - 1);  // Some of it may have been given back.
  for (const uint32_t end = at + std::min(kLookedAt, pool.end_block() - 1 - at); at < end;) {
    const absl::StatusOr<BlockView> view = pool.View(BlockId{++at}, space.NowMs());
    if (!view.ok() || !pool.IsResident(view->ref)) continue;
    out->push_back({{view->ref, view->key}, TierOffer::kEnds, space.state.below.uses(view->ref.id)});
  }
  return at + 1 < pool.end_block();
}

bool TierMover::MoveDown(const std::shared_ptr<Space>& space) {
  if (!space->facts.tier_space.has_value()) return false;
  std::array<uint64_t, TierSet::kMost> room{};
  const TierSet::Members taking = Taking(*space, &room);
  if (taking == 0) return false;
  std::vector<Below::Going> next;
  bool unused = false, more = false;
  {
    SpaceLock lock(*space);
    SpaceState& state = space->state;
    if (state.growth.closed() || !state.below.on()) return false;
    unused = state.sessions.empty();
    state.below.TakeListed(kSlice, taking, &next);
    if (unused) {
      more = NextUnused(*space, &next);
    } else {
      looked_at_.erase(space->facts.id);
      more = !state.below.all_taken();
      // As long as much more is free than reclaiming leaves, nothing leaves.
      const uint32_t ahead = Ahead(*space);
      if (state.below.wants_leaving() && !state.growth.may_grow() &&
          state.growth.free_blocks() <= state.growth.high_blocks() + ahead) {
        state.below.NextToLeave(ahead, &next);
      }
    }
  }
  const std::vector<Copy> copies = Wanted(*space, next);
  std::vector<Below::Going> owed;
  const auto owe = [&owed](const Copy& copy, TierSet::Members to) {
    // What is next to leave is offered again in the next round.
    if (to == 0 || copy.going.offer == TierOffer::kLeaves) return;
    owed.push_back(copy.going);
    owed.back().owed = to;
  };
  const uint64_t value_bytes = WholePages(ValueBytes(*space));
  std::vector<Copy> left;
  size_t next_copy = 0, copied = 0;
  for (bool stops = false; next_copy < copies.size() && !stops;) {
    // They take less with each slice.
    const TierSet::Members taking_now = Taking(*space, &room);
    std::vector<Copy> slice;
    std::vector<TierSet::Members> later;
    for (; next_copy < copies.size() && slice.size() < kSlice; ++next_copy) {
      const Copy& copy = copies[next_copy];
      TierSet::Members now = 0;
      for (size_t slot = 0; slot < TierSet::kMost; ++slot) {
        const TierSet::Members bit = TierView::BitOf(slot);
        if ((copy.to & taking_now & bit) == 0 || room[slot] < value_bytes) continue;
        now |= bit;
        room[slot] -= value_bytes;
      }
      if (now == 0) {
        owe(copy, copy.to);
        continue;
      }
      slice.push_back({copy.going, static_cast<TierSet::Members>(copy.to & now)});
      later.push_back(static_cast<TierSet::Members>(copy.to & ~now));
    }
    if (slice.empty()) break;
    const size_t done = CopyDown(space, slice);
    copied += done;
    for (size_t i = 0; i < done; ++i) owe(slice[i], later[i]);
    for (size_t i = done; i < slice.size(); ++i) {
      slice[i].to |= later[i];
      left.push_back(slice[i]);
    }
    no_buffers_ = no_buffers_ || done < slice.size();
    stops = done < slice.size() || JobsWait();
    if (!stops) space->GiveWay();
  }
  left.insert(left.end(), copies.begin() + static_cast<ptrdiff_t>(next_copy), copies.end());
  for (const Copy& copy : left) {
    if (unused && copy.going.offer == TierOffer::kEnds && copy.going.owed == 0) {
      // It is looked at again.
      uint32_t& at = looked_at_[space->facts.id];
      at = std::min(at, Index(copy.going.block.ref.id) - 1);
    } else {
      owe(copy, copy.to);
    }
  }
  if (!owed.empty()) {
    SpaceLock lock(*space);
    for (const Below::Going& going : owed) space->state.below.List(going);
  }
  return (left.empty() && more) || copied > 0;
}

std::vector<std::shared_ptr<TierBuffer>> TierMover::Read(const Space& space, absl::Span<const Placed> blocks,
                                                         ContentChecks::Part* compared, bool* failed) {
  const uint64_t value_bytes = ValueBytes(space);
  std::vector<std::shared_ptr<TierBuffer>> copies;
  std::vector<SlabCopier::Range> ranges;
  for (const Placed& block : blocks) {
    std::shared_ptr<TierBuffer> copy;
    if (!block.at.empty()) {
      copy = down_.Take(value_bytes);
      if (copy == nullptr) break;
      AddRanges(space, block, copy->data(), &ranges);
    }
    copies.push_back(std::move(copy));
  }
  if (const absl::Status copied = copier_->Copy(CopyDirection::kToHost, ranges); !copied.ok()) {
    TellOfFailure(space, copied);
    *failed = true;
    return std::vector<std::shared_ptr<TierBuffer>>(copies.size());
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i] == nullptr || !blocks[i].sum.has_value()) continue;
    const uint32_t found = Crc32c(copies[i]->data(), value_bytes);
    compared->push_back({.ref = blocks[i].ref, .sum = blocks[i].sum, .found = found, .slabs = {}, .at = {}});
    if (found != *blocks[i].sum) copies[i] = nullptr;
  }
  return copies;
}

void TierMover::Drop(Space* space, absl::Span<const Placed> placed, absl::Span<const Copy> blocks) {
  {
    SpaceLock lock(*space);
    Below& below = space->state.below;
    for (size_t i = 0; i < placed.size(); ++i) {
      if (placed[i].at.empty()) continue;
      ++below.counters.dropped;
      if (blocks[i].going.offer == TierOffer::kLeaves) continue;
      Below::Going again = blocks[i].going;
      again.owed = blocks[i].to;
      below.List(again);
    }
  }
  MutexLock lock(&mail_->mu);
  const uint64_t again_ms = space->NowMs() + kGiveUpMs;
  for (const TierView::Entry& entry : now_->entries()) {
    mail_->give_up_ms[{space->facts.id, entry.tier->id()}] = again_ms;
  }
}

void TierMover::TellOfFailure(const Space& space, const absl::Status& why) {
  const auto now = std::chrono::steady_clock::now();
  if (now < tell_at_) return;
  tell_at_ = now + std::chrono::milliseconds(kGiveUpMs);
  LogWarning("blocks not copied for the tier", {{"space", space.facts.id}, {"error", why}});
}

size_t TierMover::CopyDown(const std::shared_ptr<Space>& space, absl::Span<const Copy> blocks) {
  std::vector<Placed> placed;
  {
    SpaceLock lock(*space);
    const BlockPool& pool = space->state.pool;
    if (space->state.growth.closed() || !space->state.below.on()) return blocks.size();
    for (const Copy& copy : blocks) {
      const BlockPool::Departing& block = copy.going.block;
      placed.push_back({.ref = block.ref, .key = block.key, .sum = pool.SumOf(block.ref)});
      if (pool.IsResident(block.ref) && !pool.IsCondemned(block.ref)) Place(*space, &placed.back());
    }
  }
  ContentChecks::Part compared;
  bool failed = false;
  std::vector<std::shared_ptr<TierBuffer>> copies = Read(*space, placed, &compared, &failed);
  const size_t handled = copies.size();
  if (failed) {
    Drop(space.get(), absl::MakeConstSpan(placed).first(handled), blocks);
    return handled;
  }
  std::vector<TierStore> stores;
  std::vector<TierSet::Members> to;
  std::vector<Below::Going> of;  // What each is of.
  {
    SpaceLock lock(*space);
    space->state.checks.Settle(CheckedWhen::kSample, compared);
    for (size_t i = 0; i < copies.size(); ++i) {
      if (copies[i] == nullptr) continue;
      if (space->state.pool.IsResident(placed[i].ref)) {
        of.push_back(blocks[i].going);
        to.push_back(blocks[i].to);
        stores.push_back({TierKeyOf(space->facts, placed[i].key), std::move(copies[i])});
      } else {
        ++space->state.below.counters.moved;
      }
    }
  }
  if (stores.empty()) return handled;
  const uint64_t value_bytes = WholePages(ValueBytes(*space));
  std::vector<TierKey> keys;
  {
    MutexLock lock(&mail_->mu);
    for (size_t i = 0; i < stores.size(); ++i) {
      keys.push_back(stores[i].key);
      mail_->going_down[keys.back()] |= to[i];
      for (size_t slot = 0; slot < TierSet::kMost; ++slot) {
        if ((to[i] & TierView::BitOf(slot)) != 0) mail_->bytes_down[slot] += value_bytes;
      }
    }
  }
  const auto batch = std::make_shared<Batch>();
  for (size_t i = 0; i < to.size(); ++i) batch->values.push_back({.left = to[i]});
  for (const TierView::Entry& entry : now_->entries()) {
    const size_t slot = entry.tier->slot();
    batch->tiers[slot].id = entry.tier->id();
    for (const TierSet::Members members : to) batch->tiers[slot].left += members >> slot & 1;
  }
  const auto done = [space, mail = mail_, value_bytes, batch, keys = std::move(keys), of = std::move(of)](
                        size_t index, size_t slot, TierResult result) {
    const TierSet::Members bit = TierView::BitOf(slot);
    Batch::Value ends;
    {
      MutexLock lock(&mail->mu);
      mail->bytes_down[slot] -= value_bytes;
      const auto under_way = mail->going_down.find(keys[index]);
      under_way->second &= static_cast<TierSet::Members>(~bit);
      if (under_way->second == 0) mail->going_down.erase(under_way);
      Batch::Value& value = batch->values[index];
      value.left &= static_cast<TierSet::Members>(~bit);
      value.stored |= result == TierResult::kDone;
      ends = value;
      Batch::OfTier& of_tier = batch->tiers[slot];
      of_tier.stored |= result == TierResult::kDone;
      of_tier.failed |= result == TierResult::kFailed;
      of_tier.refused |= result != TierResult::kDone && result != TierResult::kFailed;
      const uint64_t again_ms = space->NowMs() + kGiveUpMs;
      if (--of_tier.left == 0) {
        // What has no room for the values of one space may have it for others.
        if (of_tier.refused) mail->give_up_ms[{space->facts.id, of_tier.id}] = again_ms;
        // One of many nodes may be gone: it alone does not keep the others from what they would take.
        if (of_tier.failed && !of_tier.stored) mail->give_up_ms[{kAllSpaces, of_tier.id}] = again_ms;
      }
    }
    SpaceLock lock(*space);
    Below& below = space->state.below;
    if (ends.left == 0) ++(ends.stored ? below.counters.demoted : below.counters.dropped);
    // What is next to leave is offered again by itself.
    if (result == TierResult::kDone || of[index].offer == TierOffer::kLeaves) return;
    Below::Going again = of[index];
    again.owed = bit;
    below.List(again);
  };
  tiers_.Store(*now_, std::move(stores), std::move(to), done);
  return handled;
}

// ---------------------------------------------------------------------------------------------------- at the end

std::vector<TierMover::Copy> TierMover::Unwritten(Space* space) {
  struct Facts {
    BlockId parent;
    uint64_t idle_ms;
  };
  std::vector<Below::Going> resident;
  absl::flat_hash_map<BlockId, Facts> of;
  {
    SpaceLock lock(*space);
    if (space->state.growth.closed() || !space->state.below.on()) return {};
    const BlockPool& pool = space->state.pool;
    const uint64_t now = space->NowMs();
    for (uint32_t id = 1; id < pool.end_block(); ++id) {
      const absl::StatusOr<BlockView> view = pool.View(BlockId{id}, now);
      if (!view.ok() || !pool.IsResident(view->ref)) continue;
      resident.push_back({{view->ref, view->key}, TierOffer::kEnds, space->state.below.uses(view->ref.id)});
      of[view->ref.id] = {view->parent, view->idle_ms};
    }
  }
  // What is gone with the daemon is given nothing any more.
  std::vector<Copy> copies = Wanted(*space, resident);
  for (Copy& copy : copies) copy.to &= now_->lasting();
  std::erase_if(copies, [](const Copy& copy) { return copy.to == 0; });
  absl::flat_hash_map<BlockId, size_t> left;  // Where in `copies` they are.
  for (size_t i = 0; i < copies.size(); ++i) left[copies[i].going.block.ref.id] = i;
  std::vector<size_t> order(copies.size());
  std::iota(order.begin(), order.end(), 0);
  const auto facts = [&](size_t copy) -> const Facts& { return of.at(copies[copy].going.block.ref.id); };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return facts(a).idle_ms < facts(b).idle_ms; });
  std::vector<Copy> blocks;
  for (const size_t latest : order) {
    std::vector<size_t> chain;
    BlockId id = copies[latest].going.block.ref.id;
    for (auto found = left.find(id); found != left.end(); found = left.find(id)) {
      chain.push_back(found->second);
      left.erase(found);
      id = facts(chain.back()).parent;
    }
    for (; !chain.empty(); chain.pop_back()) blocks.push_back(copies[chain.back()]);
  }
  return blocks;
}

uint64_t TierMover::Demoted(const std::vector<std::shared_ptr<Space>>& spaces) {
  uint64_t demoted = 0;
  for (const std::shared_ptr<Space>& space : spaces) {
    SpaceLock lock(*space);
    demoted += space->state.below.counters.demoted;
  }
  return demoted;
}

bool TierMover::TakesSome(const Space& space) {
  MutexLock lock(&mail_->mu);
  const TierSet::Members lasting = now_->lasting();
  for (const TierView::Entry& entry : now_->entries()) {
    if ((lasting & TierView::BitOf(entry.tier->slot())) != 0 && !GivenUp(space, entry.tier->id()))
      return true;
  }
  return false;
}

TierFlush TierMover::Flush(std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  now_ = tiers_.view();
  // Some may be closed meanwhile.
  const std::vector<std::shared_ptr<Space>> spaces = spaces_();
  const uint64_t before = Demoted(spaces);
  uint64_t found = 0;
  for (const std::shared_ptr<Space>& space : spaces) {
    if (!space->facts.tier_space.has_value()) continue;
    const std::vector<Copy> blocks = Unwritten(space.get());
    found += blocks.size();
    absl::Span<const Copy> left = blocks;
    while (!left.empty() && std::chrono::steady_clock::now() < end && TakesSome(*space)) {
      const size_t done = CopyDown(space, left.first(std::min(left.size(), kSlice)));
      left.remove_prefix(done);
      // All buffers are out: the disk is the slower one.
      if (done == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  now_ = nullptr;
  tiers_.Drain();
  const uint64_t written = Demoted(spaces) - before;
  return {.written = written, .left = found - std::min(found, written)};
}

}  // namespace kvpool
