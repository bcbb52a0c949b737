#include "server/space/answer_window.h"

#include <algorithm>

#include "proto/support/check.h"
#include "server/wire/step_writer.h"

namespace kvpool {
namespace {

// Slots are written over and over: an ordinary answer's buffer is kept, a large one is not.
constexpr size_t kKeptBuffer = 4096;

}  // namespace

AnswerWindow::Seen AnswerWindow::Look(uint64_t sequence) const {
  if (sequence <= floor_) return Seen::kForgotten;
  if (slots_ == nullptr || (*slots_)[sequence % kAnswers].sequence != sequence) return Seen::kNew;
  return Seen::kRemembered;
}

void AnswerWindow::Acknowledge(uint64_t through) {
  // What never came can't have been answered.
  acknowledged_ = std::max(acknowledged_, std::min(through, newest_));
  RaiseFloor(acknowledged_);
}

void AnswerWindow::RaiseFloor(uint64_t floor) {
  if (floor <= floor_) return;
  if (slots_ != nullptr) {
    if (floor - floor_ >= kAnswers) {
      for (Slot& slot : *slots_) {
        if (slot.sequence <= floor) Forget(&slot);
      }
    } else {
      // No sequence is above the last one, so a loop that ends above `floor` may have no end.
      while (floor_ < floor) {
        Slot& slot = (*slots_)[++floor_ % kAnswers];
        if (slot.sequence == floor_) Forget(&slot);
      }
    }
  }
  floor_ = floor;
  if (log_ != nullptr) log_->RaiseFloor(floor);
}

void AnswerWindow::Forget(Slot* slot) {
  bytes_.Subtract(slot->bytes);
  slot->bytes = 0;
  slot->sequence = 0;
  kept_ -= slot->completed.size();
  slot->completed.clear();
  slot->answer.clear();
  if (slot->answer.capacity() > kKeptBuffer) slot->answer.shrink_to_fit();
}

void AnswerWindow::Charge(Slot* slot, size_t bytes) {
  slot->bytes += bytes;
  bytes_.Add(bytes);
  // The newest answer stays whatever its size.
  while (bytes_.over_limit() && floor_ + 1 < newest_) RaiseFloor(floor_ + 1);
}

std::string_view AnswerWindow::Remember(uint64_t sequence, const v1::StepResponse& answer,
                                        std::string memory) {
  if (sequence <= floor_) return {};
  if (slots_ == nullptr) slots_ = std::make_unique<std::array<Slot, kAnswers>>();
  newest_ = std::max(newest_, sequence);
  if (newest_ > kAnswers) RaiseFloor(newest_ - kAnswers);
  Slot& slot = (*slots_)[sequence % kAnswers];
  slot.sequence = sequence;
  if (!memory.empty()) slot.answer = std::move(memory);
  WriteStep(answer, &slot.answer);
  if (log_ != nullptr) log_->Add(sequence, slot.answer);
  Charge(&slot, slot.answer.size());
  return slot.answer;
}

void AnswerWindow::Recall(uint64_t sequence, std::string answer) {
  if (slots_ == nullptr) slots_ = std::make_unique<std::array<Slot, kAnswers>>();
  newest_ = std::max(newest_, sequence);
  Slot& slot = (*slots_)[sequence % kAnswers];
  slot.sequence = sequence;
  slot.answer = std::move(answer);
  Charge(&slot, slot.answer.size());
}

void AnswerWindow::Complete(uint64_t sequence, uint32_t index, const v1::OperationResult& result,
                            bool on_stream) {
  if (Look(sequence) != Seen::kRemembered) return;
  if (!on_stream) Keep(sequence, index, result);
  Charge(&(*slots_)[sequence % kAnswers], result.ByteSizeLong());
}

void AnswerWindow::Keep(uint64_t sequence, uint32_t index, const v1::OperationResult& result) {
  (*slots_)[sequence % kAnswers].completed.emplace_back(index, result);
  ++kept_;
}

size_t AnswerWindow::Replay(uint64_t sequence, v1::StepResponse* answer) const {
  KVPOOL_CHECK(Look(sequence) == Seen::kRemembered, "answer %lu is not there", sequence);
  const Slot& slot = (*slots_)[sequence % kAnswers];
  KVPOOL_CHECK(answer->ParseFromString(slot.answer), "answer %lu does not parse", sequence);
  answer->clear_notices();
  answer->clear_completions();
  answer->clear_free_blocks();
  size_t bytes = 0;
  for (const auto& [index, result] : slot.completed) {
    *answer->mutable_results(index) = result;
    bytes += result.ByteSizeLong();
  }
  return bytes;
}

}  // namespace kvpool
