#include "server/pool/hand_over.h"

#include <algorithm>
#include <utility>

#include "proto/support/check.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {
namespace {

// Verbs may cause events as fast as steps take them away. After so many rounds the last step takes
// all there are.
constexpr uint32_t kMostRounds = 64;
// Showing so many blocks to a policy, or sorting them, takes some 2 ms.
constexpr size_t kStopStep = 4096;

}  // namespace

// Stands in front of the old policy. First it notes which of the copied blocks move, later it
// records every event.
class BlockPool::HandOver::Recorder final : public ReplacementPolicy {
 public:
  Recorder(std::unique_ptr<ReplacementPolicy> old, HandOver* hand_over)
      : old_(std::move(old)), hand_over_(*hand_over) {}

  std::unique_ptr<ReplacementPolicy> TakeOld() { return std::move(old_); }
  std::deque<Event> TakeEvents() { return std::exchange(events_, {}); }
  bool overrun() const { return overrun_; }
  void RecordEvents() { recording_ = true; }

  std::string_view name() const override { return old_->name(); }
  void OnInsert(BlockId block, const Content& content) override {
    old_->OnInsert(block, content);
    Note({.kind = Event::Kind::kInsert,
          .block = block,
          .parent = content.parent,
          .now_ms = content.now_ms,
          .hash = content.hash});
  }
  void OnHit(BlockId block, uint64_t now_ms) override {
    old_->OnHit(block, now_ms);
    Note({.kind = Event::Kind::kHit, .block = block, .now_ms = now_ms});
  }
  void OnHint(BlockId block, const UseHint& hint) override {
    old_->OnHint(block, hint);
    Note({.kind = Event::Kind::kHint, .hint = hint, .block = block});
  }
  void OnScore(BlockId block, float score) override {
    old_->OnScore(block, score);
    Note({.kind = Event::Kind::kScore, .score = score, .block = block});
  }
  void OnUsed(BlockId block, uint64_t now_ms) override {
    old_->OnUsed(block, now_ms);
    Note({.kind = Event::Kind::kUsed, .block = block, .now_ms = now_ms});
  }
  void OnOffer(BlockId block) override {
    old_->OnOffer(block);
    Note({.kind = Event::Kind::kOffer, .block = block});
  }
  void OnWithdraw(BlockId block) override {
    old_->OnWithdraw(block);
    Note({.kind = Event::Kind::kWithdraw, .block = block});
  }
  void OnEvict(BlockId block) override {
    old_->OnEvict(block);
    Note({.kind = Event::Kind::kEvict, .block = block});
  }
  BlockId Victim(uint64_t now_ms) override { return old_->Victim(now_ms); }
  size_t Upcoming(absl::Span<BlockId> blocks) const override { return old_->Upcoming(blocks); }
  Rank Standing(BlockId block) const override { return old_->Standing(block); }
  void Prefetch(BlockId block, uint64_t hash) const override { old_->Prefetch(block, hash); }
  uint32_t offered() const override { return old_->offered(); }
  double bytes_per_block() const override { return old_->bytes_per_block(); }
  AsyncPolicy* async() override { return old_->async(); }

 private:
  void Note(const Event& event) {
    if (!recording_) {
      const uint32_t b = Index(event.block);
      if (b >= hand_over_.copied_ || std::exchange(hand_over_.places_[b].moved, true)) return;
      hand_over_.moved_.push_back(b);
    } else if (events_.size() < hand_over_.options_.most_events) {
      events_.push_back(event);
    } else {
      overrun_ = true;
    }
  }

  std::unique_ptr<ReplacementPolicy> old_;
  HandOver& hand_over_;
  bool recording_ = false, overrun_ = false;
  std::deque<Event> events_;
};

BlockPool::HandOver::HandOver(const Options& options, std::unique_ptr<ReplacementPolicy> successor)
    : options_(options), successor_(std::move(successor)), places_(options.max_blocks) {}

BlockPool::HandOver::~HandOver() {
  KVPOOL_CHECK(recorder_ == nullptr, "a hand-over to %s was left half-way",
               std::string(successor_->name()).c_str());
}

// ---------------------------------------------------------------------------------------- under the lock

void BlockPool::HandOver::CopyBlock(const BlockPool& pool, uint32_t block) {
  const BlockRecord& record = pool.rep_->records[block];
  Place& place = places_[block];
  place = {};
  if (!record.resident()) return;
  place = {.standing = pool.rep_->policy.asked()->Standing(BlockId{block}),
           .hash = HashKey(record.block_key()),
           .parent = record.parent,
           .accessed_ms = record.accessed_ms,
           .sealed_ms = record.sealed_ms,
           .resident = true,
           .cached = record.state() == BlockState::kCached,
           .offered = record.has(BlockRecord::kOffered) && pool.rep_->priority(block) == kDefaultPriority,
           .moved = false};
}

bool BlockPool::HandOver::Copy(BlockPool* pool, TimeMs now, uint32_t blocks) {
  Rep& r = *pool->rep_;
  r.BeginVerb(now, 0);
  if (recorder_ == nullptr) {
    auto recorder = std::make_unique<Recorder>(r.policy.Take(), this);
    recorder_ = recorder.get();
    r.handing_over = true;
    r.policy.Set(std::move(recorder), PolicyFeed::Tell::kAtOnce);
  }
  for (uint32_t n = 0; n < blocks && copied_ < r.next_new; ++n) CopyBlock(*pool, copied_++);
  if (copied_ < r.next_new) return false;
  const bool last = moved_.size() <= blocks || ++rounds_ >= kMostRounds;
  for (size_t n = last ? moved_.size() : blocks; n > 0; --n) {
    CopyBlock(*pool, moved_.back());
    moved_.pop_back();
  }
  if (!last) return false;
  now_ms_ = r.now_ms;
  rounds_ = 0;
  recorder_->RecordEvents();
  return true;
}

std::unique_ptr<ReplacementPolicy> BlockPool::HandOver::Finish(BlockPool* pool, uint32_t events) {
  KVPOOL_CHECK(recorder_ != nullptr && !recorder_->overrun(), "a hand-over lacks events");
  taken_ = recorder_->TakeEvents();
  if (taken_.size() > events && ++rounds_ < kMostRounds) return nullptr;
  CatchUp();
  Rep& r = *pool->rep_;
  std::unique_ptr<ReplacementPolicy> old = recorder_->TakeOld();
  recorder_ = nullptr;
  r.policy.Set(std::move(successor_), PolicyFeed::Tell::kLater);
  r.stand_in = false;
  r.handing_over = false;
  return old;
}

bool BlockPool::HandOver::overrun() const { return recorder_->overrun(); }

void BlockPool::HandOver::GiveUp(BlockPool* pool) {
  std::unique_ptr<ReplacementPolicy> old = recorder_->TakeOld();
  recorder_ = nullptr;
  pool->rep_->handing_over = false;
  pool->rep_->policy.Set(std::move(old), PolicyFeed::Tell::kLater);
}

// -------------------------------------------------------------------------------------- without the lock

bool BlockPool::HandOver::StopsAt(size_t block) const { return block % kStopStep == 0 && stops(); }

// Resident blocks in the old policy's order, then by last use. The tail of a chain was used before its head.
std::vector<uint32_t> BlockPool::HandOver::ResidentByStanding() const {
  struct Entry {
    Rank standing;
    uint32_t idle_ms, depth, block;
  };
  const auto now32 = static_cast<uint32_t>(now_ms_);
  std::vector<uint32_t> depths(copied_);
  std::vector<Entry> entries;
  std::vector<uint32_t> chain;
  for (uint32_t b = 1; b < copied_ && !StopsAt(b); ++b) {
    if (!places_[b].resident) continue;
    for (uint32_t a = b; a != 0 && depths[a] == 0; a = places_[a].parent) chain.push_back(a);
    for (; !chain.empty(); chain.pop_back()) depths[chain.back()] = depths[places_[chain.back()].parent] + 1;
    entries.push_back({places_[b].standing, now32 - places_[b].accessed_ms, depths[b], b});
  }
  const auto leaves_first = [](const Entry& a, const Entry& b) {
    if (a.standing != b.standing) return a.standing < b.standing;
    if (a.idle_ms != b.idle_ms) return a.idle_ms > b.idle_ms;
    return a.depth != b.depth ? a.depth > b.depth : a.block < b.block;
  };
  // All in one go could not be stopped: 0.1 s for a million.
  const auto at = [&](size_t i) {
    return entries.begin() + static_cast<ptrdiff_t>(std::min(i, entries.size()));
  };
  for (size_t i = 0; i < entries.size() && !stops(); i += kStopStep)
    std::sort(at(i), at(i + kStopStep), leaves_first);
  for (size_t sorted = kStopStep; sorted < entries.size() && !stops(); sorted *= 2) {
    for (size_t i = 0; i < entries.size() && !stops(); i += 2 * sorted)
      std::inplace_merge(at(i), at(i + sorted), at(i + 2 * sorted), leaves_first);
  }
  std::vector<uint32_t> blocks;
  blocks.reserve(entries.size());
  for (const Entry& entry : entries) blocks.push_back(entry.block);
  return blocks;
}

// Inserts each block once, and no block before the one in front of it.
void BlockPool::HandOver::Introduce(const std::vector<uint32_t>& in_order, TimeMs at) {
  std::vector<bool> known(copied_);
  known[0] = true;
  std::vector<uint32_t> chain;
  for (size_t i = 0; i < in_order.size() && !StopsAt(i); ++i) {
    for (uint32_t a = in_order[i]; !known[a]; a = places_[a].parent) chain.push_back(a);
    for (; !chain.empty(); chain.pop_back()) {
      const Place& place = places_[chain.back()];
      known[chain.back()] = true;
      successor_->OnInsert(BlockId{chain.back()},
                           {.hash = place.hash, .parent = BlockId{place.parent}, .now_ms = at});
    }
  }
}

bool BlockPool::HandOver::Build(const std::atomic<bool>* stop) {
  stop_ = stop;
  const auto now32 = static_cast<uint32_t>(now_ms_);
  const std::vector<uint32_t> blocks = ResidentByStanding();
  // Time never falls: all blocks are inserted when the oldest was, and no use is earlier than the
  // one before it.
  uint32_t oldest_ms = 0;
  for (const uint32_t b : blocks) oldest_ms = std::max(oldest_ms, now32 - places_[b].sealed_ms);
  TimeMs told = now_ms_ - std::min<TimeMs>(oldest_ms, now_ms_);
  Introduce(blocks, told);
  // The use of a block that is held has not ended; the successor learns of it when it does.
  for (size_t i = 0; i < blocks.size() && !StopsAt(i); ++i) {
    const uint32_t b = blocks[i];
    if (!places_[b].cached) continue;
    told = std::max<TimeMs>(told, now_ms_ - std::min<TimeMs>(now32 - places_[b].accessed_ms, now_ms_));
    successor_->OnUsed(BlockId{b}, told);
  }
  for (size_t i = 0; i < blocks.size() && !StopsAt(i); ++i) {
    if (places_[blocks[i]].offered) successor_->OnOffer(BlockId{blocks[i]});
  }
  return !stops();
}

void BlockPool::HandOver::Show(const Event& e) {
  switch (e.kind) {
    case Event::Kind::kInsert:
      return successor_->OnInsert(e.block, {.hash = e.hash, .parent = e.parent, .now_ms = e.now_ms});
    case Event::Kind::kHit:
      return successor_->OnHit(e.block, e.now_ms);
    case Event::Kind::kHint:
      return successor_->OnHint(e.block, e.hint);
    case Event::Kind::kScore:
      return successor_->OnScore(e.block, e.score);
    case Event::Kind::kUsed:
      return successor_->OnUsed(e.block, e.now_ms);
    case Event::Kind::kOffer:
      return successor_->OnOffer(e.block);
    case Event::Kind::kWithdraw:
      return successor_->OnWithdraw(e.block);
    case Event::Kind::kEvict:
      return successor_->OnEvict(e.block);
  }
}

void BlockPool::HandOver::CatchUp() {
  for (const Event& event : taken_) Show(event);
  taken_.clear();
}

// -------------------------------------------------------------------------------------------- all at once

std::unique_ptr<ReplacementPolicy> BlockPool::SetPolicy(TimeMs now,
                                                        std::unique_ptr<ReplacementPolicy> policy) {
  HandOver hand_over({.max_blocks = rep_->options.max_blocks}, std::move(policy));
  hand_over.Copy(this, now, UINT32_MAX);
  hand_over.Build();
  return hand_over.Finish(this, 0);
}

}  // namespace kvpool
