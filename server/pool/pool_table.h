// What of a pool outlives the process, in memory that another process keeps (server/keeper).
//
//   what                            written by                              before
//   record: generation, state       Lease, Seal, Reclaim, Release           the answer
//   record: key, parent, checksum   Seal                                    the state that makes them count
//   holds                           every verb that takes or gives them     the answer
//   protections                     Pin, SetRetention, their ends           the answer
//   sums of content                 KeepSum                                 nothing that is answered
//   aliases                         Seal                                    the state, and kAliased with it
//
// Nothing else of a record counts after a crash, but for kProtected and kAliased: refs, children, lists and the index are computed again. A
// process may be killed between any two stores, and what it leaves is right, for a block's fate depends on two things only:
//
//                 resident, and the record is whole     anything else
//   held          sealed                                quarantined, until its holders are gone
//   not held      cached                                free
//
// A torn verb was not answered, so nobody relies on what it took; what it gave back, the engine asked to give back. So it
// would do for sessions that end with the process. One that goes on sends again what was not answered, and giving back twice
// is one time too many: the words of the turn that was torn are put back (undo_log.h), so that it never was.
#ifndef KVPOOL_SERVER_POOL_POOL_TABLE_H_
#define KVPOOL_SERVER_POOL_POOL_TABLE_H_

#include <array>
#include <cstdint>

#include "proto/support/limits.h"
#include "server/pool/block_record.h"
#include "server/pool/hold_table.h"
#include "server/pool/key_hash.h"
#include "server/pool/undo_log.h"

namespace kvpool {

class PoolTable {
 public:
  static uint64_t Bytes(uint32_t max_blocks, uint32_t sessions) {
    return AliasesAt(max_blocks, sessions) + max_blocks * sizeof(KeptAliases);
  }
  // Of a table of before there were sums and aliases.
  static uint64_t BytesWithoutSums(uint32_t max_blocks, uint32_t sessions) {
    return ProtectionsAt(max_blocks, sessions) + max_blocks * sizeof(KeptProtection);
  }
  // The pages of holds that its sessions can need together. REQUIRES of a pool's table: at most UINT32_MAX.
  static uint64_t Pages(uint32_t max_blocks, uint32_t sessions) {
    return (uint64_t{max_blocks} + HoldPage::kBlocks - 1) / HoldPage::kBlocks * sessions;
  }
  // `data` is aligned to 64 bytes.
  PoolTable(void* data, uint32_t max_blocks, uint32_t sessions)
      : begun(*static_cast<Begun*>(data)),
        records(reinterpret_cast<BlockRecord*>(static_cast<char*>(data) + kRecordsAt)),
        checksums(reinterpret_cast<uint32_t*>(static_cast<char*>(data) + ChecksumsAt(max_blocks))),
        pages(reinterpret_cast<HoldPage*>(static_cast<char*>(data) + PagesAt(max_blocks))),
        page_count(static_cast<uint32_t>(Pages(max_blocks, sessions))),
        data(static_cast<char*>(data)),
        undo(reinterpret_cast<UndoLog::Entry*>(static_cast<char*>(data) + UndoAt(max_blocks, sessions))),
        protections(reinterpret_cast<KeptProtection*>(static_cast<char*>(data) +
                                                      ProtectionsAt(max_blocks, sessions))),
        sums(reinterpret_cast<uint64_t*>(static_cast<char*>(data) + BytesWithoutSums(max_blocks, sessions))),
        aliases(reinterpret_cast<KeptAliases*>(static_cast<char*>(data) + AliasesAt(max_blocks, sessions))) {}

  // What lies behind these was never used: the memory there need not be looked at.
  struct Begun {
    uint32_t blocks;
    uint32_t hold_pages;
    uint64_t turn;       // UndoLog's.
    uint64_t half_turn;  // The last one that was torn and could not be undone; 0: none.
  };
  // Of a block whose record has kProtected, if the generation is the record's. Pages without a protected block take no memory.
  // Times are TimeMs; 0: it is not pinned.
  struct KeptProtection {
    uint64_t pin_until;
    uint64_t retain_until;
    uint64_t retention_due;
    uint64_t half_life_ms;
    // Of the generation, above, and the priority. It is stored last, and in one piece: a generation never has the priority of
    // another.
    uint64_t whose;
    uint32_t generation() const { return static_cast<uint32_t>(whose >> 32); }
    uint32_t priority() const { return static_cast<uint32_t>(whose); }
  };
  // The keys of a block besides the chain's, if its record has kAliased and the generation is the record's. Pages without such
  // a block take no memory.
  struct KeptAliases {
    static constexpr uint32_t kMost = kMaxKeysPerBlock - 1;
    uint64_t whose;  // The generation, above, and how many there are.
    uint32_t checksum;
    uint8_t raw[kMost];  // BlockKey::raw of each. Their group is the block's.
    std::array<uint8_t, 32> keys[kMost];
    uint32_t generation() const { return static_cast<uint32_t>(whose >> 32); }
    uint32_t count() const { return static_cast<uint32_t>(whose); }
    // With the block's own key: a version that knows no aliases may have sealed it anew under another one, in the same generation.
    // REQUIRES: count() <= kMost.
    uint32_t Checksum(uint32_t block, const BlockRecord& record) const {
      uint64_t sum = whose ^ uint64_t { block } << 16 ^ HashKeyWith(kPublicKeyHash, record.block_key());
      for (uint32_t i = 0; i < count(); ++i)
        sum = sum * 0x9e3779b97f4a7c15u ^ HashKeyWith(kPublicKeyHash, key(i, record.group()));
      return static_cast<uint32_t>(sum ^ sum >> 32);
    }
    BlockKey key(uint32_t i, uint8_t group) const {
      return {.bytes = keys[i], .group = group, .raw = raw[i] != 0};
    }
  };
  static_assert(sizeof(KeptAliases) == 248);
  Begun& begun;
  BlockRecord* const records;  // Indexed by block, as are the checksums.
  uint32_t* const checksums;
  HoldPage* const pages;
  const uint32_t page_count;
  char* const data;
  UndoLog::Entry* const undo;
  KeptProtection* const protections;  // Indexed by block.
  // Indexed by block: a generation, above, and the CRC-32C of the content that was sealed in it. That of another generation
  // is none, so that those of a daemon that knows no sums, and has the table in between, are told apart by themselves. Pages
  // without one take no memory.
  uint64_t* const sums;
  KeptAliases* const aliases;  // Indexed by block.

 private:
  static constexpr uint64_t kRecordsAt = 64;
  static uint64_t ChecksumsAt(uint32_t max_blocks) { return kRecordsAt + max_blocks * sizeof(BlockRecord); }
  static uint64_t PagesAt(uint32_t max_blocks) {
    return (ChecksumsAt(max_blocks) + max_blocks * sizeof(uint32_t) + 63) / 64 * 64;
  }
  static uint64_t UndoAt(uint32_t max_blocks, uint32_t sessions) {
    return PagesAt(max_blocks) + Pages(max_blocks, sessions) * sizeof(HoldPage);
  }
  static uint64_t AliasesAt(uint32_t max_blocks, uint32_t sessions) {
    return BytesWithoutSums(max_blocks, sessions) + max_blocks * sizeof(uint64_t);
  }
  static uint64_t ProtectionsAt(uint32_t max_blocks, uint32_t sessions) {
    return UndoAt(max_blocks, sessions) + UndoLog::Entries(max_blocks) * sizeof(UndoLog::Entry);
  }
};

// Of what stays the same from Seal to eviction. The next daemon hashes with other words, but for the public ones.
inline uint32_t RecordChecksum(uint32_t block, const BlockRecord& record) {
  const uint64_t key_hash = HashKeyWith(kPublicKeyHash, record.block_key());
  const uint64_t life = uint64_t{record.generation} << 32 | record.parent;
  const unsigned __int128 product = static_cast<unsigned __int128>(key_hash ^ 0x9e3779b97f4a7c15u) *
                                    (life ^ uint64_t{block} << 16 ^ 0xd6e8feb86659fd93u);
  const uint64_t folded = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  return static_cast<uint32_t>(folded ^ folded >> 32);
}

}  // namespace kvpool

#endif  // KVPOOL_SERVER_POOL_POOL_TABLE_H_
