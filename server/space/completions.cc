#include "server/space/completions.h"

#include <algorithm>
#include <iterator>

namespace kvpool {

void Completions::Add(uint64_t sequence, uint32_t index, const v1::OperationResult& result) {
  by_sequence_.emplace(sequence, arrived_);
  Entry& entry = entries_.emplace_hint(entries_.end(), arrived_++, Entry())->second;
  entry.completion.set_sequence(sequence);
  entry.completion.set_index(index);
  *entry.completion.mutable_result() = result;
  entry.bytes = entry.completion.ByteSizeLong();
  bytes_.Add(entry.bytes);
}

void Completions::Take(size_t bytes, v1::StepResponse* response) {
  size_t taken = 0, count = 0;
  for (auto it = entries_.lower_bound(next_); it != entries_.end() && count < kMostTaken; ++it, ++count) {
    taken += it->second.bytes;
    if (response->completions_size() > 0 && taken > bytes) break;
    *response->add_completions() = it->second.completion;
    next_ = it->first + 1;
    ++unconfirmed_here_;
  }
}

std::vector<uint32_t> Completions::Fold(size_t* bytes, size_t most, v1::StepResponse* answer) {
  std::vector<uint32_t> folded;
  most = std::min(most, kMostFolded);
  auto of_batch = by_sequence_.lower_bound({answer->sequence(), 0});
  while (folded.size() < most && of_batch != by_sequence_.end() && of_batch->first == answer->sequence()) {
    const auto it = entries_.find(of_batch->second);
    v1::Completion& completion = it->second.completion;
    if (it->second.bytes > *bytes) break;
    *bytes -= it->second.bytes;
    folded.push_back(completion.index());
    answer->mutable_results(static_cast<int>(completion.index()))->Swap(completion.mutable_result());
    if (log_ != nullptr) log_->Fold(completion.sequence(), completion.index());
    of_batch = by_sequence_.erase(of_batch);
    Drop(it);
  }
  return folded;
}

void Completions::Drop(Entries::iterator it) {
  if (it->first < unconfirmed_) {
    const auto run = std::prev(runs_.upper_bound(it->first));
    if (--run->second.left == 0) {
      by_confirming_.erase({run->second.confirmed_by, run->first});
      runs_.erase(run);
    }
  } else if (it->first < next_) {
    --unconfirmed_here_;
  }
  bytes_.Subtract(it->second.bytes);
  entries_.erase(it);
}

void Completions::ConfirmBy(uint64_t sequence) {
  if (unconfirmed_here_ > 0) {
    runs_.emplace(unconfirmed_, Run{.confirmed_by = sequence, .left = unconfirmed_here_});
    by_confirming_.emplace(sequence, unconfirmed_);
  }
  unconfirmed_ = next_;
  unconfirmed_here_ = 0;
}

bool Completions::Acknowledge(uint64_t through, size_t most, OwedReleases* owed) {
  for (; !by_confirming_.empty() && by_confirming_.begin()->first <= through; --most) {
    if (most == 0) return true;
    const auto it = entries_.lower_bound(by_confirming_.begin()->second);
    const v1::Completion& completion = it->second.completion;
    if (log_ != nullptr) log_->Confirm(completion.sequence(), completion.index());
    owed->Hear(completion.sequence(), completion.index());
    by_sequence_.erase({completion.sequence(), it->first});
    Drop(it);
  }
  return false;
}

void Completions::Resend() {
  next_ = unconfirmed_ = 0;
  unconfirmed_here_ = 0;
  runs_.clear();
  by_confirming_.clear();
}

void Completions::Clear() {
  Resend();
  entries_.clear();
  by_sequence_.clear();
  bytes_.Subtract(bytes_.bytes());
}

}  // namespace kvpool
