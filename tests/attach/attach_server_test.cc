// The attach server against raw sockets: clients that keep to the protocol, and clients that don't.
#include "server/attach/attach_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/support/attach_socket.h"
#include "proto/support/mutex.h"
#include "tests/support/send_signal.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

// Bounds waits that end by themselves much earlier.
constexpr auto kPatience = std::chrono::seconds(20);

// A daemon that remembers what it was told.
class Recorder {
 public:
  AttachEvents Events() {
    return {
        .attached = [this](std::shared_ptr<AttachPeer> peer, const PeerCredentials& credentials,
                           const v1::AttachHello& hello) -> absl::StatusOr<Daemon::Welcome> {
          MutexLock lock(&mu_);
          if (refuse_) return absl::ResourceExhaustedError("1024 sessions, the limit");
          peers_.push_back(std::move(peer));
          credentials_.push_back(credentials);
          credentials_.back().pidfd = nullptr;  // Those that are open are counted.
          Daemon::Welcome welcome;
          welcome.id = AttachId{peers_.size()};
          welcome.frame.mutable_welcome()->set_attach_token(std::string(32, 't'));
          welcome.frame.mutable_welcome()->set_daemon_epoch(peers_.size());
          Note(absl::StrCat("attached ", peers_.size()));
          return welcome;
        },
        .slab_ack =
            [this](AttachId id, const v1::SlabAck& ack) {
              MutexLock lock(&mu_);
              Note(absl::StrCat("ack ", static_cast<uint64_t>(id), " slab ", ack.slab()));
            },
        .slab_left =
            [this](AttachId id, const v1::SlabLeft& left) {
              MutexLock lock(&mu_);
              Note(absl::StrCat("left ", static_cast<uint64_t>(id), " slab ", left.slab()));
            },
        .hangup =
            [this](AttachId id) {
              MutexLock lock(&mu_);
              Note(absl::StrCat("hangup ", static_cast<uint64_t>(id)));
              return awaited_.count(id) > 0;
            },
        .process_dead =
            [this](AttachId id) {
              MutexLock lock(&mu_);
              Note(absl::StrCat("dead ", static_cast<uint64_t>(id)));
            },
    };
  }

  bool WaitFor(const std::string& event, int times = 1) {
    const auto deadline = steady_clock::now() + kPatience;
    MutexLock lock(&mu_);
    while (CountLocked(event) < times) {
      if (!changed_.WaitUntil(&mu_, deadline)) return false;
    }
    return true;
  }
  int Count(const std::string& event) {
    MutexLock lock(&mu_);
    return CountLocked(event);
  }
  std::shared_ptr<AttachPeer> Peer(size_t id) {
    MutexLock lock(&mu_);
    return peers_.at(id - 1);
  }
  PeerCredentials Credentials(size_t id) {
    MutexLock lock(&mu_);
    return credentials_.at(id - 1);
  }
  // From now on a session is being opened with this connection's token.
  void Await(size_t id) {
    MutexLock lock(&mu_);
    awaited_.insert(AttachId{id});
  }
  // The session was opened.
  void Bind(size_t id) {
    Await(id);
    Peer(id)->Bound();
  }
  void RefuseEverybody() {
    MutexLock lock(&mu_);
    refuse_ = true;
  }

 private:
  void Note(std::string event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    log_.push_back(std::move(event));
    changed_.SignalAll();
  }
  int CountLocked(const std::string& event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return static_cast<int>(std::count(log_.begin(), log_.end(), event));
  }

  Mutex mu_;
  CondVar changed_;
  bool refuse_ ABSL_GUARDED_BY(mu_) = false;
  std::set<AttachId> awaited_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> log_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<AttachPeer>> peers_ ABSL_GUARDED_BY(mu_);
  std::vector<PeerCredentials> credentials_ ABSL_GUARDED_BY(mu_);
};

class AttachServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/kvpool-attach-XXXXXX";
    ASSERT_NE(mkdtemp(pattern), nullptr);
    directory_ = pattern;
    options_.path = directory_ + "/attach";
    options_.fd_ceiling = 4000;
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }

  void Start() {
    auto server = AttachServer::Start(options_, recorder_.Events());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
  }

  UniqueFd Connect() {
    auto socket = ConnectAttachSocket(options_.path);
    EXPECT_TRUE(socket.ok()) << socket.status();
    const timeval patience{.tv_sec = std::chrono::seconds(kPatience).count(), .tv_usec = 0};
    setsockopt(socket->get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    return std::move(*socket);
  }
  static v1::AttachFrame Hello() {
    v1::AttachFrame frame;
    frame.mutable_hello()->set_protocol(1);
    frame.mutable_hello()->set_client_name("test");
    return frame;
  }
  static v1::AttachFrame Ack(uint32_t slab) {
    v1::AttachFrame frame;
    frame.mutable_slab_ack()->set_slab(slab);
    return frame;
  }
  static v1::AttachFrame Receive(const UniqueFd& socket, UniqueFd* fd = nullptr) {
    v1::AttachFrame frame;
    UniqueFd ignored;
    const auto received = ReceiveFrame(socket.get(), &frame, fd == nullptr ? &ignored : fd);
    EXPECT_TRUE(received.ok()) << received.status();
    if (!received.ok() || *received != ReceiveOutcome::kFrame) frame.Clear();
    return frame;
  }
  // Connects, says hello, and answers with the socket once it is welcome.
  UniqueFd Attach() {
    UniqueFd socket = Connect();
    EXPECT_EQ(SendFrame(socket.get(), Hello()).value(), SendOutcome::kSent);
    EXPECT_TRUE(Receive(socket).has_welcome());
    return socket;
  }
  static std::string ClosedReason(const UniqueFd& socket) {
    const v1::AttachFrame frame = Receive(socket);
    EXPECT_TRUE(frame.has_closed()) << frame.DebugString();
    return frame.closed().reason();
  }
  static bool HungUp(const UniqueFd& socket) {
    pollfd waiting{.fd = socket.get(), .events = POLLRDHUP, .revents = 0};
    return poll(&waiting, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count())) == 1;
  }
  uint64_t Refused(const std::string& reason) { return server_->Stats().refused[reason]; }

  std::string directory_;
  AttachServerOptions options_;
  Recorder recorder_;
  std::unique_ptr<AttachServer> server_;
};

TEST_F(AttachServerTest, WelcomesAndKnowsThePeer) {
  Start();
  struct stat file;
  ASSERT_EQ(stat(options_.path.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0660u);
  UniqueFd socket = Attach();
  EXPECT_EQ(recorder_.Credentials(1).pid, getpid());
  EXPECT_EQ(recorder_.Credentials(1).uid, getuid());
  EXPECT_EQ(server_->Stats().connections, 1u);

  ASSERT_EQ(SendFrame(socket.get(), Ack(7)).value(), SendOutcome::kSent);
  EXPECT_TRUE(recorder_.WaitFor("ack 1 slab 7"));
  v1::AttachFrame left;
  left.mutable_slab_left()->set_slab(7);
  ASSERT_EQ(SendFrame(socket.get(), left).value(), SendOutcome::kSent);
  EXPECT_TRUE(recorder_.WaitFor("left 1 slab 7"));
}

TEST_F(AttachServerTest, PassesDescriptorsInOrder) {
  Start();
  UniqueFd socket = Attach();
  UniqueFd memory(memfd_create("slab", MFD_CLOEXEC));
  recorder_.Bind(1);
  for (uint32_t i = 0; i < 40; ++i) {
    v1::AttachFrame slab;
    slab.mutable_slab()->set_slab(i);
    recorder_.Peer(1)->Send(slab, UniqueFd(dup(memory.get())));
  }
  for (uint32_t i = 0; i < 40; ++i) {
    UniqueFd fd;
    EXPECT_EQ(Receive(socket, &fd).slab().slab(), i);
    EXPECT_TRUE(fd.valid());
  }
}

TEST_F(AttachServerTest, SilenceEndsAfterTheTimeout) {
  options_.hello_timeout_ms = 50;
  Start();
  UniqueFd socket = Connect();
  EXPECT_EQ(ClosedReason(socket), "no hello within 50 ms");
  EXPECT_TRUE(HungUp(socket));
  EXPECT_EQ(Refused("hello_timeout"), 1u);
}

TEST_F(AttachServerTest, RefusesWhatBreaksTheProtocol) {
  Start();
  {
    UniqueFd socket = Connect();
    const std::string garbage(64, '\xff');
    ASSERT_GT(send(socket.get(), garbage.data(), garbage.size(), 0), 0);
    EXPECT_TRUE(absl::StrContains(ClosedReason(socket), "not an AttachFrame"));
  }
  {
    UniqueFd socket = Connect();
    const std::string huge(100000, 'x');
    ASSERT_GT(send(socket.get(), huge.data(), huge.size(), 0), 0);
    EXPECT_TRUE(absl::StrContains(ClosedReason(socket), "4096"));
  }
  {
    UniqueFd socket = Connect();
    v1::AttachFrame hello = Hello();
    hello.mutable_hello()->set_protocol(9);
    ASSERT_EQ(SendFrame(socket.get(), hello).value(), SendOutcome::kSent);
    const std::string reason = ClosedReason(socket);
    EXPECT_TRUE(absl::StrContains(reason, "9") && absl::StrContains(reason, "1")) << reason;
  }
  {
    UniqueFd socket = Connect();
    v1::AttachFrame hello = Hello();
    hello.mutable_hello()->set_client_name(std::string(129, 'n'));
    ASSERT_EQ(SendFrame(socket.get(), hello).value(), SendOutcome::kSent);
    EXPECT_TRUE(absl::StrContains(ClosedReason(socket), "128"));
  }
  {
    UniqueFd socket = Connect();
    ASSERT_EQ(SendFrame(socket.get(), Ack(0)).value(), SendOutcome::kSent);
    EXPECT_EQ(ClosedReason(socket), "the first frame must be hello");
  }
  {
    UniqueFd socket = Attach();
    ASSERT_EQ(SendFrame(socket.get(), Hello()).value(), SendOutcome::kSent);
    EXPECT_EQ(ClosedReason(socket), "only slab_ack and slab_left may follow hello");
    EXPECT_TRUE(recorder_.WaitFor("hangup 1"));
  }
}

TEST_F(AttachServerTest, DescriptorsFromClientsAreRefusedAndNotKept) {
  Start();
  UniqueFd socket = Connect();
  int pipe_ends[2];
  ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  UniqueFd reader(pipe_ends[0]), writer(pipe_ends[1]);
  const absl::StatusOr<SendOutcome> sent = SendFrame(socket.get(), Hello(), writer.get());
  if (!sent.ok()) {  // Linux 6.16 and later let nobody send one.
    EXPECT_TRUE(absl::StrContains(sent.status().message(), strerror(EPERM))) << sent.status();
    return;
  }
  ASSERT_EQ(*sent, SendOutcome::kSent);
  writer.Reset();
  EXPECT_TRUE(absl::StrContains(ClosedReason(socket), "descriptors"));
  // The pipe ends only once nobody holds its other end.
  pollfd waiting{.fd = reader.get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&waiting, 1, 20000), 1);
  EXPECT_NE(waiting.revents & POLLHUP, 0);
}

TEST_F(AttachServerTest, PacketsOfNoBytesAreNotDeath) {
  Start();
  UniqueFd socket = Attach();
  for (int i = 0; i < 100; ++i) ASSERT_EQ(send(socket.get(), "", 0, 0), 0);
  ASSERT_EQ(SendFrame(socket.get(), Ack(1)).value(), SendOutcome::kSent);
  EXPECT_TRUE(recorder_.WaitFor("ack 1 slab 1"));
  EXPECT_EQ(recorder_.Count("hangup 1"), 0);
}

// Runs `body` with a connected socket in a child process that then stays until it is killed.
class Child {
 public:
  template <typename Body>
  explicit Child(Body body) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      body();
      if (write(ends[1], "r", 1) != 1) _exit(1);
      for (;;) pause();
    }
    close(ends[1]);
    char ready;
    EXPECT_EQ(read(ends[0], &ready, 1), 1);
    close(ends[0]);
  }
  ~Child() { Kill(); }
  pid_t pid() const { return pid_; }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
};

int CountPidfds() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // One of them is the iterator's own descriptor.
    count += absl::StrContains(std::filesystem::read_symlink(entry, gone).string(), "pidfd");
  }
  return count;
}

TEST_F(AttachServerTest, HangupOfAMemberLeavesItsProcessWatched) {
  Start();
  UniqueFd member = Attach();
  recorder_.Bind(1);
  // A second connection's round trip shows that the letter was read.
  UniqueFd other = Attach();
  member.Reset();
  EXPECT_TRUE(recorder_.WaitFor("hangup 1"));
  other.Reset();
  EXPECT_TRUE(recorder_.WaitFor("hangup 2"));
  UniqueFd third = Attach();
  EXPECT_EQ(recorder_.Count("dead 1") + recorder_.Count("dead 2"), 0);
}

// An engine that hangs up and lives on may still have work on the device. That holds before the attach server
// knows that the connection is bound, too, which here it never learns.
TEST_F(AttachServerTest, HangupWhileItsSessionIsOpenedIsNotDeath) {
  Start();
  recorder_.Await(1);
  Child child([this] { Attach(); });
  ASSERT_TRUE(recorder_.WaitFor("hangup 1"));
  UniqueFd other = Attach();  // The server is done with the hang-up.
  EXPECT_EQ(recorder_.Count("dead 1"), 0);
  child.Kill();
  EXPECT_TRUE(recorder_.WaitFor("dead 1"));
}

TEST_F(AttachServerTest, AConnectionThatWasNobodysIsForgotten) {
  Start();
  UniqueFd member = Attach();
  recorder_.Await(1);
  Child child([this] { Attach(); });
  ASSERT_TRUE(recorder_.WaitFor("hangup 2"));
  UniqueFd third = Attach();  // The server is done with the hang-up.
  EXPECT_EQ(CountPidfds(), 1) << "that of this process";
  child.Kill();
  member.Reset();
  ASSERT_TRUE(recorder_.WaitFor("hangup 1"));
  third.Reset();
  ASSERT_TRUE(recorder_.WaitFor("hangup 3"));
  UniqueFd fourth = Attach();
  EXPECT_EQ(CountPidfds(), 1) << "its first connection is awaited";
  EXPECT_EQ(recorder_.Count("dead 1") + recorder_.Count("dead 2") + recorder_.Count("dead 3"), 0);
}

TEST_F(AttachServerTest, DeathOfAProcessIsBothHangupAndDeath) {
  Start();
  Child child([this] { Attach().Release(); });
  ASSERT_TRUE(recorder_.WaitFor("attached 1"));
  EXPECT_EQ(recorder_.Credentials(1).pid, child.pid());
  recorder_.Bind(1);
  child.Kill();
  EXPECT_TRUE(recorder_.WaitFor("hangup 1"));
  EXPECT_TRUE(recorder_.WaitFor("dead 1"));
}

TEST_F(AttachServerTest, AForkedChildDoesNotKeepTheMemberAlive) {
  Start();
  int grandchild_pipe[2];
  ASSERT_EQ(pipe2(grandchild_pipe, O_CLOEXEC), 0);
  Child child([&] {
    UniqueFd socket = Attach();
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      for (;;) pause();  // Holds the socket.
    }
    if (write(grandchild_pipe[1], &grandchild, sizeof(grandchild)) != sizeof(grandchild)) _exit(1);
    socket.Release();
  });
  pid_t grandchild = 0;
  ASSERT_EQ(read(grandchild_pipe[0], &grandchild, sizeof(grandchild)),
            static_cast<ssize_t>(sizeof(grandchild)));
  recorder_.Bind(1);
  child.Kill();
  EXPECT_TRUE(recorder_.WaitFor("dead 1"));
  EXPECT_TRUE(recorder_.WaitFor("hangup 1"));
  EXPECT_EQ(kill(grandchild, 0), 0);
  kill(grandchild, SIGKILL);
  close(grandchild_pipe[0]);
  close(grandchild_pipe[1]);
}

// A hello on the socket of a process that has ended comes from another process than the one
// that would be watched.
TEST_F(AttachServerTest, AnEndedProcessHasNoMember) {
  Start();
  int ready[2], go[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(go, O_CLOEXEC), 0);
  const pid_t connector = fork();
  if (connector == 0) {
    UniqueFd socket = Connect();
    if (fork() == 0) {
      char byte;
      close(go[1]);
      const bool told = read(go[0], &byte, 1) == 0;
      const bool sent = told && SendFrame(socket.get(), Hello()).ok();
      const char answer = sent && Receive(socket).has_closed() ? 'c' : '?';
      _exit(write(ready[1], &answer, 1) == 1 ? 0 : 1);
    }
    _exit(0);
  }
  // A zombie counts as ended: it is reaped only after the answer.
  siginfo_t ended;
  ASSERT_EQ(waitid(P_PID, connector, &ended, WEXITED | WNOWAIT), 0);
  close(go[1]);
  char answer = 0;
  EXPECT_EQ(read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'c') << "refused";
  EXPECT_EQ(Refused("process"), 1u);
  EXPECT_EQ(recorder_.Count("attached 1"), 0);
  waitpid(connector, nullptr, 0);
  for (const int fd : {ready[0], ready[1], go[0]}) close(fd);
}

TEST_F(AttachServerTest, AStoppedProcessIsNotDead) {
  Start();
  Child child([this] { Attach().Release(); });
  recorder_.Bind(1);
  StopProcess(child.pid());
  UniqueFd other = Attach();  // The server goes on.
  EXPECT_EQ(recorder_.Count("hangup 1"), 0);
  EXPECT_EQ(recorder_.Count("dead 1"), 0);
  child.Kill();
  EXPECT_TRUE(recorder_.WaitFor("dead 1"));
}

TEST_F(AttachServerTest, ProcessesThatConnectOverAndOverCostOneDescriptor) {
  Start();
  for (uint64_t i = 1; i <= 200; ++i) {
    UniqueFd socket = Attach();
    recorder_.Bind(i);
    socket.Reset();
    ASSERT_TRUE(recorder_.WaitFor(absl::StrCat("hangup ", i)));
  }
  size_t open_files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++open_files;
  EXPECT_LT(open_files, 100u);
}

TEST_F(AttachServerTest, CloseSaysWhyAndHangsUp) {
  Start();
  UniqueFd socket = Attach();
  recorder_.Peer(1)->Close("session 7 ended: an operator asked");
  EXPECT_EQ(ClosedReason(socket), "session 7 ended: an operator asked");
  EXPECT_TRUE(HungUp(socket));
  EXPECT_TRUE(recorder_.WaitFor("hangup 1"));
  recorder_.Peer(1)->Send(Hello(), UniqueFd());  // Nobody is there: it is dropped.
}

TEST_F(AttachServerTest, ALongReasonIsCutBetweenCharacters) {
  Start();
  for (size_t id = 1; id <= 3; ++id) {
    const UniqueFd socket = Attach();
    // As the words of a peer that could not map a slab have it: characters of three bytes, at any offset.
    std::string words(id, ' ');
    for (int i = 0; i < 500; ++i) words += "\u20ac";
    recorder_.Peer(id)->Close(words);
    const std::string reason = ClosedReason(socket);
    EXPECT_GT(reason.size(), 1000u);
    EXPECT_EQ(words.substr(0, reason.size()), reason);
  }
}

TEST_F(AttachServerTest, AClientThatDoesNotReadIsClosed) {
  options_.max_queued_frames = 16;
  options_.close_timeout_ms = 50;
  Start();
  UniqueFd socket = Attach();
  recorder_.Bind(1);
  UniqueFd other = Attach();
  v1::AttachFrame ready;
  ready.mutable_slab_ready()->set_capacity_blocks(1);
  for (int i = 0; i < 5000; ++i) recorder_.Peer(1)->Send(ready, UniqueFd());
  EXPECT_TRUE(recorder_.WaitFor("hangup 1"));
  EXPECT_TRUE(HungUp(socket));
  EXPECT_EQ(Refused("slow_reader"), 1u);
  ASSERT_EQ(SendFrame(other.get(), Ack(3)).value(), SendOutcome::kSent);
  EXPECT_TRUE(recorder_.WaitFor("ack 2 slab 3"));
}

TEST_F(AttachServerTest, TheDaemonsRefusalReachesTheClient) {
  recorder_.RefuseEverybody();
  Start();
  UniqueFd socket = Connect();
  ASSERT_EQ(SendFrame(socket.get(), Hello()).value(), SendOutcome::kSent);
  EXPECT_EQ(ClosedReason(socket), "1024 sessions, the limit");
}

TEST_F(AttachServerTest, ThousandsOfHalfOpenConnectionsHurtNobody) {
  Start();
  UniqueFd member = Attach();
  recorder_.Bind(1);
  std::vector<UniqueFd> half_open;
  for (int i = 0; i < 2000; ++i) half_open.push_back(Connect());
  // The member still talks, and a newcomer still gets in.
  ASSERT_EQ(SendFrame(member.get(), Ack(1)).value(), SendOutcome::kSent);
  EXPECT_TRUE(recorder_.WaitFor("ack 1 slab 1"));
  UniqueFd newcomer = Attach();
  EXPECT_EQ(recorder_.Count("hangup 1"), 0);
  EXPECT_GE(Refused("displaced"), 1900u);
  EXPECT_LE(server_->Stats().connections, 70u);
  EXPECT_TRUE(absl::StrContains(ClosedReason(half_open[0]), "displaced"));
}

TEST_F(AttachServerTest, ConnectionsThatNeverOpenASessionAreFew) {
  options_.max_unbound_per_uid = 4;
  Start();
  std::vector<UniqueFd> greeted;
  for (int i = 0; i < 4; ++i) greeted.push_back(Attach());
  UniqueFd fifth = Connect();
  ASSERT_EQ(SendFrame(fifth.get(), Hello()).value(), SendOutcome::kSent);
  EXPECT_TRUE(absl::StrContains(ClosedReason(fifth), "4 connections without a session"));
  recorder_.Bind(2);
  UniqueFd sixth = Attach();
}

TEST_F(AttachServerTest, SaysWhenItIsFull) {
  options_.max_connections = 3;
  Start();
  std::vector<UniqueFd> open;
  for (int i = 0; i < 3; ++i) open.push_back(Attach());
  EXPECT_TRUE(absl::StrContains(ClosedReason(Connect()), "3 attach connections, its limit"));
  EXPECT_EQ(Refused("connections"), 1u);
}

TEST_F(AttachServerTest, OutOfOpenFilesIsSaidAndSurvived) {
  Start();
  UniqueFd member = Attach();
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  // Two clients connect while the limit is in force, with these sockets; the server has none left
  // to accept them with.
  UniqueFd clients[2] = {UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)),
                         UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0))};
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(clients[1].get() + 1);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<UniqueFd> filler;
  for (;;) {
    UniqueFd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) break;
    filler.push_back(std::move(fd));
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, options_.path.c_str(), sizeof(address.sun_path) - 1);
  for (UniqueFd& client : clients) {
    ASSERT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_TRUE(absl::StrContains(ClosedReason(client), "open files"));
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  filler.clear();
  UniqueFd newcomer = Attach();
  EXPECT_EQ(Refused("open_files"), 2u);
}

TEST_F(AttachServerTest, ShutdownIsSaid) {
  Start();
  UniqueFd socket = Attach();
  server_.reset();
  EXPECT_EQ(ClosedReason(socket), "the daemon shuts down");
  EXPECT_EQ(recorder_.Count("hangup 1"), 0);
}

}  // namespace
}  // namespace kvpool
