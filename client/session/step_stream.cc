#include "client/session/step_stream.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/mutex.h"
#include "proto/support/status_macros.h"
#include "proto/support/step_frames.h"

namespace kvpool {

// It has a name in every source, since StepStream::Rep has.
struct StepConnection {
  explicit StepConnection(UniqueFd connected) : socket(std::move(connected)) {}
  // A forked child may have the descriptor, too: closing it here would not tell the daemon.
  ~StepConnection() { shutdown(socket.get(), SHUT_RDWR); }
  StepConnection(const StepConnection&) = delete;
  StepConnection& operator=(const StepConnection&) = delete;

  // What poll() is to wait for.
  pollfd polled() const {
    return {.fd = socket.get(), .events = static_cast<short>(POLLIN | (writer.pending() ? POLLOUT : 0))};
  }
  void OnPolled(short events) {
    if ((events & ~POLLOUT) != 0) reader.OnReadable((events & POLLHUP) != 0);
  }

  const UniqueFd socket;
  StepFrameReader reader{kMaxStepResponseBytes};
  StepFrameWriter writer;
};

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Steps of decoding take longer than a nap, or have several share a batch: either way few wake-ups are on an engine's processor. With
// naps of 1 ms a scheduler on one core with this thread lost 6 to 9 % of its time to it, and 0 to 2 % with these.
constexpr milliseconds kNap{4};
constexpr int kNapsBeforeSleep = 2;
// An answer takes a tenth of it. Whoever waits longer sleeps, and the thread, which has to see ends and changes, has the stream.
constexpr milliseconds kMostDriven{2};
constexpr milliseconds kFirstRetry{1};
constexpr milliseconds kLastRetry{500};
constexpr milliseconds kFirstOpenRetry{5};
// The memory of a batch is used again for the next one, unless it is larger than this.
constexpr size_t kMaxKeptBytes = 64 << 10;

absl::StatusOr<std::unique_ptr<StepConnection>> Connect(const std::string& socket) {
  ASSIGN_OR_RETURN(UniqueFd connected, ConnectStepSocket(socket));
  return std::make_unique<StepConnection>(std::move(connected));
}

absl::Status HungUp() { return absl::UnavailableError("the daemon hung up"); }

// What an answer or the result of an operation says.
template <typename Said>
absl::Status StatusIn(const Said& said) {
  return absl::Status(static_cast<absl::StatusCode>(said.code()), said.message());
}

// Takes the frame that `reader` has. Not OK: there will be no other, and why.
absl::Status Parse(const StepFrameReader& reader, v1::StepResponse* response) {
  const std::string_view frame = reader.frame();
  if (!response->ParseFromArray(frame.data(), static_cast<int>(frame.size()))) {
    return absl::InternalError(
        absl::StrCat("the daemon sent a frame of ", frame.size(), " bytes that is not a StepResponse"));
  }
  if (!reader.is_end()) return absl::OkStatus();
  return response->code() == 0 ? HungUp() : StatusIn(*response);
}

absl::Status TooLarge(const StepFrameReader& reader) {
  return absl::InternalError(absl::StrCat("the daemon sends a frame of ", reader.frame_bytes(),
                                          " bytes; the limit is ", kMaxStepResponseBytes));
}

// Rounded up, so that a wait does not end before its time.
int MillisecondsUntil(steady_clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

// Sends an opening and waits for its answer. False: the daemon closed the connection before it took the opening.
absl::StatusOr<bool> Ask(StepConnection* connection, std::string_view opening,
                         steady_clock::time_point deadline, v1::StepResponse* answer) {
  const int fd = connection->socket.get();
  auto written = connection->writer.Write(fd, opening);
  bool unread = false;
  while (true) {
    pollfd polled = connection->polled();
    const int timeout_ms = MillisecondsUntil(deadline);
    const int ready = poll(&polled, 1, timeout_ms);
    if (ready == 0 && timeout_ms == 0)
      return absl::DeadlineExceededError("the daemon did not answer the opening in time");
    if (ready <= 0) continue;
    connection->OnPolled(polled.revents);
    if (connection->writer.pending()) written = connection->writer.Flush(fd);
    // There is an error on a Unix socket if the other end was closed with something unread.
    unread = unread || written == StepFrameWriter::Outcome::kBroken || (polled.revents & POLLERR) != 0;
    switch (connection->reader.Next(fd)) {
      case StepFrameReader::Outcome::kFrame:
        RETURN_IF_ERROR(Parse(connection->reader, answer));
        return true;
      case StepFrameReader::Outcome::kNoneYet:
        break;
      case StepFrameReader::Outcome::kHangup:
        if (unread) return false;
        return HungUp();
      case StepFrameReader::Outcome::kTooLarge:
        return TooLarge(connection->reader);
    }
  }
}

// The session is over after these: a new stream would get the same answer.
bool EndsSession(const absl::Status& status) {
  return absl::IsAborted(status) || absl::IsUnauthenticated(status) || absl::IsNotFound(status);
}

}  // namespace

class StepStream::Rep {
 public:
  explicit Rep(std::string socket) : socket_(std::move(socket)) {}
  ~Rep() { EndThread(); }

  // Sends a first batch, which opens a member, and keeps the connection for the thread.
  absl::StatusOr<v1::OperationResult> Open(const v1::StepRequest& opening, steady_clock::time_point deadline);
  void Start(StepBatches* batches, SessionState* state) {
    batches_ = batches;
    state_ = state;
    thread_ = std::thread([this] { Run(); });
  }
  void Wake(Urgency urgency);
  bool Drive(steady_clock::time_point deadline, absl::FunctionRef<bool()> done) ABSL_LOCKS_EXCLUDED(drive_);
  bool Await(steady_clock::time_point deadline, absl::FunctionRef<bool()> done) ABSL_LOCKS_EXCLUDED(drive_);
  void OnDaemonChange();
  void Stop();

 private:
  enum class Mode { kAwake, kDoze, kNap, kSleep };
  enum class Who { kThread, kCaller };

  void EndThread();
  void Rouse();
  void Run() ABSL_LOCKS_EXCLUDED(drive_);
  // One stream, from its start to its end, of which last_status_ tells. True: it carried at least one answer.
  bool RunStream() ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_);
  // Takes the answers that have come. False: the stream has ended.
  bool Read(Who who) ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_);
  // Takes response_ apart.
  void TakeResponse() ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_);
  // Sends batches until there is none, or no room for one.
  void Write() ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_);
  // Sends what there is, if nothing else is under way. False: the thread has to.
  bool WriteAtOnce() ABSL_LOCKS_EXCLUDED(drive_);
  // Whether a caller may do what the thread does.
  bool drivable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_) {
    return connection_ != nullptr && writable_ && !ended_ && !handed_over_ && !over() &&
           !state_->away.load(std::memory_order_seq_cst);
  }
  // Waits for an answer, room or commands, as long as idle_naps_ says.
  void AwaitEvent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_);
  // Waits for Wake, or for what `connection` says, if it is not null; callers may drive meanwhile. REQUIRES: a mode other
  // than kAwake was published.
  void Wait(pollfd* connection, int timeout_ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_);
  // True: the daemon has gone or come back meanwhile.
  bool Pause(milliseconds pause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_);
  // Nobody waits for a daemon that is gone, however this thread came to wait, and whenever the match came.
  void LetMatchesGoIfAway() ABSL_EXCLUSIVE_LOCKS_REQUIRED(drive_) {
    if (state_->away.load(std::memory_order_seq_cst)) batches_->LetMatchesGo();
  }
  bool over() const {
    return stop_.load(std::memory_order_seq_cst) || !state_->open.load(std::memory_order_seq_cst);
  }

  const std::string socket_;
  UniqueFd wake_;  // An eventfd, made by Open. A session that is closed and kept has no descriptor.
  StepBatches* batches_ = nullptr;  // What it points to is used with drive_ held.
  SessionState* state_ = nullptr;
  std::thread thread_;

  std::atomic<bool> stop_{false};
  std::atomic<bool> changed_{false};  // The daemon is gone or back: a pause is over.
  std::atomic<Mode> mode_{Mode::kAwake};
  std::atomic<bool> woken_{false};  // Somebody writes to wake_, or has.
  std::atomic<int> sleepers_{0};    // Callers that have given up driving, and wait.

  // Held by the thread whenever it does not wait, and by a caller that does its work. Before there is a thread nobody needs it.
  Mutex drive_;
  std::unique_ptr<StepConnection> connection_;  // Null: there is none. The thread alone makes and ends it.
  bool writable_ = false;                       // The daemon may still read.
  bool ended_ = false;                          // A caller has found the stream's end.
  bool answered_ = false;                       // There was an answer on this stream.
  bool handed_over_ = false;                    // A caller has left response_ to the thread.
  bool opening_takes_prefills_ = false;  // The daemon said so with the opening, on the stream that is kept.
  int idle_naps_ = 0;
  std::string request_;
  v1::StepResponse response_;
  absl::Status last_status_;
};

absl::StatusOr<v1::OperationResult> StepStream::Rep::Open(const v1::StepRequest& opening,
                                                          steady_clock::time_point deadline) {
  wake_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) return absl::UnavailableError(absl::StrCat("eventfd: ", std::strerror(errno)));
  const std::string bytes = opening.SerializeAsString();
  milliseconds pause = kFirstOpenRetry;
  while (true) {
    absl::Status missed = absl::UnavailableError("it closed the connection");
    if (absl::StatusOr<std::unique_ptr<StepConnection>> connection = Connect(socket_); !connection.ok()) {
      missed = connection.status();
    } else {
      ASSIGN_OR_RETURN(const bool taken, Ask(connection->get(), bytes, deadline, &response_));
      if (taken) {
        connection_ = *std::move(connection);
        break;
      }
    }
    // The attach socket has answered, so there is a daemon: if it does not listen here yet, it soon will.
    if (!absl::IsUnavailable(missed)) return missed;
    if (steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("the daemon did not take the opening in time: ", missed.message()));
    }
    // Each attempt costs a daemon that has too many connections the more.
    std::this_thread::sleep_for(std::min<steady_clock::duration>(pause, deadline - steady_clock::now()));
    pause = std::min(2 * pause, kLastRetry);
  }
  RETURN_IF_ERROR(StatusIn(response_));
  if (response_.results().empty()) return absl::InternalError("the daemon answered the opening with nothing");
  RETURN_IF_ERROR(StatusIn(response_.results(0)));
  opening_takes_prefills_ = response_.takes_prefills();
  return response_.results(0);
}

void StepStream::Rep::EndThread() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_seq_cst);
  Wake(Urgency::kNow);
  thread_.join();
}

void StepStream::Rep::Stop() {
  EndThread();
  MutexLock lock(&drive_);
  if (batches_ != nullptr) batches_->Abort(state_->status());
  connection_.reset();
  wake_.Reset();
}

void StepStream::Rep::Wake(Urgency urgency) {
  const Mode mode = mode_.load(std::memory_order_seq_cst);
  if (mode == Mode::kAwake || (mode != Mode::kSleep && urgency == Urgency::kSoon)) return;
  if (urgency == Urgency::kAwaited && WriteAtOnce()) return;
  Rouse();
}

void StepStream::Rep::Rouse() {
  if (woken_.exchange(true, std::memory_order_seq_cst)) return;
  KVPOOL_CHECK(eventfd_write(wake_.get(), 1) == 0, "eventfd_write: errno %d", errno);
}

bool StepStream::Rep::WriteAtOnce() {
  if (!drive_.TryLock()) return false;
  bool sent = false;
  // Behind other batches it goes with what comes until these are answered, as one.
  if (drivable() && batches_->all_answered()) {
    Write();
    sent = writable_ && !connection_->writer.pending();
  }
  drive_.Unlock();
  return sent;
}

bool StepStream::Rep::Drive(steady_clock::time_point deadline, absl::FunctionRef<bool()> done) {
  if (!drive_.TryLock()) return false;
  const auto begin = steady_clock::now();
  const auto until = std::clamp(deadline, begin, begin + kMostDriven);
  bool in_time = true;
  while (drivable() && !done() && in_time) {
    Write();
    pollfd polled = connection_->polled();
    const auto left = std::max(until - steady_clock::now(), steady_clock::duration::zero());
    const timespec timeout{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(left).count()};
    const int ready = ppoll(&polled, 1, &timeout, nullptr);
    in_time = left > steady_clock::duration::zero();
    if (ready <= 0) continue;
    connection_->OnPolled(polled.revents);
    ended_ = !Read(Who::kCaller);
  }
  const bool seen = done();
  // An answer makes room, and gives back what nobody waits for any more.
  if (drivable()) Write();
  // The thread may sleep on: poll() looks again before it returns, and what woke it has been read here.
  const bool left_over = connection_ != nullptr && (ended_ || handed_over_ || over() || !writable_ ||
                                                    connection_->writer.pending() || batches_->HasWork());
  if (left_over) Wake(Urgency::kNow);  // Stop closes the eventfd with the lock.
  drive_.Unlock();
  return seen;
}

bool StepStream::Rep::Await(steady_clock::time_point deadline, absl::FunctionRef<bool()> done) {
  if (Drive(deadline, done)) return true;
  if (deadline <= steady_clock::now()) return done();
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  {
    MutexLock lock(&drive_);  // Stop closes the eventfd with it.
    if (mode_.load(std::memory_order_seq_cst) == Mode::kDoze) Rouse();
  }
  const bool seen = state_->signal.Await(deadline, done);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return seen;
}

void StepStream::Rep::OnDaemonChange() {
  changed_.store(true, std::memory_order_seq_cst);
  Wake(Urgency::kNow);
}

void StepStream::Rep::Wait(pollfd* connection, int timeout_ms) {
  std::array<pollfd, 2> polled = {pollfd{.fd = wake_.get(), .events = POLLIN},
                                  connection == nullptr ? pollfd{.fd = -1} : *connection};
  drive_.Unlock();
  const int ready = poll(polled.data(), polled.size(), timeout_ms);
  mode_.store(Mode::kAwake, std::memory_order_seq_cst);
  drive_.Lock();
  if (ready == 0) ++idle_naps_;
  if (polled[0].revents != 0) {
    eventfd_t count;
    eventfd_read(wake_.get(), &count);
    // Whoever found it set has published a command before, which the thread looks for next.
    woken_.store(false, std::memory_order_seq_cst);
  }
  if (connection != nullptr) connection->revents = polled[1].revents;
}

void StepStream::Rep::AwaitEvent() {
  const bool nap = idle_naps_ < kNapsBeforeSleep;
  // The next answer is for a caller that will have driven. It would wake this thread, too.
  bool doze = nap && batches_->all_answered();
  mode_.store(doze ? Mode::kDoze : nap ? Mode::kNap : Mode::kSleep, std::memory_order_seq_cst);
  // This looks once more after the mode was published: an earlier command, change or sleeper found the thread awake and woke nobody.
  LetMatchesGoIfAway();
  doze = doze && sleepers_.load(std::memory_order_seq_cst) == 0;
  int timeout_ms = nap ? static_cast<int>(kNap.count()) : -1;
  const bool work = !connection_->writer.pending() && batches_->HasWork();
  if (over() || !writable_ || ended_ || handed_over_ || work) timeout_ms = 0;
  pollfd polled = connection_->polled();
  Wait(doze ? nullptr : &polled, timeout_ms);
  if (!doze || poll(&polled, 1, 0) > 0) connection_->OnPolled(polled.revents);
}

void StepStream::Rep::TakeResponse() {
  answered_ = true;
  idle_naps_ = 0;
  batches_->OnResponse(&response_);
}

bool StepStream::Rep::Read(Who who) {
  if (std::exchange(handed_over_, false)) TakeResponse();
  while (true) {
    switch (connection_->reader.Next(connection_->socket.get())) {
      case StepFrameReader::Outcome::kNoneYet:
        // What the daemon said is read. What it has not answered is sent again, on another connection.
        if (!writable_) last_status_ = HungUp();
        return writable_;
      case StepFrameReader::Outcome::kHangup:
        last_status_ = HungUp();
        return false;
      case StepFrameReader::Outcome::kTooLarge:
        last_status_ = TooLarge(connection_->reader);
        return false;
      case StepFrameReader::Outcome::kFrame:
        break;
    }
    last_status_ = Parse(connection_->reader, &response_);
    if (!last_status_.ok()) return false;
    // Notices are for a callback that runs on the session's own threads.
    if (who == Who::kCaller && response_.notices_size() > 0) {
      handed_over_ = true;
      return true;
    }
    TakeResponse();
  }
}

void StepStream::Rep::Write() {
  if (!writable_) return;
  StepFrameWriter& writer = connection_->writer;
  auto written = writer.pending() ? writer.Flush(connection_->socket.get()) : StepFrameWriter::Outcome::kSent;
  while (written == StepFrameWriter::Outcome::kSent) {
    const v1::StepRequest* request = batches_->Next();
    if (request == nullptr) return;
    idle_naps_ = 0;
    request->SerializeToString(&request_);
    written = writer.Write(connection_->socket.get(), request_);
    if (request_.capacity() > kMaxKeptBytes) request_ = std::string();
  }
  // What the daemon said before it hung up is still to be read.
  writable_ = written != StepFrameWriter::Outcome::kBroken;
}

bool StepStream::Rep::RunStream() {
  if (connection_ == nullptr) {
    absl::StatusOr<std::unique_ptr<StepConnection>> connection = Connect(socket_);
    if (!connection.ok()) {
      last_status_ = connection.status();
      return false;
    }
    connection_ = *std::move(connection);
  }
  batches_->StartStream();
  if (std::exchange(opening_takes_prefills_, false)) batches_->TakesPrefills();
  writable_ = true;
  ended_ = answered_ = handed_over_ = false;
  while (!over() && !ended_ && Read(Who::kThread)) {
    Write();
    AwaitEvent();
  }
  connection_.reset();
  return answered_;
}

bool StepStream::Rep::Pause(milliseconds pause) {
  const auto until = steady_clock::now() + pause;
  bool changed = false;
  while (!changed && steady_clock::now() < until) {
    mode_.store(Mode::kSleep, std::memory_order_seq_cst);
    // This looks after the mode was published, as in AwaitEvent.
    changed = changed_.exchange(false, std::memory_order_seq_cst);
    if (changed || over()) break;
    LetMatchesGoIfAway();
    Wait(nullptr, MillisecondsUntil(until));
  }
  // Nobody is to wake a thread that has ended.
  mode_.store(Mode::kAwake, std::memory_order_seq_cst);
  return changed;
}

void StepStream::Rep::Run() {
  MutexLock lock(&drive_);
  milliseconds retry = kFirstRetry;
  while (!over()) {
    if (RunStream()) retry = kFirstRetry;
    if (over()) break;
    if (EndsSession(last_status_)) {
      // A daemon that came back without the session does not know the member.
      state_->End(
          state_->away.load(std::memory_order_seq_cst)
              ? absl::UnavailableError(absl::StrCat(
                    "detached: the daemon was gone; the session did not come back: ", last_status_.message()))
              : absl::AbortedError(last_status_.message()));
      break;
    }
    state_->reconnects.fetch_add(1, std::memory_order_relaxed);
    // A daemon answers on its attach socket some milliseconds before it listens here.
    retry = Pause(retry) ? kFirstRetry : std::min(retry * 2, kLastRetry);
  }
  // The session is over; calls are still answered until it is dismantled.
  while (!stop_.load(std::memory_order_seq_cst)) {
    mode_.store(Mode::kSleep, std::memory_order_seq_cst);
    batches_->Abort(state_->status());
    Wait(nullptr, stop_.load(std::memory_order_seq_cst) ? 0 : -1);
  }
}

StepStream::StepStream(const std::string& socket) : rep_(std::make_unique<Rep>(socket)) {}
StepStream::~StepStream() = default;

absl::StatusOr<v1::OpenSessionResult> StepStream::OpenSession(const v1::OpenSession& request,
                                                              steady_clock::time_point deadline) {
  v1::StepRequest opening;
  *opening.add_operations()->mutable_open_session() = request;
  ASSIGN_OR_RETURN(v1::OperationResult result, rep_->Open(opening, deadline));
  return std::move(*result.mutable_open_session());
}

absl::StatusOr<v1::AddMemberResult> StepStream::AddMember(const v1::AddMember& request,
                                                          steady_clock::time_point deadline) {
  v1::StepRequest opening;
  *opening.add_operations()->mutable_add_member() = request;
  ASSIGN_OR_RETURN(v1::OperationResult result, rep_->Open(opening, deadline));
  return std::move(*result.mutable_add_member());
}

void StepStream::Start(StepBatches* batches, SessionState* state) { rep_->Start(batches, state); }
void StepStream::Wake(Urgency urgency) { rep_->Wake(urgency); }
bool StepStream::Look(absl::FunctionRef<bool()> done) { return done() || rep_->Drive({}, done); }
bool StepStream::Await(steady_clock::time_point deadline, absl::FunctionRef<bool()> done) {
  return done() || rep_->Await(deadline, done);
}
void StepStream::OnDaemonChange() { rep_->OnDaemonChange(); }
void StepStream::Stop() { rep_->Stop(); }

}  // namespace kvpool
