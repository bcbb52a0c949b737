/* The same in C, over libkvpool.so. Run it twice: the second run finds what the first one computed. */
#include <kvpool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kTokens = 1024, kTokensPerBlock = 16, kBlocks = kTokens / kTokensPerBlock, kBlockBytes = 65536, kTimeoutMs = 30000 };

static void check(int code) {
  if (code != KVPOOL_OK) exit((fprintf(stderr, "%s\n", kvpool_last_error()), 1));
}

int main(void) {
  /* Opaque blocks: another layout than that of the C++ example, and so another fingerprint. */
  kvpool_options options = {.struct_size = sizeof(options), .fingerprint = "my-model-in-c", .fingerprint_bytes = 13,
                            .block_bytes = kBlockBytes, .tokens_per_block = kTokensPerBlock};
  kvpool_session* session;
  check(kvpool_open(&options, &session));

  uint32_t prompt[kTokens] = {0}; /* Token ids. */
  uint8_t keys[kBlocks][KVPOOL_KEY_BYTES];
  check(kvpool_hash_tokens(session, NULL, 0, prompt, kTokens, kTokensPerBlock, keys[0]));
  kvpool_group_keys question = {.keys = keys, .key_count = kBlocks};
  kvpool_match* match;
  uint64_t cached;
  check(kvpool_match_start(session, &question, 1, &match));
  check(kvpool_match_wait(match, kTimeoutMs, &cached, NULL));
  printf("%d of %d tokens were cached\n", (int)cached, kTokens);

  const size_t first = cached / kTokensPerBlock, missing = kBlocks - first;
  kvpool_block blocks[kBlocks];
  if (missing > 0) {
    check(kvpool_lease_within(session, blocks, missing, kTimeoutMs));
    for (size_t i = 0; i < missing; ++i) { /* The model writes K and V in place. */
      memset((char*)(uintptr_t)kvpool_base(session) + (uint32_t)blocks[i] * kvpool_block_stride_bytes(session), 7, kBlockBytes);
    }
    kvpool_seal_arguments share = {.struct_size = sizeof(share), .blocks = blocks, .block_count = missing, .keys = keys[first],
                                   .parent_key = first > 0 ? keys[first - 1] : NULL};
    check(kvpool_seal_start(session, &share, NULL));
  }
  kvpool_match_free(match);
  check(kvpool_close(session, kTimeoutMs));
  kvpool_free(session);
  return 0;
}
