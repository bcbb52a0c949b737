#include "server/replacement/policies/adaptive.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "proto/support/check.h"

namespace kvpool {
namespace {

// Different in kind: what is learned of class and age; recency; how long ago the use before the last was, which finds
// what is popular where popularity is all there is.
constexpr std::string_view kCandidates[] = {"learned", "lru", "lru_k"};

// A shadow has about so many blocks, and no more than a quarter of the pool's.
constexpr uint32_t kShadowBlocks = 1024, kLeastOneIn = 4;
// Blocks of requests that are being served count in the pool and in no shadow's capacity: room for them.
constexpr uint32_t kMoreSlots = 256;
// Drawn accesses between two judgements, in shadow capacities; and at least.
constexpr uint32_t kLeastWindow = 256;
constexpr double kFade = 0.85;  // From one judgement to the next.
constexpr double kDoubt = 2;    // Standard deviations.
constexpr double kLeastGain = 0.001;
constexpr double kMostBias = 0.03;
constexpr int kSettling = 2;

uint32_t OneIn(uint32_t max_blocks) { return std::max(kLeastOneIn, max_blocks / kShadowBlocks); }

}  // namespace

AdaptivePolicy::AdaptivePolicy(const PolicyOptions& options)
    : seed_(options.seed), one_in_(OneIn(options.max_blocks)), nodes_(options.max_blocks) {
  const uint32_t slots = options.max_blocks / one_in_ + kMoreSlots;
  PolicyOptions of_shadow = options;
  of_shadow.max_blocks = slots + 1;
  of_shadow.cost_per_depth *= one_in_;
  const double share = 1.0 / one_in_;
  bytes_per_block_ = sizeof(Node);
  for (const std::string_view name : kCandidates) {
    auto policy = MakeReplacementPolicy(name, options), shadow = MakeReplacementPolicy(name, of_shadow);
    KVPOOL_CHECK(policy.ok() && shadow.ok(), "a candidate is not in the registry");
    bytes_per_block_ +=
        (*policy)->bytes_per_block() + share * ((*shadow)->bytes_per_block() + ShadowCache::kBytesPerSlot);
    candidates_.push_back(
        {.policy = *std::move(policy), .shadow = std::make_unique<ShadowCache>(*std::move(shadow), slots)});
  }
}

bool AdaptivePolicy::Drawn(uint64_t hash) const {
  const auto product =
      static_cast<unsigned __int128>(hash ^ seed_ * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
  return (static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product)) % one_in_ == 0;
}

void AdaptivePolicy::OnInsert(BlockId block, const Content& content) {
  // Of the null block all is 0.
  const Node front = nodes_[Index(content.parent)];
  Node& node = nodes_[Index(block)];
  node.hash = Drawn(content.hash) ? std::max<uint64_t>(content.hash, 1) : 0;
  node.in_front = front.hash != 0 ? front.hash : front.in_front;
  ++resident_;
  for (Candidate& c : candidates_) c.policy->OnInsert(block, content);
  Observe(node, /*found=*/false, content.now_ms);
}

void AdaptivePolicy::OnHit(BlockId block, uint64_t now_ms) {
  for (Candidate& c : candidates_) c.policy->OnHit(block, now_ms);
  Observe(nodes_[Index(block)], /*found=*/true, now_ms);
}

void AdaptivePolicy::OnHint(BlockId block, const UseHint& hint) {
  for (Candidate& c : candidates_) c.policy->OnHint(block, hint);
}

void AdaptivePolicy::OnScore(BlockId block, float score) {
  for (Candidate& c : candidates_) c.policy->OnScore(block, score);
}

void AdaptivePolicy::OnUsed(BlockId block, uint64_t now_ms) {
  const Node& node = nodes_[Index(block)];
  for (Candidate& c : candidates_) {
    c.policy->OnUsed(block, now_ms);
    if (node.hash != 0) c.shadow->Used(node.hash, now_ms);
  }
}

void AdaptivePolicy::OnOffer(BlockId block) {
  for (Candidate& c : candidates_) c.policy->OnOffer(block);
}

void AdaptivePolicy::OnWithdraw(BlockId block) {
  for (Candidate& c : candidates_) c.policy->OnWithdraw(block);
}

void AdaptivePolicy::OnEvict(BlockId block) {
  if (!full_) {
    // Until now nothing could be lost or won.
    full_ = true;
    accesses_ = 0;
    Judge();
  }
  --resident_;
  for (Candidate& c : candidates_) c.policy->OnEvict(block);
}

void AdaptivePolicy::Prefetch(BlockId block, uint64_t hash) const {
  nodes_.Prefetch(Index(block));
  for (const Candidate& c : candidates_) c.policy->Prefetch(block, hash);
}

void AdaptivePolicy::Observe(const Node& node, bool found, uint64_t now_ms) {
  if (node.hash == 0) return;
  if (node.in_front != last_hash_) EndRun();
  last_hash_ = node.hash;
  accesses_ += 1;
  for (Candidate& c : candidates_) {
    const bool shadow_found = c.shadow->Access(node.hash, node.in_front, now_ms);
    c.won_in_run += (shadow_found ? 1 : 0) - (found ? 1 : 0);
  }
  if (full_ && --until_judgement_ <= 0) Judge();
}

void AdaptivePolicy::EndRun() {
  for (Candidate& c : candidates_) {
    c.won += c.won_in_run;
    c.variance += c.won_in_run * c.won_in_run;
    c.won_in_run = 0;
  }
}

void AdaptivePolicy::Judge() {
  EndRun();
  const uint32_t capacity = std::max<uint32_t>(1, resident_ / one_in_);
  for (Candidate& c : candidates_) c.shadow->set_capacity(capacity);
  until_judgement_ = std::max(kLeastWindow, capacity);
  if (settling_ > 0) {
    if (--settling_ > 0) return;
    // The cache is the active one's own from here on.
    accesses_ = 0;
    for (Candidate& c : candidates_) c.won = c.variance = 0;
    return;
  }
  if (accesses_ == 0) return;
  Candidate& now = candidates_[active_];
  now.bias = std::clamp(-now.won / accesses_, 0.0, kMostBias);
  size_t best = active_;
  double most = 0;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const Candidate& c = candidates_[i];
    if (i == active_) continue;
    const double gain = c.won + c.bias * accesses_;
    const double needed = kDoubt * std::sqrt(c.variance) + kLeastGain * accesses_;
    if (gain <= needed || gain <= most) continue;
    best = i;
    most = gain;
  }
  if (best != active_) {
    active_ = best;
    ++switches_;
    settling_ = kSettling;
    return;
  }
  accesses_ *= kFade;
  for (Candidate& c : candidates_) {
    c.won *= kFade;
    c.variance *= kFade * kFade;
  }
}

}  // namespace kvpool
