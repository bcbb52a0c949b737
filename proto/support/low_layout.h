// How DISPOSITION_LOW (proto/kvpool/v1/score.proto) fills blocks with tokens in 2, 4 or 8 bits an element: arithmetic that an
// engine, the daemon and its kernels share. A record has 32 tokens of one plane, in this order, without gaps:
//
//   K's ranges    k_head_dim pairs (scale, zero)       one for each channel, over the record's tokens
//   K's codes     32 rows of k_row_bytes               rows are whole words of 32 bits
//   V's ranges    32 pairs (scale, zero)               one for each token; absent without V, as is what follows
//   V's codes     32 rows of v_row_bytes
//
// A block has records_per_block of them, from its start on. With `planes` planes, tokens [32 g, 32 g + 32) of plane p's list are
// record r = g * planes + p: that is record r % records_per_block of block r / records_per_block.
#ifndef KVPOOL_PROTO_SUPPORT_LOW_LAYOUT_H_
#define KVPOOL_PROTO_SUPPORT_LOW_LAYOUT_H_

#include <cstdint>

namespace kvpool {

struct LowOptions {
  uint32_t planes = 0;  // layers * kv_heads of one rank
  uint32_t k_head_dim = 0, v_head_dim = 0;
  uint32_t bits = 0;
  uint64_t block_bytes = 0;
};

struct LowLayout {
  static constexpr uint32_t kGroupTokens = 32;
  static constexpr uint32_t kRangeBytes = 4;  // A scale and a zero, each an f16.
  static constexpr uint32_t kWordBytes = 4;
  static constexpr uint32_t kDefaultBits = 4;

  uint32_t planes = 0;
  uint32_t bits = 0;
  uint32_t k_row_bytes = 0, v_row_bytes = 0;
  uint32_t k_codes_at = 0, v_ranges_at = 0,
           v_codes_at = 0;  // Bytes behind the start of a record; K's ranges are at 0.
  uint32_t record_bytes = 0;
  uint32_t records_per_block = 0;  // 0: not even one fits.

  static constexpr bool CanHave(uint32_t bits) { return bits == 2 || bits == 4 || bits == 8; }
  // REQUIRES: CanHave(options.bits); head dims are at most kMaxHeadDim.
  static constexpr LowLayout Of(const LowOptions& options) {
    const uint32_t in_word = kWordBytes * 8 / options.bits;
    LowLayout layout{.planes = options.planes,
                     .bits = options.bits,
                     .k_row_bytes = (options.k_head_dim + in_word - 1) / in_word * kWordBytes,
                     .v_row_bytes = (options.v_head_dim + in_word - 1) / in_word * kWordBytes};
    layout.k_codes_at = options.k_head_dim * kRangeBytes;
    layout.v_ranges_at = layout.k_codes_at + kGroupTokens * layout.k_row_bytes;
    layout.v_codes_at = layout.v_ranges_at + (options.v_head_dim > 0 ? kGroupTokens * kRangeBytes : 0);
    layout.record_bytes = layout.v_codes_at + kGroupTokens * layout.v_row_bytes;
    layout.records_per_block = static_cast<uint32_t>(options.block_bytes / layout.record_bytes);
    return layout;
  }

  // What `tokens` tokens of each plane take.
  constexpr uint64_t Records(uint64_t tokens) const {
    return planes * ((tokens + kGroupTokens - 1) / kGroupTokens);
  }
  // REQUIRES: records_per_block is above 0.
  constexpr uint64_t Blocks(uint64_t tokens) const {
    return (Records(tokens) + records_per_block - 1) / records_per_block;
  }
};

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_LOW_LAYOUT_H_
