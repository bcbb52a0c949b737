#include "server/space/session.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvpool {

void SlabAcks::Leave(uint32_t slab) {
  if (std::erase_if(sent_, [slab](const Sent& sent) { return sent.slab == slab; }) == 0) return;
  --prefix_;
  --count_;
}

absl::Status SlabAcks::Acknowledge(uint32_t slab) {
  // What is not mapped is among the last ones.
  const auto sent = std::find_if(sent_.begin() + prefix_, sent_.end(),
                                 [slab](const Sent& other) { return other.slab == slab; });
  if (sent == sent_.end() || sent->mapped) {
    const bool mapped =
        std::any_of(sent_.begin(), sent_.end(), [slab](const Sent& other) { return other.slab == slab; });
    return absl::FailedPreconditionError(
        absl::StrCat("slab_ack.slab is ", slab,
                     mapped ? ", acknowledged already"
                            : absl::StrCat("; ", sent_.size(), " slabs were sent, not this one")));
  }
  sent->mapped = true;
  ++count_;
  while (prefix_ < sent_.size() && sent_[prefix_].mapped) ++prefix_;
  return absl::OkStatus();
}

void Member::KeepIn(std::unique_ptr<MemberLog> kept) {
  log = std::move(kept);
  answers.KeepIn(log.get());
  completions.KeepIn(log.get());
  owed.KeepIn(log.get());
}

SessionLimits Session::limits() const {
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  SessionLimits limits;
  limits.guaranteed = terms.guaranteed_blocks == kMost ? kMost : terms.guaranteed_blocks + 1;
  // A cap that can't be raised by one is never reached: it is no cap.
  limits.max_blocks = terms.max_blocks == 0 || terms.max_blocks == kMost ? 0 : terms.max_blocks + 1;
  return limits;
}

uint32_t Session::mapped() const {
  uint32_t mapped = std::numeric_limits<uint32_t>::max();
  for (const Member* member : by_rank) {
    if (member == nullptr) return 0;
    mapped = std::min(mapped, member->slabs.mapped());
  }
  return mapped;
}

uint32_t Session::slabs_in_flight() const {
  uint32_t in_flight = 0;
  for (const Member* member : by_rank) {
    if (member != nullptr) in_flight += member->slabs.unacknowledged();
  }
  return in_flight;
}

uint32_t Session::warming_up() const {
  if (!terms.warmup) return 0;
  return static_cast<uint32_t>(std::count_if(by_rank.begin(), by_rank.end(), [](const Member* member) {
    return member == nullptr || !member->warmup_done;
  }));
}

bool Session::all_dead() const {
  return std::all_of(members.begin(), members.end(), [](const auto& member) { return member->dead; });
}

bool Session::UpdatePassed() {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const Member* member : by_rank) least = std::min(least, member == nullptr ? 0 : member->fence);
  if (least <= passed) return false;
  passed = least;
  return true;
}

void Session::CountParked() {
  const ParkedVerbs::Work work = parked.to_be_let_go();
  parked_names.store(work.names, std::memory_order_relaxed);
  parked_sets.store(work.of_sets, std::memory_order_relaxed);
}

absl::Status Session::CheckRole(bool scheduler, uint32_t rank) const {
  if (scheduler) {
    for (const auto& member : members) {
      if (member->identity.scheduler) {
        return absl::FailedPreconditionError(
            absl::StrCat("role.scheduler is taken by member ", member->index, " of session ", terms.id));
      }
    }
    return absl::OkStatus();
  }
  if (rank >= terms.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("role.rank is ", rank, "; session ", terms.id, " has ranks 0 to ", terms.ranks - 1));
  }
  if (by_rank[rank] != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("role.rank ", rank, " is taken by member ",
                                                      by_rank[rank]->index, " of session ", terms.id));
  }
  return absl::OkStatus();
}

Member* Session::AddMember(MemberIdentity identity) {
  members.push_back(
      std::make_unique<Member>(this, static_cast<uint32_t>(members.size()), std::move(identity)));
  Member* member = members.back().get();
  if (!member->identity.scheduler) by_rank[member->identity.rank] = member;
  return member;
}

}  // namespace kvpool
