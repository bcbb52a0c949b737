#include "server/tiers/s3_tier.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/tiers/s3_download.h"
#include "server/tiers/s3_listing.h"
#include "server/tiers/s3_value.h"

namespace kvpool {
namespace {

using Clock = std::chrono::steady_clock;

// A refusal is told of no more often than this.
constexpr auto kRefusalPause = std::chrono::seconds(10);
// Keys that are looked at, or forgotten, under one hold of known_mu_: some 0.2 ms. Whoever wants it then is let in: he may have a
// space's mutex.
constexpr size_t kKeysTogether = 256;
constexpr auto kKeysPause = std::chrono::microseconds(50);
// Loads wait no longer than this, and a slice, for a value that is summed.
constexpr auto kSumFor = std::chrono::milliseconds(1);
// A store that lists more pages of one owner than this lists nonsense.
constexpr uint64_t kMostPages = 100000;
constexpr auto kEraseLook = std::chrono::milliseconds(100);

// Codes of stores that have no room: of AWS's own, MinIO, Ceph and SeaweedFS.
bool SaysFull(const S3Response& response) {
  return response.status == 507 || absl::StrContains(response.code, "QuotaExceeded") ||
         absl::StrContains(response.code, "StorageFull");
}

}  // namespace

absl::StatusOr<std::unique_ptr<S3Tier>> S3Tier::Open(const Options& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<AwsCredentialSource> credentials,
                   AwsCredentialSource::Open(options.credentials));
  ASSIGN_OR_RETURN(std::unique_ptr<S3Client> client, S3Client::Open(options.client, std::move(credentials)));
  const absl::Status probe = client->Probe(options.prefix + "/", options.probe);
  const std::string place = TextOf(options.client.endpoint);
  if (absl::IsFailedPrecondition(probe)) {
    return absl::InvalidArgumentError(absl::StrCat("--tier: s3:", place, ": ", probe.message()));
  }
  if (!probe.ok()) LogWarning("tier's store does not answer yet", {{"node", place}, {"why", probe}});
  std::unique_ptr<S3Tier> tier(new S3Tier(options, std::move(client)));
  tier->thread_ = NamedThread("s3-tier", [t = tier.get()] { t->Run(); });
  return tier;
}

S3Tier::S3Tier(const Options& options, std::unique_ptr<S3Client> client)
    : options_(options), known_(options.known), client_(std::move(client)) {}

S3Tier::~S3Tier() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  client_->Wake();
  thread_.join();
}

std::string S3Tier::describe() const {
  const S3Client::Options& client = options_.client;
  return absl::StrCat(
      path(), ", region ", client.region, ", ",
      client.endpoint.virtual_host ? "the bucket in the host's name" : "the bucket in the path", ", ",
      client_->describe(), ", prefix ", options_.prefix, ", ", client.connections, " connections");
}

// ------------------------------------------------------------------------------------------------- who asks

void S3Tier::Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) {
  if (down_) return std::fill(found.begin(), found.end(), TierPresence::kNo);
  const auto now = Clock::now();
  bool asks = false;
  {
    MutexLock lock(&known_mu_);
    for (size_t i = 0; i < keys.size(); ++i) {
      found[i] = known_.Find(keys[i], now);
      if (found[i] != TierPresence::kUnknown || asked_ == kMostAsked || !known_.Ask(keys[i], now)) continue;
      ++asked_;
      asks_.push_back(keys[i]);
      asks = true;
    }
  }
  if (asks) client_->Wake();
}

void S3Tier::Load(std::vector<TierLoad> loads, Deadline deadline, Done done) {
  const auto shared = std::make_shared<const Done>(std::move(done));
  std::vector<TaskRef> tasks;
  for (size_t i = 0; i < loads.size(); ++i) {
    tasks.push_back(std::make_shared<Task>(Task{.key = loads[i].key,
                                                .into = std::move(loads[i].into),
                                                .deadline = deadline,
                                                .index = i,
                                                .done = shared}));
  }
  Enqueue(std::move(tasks));
}

void S3Tier::Store(std::vector<TierStore> stores, Done done) {
  const auto shared = std::make_shared<const Done>(std::move(done));
  std::vector<TaskRef> tasks;
  for (size_t i = 0; i < stores.size(); ++i) {
    tasks.push_back(std::make_shared<Task>(Task{.key = stores[i].key,
                                                .value = std::move(stores[i].value),
                                                .replaces = stores[i].replaces,
                                                .index = i,
                                                .done = shared}));
  }
  Enqueue(std::move(tasks));
}

void S3Tier::Enqueue(std::vector<TaskRef> tasks) {
  const auto now = Clock::now();
  std::vector<TaskRef> refused;
  {
    MutexLock lock(&mu_);
    for (TaskRef& task : tasks) {
      task->since = now;
      const uint64_t bytes = task->into != nullptr ? task->into->bytes() : task->value->bytes();
      if (waiting_ < kMostWaiting && bytes <= kMostValueBytes) {
        ++waiting_;
        inbox_.push_back(std::move(task));
      } else {
        ++counters_.full;
        refused.push_back(std::move(task));
      }
    }
  }
  client_->Wake();
  for (const TaskRef& task : refused) (*task->done)(task->index, TierResult::kFull);
}

void S3Tier::Drain() {
  MutexLock lock(&mu_);
  while (waiting_ > 0) idle_.Wait(&mu_);
}

TierUsage S3Tier::usage() {
  TierUsage usage{.nodes = 1, .nodes_down = down_ ? 1u : 0u};
  {
    MutexLock lock(&known_mu_);
    usage.values = known_.there();
  }
  MutexLock lock(&mu_);
  usage.waiting = waiting_;
  usage.counters = counters_;
  usage.load = load_seconds_.Snapshot();
  usage.store = store_seconds_.Snapshot();
  return usage;
}

TierErased S3Tier::Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                         const std::atomic<bool>* stop) {
  const auto erasing = std::make_shared<Erasing>();
  erasing->owner = owner;
  erasing->keys.assign(keys.begin(), keys.end());
  {
    MutexLock lock(&mu_);
    erasings_.push_back(erasing);
  }
  client_->Wake();
  MutexLock lock(&mu_);
  while (!erasing->over) {
    ended_.WaitUntil(&mu_, Clock::now() + kEraseLook);
    if (stop == nullptr || !*stop || erasing->gave_up) continue;
    erasing->gave_up = true;
    client_->Wake();
  }
  return erasing->answer;
}

absl::StatusOr<uint64_t> S3Tier::CountOf(const TierOwner& owner) {
  const auto counting = std::make_shared<Counting>(Counting{.owner = owner});
  {
    MutexLock lock(&mu_);
    countings_.push_back(counting);
  }
  client_->Wake();
  MutexLock lock(&mu_);
  // Each request has an end, whatever the store does.
  while (!counting->over) ended_.Wait(&mu_);
  if (!counting->status.ok()) return counting->status;
  return counting->count;
}

// ----------------------------------------------------------------------------------------------- the thread

void S3Tier::Run() {
  // OpenSSL writes to sockets that may be closed: the signal of that would end the process.
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  while (true) {
    std::vector<TaskRef> came;
    std::vector<ErasingRef> erasings;
    std::vector<CountingRef> countings;
    bool stopping = false;
    {
      MutexLock lock(&mu_);
      came.swap(inbox_);
      erasings = erasings_;
      countings = countings_;
      stopping = stopping_;
    }
    if (stopping) return AnswerAll(came);
    for (const TaskRef& task : came) Begin(task);
    for (const ErasingRef& erasing : erasings) Advance(erasing);
    for (const CountingRef& counting : countings) {
      if (!std::exchange(counting->begun, true)) Count(counting, "");
    }
    std::vector<TierKey> asks;
    {
      MutexLock lock(&known_mu_);
      asks.swap(asks_);
    }
    for (const TierKey& key : asks) AskAbout(key);
    SumSome();
    const auto now = Clock::now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      Answer(TaskRef(deadlines_.begin()->second), TierResult::kLate);
    }
    auto due = sums_.empty() ? Clock::time_point::max() : now;
    if (!deadlines_.empty()) due = std::min(due, deadlines_.begin()->first);
    client_->Turn(due);
    down_ = client_->down();
  }
}

void S3Tier::SumSome() {
  const auto end = Clock::now() + kSumFor;
  while (!sums_.empty() && Clock::now() < end) {
    const std::shared_ptr<S3Upload>& first = sums_.front();
    const bool over = *first->over();
    if (!over && !first->Sum()) continue;
    if (!over) first->Begin();
    sums_.pop_front();
  }
}

void S3Tier::AnswerAll(const std::vector<TaskRef>& came) {
  for (const TaskRef& task : came) Answer(task, TierResult::kFailed);
  while (!under_way_.empty()) Answer(TaskRef(*under_way_.begin()), TierResult::kFailed);
  std::vector<ErasingRef> erasings;
  std::vector<CountingRef> countings;
  {
    MutexLock lock(&mu_);
    erasings = erasings_;
    countings = countings_;
  }
  for (const ErasingRef& erasing : erasings) {
    if (erasing->work != nullptr) erasing->work->GiveUp();
    End(erasing);
  }
  for (const CountingRef& counting : countings) End(counting, absl::UnavailableError("the tier is ending"));
}

void S3Tier::Begin(const TaskRef& task) {
  under_way_.insert(task);
  task->name = S3ObjectName(options_.prefix, task->key);
  {
    MutexLock lock(&known_mu_);
    task->asked = known_.erased();
  }
  task->into != nullptr ? BeginLoad(task) : BeginStore(task);
}

void S3Tier::Answer(const TaskRef& task, TierResult result) {
  if (task->over) return;
  task->over = true;
  const bool load = task->into != nullptr;
  const uint64_t bytes = load ? task->into->bytes() : task->value->bytes();
  // What is still on a connection keeps the bytes that it moves.
  task->into.reset();
  task->value.reset();
  under_way_.erase(task);
  if (task->timed) deadlines_.erase(task->timer);
  const auto now = Clock::now();
  // What was only believed is not news. Of a value that was not stored, nobody knows whether the store has it.
  {
    MutexLock lock(&known_mu_);
    if (result == TierResult::kDone || result == TierResult::kMiss || result == TierResult::kCorrupt) {
      if (!task->believed) known_.Learn(task->key, result == TierResult::kDone, now, task->asked);
    } else if (!load) {
      known_.Forget(task->key);
    }
  }
  {
    MutexLock lock(&mu_);
    counters_.Count(load, bytes, result);
    (load ? load_seconds_ : store_seconds_).Observe(std::chrono::duration<double>(now - task->since).count());
  }
  (*task->done)(task->index, result);
  task->done.reset();
  MutexLock lock(&mu_);
  if (--waiting_ == 0) idle_.SignalAll();
}

TierResult S3Tier::ResultOf(const S3Response* response) {
  if (response == nullptr) return TierResult::kFailed;
  if (SaysFull(*response)) return TierResult::kFull;
  if (const auto now = Clock::now(); now >= warn_again_) {
    warn_again_ = now + kRefusalPause;
    LogWarning("tier refuses", {{"tier", name()}, {"error", client_->Explain(*response)}});
  }
  return TierResult::kFailed;
}

// ----------------------------------------------------------------------------------------- loads and stores

void S3Tier::BeginLoad(const TaskRef& task) {
  if (task->deadline <= Clock::now()) return Answer(task, TierResult::kLate);
  // What has no deadline is at the end, and never due.
  task->timer = deadlines_.emplace(task->deadline, task);
  task->timed = true;
  const auto download = std::make_shared<S3Download>(task->key, task->into);
  S3Request request{.rank = S3Request::Rank::kLoad,
                    .object = task->name,
                    .deadline = task->deadline,
                    .over = std::shared_ptr<const bool>(task, &task->over)};
  request.receive = [download](const S3Response& so_far, std::string_view bytes) {
    return download->Receive(so_far.content_length, bytes);
  };
  request.done = [this, task, download](const S3Response* response) {
    if (response != nullptr && response->status == 200) {
      const TierResult result = download->result();
      if (result == TierResult::kCorrupt) Delete(task);
      return Answer(task, result);
    }
    // A bucket that is gone, and a server that is none, say 404 as well.
    const bool miss = response != nullptr && response->status == 404 && response->code == "NoSuchKey";
    Answer(task, miss ? TierResult::kMiss : ResultOf(response));
  };
  client_->Send(std::move(request));
}

void S3Tier::BeginStore(const TaskRef& task) {
  if (task->replaces) return Upload(task);
  {
    MutexLock lock(&known_mu_);
    task->believed = known_.Find(task->key, Clock::now()) == TierPresence::kYes;
  }
  if (task->believed) return Answer(task, TierResult::kDone);
  // Another node may have written it: to ask costs less than to write. What has another length is written again.
  S3Request request{.rank = S3Request::Rank::kStore,
                    .method = "HEAD",
                    .object = task->name,
                    .over = std::shared_ptr<const bool>(task, &task->over)};
  request.done = [this, task](const S3Response* response) {
    if (response == nullptr || (response->status != 200 && response->status != 404))
      return Answer(task, ResultOf(response));
    const auto bytes = static_cast<int64_t>(kS3HeaderBytes + task->value->bytes());
    if (response->status == 200 && response->content_length == bytes) return Answer(task, TierResult::kDone);
    Upload(task);
  };
  client_->Send(std::move(request));
}

void S3Tier::Upload(const TaskRef& task) {
  sums_.push_back(
      std::make_shared<S3Upload>(client_.get(),
                                 S3Upload::Options{.name = task->name,
                                                   .part_bytes = options_.part_bytes,
                                                   .over = std::shared_ptr<const bool>(task, &task->over)},
                                 task->key, task->value, [this, task](const S3Response* response) {
                                   const bool there = response != nullptr && response->status == 200;
                                   Answer(task, there ? TierResult::kDone : ResultOf(response));
                                 }));
}

void S3Tier::Delete(const TaskRef& task) {
  if (deletions_ == kMostDeletions) return;
  ++deletions_;
  S3Request request{.rank = S3Request::Rank::kAsk, .method = "DELETE", .object = task->name};
  request.done = [this](const S3Response*) { --deletions_; };
  client_->Send(std::move(request));
}

void S3Tier::AskAbout(const TierKey& key) {
  uint64_t asked = 0;
  {
    MutexLock lock(&known_mu_);
    asked = known_.erased();
  }
  S3Request request{.method = "HEAD", .object = S3ObjectName(options_.prefix, key)};
  request.done = [this, key, asked](const S3Response* response) {
    MutexLock lock(&known_mu_);
    --asked_;
    if (response != nullptr && (response->status == 200 || response->status == 404)) {
      known_.Learn(key, response->status == 200, Clock::now(), asked);
    } else {
      known_.Forget(key);
    }
  };
  client_->Send(std::move(request));
}

// ------------------------------------------------------------------------------------ erasing and counting

void S3Tier::Advance(const ErasingRef& erasing) {
  if (!std::exchange(erasing->begun, true)) {
    for (const TaskRef& task : under_way_) {
      if (task->value != nullptr && task->key.owner == erasing->owner) erasing->before.push_back(task);
    }
  }
  std::erase_if(erasing->before, [](const TaskRef& task) { return task->over; });
  if (erasing->gave_up) {
    if (erasing->work != nullptr) erasing->work->GiveUp();
    return End(erasing);
  }
  if (!erasing->before.empty()) return;
  if (erasing->work == nullptr) {
    // Nobody stores one in the belief that it is there.
    ForgetAll(erasing->owner);
    std::vector<std::string> names;
    for (const TierKey& key : erasing->keys) names.push_back(S3ObjectName(options_.prefix, key));
    erasing->work = std::make_shared<S3Erasure>(
        client_.get(),
        S3Erasure::Options{.prefix = S3OwnerPrefix(options_.prefix, erasing->owner),
                           .names = std::move(names),
                           .gone = [this](absl::Span<const std::string> gone) { Erased(gone); }});
    erasing->work->Begin();
  }
  if (erasing->work->over()) End(erasing);
}

void S3Tier::End(const ErasingRef& erasing) {
  if (erasing->work == nullptr) {
    erasing->answer.complete = false;
    erasing->answer.remains = "values that were being written, and all that was there before";
  } else {
    erasing->answer = erasing->work->answer();
  }
  MutexLock lock(&mu_);
  std::erase(erasings_, erasing);
  erasing->over = true;
  ended_.SignalAll();
}

void S3Tier::Erased(absl::Span<const std::string> names) {
  while (!names.empty()) {
    const auto some = names.subspan(0, kKeysTogether);
    {
      MutexLock lock(&known_mu_);
      for (const std::string& name : some) {
        if (const auto key = S3KeyOf(options_.prefix, name)) known_.Erased(*key);
      }
    }
    names.remove_prefix(some.size());
    if (!names.empty()) std::this_thread::sleep_for(kKeysPause);
  }
}

void S3Tier::ForgetAll(const TierOwner& owner) {
  KnownKeys::Walk walk;
  for (bool more = true; more;) {
    std::vector<TierKey> keys;
    {
      MutexLock lock(&known_mu_);
      more = known_.Step(&walk, owner, kKeysTogether, &keys);
      for (const TierKey& key : keys) known_.Erased(key);
    }
    if (more) std::this_thread::sleep_for(kKeysPause);
  }
}

void S3Tier::Count(const CountingRef& counting, const std::string& token) {
  ListS3(client_.get(), S3OwnerPrefix(options_.prefix, counting->owner), token,
         [this, counting](std::optional<S3Page> page, const S3Response* response) {
           if (!page.has_value()) {
             return End(counting,
                        absl::UnavailableError(absl::StrCat(
                            path(), ": ",
                            response == nullptr ? "it does not answer" : client_->Explain(*response))));
           }
           counting->count += page->objects.size();
           if (++counting->pages == kMostPages)
             return End(counting, absl::UnavailableError(absl::StrCat(path(), ": its listing has no end")));
           page->next.empty() ? End(counting, absl::OkStatus()) : Count(counting, page->next);
         });
}

void S3Tier::End(const CountingRef& counting, absl::Status status) {
  MutexLock lock(&mu_);
  std::erase(countings_, counting);
  counting->status = std::move(status);
  counting->over = true;
  ended_.SignalAll();
}

}  // namespace kvpool
