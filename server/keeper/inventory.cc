#include "server/keeper/inventory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"

namespace kvpool {

absl::Status Inventory::Serve(int socket) {
  KeeperFrame frame;
  UniqueFd fd;
  const absl::Status received = ReceiveKeeperFrame(socket, &frame, &fd);
  if (!received.ok() && !absl::IsResourceExhausted(received)) return received;
  switch (frame.verb) {
    case KeeperVerb::kHello:
      return Show(socket);
    case KeeperVerb::kKeep:
      return Keep(socket, frame, std::move(fd), received);
    case KeeperVerb::kDrop:
      things_.erase(frame.id);
      return absl::OkStatus();
    case KeeperVerb::kServing:
      serving_ = true;
      return absl::OkStatus();
    case KeeperVerb::kEnding:
      ending_ = true;
      return absl::OkStatus();
    case KeeperVerb::kHandOver: {
      KeeperFrame answer;
      const bool taken = fd.valid() && (keeper_ & kStartsNoProgram) == 0;
      answer.verb = taken ? KeeperVerb::kKept : KeeperVerb::kRefused;
      if (!fd.valid()) {
        answer.set_text(received.ok() ? "no program came" : std::string(received.message()));
      } else if (!taken) {
        answer.set_text("it starts no program");
      }
      // A daemon that does not wait for the answer any more goes on alone.
      RETURN_IF_ERROR(SendKeeperFrame(socket, answer));
      if (!taken) return absl::OkStatus();
      hand_over_ = static_cast<HandOver>(frame.kind);
      next_program_ = std::move(fd);
      return absl::OkStatus();
    }
    case KeeperVerb::kHeld:
    case KeeperVerb::kAllHeld:
    case KeeperVerb::kKept:
    case KeeperVerb::kRefused:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a daemon's frame has verb ", static_cast<int>(frame.verb), ", which daemons don't say"));
}

void Inventory::OnDaemon() {
  greeted_ = serving_ = ending_ = false;
  next_program_.Reset();
}

void Inventory::BeginTrial() {
  before_trial_ = things_;
  if (hand_over_ == HandOver::kCold) things_.clear();
}

void Inventory::EndTrial(bool failed) {
  // A warm one may have answered engines before it failed: what it kept for them stays, and what it dropped is there again.
  // A cold one knew nothing of what there was.
  if (failed && hand_over_ == HandOver::kCold) things_.clear();
  if (failed) things_.insert(before_trial_.begin(), before_trial_.end());
  before_trial_.clear();
}

void Inventory::SetLastUpgrade(UpgradeOutcome outcome, std::string_view why) {
  last_upgrade_ = KeeperFrame();
  last_upgrade_.kind = static_cast<uint16_t>(outcome);
  last_upgrade_.set_text(why);
}

absl::Status Inventory::Show(int socket) {
  greeted_ = true;
  for (const auto& [id, thing] : things_) {
    KeeperFrame held = thing.frame;
    held.verb = KeeperVerb::kHeld;
    RETURN_IF_ERROR(SendKeeperFrame(socket, held, thing.fd->get()));
  }
  KeeperFrame end = last_upgrade_;
  end.verb = KeeperVerb::kAllHeld;
  end.keeper = keeper_;
  return SendKeeperFrame(socket, end);
}

absl::Status Inventory::Keep(int socket, KeeperFrame frame, UniqueFd fd, const absl::Status& received) {
  KeeperFrame answer;
  answer.id = frame.id;
  answer.verb = KeeperVerb::kRefused;
  if (!received.ok()) {
    answer.set_text(std::string(received.message()));
  } else if (!fd.valid()) {
    answer.set_text("no descriptor came");
  } else if (things_.contains(frame.id)) {
    answer.set_text(absl::StrCat("id ", frame.id, " is taken"));
  } else if (things_.size() >= most_) {
    answer.set_text(
        absl::StrCat("the keeper has ", things_.size(), " descriptors, its limit: raise RLIMIT_NOFILE"));
  } else {
    things_[frame.id] = {.frame = frame, .fd = std::make_shared<const UniqueFd>(std::move(fd))};
    answer.verb = KeeperVerb::kKept;
  }
  return SendKeeperFrame(socket, answer);
}

}  // namespace kvpool
