#include "server/space/completions.h"

#include <utility>

namespace kvpool {

void Completions::Add(uint64_t sequence, uint32_t index, const v1::OperationResult& result) {
  Entry& entry = waiting_.emplace_back();
  entry.completion.set_sequence(sequence);
  entry.completion.set_index(index);
  *entry.completion.mutable_result() = result;
  entry.bytes = entry.completion.ByteSizeLong();
  bytes_.Add(entry.bytes);
}

void Completions::Take(size_t bytes, v1::StepResponse* response) {
  size_t taken = 0;
  while (!waiting_.empty()) {
    Entry& entry = waiting_.front();
    taken += entry.bytes;
    if (response->completions_size() > 0 && taken > bytes) break;
    *response->add_completions() = entry.completion;
    sent_.push_back(std::move(entry));
    waiting_.pop_front();
  }
}

std::vector<uint32_t> Completions::Fold(size_t bytes, v1::StepResponse* answer) {
  std::vector<uint32_t> folded;
  size_t taken = 0;
  for (std::deque<Entry>* entries : {&sent_, &waiting_}) {
    std::erase_if(*entries, [&](Entry& entry) {
      if (entry.completion.sequence() != answer->sequence()) return false;
      taken += entry.bytes;
      if (taken > bytes) return false;
      answer->mutable_results(static_cast<int>(entry.completion.index()))
          ->Swap(entry.completion.mutable_result());
      bytes_.Subtract(entry.bytes);
      if (log_ != nullptr) log_->Fold(entry.completion.sequence(), entry.completion.index());
      folded.push_back(entry.completion.index());
      return true;
    });
  }
  return folded;
}

void Completions::ConfirmBy(uint64_t sequence) {
  for (Entry& entry : sent_) {
    if (entry.confirmed_by == 0) entry.confirmed_by = sequence;
  }
}

void Completions::Acknowledge(uint64_t through) {
  std::erase_if(sent_, [&](const Entry& entry) {
    const bool arrived = entry.confirmed_by != 0 && entry.confirmed_by <= through;
    if (!arrived) return false;
    bytes_.Subtract(entry.bytes);
    if (log_ != nullptr) log_->Confirm(entry.completion.sequence(), entry.completion.index());
    return true;
  });
}

void Completions::Resend() {
  for (; !sent_.empty(); sent_.pop_back()) {
    sent_.back().confirmed_by = 0;
    waiting_.push_front(std::move(sent_.back()));
  }
}

void Completions::Clear() {
  waiting_.clear();
  sent_.clear();
  bytes_.Subtract(bytes_.bytes());
}

}  // namespace kvpool
