#include "client/blocks.h"

#include "client/session.h"
#include "proto/support/check.h"

namespace kvpool {

void Blocks::Release(uint64_t after) {
  if (refs_.empty()) return;
  session_->Release(refs_, after);
  refs_.clear();
}

void Blocks::Append(Blocks&& more) {
  if (more.empty()) return;
  KVPOOL_CHECK(empty() || session_ == more.session_, "blocks of two sessions in one list");
  session_ = more.session_;
  refs_.insert(refs_.end(), more.refs_.begin(), more.refs_.end());
  more.refs_.clear();
}

Blocks Blocks::SplitFrom(size_t count) {
  KVPOOL_CHECK(count <= refs_.size(), "split at %zu of %zu blocks", count, refs_.size());
  Blocks tail(session_, refs().subspan(count));
  refs_.resize(count);
  return tail;
}

absl::InlinedVector<BlockRef, 4> Blocks::Detach() {
  absl::InlinedVector<BlockRef, 4> refs = std::move(refs_);
  refs_.clear();
  return refs;
}

}  // namespace kvpool
