#include "server/keeper/keeper_link.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"
#include "proto/support/status_macros.h"
#include "server/base/log.h"
#include "server/keeper/keeper_frames.h"

namespace kvpool {

Kept& Kept::operator=(Kept&& other) noexcept {
  if (this == &other) return *this;
  if (link_ != nullptr) link_->Drop(id_);
  link_ = std::exchange(other.link_, nullptr);
  id_ = other.id_;
  return *this;
}

Kept::~Kept() {
  if (link_ != nullptr) link_->Drop(id_);
}

absl::StatusOr<std::unique_ptr<KeeperLink>> KeeperLink::Join(UniqueFd socket) {
  std::unique_ptr<KeeperLink> link(new KeeperLink(std::move(socket)));
  RETURN_IF_ERROR(link->Inherit());
  return link;
}

absl::Status KeeperLink::Inherit() {
  MutexLock lock(&mu_);
  RETURN_IF_ERROR(SendKeeperFrame(socket_.get(), KeeperFrame()));
  while (true) {
    KeeperFrame frame;
    UniqueFd fd;
    RETURN_IF_ERROR(ReceiveKeeperFrame(socket_.get(), &frame, &fd));
    if (frame.verb == KeeperVerb::kAllHeld) return absl::OkStatus();
    if (frame.verb != KeeperVerb::kHeld || !fd.valid()) {
      return absl::InvalidArgumentError(absl::StrCat("a keeper says ", static_cast<int>(frame.verb),
                                                     " where it has to show what it keeps"));
    }
    inherited_.push_back({.kind = static_cast<KeptKind>(frame.kind),
                          .facts = std::string(frame.text()),
                          .fd = std::move(fd),
                          .kept = Kept(this, frame.id)});
    next_id_ = std::max(next_id_, frame.id + 1);
  }
}

absl::StatusOr<Kept> KeeperLink::Keep(KeptKind kind, std::string_view facts, int fd) {
  KVPOOL_CHECK(facts.size() <= kMaxKeptFacts, "%zu bytes of facts of a thing to be kept", facts.size());
  MutexLock lock(&mu_);
  SendDrops();
  if (!socket_.valid()) return Kept();
  KeeperFrame frame;
  frame.verb = KeeperVerb::kKeep;
  frame.id = next_id_++;
  frame.kind = static_cast<uint16_t>(kind);
  frame.set_text(facts);
  absl::Status answered = SendKeeperFrame(socket_.get(), frame, fd);
  KeeperFrame answer;
  UniqueFd none;
  if (answered.ok()) answered = ReceiveKeeperFrame(socket_.get(), &answer, &none);
  if (!answered.ok()) {
    Lose(answered);
    return Kept();
  }
  if (answer.verb == KeeperVerb::kKept && answer.id == frame.id) return Kept(this, frame.id);
  return absl::ResourceExhaustedError(absl::StrCat("--keeper: ", std::string(answer.text())));
}

void KeeperLink::Serving() {
  MutexLock lock(&mu_);
  if (!socket_.valid()) return;
  KeeperFrame frame;
  frame.verb = KeeperVerb::kServing;
  if (const absl::Status sent = SendKeeperFrame(socket_.get(), frame); !sent.ok()) Lose(sent);
}

void KeeperLink::Flush() {
  MutexLock lock(&mu_);
  SendDrops();
}

void KeeperLink::Leave() {
  MutexLock lock(&mu_);
  socket_.Reset();
}

void KeeperLink::Drop(uint64_t id) {
  MutexLock lock(&drops_mu_);
  drops_.push_back(id);
}

void KeeperLink::SendDrops() {
  std::vector<uint64_t> drops;
  {
    MutexLock lock(&drops_mu_);
    drops.swap(drops_);
  }
  for (const uint64_t id : drops) {
    if (!socket_.valid()) return;
    KeeperFrame frame;
    frame.verb = KeeperVerb::kDrop;
    frame.id = id;
    if (const absl::Status sent = SendKeeperFrame(socket_.get(), frame); !sent.ok()) Lose(sent);
  }
}

void KeeperLink::Lose(const absl::Status& why) {
  socket_.Reset();
  LogError("keeper lost", {{"error", why}, {"now", "nothing that is sealed outlives this process"}});
}

}  // namespace kvpool
