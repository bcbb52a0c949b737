#include "server/tiers/host_tier.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

// Values that are unlinked under one hold of the mutex.
constexpr size_t kUnlinkedTogether = 256;
// The table of values is made for so many at most; it grows by itself, which takes long.
constexpr uint64_t kMostReserved = 1 << 22;

}  // namespace

HostTier::Memory::Memory(uint64_t pages)
    : data(static_cast<char*>(std::aligned_alloc(kTierPageBytes, pages))), bytes(pages) {}

HostTier::Memory::~Memory() {
  if (data == nullptr) return;
  std::memset(data, 0, bytes);
  // The compiler must not take it for dead.
  __asm__ volatile("" : : "r"(data) : "memory");
  std::free(data);
}

std::string HostTier::describe() const { return absl::StrCat(capacity_bytes_, " bytes of host memory"); }

void HostTier::Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) {
  MutexLock lock(&mu_);
  for (size_t i = 0; i < keys.size(); ++i) {
    found[i] = found_.contains(keys[i]) ? TierPresence::kYes : TierPresence::kNo;
  }
}

void HostTier::Load(std::vector<TierLoad> loads, Deadline deadline, Done done) {
  for (size_t i = 0; i < loads.size(); ++i) {
    const auto since = std::chrono::steady_clock::now();
    // Whoever erases it waits until it is answered.
    std::shared_ptr<Memory> held;
    const TierResult result = since <= deadline ? LoadOne(loads[i], &held) : TierResult::kLate;
    {
      MutexLock lock(&mu_);
      Count(/*load=*/true, loads[i].into->bytes(), result, since);
    }
    done(i, result);
    if (held == nullptr) continue;
    MutexLock lock(&mu_);
    if (--held->readers == 0) read_.SignalAll();
  }
}

TierResult HostTier::LoadOne(const TierLoad& load, std::shared_ptr<Memory>* held) {
  {
    MutexLock lock(&mu_);
    const auto found = found_.find(load.key);
    if (found == found_.end() || found->second->bytes != load.into->bytes()) return TierResult::kMiss;
    *held = found->second->memory;
    ++(*held)->readers;
    values_.splice(values_.end(), values_, found->second);
  }
  std::memcpy(load.into->data(), (*held)->data, load.into->bytes());
  return TierResult::kDone;
}

void HostTier::Store(std::vector<TierStore> stores, Done done) {
  for (size_t i = 0; i < stores.size(); ++i) {
    const auto since = std::chrono::steady_clock::now();
    const TierResult result = StoreOne(stores[i]);
    {
      MutexLock lock(&mu_);
      Count(/*load=*/false, stores[i].value->bytes(), result, since);
    }
    done(i, result);
  }
}

TierResult HostTier::StoreOne(const TierStore& store) {
  const uint64_t bytes = store.value->bytes(), pages = WholePages(bytes);
  std::shared_ptr<Memory> memory;
  std::vector<std::shared_ptr<Memory>> gone;  // They go behind the mutex.
  uint64_t erasures;
  {
    MutexLock lock(&mu_);
    const auto found = found_.find(store.key);
    if (found != found_.end() && store.replaces) {
      gone.push_back(Remove(found->second));
    } else if (found != found_.end()) {
      values_.splice(values_.end(), values_, found->second);
      return TierResult::kDone;
    }
    if (found_.empty()) found_.reserve(std::min(capacity_bytes_ / pages, kMostReserved));
    if (!TakeRoom(pages, &memory, &gone)) return TierResult::kFull;
    erasures = erasures_;
  }
  gone.clear();
  if (memory == nullptr) memory = std::make_shared<Memory>(pages);
  // Behind the value is nothing but zeros, in both.
  if (memory->data != nullptr) std::memcpy(memory->data, store.value->data(), pages);
  MutexLock lock(&mu_);
  const bool there = found_.contains(store.key);
  // What an erasure that began meanwhile was to find is not stored behind its back.
  if (memory->data == nullptr || there || erasures != erasures_) {
    taken_bytes_ -= pages;
    return memory->data == nullptr ? TierResult::kFull : there ? TierResult::kDone : TierResult::kMiss;
  }
  values_.push_back({.key = store.key, .bytes = bytes, .memory = std::move(memory), .of_owner = {}});
  const auto value = std::prev(values_.end());
  std::list<Values::iterator>& of_owner = owners_[store.key.owner];
  value->of_owner = of_owner.insert(of_owner.end(), value);
  found_[store.key] = value;
  value_bytes_ += bytes;
  return TierResult::kDone;
}

bool HostTier::TakeRoom(uint64_t pages, std::shared_ptr<Memory>* memory,
                        std::vector<std::shared_ptr<Memory>>* gone) {
  if (pages > capacity_bytes_) return false;
  while (taken_bytes_ + pages > capacity_bytes_) {
    if (values_.empty()) return false;  // All of it is being stored.
    gone->push_back(Remove(values_.begin()));
    ++counters_.evicted;
    // Nobody else may write where somebody reads.
    if (*memory == nullptr && gone->back()->bytes == pages && gone->back()->readers == 0) {
      *memory = std::move(gone->back());
      gone->pop_back();
    }
  }
  taken_bytes_ += pages;
  return true;
}

std::shared_ptr<HostTier::Memory> HostTier::Remove(Values::iterator value) {
  taken_bytes_ -= value->memory->bytes;
  value_bytes_ -= value->bytes;
  const auto of_owner = owners_.find(value->key.owner);
  of_owner->second.erase(value->of_owner);
  if (of_owner->second.empty()) owners_.erase(of_owner);
  found_.erase(value->key);
  std::shared_ptr<Memory> memory = std::move(value->memory);
  values_.erase(value);
  return memory;
}

void HostTier::Count(bool load, uint64_t bytes, TierResult result,
                     std::chrono::steady_clock::time_point since) {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - since;
  (load ? load_seconds_ : store_seconds_).Observe(seconds.count());
  counters_.Count(load, bytes, result);
}

TierErased HostTier::Erase(const TierOwner& owner, absl::Span<const TierKey>, const std::atomic<bool>* stop) {
  TierErased erased{.wiped = true};
  {
    MutexLock lock(&mu_);
    ++erasures_;
  }
  for (bool more = true; more;) {
    std::vector<std::shared_ptr<Memory>> gone;
    {
      MutexLock lock(&mu_);
      const auto of_owner = owners_.find(owner);
      more = of_owner != owners_.end();
      while (more && gone.size() < kUnlinkedTogether) {
        const Values::iterator value = of_owner->second.front();
        more = of_owner->second.size() > 1;
        ++erased.values;
        erased.bytes += value->bytes;
        gone.push_back(Remove(value));
      }
      for (const std::shared_ptr<Memory>& memory : gone) {
        while (memory->readers > 0) read_.Wait(&mu_);
      }
    }
    if (more && stop != nullptr && *stop) {
      erased.complete = false;
      break;
    }
  }
  return erased;
}

absl::StatusOr<uint64_t> HostTier::CountOf(const TierOwner& owner) {
  MutexLock lock(&mu_);
  const auto of_owner = owners_.find(owner);
  return of_owner == owners_.end() ? 0 : of_owner->second.size();
}

TierUsage HostTier::usage() {
  MutexLock lock(&mu_);
  return {.values = values_.size(),
          .bytes = value_bytes_,
          .capacity_bytes = capacity_bytes_,
          .counters = counters_,
          .load = load_seconds_.Snapshot(),
          .store = store_seconds_.Snapshot()};
}

}  // namespace kvpool
