#include "server/scoring/feature_cache.h"

#include <algorithm>
#include <utility>

namespace kvpool {
namespace {

constexpr size_t kAlignment = 64;

size_t SlotBytes(uint32_t floats) {
  return (size_t{floats} * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

uint32_t SectionsOf(const scorers::RecordLayout& layout) {
  constexpr uint32_t kAbsent = scorers::RecordLayout::kNone;
  return (layout.k_norms != kAbsent) << 0 | (layout.v_norms != kAbsent) << 1 |
         (layout.unit_key_sums != kAbsent) << 2 | (layout.key_sums != kAbsent) << 3 |
         (layout.key_min != kAbsent) << 4 | (layout.key_max != kAbsent) << 5;
}

void FeatureCache::BeginCall() {
  ++call_;
  made_.clear();
}

float* FeatureCache::Find(const FeatureKey& key) {
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) {
    misses_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  hits_.fetch_add(1, std::memory_order_relaxed);
  Unlink(it->second);
  Link(it->second);
  return At(entries_[it->second]);
}

float* FeatureCache::Make(const FeatureKey& key, uint32_t floats) {
  const size_t slot_bytes = SlotBytes(floats);
  if (slot_bytes > limit_bytes_) return nullptr;
  uint32_t chunk = ChunkFor(slot_bytes);
  while (chunk == kNone && oldest_ != kNone && entries_[oldest_].call != call_) {
    Forget(oldest_);
    evicted_.fetch_add(1, std::memory_order_relaxed);
    chunk = ChunkFor(slot_bytes);
  }
  if (chunk == kNone) return nullptr;
  Chunk& from = chunks_[chunk];
  uint32_t index = static_cast<uint32_t>(entries_.size());
  if (unused_entries_.empty()) {
    entries_.emplace_back();
  } else {
    index = unused_entries_.back();
    unused_entries_.pop_back();
  }
  entries_[index] = {.key = key, .chunk = chunk, .slot = from.free_slots.back()};
  from.free_slots.pop_back();
  ++from.used;
  if (from.free_slots.empty()) std::erase(roomy_[slot_bytes], chunk);
  by_key_[key] = index;
  Link(index);
  made_.push_back(index);
  return At(entries_[index]);
}

void FeatureCache::AbandonCall() {
  for (const uint32_t entry : made_) Forget(entry);
  made_.clear();
}

uint32_t FeatureCache::ChunkFor(size_t slot_bytes) {
  const auto roomy = roomy_.find(slot_bytes);
  if (roomy != roomy_.end() && !roomy->second.empty()) return roomy->second.back();
  return CutChunk(slot_bytes);
}

uint32_t FeatureCache::CutChunk(size_t slot_bytes) {
  const size_t wanted = std::max(kChunkBytes, slot_bytes);
  uint32_t index = kNone;
  if (!uncut_.empty()) {
    index = uncut_.back();
    uncut_.pop_back();
  }
  const size_t had = index == kNone || chunks_[index].memory == nullptr ? 0 : chunks_[index].memory->bytes();
  if (had < slot_bytes) {
    if (bytes_.load(std::memory_order_relaxed) - had + wanted > limit_bytes_) DropUncut();
    const uint64_t others = bytes_.load(std::memory_order_relaxed) - had;
    // The device may have less memory left than the limit allows: the cache then stays at its present size.
    absl::StatusOr<std::unique_ptr<KvBuffer>> memory = absl::ResourceExhaustedError("");
    const size_t bytes =
        others + wanted <= limit_bytes_ ? wanted : limit_bytes_ - std::min(others, limit_bytes_);
    if (bytes >= slot_bytes) memory = compute_.Allocate(bytes);
    if (!memory.ok()) {
      if (index != kNone) uncut_.push_back(index);
      return kNone;
    }
    if (index == kNone) {
      index = static_cast<uint32_t>(chunks_.size());
      chunks_.emplace_back();
    }
    chunks_[index].memory = *std::move(memory);
    bytes_.store(others + bytes, std::memory_order_relaxed);
  }
  Chunk& chunk = chunks_[index];
  chunk.slot_bytes = slot_bytes;
  chunk.free_slots.clear();
  for (size_t slot = chunk.memory->bytes() / slot_bytes; slot > 0; --slot) {
    chunk.free_slots.push_back(static_cast<uint32_t>(slot - 1));
  }
  roomy_[slot_bytes].push_back(index);
  return index;
}

void FeatureCache::DropUncut() {
  for (const uint32_t index : uncut_) {
    std::unique_ptr<KvBuffer> memory = std::move(chunks_[index].memory);
    if (memory != nullptr) bytes_.fetch_sub(memory->bytes(), std::memory_order_relaxed);
  }
}

void FeatureCache::Forget(uint32_t index) {
  const Entry& entry = entries_[index];
  Chunk& chunk = chunks_[entry.chunk];
  Unlink(index);
  by_key_.erase(entry.key);
  unused_entries_.push_back(index);
  std::vector<uint32_t>& roomy = roomy_[chunk.slot_bytes];
  if (chunk.free_slots.empty()) roomy.push_back(entry.chunk);
  chunk.free_slots.push_back(entry.slot);
  if (--chunk.used > 0) return;
  std::erase(roomy, entry.chunk);
  chunk.slot_bytes = 0;
  uncut_.push_back(entry.chunk);
}

void FeatureCache::Link(uint32_t index) {
  Entry& entry = entries_[index];
  entry.call = call_;
  entry.newer = kNone;
  entry.older = newest_;
  if (newest_ != kNone) entries_[newest_].newer = index;
  newest_ = index;
  if (oldest_ == kNone) oldest_ = index;
}

void FeatureCache::Unlink(uint32_t index) {
  const Entry& entry = entries_[index];
  (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
  (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
}

float* FeatureCache::At(const Entry& entry) const {
  const Chunk& chunk = chunks_[entry.chunk];
  return reinterpret_cast<float*>(chunk.memory->address() + entry.slot * chunk.slot_bytes);
}

FeatureStats FeatureCache::stats() const {
  return {.hits = hits_.load(std::memory_order_relaxed),
          .misses = misses_.load(std::memory_order_relaxed),
          .evicted = evicted_.load(std::memory_order_relaxed),
          .bytes = bytes_.load(std::memory_order_relaxed)};
}

}  // namespace kvpool
