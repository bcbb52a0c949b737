#include "server/tiers/resp_tier.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/named_thread.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"

namespace kvpool {
namespace {

using Clock = std::chrono::steady_clock;

// A refusal is told of no more often than this.
constexpr auto kWarnPause = std::chrono::seconds(10);
// Values that are unlinked at a time, and pieces of one that a request names.
constexpr size_t kValuesTogether = 64;
// Keys that are looked at, or forgotten, under one hold of known_mu_: some 0.2 ms. Whoever wants it then is let in: he may have a
// space's mutex.
constexpr size_t kKnownTogether = 256;
constexpr auto kWayPause = std::chrono::microseconds(50);
// A store that has not answered by then is said to have all that it was asked to unlink.
constexpr auto kEraseFor = std::chrono::seconds(30);
constexpr auto kStopLook = std::chrono::milliseconds(100);
constexpr uint32_t kPiecesTogether = 16;

RespRouter::Options RouterOptions(const RespTier::Options& options, std::shared_ptr<SSL_CTX> tls) {
  return {.seed = options.endpoint,
          .cluster = options.cluster,
          .settings = {.tls = std::move(tls),
                       .user = options.user,
                       .password = options.password,
                       .connect_timeout = options.connect_timeout,
                       .io_timeout = options.io_timeout},
          .node = {.connections = options.connections,
                   .first_pause = options.first_pause,
                   .longest_pause = options.longest_pause},
          .refresh_pause = options.refresh_pause};
}

// Nothing is believed to be there for longer than it may be.
KnownKeys::Options KnownOptions(const RespTier::Options& options) {
  KnownKeys::Options known = options.known;
  if (options.ttl.count() > 0) known.there = std::min(known.there, options.ttl);
  return known;
}

// Of the two, what a value ends with.
TierResult Worse(TierResult a, TierResult b) { return a == TierResult::kDone ? b : a; }

}  // namespace

absl::StatusOr<std::unique_ptr<RespTier>> RespTier::Open(const Options& options) {
  std::shared_ptr<SSL_CTX> tls;
  if (options.tls.on) {
    ASSIGN_OR_RETURN(tls, MakeRespTls(options.tls));
  }
  std::unique_ptr<RespTier> tier(new RespTier(options, std::move(tls)));
  tier->thread_ = NamedThread("resp-tier", [t = tier.get()] { t->Run(); });
  return tier;
}

RespTier::RespTier(const Options& options, std::shared_ptr<SSL_CTX> tls)
    : options_(options),
      known_(KnownOptions(options)),
      router_(&loop_, RouterOptions(options, std::move(tls))) {}

RespTier::~RespTier() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  loop_.Wake();
  thread_.join();
}

std::string RespTier::describe() const {
  static constexpr std::string_view kClusters[] = {"cluster or not", "cluster", "no cluster"};
  return absl::StrCat(
      path(), ", ", std::string(kClusters[static_cast<size_t>(options_.cluster)]), ", ",
      options_.tls.on ? "TLS" : "no TLS",
      options_.password.empty() ? ""
                                : absl::StrCat(", user ", options_.user.empty() ? "default" : options_.user),
      ", prefix ", options_.prefix, ", ",
      options_.ttl.count() == 0 ? "" : absl::StrCat("gone after ", options_.ttl.count(), " ms, "),
      options_.connections, " connections to a node");
}

// ------------------------------------------------------------------------------------------------- who asks

void RespTier::Exists(absl::Span<const TierKey> keys, absl::Span<TierPresence> found) {
  const size_t down = nodes_down_;
  if (down > 0 && down == nodes_) return std::fill(found.begin(), found.end(), TierPresence::kNo);
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
  if (asks) loop_.Wake();
}

void RespTier::Load(std::vector<TierLoad> loads, Deadline deadline, Done done) {
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

void RespTier::Store(std::vector<TierStore> stores, Done done) {
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

void RespTier::Enqueue(std::vector<TaskRef> tasks) {
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
  loop_.Wake();
  for (const TaskRef& task : refused) (*task->done)(task->index, TierResult::kFull);
}

void RespTier::Drain() {
  MutexLock lock(&mu_);
  while (waiting_ > 0) idle_.Wait(&mu_);
}

TierUsage RespTier::usage() {
  TierUsage usage{.nodes = nodes_, .nodes_down = nodes_down_};
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

TierErased RespTier::Erase(const TierOwner& owner, absl::Span<const TierKey> keys,
                           const std::atomic<bool>* stop) {
  const auto erasure = std::make_shared<Erasure>();
  erasure->owner = owner;
  erasure->keys.assign(keys.begin(), keys.end());
  {
    MutexLock lock(&mu_);
    erasures_.push_back(erasure);
  }
  loop_.Wake();
  MutexLock lock(&mu_);
  const auto deadline = Clock::now() + kEraseFor;
  const auto go_on = [&] { return Clock::now() < deadline && (stop == nullptr || !*stop); };
  while (!erasure->over && go_on()) erased_.WaitUntil(&mu_, std::min(deadline, Clock::now() + kStopLook));
  // The store does not answer.
  erasure->gave_up = true;
  loop_.Wake();
  while (!erasure->over) erased_.Wait(&mu_);
  erasure->answer.remains =
      "a store that nodes share: values that other nodes wrote, or that this daemon no longer knows of, stay "
      "until the store evicts them or their time is over";
  return erasure->answer;
}

absl::StatusOr<uint64_t> RespTier::CountOf(const TierOwner& owner) { return KnownOf(owner).size(); }

// ----------------------------------------------------------------------------------------------- the thread

void RespTier::Run() {
  // OpenSSL writes to sockets that may be closed: the signal of that would end the process.
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  while (true) {
    std::vector<TaskRef> came;
    std::vector<ErasureRef> erasures;
    bool stopping = false;
    {
      MutexLock lock(&mu_);
      came.swap(inbox_);
      erasures = erasures_;
      stopping = stopping_;
    }
    if (stopping) return AnswerAll(came);
    for (const TaskRef& task : came) Begin(task);
    for (const ErasureRef& erasure : erasures) Advance(erasure);
    std::vector<TierKey> asks;
    {
      MutexLock lock(&known_mu_);
      asks.swap(asks_);
    }
    for (const TierKey& key : asks) AskAbout(key);
    const auto now = Clock::now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      Answer(TaskRef(deadlines_.begin()->second), TierResult::kLate);
    }
    auto due = router_.Pump(now);
    nodes_ = router_.nodes();
    nodes_down_ = router_.nodes_down();
    if (!deadlines_.empty()) due = std::min(due, deadlines_.begin()->first);
    loop_.Wait(due);
  }
}

void RespTier::AnswerAll(const std::vector<TaskRef>& came) {
  for (const TaskRef& task : came) Answer(task, TierResult::kFailed);
  while (!under_way_.empty()) Answer(TaskRef(*under_way_.begin()), TierResult::kFailed);
  std::vector<ErasureRef> erasures;
  {
    MutexLock lock(&mu_);
    erasures = erasures_;
  }
  for (const ErasureRef& erasure : erasures) End(erasure);
}

void RespTier::Begin(const TaskRef& task) {
  under_way_.insert(task);
  const bool load = task->into != nullptr;
  if (load && task->deadline <= Clock::now()) return Answer(task, TierResult::kLate);
  // What has no deadline is at the end, and never due.
  if (load) task->timer = deadlines_.emplace(task->deadline, task);
  task->timed = load;
  task->stem = PieceKeyStem(options_.prefix, task->key);
  task->slot = RespSlotOf(task->stem);
  task->pieces = PiecesOf(load ? task->into->bytes() : task->value->bytes());
  most_pieces_ = std::max(most_pieces_, task->pieces);
  TierPresence there;
  {
    MutexLock lock(&known_mu_);
    task->asked = known_.erased();
    there = load ? TierPresence::kUnknown : known_.Find(task->key, Clock::now());
  }
  if (load) {
    task->headers.resize(task->pieces);
    task->came.resize(task->pieces);
    task->unanswered = task->pieces;
    for (uint32_t piece = 0; piece < task->pieces; ++piece) LoadPiece(task, piece);
    return;
  }
  if (there == TierPresence::kYes && !task->replaces) {
    task->believed = true;
    return Answer(task, TierResult::kDone);
  }
  // The store said so a moment ago.
  if (there == TierPresence::kNo && !task->replaces) return Write(task);
  // Another node may have written it: to ask costs less than to write. One without its piece 0 is none.
  RespRequest request = Request(task, RespRequest::Rank::kStore, 0, &RespTier::OnAsked);
  AppendRespCommand({task->replaces ? "UNLINK" : "EXISTS", absl::StrCat(task->stem, 0)}, &request.head);
  router_.Send(std::move(request));
}

void RespTier::Answer(const TaskRef& task, TierResult result) {
  if (task->over) return;
  task->over = true;
  const bool load = task->into != nullptr;
  const uint64_t bytes = load ? task->into->bytes() : task->value->bytes();
  // What is still on a connection keeps the bytes that it sends.
  task->into.reset();
  task->value.reset();
  under_way_.erase(task);
  if (task->timed) deadlines_.erase(task->timer);
  const auto now = Clock::now();
  // What was only believed is not news.
  if (!task->believed &&
      (result == TierResult::kDone || result == TierResult::kMiss || result == TierResult::kCorrupt)) {
    MutexLock lock(&known_mu_);
    known_.Learn(task->key, result == TierResult::kDone, now, task->asked);
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

TierResult RespTier::ResultOf(const RespReply& error) {
  if (error.code() == "OOM") return TierResult::kFull;
  if (const auto now = Clock::now(); now >= warn_again_) {
    warn_again_ = now + kWarnPause;
    const std::string_view code = error.code();
    LogWarning("tier refuses", {{"tier", name()}, {"error", code.empty() ? "of no known kind" : code}});
  }
  return TierResult::kFailed;
}

RespRequest RespTier::Request(const TaskRef& task, RespRequest::Rank rank, uint32_t piece, OnPiece on_piece) {
  RespRequest request{.rank = rank, .slot = task->slot};
  request.over = std::shared_ptr<const bool>(task, &task->over);
  request.done = [this, task, piece, on_piece](const RespReply* reply) {
    if (!task->over) (this->*on_piece)(task, piece, reply);
  };
  return request;
}

// ---------------------------------------------------------------------------------------------------- loads

void RespTier::LoadPiece(const TaskRef& task, uint32_t piece) {
  RespRequest request = Request(task, RespRequest::Rank::kLoad, piece, &RespTier::OnLoaded);
  AppendRespCommand({"GET", absl::StrCat(task->stem, piece)}, &request.head);
  request.limits.bytes = kMostPieceBytes + kPieceHeaderBytes;
  request.into = task->into->data() + piece * kMostPieceBytes;
  request.into_bytes = PieceBytes(task->into->bytes(), piece);
  request.kept = kPieceHeaderBytes;
  request.reply_bytes = request.kept + request.into_bytes;
  router_.Send(std::move(request));
}

void RespTier::OnLoaded(const TaskRef& task, uint32_t piece, const RespReply* reply) {
  if (reply == nullptr) {
    task->worst = Worse(task->worst, TierResult::kFailed);
  } else if (reply->kind == RespReply::Kind::kError) {
    task->worst = Worse(task->worst, ResultOf(*reply));
  } else if (reply->kind == RespReply::Kind::kBytes) {
    task->came[piece] = true;
    // A long one is in its place, and summed.
    const bool placed = reply->rest_bytes > 0;
    const auto header = placed ? CheckPiece(task->key, piece, reply->text, reply->rest_bytes, reply->rest_crc)
                               : CheckPiece(task->key, piece, reply->text);
    // A header of no pieces is that of a damaged one.
    task->headers[piece] = header.value_or(PieceHeader{});
    if (!placed && header.has_value() && header->value_bytes == task->into->bytes()) {
      const std::string_view bytes = reply->text.substr(kPieceHeaderBytes);
      std::memcpy(task->into->data() + piece * kMostPieceBytes, bytes.data(), bytes.size());
    }
  } else if (reply->kind != RespReply::Kind::kNil) {
    task->worst = Worse(task->worst, TierResult::kFailed);
  }
  if (--task->unanswered > 0) return;
  const TierResult result = Loaded(*task);
  const PieceHeader& first = task->headers[0];
  // While piece 0 is missing, somebody may be writing the others. A value of another size is whole.
  const bool broken = result == TierResult::kCorrupt || (result == TierResult::kMiss && first.pieces > 0 &&
                                                         first.value_bytes == task->into->bytes());
  if (broken) Unlink(task, 0);
  Answer(task, result);
}

TierResult RespTier::Loaded(const Task& task) const {
  if (task.worst != TierResult::kDone) return task.worst;
  if (!task.came[0]) return TierResult::kMiss;
  const PieceHeader& first = task.headers[0];
  if (first.pieces == 0) return TierResult::kCorrupt;
  if (first.value_bytes != task.into->bytes()) return TierResult::kMiss;
  TierResult result = TierResult::kDone;
  for (uint32_t piece = 1; piece < task.pieces; ++piece) {
    if (!task.came[piece]) {
      result = Worse(result, TierResult::kMiss);
    } else if (task.headers[piece].pieces == 0) {
      result = TierResult::kCorrupt;
    } else if (task.headers[piece].write_id != first.write_id ||
               task.headers[piece].value_bytes != first.value_bytes) {
      result = Worse(result, TierResult::kMiss);
    }
  }
  return result;
}

void RespTier::Unlink(const TaskRef& task, uint32_t first) {
  for (uint32_t piece = first; piece < task->pieces; ++piece) {
    RespRequest request{.rank = RespRequest::Rank::kAsk, .slot = task->slot};
    request.done = [this, key = task->key](const RespReply* reply) {
      if (reply == nullptr || reply->kind != RespReply::Kind::kInteger) Doubt(key);
    };
    AppendRespCommand({"UNLINK", absl::StrCat(task->stem, piece)}, &request.head);
    router_.Send(std::move(request));
  }
}

// --------------------------------------------------------------------------------------------------- stores

void RespTier::OnAsked(const TaskRef& task, uint32_t, const RespReply* reply) {
  if (reply == nullptr) return Answer(task, TierResult::kFailed);
  if (reply->kind == RespReply::Kind::kError) return Answer(task, ResultOf(*reply));
  if (reply->kind != RespReply::Kind::kInteger) return Answer(task, TierResult::kFailed);
  if (reply->number > 0 && !task->replaces) return Answer(task, TierResult::kDone);
  Write(task);
}

void RespTier::Write(const TaskRef& task) {
  task->written = MakePieceHeaders(task->key, *task->value);
  if (task->pieces == 1) return StorePiece(task, 0);
  task->unanswered = task->pieces - 1;
  for (uint32_t piece = 1; piece < task->pieces; ++piece) StorePiece(task, piece);
}

void RespTier::StorePiece(const TaskRef& task, uint32_t piece) {
  RespRequest request = Request(task, RespRequest::Rank::kStore, piece, &RespTier::OnStored);
  const std::string key = absl::StrCat(task->stem, piece);
  const std::array<char, kPieceHeaderBytes>& header = task->written[piece];
  request.value = task->value;
  request.begin = piece * kMostPieceBytes;
  request.bytes = PieceBytes(task->value->bytes(), piece);
  request.sent = std::shared_ptr<bool>(task, &task->set);
  const bool ends = options_.ttl.count() > 0;
  request.head = absl::StrCat("*", ends ? 5 : 3, "\r\n$3\r\nSET\r\n$", key.size(), "\r\n", key, "\r\n$",
                              header.size() + request.bytes, "\r\n");
  request.head.append(header.data(), header.size());
  request.tail = "\r\n";
  if (ends) {
    const std::string ms = absl::StrCat(options_.ttl.count());
    absl::StrAppend(&request.tail, "$2\r\nPX\r\n$", ms.size(), "\r\n", ms, "\r\n");
  }
  router_.Send(std::move(request));
}

void RespTier::OnStored(const TaskRef& task, uint32_t piece, const RespReply* reply) {
  if (reply == nullptr) {
    // The store may have done it, and its word be lost.
    if (task->set) Doubt(task->key);
    task->worst = Worse(task->worst, TierResult::kFailed);
  } else if (reply->kind == RespReply::Kind::kError) {
    task->worst = Worse(task->worst, ResultOf(*reply));
  } else if (!reply->Is("OK")) {
    task->worst = Worse(task->worst, TierResult::kFailed);
  }
  if (piece > 0 && --task->unanswered > 0) return;
  if (piece > 0 && task->worst == TierResult::kDone) return StorePiece(task, 0);
  // Nobody would find the others.
  if (task->worst != TierResult::kDone && task->pieces > 1 && task->set) Unlink(task, 1);
  Answer(task, task->worst);
}

// ----------------------------------------------------------------------------------------------------- asks

void RespTier::AskAbout(const TierKey& key) {
  const std::string stem = PieceKeyStem(options_.prefix, key);
  RespRequest request{.rank = RespRequest::Rank::kAsk, .slot = RespSlotOf(stem)};
  AppendRespCommand({"EXISTS", absl::StrCat(stem, 0)}, &request.head);
  uint64_t asked = 0;
  {
    MutexLock lock(&known_mu_);
    asked = known_.erased();
  }
  request.done = [this, key, asked](const RespReply* reply) {
    MutexLock lock(&known_mu_);
    --asked_;
    if (reply != nullptr && reply->kind == RespReply::Kind::kInteger) {
      known_.Learn(key, reply->number > 0, Clock::now(), asked);
    } else {
      known_.Forget(key);
    }
  };
  router_.Send(std::move(request));
}

// ------------------------------------------------------------------------------------------------- erasing

void RespTier::Advance(const ErasureRef& erasure) {
  if (!erasure->begun) {
    erasure->begun = true;
    for (const TaskRef& task : under_way_) {
      if (task->value != nullptr && task->key.owner == erasure->owner) erasure->before.push_back(task);
    }
  }
  std::erase_if(erasure->before, [](const TaskRef& task) { return task->over; });
  if (erasure->gave_up) return End(erasure);
  if (!erasure->before.empty()) return;
  if (!erasure->gathered) {
    erasure->gathered = true;
    absl::flat_hash_set<TierKey> keys = KnownOf(erasure->owner);
    keys.insert(erasure->keys.begin(), erasure->keys.end());
    erasure->keys.assign(keys.begin(), keys.end());
    // Nobody stores one in the belief that it is there.
    ForAll(erasure->keys, &KnownKeys::Forget);
  }
  while (erasure->next < erasure->keys.size() && erasure->unanswered.size() < kValuesTogether) {
    const TierKey& key = erasure->keys[erasure->next++];
    erasure->unanswered.insert(key);
    FindPieces(erasure, key, kPiecesTogether);
  }
  if (erasure->unanswered.empty()) End(erasure);
}

void RespTier::End(const ErasureRef& erasure) {
  erasure->answer.failed += erasure->keys.size() - erasure->next + erasure->unanswered.size();
  erasure->answer.complete = erasure->gathered && erasure->answer.failed == 0;
  {
    MutexLock lock(&known_mu_);
    if (known_.lost_doubts()) erasure->answer.complete = false;
  }
  std::vector<TierKey> left(erasure->unanswered.begin(), erasure->unanswered.end());
  left.insert(left.end(), erasure->keys.begin() + static_cast<ptrdiff_t>(erasure->next), erasure->keys.end());
  ForAll(left, &KnownKeys::Doubt);
  MutexLock lock(&mu_);
  std::erase(erasures_, erasure);
  erasure->over = true;
  erased_.SignalAll();
}

void RespTier::AboutPieces(const ErasureRef& erasure, const TierKey& key, std::string_view command,
                           uint32_t first, std::function<void(uint64_t)> done) {
  const std::string stem = PieceKeyStem(options_.prefix, key);
  RespRequest request{.rank = RespRequest::Rank::kAsk, .slot = RespSlotOf(stem)};
  request.over = std::shared_ptr<const bool>(erasure, &erasure->over);
  std::vector<std::string> pieces;
  for (uint32_t i = 0; i < kPiecesTogether; ++i) pieces.push_back(absl::StrCat(stem, first + i));
  std::vector<std::string_view> words = {command};
  words.insert(words.end(), pieces.begin(), pieces.end());
  AppendRespCommand(words, &request.head);
  request.done = [this, erasure, key, done = std::move(done)](const RespReply* reply) {
    if (erasure->over) return;
    if (reply != nullptr && reply->kind == RespReply::Kind::kInteger) {
      return done(static_cast<uint64_t>(std::max<int64_t>(0, reply->number)));
    }
    ++erasure->answer.failed;
    MutexLock lock(&known_mu_);
    known_.Doubt(key);
    Settle(erasure, key);
  };
  router_.Send(std::move(request));
}

void RespTier::FindPieces(const ErasureRef& erasure, const TierKey& key, uint32_t first) {
  AboutPieces(erasure, key, "EXISTS", first, [this, erasure, key, first](uint64_t found) {
    const bool more = found > 0 || first + kPiecesTogether < most_pieces_;
    if (more && first < UINT32_MAX - 2 * kPiecesTogether) {
      return FindPieces(erasure, key, first + kPiecesTogether);
    }
    UnlinkPieces(erasure, key, first - kPiecesTogether, 0);
  });
}

void RespTier::UnlinkPieces(const ErasureRef& erasure, const TierKey& key, uint32_t first,
                            uint64_t unlinked) {
  AboutPieces(erasure, key, "UNLINK", first, [this, erasure, key, first, unlinked](uint64_t gone) {
    if (first > 0) return UnlinkPieces(erasure, key, first - kPiecesTogether, unlinked + gone);
    erasure->answer.values += unlinked + gone > 0;
    MutexLock lock(&known_mu_);
    known_.Settle(key);
    known_.Erased(key);
    Settle(erasure, key);
  });
}

absl::flat_hash_set<TierKey> RespTier::KnownOf(const TierOwner& owner) {
  absl::flat_hash_set<TierKey> keys;
  KnownKeys::Walk walk;
  for (bool more = true; more;) {
    std::vector<TierKey> some;
    {
      MutexLock lock(&known_mu_);
      more = known_.Step(&walk, owner, kKnownTogether, &some);
    }
    keys.insert(some.begin(), some.end());
    if (more) std::this_thread::sleep_for(kWayPause);
  }
  return keys;
}

void RespTier::ForAll(absl::Span<const TierKey> keys, void (KnownKeys::*verb)(const TierKey& key)) {
  while (!keys.empty()) {
    {
      MutexLock lock(&known_mu_);
      for (const TierKey& key : keys.subspan(0, kKnownTogether)) (known_.*verb)(key);
    }
    keys.remove_prefix(std::min(kKnownTogether, keys.size()));
    if (!keys.empty()) std::this_thread::sleep_for(kWayPause);
  }
}

void RespTier::Doubt(const TierKey& key) {
  MutexLock lock(&known_mu_);
  known_.Doubt(key);
}

void RespTier::Settle(const ErasureRef& erasure, const TierKey& key) {
  erasure->unanswered.erase(key);
  loop_.Wake();
}

}  // namespace kvpool
