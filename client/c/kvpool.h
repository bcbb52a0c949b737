/* kvpool for engines in other languages: the C ABI of client/session.h, whose comments say more.
 *
 * A session leases blocks of KV cache that kvpoold owns, shares full ones under prefix keys, and finds what
 * others have shared. Memory is mapped into this process: block b lies at
 * kvpool_base + b * kvpool_block_stride_bytes.
 *
 * Results. A function that can fail returns KVPOOL_OK or one of google.rpc.Code; kvpool_last_error() then has
 * the words, with the numbers, until the same thread's next call.
 *
 * Threads. One thread at a time uses a session and the objects made from it. Functions marked "Any thread"
 * may be called meanwhile. Pointers given to a call are read during that call only.
 *
 * Versions. A structure that starts with `struct_size` may gain fields at its end; the others never change.
 * The caller sets struct_size to sizeof the structure in the header it was compiled with, S. This library
 * knows K bytes of the structure:
 *
 *   S < sizeof(size_t) or S > 4096   refused: struct_size was not set
 *   S <= K, an older caller          fields behind the first S bytes read as zero, which is their default;
 *                                    of a result, no more than S bytes are written
 *   S >  K, a newer caller           accepted if bytes K to S - 1 are zero; refused otherwise, because the
 *                                    caller asks for something that this library does not have. Bytes K to
 *                                    S - 1 of a result may be anything, and are set to zero
 *
 * A refusal is KVPOOL_INVALID_ARGUMENT and names the structure, its size and the limit.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef KVPOOL_CLIENT_C_KVPOOL_H_
#define KVPOOL_CLIENT_C_KVPOOL_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KVPOOL_OK = 0,
  KVPOOL_INVALID_ARGUMENT = 3,    /* A field breaks its limit. */
  KVPOOL_DEADLINE_EXCEEDED = 4,   /* The call may be repeated. */
  KVPOOL_NOT_FOUND = 5,           /* There is no such session, block, … */
  KVPOOL_RESOURCE_EXHAUSTED = 8,  /* Too few blocks, a cap, or a full queue. */
  KVPOOL_FAILED_PRECONDITION = 9, /* Layout mismatch, closed or forked session, or a daemon too old. */
  KVPOOL_ABORTED = 10,            /* The session ended. */
  KVPOOL_UNAVAILABLE = 14         /* No daemon is there, or it is gone. */
};

typedef struct kvpool_session kvpool_session;
typedef struct kvpool_match kvpool_match;
typedef struct kvpool_seal kvpool_seal;
typedef struct kvpool_operation kvpool_operation;
typedef struct kvpool_episode kvpool_episode;

/* A block ref: generation << 32 | block id. 0 names no block. */
typedef uint64_t kvpool_block;

/* As `after` of a verb: apply it when the step begun last is done. 0 applies it now. */
#define KVPOOL_CURRENT_STEP UINT64_MAX

/* Never null; "" if this thread's last call succeeded. */
const char* kvpool_last_error(void);

/* The library's version, "0.1.0". Any thread. */
const char* kvpool_version(void);

/* ---- Opening. A field of zero means its default, and a string may be NULL. */
typedef struct {
  size_t struct_size;      /* sizeof(kvpool_options). */
  const char* socket;      /* kvpoold's; NULL: $KVPOOL_SOCKET, or where kvpoold listens by default. */
  const char* tenant;      /* NULL: "default". */
  const char* client_name; /* Shown to operators. */
  const void* fingerprint; /* 1 to 64 bytes; equal digests share a space. */
  size_t fingerprint_bytes;
  const void* layout; /* A serialised kvpool.v1.Layout; NULL: opaque blocks, described by the next two. */
  size_t layout_bytes;
  uint64_t block_bytes;
  uint32_t tokens_per_block;
  uint32_t ranks; /* 0: 1. */
  uint32_t rank;  /* This member's. */
  int scheduler;  /* Not 0: this member maps nothing and reports no steps. */
  uint32_t guaranteed_blocks;
  uint32_t max_blocks;
  uint32_t magazine_blocks;        /* 0: 256. */
  int warmup;                      /* Not 0: the range is private scratch until kvpool_finish_warmup. */
  uint32_t open_timeout_ms;        /* 0: 30000. */
  uint64_t max_space_bytes;        /* 0: all that the device has. */
  const char* const* device_uuids; /* One for each rank; see kvpool.v1.OpenSession. */
  size_t device_uuid_count;
  int kind;                /* A kvpool.v1.SpaceKind; 0: slabs. */
  uint64_t give_back;      /* KVPOOL_GIVE_BACK_NEVER, or another of the three. */
  uint64_t holes;          /* Not 0: any slab but the first may be asked back, with BY_CALL too. */
  uint64_t priority_class; /* A kvpool.v1.PriorityClass; 0: that of the daemon's rule. */
} kvpool_options;

/* Whether the daemon may take slabs back that it has mapped here; GiveBack in client/session_options.h says more.
 *
 *   NEVER      what is mapped stays
 *   BY_CALL    slabs that are asked back wait for kvpool_give_back_slabs
 *   ANY_TIME   they are unmapped at once: the engine touches the blocks that it holds, its sink and block 0,
 *              and no others */
#define KVPOOL_GIVE_BACK_NEVER 0
#define KVPOOL_GIVE_BACK_BY_CALL 1
#define KVPOOL_GIVE_BACK_ANY_TIME 2

int kvpool_open(const kvpool_options* options, kvpool_session** session);
/* `invitation` is from kvpool_invitation of a member that has joined already. */
int kvpool_join(const kvpool_options* options, const void* invitation, size_t invitation_bytes,
                kvpool_session** session);
/* Ends the session and gives back all it holds. The caller still calls kvpool_free. KVPOOL_DEADLINE_EXCEEDED: the daemon has not
 * answered, and closes the session when it hears of it: kvpool_status is KVPOOL_FAILED_PRECONDITION from then on, and nothing
 * but kvpool_close, which waits again, and kvpool_free works. */
int kvpool_close(kvpool_session* session, uint32_t timeout_ms);
/* Closes the session if every step begun is done, and hangs up otherwise. NULL is fine. Its matches and seals
 * are to be freed first. */
void kvpool_free(kvpool_session* session);

/* ---- Properties */
uint64_t kvpool_session_id(const kvpool_session* session);
#define KVPOOL_INVITATION_BYTES 24
void kvpool_invitation(const kvpool_session* session, uint8_t invitation[KVPOOL_INVITATION_BYTES]);
/* KVPOOL_OK while the session is open. Any thread, as are the nine that follow. */
int kvpool_status(const kvpool_session* session);
uint32_t kvpool_capacity_blocks(const kvpool_session* session);
/* All blocks that are mapped are below it. At least the capacity, and more where slabs in front of others were given back: that is so
 * with KVPOOL_GIVE_BACK_ANY_TIME and with holes alone. */
uint32_t kvpool_mapped_blocks(const kvpool_session* session);
/* Which they are, in order, with what is asked back: blocks from `first` to the one before `end`. Writes as many ranges as there are, or
 * as there is room for, and returns how many there are: one where nothing is missing. */
typedef struct {
  uint32_t first, end;
} kvpool_block_range;
size_t kvpool_mapped_ranges(const kvpool_session* session, kvpool_block_range* ranges, size_t room);
/* Slabs that wait for kvpool_give_back_slabs. */
uint32_t kvpool_slabs_asked_back(const kvpool_session* session);
/* For how many more milliseconds kvpool_give_back_slabs counts: after that the daemon takes its wish back, and the session is late.
 * UINT64_MAX: nothing is asked back, or the daemon does not say. */
uint64_t kvpool_asked_back_within_ms(const kvpool_session* session);
int kvpool_under_pressure(const kvpool_session* session);
int kvpool_draining(const kvpool_session* session);
/* The address of block 0, on the host or on the device. */
uint64_t kvpool_base(const kvpool_session* session);
/* The address of a block, likewise. */
void* kvpool_data(const kvpool_session* session, kvpool_block block);
/* Not 0: the memory is on a GPU, whose UUID is written. 0: it is host memory, and `uuid` is left alone. */
#define KVPOOL_DEVICE_UUID_BYTES 16
int kvpool_device_uuid(const kvpool_session* session, uint8_t uuid[KVPOOL_DEVICE_UUID_BYTES]);
uint64_t kvpool_block_stride_bytes(const kvpool_session* session);
uint32_t kvpool_max_blocks(const kvpool_session* session);
/* Padding writes go there. 0 before warm-up is over. */
kvpool_block kvpool_sink_block(const kvpool_session* session);
int kvpool_finish_warmup(kvpool_session* session);
/* Unmaps slabs that are asked back, and writes their bytes; on a GPU once all work of this process that is queued there is done.
 * KVPOOL_FAILED_PRECONDITION: a stream captures a graph, which is broken, and they stay. No work that is queued later, and no
 * thread of this member, touches a block at or above kvpool_capacity_blocks. `bytes` may be NULL. */
int kvpool_give_back_slabs(kvpool_session* session, uint64_t* bytes);
typedef struct {
  size_t struct_size; /* sizeof(kvpool_counters). */
  /* What was sent on the stream. `blocks` counts blocks and keys named, each once per verb. */
  uint64_t batches, operations, blocks;
  uint64_t leased, refills; /* Blocks leased by the daemon, and answers that brought them. */
  uint64_t refused;         /* Blocks that a verb could not be applied to, or that were not held. */
  uint64_t reconnects;
} kvpool_counters;
/* Any thread. */
int kvpool_read_counters(const kvpool_session* session, kvpool_counters* counters);

/* ---- Steps */
uint64_t kvpool_begin_step(kvpool_session* session);
/* Serves members whose scheduler tells them the number. */
void kvpool_begin_step_number(kvpool_session* session, uint64_t step);
uint64_t kvpool_current_step(const kvpool_session* session);
/* Any thread. */
uint64_t kvpool_passed_step(const kvpool_session* session);
void kvpool_complete_step(kvpool_session* session, uint64_t step);
/* `cuda_stream` is a CUstream. The step is complete when the work that is on the stream now is done. Steps are recorded in their
 * order: a later one that is done stands for those before it. */
int kvpool_complete_step_on_stream(kvpool_session* session, uint64_t step, void* cuda_stream);

/* ---- Leases */
uint32_t kvpool_free_blocks(const kvpool_session* session);
/* Leases all `count` blocks or none, without waiting. KVPOOL_RESOURCE_EXHAUSTED: there are fewer at hand, or can never be as
 * many, which kvpool_lease_within does not wait for. */
int kvpool_lease(kvpool_session* session, kvpool_block* blocks, size_t count);
int kvpool_lease_within(kvpool_session* session, kvpool_block* blocks, size_t count, uint32_t timeout_ms);
/* Gives back one hold on each block, root first. Never fails. */
void kvpool_release(kvpool_session* session, const kvpool_block* blocks, size_t count, uint64_t after);
/* The same, with what the caller expects of the blocks; see kvpool.v1.Release. KVPOOL_INVALID_ARGUMENT:
 * `reuse` is none of these, or `category` is above 15; nothing was given back. */
#define KVPOOL_REUSE_UNSPECIFIED 0
#define KVPOOL_REUSE_EXPECTED 1
#define KVPOOL_REUSE_UNLIKELY 2
#define KVPOOL_REUSE_NEVER 3
int kvpool_release_with_hint(kvpool_session* session, const kvpool_block* blocks, size_t count,
                             uint64_t after, uint32_t reuse, uint32_t category);

/* ---- Keys: the SHA-256 chain of prefix_hasher.h. */
#define KVPOOL_KEY_BYTES 32
/* Writes count / tokens_per_block keys, one per full block. `salt` separates requests that must not share. */
int kvpool_hash_tokens(const kvpool_session* session, const void* salt, size_t salt_bytes,
                       const uint32_t* tokens, size_t count, uint32_t tokens_per_block, uint8_t* keys);
/* The same, with a salt that may count from a token on. */
typedef struct {
  size_t struct_size; /* sizeof(kvpool_hash_options). */
  const void* salt;   /* NULL, and no bytes: there is none. */
  size_t salt_bytes;
  uint64_t
      salt_from; /* Blocks in front of the one that holds the token at this position have the keys of no salt, and are
                       * shared with everybody. 0: the salt is in every key. Without a salt it changes nothing. */
} kvpool_hash_options;
int kvpool_hash_tokens_with(const kvpool_session* session, const kvpool_hash_options* options,
                            const uint32_t* tokens, size_t count, uint32_t tokens_per_block, uint8_t* keys);

/* ---- Match */
typedef struct {
  uint32_t group;     /* Layer group. */
  uint32_t key_bytes; /* 0: 32. */
  const void* keys;   /* key_count * key_bytes bytes. */
  size_t key_count;
} kvpool_group_keys;

/* Sends the question at once. The caller frees *match. */
int kvpool_match_start(kvpool_session* session, const kvpool_group_keys* groups, size_t group_count,
                       kvpool_match** match);
/* The same, with what is to become of blocks that are in a tier below the pool; see kvpool.v1.Match. */
typedef struct {
  size_t struct_size; /* sizeof(kvpool_match_options). */
  uint32_t wait_ms;   /* How long the answer may wait for them. At most 60000. */
  int prefetch;       /* Not 0: they are brought up, and the answer does not wait. */
} kvpool_match_options;
int kvpool_match_start_with(kvpool_session* session, const kvpool_group_keys* groups, size_t group_count,
                            const kvpool_match_options* options, kvpool_match** match);
int kvpool_match_ready(const kvpool_match* match);
/* `miss` (a kvpool.v1.MissReason) may be NULL. KVPOOL_DEADLINE_EXCEEDED: wait again. */
int kvpool_match_wait(kvpool_match* match, uint32_t timeout_ms, uint64_t* tokens, int* miss);
/* Writes how many tokens behind those of kvpool_match_wait are below the pool, and have not come. */
int kvpool_match_below(const kvpool_match* match, uint64_t* below_tokens);
/* Writes the blocks of the group_index-th group asked for, in sequence order, with 0 in front of a window.
 * Their holds are the caller's from now on. `blocks` NULL: only *count is written. KVPOOL_RESOURCE_EXHAUSTED:
 * there are more than `capacity`. */
int kvpool_match_take(kvpool_match* match, size_t group_index, kvpool_block* blocks, size_t capacity,
                      size_t* count);
/* Gives back what was not taken. */
void kvpool_match_free(kvpool_match* match);

/* ---- Seal */
typedef struct {
  size_t struct_size; /* sizeof(kvpool_seal_arguments). */
  uint32_t group;
  const kvpool_block* blocks; /* Consecutive blocks of one sequence. */
  size_t block_count;
  uint32_t key_bytes;      /* 0: 32. */
  uint32_t keys_per_block; /* 0: 1. */
  const void* keys;        /* block_count * keys_per_block * key_bytes bytes. */
  const void* parent_key;  /* The key of the block in front; NULL at the root. */
  int leave_duplicates;    /* Not 0: where a key exists, the block that has it is not held. */
  uint64_t after;
} kvpool_seal_arguments;

/* `seal` may be NULL if nobody waits. */
int kvpool_seal_start(kvpool_session* session, const kvpool_seal_arguments* arguments, kvpool_seal** seal);
int kvpool_seal_ready(const kvpool_seal* seal);
/* Writes block_count refs:
 *
 *   the block's own   it is sealed
 *   another           its key existed, and this block has it
 *   0                 it was refused, or it is a duplicate and leave_duplicates was set */
int kvpool_seal_wait(kvpool_seal* seal, uint32_t timeout_ms, kvpool_block* canonical);
/* Makes the holds on those other blocks the caller's. */
void kvpool_seal_keep_duplicates(kvpool_seal* seal);
/* Gives back the holds that were not kept. */
void kvpool_seal_free(kvpool_seal* seal);

/* ---- On the device: scoring and pruning of live sequences; kvpool/v1/score.proto says more. */
typedef struct {
  size_t struct_size;         /* sizeof(kvpool_prune_arguments). */
  uint32_t group;             /* Layer group. */
  const kvpool_block* blocks; /* The blocks of one sequence, in order. */
  size_t block_count;
  uint32_t last_block_tokens; /* Valid tokens in the last block; 0: it is full. */
  const char* policy;         /* A name from `kvpoolctl policies`; NULL: paged_eviction. */
  uint32_t budget_tokens;     /* How many tokens stay. */
  int dry_run;                /* Not 0: answers what it would do, and releases nothing. */
  uint64_t after;
} kvpool_prune_arguments;

/* Sends the request at once. The caller frees *operation. Its blocks may be released meanwhile: they go back
 * when the operation is over. */
int kvpool_prune_start(kvpool_session* session, const kvpool_prune_arguments* arguments,
                       kvpool_operation** operation);
/* The same with every verb and field: `request` is a serialised kvpool.v1.Operation with score, select,
 * prune, compact, plan_budgets or put_episode. */
int kvpool_operation_start(kvpool_session* session, const void* request, size_t request_bytes,
                           kvpool_operation** operation);
int kvpool_operation_ready(const kvpool_operation* operation);
/* *result is a serialised kvpool.v1.OperationResult, valid until kvpool_operation_free. The holds on blocks
 * that it released are gone, and those on new blocks are the caller's. `result` may be NULL.
 * KVPOOL_DEADLINE_EXCEEDED: wait again. */
int kvpool_operation_wait(kvpool_operation* operation, uint32_t timeout_ms, const void** result,
                          size_t* result_bytes);
/* After a prune or a compact: writes the sequence's remaining blocks, in order; see kvpool_match_take. */
int kvpool_operation_table(const kvpool_operation* operation, kvpool_block* blocks, size_t capacity,
                           size_t* count);
void kvpool_operation_free(kvpool_operation* operation);

/* ---- Episodes: named block sets, each found again by the topic of what it holds; see kvpool.v1.PutEpisode. */
typedef struct {
  uint32_t group;             /* Layer group. */
  uint32_t last_block_tokens; /* Valid tokens in the last block; 0: it is full. */
  const kvpool_block* blocks; /* The blocks of one sequence, in order. */
  size_t block_count;
} kvpool_table;

typedef struct {
  size_t struct_size;    /* sizeof(kvpool_put_episode_arguments). */
  const char* name;      /* 1 to 128 bytes; an episode of this name is replaced. */
  const float* centroid; /* 1 to 4096 finite numbers, as many as the session's other episodes have. */
  size_t centroid_count;
  const kvpool_table* tables; /* One for each layer group, groups ascending. */
  size_t table_count;         /* 0: the episode is removed, and there is no centroid. */
  uint64_t after;
} kvpool_put_episode_arguments;

/* Sends the request at once. The caller waits for *operation and frees it, as for a prune. The episode has
 * holds of its own on its blocks. */
int kvpool_put_episode_start(kvpool_session* session, const kvpool_put_episode_arguments* arguments,
                             kvpool_operation** operation);
/* Asks for the episode whose centroid has the largest cosine with `embedding`, or, where embedding_count is
 * 0, for the one called `name`. Sends the question at once. The caller frees *episode. */
int kvpool_choose_episode_start(kvpool_session* session, const float* embedding, size_t embedding_count,
                                const char* name, kvpool_episode** episode);
int kvpool_episode_ready(const kvpool_episode* episode);
/* Tells the episode's name (valid until kvpool_episode_free), the cosine (0 if it was asked for by name) and
 * how many tables it has; each may be NULL. KVPOOL_NOT_FOUND: there is none, or none of this name.
 * KVPOOL_DEADLINE_EXCEEDED: wait again. */
int kvpool_episode_wait(kvpool_episode* episode, uint32_t timeout_ms, const char** name, float* similarity,
                        size_t* table_count);
/* Writes the blocks of one table, whose holds are the caller's from now on, and describes it in *table. A
 * table is taken once, and has no blocks afterwards. `blocks` NULL: it is described, and nothing is taken.
 * KVPOOL_RESOURCE_EXHAUSTED: there are more blocks than `capacity`. */
int kvpool_episode_take(kvpool_episode* episode, size_t table_index, kvpool_block* blocks, size_t capacity,
                        kvpool_table* table);
/* Gives back what was not taken. */
void kvpool_episode_free(kvpool_episode* episode);

/* ---- Other verbs, queued and applied in order. A kvpool_ref of blocks that are not held ends the session;
 * refs of 0, in front of a window, are skipped there. Times are 1 to 86400000 ms, half-lives 0 to 86400000 ms,
 * priorities 0 to 100; KVPOOL_INVALID_ARGUMENT beyond. */
int kvpool_ref(kvpool_session* session, const kvpool_block* blocks, size_t count);
int kvpool_touch(kvpool_session* session, const kvpool_block* blocks, size_t count);
int kvpool_pin(kvpool_session* session, const kvpool_block* blocks, size_t count, uint64_t ttl_ms);
int kvpool_unpin(kvpool_session* session, const kvpool_block* blocks, size_t count);
int kvpool_set_retention(kvpool_session* session, const kvpool_block* blocks, size_t count, uint32_t priority,
                         uint64_t ttl_ms);
/* The same with a priority that moves half the way back to the default in each half-life; 0: it stays. */
int kvpool_set_retention_decaying(kvpool_session* session, const kvpool_block* blocks, size_t count,
                                  uint32_t priority, uint64_t ttl_ms, uint64_t half_life_ms);
/* A prefill of `tokens` (1 to 2^24) behind `tokens_before` others (at most 2^32) took so many microseconds (1 to an hour's), in a
 * step of the engine with nothing else to speak of. The daemon learns from it whether to load what is below the pool, or to have it
 * computed again. Told with the next batch, the last 64 of them. */
int kvpool_report_prefill(kvpool_session* session, uint64_t tokens, uint64_t tokens_before,
                          uint64_t microseconds);
int kvpool_flush(kvpool_session* session, uint32_t timeout_ms);
/* Takes the oldest of the last 64 refusals that no call was there to hear: of releases, pins, unpins and retentions,
 * and of leases and fences that the session asked for by itself. Writes "pin of 3 blocks: why", cut to `capacity` bytes
 * with the final 0. KVPOOL_NOT_FOUND: there is none. */
int kvpool_take_refusal(kvpool_session* session, char* text, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* KVPOOL_CLIENT_C_KVPOOL_H_ */
