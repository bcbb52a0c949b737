#include "tests/fuzz/stream_story.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "proto/support/check.h"
#include "proto/support/step_frames.h"
#include "tests/fuzz/descriptors.h"
#include "tests/fuzz/messages.h"
#include "tests/support/access.h"

namespace kvpool::fuzz {
namespace {

constexpr size_t kMaxPeers = 8, kMaxEngines = 5;
constexpr int kMaxActions = 100;
constexpr std::string_view kHttp2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
// Two verbs at once, and hardly another one before the story's end.
constexpr char kSlowAccess[] =
    "[everybody]\nuid = *\nrole = engine, operator\ntenant = *\nverbs-a-second = 20\n";

// The address of a peer, in the abstract namespace: the daemon's end of a connection tells by it whose it is.
struct Address {
  sockaddr_un name{};
  socklen_t bytes = offsetof(sockaddr_un, sun_path) + 1 + sizeof(pid_t) + sizeof(uint32_t);

  Address() = default;
  explicit Address(uint32_t number) {
    const pid_t self = getpid();
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, &self, sizeof(self));
    std::memcpy(name.sun_path + 1 + sizeof(self), &number, sizeof(number));
  }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&name); }
  uint32_t number() const {
    uint32_t number;
    std::memcpy(&number, name.sun_path + 1 + sizeof(pid_t), sizeof(number));
    return number;
  }
};

}  // namespace

// The slabs that an engine has yet to acknowledge.
class StreamStory::SlabQueue final : public AttachPeer {
 public:
  void Send(const v1::AttachFrame& frame, UniqueFd) override {
    if (frame.has_slab()) slabs_.push_back(frame.slab().slab());
  }
  void Close(const std::string&) override {}
  void Bound() override {}
  void NotAwaited(AttachId) override {}
  std::vector<uint32_t> Take() { return std::exchange(slabs_, {}); }

 private:
  std::vector<uint32_t> slabs_;
};

StreamStory::StreamStory(Input* input, const std::string& path) : input_(*input) {
  const uint8_t shape = input_.Byte();
  paced_ = shape % 8 == 7;
  DaemonOptions options;
  options.access = paced_ ? MakeAccess(kSlowAccess) : MakeAccess();
  options.version = "fuzz";
  options.housekeeping_thread = false;
  options.device_threads = false;
  options.max_sessions = 4;
  options.max_members = 3;
  options.give_back_ms = 1;
  options.policy = "lru";
  options.slab_bytes = 16 * kBlockBytes;
  options.device_capacity_bytes.push_back(4 * options.slab_bytes);
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("mem", options.slab_bytes, &script_));
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options, std::move(devices), &clock_);
  KVPOOL_CHECK(daemon.ok(), "%s", std::string(daemon.status().message()).c_str());
  daemon_ = *std::move(daemon);
  openings_ = std::make_unique<Openings>(daemon_.get(), &stats_, /*threads=*/0);
  large_calls_ = std::make_unique<CallWorkers>(CallWorkers::Options{.calls = "large calls", .threads = 0});
  absl::StatusOr<std::unique_ptr<SocketEvents>> made = SocketEvents::Make();
  KVPOOL_CHECK(made.ok(), "%s", std::string(made.status().message()).c_str());
  SocketEvents* const events = made->get();
  queue_ = std::make_unique<RpcQueue>(*std::move(made), [this] { return daemon_->tenants() > 1; });
  to_frames_ = ServeStepSockets(queue_.get(), events, &stats_,
                                {.daemon = daemon_.get(),
                                 .openings = openings_.get(),
                                 .large_calls = large_calls_.get(),
                                 .refusals = &refusals_});
  address_.sun_family = AF_UNIX;
  path.copy(address_.sun_path, sizeof(address_.sun_path) - 1);
  StreamAcceptorOptions door;
  door.path = path;
  door.max_silent = 3;
  // How long somebody says nothing is not up to a story.
  door.preface_timeout_ms = 3600 * 1000;
  door.clock = &door_clock_;
  door.fd_ceiling = shape / 8 % 8 == 7 ? LowestFreeDescriptor() + 12 : 4000;
  auto acceptor = StreamAcceptor::Open(
      door, &connections_, &stats_,
      [this](UniqueFd socket, const std::shared_ptr<const PeerCredentials>&) { OnGrpc(socket); },
      [this](UniqueFd socket, std::shared_ptr<const PeerCredentials> peer) {
        OnFrames(std::move(socket), std::move(peer));
      });
  KVPOOL_CHECK(acceptor.ok(), "%s", std::string(acceptor.status().message()).c_str());
  acceptor_ = *std::move(acceptor);
  Attach();
  OpenAtOnce(&engines_.front());
  Connect();
}

// Everybody goes, or the daemon stops. No call is left then.
StreamStory::~StreamStory() {
  const uint8_t how = input_.Byte();
  if (how % 4 == 1) Settle();
  if (how % 4 == 2) {
    // Whoever was let in just now is closed without a word.
    for (Peer& peer : peers_) peer.stream.NeedNotBeTold();
    acceptor_.reset();
    queue_->Stop();
    if (how / 4 % 2 == 1) RunAll();
    held_ = false;
    RunAll();
    KVPOOL_CHECK(queue_->calls() == 0, "%zu calls outlive the end of the queue", queue_->calls());
    for (Peer& peer : peers_) Read(&peer, kAll);
  }
  peers_.clear();
  if (how / 8 % 2 == 1) RunAll();
  held_ = false;
  RunAll();
  KVPOOL_CHECK(queue_->calls() == 0, "%zu calls outlive their peers", queue_->calls());
  if (how % 4 != 2) queue_->Stop();
  RunAll();
  acceptor_.reset();
  openings_.reset();
  large_calls_.reset();
  queue_.reset();
  daemon_.reset();
  KVPOOL_CHECK(script_.alive == 0, "%d slabs stay", script_.alive.load());
}

void StreamStory::Run() {
  for (int i = 0; i < kMaxActions && !input_.empty(); ++i) Act();
}

void StreamStory::Act() {
  if (peers_.empty()) return Connect();
  switch (input_.Below(32)) {
    case 0:
    case 1:
      return Connect();
    case 2:
      return Speak(&Any());
    case 3:
      return HangUp();
    case 4:
    case 5:
    case 6:
    case 7:
      return SayBatches(Speaker());
    case 8:
    case 9:
      return SayOpening(Speaker());
    case 10:
      return SayLarge(Speaker());
    case 11:
      return SayRaw(Speaker());
    case 12:
      return SayBytes(Speaker());
    case 13:
      Speaker()->stream.Send(1 + input_.Byte());
      return;
    case 14:
    case 15:
      Read(&Any(), kAll);
      return;
    case 16:
      Read(&Any(), 1 + input_.Byte() * 8);
      return;
    case 17:
      if (queue_->resting()) return queue_->GoOn();
      return queue_->Rest();
    case 18:
      held_ = !held_;
      return;
    case 19:
      clock_.Advance(input_.Byte() * 40);
      return daemon_->HousekeepOnce();
    case 20:
      return Attach();
    case 21:
      return MapSlabs(&engines_[input_.Byte() % engines_.size()]);
    case 22:
      return EndEngine(&engines_[input_.Byte() % engines_.size()]);
    case 23:
      return Operate();
    case 24:
      return AcceptWithoutDescriptors();
    case 25:
      return Settle();
    case 26:
      RunDoor();
      return;
    case 27:
      RunWorkers();
      return;
    case 28:
      for (uint32_t i = 1 + input_.Below(4); i > 0; --i) queue_->RunReady();
      return;
    default:
      return RunAll();
  }
}

// ----------------------------------------------------------------------------------------------- connections

void StreamStory::Connect() {
  if (peers_.size() == kMaxPeers) return;
  UniqueFd made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Address own(++connected_);
  KVPOOL_CHECK(bind(made.get(), own.get(), own.bytes) == 0, "bind: errno %d", errno);
  KVPOOL_CHECK(connect(made.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) == 0,
               "connect: errno %d", errno);
  const uint8_t whose = input_.Byte();
  peers_.push_back(
      {.stream = StreamPeer(std::move(made)), .number = connected_, .engine = whose / 8 % engines_.size()});
  if (whose % 8 != 7) Speak(&peers_.back());
}

StreamStory::Peer* StreamStory::Speaker() {
  const size_t index = input_.Byte() % peers_.size();
  if (peers_[index].stream.is_over()) {
    peers_.erase(peers_.begin() + static_cast<ptrdiff_t>(index));
    Connect();
    return &peers_.back();
  }
  Speak(&peers_[index]);
  return &peers_[index];
}

void StreamStory::Speak(Peer* peer) {
  if (std::exchange(peer->has_spoken, true)) return;
  std::string preface(kStepPreface);
  size_t most = kAll;
  switch (const uint8_t how = input_.Byte(); how % 32) {
    case 0:
      preface = kHttp2Preface;
      break;
    case 1:
      most = 1 + input_.Byte() % (preface.size() - 1);
      break;
    case 2:
      preface[input_.Byte() % preface.size()] = static_cast<char>(input_.Byte());
      break;
    case 3:
      preface = input_.Bytes(1 + how / 32 * 8);
      break;
    default:
      break;
  }
  peer->stream.Say(preface);
  peer->stream.Send(most);
}

StreamStory::Peer* StreamStory::Behind(const UniqueFd& socket) {
  Address address;
  KVPOOL_CHECK(getpeername(socket.get(), address.get(), &address.bytes) == 0, "getpeername: errno %d", errno);
  const auto found = std::find_if(peers_.begin(), peers_.end(),
                                  [&](const Peer& peer) { return peer.number == address.number(); });
  return found == peers_.end() ? nullptr : &*found;
}

void StreamStory::OnGrpc(const UniqueFd& socket) {
  const Peer* const peer = Behind(socket);
  KVPOOL_CHECK(peer == nullptr || peer->stream.preface() == kHttp2Preface,
               "it is let in for gRPC, and said something else");
}

void StreamStory::OnFrames(UniqueFd socket, std::shared_ptr<const PeerCredentials> credentials) {
  const uint8_t terms = input_.Byte();
  // A small buffer is full after a few answers that the peer does not read, and a peer's after a few batches.
  const int small = 1;
  const bool narrow = terms % 4 == 3;
  if (narrow) setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  if (Peer* const peer = Behind(socket); peer != nullptr) {
    KVPOOL_CHECK(peer->stream.preface() == kStepPreface, "it is let in for frames, and said something else");
    peer->stream.OnLetIn();
    if (narrow) {
      setsockopt(peer->stream.socket(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
      peer->stream.NeedNotBeTold();
    }
  }
  if (terms / 4 % 16 == 15) {
    auto stranger = std::make_shared<PeerCredentials>(*credentials);
    ++stranger->uid;
    credentials = std::move(stranger);
  }
  to_frames_(std::move(socket), std::move(credentials));
}

void StreamStory::AcceptWithoutDescriptors() {
  rlimit before;
  KVPOOL_CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "getrlimit: errno %d", errno);
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(LowestFreeDescriptor()) + input_.Below(3);
  KVPOOL_CHECK(setrlimit(RLIMIT_NOFILE, &tight) == 0, "setrlimit: errno %d", errno);
  RunDoor();
  KVPOOL_CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit: errno %d", errno);
  // The acceptor may rest, and takes note of the time at the end of a turn.
  door_clock_.Advance(Acceptor::kPauseMs);
  RunDoor();
}

void StreamStory::HangUp() {
  const size_t index = input_.Byte() % peers_.size();
  switch (input_.Below(4)) {
    case 0:
      return peers_[index].stream.HalfClose();
    case 1:
      return peers_[index].stream.Deafen();
    default:
      peers_.erase(peers_.begin() + static_cast<ptrdiff_t>(index));
  }
}

bool StreamStory::Read(Peer* peer, size_t most) {
  Engine& engine = EngineOf(*peer);
  const auto heard = [&](const v1::StepResponse& response) { Heard(&engine, response); };
  bool any = false;
  while (peer->stream.Hear(most, heard)) {
    any = true;
    if (most != kAll) break;
  }
  return any;
}

// ---------------------------------------------------------------------------------- engines, operators, time

void StreamStory::Attach() {
  if (engines_.size() == kMaxEngines) return;
  Engine engine;
  engine.slabs = std::make_shared<SlabQueue>();
  const uint64_t process = 100 + engines_.size();
  const absl::StatusOr<Daemon::Welcome> welcome =
      daemon_->OnAttached(engine.slabs,
                          {.pid = static_cast<int64_t>(process),
                           .uid = getuid() + (input_.OneIn(32) ? 1 : 0),
                           .gid = 0,
                           .process = process},
                          v1::AttachHello());
  KVPOOL_CHECK(welcome.ok(), "%s", std::string(welcome.status().message()).c_str());
  engine.attach = welcome->id;
  engine.attach_token = welcome->frame.welcome().attach_token();
  engines_.push_back(std::move(engine));
}

void StreamStory::OpenAtOnce(Engine* engine) {
  v1::OpenSession request;
  request.set_attach_token(engine->attach_token);
  *request.mutable_layout() = OpaqueLayout();
  request.mutable_fingerprint()->set_digest("model");
  v1::OpenSessionResult result;
  if (!daemon_->OpenSession(request, &result).ok()) return;
  engine->member_token = result.member_token();
  engine->session = result.session();
  MapSlabs(engine);
}

void StreamStory::MapSlabs(Engine* engine) {
  for (const uint32_t slab : engine->slabs->Take()) {
    if (engine->hung_up) continue;
    v1::SlabAck ack;
    ack.set_slab(slab);
    if (input_.OneIn(64)) ack.set_error("no room");
    daemon_->OnSlabAck(engine->attach, ack);
  }
}

void StreamStory::EndEngine(Engine* engine) {
  const uint8_t how = input_.Byte();
  if (how % 2 == 1 && !std::exchange(engine->hung_up, true)) daemon_->OnHangup(engine->attach);
  if (how % 4 == 3 && !std::exchange(engine->dead, true)) daemon_->OnProcessDead(engine->attach);
}

void StreamStory::Operate() {
  const uint64_t session = engines_[input_.Byte() % engines_.size()].session;
  switch (input_.Below(4)) {
    case 0: {
      v1::EndSessionRequest request;
      request.set_session(session);
      v1::EndSessionResponse response;
      return daemon_->EndSession(request, &response).IgnoreError();
    }
    case 1: {
      v1::RevokeRequest request;
      request.set_session(session);
      v1::RevokeResponse response;
      return daemon_->Revoke(request, &response).IgnoreError();
    }
    case 2: {
      v1::DrainRequest request;
      FillPlainly(&input_, &request);
      v1::DrainResponse response;
      return daemon_->Drain(request, &response).IgnoreError();
    }
    default: {
      v1::ListSessionsRequest request;
      v1::ListSessionsResponse response;
      return daemon_->ListSessions(request, &response).IgnoreError();
    }
  }
}

// ------------------------------------------------------------------------------------------ the daemon's threads

bool StreamStory::RunDoor() {
  // Who comes is accepted in one turn, and heard in the next.
  return acceptor_ != nullptr && acceptor_->RunOnce(0) && acceptor_->RunOnce(0);
}

void StreamStory::RunAll() {
  RunDoor();
  do {
    while (queue_->RunReady()) {
    }
  } while (!held_ && RunWorkers());
}

void StreamStory::Settle() {
  held_ = false;
  for (bool more = true; more;) {
    more = false;
    for (Peer& peer : peers_) {
      while (peer.stream.Send(kAll)) more = true;
    }
    RunAll();
    for (Peer& peer : peers_) more = Read(&peer, kAll) || more;
  }
  const bool all_read =
      std::none_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.stream.deaf(); });
  KVPOOL_CHECK(!queue_->resting() || !all_read || queue_->calls() == 0, "%zu calls outlive the rest",
               queue_->calls());
  if (paced_) return;
  for (const Peer& peer : peers_) peer.stream.CheckServed();
}

}  // namespace kvpool::fuzz
