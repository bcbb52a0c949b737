// Any bytes, in packets of any size and order, with and without descriptors, on the attach socket of a whole daemon, by
// processes that come, hang up, die and hand on their pids: nothing of it ends the daemon, leaves a descriptor open, or
// has a process counted as dead that lives.
#include <fcntl.h>
#include <google/protobuf/stubs/logging.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "proto/support/attach_socket.h"
#include "proto/support/check.h"
#include "server/attach/attach_loop.h"
#include "server/attach/attach_server.h"
#include "server/base/log.h"
#include "tests/fuzz/descriptors.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/messages.h"
#include "tests/support/access.h"
#include "tests/support/fake_clock.h"
#include "tests/support/memory_device.h"

namespace kvpool::fuzz {
namespace {

constexpr size_t kMaxClients = 10, kMaxProcesses = 8;
constexpr int kMaxActions = 100;

// An address in the abstract namespace, which is the fuzzer's own. The attach server's view of a connection has
// no more than the address of its peer, which therefore says whose it is.
struct Name {
  uint32_t pid, number, process;
};
struct Address {
  sockaddr_un name{};
  socklen_t bytes = sizeof(name);

  explicit Address(const Name& whose) : bytes(offsetof(sockaddr_un, sun_path) + 1 + sizeof(whose)) {
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, &whose, sizeof(whose));
  }
  Address() = default;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&name); }
};

UniqueFd SocketNamed(const Name& whose) {
  UniqueFd made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Address address(whose);
  KVPOOL_CHECK(bind(made.get(), address.get(), address.bytes) == 0, "bind: errno %d", errno);
  return made;
}

class Story {
 public:
  explicit Story(Input* input);
  ~Story();
  void Run();

 private:
  struct Process {
    int64_t pid;
    uint32_t uid;
    UniqueFd end;  // An eventfd that stands for the pidfd: readable once the process has ended.
    bool ended = false;
  };
  struct Client {
    UniqueFd socket;
    uint32_t process;
    bool said_hello = false;
    bool faultless = true;  // It has kept to the protocol so far.
    std::string attach_token, member_token;
    uint64_t session = 0;
    std::deque<uint32_t> unacknowledged;  // Slabs.
  };
  // What the daemon was told of one connection that it has welcomed.
  struct Attachment {
    uint32_t process;
    bool hung_up = false, awaited = false, given_up = false, dead = false;
  };
  // Notes what the daemon takes back: that it waits for the end of a process.
  class NotingPeer final : public AttachPeer {
   public:
    NotingPeer(Story* story, std::shared_ptr<AttachPeer> peer) : story_(story), peer_(std::move(peer)) {}
    void Send(const v1::AttachFrame& frame, UniqueFd fd) override { peer_->Send(frame, std::move(fd)); }
    void Close(const std::string& reason) override { peer_->Close(reason); }
    void Bound() override { peer_->Bound(); }
    void NotAwaited(AttachId id) override {
      story_->attachments_.at(id).given_up = true;
      peer_->NotAwaited(id);
    }

   private:
    Story* const story_;
    const std::shared_ptr<AttachPeer> peer_;
  };

  AttachEvents Events();
  AttachSenses Senses();
  uint32_t ProcessBehind(int socket) const;

  void Act();
  Client& Any() { return clients_[input_.Byte() % clients_.size()]; }
  void Connect();
  void HangUp();
  void EndProcess(Process* process);
  void SayHello(Client* client);
  void SendBytes(Client* client, const std::string& bytes, uint32_t descriptors);
  void SendOddFrame(Client* client);
  void Acknowledge(Client* client);
  void Read(Client* client);
  void OnFrame(Client* client, const v1::AttachFrame& frame);
  void OpenSession(Client* client);
  void JoinSession(Client* client);
  void CloseSession(Client* client);
  void RunOutOfDescriptors();
  void RunLoop() { KVPOOL_CHECK(loop_->RunOnce(0), "the loop stopped by itself"); }

  Input& input_;
  FakeClock clock_;
  MemoryDevice::Script script_;
  std::unique_ptr<Daemon> daemon_;
  const uint32_t number_;  // It tells the addresses of this story from those of others.
  uint32_t sockets_ = 0;
  std::vector<Process> processes_;
  std::vector<Client> clients_;
  std::map<AttachId, Attachment> attachments_;
  std::set<std::string> tokens_;
  std::unique_ptr<AttachLoop> loop_;
};

uint32_t NextNumber() {
  static uint32_t stories = 0;
  return ++stories;
}

Story::Story(Input* input) : input_(*input), number_(NextNumber()) {
  const uint8_t limits = input_.Byte();
  DaemonOptions options;
  options.access = MakeAccess();
  options.version = "fuzz";
  options.housekeeping_thread = false;
  options.max_sessions = 4;
  options.max_members = 3;
  options.give_back_ms = 1;
  options.policy = "lru";
  options.slab_bytes = 16 * kBlockBytes;
  options.device_capacity_bytes.push_back(12 * options.slab_bytes);
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<MemoryDevice>("mem", options.slab_bytes, &script_));
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options, std::move(devices), &clock_);
  KVPOOL_CHECK(daemon.ok(), "%s", std::string(daemon.status().message()).c_str());
  daemon_ = *std::move(daemon);
  UniqueFd listener = SocketNamed({static_cast<uint32_t>(getpid()), number_, UINT32_MAX});
  KVPOOL_CHECK(listen(listener.get(), 16) == 0, "listen: errno %d", errno);
  AttachServerOptions attach;
  attach.max_unbound = limits % 4 == 0 ? 256 : 5;
  attach.max_unbound_per_uid = limits / 4 % 4 == 0 ? 64 : 2;
  attach.max_connections = limits / 16 % 4 == 0 ? 4096 : 6;
  attach.max_queued_frames = 3;
  attach.fd_ceiling = limits / 64 == 3 ? listener.get() + 12 : 4000;
  absl::StatusOr<std::shared_ptr<AttachMailbox>> mailbox = AttachMailbox::Make();
  KVPOOL_CHECK(mailbox.ok(), "%s", std::string(mailbox.status().message()).c_str());
  auto loop = AttachLoop::Open(attach, Events(), std::move(listener), *std::move(mailbox), Senses());
  KVPOOL_CHECK(loop.ok(), "%s", std::string(loop.status().message()).c_str());
  loop_ = *std::move(loop);
  Connect();
}

// Everybody goes. What the daemon was told must have an end then.
Story::~Story() {
  clients_.clear();
  for (Process& process : processes_) EndProcess(&process);
  // Each turn handles 16 frames of a connection; after the last one those go that never read their farewell.
  for (int i = 0; i < 8; ++i) RunLoop();
  clock_.Advance(10000);
  RunLoop();
  KVPOOL_CHECK(loop_->Stats().connections == 0, "%lu connections stay", loop_->Stats().connections);
  for (const auto& [id, attachment] : attachments_) {
    KVPOOL_CHECK(attachment.hung_up, "no hang-up of connection %lu", static_cast<uint64_t>(id));
    KVPOOL_CHECK(attachment.dead || attachment.given_up || !attachment.awaited,
                 "no end of the process behind connection %lu", static_cast<uint64_t>(id));
  }
  loop_.reset();
  daemon_.reset();
  KVPOOL_CHECK(script_.alive == 0, "%d slabs stay", script_.alive.load());
}

AttachEvents Story::Events() {
  return {
      .attached = [this](std::shared_ptr<AttachPeer> peer, const PeerCredentials& credentials,
                         const v1::AttachHello& hello) -> absl::StatusOr<Daemon::Welcome> {
        const uint32_t process = credentials.gid;
        KVPOOL_CHECK(!processes_[process].ended, "pid %ld has ended and is welcome", credentials.pid);
        absl::StatusOr<Daemon::Welcome> welcome =
            daemon_->OnAttached(std::make_shared<NotingPeer>(this, std::move(peer)), credentials, hello);
        if (welcome.ok()) {
          const bool is_new = attachments_.try_emplace(welcome->id, Attachment{process}).second;
          KVPOOL_CHECK(is_new, "connection %lu is known", static_cast<uint64_t>(welcome->id));
        }
        return welcome;
      },
      .slab_ack =
          [this](AttachId id, const v1::SlabAck& ack) {
            KVPOOL_CHECK(!attachments_.at(id).hung_up, "connection %lu speaks after its end",
                         static_cast<uint64_t>(id));
            daemon_->OnSlabAck(id, ack);
          },
      .slab_left =
          [this](AttachId id, const v1::SlabLeft& left) {
            KVPOOL_CHECK(!attachments_.at(id).hung_up, "connection %lu speaks after its end",
                         static_cast<uint64_t>(id));
            daemon_->OnSlabLeft(id, left);
          },
      .hangup =
          [this](AttachId id) {
            Attachment& attachment = attachments_.at(id);
            KVPOOL_CHECK(!attachment.hung_up, "connection %lu hangs up twice", static_cast<uint64_t>(id));
            attachment.hung_up = true;
            attachment.awaited = daemon_->OnHangup(id);
            return attachment.awaited;
          },
      .process_dead =
          [this](AttachId id) {
            Attachment& attachment = attachments_.at(id);
            KVPOOL_CHECK(processes_[attachment.process].ended, "pid %ld lives and is counted as dead",
                         processes_[attachment.process].pid);
            KVPOOL_CHECK(!attachment.dead, "the process of connection %lu dies twice",
                         static_cast<uint64_t>(id));
            attachment.dead = true;
            daemon_->OnProcessDead(id);
          },
  };
}

AttachSenses Story::Senses() {
  return {.clock = &clock_,
          .credentials = [this](int socket) -> absl::StatusOr<PeerCredentials> {
            if (input_.OneIn(64)) return absl::UnavailableError("SO_PEERCRED: for a test");
            const uint32_t process = ProcessBehind(socket);
            // A small buffer is full after a few frames that the peer does not read.
            const int small = 1;
            if (process % 2 == 1) setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
            const Process& behind = processes_[process];
            return PeerCredentials{.pid = behind.pid, .uid = behind.uid, .gid = process};
          },
          .pidfd = [this](int socket, const PeerCredentials& credentials) -> absl::StatusOr<UniqueFd> {
            const uint32_t process = ProcessBehind(socket);
            KVPOOL_CHECK(process == credentials.gid, "the credentials are of another process");
            if (input_.OneIn(64)) return absl::UnavailableError("SO_PEERPIDFD: for a test");
            UniqueFd pidfd(fcntl(processes_[process].end.get(), F_DUPFD_CLOEXEC, 0));
            if (!pidfd.valid()) return absl::UnavailableError("SO_PEERPIDFD: Too many open files");
            return pidfd;
          }};
}

uint32_t Story::ProcessBehind(int socket) const {
  Address address;
  KVPOOL_CHECK(getpeername(socket, address.get(), &address.bytes) == 0, "getpeername: errno %d", errno);
  Name whose;
  std::memcpy(&whose, address.name.sun_path + 1, sizeof(whose));
  return whose.process;
}

void Story::Run() {
  for (int i = 0; i < kMaxActions && !input_.empty(); ++i) Act();
}

void Story::Act() {
  if (clients_.empty()) return Connect();
  switch (input_.Below(24)) {
    case 0:
      return Connect();
    case 1:
      return HangUp();
    case 2:
      return EndProcess(&processes_[input_.Byte() % processes_.size()]);
    case 3:
    case 4:
      return SayHello(&Any());
    case 5: {
      Client& client = Any();
      client.faultless = false;
      const size_t size = input_.Byte();
      return SendBytes(&client, input_.Bytes(size), 0);
    }
    case 6: {
      // One byte over and over, around the longest frame and far beyond.
      Client& client = Any();
      client.faultless = false;
      static constexpr std::array<size_t, 6> kSizes = {0, 1, 4095, 4096, 4097, 65536};
      const size_t size = kSizes[input_.Below(kSizes.size())];
      return SendBytes(&client, std::string(size, static_cast<char>(input_.Byte())), 0);
    }
    case 7:
      return SendOddFrame(&Any());
    case 8: {
      v1::AttachFrame ack;
      ack.mutable_slab_ack()->set_slab(static_cast<uint32_t>(input_.Number()));
      if (input_.OneIn(4)) ack.mutable_slab_ack()->set_error(std::string(input_.Number() % 3000, 'e'));
      Client& client = Any();
      client.faultless = client.faultless && client.said_hello;
      return SendBytes(&client, ack.SerializeAsString(), 0);
    }
    case 9:
      return Acknowledge(&Any());
    case 10:
    case 11:
      return OpenSession(&Any());
    case 12:
      return JoinSession(&Any());
    case 13:
      return CloseSession(&Any());
    case 14:
      clock_.Advance(input_.Byte() * 40);
      return daemon_->HousekeepOnce();
    case 15:
      return daemon_->HousekeepOnce();
    case 16:
      return RunOutOfDescriptors();
    case 17:
    case 18:
    case 19:
      return Read(&Any());
    default:
      return RunLoop();
  }
}

// ------------------------------------------------------------------------------------------------- processes

void Story::Connect() {
  if (clients_.size() == kMaxClients) return;
  const uint8_t whose = input_.Byte();
  const bool is_new = processes_.empty() || (whose % 3 == 0 && processes_.size() < kMaxProcesses);
  if (is_new) {
    // Some are in a pid namespace that is not visible here, and some have the pid of one that is gone.
    int64_t pid = whose % 16 == 15 ? 0 : 100 + static_cast<int64_t>(processes_.size());
    if (!processes_.empty() && processes_.back().ended && whose / 16 % 2 == 0) pid = processes_.back().pid;
    processes_.push_back({.pid = pid,
                          .uid = 1000u + whose % 2,
                          .end = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
                          .ended = false});
  }
  const auto process = static_cast<uint32_t>(is_new ? processes_.size() - 1 : whose % processes_.size());
  const auto self = static_cast<uint32_t>(getpid());
  UniqueFd socket = SocketNamed({self, number_ << 8 | ++sockets_, process});
  Address listener({self, number_, UINT32_MAX});
  // The backlog may be full, and then the listener is not there for this one.
  if (connect(socket.get(), listener.get(), listener.bytes) != 0) return;
  clients_.push_back({.socket = std::move(socket), .process = process});
}

void Story::HangUp() {
  const size_t index = input_.Byte() % clients_.size();
  switch (input_.Below(4)) {
    case 0:
      // Half of it is as good as all.
      shutdown(clients_[index].socket.get(), SHUT_WR);
      return;
    case 1:
      shutdown(clients_[index].socket.get(), SHUT_RD);
      return;
    default:
      clients_.erase(clients_.begin() + static_cast<ptrdiff_t>(index));
  }
}

void Story::EndProcess(Process* process) {
  if (std::exchange(process->ended, true)) return;
  KVPOOL_CHECK(eventfd_write(process->end.get(), 1) == 0, "eventfd_write: errno %d", errno);
}

void Story::RunOutOfDescriptors() {
  rlimit before;
  KVPOOL_CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "getrlimit: errno %d", errno);
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(LowestFreeDescriptor()) + input_.Below(3);
  KVPOOL_CHECK(setrlimit(RLIMIT_NOFILE, &tight) == 0, "setrlimit: errno %d", errno);
  RunLoop();
  KVPOOL_CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit: errno %d", errno);
  // The loop may rest, and takes note of the time at the end of a turn.
  clock_.Advance(Acceptor::kPauseMs);
  RunLoop();
}

// ----------------------------------------------------------------------------------------------------- frames

void Story::SayHello(Client* client) {
  v1::AttachFrame hello;
  const uint8_t how = input_.Byte();
  hello.mutable_hello()->set_protocol(how < 240 ? 1 : how);
  hello.mutable_hello()->set_client_name(std::string(how % 16 == 15 ? 129 : how % 16, 'n'));
  client->faultless = client->faultless && !client->said_hello;
  client->said_hello = true;
  SendBytes(client, hello.SerializeAsString(), how / 16 == 7 ? 1 + how % 3 : 0);
}

void Story::SendOddFrame(Client* client) {
  client->faultless = false;
  v1::AttachFrame frame;
  switch (input_.Below(4)) {
    case 0:
      frame.mutable_welcome()->set_attach_token(client->attach_token);
      break;
    case 1:
      frame.mutable_slab()->set_slab(static_cast<uint32_t>(input_.Number()));
      break;
    case 2:
      frame.mutable_slab_ready()->set_capacity_blocks(static_cast<uint32_t>(input_.Number()));
      break;
    default:
      frame.mutable_closed()->set_reason(std::string(input_.Byte(), 'c'));
  }
  SendBytes(client, frame.SerializeAsString(), input_.Below(3));
}

void Story::SendBytes(Client* client, const std::string& bytes, uint32_t descriptors) {
  if (descriptors > 0) client->faultless = false;
  iovec part{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(4 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptors > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
    const int file = AnyFile();
    for (uint32_t i = 0; i < descriptors; ++i) {
      std::memcpy(CMSG_DATA(rights) + i * sizeof(int), &file, sizeof(int));
    }
  }
  // What the daemon does not take, because it hung up or does not read, is lost to nobody.
  (void)sendmsg(client->socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Story::Acknowledge(Client* client) {
  for (; !client->unacknowledged.empty(); client->unacknowledged.pop_front()) {
    v1::AttachFrame ack;
    ack.mutable_slab_ack()->set_slab(client->unacknowledged.front());
    SendBytes(client, ack.SerializeAsString(), 0);
  }
}

void Story::Read(Client* client) {
  for (int i = 0; i < 16; ++i) {
    v1::AttachFrame frame;
    UniqueFd fd;
    const absl::StatusOr<ReceiveOutcome> received = ReceiveFrame(client->socket.get(), &frame, &fd);
    KVPOOL_CHECK(received.ok(), "what the daemon sends: %s",
                 std::string(received.status().message()).c_str());
    if (*received != ReceiveOutcome::kFrame) return;
    KVPOOL_CHECK(fd.valid() == frame.has_slab(), "a descriptor goes with each slab, and with nothing else");
    OnFrame(client, frame);
  }
}

void Story::OnFrame(Client* client, const v1::AttachFrame& frame) {
  switch (frame.frame_case()) {
    case v1::AttachFrame::kWelcome:
      KVPOOL_CHECK(client->said_hello && client->attach_token.empty(), "a welcome that nobody asked for");
      client->attach_token = frame.welcome().attach_token();
      KVPOOL_CHECK(client->attach_token.size() == 32, "a token of %zu bytes", client->attach_token.size());
      KVPOOL_CHECK(tokens_.insert(client->attach_token).second, "a token for two connections");
      return;
    case v1::AttachFrame::kSlab:
      KVPOOL_CHECK(!client->attach_token.empty(), "a slab before the welcome");
      return client->unacknowledged.push_back(frame.slab().slab());
    case v1::AttachFrame::kSlabReady:
      return;
    case v1::AttachFrame::kClosed: {
      const std::string& reason = frame.closed().reason();
      KVPOOL_CHECK(!reason.empty(), "closed without a reason");
      for (const char* fault : {"attach frame", "first frame", "only slab_ack"}) {
        KVPOOL_CHECK(!client->faultless || !absl::StrContains(reason, fault),
                     "a faultless client is told: %s", reason.c_str());
      }
      return;
    }
    case v1::AttachFrame::kHello:
    case v1::AttachFrame::kSlabAck:
    case v1::AttachFrame::FRAME_NOT_SET:
      KVPOOL_CHECK(false, "the daemon sends frame %d", frame.frame_case());
  }
}

// --------------------------------------------------------------------------------------------------- sessions

void Story::OpenSession(Client* client) {
  const uint8_t terms = input_.Byte();
  v1::OpenSession request;
  request.set_attach_token(client->attach_token);
  *request.mutable_layout() = OpaqueLayout();
  request.mutable_fingerprint()->set_digest(terms % 4 == 3 ? "other" : "model");
  request.set_guaranteed_blocks(terms / 4 % 8 * 16);
  v1::OpenSessionResult result;
  if (!daemon_->OpenSession(request, &result).ok()) return;
  KVPOOL_CHECK(client->session == 0, "a token that serves twice");
  client->session = result.session();
  client->member_token = result.member_token();
}

void Story::JoinSession(Client* client) {
  const Client& inviter = Any();
  v1::AddMember request;
  request.set_attach_token(client->attach_token);
  request.set_session(inviter.session);
  request.set_invitation(inviter.member_token);
  request.mutable_role()->set_scheduler(true);
  *request.mutable_layout() = OpaqueLayout();
  request.mutable_fingerprint()->set_digest("model");
  v1::AddMemberResult result;
  if (!daemon_->AddMember(request, &result).ok()) return;
  KVPOOL_CHECK(client->session == 0, "a token that serves twice");
  client->session = inviter.session;
  client->member_token = result.member_token();
}

void Story::CloseSession(Client* client) {
  if (input_.OneIn(2)) {
    v1::EndSessionRequest request;
    request.set_session(client->session);
    v1::EndSessionResponse response;
    daemon_->EndSession(request, &response).IgnoreError();
    return;
  }
  v1::Call call;
  call.set_member_token(client->member_token);
  call.set_sequence(1);
  v1::Operation operation;
  operation.mutable_close_session();
  daemon_->ApplyUnary(call, std::move(operation), [](const v1::OperationResult&) {});
}

}  // namespace
}  // namespace kvpool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvpool::fuzz;
  static const bool quiet =
      (kvpool::SetLog({.level = kvpool::LogLevel::kError}), google::protobuf::SetLogHandler(nullptr), true);
  (void)quiet;
  const int open = OpenDescriptors();
  {
    Input input(data, size);
    Story(&input).Run();
  }
  KVPOOL_CHECK(OpenDescriptors() == open, "%d descriptors were open, and %d are", open, OpenDescriptors());
  return 0;
}
