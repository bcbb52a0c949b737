/* An engine in C whose slabs others want. It gives them back by call and takes holes, and is told what to do line by line:
 *
 *   (empty)      "open" once the session is open
 *   fill BLOCKS  shares blocks until so many are mapped, and holds one of the last slab: "ok"
 *   asked        waits until a slab is asked back: for how many milliseconds an answer counts
 *   turn         gives back what is asked back: for how many milliseconds that would have counted, and the bytes; "-1 0": nothing was
 *   ranges       the blocks that are mapped, as pairs; what the held block has must be there still
 *   id           the session's number */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/c/kvpool.h"

enum { kBlockBytes = 64 << 10, kTokensPerBlock = 16, kSlabBlocks = 64, kTimeoutMs = 60000, kRanges = 16 };

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (condition) break;                                                   \
    printf("line %d: %s: %s\n", __LINE__, #condition, kvpool_last_error()); \
    exit(1);                                                                \
  } while (0)

static kvpool_block held;

static uint32_t index_of(kvpool_block block) { return (uint32_t)block; }

static void pause_a_little(void) {
  const struct timespec pause = {.tv_nsec = 1000000};
  nanosleep(&pause, NULL);
}

/* Leases a block, writes and seals it; it stays in the cache, or is held. */
static kvpool_block share(kvpool_session* session, uint32_t number, int hold) {
  uint32_t tokens[kTokensPerBlock];
  uint8_t key[KVPOOL_KEY_BYTES];
  for (uint32_t i = 0; i < kTokensPerBlock; ++i) tokens[i] = number;
  CHECK(kvpool_hash_tokens(session, NULL, 0, tokens, kTokensPerBlock, kTokensPerBlock, key) == KVPOOL_OK);
  kvpool_block block, canonical;
  CHECK(kvpool_lease_within(session, &block, 1, kTimeoutMs) == KVPOOL_OK);
  memset(kvpool_data(session, block), 'a' + (int)(number % 26), kBlockBytes);
  const kvpool_seal_arguments arguments = {
      .struct_size = sizeof(arguments), .blocks = &block, .block_count = 1, .keys = key};
  kvpool_seal* seal = NULL;
  CHECK(kvpool_seal_start(session, &arguments, &seal) == KVPOOL_OK);
  CHECK(kvpool_seal_wait(seal, kTimeoutMs, &canonical) == KVPOOL_OK && canonical == block);
  kvpool_seal_free(seal);
  if (!hold) kvpool_release(session, &block, 1, 0);
  return block;
}

static void fill(kvpool_session* session, uint32_t blocks) {
  uint32_t number = 0;
  while (kvpool_mapped_blocks(session) < blocks) share(session, number++, 0);
  for (held = 0; held == 0;) {
    const kvpool_block block = share(session, number, 1);
    if (index_of(block) >= blocks - kSlabBlocks) {
      held = block;
      memset(kvpool_data(session, held), 'h', kBlockBytes);
    } else {
      kvpool_release(session, &block, 1, 0);
    }
    ++number;
  }
  CHECK(kvpool_flush(session, kTimeoutMs) == KVPOOL_OK);
  puts("ok");
}

static void print_ranges(kvpool_session* session) {
  kvpool_block_range ranges[kRanges];
  const size_t count = kvpool_mapped_ranges(session, ranges, kRanges);
  CHECK(count <= kRanges && kvpool_status(session) == KVPOOL_OK);
  const char* const data = kvpool_data(session, held);
  for (size_t i = 0; i < kBlockBytes; ++i) CHECK(data[i] == 'h');
  for (size_t i = 0; i < count; ++i)
    printf("%s%" PRIu32 "-%" PRIu32, i == 0 ? "" : " ", ranges[i].first, ranges[i].end);
  puts("");
}

int main(int argc, char** argv) {
  CHECK(argc == 2);
  const kvpool_options options = {.struct_size = sizeof(options),
                                  .socket = argv[1],
                                  .client_name = "giver",
                                  .fingerprint = "giver",
                                  .fingerprint_bytes = 5,
                                  .block_bytes = kBlockBytes,
                                  .tokens_per_block = kTokensPerBlock,
                                  .magazine_blocks = 16,
                                  .give_back = KVPOOL_GIVE_BACK_BY_CALL,
                                  .holes = 1};
  kvpool_session* session = NULL;
  CHECK(kvpool_open(&options, &session) == KVPOOL_OK);
  char line[64];
  while (fgets(line, sizeof(line), stdin) != NULL) {
    uint32_t blocks = 0;
    if (line[0] == '\n') {
      puts("open");
    } else if (sscanf(line, "fill %" SCNu32, &blocks) == 1) {
      fill(session, blocks);
    } else if (strcmp(line, "asked\n") == 0) {
      while (kvpool_slabs_asked_back(session) == 0) pause_a_little();
      printf("%" PRId64 "\n", (int64_t)kvpool_asked_back_within_ms(session));
    } else if (strcmp(line, "turn\n") == 0) {
      const int64_t within = (int64_t)kvpool_asked_back_within_ms(session);
      uint64_t bytes = 0;
      CHECK(kvpool_give_back_slabs(session, &bytes) == KVPOOL_OK);
      if (bytes == 0) pause_a_little();
      printf("%" PRId64 " %" PRIu64 "\n", within, bytes);
    } else if (strcmp(line, "ranges\n") == 0) {
      print_ranges(session);
    } else if (strcmp(line, "id\n") == 0) {
      printf("%" PRIu64 "\n", kvpool_session_id(session));
    } else {
      CHECK(!"a command");
    }
    fflush(stdout);
  }
  kvpool_free(session);
  return 0;
}
