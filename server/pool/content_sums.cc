// What blocks held when they were sealed, as a sum, and those of which it is not certain that they still do.
#include <algorithm>
#include <cstddef>
#include <string>

#include "server/base/random_bytes.h"
#include "server/pool/block_pool.h"
#include "server/pool/pool_rep.h"

namespace kvpool {
namespace {

// A call of the kernel is worth so many: a thousand blocks may be condemned in one hold of the mutex.
constexpr size_t kSecretKeys = 128;

}  // namespace

void PoolRep::Doubt(uint32_t b) {
  if (!records[b].has(BlockRecord::kDoubted)) ++doubted;
  records[b].flags |= BlockRecord::kDoubted;
}

void PoolRep::Believe(uint32_t b) {
  if (!records[b].has(BlockRecord::kDoubted)) return;
  --doubted;
  records[b].flags &= static_cast<uint8_t>(~BlockRecord::kDoubted);
}

void PoolRep::GiveSecretKey(uint32_t b) {
  BlockRecord& r = records[b];
  BlockKey key = r.block_key();
  if (secrets.size() < key.bytes.size()) secrets = RandomBytes(kSecretKeys * key.bytes.size());
  std::copy_n(secrets.end() - key.bytes.size(), key.bytes.size(), key.bytes.begin());
  secrets.resize(secrets.size() - key.bytes.size());
  // Torn, the record would be damaged, and lost to those who hold the block.
  for (size_t at = 0; at < sizeof(r.key); at += sizeof(uint64_t)) undo.Save(r.key.data() + at);
  undo.Save(&r.accessed_ms);
  r.flags &= static_cast<uint8_t>(~BlockRecord::kAliased);
  r.set_key(key);
  if (table.has_value()) {
    undo.Save(&table->checksums[b]);
    table->checksums[b] = RecordChecksum(b, r);
  }
  index.Insert(HashKey(key), b);
}

void BlockPool::KeepSum(BlockRef ref, uint32_t sum) {
  // One store, so that whoever takes over finds it whole or not at all.
  if (IsResident(ref) && Index(ref.id) < rep_->sums.size() && !rep_->is_condemned(Index(ref.id)))
    rep_->sums[Index(ref.id)] = uint64_t{ref.generation} << 32 | sum;
}

std::optional<uint32_t> BlockPool::SumOf(BlockRef ref) const {
  if (!IsResident(ref) || !rep_->has_sum(Index(ref.id)) || rep_->is_condemned(Index(ref.id)))
    return std::nullopt;
  return static_cast<uint32_t>(rep_->sums[Index(ref.id)]);
}

bool BlockPool::IsDoubted(BlockRef ref) const {
  return IsResident(ref) && rep_->records[Index(ref.id)].has(BlockRecord::kDoubted);
}

void BlockPool::Believe(BlockRef ref) {
  if (IsResident(ref)) rep_->Believe(Index(ref.id));
}

void BlockPool::Condemn(BlockRef ref) {
  if (!IsResident(ref) || rep_->is_condemned(Index(ref.id))) return;
  rep_->Believe(Index(ref.id));
  rep_->TakeKeys(Index(ref.id));
  rep_->GiveSecretKey(Index(ref.id));
  // The sum stays in the table: whoever takes over doubts the block by it.
  rep_->condemned.insert(Index(ref.id));
}

bool BlockPool::IsCondemned(BlockRef ref) const {
  return IsResident(ref) && rep_->is_condemned(Index(ref.id));
}

uint32_t BlockPool::doubted() const { return rep_->doubted; }

void BlockPool::NextCondemned(uint32_t* at, uint32_t look, std::vector<BlockRef>* out) const {
  const Rep& r = *rep_;
  for (auto left = std::min<size_t>(look, r.condemned.size()); left > 0; --left) {
    auto next = r.condemned.upper_bound(*at);
    if (next == r.condemned.end()) next = r.condemned.begin();
    *at = *next;
    if (r.records[*at].has(BlockRecord::kOffered)) out->push_back(r.RefOf(*at));
  }
}

void BlockPool::NextWithSum(WithSum which, uint32_t* at, uint32_t look, size_t most,
                            std::vector<BlockRef>* out) const {
  const Rep& r = *rep_;
  for (uint32_t i = 0; i < std::min(look, r.extent) && most > 0; ++i) {
    *at = *at >= r.extent ? 1 : *at + 1;
    if (!r.records[*at].resident() || !r.has_sum(*at) || r.is_condemned(*at)) continue;
    if (which == WithSum::kDoubted && !r.records[*at].has(BlockRecord::kDoubted)) continue;
    out->push_back(r.RefOf(*at));
    --most;
  }
}

}  // namespace kvpool
