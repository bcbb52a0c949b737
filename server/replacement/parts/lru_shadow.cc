#include "server/replacement/parts/lru_shadow.h"

#include <algorithm>

namespace kvpool {

void LruShadow::Count(bool policy_missed, bool lru_missed) {
  if (policy_missed) debt_ += kShare;
  if (lru_missed) debt_ -= kShare + 1;
  debt_ = std::max(debt_, -kShare * resident_);
}

void LruShadow::Trim() {
  while (contents_.size() > resident_) {
    if (contents_.oldest() == kAbsent) --absent_;
    contents_.Trim(contents_.size() - 1);
  }
}

void LruShadow::OnMiss(uint64_t hash) {
  if (!Watched(hash)) return;
  ++resident_;
  const bool held = contents_.Find(hash) != nullptr;
  if (held) --absent_;
  contents_.Add(hash, kResident);
  Count(/*policy_missed=*/true, /*lru_missed=*/!held);
}

void LruShadow::OnHit(uint64_t hash) {
  if (!Watched(hash)) return;
  const bool held = contents_.Find(hash) != nullptr;
  contents_.Add(hash, kResident);
  Count(/*policy_missed=*/false, /*lru_missed=*/!held);
}

void LruShadow::OnUsed(uint64_t hash) {
  Trim();
  if (Watched(hash) && contents_.Find(hash) != nullptr) contents_.Add(hash, kResident);
}

void LruShadow::OnEvict(uint64_t hash) {
  if (!Watched(hash)) return;
  --resident_;
  if (contents_.Find(hash) == nullptr) return;
  contents_.Set(hash, kAbsent);
  ++absent_;
}

}  // namespace kvpool
