// The metrics address while daemons give way to each other: who listens there, with which certificate, and what a scraper sees.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/support/unique_fd.h"
#include "tests/client/upgrade_fixture.h"
#include "tests/support/certificates.h"

namespace kvpool {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A port that nobody else gets, which each daemon is to have in turn: as long as this socket is bound the kernel gives it to none who
// takes any port, and as this one does not listen, who names the port and reuses addresses may.
class KeptPort {
 public:
  KeptPort() {
    const int on = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
        getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0)
      number_ = ntohs(address.sin_port);
  }
  // 0: there is none.
  int number() const { return number_; }

 private:
  const UniqueFd socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  int number_ = 0;
};

// The inodes of the sockets that listen there.
std::vector<std::string> ListenersAt(int port) {
  const std::string at = absl::StrFormat(":%04X", port);
  std::vector<std::string> inodes;
  for (const char* const table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    for (std::string line; std::getline(file, line);) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode;
      if (state == "0A" && absl::EndsWith(local, at)) inodes.push_back(inode);
    }
  }
  return inodes;
}

bool HasSocket(pid_t pid, const std::string& inode) {
  std::error_code gone;
  for (const auto& file : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), gone)) {
    if (std::filesystem::read_symlink(file.path(), gone) == "socket:[" + inode + "]") return true;
  }
  return false;
}

class MetricsUpgradeTest : public UpgradeTest {
 protected:
  void SetUp() override {
    if (!Certificates::CanBeMade())
      GTEST_SKIP() << "the openssl program, which makes the certificates, is not installed";
    ASSERT_NO_FATAL_FAILURE(certificates_.Make(R"(
      authorities ours foreign
      for ca in ours foreign; do sign daemon-$ca $ca 2; sign scraper-$ca $ca 2; done
      )"));
    signal(SIGPIPE, SIG_IGN);  // A client writes where the daemon may just have ended.
    certificates_.Use("daemon-ours");
    ASSERT_NE(port_, 0);
    StartWithKeeper({absl::StrCat("--metrics-listen=127.0.0.1:", port_),
                     "--metrics-tls-cert=" + certificates_.File("tls.pem"),
                     "--metrics-tls-key=" + certificates_.File("tls.key"),
                     "--metrics-tls-client-ca=" + certificates_.File("ours.pem")});
  }
  // By one who trusts a daemon of `authority`, and shows `identity`, unless that is empty.
  httplib::Result Get(const std::string& authority, const std::string& identity = "scraper-ours") const {
    auto client = identity.empty() ? std::make_unique<httplib::SSLClient>("127.0.0.1", port_)
                                   : std::make_unique<httplib::SSLClient>(
                                         "127.0.0.1", port_, certificates_.File(identity + ".pem"),
                                         certificates_.File(identity + ".key"));
    client->set_ca_cert_path(certificates_.File(authority + ".pem").c_str());
    client->enable_server_certificate_verification(true);
    client->set_read_timeout(30);
    return client->Get("/metrics");
  }
  // A text that has come whole.
  static bool IsText(const httplib::Result& result) {
    return result && result->status == 200 && absl::StrContains(result->body, "\nkvpool_build_info{") &&
           absl::EndsWith(result->body, "\n");
  }
  bool Serves(const std::string& authority, const std::string& identity = "scraper-ours") const {
    return IsText(Get(authority, identity));
  }
  // The next daemon serves metrics as well: it answers calls before that.
  void UpgradeWhole() const {
    const auto info = Upgrade();
    ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
    ASSERT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_DONE) << info->reason();
    ASSERT_NE(DaemonPid(), 0);
  }
  // Nobody else listens there, the keeper and the daemon before included.
  void ExpectOneListener() const {
    const std::vector<std::string> listeners = ListenersAt(port_);
    ASSERT_EQ(listeners.size(), 1u);
    EXPECT_TRUE(HasSocket(DaemonPid(), listeners[0]));
    EXPECT_FALSE(HasSocket(daemon_->pid(), listeners[0]));
  }

  // Scrapes all the time. A connection that is refused or cut off is made again; whatever else is wrong with a scrape is noted.
  class Scraper {
   public:
    Scraper(const MetricsUpgradeTest* test, std::string authority)
        : thread_([this, test, authority] {
            while (!stop_) {
              const httplib::Result result = test->Get(authority);
              if (IsText(result)) {
                ++scrapes_;
              } else if (result) {
                Note(absl::StrCat("status ", result->status, " and ", result->body.size(), " bytes"));
              } else if (result.error() == httplib::Error::SSLServerVerification ||
                         result.error() == httplib::Error::SSLLoadingCerts) {
                Note(httplib::to_string(result.error()));
              }
            }
          }) {}
    ~Scraper() { End(); }
    void AwaitMore() const {
      const Deadline deadline = Soon();
      for (const int enough = scrapes_ + 3; scrapes_ < enough;) {
        ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "nobody is served";
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    // What was wrong.
    std::vector<std::string> End() {
      stop_ = true;
      if (thread_.joinable()) thread_.join();
      return wrong_;
    }

   private:
    void Note(const std::string& what) { wrong_.push_back(what); }
    std::atomic<bool> stop_{false};
    std::atomic<int> scrapes_{0};
    std::vector<std::string> wrong_;  // The thread's, until it has ended.
    std::thread thread_;
  };

  Certificates certificates_;
  const KeptPort kept_port_;
  const int port_ = kept_port_.number();
};

TEST_F(MetricsUpgradeTest, ScrapesGoOnAndTheNextDaemonAloneListens) {
  auto session = Open();
  ASSERT_NE(session, nullptr);
  Scraper scraper(this, "ours");
  for (int i = 0; i < 5; ++i) {
    ASSERT_NO_FATAL_FAILURE(scraper.AwaitMore());
    const pid_t before = DaemonPid();
    ASSERT_NO_FATAL_FAILURE(UpgradeWhole());
    EXPECT_NE(DaemonPid(), before);
    EXPECT_FALSE(std::filesystem::exists(absl::StrCat("/proc/", before)));
    ASSERT_NO_FATAL_FAILURE(ExpectOneListener());
  }
  ASSERT_NO_FATAL_FAILURE(scraper.AwaitMore());
  EXPECT_THAT(scraper.End(), IsEmpty());
  // It asks for certificates as the first one did.
  EXPECT_FALSE(Serves("ours", ""));
  EXPECT_FALSE(Serves("ours", "scraper-foreign"));
  EXPECT_TRUE(session->status().ok()) << session->status();
}

TEST_F(MetricsUpgradeTest, CertificatesMayChangeBeforeAndAfterIt) {
  EXPECT_TRUE(Serves("ours"));
  certificates_.Use("daemon-foreign");
  EXPECT_TRUE(Serves("foreign"));
  ASSERT_NO_FATAL_FAILURE(UpgradeWhole());
  EXPECT_TRUE(Serves("foreign"));
  EXPECT_FALSE(Serves("ours"));
  certificates_.Use("daemon-ours");
  EXPECT_TRUE(Serves("ours"));
  EXPECT_FALSE(Serves("foreign"));
  ASSERT_NO_FATAL_FAILURE(UpgradeWhole());
  EXPECT_TRUE(Serves("ours"));
}

// The daemon goes on with what it has read; the next one could not read it, and does not come.
TEST_F(MetricsUpgradeTest, FilesThatAreWrongKeepTheDaemonThatServes) {
  const pid_t before = DaemonPid();
  std::ofstream(certificates_.File("tls.key")) << certificates_.Text("daemon-foreign.key");
  EXPECT_THAT(Refusal({}), HasSubstr("could not start again, if the next one failed: --metrics-tls-key=" +
                                     certificates_.File("tls.key") + ": is not the key of"));
  EXPECT_EQ(DaemonPid(), before);
  EXPECT_TRUE(Serves("ours"));
  ASSERT_NO_FATAL_FAILURE(ExpectOneListener());
  certificates_.Use("daemon-ours");
  ASSERT_NO_FATAL_FAILURE(UpgradeWhole());
  EXPECT_TRUE(Serves("ours"));
}

TEST_F(MetricsUpgradeTest, AnUpgradeThatFailsLeavesTheProgramBeforeServing) {
  Scraper scraper(this, "ours");
  ASSERT_NO_FATAL_FAILURE(scraper.AwaitMore());
  const auto info = UpgradeTo(CopyOf(KVPOOL_UPGRADE_STUB, "fails"));
  ASSERT_TRUE(info.ok()) << info.status() << daemon_->Log();
  EXPECT_EQ(info->outcome(), v1::UPGRADE_OUTCOME_FAILED);
  ASSERT_NO_FATAL_FAILURE(scraper.AwaitMore());
  ASSERT_NO_FATAL_FAILURE(ExpectOneListener());
  EXPECT_THAT(scraper.End(), IsEmpty());
  EXPECT_FALSE(Serves("ours", "scraper-foreign"));
}

}  // namespace
}  // namespace kvpool
