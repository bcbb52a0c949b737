/* The same in C, over libkvpool.so. Run it twice: the second run finds what the first one computed. */
#include <kvpool.h>
#include <stdio.h>
#define CHECK(call) \
  if ((call) != KVPOOL_OK) return fprintf(stderr, "%s\n", kvpool_last_error()), 1

int main(void) {
  kvpool_options options = {.struct_size = sizeof(options), .fingerprint = "model-c", .fingerprint_bytes = 7,
                            .block_bytes = 65536, .tokens_per_block = 16};
  kvpool_session* session;
  CHECK(kvpool_open(&options, &session));
  uint32_t prompt[1024] = {7}; /* Token ids. */
  uint8_t keys[64][KVPOOL_KEY_BYTES];
  CHECK(kvpool_hash_tokens(session, NULL, 0, prompt, 1024, 16, keys[0]));
  kvpool_match* match;
  uint64_t cached;
  CHECK(kvpool_match_start(session, &(kvpool_group_keys){.keys = keys, .key_count = 64}, 1, &match));
  CHECK(kvpool_match_wait(match, 30000, &cached, NULL));
  printf("%d of 1024 tokens were cached\n", (int)cached);
  const size_t first = cached / 16, missing = 64 - first;
  kvpool_block blocks[64];
  if (missing > 0) CHECK(kvpool_lease_within(session, blocks, missing, 30000));
  for (size_t i = 0; i < missing; ++i) *(float*)kvpool_data(session, blocks[i]) = 7; /* K and V, in place. */
  kvpool_seal_arguments share = {.struct_size = sizeof(share), .blocks = blocks, .block_count = missing,
                                 .keys = keys[first], .parent_key = first > 0 ? keys[first - 1] : NULL};
  if (missing > 0) CHECK(kvpool_seal_start(session, &share, NULL));
  kvpool_match_free(match);
  CHECK(kvpool_close(session, 30000));
  kvpool_free(session);
}
