#include "client/python/src/shared_session.h"

#include <algorithm>
#include <utility>

namespace kvpool::python {
namespace {

constexpr std::chrono::seconds kCloseTimeout{5};  // The default.

struct Registry {
  Mutex mu;
  std::vector<std::weak_ptr<SharedSession>> sessions ABSL_GUARDED_BY(mu);
};
// Never destroyed: sessions may outlive the library's static objects.
Registry& Sessions() {
  static Registry* const registry = new Registry;
  return *registry;
}

}  // namespace

std::shared_ptr<SharedSession> SharedSession::Open(SessionOptions options, const std::string& invitation) {
  std::shared_ptr<SharedSession> shared(new SharedSession);
  options.on_notice = [session = shared.get()](const v1::Notice& notice) { session->OnNotice(notice); };
  shared->session_ =
      ValueOf(invitation.empty() ? Session::Open(options) : Session::Join(options, invitation));
  Registry& registry = Sessions();
  MutexLock lock(&registry.mu);
  std::erase_if(registry.sessions, [](const auto& session) { return session.expired(); });
  registry.sessions.push_back(shared);
  return shared;
}

SharedSession::~SharedSession() {
  std::optional<GilRelease> released;
  if (GilRelease::Held()) released.emplace();
  // Nobody has a turn any more.
  if (session_ != nullptr) ClearDropped();
  session_.reset();
}

void SharedSession::CheckUsable() const {
  if (closed()) throw ReleasedError("the session was closed");
}

// ------------------------------------------------------------------------------------------------ views

void SharedSession::AddView(BlockRef block) {
  MutexLock lock(&views_mu_);
  // A block that has a view stays held, also while the session is being closed; no other comes to have one then.
  const bool late = block != kNullRef && closed() && !viewed_.contains(block.Pack());
  if (dismantled_ || late) throw ReleasedError("the session was closed");
  if (block == kNullRef) {
    ++pool_views_;
  } else {
    ++viewed_[block.Pack()].views;
  }
}

void SharedSession::DropView(BlockRef block) {
  {
    MutexLock lock(&views_mu_);
    if (block == kNullRef) {
      if (--pool_views_ > 0) return;
    } else {
      const auto at = viewed_.find(block.Pack());
      if (at == viewed_.end() || --at->second.views > 0) return;
      dropped_.insert(dropped_.end(), at->second.owed, {.block = block, .hint = at->second.hint});
      viewed_.erase(at);
    }
  }
  Settle();
}

uint64_t SharedSession::views() const {
  MutexLock lock(&views_mu_);
  uint64_t views = 0;
  for (const auto& [block, viewed] : viewed_) views += viewed.views;
  return views;
}

void SharedSession::GiveBack(absl::Span<const BlockRef> blocks, uint64_t after, const ReleaseHint& hint) {
  std::vector<BlockRef> now;
  {
    MutexLock lock(&views_mu_);
    for (const BlockRef block : blocks) {
      if (block == kNullRef) continue;
      const auto at = viewed_.find(block.Pack());
      if (at == viewed_.end()) {
        now.push_back(block);
      } else {
        ++at->second.owed;
        at->second.hint = hint;
      }
    }
  }
  if (!now.empty()) Check(session_->ReleaseWithHint(now, hint, after));
}

void SharedSession::Shield(absl::Span<const BlockRef> blocks, const ReleaseHint& hint) {
  std::vector<BlockRef> looked_at;
  {
    MutexLock lock(&views_mu_);
    for (const BlockRef block : blocks) {
      const auto at = viewed_.find(block.Pack());
      if (at == viewed_.end()) continue;
      at->second.hint = hint;
      if (at->second.owed > 0) continue;
      looked_at.push_back(block);
      ++at->second.owed;
    }
  }
  if (looked_at.empty()) return;
  absl::StatusOr<Blocks> held = session_->Ref(looked_at);
  if (held.ok()) {
    held->Detach();
    return;
  }
  // The session is over: while this process lives, nobody else gets its blocks.
  MutexLock lock(&views_mu_);
  for (const BlockRef block : looked_at) {
    const auto at = viewed_.find(block.Pack());
    if (at != viewed_.end()) --at->second.owed;
  }
}

void SharedSession::DropBlocks(absl::Span<const BlockRef> blocks) {
  {
    MutexLock lock(&views_mu_);
    for (const BlockRef block : blocks) {
      if (block == kNullRef) continue;
      const auto at = viewed_.find(block.Pack());
      if (at == viewed_.end()) {
        dropped_.push_back({.block = block, .hint = {}});
      } else {
        ++at->second.owed;
        at->second.hint = {};
      }
    }
  }
  Settle();
}

void SharedSession::DropLater(std::shared_ptr<void> what) {
  {
    MutexLock lock(&views_mu_);
    dropped_objects_.push_back(std::move(what));
  }
  Settle();
}

bool SharedSession::HasDropped() const {
  MutexLock lock(&views_mu_);
  return !dropped_.empty() || !dropped_objects_.empty() || (closed() && viewed_.empty() && !ended_) ||
         ToDismantle();
}

void SharedSession::ReleaseDropped(absl::Span<const Dropped> dropped) {
  while (!dropped.empty()) {
    const ReleaseHint hint = dropped.front().hint;
    std::vector<BlockRef> alike;
    for (const Dropped& one : dropped) {
      if (!(one.hint == hint)) break;
      alike.push_back(one.block);
    }
    // Only hints of blocks with views are kept.
    session_->ReleaseWithHint(alike, hint).IgnoreError();
    dropped.remove_prefix(alike.size());
  }
}

void SharedSession::ClearDropped() {
  std::vector<Dropped> dropped;
  std::vector<std::shared_ptr<void>> objects;
  bool end = false;
  {
    MutexLock lock(&views_mu_);
    dropped.swap(dropped_);
    objects.swap(dropped_objects_);
    end = closed() && viewed_.empty() && !ended_;
    ended_ |= end;
  }
  ReleaseDropped(dropped);
  objects.clear();
  // The last view of a closed session is gone. If this fails, the session ends with the process.
  if (end) {
    session_->Close(std::chrono::steady_clock::now() + kCloseTimeout).IgnoreError();
    MutexLock lock(&views_mu_);
    over_ = true;
  }
  Dismantle();
}

void SharedSession::Dismantle() {
  {
    MutexLock lock(&views_mu_);
    if (!ToDismantle()) return;
    dismantled_ = true;
  }
  session_->Dismantle();
}

void SharedSession::EndTurn() {
  bool again = true;
  while (again) {
    ClearDropped();
    mu_.Unlock();
    // A thread that dropped something while the lock was held could not take it, and relies on this check.
    again = HasDropped() && mu_.TryLock();
  }
}

void SharedSession::Settle() {
  if (!HasDropped() || !mu_.TryLock()) return;
  std::optional<GilRelease> released;
  if (GilRelease::Held()) released.emplace();
  EndTurn();
}

bool SharedSession::Close(Deadline deadline) {
  mu_.Lock();
  bool viewed = false;
  {
    MutexLock lock(&views_mu_);  // AddView's: no view comes behind this look.
    closing_.store(true, std::memory_order_release);
    viewed = !viewed_.empty();
    ended_ |= !viewed;
  }
  if (viewed) {
    EndTurn();
    return false;
  }
  ClearDropped();
  const absl::Status closed = session_->Close(deadline);
  // A session that the daemon has ended, or that has lost it, is as good as closed.
  const bool late = absl::IsDeadlineExceeded(closed);
  if (!late) {
    MutexLock lock(&views_mu_);
    over_ = true;
  }
  EndTurn();
  if (late) throw StatusError(closed);
  return true;
}

void SharedSession::Abandon() {
  MutexLock lock(&views_mu_);
  closing_.store(true, std::memory_order_release);
  ended_ = true;
}

void SharedSession::CloseAll() {
  std::vector<std::weak_ptr<SharedSession>> sessions;
  {
    Registry& registry = Sessions();
    MutexLock lock(&registry.mu);
    sessions.swap(registry.sessions);
  }
  for (const auto& weak : sessions) {
    const std::shared_ptr<SharedSession> session = weak.lock();
    if (session == nullptr || session->closed()) continue;
    const Session& open = session->shared();
    // Steps are unfinished: only the end of the process tells when they are done.
    if (open.status().ok() && open.current_step() <= open.passed_step()) {
      try {
        session->Close(std::chrono::steady_clock::now() + kCloseTimeout);
      } catch (const StatusError&) {
        // The session ends with the process.
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- notices

void SharedSession::OnNotice(const v1::Notice& notice) {
  MutexLock lock(&notices_mu_);
  notices_[notice.kind()] = {++notices_seen_, notice};
  notices_wake_.SignalAll();
}

std::optional<v1::Notice> SharedSession::NextNotice(Deadline deadline) {
  MutexLock lock(&notices_mu_);
  while (notices_.empty()) {
    if (!notices_wake_.WaitUntil(&notices_mu_, deadline) && notices_.empty()) return std::nullopt;
  }
  const auto oldest = std::min_element(notices_.begin(), notices_.end(), [](const auto& a, const auto& b) {
    return a.second.first < b.second.first;
  });
  const v1::Notice notice = oldest->second.second;
  notices_.erase(oldest);
  return notice;
}

}  // namespace kvpool::python
