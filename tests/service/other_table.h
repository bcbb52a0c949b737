// A space's table as other builds would have written it, or find it.
#ifndef KVPOOL_TESTS_SERVICE_OTHER_TABLE_H_
#define KVPOOL_TESTS_SERVICE_OTHER_TABLE_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "server/base/shared_memory.h"
#include "server/keeper/keeper_link.h"
#include "server/space/space_table.h"
#include "tests/service/recovery_fixture.h"

namespace kvpool {

class OtherTable {
 public:
  explicit OtherTable(SharedMemory* memory) : data_(memory->data()) {}

  // REQUIRES: it is of this build's version.
  void Become(uint32_t version, uint32_t oldest_reader) {
    Set(kVersionAt, version);
    Set(readers_at(), oldest_reader);
    // FNV-1a of the header, its checksum being 0, and three times that of what is behind it.
    std::memset(data_ + kChecksumAt, 0, sizeof(uint64_t));
    const size_t end = readers_at() + sizeof(uint32_t);
    const uint64_t sum = Fnv(0, kHeaderBytes) ^ Fnv(kHeaderBytes, end) * 3;
    std::memcpy(data_ + kChecksumAt, &sum, sizeof(sum));
  }
  uint32_t version() const { return Get(kVersionAt); }
  // What a build that knew five numbers of shares has kept, the weight of a rule being the last one, and how it keeps another.
  uint32_t KeptWeight() const {
    return Get(shares_at() + sizeof(uint32_t) + (current() - 1) * kSharesBytes + 16);
  }
  void KeepSharesAsBefore(uint32_t rule_weight) {
    const uint32_t next = current() == 1 ? 2 : 1;
    const size_t at = shares_at() + sizeof(uint32_t) + (next - 1) * kSharesBytes;
    for (size_t i = 0; i < kSharesBytes; i += sizeof(uint32_t)) Set(at + i, 0);
    Set(at + 16, rule_weight);
    Set(shares_at(), next);
  }
  uint32_t had_by() const { return Get(readers_at() + sizeof(uint32_t)); }

 private:
  static constexpr size_t kVersionAt = 8, kChecksumAt = 16, kBytesAt = 40 + sizeof(SpaceGeometry),
                          kHeaderBytes = kBytesAt + 8 + 32;
  static constexpr size_t kSharesBytes = 5 * sizeof(uint32_t);
  size_t shares_at() const { return (readers_at() + 2 * sizeof(uint32_t) + 3) / 4 * 4; }
  uint32_t current() const { return Get(shares_at()); }
  size_t readers_at() const { return kHeaderBytes + Get(kBytesAt) + Get(kBytesAt + sizeof(uint32_t)); }
  uint64_t Fnv(size_t begin, size_t end) const {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = begin; i < end; ++i)
      hash = (hash ^ static_cast<unsigned char>(data_[i])) * 0x100000001b3u;
    return hash;
  }
  uint32_t Get(size_t at) const {
    uint32_t number = 0;
    std::memcpy(&number, data_ + at, sizeof(number));
    return number;
  }
  void Set(size_t at, uint32_t number) { std::memcpy(data_ + at, &number, sizeof(number)); }

  char* const data_;
};

// The only table that the keeper has, between two daemons.
template <typename Visit>
void VisitTable(ServedKeeper* keeper, Visit visit) {
  auto link = JoinKeeper(keeper->Connect());
  ASSERT_TRUE(link.ok()) << link.status();
  int tables = 0;
  for (KeptThing& thing : (*link)->TakeInherited()) {
    thing.kept.Forget();
    if (thing.kind != KeptKind::kTable) continue;
    auto memory = SharedMemory::Map(std::move(thing.fd));
    ASSERT_TRUE(memory.ok()) << memory.status();
    visit(OtherTable(&*memory));
    ++tables;
  }
  EXPECT_EQ(tables, 1);
  (*link)->Leave();
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SERVICE_OTHER_TABLE_H_
