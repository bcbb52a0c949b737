// kvpoolctl top: a frame every interval, with rates since the frame before.
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/ctl/commands.h"
#include "client/tools/text.h"
#include "proto/support/status_macros.h"

namespace kvpool::ctl {
namespace {

using tools::HumanBytes;
using tools::HumanCount;
using tools::HumanSeconds;
using tools::Percent;
using tools::Table;

struct Frame {
  absl::Time at;
  v1::GetStatsResponse stats;
  v1::ListSpacesResponse spaces;
  v1::ListSessionsResponse sessions;
};

absl::StatusOr<Frame> Ask(tools::OperatorClient* daemon) {
  Frame frame{.at = absl::Now()};
  ASSIGN_OR_RETURN(frame.stats, daemon->GetStats({}));
  ASSIGN_OR_RETURN(frame.spaces, daemon->ListSpaces({}));
  ASSIGN_OR_RETURN(frame.sessions, daemon->ListSessions({}));
  return frame;
}

// One letter for each fiftieth of the capacity: l leased, s sealed, c cached, q quarantined, w withheld, . free.
std::string StateBar(const v1::StateCounts& counts) {
  constexpr uint64_t kCells = 50;
  const std::pair<char, uint64_t> parts[] = {{'l', counts.leased()},
                                             {'s', counts.sealed()},
                                             {'c', counts.cached()},
                                             {'q', counts.quarantined()},
                                             {'w', counts.withheld()}};
  std::string bar;
  if (counts.capacity() == 0) return bar;
  double filled = 0;
  for (const auto& [letter, blocks] : parts) {
    filled += static_cast<double>(blocks) * kCells / static_cast<double>(counts.capacity());
    bar.append(static_cast<size_t>(filled + 0.5) - bar.size(), letter);
  }
  bar.append(kCells - std::min<size_t>(bar.size(), kCells), '.');
  return bar;
}

std::string RenderRates(const Frame& now, const Frame& before) {
  const double seconds = absl::ToDoubleSeconds(now.at - before.at);
  const auto rate = [&](uint64_t (v1::GetStatsResponse::*counter)() const) {
    // A daemon that was started again counts from 0.
    const uint64_t a = (before.stats.*counter)(), b = (now.stats.*counter)();
    return b < a || seconds <= 0 ? 0 : static_cast<double>(b - a) / seconds;
  };
  using Stats = v1::GetStatsResponse;
  const double lookups = rate(&Stats::lookup_blocks_total);
  return absl::StrFormat(
      "per second: %s leased  %s sealed  %s deduplicated  %s released  %s evicted\n"
      "matches:    %s blocks asked for  %s hit\n",
      HumanCount(static_cast<uint64_t>(rate(&Stats::leased_total))),
      HumanCount(static_cast<uint64_t>(rate(&Stats::sealed_total))),
      HumanCount(static_cast<uint64_t>(rate(&Stats::deduplicated_total))),
      HumanCount(static_cast<uint64_t>(rate(&Stats::released_total))),
      HumanCount(static_cast<uint64_t>(rate(&Stats::evicted_total))),
      HumanCount(static_cast<uint64_t>(lookups)), Percent(rate(&Stats::hit_blocks_total), lookups));
}

std::string Render(const Frame& now, const Frame* before) {
  const v1::GetStatsResponse& stats = now.stats;
  std::string text =
      absl::StrFormat("kvpoold %s  up %s  %s  %s%s\n", tools::Printable(stats.version()),
                      HumanSeconds(stats.uptime_seconds()), HumanCount(stats.spaces(), "space"),
                      HumanCount(stats.sessions(), "session"), stats.draining() ? "  DRAINING" : "");
  for (const v1::DeviceInfo& device : stats.devices()) {
    absl::StrAppend(&text, tools::Printable(device.device()), ": ", HumanBytes(device.used_bytes()), " of ",
                    HumanBytes(device.capacity_bytes()), " in slabs\n");
  }
  if (before != nullptr) text += RenderRates(now, *before);
  Table spaces({">SPACE", "TENANT", ">FREE", ">LEASED", ">SEALED", ">CACHED", ">QUARANT.", ">CAPACITY",
                "l leased  s sealed  c cached  q quarantined  w withheld"});
  for (const v1::SpaceInfo& space : now.spaces.spaces()) {
    const v1::StateCounts& blocks = space.blocks();
    spaces.Add({absl::StrCat(space.space()), space.tenant(), HumanCount(blocks.free()),
                HumanCount(blocks.leased()), HumanCount(blocks.sealed()), HumanCount(blocks.cached()),
                HumanCount(blocks.quarantined()), HumanCount(blocks.capacity()), StateBar(blocks)});
  }
  if (!spaces.empty()) absl::StrAppend(&text, "\n", spaces.Text());
  std::vector<const v1::SessionInfo*> by_size;
  for (const v1::SessionInfo& session : now.sessions.sessions()) by_size.push_back(&session);
  std::stable_sort(by_size.begin(), by_size.end(), [](const auto* a, const auto* b) {
    return a->leased() + a->referenced() > b->leased() + b->referenced();
  });
  Table sessions(
      {">SESSION", ">SPACE", "CLIENT", ">MEMBERS", ">LEASED", ">REFERENCED", ">PARKED", ">IDLE", "STATE"});
  for (const v1::SessionInfo* session : by_size) {
    double idle = session->members().empty() ? 0 : session->members(0).idle_seconds();
    for (const v1::MemberInfo& member : session->members()) idle = std::min(idle, member.idle_seconds());
    sessions.Add({absl::StrCat(session->session()), absl::StrCat(session->space()), session->client_name(),
                  absl::StrCat(session->members_size()), HumanCount(session->leased()),
                  HumanCount(session->referenced()), HumanCount(session->parked()), HumanSeconds(idle),
                  session->ended() ? "ended" : "open"});
  }
  if (!sessions.empty()) absl::StrAppend(&text, "\n", sessions.Text());
  return text;
}

// The terminal while top has it: keys come one by one, and the screen comes back at the end.
class Screen {
 public:
  Screen() {
    tcgetattr(STDIN_FILENO, &saved_);
    termios raw = saved_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG);
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    std::fputs("\x1b[?1049h\x1b[?25l", stdout);
  }
  ~Screen() {
    std::fputs("\x1b[?25h\x1b[?1049l", stdout);
    std::fflush(stdout);
    tcsetattr(STDIN_FILENO, TCSANOW, &saved_);
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void Show(const std::string& text) const {
    winsize size{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0) size = {.ws_row = 24, .ws_col = 80};
    std::string frame = "\x1b[H";
    size_t row = 0;
    for (const absl::string_view line : absl::StrSplit(text, '\n')) {
      if (++row >= size.ws_row) break;
      absl::StrAppend(&frame, line.substr(0, size.ws_col), "\x1b[K\r\n");
    }
    frame += "\x1b[J\x1b[7m q quit \x1b[0m";
    std::fwrite(frame.data(), 1, frame.size(), stdout);
    std::fflush(stdout);
  }
  // False: q, Ctrl-C or the end of the input.
  bool WaitForQuit(absl::Duration most) const {
    constexpr char kControlC = 3;  // No signal: it would leave the terminal as it is now.
    const absl::Time until = absl::Now() + most;
    while (true) {
      const int64_t left_ms = absl::ToInt64Milliseconds(until - absl::Now());
      pollfd keys{.fd = STDIN_FILENO, .events = POLLIN};
      if (left_ms <= 0 || poll(&keys, 1, static_cast<int>(left_ms)) == 0) return true;
      char key = 'q';
      if (read(STDIN_FILENO, &key, 1) <= 0 || key == 'q' || key == 'Q' || key == kControlC) return false;
    }
  }

 private:
  termios saved_{};
};

class TopCommand : public Command {
 public:
  void AddFlags(Flags* flags) override {
    flags->Add("interval", &interval_, {.min = absl::Milliseconds(50), .max = absl::Hours(1)},
               "time between frames");
    flags->Add("once", &once_, "one frame, without rates, and end");
  }
  absl::Status Run(tools::OperatorClient* daemon, const Output& output) override {
    if (once_ || output.json() || !isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO))
      return PrintFrames(daemon, output);
    const Screen screen;
    ASSIGN_OR_RETURN(Frame before, Ask(daemon));
    screen.Show(Render(before, nullptr));
    while (screen.WaitForQuit(interval_)) {
      absl::StatusOr<Frame> now = Ask(daemon);
      if (!now.ok()) {
        // Also how a restart of the daemon looks: keep asking.
        screen.Show(absl::StrCat(now.status().message(), "\n"));
        continue;
      }
      screen.Show(Render(*now, &before));
      before = *std::move(now);
    }
    return absl::OkStatus();
  }

 private:
  // For pipes and files: frames one below the other; as JSON, one GetStats answer each.
  absl::Status PrintFrames(tools::OperatorClient* daemon, const Output& output) const {
    ASSIGN_OR_RETURN(Frame before, Ask(daemon));
    output.Print(before.stats, Render(before, nullptr));
    while (!once_ && !std::ferror(stdout)) {
      absl::SleepFor(interval_);
      ASSIGN_OR_RETURN(Frame now, Ask(daemon));
      output.Print(now.stats, absl::StrCat("\n", Render(now, &before)));
      before = std::move(now);
    }
    return absl::OkStatus();
  }

  absl::Duration interval_ = absl::Seconds(1);
  bool once_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeTop() { return std::make_unique<TopCommand>(); }

}  // namespace kvpool::ctl
