#include "server/attach/attach_mailbox.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/check.h"

namespace kvpool {
namespace {

class MailedPeer : public AttachPeer {
 public:
  MailedPeer(std::shared_ptr<AttachMailbox> mailbox, uint64_t connection, uint64_t process)
      : mailbox_(std::move(mailbox)), connection_(connection), process_(process) {}

  void Send(const v1::AttachFrame& frame, UniqueFd fd) override {
    AttachLetter letter = Letter(AttachLetter::Kind::kFrame);
    letter.frame = frame;
    letter.fd = std::move(fd);
    mailbox_->Post(std::move(letter));
  }
  void Close(const std::string& reason) override {
    AttachLetter letter = Letter(AttachLetter::Kind::kClose);
    letter.reason = reason;
    mailbox_->Post(std::move(letter));
  }
  void Bound() override { mailbox_->Post(Letter(AttachLetter::Kind::kBound)); }
  void NotAwaited(AttachId id) override {
    AttachLetter letter = Letter(AttachLetter::Kind::kNotAwaited);
    letter.process = process_;
    letter.attach = id;
    mailbox_->Post(std::move(letter));
  }

 private:
  AttachLetter Letter(AttachLetter::Kind kind) const {
    AttachLetter letter;
    letter.connection = connection_;
    letter.kind = kind;
    return letter;
  }

  const std::shared_ptr<AttachMailbox> mailbox_;
  const uint64_t connection_, process_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<AttachMailbox>> AttachMailbox::Make() {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return absl::UnavailableError(absl::StrCat("eventfd: ", strerror(errno)));
  return std::shared_ptr<AttachMailbox>(new AttachMailbox(std::move(wake)));
}

void AttachMailbox::Post(AttachLetter letter) {
  MutexLock lock(&mu_);
  if (shut_) return;
  letters_.push_back(std::move(letter));
  if (letters_.size() > 1) return;  // The first letter has woken the thread.
  const uint64_t one = 1;
  const ssize_t wrote = write(wake_.get(), &one, sizeof(one));
  KVPOOL_CHECK(wrote == sizeof(one), "eventfd write: errno %d", errno);
}

std::vector<AttachLetter> AttachMailbox::Take() {
  MutexLock lock(&mu_);
  uint64_t count;
  while (read(wake_.get(), &count, sizeof(count)) > 0) {
  }
  return std::exchange(letters_, {});
}

void AttachMailbox::Shut() {
  MutexLock lock(&mu_);
  shut_ = true;
  letters_.clear();
}

std::shared_ptr<AttachPeer> MakeMailedPeer(std::shared_ptr<AttachMailbox> mailbox, uint64_t connection,
                                           uint64_t process) {
  return std::make_shared<MailedPeer>(std::move(mailbox), connection, process);
}

}  // namespace kvpool
