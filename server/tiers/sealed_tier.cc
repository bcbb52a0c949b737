#include "server/tiers/sealed_tier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/tiers/buffer_arena.h"
#include "server/tiers/sealed_value.h"

namespace kvpool {
namespace {

// Damage is told of no more often than this.
constexpr auto kTellPause = std::chrono::seconds(10);

}  // namespace

absl::StatusOr<std::unique_ptr<SealedTier>> SealedTier::Make(std::unique_ptr<Tier> behind,
                                                             std::shared_ptr<EncryptionKeyFile> keys,
                                                             const Options& options) {
  // Where a value is as large as all buffers that it comes in, the sealed one has its place too.
  const uint64_t bytes = WholePages(options.buffer_bytes + kSealBytes);
  ASSIGN_OR_RETURN(std::shared_ptr<BufferArena> up, BufferArena::Make(bytes));
  ASSIGN_OR_RETURN(std::shared_ptr<BufferArena> down, BufferArena::Make(bytes));
  return std::unique_ptr<SealedTier>(
      new SealedTier(std::move(behind), std::move(keys), std::move(up), std::move(down), options));
}

SealedTier::SealedTier(std::unique_ptr<Tier> behind, std::shared_ptr<EncryptionKeyFile> keys,
                       std::shared_ptr<BufferMemory> up, std::shared_ptr<BufferMemory> down,
                       const Options& options)
    : most_sealed_bytes_(options.buffer_bytes + kSealBytes),
      shut_for_(options.shut_for),
      keys_(std::move(keys)),
      up_(WholePages(most_sealed_bytes_), std::move(up)),
      down_(WholePages(most_sealed_bytes_), std::move(down)),
      behind_(std::move(behind)) {
  for (int i = 0; i < options.threads; ++i)
    threads_.push_back(NamedThread("sealed-tier", [this] { Work(); }));
}

SealedTier::~SealedTier() {
  Drain();
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    work_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

uint64_t SealedTier::most_value_bytes() const {
  return std::min(behind_->most_value_bytes(), most_sealed_bytes_) - kSealBytes;
}

std::string SealedTier::describe() const {
  return absl::StrCat(behind_->describe(), ", encrypted with AES-256-GCM on ", threads_.size(), " threads");
}

// ------------------------------------------------------------------------------------------------- who asks

void SealedTier::Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) {
  std::vector<TierKey> names;
  names.reserve(keys.size());
  for (const TierKey& key : keys) names.push_back(SealedName(key));
  behind_->Exists(names, found);
  const std::shared_ptr<const EncryptionKeys> by = keys_->keys();
  MutexLock lock(&shut_mu_);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (by->Of(keys[i].owner).empty() || IsShut(keys[i], by)) found[i] = TierPresence::kNo;
  }
}

void SealedTier::Load(std::vector<TierLoad> loads, Deadline deadline, Done done) {
  const auto shared = std::make_shared<const Done>(std::move(done));
  std::vector<TaskRef> tasks;
  for (size_t i = 0; i < loads.size(); ++i) {
    const uint64_t bytes = loads[i].into->bytes();
    tasks.push_back(std::make_shared<Task>(Task{.key = loads[i].key,
                                                .into = std::move(loads[i].into),
                                                .bytes = bytes,
                                                .deadline = deadline,
                                                .index = i,
                                                .done = shared}));
  }
  Enqueue(std::move(tasks), &loads_);
}

void SealedTier::Store(std::vector<TierStore> stores, Done done) {
  const auto shared = std::make_shared<const Done>(std::move(done));
  std::vector<TaskRef> tasks;
  for (size_t i = 0; i < stores.size(); ++i) {
    const uint64_t bytes = stores[i].value->bytes();
    tasks.push_back(std::make_shared<Task>(Task{.key = stores[i].key,
                                                .value = std::move(stores[i].value),
                                                .bytes = bytes,
                                                .replaces = stores[i].replaces,
                                                .index = i,
                                                .done = shared}));
  }
  Enqueue(std::move(tasks), &stores_);
}

void SealedTier::Enqueue(std::vector<TaskRef> tasks, std::deque<TaskRef>* queue) {
  const auto now = std::chrono::steady_clock::now();
  std::vector<TaskRef> refused;
  {
    MutexLock lock(&mu_);
    for (TaskRef& task : tasks) {
      task->since = now;
      ++waiting_;
      const bool fits = task->bytes <= most_sealed_bytes_ - kSealBytes;
      if (fits && loads_.size() + stores_.size() < kMostWaiting) {
        queue->push_back(std::move(task));
        work_.Signal();
      } else {
        refused.push_back(std::move(task));
      }
    }
  }
  for (const TaskRef& task : refused) Answer(task, TierResult::kFull);
}

void SealedTier::Drain() {
  MutexLock lock(&mu_);
  while (waiting_ > 0) idle_.Wait(&mu_);
}

TierUsage SealedTier::usage() {
  TierUsage usage = behind_->usage();
  MutexLock lock(&mu_);
  const uint64_t evicted = usage.counters.evicted;
  usage.counters = counters_;
  usage.counters.evicted = evicted;
  usage.waiting = waiting_;
  usage.load = load_seconds_.Snapshot();
  usage.store = store_seconds_.Snapshot();
  return usage;
}

// ---------------------------------------------------------------------------------------------- the threads

void SealedTier::Work() {
  while (true) {
    keys_->Look(std::chrono::steady_clock::now());
    Step step;
    {
      MutexLock lock(&mu_);
      step = Next();
      if (step.kind == Step::Kind::kNone) {
        if (stopping_) return;
        work_.WaitUntil(&mu_, std::chrono::steady_clock::now() + EncryptionKeyFile::kLookPause);
        continue;
      }
    }
    switch (step.kind) {
      case Step::Kind::kNone:
        break;
      case Step::Kind::kOpen:
        RunOpen(step.task);
        break;
      case Step::Kind::kLoad:
        RunLoad(step.task);
        break;
      case Step::Kind::kStore:
        RunStore(step.task);
        break;
    }
    step.task.reset();
    EndStep(step.number);
  }
}

SealedTier::Step SealedTier::Next() {
  if (!loaded_.empty()) {
    Step step = std::move(loaded_.front());
    loaded_.pop_front();
    return step;
  }
  if (TaskRef task = TakeFirst(&loads_, &up_); task != nullptr) {
    return {.kind = Step::Kind::kLoad, .task = std::move(task), .number = BeginStep()};
  }
  if (TaskRef task = TakeFirst(&stores_, &down_); task != nullptr) {
    return {.kind = Step::Kind::kStore, .task = std::move(task), .number = BeginStep()};
  }
  return {};
}

SealedTier::TaskRef SealedTier::TakeFirst(std::deque<TaskRef>* queue, BufferStock* stock) {
  if (queue->empty()) return nullptr;
  std::shared_ptr<TierBuffer> buffer = stock->Take(queue->front()->bytes + kSealBytes);
  if (buffer == nullptr) return nullptr;
  TaskRef task = std::move(queue->front());
  queue->pop_front();
  // Whoever lets go of it last, there is room for the next one then.
  TierBuffer* const sealed = buffer.get();
  task->sealed = std::shared_ptr<TierBuffer>(sealed, [this, buffer = std::move(buffer)](TierBuffer*) mutable {
    buffer.reset();
    MutexLock lock(&mu_);
    work_.Signal();
  });
  return task;
}

uint64_t SealedTier::BeginStep() {
  under_way_.insert(++begun_);
  return begun_;
}

void SealedTier::EndStep(uint64_t number) {
  MutexLock lock(&mu_);
  under_way_.erase(number);
  ended_.SignalAll();
}

void SealedTier::RunLoad(const TaskRef& task) {
  if (std::chrono::steady_clock::now() > task->deadline) return Answer(task, TierResult::kLate);
  const std::shared_ptr<const EncryptionKeys> keys = keys_->keys();
  if (keys->Of(task->key.owner).empty()) return Answer(task, TierResult::kMiss, Counted::kNoKey);
  bool shut = false;
  {
    MutexLock lock(&shut_mu_);
    shut = IsShut(task->key, keys);
  }
  if (shut) return Answer(task, TierResult::kMiss);
  behind_->Load({{SealedName(task->key), task->sealed}}, task->deadline,
                [this, task](size_t, TierResult result) {
                  task->loaded = result;
                  MutexLock lock(&mu_);
                  loaded_.push_back({.kind = Step::Kind::kOpen, .task = task, .number = BeginStep()});
                  work_.Signal();
                });
}

void SealedTier::RunOpen(const TaskRef& task) {
  if (task->loaded != TierResult::kDone) return Answer(task, task->loaded);
  const std::shared_ptr<const EncryptionKeys> keys = keys_->keys();
  const std::optional<EncryptionKeyId> with = SealedWith(*task->sealed);
  const EncryptionKey* const key = with.has_value() ? keys->Find(task->key.owner, *with) : nullptr;
  if (key != nullptr && OpenValue(SealedName(task->key), *key, *task->sealed, task->into.get())) {
    return Answer(task, TierResult::kDone);
  }
  Shut(task->key, keys);
  if (with.has_value() && key == nullptr) return Answer(task, TierResult::kMiss, Counted::kNoKey);
  TellOfDamage();
  Answer(task, TierResult::kCorrupt);
}

void SealedTier::RunStore(const TaskRef& task) {
  const std::shared_ptr<const EncryptionKeys> keys = keys_->keys();
  const absl::Span<const EncryptionKey> of_tenant = keys->Of(task->key.owner);
  if (of_tenant.empty()) return Answer(task, TierResult::kFull, Counted::kNoKey);
  const TierKey name = SealedName(task->key);
  SealValue(name, of_tenant.front(), *task->value, task->sealed.get());
  task->value.reset();
  bool shut = false;
  {
    MutexLock lock(&shut_mu_);
    shut = IsShut(task->key, keys);
  }
  TierStore store{.key = name, .value = std::move(task->sealed), .replaces = task->replaces || shut};
  std::vector<TierStore> stores;
  stores.push_back(std::move(store));
  behind_->Store(std::move(stores), [this, task](size_t, TierResult result) {
    if (result == TierResult::kDone) {
      MutexLock lock(&shut_mu_);
      shut_.erase(task->key);
    }
    Answer(task, result);
  });
}

void SealedTier::Answer(const TaskRef& task, TierResult result, Counted counted) {
  const bool load = task->into != nullptr;
  task->into.reset();
  task->value.reset();
  task->sealed.reset();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - task->since;
  {
    MutexLock lock(&mu_);
    if (counted == Counted::kNoKey) {
      ++counters_.no_key;
    } else {
      counters_.Count(load, task->bytes, result);
    }
    (load ? load_seconds_ : store_seconds_).Observe(seconds.count());
  }
  (*task->done)(task->index, result);
  task->done.reset();
  MutexLock lock(&mu_);
  if (--waiting_ == 0) idle_.SignalAll();
}

// ------------------------------------------------------------------------------------- what is not to be had

bool SealedTier::IsShut(const TierKey& key, const std::shared_ptr<const EncryptionKeys>& keys) {
  const auto shut = shut_.find(key);
  return shut != shut_.end() && shut_by_.lock() == keys && std::chrono::steady_clock::now() < shut->second;
}

void SealedTier::Shut(const TierKey& key, const std::shared_ptr<const EncryptionKeys>& keys) {
  MutexLock lock(&shut_mu_);
  if (shut_by_.lock() != keys) shut_.clear();
  if (shut_.size() == kMostShut) shut_.erase(shut_.begin());
  shut_by_ = keys;
  shut_[key] = std::chrono::steady_clock::now() + shut_for_;
}

void SealedTier::TellOfDamage() {
  const auto now = std::chrono::steady_clock::now();
  {
    MutexLock lock(&mu_);
    if (now < tell_at_) return;
    tell_at_ = now + kTellPause;
  }
  LogWarning("tier's value is not as it was sealed", {{"tier", name()}, {"path", path()}});
}

// ------------------------------------------------------------------------------------------------- erasing

void SealedTier::RefuseWaiting(const TierOwner& owner) {
  std::vector<TaskRef> refused;
  {
    MutexLock lock(&mu_);
    for (std::deque<TaskRef>* const queue : {&loads_, &stores_}) {
      std::erase_if(*queue, [&](const TaskRef& task) {
        if (task->key.owner != owner) return false;
        refused.push_back(task);
        return true;
      });
    }
  }
  for (const TaskRef& task : refused) Answer(task, TierResult::kMiss);
}

void SealedTier::AwaitBegun() {
  MutexLock lock(&mu_);
  const uint64_t last = begun_;
  while (!under_way_.empty() && *under_way_.begin() <= last) ended_.Wait(&mu_);
}

TierErased SealedTier::Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                             const std::atomic<bool>* stop) {
  RefuseWaiting(owner);
  // What was being sealed is with the tier behind, which erases it.
  AwaitBegun();
  std::vector<TierKey> names;
  names.reserve(2 * keys.size());
  for (const TierKey& key : keys) {
    names.push_back(SealedName(key));
    names.push_back(key);
  }
  TierErased erased = behind_->Erase(owner, names, stop);
  // What it had brought before is with those who asked.
  AwaitBegun();
  return erased;
}

}  // namespace kvpool
