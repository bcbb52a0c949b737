#include <cstdint>
#include <memory>
#include <utility>

#include "proto/support/check.h"
#include "tests/replacement/naive.h"
#include "tests/replacement/naive_families.h"

namespace kvpool {
namespace {

class Twins final : public ReplacementPolicy {
 public:
  Twins(std::unique_ptr<ReplacementPolicy> policy, std::unique_ptr<NaivePolicy> naive)
      : policy_(std::move(policy)), naive_(std::move(naive)) {}

  std::string_view name() const override { return policy_->name(); }
  void OnInsert(BlockId block, const Content& content) override {
    policy_->OnInsert(block, content);
    naive_->now_ms = content.now_ms;
    naive_->Insert(Index(block), content);
  }
  void OnHit(BlockId block, uint64_t now_ms) override {
    policy_->OnHit(block, now_ms);
    naive_->now_ms = now_ms;
    naive_->Hit(Index(block));
  }
  void OnHint(BlockId block, const UseHint& hint) override {
    policy_->OnHint(block, hint);
    naive_->Hint(Index(block), hint);
  }
  void OnScore(BlockId block, float score) override {
    policy_->OnScore(block, score);
    naive_->Score(Index(block), score);
  }
  void OnUsed(BlockId block, uint64_t now_ms) override {
    policy_->OnUsed(block, now_ms);
    naive_->now_ms = now_ms;
    naive_->Used(Index(block));
  }
  void OnOffer(BlockId block) override {
    policy_->OnOffer(block);
    naive_->offered.insert(Index(block));
  }
  void OnWithdraw(BlockId block) override {
    policy_->OnWithdraw(block);
    naive_->offered.erase(Index(block));
  }
  void OnEvict(BlockId block) override {
    policy_->OnEvict(block);
    naive_->Evict(Index(block));
  }
  BlockId Victim(uint64_t now_ms) override {
    const BlockId victim = policy_->Victim(now_ms);
    naive_->now_ms = now_ms;
    const uint32_t expected = naive_->Victim();
    ++victims_;
    KVPOOL_CHECK(Index(victim) == expected, "victim %lu is block %u, not %u as its naive twin has it",
                 victims_, Index(victim), expected);
    return victim;
  }
  void Prefetch(BlockId block, uint64_t hash) const override { policy_->Prefetch(block, hash); }
  Rank Standing(BlockId block) const override { return policy_->Standing(block); }
  uint32_t offered() const override { return policy_->offered(); }
  double bytes_per_block() const override { return policy_->bytes_per_block(); }

 private:
  const std::unique_ptr<ReplacementPolicy> policy_;
  const std::unique_ptr<NaivePolicy> naive_;
  uint64_t victims_ = 0;
};

}  // namespace

std::unique_ptr<NaivePolicy> MakeNaive(std::string_view name, const PolicyOptions& options) {
  for (const auto make : {MakeNaiveCompared, MakeNaiveQueues, MakeNaiveTurned}) {
    if (std::unique_ptr<NaivePolicy> naive = make(name, options)) return naive;
  }
  return nullptr;
}

std::unique_ptr<ReplacementPolicy> WithTwin(std::unique_ptr<ReplacementPolicy> policy,
                                            std::unique_ptr<NaivePolicy> naive) {
  return std::make_unique<Twins>(std::move(policy), std::move(naive));
}

}  // namespace kvpool
