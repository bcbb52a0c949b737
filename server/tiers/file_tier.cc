#include "server/tiers/file_tier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/tiers/crc32c.h"

namespace kvpool {
namespace {

// Large enough that a disk sees long extents, small enough that a size gets its share in parts.
constexpr uint64_t kMostSegmentBytes = uint64_t{256} << 20;
constexpr uint64_t kSegmentsAtLeast = 16;
// The next daemon knows of a value's uses to within so large a part of the order: a record is written again when a use moves its
// value further. A value that is read all the time is written as often as the whole order turns over so many times.
constexpr uint64_t kPartsOfOrder = 16;
// Slots, and bytes of them, that are emptied under one hold of the mutex, which only the tier's own threads wait for, or that
// are kept from them while they are wiped.
constexpr size_t kErasedTogether = 64;
constexpr uint64_t kErasedBytesTogether = 64 << 20;
constexpr size_t kMostFilesNamed = 4;
constexpr int kMostWipes = 4;

std::string PathOf(const std::string& folder, uint64_t number) {
  return absl::StrCat(folder, "/", number, ".slots");
}

// Some file systems refuse the flag, others the reads.
bool TakesDirectReads(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
  const std::unique_ptr<char, decltype(&std::free)> page(
      static_cast<char*>(std::aligned_alloc(kTierPageBytes, kTierPageBytes)), &std::free);
  return file.valid() && pread(file.get(), page.get(), kTierPageBytes, 0) >= 0;
}

}  // namespace

namespace {

// K and V of all tenants lie there, and the secret of their keys may: others must not have put anything in it.
absl::Status CheckOwn(const std::string& path) {
  struct stat facts {};
  if (stat(path.c_str(), &facts) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("--tier: ", path));
  if (facts.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat("--tier: ", path, " belongs to uid ", facts.st_uid,
                                                    ", and the daemon is uid ", geteuid()));
  }
  if ((facts.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(absl::StrCat(
        "--tier: ", path, " may be written to by others; take group's and others' right away (chmod go-w)"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileTier>> FileTier::Open(const Options& options) {
  if (options.capacity_bytes < kLeastCapacityBytes) {
    return absl::InvalidArgumentError(absl::StrCat("--tier: capacity is ", options.capacity_bytes,
                                                   " bytes; must be at least ", kLeastCapacityBytes));
  }
  RETURN_IF_ERROR(MakeOwnDirectory("--tier", options.path));
  RETURN_IF_ERROR(CheckOwn(options.path));
  ASSIGN_OR_RETURN(FileLock lock, FileLock::Take(options.path + "/lock"));
  std::unique_ptr<FileTier> tier(new FileTier(options, std::move(lock)));
  RETURN_IF_ERROR(tier->Recover());
  for (int i = 0; i < options.threads; ++i)
    tier->threads_.push_back(NamedThread("file-tier", [t = tier.get()] { t->Work(); }));
  return tier;
}

FileTier::FileTier(const Options& options, FileLock lock)
    : path_(options.path),
      capacity_bytes_(options.capacity_bytes),
      segment_bytes_(std::min(kMostSegmentBytes, options.capacity_bytes / kSegmentsAtLeast)),
      pause_after_error_(options.pause_after_error),
      io_(options.io == nullptr ? &system_io_ : options.io),
      lock_(std::move(lock)),
      direct_(TakesDirectReads(path_ + "/lock")) {}

FileTier::~FileTier() {
  Drain();
  {
    MutexLock lock(&queue_mu_);
    stopping_ = true;
    work_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

// ------------------------------------------------------------------------------------------------- recovery

absl::Status FileTier::Recover() {
  std::error_code error;
  std::vector<std::pair<std::string, uint64_t>> there;
  for (const auto& entry : std::filesystem::directory_iterator(path_, error)) {
    const std::string name = entry.path().filename();
    absl::string_view stem = name;
    uint64_t number = 0;
    // A file that was being made when the daemon ended.
    if (absl::ConsumeSuffix(&stem, ".slots.new")) {
      RETURN_IF_ERROR(io_->Remove(entry.path()));
    } else if (absl::ConsumeSuffix(&stem, ".slots") && absl::SimpleAtoi(stem, &number) &&
               number < UINT32_MAX && entry.path() == PathOf(path_, number)) {
      there.emplace_back(entry.path(), number);
    } else if (absl::ConsumeSuffix(&stem, ".records") && absl::SimpleAtoi(stem, &number) &&
               entry.path() == Segment::RecordsPath(PathOf(path_, number)) &&
               access(PathOf(path_, number).c_str(), F_OK) != 0) {
      // Its slots were being made, or removed.
      RETURN_IF_ERROR(io_->Remove(entry.path()));
    }
  }
  if (error) return absl::UnavailableError(absl::StrCat("--tier: reading ", path_, ": ", error.message()));
  MutexLock lock(&mu_);
  for (const auto& [path, number] : there) {
    std::vector<Segment::Filled> filled;
    absl::StatusOr<std::unique_ptr<Segment>> segment = Segment::Open(io_, path, &filled);
    if (!segment.ok()) {
      if (!absl::IsDataLoss(segment.status())) {
        // It may be whole and readable tomorrow: it stays, and takes its part of the capacity.
        uint64_t bytes = 0;
        for (const std::string& part : {path, Segment::RecordsPath(path)}) {
          const uint64_t part_bytes = std::filesystem::file_size(part, error);
          bytes += error ? 0 : part_bytes;
        }
        LogWarning("tier's file left alone", {{"path", path}, {"error", segment.status()}});
        left_alone_.push_back(path);
        next_file_ = std::max(next_file_, number + 1);
        file_bytes_ += bytes;
        continue;
      }
      LogWarning("tier's file dropped", {{"path", path}, {"error", segment.status()}});
      RETURN_IF_ERROR(Segment::Remove(io_, path));
      continue;
    }
    Adopt(*std::move(segment), number, filled);
  }
  for (auto& [bytes, size] : sizes_) {
    size.values.sort([](const Value& a, const Value& b) { return a.record.stamp < b.record.stamp; });
  }
  // The capacity may be smaller than it was.
  while (file_bytes_ > capacity_bytes_ && TakeColdFile(0, UINT64_MAX)) {
  }
  return absl::OkStatus();
}

void FileTier::Adopt(std::unique_ptr<Segment> segment, uint64_t number,
                     const std::vector<Segment::Filled>& filled) {
  auto file = std::make_unique<File>();
  Size& size = sizes_[segment->slot_bytes()];
  std::vector<bool> taken(segment->slots());
  for (const Segment::Filled& found : filled) {
    const auto [place, is_new] = found_.try_emplace(found.record.key);
    // One key twice is damage of some kind: either value has its checksum.
    if (!is_new) {
      segment->Empty(found.slot).IgnoreError();
      continue;
    }
    taken[found.slot] = true;
    size.values.push_back({.record = found.record,
                           .file = file.get(),
                           .slot = found.slot,
                           .used = found.record.stamp,
                           .written = true});
    Know(found.record.key);
    place->second = std::prev(size.values.end());
    file->used = std::max(file->used, found.record.stamp);
    value_bytes_ += found.record.bytes;
  }
  for (uint32_t slot = segment->slots(); slot-- > 0;) {
    if (!taken[slot]) file->free.push_back(slot);
  }
  clock_ = std::max(clock_, file->used);
  file_bytes_ += segment->file_bytes();
  file->number = number;
  next_file_ = std::max(next_file_, number + 1);
  file->segment = std::move(segment);
  size.files.push_back(file.get());
  files_[number] = std::move(file);
}

// ---------------------------------------------------------------------------------------------------- asking

std::string FileTier::describe() const {
  return absl::StrCat(path_, ", ", capacity_bytes_, " bytes in files of ", segment_bytes_, ", ",
                      threads_.size(), " threads, ", direct_ ? "O_DIRECT" : "through the page cache");
}

void FileTier::Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) {
  MutexLock lock(&known_mu_);
  for (size_t i = 0; i < keys.size(); ++i) {
    found[i] = known_.contains(keys[i]) ? TierPresence::kYes : TierPresence::kNo;
  }
}

void FileTier::Load(std::vector<TierLoad> loads, Deadline deadline, Done done) {
  const auto shared = std::make_shared<const Done>(std::move(done));
  std::vector<Task> tasks;
  for (size_t i = 0; i < loads.size(); ++i) {
    tasks.push_back({.load = std::move(loads[i]), .deadline = deadline, .index = i, .done = shared});
  }
  Enqueue(std::move(tasks), &loads_);
}

void FileTier::Store(std::vector<TierStore> stores, Done done) {
  const auto shared = std::make_shared<const Done>(std::move(done));
  std::vector<Task> tasks;
  for (size_t i = 0; i < stores.size(); ++i) {
    tasks.push_back({.store = std::move(stores[i]), .index = i, .done = shared});
  }
  Enqueue(std::move(tasks), &stores_);
}

void FileTier::Enqueue(std::vector<Task> tasks, std::deque<Task>* queue) {
  const auto now = std::chrono::steady_clock::now();
  std::vector<Task> refused;
  {
    MutexLock lock(&queue_mu_);
    for (Task& task : tasks) {
      task.since = now;
      if (loads_.size() + stores_.size() < kMostWaiting) {
        queue->push_back(std::move(task));
        work_.Signal();
      } else {
        ++counters_.full;
        refused.push_back(std::move(task));
      }
    }
  }
  for (const Task& task : refused) (*task.done)(task.index, TierResult::kFull);
}

void FileTier::Drain() {
  MutexLock lock(&queue_mu_);
  while (!loads_.empty() || !stores_.empty() || !under_way_.empty()) idle_.Wait(&queue_mu_);
}

TierUsage FileTier::usage() {
  TierUsage usage{.bytes = value_bytes_, .capacity_bytes = capacity_bytes_};
  {
    MutexLock lock(&known_mu_);
    usage.values = known_.size();
  }
  MutexLock lock(&queue_mu_);
  usage.waiting = loads_.size() + stores_.size() + under_way_.size();
  usage.counters = counters_;
  usage.counters.evicted = evicted_;
  usage.load = load_seconds_.Snapshot();
  usage.store = store_seconds_.Snapshot();
  return usage;
}

// ------------------------------------------------------------------------------------------------ the threads

void FileTier::Work() {
  while (true) {
    Task task;
    uint64_t number = 0;
    {
      MutexLock lock(&queue_mu_);
      while (loads_.empty() && stores_.empty() && !stopping_) work_.Wait(&queue_mu_);
      if (loads_.empty() && stores_.empty()) return;
      std::deque<Task>& queue = loads_.empty() ? stores_ : loads_;
      task = std::move(queue.front());
      queue.pop_front();
      number = ++begun_;
      under_way_.insert(number);
    }
    const bool load = task.load.into != nullptr;
    const TierResult result = load ? RunLoad(task) : RunStore(task);
    {
      MutexLock lock(&queue_mu_);
      Count(task, result);
    }
    (*task.done)(task.index, result);
    task = Task();
    EndTask(number);
  }
}

void FileTier::EndTask(uint64_t number) {
  MutexLock lock(&queue_mu_);
  under_way_.erase(number);
  ended_.SignalAll();
  if (under_way_.empty() && loads_.empty() && stores_.empty()) idle_.SignalAll();
}

void FileTier::Count(const Task& task, TierResult result) {
  const bool load = task.load.into != nullptr;
  const uint64_t bytes = load ? task.load.into->bytes() : task.store.value->bytes();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - task.since;
  (load ? load_seconds_ : store_seconds_).Observe(seconds.count());
  counters_.Count(load, bytes, result);
}

TierResult FileTier::RunLoad(const Task& task) {
  if (std::chrono::steady_clock::now() > task.deadline) return TierResult::kLate;
  TierBuffer* const into = task.load.into.get();
  Place value;
  {
    MutexLock lock(&mu_);
    const auto place = found_.find(task.load.key);
    if (place == found_.end() || !place->second->written) return TierResult::kMiss;
    value = place->second;
    if (value->record.bytes != into->bytes()) return TierResult::kMiss;
    Use(value);
    ++value->readers;
    ++value->file->busy;
  }
  // While it has readers, neither its slot nor its file is used for anything else.
  const absl::Status read = value->file->segment->Read(value->slot, value->record, into);
  if (read.ok()) WriteUse(value);
  MutexLock lock(&mu_);
  --value->readers;
  --value->file->busy;
  if (!read.ok() && !value->dropped) {
    LogWarning("tier's value dropped", {{"tier", name()}, {"error", read}});
    Drop(value);
  } else if (value->dropped && value->readers == 0) {
    Drop(value);
  }
  if (read.ok()) return TierResult::kDone;
  return absl::IsDataLoss(read) ? TierResult::kCorrupt : TierResult::kFailed;
}

void FileTier::WriteUse(Place value) {
  Segment::Record record;
  {
    MutexLock lock(&mu_);
    if (value->dropped || value->used - value->record.stamp <= found_.size() / kPartsOfOrder) return;
    value->record.stamp = value->used;
    record = value->record;
  }
  // The value is good with its old record too.
  value->file->segment->Restamp(value->slot, record).IgnoreError();
}

TierResult FileTier::RunStore(const Task& task) {
  const TierBuffer& buffer = *task.store.value;
  if (buffer.bytes() > kMostValueBytes) return TierResult::kFull;
  Segment::Record record{.key = task.store.key,
                         .bytes = static_cast<uint32_t>(buffer.bytes()),
                         .crc = Crc32c(buffer.data(), buffer.bytes())};
  Place value;
  {
    MutexLock lock(&mu_);
    if (const auto there = found_.find(record.key); there != found_.end()) {
      if (!task.store.replaces || !there->second->written) return TierResult::kDone;
      Drop(there->second);
    }
    found_.try_emplace(record.key);
    absl::Status error;
    uint32_t slot = 0;
    File* const file = TakeSlot(WholePages(buffer.bytes()), &slot, &error);
    if (file == nullptr) {
      found_.erase(record.key);
      if (error.ok() || absl::IsResourceExhausted(error)) return TierResult::kFull;
      return TierResult::kFailed;
    }
    record.stamp = ++clock_;
    file->used = clock_;
    ++file->busy;
    Values& values = sizes_[file->segment->slot_bytes()].values;
    values.push_back({.record = record, .file = file, .slot = slot, .used = clock_});
    value = std::prev(values.end());
    found_[record.key] = value;
    value_bytes_ += record.bytes;
  }
  const absl::Status written = value->file->segment->Fill(value->slot, record, buffer);
  MutexLock lock(&mu_);
  --value->file->busy;
  value->written = true;
  if (written.ok()) {
    Know(value->record.key);
    return TierResult::kDone;
  }
  if (!std::exchange(said_error_, true))
    LogWarning("tier can't be written", {{"tier", name()}, {"error", written}});
  File* const file = value->file;
  Drop(value);
  ++late_slots_;
  // The next value does not go to the same sectors.
  file->failed.push_back(file->free.back());
  file->free.pop_back();
  failed_again_ = std::chrono::steady_clock::now() + pause_after_error_;
  return absl::IsResourceExhausted(written) ? TierResult::kFull : TierResult::kFailed;
}

// ------------------------------------------------------------------------------------------------- erasing

void FileTier::RefuseWaiting(const TierOwner& owner) {
  std::vector<Task> refused;
  uint64_t number = 0;
  {
    MutexLock lock(&queue_mu_);
    const uint64_t last = begun_;
    // Whoever waits for all to be answered waits for these too.
    number = ++begun_;
    under_way_.insert(number);
    for (std::deque<Task>* const queue : {&loads_, &stores_}) {
      std::deque<Task> others;
      for (Task& task : *queue) {
        const TierKey& key = task.load.into != nullptr ? task.load.key : task.store.key;
        if (key.owner != owner) {
          others.push_back(std::move(task));
          continue;
        }
        ++counters_.missed;
        refused.push_back(std::move(task));
      }
      queue->swap(others);
    }
    while (*under_way_.begin() <= last) ended_.Wait(&queue_mu_);
  }
  for (const Task& task : refused) (*task.done)(task.index, TierResult::kMiss);
  refused.clear();
  EndTask(number);
}

void FileTier::AwaitBegun() {
  MutexLock lock(&queue_mu_);
  const uint64_t last = begun_;
  while (!under_way_.empty() && *under_way_.begin() <= last) ended_.Wait(&queue_mu_);
}

TierErased FileTier::Erase(const TierOwner& owner, absl::Span<const TierKey>, const std::atomic<bool>* stop) {
  MutexLock one(&erase_mu_);
  RefuseWaiting(owner);
  Erasure erasure;
  std::vector<TierKey> keys;
  uint64_t nobodys = 0;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, value] : found_) {
      if (key.owner == owner) keys.push_back(key);
      nobodys += key.owner == TierOwner{};
    }
  }
  for (size_t next = 0; next < keys.size();) {
    MutexLock lock(&mu_);
    uint64_t bytes = 0;
    for (size_t some = 0; some < kErasedTogether && bytes < kErasedBytesTogether && next < keys.size();
         ++some) {
      const auto found = found_.find(keys[next++]);
      // What is being written was given to Store since.
      if (found == found_.end() || !found->second->written) continue;
      bytes += found->second->record.bytes;
      found->second->erasure = &erasure;
      ++erasure.left;
      Drop(found->second);
    }
  }
  {
    MutexLock lock(&mu_);
    while (erasure.left > 0) erased_.Wait(&mu_);
  }
  const absl::Status wiped = WipeAll(stop);
  TierErased answer = erasure.answer;
  std::vector<std::string> remains;
  answer.wiped = wiped.ok();
  if (!wiped.ok()) {
    answer.failed += std::exchange(answer.values, 0);
    answer.bytes = 0;
    remains.push_back(absl::StrCat("free slots that could not be wiped: ", std::string(wiped.message())));
  }
  if (std::string left_alone = LeftAlone(); !left_alone.empty()) remains.push_back(std::move(left_alone));
  answer.complete = remains.empty() && answer.failed == 0;
  if (nobodys > 0) {
    remains.push_back(
        absl::StrCat(nobodys, " values of an earlier version, which did not say whose they are"));
  }
  answer.remains = absl::StrJoin(remains, "; ");
  return answer;
}

absl::Status FileTier::WipeAll(const std::atomic<bool>* stop) {
  const auto late_slots = [this] {
    MutexLock lock(&mu_);
    return late_slots_;
  };
  // All of them, whether anything was found or not: an erasure that was not ended may have left bytes without a record.
  for (int round = 0; round < kMostWipes; ++round) {
    const uint64_t late_before = late_slots();
    for (const uint64_t number : FileNumbers()) {
      File* const file = Hold(number);
      if (file == nullptr) continue;
      const absl::Status wiped = WipeFree(file, stop);
      Release(file);
      RETURN_IF_ERROR(wiped);
    }
    // A slot that was taken before it was wiped is written over; where that failed, it is free again as it was.
    AwaitBegun();
    if (late_slots() == late_before) return absl::OkStatus();
  }
  return absl::UnavailableError(
      "values can't be written, one after the other, so that slots become free unwritten");
}

std::vector<uint64_t> FileTier::FileNumbers() {
  MutexLock lock(&mu_);
  std::vector<uint64_t> numbers;
  for (const auto& [number, file] : files_) numbers.push_back(number);
  return numbers;
}

FileTier::File* FileTier::Hold(uint64_t number) {
  MutexLock lock(&mu_);
  const auto found = files_.find(number);
  if (found == files_.end()) return nullptr;
  ++found->second->busy;
  return found->second.get();
}

void FileTier::Release(File* file) {
  MutexLock lock(&mu_);
  --file->busy;
}

absl::Status FileTier::WipeFree(File* file, const std::atomic<bool>* stop) {
  Segment& segment = *file->segment;
  std::vector<uint32_t> slots;
  {
    MutexLock lock(&mu_);
    slots = file->free;
    slots.insert(slots.end(), file->failed.begin(), file->failed.end());
    file->wiping = true;
  }
  std::sort(slots.begin(), slots.end());
  absl::StatusOr<std::vector<Segment::Filled>> filled = segment.ReadRecords();
  absl::Status wiped = filled.status();
  absl::flat_hash_set<uint32_t>
      named;  // Slots with a record, which could not be emptied when their value went.
  if (filled.ok()) {
    for (const Segment::Filled& value : *filled) named.insert(value.slot);
  }
  const size_t together = std::clamp<size_t>(kErasedBytesTogether / segment.slot_bytes(), 1, kErasedTogether);
  for (size_t begin = 0; begin < slots.size() && wiped.ok(); begin += together) {
    if (stop != nullptr && *stop) {
      wiped = absl::CancelledError("the daemon ends");
      break;
    }
    // Nobody fills these meanwhile. Those that are not free any more are being written over.
    const size_t end = std::min(slots.size(), begin + together);
    std::vector<uint32_t> free, failed;
    const auto take = [&](std::vector<uint32_t>* from, std::vector<uint32_t>* to) {
      std::erase_if(*from, [&](uint32_t slot) {
        if (slot < slots[begin] || slot > slots[end - 1]) return false;
        to->push_back(slot);
        return true;
      });
    };
    {
      MutexLock lock(&mu_);
      take(&file->free, &free);
      take(&file->failed, &failed);
    }
    for (std::vector<uint32_t>* const taken : {&free, &failed}) {
      std::sort(taken->begin(), taken->end());
      for (size_t first = 0, next = 0; first < taken->size(); first = next) {
        for (next = first; next < taken->size() && (*taken)[next] == (*taken)[first] + (next - first);
             ++next) {
          if (named.contains((*taken)[next])) wiped.Update(segment.Empty((*taken)[next]));
        }
        wiped.Update(segment.Wipe((*taken)[first], static_cast<uint32_t>(next - first)));
      }
    }
    MutexLock lock(&mu_);
    file->free.insert(file->free.end(), free.rbegin(), free.rend());
    file->failed.insert(file->failed.end(), failed.begin(), failed.end());
  }
  wiped.Update(segment.Sync());
  MutexLock lock(&mu_);
  file->wiping = false;
  return wiped;
}

std::string FileTier::LeftAlone() {
  std::vector<std::string> paths, there;
  {
    MutexLock lock(&mu_);
    paths = left_alone_;
  }
  // Whoever looked at one may have removed it.
  struct stat facts {};
  for (const std::string& path : paths) {
    if (lstat(path.c_str(), &facts) == 0 || errno != ENOENT) there.push_back(path);
  }
  if (there.empty()) return "";
  const size_t named = std::min(there.size(), kMostFilesNamed);
  return absl::StrCat(there.size(), " files that could not be read, with anybody's values: ",
                      absl::StrJoin(there.begin(), there.begin() + static_cast<ptrdiff_t>(named), ", "),
                      named < there.size() ? ", ..." : "",
                      "; remove them, or start the daemon again when the disk answers");
}

absl::StatusOr<uint64_t> FileTier::CountOf(const TierOwner& owner) {
  uint64_t count = 0;
  for (const uint64_t number : FileNumbers()) {
    File* const file = Hold(number);
    if (file == nullptr) continue;
    const absl::StatusOr<std::vector<Segment::Filled>> filled = file->segment->ReadRecords();
    Release(file);
    RETURN_IF_ERROR(filled.status());
    count += std::count_if(filled->begin(), filled->end(),
                           [&](const Segment::Filled& value) { return value.record.key.owner == owner; });
  }
  return count;
}

// -------------------------------------------------------------------------------------------------- the slots

void FileTier::Use(Place value) {
  Values& values = sizes_[value->file->segment->slot_bytes()].values;
  values.splice(values.end(), values, value);
  value->used = value->file->used = ++clock_;
}

void FileTier::Know(const TierKey& key) {
  MutexLock lock(&known_mu_);
  known_.insert(key);
}

void FileTier::Forget(const TierKey& key) {
  found_.erase(key);
  MutexLock lock(&known_mu_);
  known_.erase(key);
}

void FileTier::Drop(Place value) {
  if (!value->dropped) {
    value->dropped = true;
    Forget(value->record.key);
    value_bytes_ -= value->record.bytes;
  } else {
    ++late_slots_;
  }
  if (value->readers > 0) return;
  // The next daemon must not find it either; if that can't be written, its checksum tells.
  const absl::Status emptied = value->file->segment->Empty(value->slot);
  if (Erasure* const erasure = value->erasure; erasure != nullptr) {
    ++(emptied.ok() ? erasure->answer.values : erasure->answer.failed);
    erasure->answer.bytes += emptied.ok() ? value->record.bytes : 0;
    if (--erasure->left == 0) erased_.SignalAll();
  }
  value->file->free.push_back(value->slot);
  sizes_[value->file->segment->slot_bytes()].values.erase(value);
}

FileTier::File* FileTier::TakeSlot(uint64_t slot_bytes, uint32_t* slot, absl::Status* error) {
  // Nobody's file gives way to what can't be had with all of them gone.
  if (Segment::FileBytes(slot_bytes, Segment::SlotsIn(segment_bytes_, slot_bytes)) > capacity_bytes_) {
    return nullptr;
  }
  Size& size = sizes_[slot_bytes];
  if (std::chrono::steady_clock::now() >= failed_again_) {
    for (File* const file : size.files) {
      file->free.insert(file->free.end(), file->failed.begin(), file->failed.end());
      file->failed.clear();
    }
  }
  const auto take = [&](File* file) {
    *slot = file->free.back();
    file->free.pop_back();
    return file;
  };
  for (File* const file : size.files) {
    if (!file->free.empty()) return take(file);
  }
  if (File* const made = MakeFile(slot_bytes, error)) return take(made);
  const auto oldest = std::find_if(size.values.begin(), size.values.end(), [](const Value& value) {
    return value.written && value.readers == 0 && !value.dropped;
  });
  // Nothing of this size is there, or all of it was used since a file of another size was.
  const uint64_t before = oldest == size.values.end() ? UINT64_MAX : oldest->used;
  // They come back in a moment, and nobody's file is worth that.
  for (File* const file : size.files) {
    if (file->wiping && oldest == size.values.end()) return nullptr;
  }
  // A disk that fails gets no file of this size, whatever is given up for it; one that is full has room for as much.
  for (bool again = error->ok() || absl::IsResourceExhausted(*error);
       again && TakeColdFile(slot_bytes, before); again = error->ok()) {
    *error = absl::OkStatus();
    if (File* const made = MakeFile(slot_bytes, error)) return take(made);
  }
  if (oldest == size.values.end()) return nullptr;
  File* const file = oldest->file;
  Drop(oldest);
  ++evicted_;
  return take(file);
}

FileTier::File* FileTier::MakeFile(uint64_t slot_bytes, absl::Status* error) {
  const uint32_t slots = Segment::SlotsIn(segment_bytes_, slot_bytes);
  const auto now = std::chrono::steady_clock::now();
  const bool paused = now < make_again_;
  if (paused && room_bytes_ == 0) {
    *error = absl::UnavailableError("the disk failed a moment ago");
    return nullptr;
  }
  const uint64_t room = paused ? room_bytes_ : capacity_bytes_;
  if (Segment::FileBytes(slot_bytes, slots) > room - std::min(file_bytes_, room)) return nullptr;
  const uint64_t number = next_file_;
  absl::StatusOr<std::unique_ptr<Segment>> segment =
      Segment::Make(io_, PathOf(path_, number), slot_bytes, slots);
  if (!segment.ok()) {
    *error = segment.status();
    // A disk that is full is not asked for more with each value; in place of a file that goes it takes another.
    make_again_ = now + pause_after_error_;
    room_bytes_ = absl::IsResourceExhausted(*error) ? file_bytes_ : 0;
    if (!std::exchange(said_error_, true))
      LogWarning("tier can't grow", {{"tier", name()}, {"error", *error}});
    return nullptr;
  }
  Adopt(*std::move(segment), number, {});
  return files_[number].get();
}

bool FileTier::TakeColdFile(uint64_t slot_bytes, uint64_t before) {
  File* coldest = nullptr;
  for (const auto& [number, file] : files_) {
    if (file->busy > 0 || file->stays || file->segment->slot_bytes() == slot_bytes || file->used >= before)
      continue;
    if (coldest == nullptr || file->used < coldest->used) coldest = file.get();
  }
  return coldest != nullptr && RemoveFile(coldest);
}

bool FileTier::RemoveFile(File* file) {
  if (const absl::Status removed = Segment::Remove(io_, file->segment->path()); !removed.ok()) {
    file->stays = true;
    LogWarning("tier's file not removed", {{"path", file->segment->path()}, {"error", removed}});
    return false;
  }
  Size& size = sizes_[file->segment->slot_bytes()];
  for (auto value = size.values.begin(); value != size.values.end();) {
    if (value->file != file) {
      ++value;
      continue;
    }
    Forget(value->record.key);
    value_bytes_ -= value->record.bytes;
    ++evicted_;
    value = size.values.erase(value);
  }
  std::erase(size.files, file);
  file_bytes_ -= file->segment->file_bytes();
  files_.erase(file->number);
  return true;
}

}  // namespace kvpool
