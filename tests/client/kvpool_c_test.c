/* The C ABI as a C program uses it: opens a session with a real daemon, leases, writes, seals, and finds it again. With a
 * command that kills a daemon behind the socket, it finds it again after that, too. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/kvpool.h"

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, kvpool_last_error()); \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

enum { kBlocks = 8, kTokensPerBlock = 16, kBlockBytes = 4096, kTimeoutMs = 60000 };

static char* address_of(kvpool_session* session, kvpool_block block) {
  char* const address = kvpool_data(session, block);
  CHECK((uintptr_t)address == kvpool_base(session) + (uint32_t)block * kvpool_block_stride_bytes(session));
  return address;
}

/* Writes and seals a sequence, and gives it back: it stays in the cache. */
static void share(kvpool_session* session, const uint8_t* keys) {
  kvpool_block blocks[kBlocks], canonical[kBlocks];
  CHECK(kvpool_lease_within(session, blocks, kBlocks, kTimeoutMs) == KVPOOL_OK);
  for (int i = 0; i < kBlocks; ++i) memset(address_of(session, blocks[i]), 'a' + i, kBlockBytes);
  kvpool_seal_arguments arguments = {.struct_size = sizeof(arguments),
                                     .blocks = blocks,
                                     .block_count = kBlocks,
                                     .keys = keys,
                                     .after = KVPOOL_CURRENT_STEP};
  kvpool_seal* seal = NULL;
  CHECK(kvpool_seal_start(session, &arguments, &seal) == KVPOOL_OK);
  CHECK(kvpool_seal_wait(seal, kTimeoutMs, canonical) == KVPOOL_OK);
  CHECK(kvpool_seal_ready(seal));
  CHECK(memcmp(blocks, canonical, sizeof(blocks)) == 0);
  kvpool_seal_free(seal);
  /* Again: another block holds what its key names, unless it is to leave it. */
  kvpool_block own;
  CHECK(kvpool_lease_within(session, &own, 1, kTimeoutMs) == KVPOOL_OK);
  arguments.blocks = &own;
  arguments.block_count = 1;
  for (arguments.leave_duplicates = 0; arguments.leave_duplicates < 2; ++arguments.leave_duplicates) {
    CHECK(kvpool_seal_start(session, &arguments, &seal) == KVPOOL_OK);
    CHECK(kvpool_seal_wait(seal, kTimeoutMs, canonical) == KVPOOL_OK);
    CHECK(canonical[0] == (arguments.leave_duplicates ? 0 : blocks[0]));
    kvpool_seal_free(seal);
  }
  /* A caller whose header ended before leave_duplicates, and whose memory goes on with something else. */
  arguments.struct_size = offsetof(kvpool_seal_arguments, leave_duplicates);
  CHECK(arguments.leave_duplicates != 0);
  arguments.after = 1u << 30; /* A step that nobody begins. */
  CHECK(kvpool_seal_start(session, &arguments, &seal) == KVPOOL_OK);
  CHECK(kvpool_seal_wait(seal, kTimeoutMs, canonical) == KVPOOL_OK);
  CHECK(canonical[0] == blocks[0]);
  kvpool_seal_free(seal);
  kvpool_release(session, &own, 1, 0);
  CHECK(kvpool_touch(session, blocks, kBlocks) == KVPOOL_OK);
  CHECK(kvpool_ref(session, blocks, 1) == KVPOOL_OK);
  kvpool_release(session, blocks, 1, 0);
  kvpool_release(session, blocks, kBlocks, KVPOOL_CURRENT_STEP);
  CHECK(kvpool_flush(session, kTimeoutMs) == KVPOOL_OK);
}

static void find(kvpool_session* session, const uint8_t* keys) {
  const kvpool_group_keys asked = {.keys = keys, .key_count = kBlocks};
  kvpool_match_options options = {.struct_size = sizeof(options), .wait_ms = 60001};
  kvpool_match* match = NULL;
  uint64_t tokens = 0, below = 1;
  size_t count = 0;
  kvpool_block blocks[kBlocks];
  CHECK(kvpool_match_start_with(session, &asked, 1, &options, &match) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "wait_ms: 60001, where at most 60000 are allowed") != NULL);
  options.wait_ms = 1000;
  CHECK(kvpool_match_start_with(session, &asked, 1, &options, &match) == KVPOOL_OK);
  CHECK(kvpool_match_below(match, &below) == KVPOOL_FAILED_PRECONDITION);
  CHECK(kvpool_match_wait(match, kTimeoutMs, &tokens, NULL) == KVPOOL_OK);
  CHECK(kvpool_match_below(match, &below) == KVPOOL_OK && below == 0);
  CHECK(kvpool_match_ready(match));
  CHECK(tokens == kBlocks * kTokensPerBlock);
  CHECK(kvpool_match_take(match, 0, blocks, 1, &count) == KVPOOL_RESOURCE_EXHAUSTED);
  CHECK(kvpool_match_take(match, 1, blocks, kBlocks, &count) == KVPOOL_INVALID_ARGUMENT);
  CHECK(kvpool_match_take(match, 0, blocks, kBlocks, &count) == KVPOOL_OK);
  CHECK(count == kBlocks);
  kvpool_match_free(match);
  for (int i = 0; i < kBlocks; ++i) CHECK(address_of(session, blocks[i])[kBlockBytes - 1] == 'a' + i);
  CHECK(kvpool_release_with_hint(session, blocks, count, 0, 4, 0) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "reuse is 4") != NULL);
  CHECK(kvpool_release_with_hint(session, blocks, count, 0, KVPOOL_REUSE_EXPECTED, 16) ==
        KVPOOL_INVALID_ARGUMENT);
  CHECK(kvpool_set_retention_decaying(session, blocks, count, 60, 60000, 1000) == KVPOOL_OK);
  CHECK(kvpool_set_retention(session, blocks, count, 101, 60000) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "priority is 101; must be 0 to 100") != NULL);
  CHECK(kvpool_report_prefill(session, 512, 1024, 8400) == KVPOOL_OK);
  CHECK(kvpool_report_prefill(session, 0, 1024, 8400) == KVPOOL_INVALID_ARGUMENT);
  CHECK(kvpool_pin(session, blocks, count, UINT64_MAX) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "ttl_ms is 18446744073709551615; must be 1 to 86400000") != NULL);
  CHECK(kvpool_pin(session, blocks, count, 0) == KVPOOL_INVALID_ARGUMENT);
  CHECK(kvpool_set_retention_decaying(session, blocks, count, 60, 60000, 86400001) ==
        KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "half_life_ms is 86400001; must be 0 to 86400000") != NULL);
  CHECK(kvpool_release_with_hint(session, blocks, count, 0, KVPOOL_REUSE_EXPECTED, 2) == KVPOOL_OK);
  CHECK(kvpool_flush(session, kTimeoutMs) == KVPOOL_OK);
}

/* Finds what was shared before the daemon was killed; until the next one has it, nothing is found. */
static void find_again(kvpool_session* session, const uint8_t* keys) {
  const kvpool_group_keys asked = {.keys = keys, .key_count = kBlocks};
  kvpool_block blocks[kBlocks];
  uint64_t tokens = 0;
  size_t count = 0;
  while (count == 0) {
    kvpool_match* match = NULL;
    CHECK(kvpool_match_start(session, &asked, 1, &match) == KVPOOL_OK);
    CHECK(kvpool_match_wait(match, kTimeoutMs, &tokens, NULL) == KVPOOL_OK);
    CHECK(kvpool_match_take(match, 0, blocks, kBlocks, &count) == KVPOOL_OK);
    kvpool_match_free(match);
  }
  CHECK(count == kBlocks);
  for (int i = 0; i < kBlocks; ++i) CHECK(address_of(session, blocks[i])[kBlockBytes - 1] == 'a' + i);
  kvpool_release(session, blocks, count, 0);
}

/* `kill` is a command that ends a daemon whose successor goes on with its sessions. */
static void live_through(kvpool_session* session, const uint8_t* keys, const char* kill) {
  kvpool_block block;
  CHECK(kvpool_lease_within(session, &block, 1, kTimeoutMs) == KVPOOL_OK);
  memset(address_of(session, block), 'z', kBlockBytes);
  for (int i = 0; i < 3; ++i) {
    CHECK(system(kill) == 0);
    find_again(session, keys);
    CHECK(kvpool_status(session) == KVPOOL_OK);
    kvpool_block more[kBlocks];
    CHECK(kvpool_lease_within(session, more, kBlocks, kTimeoutMs) == KVPOOL_OK);
    for (int j = 0; j < kBlocks; ++j) CHECK((uint32_t)more[j] != (uint32_t)block);
    kvpool_release(session, more, kBlocks, 0);
  }
  CHECK(address_of(session, block)[kBlockBytes - 1] == 'z');
  kvpool_release(session, &block, 1, 0);
  CHECK(kvpool_close(session, kTimeoutMs) == KVPOOL_OK);
  kvpool_free(session);
}

/* Holds a sequence to a budget: opaque blocks can't be scored, and the error says so. */
static void prune(kvpool_session* session) {
  kvpool_block blocks[4];
  CHECK(kvpool_lease_within(session, blocks, 4, kTimeoutMs) == KVPOOL_OK);
  kvpool_prune_arguments arguments = {.struct_size = sizeof(arguments),
                                      .blocks = blocks,
                                      .block_count = 4,
                                      .budget_tokens = 2 * kTokensPerBlock,
                                      .after = KVPOOL_CURRENT_STEP};
  kvpool_operation* operation = NULL;
  CHECK(kvpool_prune_start(session, &arguments, &operation) == KVPOOL_OK);
  size_t count = 0;
  CHECK(kvpool_operation_table(operation, NULL, 0, &count) == KVPOOL_FAILED_PRECONDITION);
  CHECK(kvpool_operation_wait(operation, kTimeoutMs, NULL, NULL) == KVPOOL_FAILED_PRECONDITION);
  CHECK(strstr(kvpool_last_error(), "opaque") != NULL);
  kvpool_operation_free(operation);
  kvpool_release(session, blocks, 4, KVPOOL_CURRENT_STEP);
}

/* A serialised kvpool.v1.Operation { select { sequence { blocks: … } window { queries: 1 q_heads: 1 data { inlined: 4 bytes } }
 * budget_blocks: 1 } }, whose answer is that this layout says nothing of keys. */
static void select_blocks(kvpool_session* session) {
  kvpool_block block;
  CHECK(kvpool_lease_within(session, &block, 1, kTimeoutMs) == KVPOOL_OK);
  uint8_t request[] = {0xb2, 0x01, 28, 0x0a, 10, 0x12, 8, 0,    0, 0, 0, 0, 0, 0,    0, 0x12,
                       12,   0x08, 1,  0x10, 1,  0x2a, 6, 0x0a, 4, 0, 0, 0, 0, 0x20, 1};
  for (int i = 0; i < 8; ++i) request[7 + i] = (uint8_t)(block >> 8 * i);
  kvpool_operation* operation = NULL;
  CHECK(kvpool_operation_start(session, request, sizeof(request), &operation) == KVPOOL_OK);
  CHECK(kvpool_operation_wait(operation, kTimeoutMs, NULL, NULL) == KVPOOL_FAILED_PRECONDITION);
  CHECK(strstr(kvpool_last_error(), "opaque") != NULL);
  kvpool_operation_free(operation);
  kvpool_release(session, &block, 1, KVPOOL_CURRENT_STEP);
}

/* Two layers' budgets: a serialised kvpool.v1.Operation { plan_budgets { method: UNIFORM layers: 2 tokens_per_layer: 7 } }. */
static void plan(kvpool_session* session) {
  const uint8_t request[] = {0x9a, 0x01, 6, 0x08, 1, 0x10, 2, 0x18, 7};
  kvpool_operation* operation = NULL;
  CHECK(kvpool_operation_start(session, request, sizeof(request), &operation) == KVPOOL_OK);
  const void* result = NULL;
  size_t bytes = 0;
  CHECK(kvpool_operation_wait(operation, kTimeoutMs, &result, &bytes) == KVPOOL_OK);
  CHECK(kvpool_operation_ready(operation));
  /* plan_budgets { budget_tokens: [7, 7] } */
  const uint8_t expected[] = {0xaa, 0x01, 4, 0x0a, 2, 7, 7};
  CHECK(bytes == sizeof(expected) && memcmp(result, expected, bytes) == 0);
  kvpool_operation_free(operation);
  CHECK(kvpool_operation_start(session, request, 3, &operation) == KVPOOL_INVALID_ARGUMENT);
}

/* Two sets of one block each; a question is answered from the one that it is nearer to. */
static void episodes(kvpool_session* session) {
  static const char* const names[] = {"travel", "money"};
  static const float centroids[][2] = {{0, 1}, {1, 0}};
  kvpool_operation* operation = NULL;
  for (int i = 0; i < 2; ++i) {
    kvpool_block block;
    CHECK(kvpool_lease_within(session, &block, 1, kTimeoutMs) == KVPOOL_OK);
    memset(address_of(session, block), 'A' + i, kBlockBytes);
    const kvpool_table table = {.blocks = &block, .block_count = 1, .last_block_tokens = 3 + i};
    kvpool_put_episode_arguments arguments = {.struct_size = sizeof(arguments),
                                              .name = names[i],
                                              .centroid = centroids[i],
                                              .centroid_count = 2,
                                              .tables = &table,
                                              .table_count = 1,
                                              .after = KVPOOL_CURRENT_STEP};
    CHECK(kvpool_put_episode_start(session, &arguments, &operation) == KVPOOL_OK);
    CHECK(kvpool_operation_wait(operation, kTimeoutMs, NULL, NULL) == KVPOOL_OK);
    kvpool_operation_free(operation);
    arguments.name = "";
    CHECK(kvpool_put_episode_start(session, &arguments, &operation) == KVPOOL_OK);
    CHECK(kvpool_operation_wait(operation, kTimeoutMs, NULL, NULL) == KVPOOL_INVALID_ARGUMENT);
    CHECK(strstr(kvpool_last_error(), "put_episode.name") != NULL);
    kvpool_operation_free(operation);
    kvpool_release(session, &block, 1, 0); /* The set holds it by itself. */
  }
  const float question[] = {0.9f, 0.1f};
  kvpool_episode* episode = NULL;
  CHECK(kvpool_choose_episode_start(session, question, 2, NULL, &episode) == KVPOOL_OK);
  kvpool_block found[1];
  kvpool_table table;
  CHECK(kvpool_episode_take(episode, 0, found, 1, &table) == KVPOOL_FAILED_PRECONDITION);
  const char* name = NULL;
  float similarity = 0;
  size_t tables = 0;
  CHECK(kvpool_episode_wait(episode, kTimeoutMs, &name, &similarity, &tables) == KVPOOL_OK);
  CHECK(kvpool_episode_ready(episode));
  CHECK(strcmp(name, "money") == 0 && similarity > 0.99f && similarity <= 1 && tables == 1);
  CHECK(kvpool_episode_take(episode, 1, found, 1, &table) == KVPOOL_INVALID_ARGUMENT);
  CHECK(kvpool_episode_take(episode, 0, found, 0, &table) == KVPOOL_RESOURCE_EXHAUSTED);
  CHECK(kvpool_episode_take(episode, 0, NULL, 0, &table) == KVPOOL_OK);
  CHECK(table.block_count == 1 && table.last_block_tokens == 4 && table.group == 0);
  CHECK(kvpool_episode_take(episode, 0, found, 1, &table) == KVPOOL_OK);
  CHECK(table.block_count == 1);
  kvpool_table again;
  kvpool_block nothing[1] = {7};
  CHECK(kvpool_episode_take(episode, 0, nothing, 1, &again) == KVPOOL_OK);
  CHECK(again.block_count == 0 && nothing[0] == 7);
  kvpool_episode_free(episode);
  CHECK(address_of(session, found[0])[kBlockBytes - 1] == 'B');
  kvpool_release(session, found, 1, KVPOOL_CURRENT_STEP);

  CHECK(kvpool_choose_episode_start(session, NULL, 0, "work", &episode) == KVPOOL_OK);
  CHECK(kvpool_episode_wait(episode, kTimeoutMs, NULL, NULL, NULL) == KVPOOL_NOT_FOUND);
  CHECK(strstr(kvpool_last_error(), "none of this name") != NULL);
  kvpool_episode_free(episode);
  CHECK(kvpool_choose_episode_start(session, question, 2, NULL, &episode) == KVPOOL_OK);
  kvpool_episode_free(episode); /* Nobody waits: what was held goes back. */
  for (int i = 0; i < 2; ++i) {
    const kvpool_put_episode_arguments removal = {.struct_size = sizeof(removal), .name = names[i]};
    CHECK(kvpool_put_episode_start(session, &removal, &operation) == KVPOOL_OK);
    const void* result = NULL;
    size_t bytes = 0;
    CHECK(kvpool_operation_wait(operation, kTimeoutMs, &result, &bytes) == KVPOOL_OK);
    /* put_episode { episodes: 1 - i, released: 1 } */
    const uint8_t one_left[] = {0xb2, 0x01, 4, 0x08, 1, 0x10, 1}, none_left[] = {0xb2, 0x01, 2, 0x10, 1};
    CHECK(i == 0 ? bytes == sizeof(one_left) && memcmp(result, one_left, bytes) == 0
                 : bytes == sizeof(none_left) && memcmp(result, none_left, bytes) == 0);
    kvpool_operation_free(operation);
  }
}

static int open_with(kvpool_session* session, void* options) {
  (void)session;
  kvpool_session* opened = NULL;
  return kvpool_open(options, &opened);
}
static int count_with(kvpool_session* session, void* counters) {
  return kvpool_read_counters(session, counters);
}
static int match_with(kvpool_session* session, void* options) {
  kvpool_match* match = NULL;
  const int code = kvpool_match_start_with(session, NULL, 0, options, &match);
  kvpool_match_free(match);
  return code;
}
static int seal_with(kvpool_session* session, void* arguments) {
  return kvpool_seal_start(session, arguments, NULL);
}
static int prune_with(kvpool_session* session, void* arguments) {
  kvpool_operation* operation = NULL;
  const int code = kvpool_prune_start(session, arguments, &operation);
  kvpool_operation_free(operation);
  return code;
}
static int put_with(kvpool_session* session, void* arguments) {
  kvpool_operation* operation = NULL;
  const int code = kvpool_put_episode_start(session, arguments, &operation);
  kvpool_operation_free(operation);
  return code;
}

/* Each structure with a struct_size is taken from callers with older and newer headers; see "Versions" in kvpool.h. */
static int hash_with(kvpool_session* session, void* memory) {
  return kvpool_hash_tokens_with(session, memory, NULL, 0, kTokensPerBlock, NULL);
}

/* Blocks in front of salt_from have the keys of no salt, and others have keys of their own. */
static void salts(kvpool_session* session, const uint32_t* tokens, const uint8_t* keys) {
  uint8_t salted[kBlocks * KVPOOL_KEY_BYTES], other[kBlocks * KVPOOL_KEY_BYTES];
  kvpool_hash_options options = {.struct_size = sizeof(options)};
  CHECK(kvpool_hash_tokens_with(session, &options, tokens, kBlocks * kTokensPerBlock, kTokensPerBlock,
                                salted) == KVPOOL_OK);
  CHECK(memcmp(salted, keys, sizeof(salted)) == 0);
  options.salt_from = kTokensPerBlock;
  CHECK(kvpool_hash_tokens_with(session, &options, tokens, kBlocks * kTokensPerBlock, kTokensPerBlock,
                                salted) == KVPOOL_OK);
  CHECK(memcmp(salted, keys, sizeof(salted)) == 0);
  options.salt = "salt";
  options.salt_bytes = 4;
  CHECK(kvpool_hash_tokens_with(session, &options, tokens, kBlocks * kTokensPerBlock, kTokensPerBlock,
                                salted) == KVPOOL_OK);
  CHECK(memcmp(salted, keys, KVPOOL_KEY_BYTES) == 0);
  for (size_t i = 1; i < kBlocks; ++i) {
    CHECK(memcmp(salted + i * KVPOOL_KEY_BYTES, keys + i * KVPOOL_KEY_BYTES, KVPOOL_KEY_BYTES) != 0);
  }
  options.salt_from = 0;
  CHECK(kvpool_hash_tokens_with(session, &options, tokens, kBlocks * kTokensPerBlock, kTokensPerBlock,
                                salted) == KVPOOL_OK);
  CHECK(kvpool_hash_tokens(session, "salt", 4, tokens, kBlocks * kTokensPerBlock, kTokensPerBlock, other) ==
        KVPOOL_OK);
  CHECK(memcmp(salted, other, sizeof(salted)) == 0 && memcmp(salted, keys, KVPOOL_KEY_BYTES) != 0);
  options.salt = NULL;
  CHECK(kvpool_hash_tokens_with(session, &options, tokens, 0, kTokensPerBlock, salted) ==
        KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "options.salt is NULL; salt_bytes is 4") != NULL);
  options.salt_bytes = 0;
  CHECK(kvpool_hash_tokens_with(session, &options, tokens, 0, 0, salted) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "tokens_per_block is 0") != NULL);
}

static void versions(kvpool_session* session) {
  static const struct {
    const char* name;
    size_t bytes;
    int (*call)(kvpool_session*, void*);
  } structures[] = {{"kvpool_options", sizeof(kvpool_options), open_with},
                    {"kvpool_counters", sizeof(kvpool_counters), count_with},
                    {"kvpool_hash_options", sizeof(kvpool_hash_options), hash_with},
                    {"kvpool_match_options", sizeof(kvpool_match_options), match_with},
                    {"kvpool_seal_arguments", sizeof(kvpool_seal_arguments), seal_with},
                    {"kvpool_prune_arguments", sizeof(kvpool_prune_arguments), prune_with},
                    {"kvpool_put_episode_arguments", sizeof(kvpool_put_episode_arguments), put_with}};
  for (size_t i = 0; i < sizeof(structures) / sizeof(structures[0]); ++i) {
    char expected[256];
    size_t memory[4096 / sizeof(size_t)] = {0};
    const size_t unset[] = {0, sizeof(size_t) - 1, sizeof(memory) + 1};
    for (size_t j = 0; j < sizeof(unset) / sizeof(unset[0]); ++j) {
      memory[0] = unset[j];
      CHECK(structures[i].call(session, memory) == KVPOOL_INVALID_ARGUMENT);
      snprintf(expected, sizeof(expected), "%s.struct_size is %zu; must be %zu to 4096: set it to sizeof(%s)",
               structures[i].name, unset[j], sizeof(size_t), structures[i].name);
      CHECK(strcmp(kvpool_last_error(), expected) == 0);
    }
    const size_t known[] = {sizeof(size_t), structures[i].bytes, structures[i].bytes + sizeof(size_t),
                            sizeof(memory)};
    for (size_t j = 0; j < sizeof(known) / sizeof(known[0]); ++j) {
      memset(memory, 0, sizeof(memory));
      memory[0] = known[j];
      structures[i].call(session, memory); /* Most are refused, for what they ask. */
      CHECK(strstr(kvpool_last_error(), "struct_size") == NULL);
    }
    memset(memory, 0, sizeof(memory));
    memory[0] = structures[i].bytes + sizeof(size_t);
    ((char*)memory)[structures[i].bytes + 3] = 1;
    if (structures[i].call ==
        count_with) { /* A result: what was there is of no meaning, and zero afterwards. */
      CHECK(count_with(session, memory) == KVPOOL_OK && ((char*)memory)[structures[i].bytes + 3] == 0);
      continue;
    }
    CHECK(structures[i].call(session, memory) == KVPOOL_INVALID_ARGUMENT);
    snprintf(expected, sizeof(expected),
             "%s.struct_size is %zu and byte %zu is set; this library knows %zu bytes", structures[i].name,
             memory[0], structures[i].bytes + 3, structures[i].bytes);
    CHECK(strstr(kvpool_last_error(), expected) == kvpool_last_error());
  }
}

int main(int argc, char** argv) {
  CHECK(argc == 2 || argc == 3);
  const char* device_uuids[] = {"host"};
  kvpool_options options = {.struct_size = sizeof(options),
                            .socket = argv[1],
                            .client_name = "kvpool_c_test",
                            .fingerprint = "c",
                            .fingerprint_bytes = 1,
                            .block_bytes = kBlockBytes,
                            .tokens_per_block = kTokensPerBlock,
                            .guaranteed_blocks = 32,
                            .device_uuids = device_uuids,
                            .device_uuid_count = 1,
                            .magazine_blocks = 16,
                            .give_back = KVPOOL_GIVE_BACK_BY_CALL,
                            .holes = 1};
  kvpool_session* session = NULL;
  CHECK(kvpool_open(&options, &session) == KVPOOL_OK);
  CHECK(kvpool_status(session) == KVPOOL_OK);
  CHECK(kvpool_session_id(session) != 0);
  CHECK(kvpool_free_blocks(session) >= 16);
  CHECK(kvpool_sink_block(session) != 0);
  CHECK(kvpool_capacity_blocks(session) > kBlocks &&
        kvpool_capacity_blocks(session) <= kvpool_max_blocks(session));
  CHECK(kvpool_mapped_blocks(session) >= kvpool_capacity_blocks(session));
  kvpool_block_range mapped[2] = {{7, 7}, {7, 7}};
  CHECK(kvpool_mapped_ranges(session, mapped, 0) == 1 && mapped[0].end == 7);
  CHECK(kvpool_mapped_ranges(session, mapped, 2) == 1 && mapped[0].first == 0 && mapped[1].end == 7);
  CHECK(mapped[0].end >= kvpool_capacity_blocks(session) && mapped[0].end <= kvpool_mapped_blocks(session));
  CHECK(kvpool_slabs_asked_back(session) == 0);
  CHECK(kvpool_asked_back_within_ms(session) == UINT64_MAX);
  uint64_t given_back = 1;
  CHECK(kvpool_give_back_slabs(session, &given_back) == KVPOOL_OK && given_back == 0);
  CHECK(kvpool_give_back_slabs(session, NULL) == KVPOOL_OK);
  CHECK(!kvpool_draining(session));
  uint8_t uuid[KVPOOL_DEVICE_UUID_BYTES];
  CHECK(kvpool_device_uuid(session, uuid) == 0);

  uint32_t tokens[kBlocks * kTokensPerBlock];
  uint8_t keys[kBlocks * KVPOOL_KEY_BYTES];
  for (uint32_t i = 0; i < kBlocks * kTokensPerBlock; ++i) tokens[i] = i;
  CHECK(kvpool_hash_tokens(session, NULL, 0, tokens, kBlocks * kTokensPerBlock, kTokensPerBlock, keys) ==
        KVPOOL_OK);
  salts(session, tokens, keys);
  share(session, keys);
  find(session, keys);
  if (argc == 3) {
    live_through(session, keys, argv[2]);
    puts("ok");
    return 0;
  }
  prune(session);
  select_blocks(session);
  plan(session);
  episodes(session);

  kvpool_block too_many[1];
  CHECK(kvpool_lease(session, too_many, 0) == KVPOOL_OK);
  for (int i = 0; i < 2; ++i) { /* Counts of which not even the refs would fit in memory. */
    CHECK(kvpool_lease(session, too_many, i == 0 ? kvpool_max_blocks(session) - 1 : SIZE_MAX) ==
          KVPOOL_RESOURCE_EXHAUSTED);
    CHECK(strstr(kvpool_last_error(), " blocks asked; this session can never have more than ") != NULL);
  }
  CHECK(kvpool_lease_within(session, too_many, SIZE_MAX, kTimeoutMs) == KVPOOL_RESOURCE_EXHAUSTED);
  CHECK(kvpool_touch(session, too_many, SIZE_MAX) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "count is 18446744073709551615; must be 0 to 4294967295") != NULL);
  CHECK(kvpool_ref(session, too_many, SIZE_MAX) == KVPOOL_INVALID_ARGUMENT);
  kvpool_release(session, too_many, SIZE_MAX, 0);
  const kvpool_seal_arguments endless = {
      .struct_size = sizeof(endless), .blocks = too_many, .block_count = SIZE_MAX};
  CHECK(kvpool_seal_start(session, &endless, NULL) == KVPOOL_INVALID_ARGUMENT);
  CHECK(kvpool_match_start(session, NULL, 0, NULL) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "Match.groups") != NULL);
  kvpool_counters counters = {.struct_size = sizeof(counters)};
  CHECK(kvpool_read_counters(session, &counters) == KVPOOL_OK);
  CHECK(counters.refused == 0 && counters.leased > 0 && counters.operations > 0 && counters.batches > 0);
  const kvpool_block nobodys = 5;
  kvpool_release(session, &nobodys, 1, 0);
  CHECK(kvpool_flush(session, kTimeoutMs) == KVPOOL_OK);
  CHECK(kvpool_read_counters(session, &counters) == KVPOOL_OK && counters.refused == 1);
  char refusal[64];
  CHECK(kvpool_take_refusal(session, refusal, sizeof(refusal)) == KVPOOL_OK);
  CHECK(strstr(refusal, "release of 1 blocks: ") == refusal && strlen(refusal) < sizeof(refusal));
  CHECK(kvpool_take_refusal(session, refusal, 0) == KVPOOL_NOT_FOUND);
  counters.struct_size = offsetof(kvpool_counters, refused);
  counters.leased = counters.refused = 12345;
  CHECK(kvpool_read_counters(session, &counters) == KVPOOL_OK);
  CHECK(counters.leased != 12345 && counters.refused == 12345);
  versions(session);
  const uint64_t step = kvpool_begin_step(session);
  CHECK(kvpool_current_step(session) == step);
  kvpool_complete_step(session, step);
  CHECK(kvpool_passed_step(session) == step);
  CHECK(kvpool_complete_step_on_stream(session, step, NULL) == KVPOOL_FAILED_PRECONDITION);

  CHECK(kvpool_close(session, kTimeoutMs) == KVPOOL_OK);
  CHECK(kvpool_status(session) == KVPOOL_FAILED_PRECONDITION);
  kvpool_free(session);
  device_uuids[0] = "GPU-of-another-machine";
  CHECK(kvpool_open(&options, &session) != KVPOOL_OK);
  CHECK(strstr(kvpool_last_error(), "GPU-of-another-machine") != NULL);
  device_uuids[0] = NULL;
  CHECK(kvpool_open(&options, &session) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "options.device_uuids[0] is NULL; device_uuid_count is 1") != NULL);
  options.device_uuids = NULL;
  CHECK(kvpool_open(&options, &session) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "options.device_uuids is NULL; device_uuid_count is 1") != NULL);
  options.device_uuids = device_uuids;
  device_uuids[0] = "host";
  options.give_back = 3;
  CHECK(kvpool_open(&options, &session) == KVPOOL_INVALID_ARGUMENT);
  CHECK(strstr(kvpool_last_error(), "options.give_back is 3; must be 0 to 2") != NULL);
  options.give_back = KVPOOL_GIVE_BACK_ANY_TIME;
  options.kind = 2;
  options.fingerprint = "another";
  CHECK(kvpool_open(&options, &session) != KVPOOL_OK);
  CHECK(strstr(kvpool_last_error(), "IPC slabs exist on cuda devices only") != NULL);
  puts("ok");
  return 0;
}
