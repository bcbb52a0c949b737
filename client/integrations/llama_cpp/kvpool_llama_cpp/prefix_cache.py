"""Blocks of a sequence's state, between a llama.cpp context and a kvpoold.

What llama.cpp gives and takes is the state of a whole sequence. So a block travels through a scratch sequence that has
nothing else: its positions are copied there from the live sequence (which moves no K or V: cells are shared, where all
sequences have one stream), and its state is that block. On the way back the state is set in the scratch sequence, and the
live one takes its cells.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvpool

from kvpool_llama_cpp.library import Library, LlamaError

_log = logging.getLogger("kvpool_llama_cpp")

# In front of each block's state, with its tokens behind it: magic, first position, tokens, bytes of state, digest.
_HEADER = struct.Struct("<8sIIQ16s")
_MAGIC = b"llamakv1"
_ALIGNMENT = 64
_SEALED_AT_ONCE = 8  # Blocks that a save leases together: others find the first ones while the last are copied.


class PrefixCache:
    """Loads prefixes of prompts that any process has saved, and saves what this one has computed.

    library, context   llama.cpp's. The context has one stream (kv_unified), keeps all of a sliding window (swa_full), has a
                       sequence to spare, and is empty now: a block is decoded, saved and loaded to learn its size, and that
                       this build gives back what it took.
    fingerprint        of fingerprint_of(): contexts that differ in it share nothing
    tokens_per_block   a prefix is found in whole blocks
    scratch            the spare sequence; by default the last one
    fallback           "own": without a daemon the engine goes on without, and looks for one every `retry` seconds. By
                       default a daemon that is missing now is an error; one that is lost later never is.
    timeout            of an answer of the daemon while a prompt waits, in seconds
    wait_ms            how long a prompt may wait besides for what is in a tier below the pool (`kvpoold --tier`); 0: not
    options            those of kvpool.Session

    One thread at a time, that of the context.
    """

    def __init__(self, library: Library, context: Any, fingerprint: bytes, *, tokens_per_block: int = 32, scratch: int | None = None,
                 fallback: str | None = None, retry: float = 10.0, timeout: float = 2.0, wait_ms: int = 0, open_timeout: float = 5.0,
                 facts: Mapping[str, str] | None = None, **options: Any) -> None:
        if fallback not in (None, "own"):
            raise ValueError(f"fallback: {fallback!r}, where only 'own' is known")
        self._library, self._context = library, context
        self._memory = library.get_memory(context)
        self.tokens_per_block = tokens_per_block
        self._scratch = library.n_seq_max(context) - 1 if scratch is None else scratch
        self._retry, self._timeout, self._wait_ms = retry, timeout, wait_ms
        self._check_context()
        self._prefix_bytes = _HEADER.size + 4 * tokens_per_block
        self._prefix_bytes += -self._prefix_bytes % _ALIGNMENT
        self.state_bytes = self._probe()
        layout = kvpool.Layout.opaque(block_bytes=(self._prefix_bytes + self.state_bytes + 4095) // 4096 * 4096,
                                      tokens_per_block=tokens_per_block)
        # Blocks are large, and saving is no hot path: none is leased ahead. llama.cpp is given addresses in blocks that are held meanwhile,
        # and keeps none, so that the daemon may take memory back at any time.
        options = {"magazine_blocks": 0, "client_name": "llama.cpp", "give_back": "any_time", "device_uuids": ["host"] * options.get("ranks", 1),
                   **options}
        description = ctypes.create_string_buffer(128)
        library.model_desc(library.get_model(context), description, len(description))
        facts = {"engine": "llama.cpp", "model": description.value.decode(errors="replace"), **(facts or {})}
        self._open: Callable[[], Any] = lambda: kvpool.Session(layout, fingerprint, facts=facts, open_timeout=open_timeout, **options)
        self._session: kvpool.Session | None = None
        self._next_try, self._next_save = 0.0, 0.0
        self.counters = {"loaded_blocks": 0, "saved_blocks": 0, "refused_blocks": 0, "unsaved_blocks": 0, "lost_daemons": 0}
        try:
            self._session = self._open()
        except kvpool.UnavailableError as error:
            if fallback is None:
                raise
            self._lost(error)

    def _check_context(self) -> None:
        library, context = self._library, self._context
        model = library.get_model(context)
        if library.model_is_recurrent(model) or library.model_is_hybrid(model):
            raise ValueError("model: it has a recurrent state, which is no state per token")
        sequences = library.n_seq_max(context)
        if sequences < 2 or not 0 <= self._scratch < sequences:
            raise ValueError(f"scratch: sequence {self._scratch}, where the context has n_seq_max {sequences} and one beside the "
                             "live ones is needed")
        if library.n_ctx_seq(context) != library.n_ctx(context):
            raise ValueError("kv_unified: sequences of this context have streams of their own, and can't share cells")
        if self.tokens_per_block < 1 or self.tokens_per_block > library.n_batch(context):
            raise ValueError(f"tokens_per_block: {self.tokens_per_block}, where 1 to n_batch {library.n_batch(context)} do")
        for sequence in range(sequences):
            if library.memory_seq_pos_max(self._memory, sequence) >= 0:
                raise ValueError(f"context: sequence {sequence} is not empty")

    def _probe(self) -> int:
        """Bytes of a block's state; LlamaError where it doesn't come back as it went."""
        library, count = self._library, self.tokens_per_block
        tokens = (ctypes.c_int32 * count)(*range(count))
        if library.decode(self._context, library.batch_get_one(ctypes.addressof(tokens), count)) != 0:
            raise library.error(f"decoding {count} tokens")
        states = []
        for _ in range(2):
            self._share(0, self._scratch, 0, count)
            size = library.state_seq_get_size(self._context, self._scratch)
            state = ctypes.create_string_buffer(size)
            if library.state_seq_get_data(self._context, ctypes.addressof(state), size, self._scratch) != size:
                raise library.error(f"the state of {count} tokens has not the {size} bytes that llama.cpp said")
            states.append(state.raw)
            library.memory_seq_rm(self._memory, self._scratch, -1, -1)
            library.memory_seq_rm(self._memory, 0, -1, -1)
            if len(states) == 1 and not self._set(0, ctypes.addressof(state), size, 0):
                raise library.error(f"llama.cpp doesn't take the {size} bytes of state that it gave")
        library.memory_seq_rm(self._memory, 0, -1, -1)
        if states[0] != states[1]:
            raise LlamaError(f"{library.path}: a state that was set comes back as another")
        return len(states[0])

    # ---- Between sequences

    def _share(self, source: int, target: int, first: int, end: int) -> None:
        self._library.memory_seq_cp(self._memory, source, target, first, end)

    def _set(self, sequence: int, address: int, size: int, first: int) -> bool:
        """The state at `address` becomes positions `first`... of `sequence`, behind what it has. False: nothing has changed."""
        library, last = self._library, first + self.tokens_per_block - 1
        took = library.state_seq_set_data(self._context, address, size, self._scratch)
        right = (took == size and library.memory_seq_pos_min(self._memory, self._scratch) == first
                 and library.memory_seq_pos_max(self._memory, self._scratch) == last)
        if right:
            self._share(self._scratch, sequence, first, last + 1)
        library.memory_seq_rm(self._memory, self._scratch, -1, -1)
        return right

    # ---- The daemon

    @property
    def attached(self) -> bool:
        return self._session is not None

    @property
    def session(self) -> kvpool.Session | None:
        """The kvpool.Session, or None while no daemon is there."""
        return self._session

    def _there(self) -> kvpool.Session | None:
        """The session, opened again if one was lost a while ago."""
        if self._session is None and time.monotonic() >= self._next_try:
            try:
                self._session = self._open()
            except kvpool.KvpoolError as error:
                self._lost(error)
        return self._session

    def _lost(self, error: Exception) -> None:
        """Whatever is wrong with it, the engine can do without."""
        _log.warning("going on without kvpoold, trying again in %g s: %s", self._retry, error)
        self.counters["lost_daemons"] += 1
        self._next_try = time.monotonic() + self._retry
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close(timeout=0.1)
            except kvpool.KvpoolError:
                pass  # It is gone, that was the point.

    def close(self) -> None:
        """Ends the session; what was saved stays findable."""
        session, self._session = self._session, None
        self._next_try = float("inf")
        if session is not None:
            session.close()

    # ---- Blocks

    def _keys(self, hasher: kvpool.PrefixHasher, tokens: Sequence[int], extra_keys: Sequence[bytes], blocks: int) -> list[bytes]:
        return hasher.chain(tokens[:blocks * self.tokens_per_block], self.tokens_per_block, list(extra_keys))

    def _header(self, key: bytes, tokens: Sequence[int], first: int, state: Any) -> bytes:
        """What stands before a state. Its digest is over all that makes the block what it is asked for as."""
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        digest = hashlib.blake2b(state, digest_size=16, key=key[:64])
        digest.update(struct.pack("<IQ", first, len(state)) + packed)
        return _HEADER.pack(_MAGIC, first, len(tokens), len(state), digest.digest()) + packed

    def load(self, tokens: Sequence[int], *, sequence: int = 0, have: int = 0, salt: bytes = b"", salt_from: int = 0,
             extra_keys: Sequence[bytes] = ()) -> int:
        """Gives `sequence` the longest prefix of `tokens` that the pool has. Returns how many of them it has then.

        have  tokens of that prefix that the sequence has already. If the pool has no more, they stay; if it has, what
              is behind the last whole block of them is replaced.
        salt  finds what was saved with the same salt. With salt_from it counts from the block that holds this token on,
              and what is in front, such as a system prompt, is everybody's. Without a salt salt_from changes nothing.
        The last token is never loaded: its logits are to be computed. REQUIRES: the sequence has `have` positions.
        """
        session, size = self._there(), self.tokens_per_block
        wanted = (len(tokens) - 1) // size
        if session is None or wanted * size <= have:
            return have
        hasher = session.hasher(salt, salt_from=salt_from)  # Arguments that are wrong are no daemon that is lost.
        try:
            keys = self._keys(hasher, tokens, extra_keys, wanted)
            with session.match(keys, wait_ms=self._wait_ms).wait(self._timeout + self._wait_ms / 1000) as hit:
                if len(hit.blocks) * size <= have:
                    return have
                first = have // size
                if first * size < have:
                    self._library.memory_seq_rm(self._memory, sequence, first * size, -1)
                return self._load(hit.blocks, keys, tokens, sequence, first) * size
        except kvpool.KvpoolError as error:
            self._lost(error)
            return max(self._library.memory_seq_pos_max(self._memory, sequence) + 1, 0)

    def _load(self, blocks: kvpool.Blocks, keys: Sequence[bytes], tokens: Sequence[int], sequence: int, index: int) -> int:
        """Returns blocks that the sequence has then."""
        size = self.tokens_per_block
        for i in range(index, len(blocks)):
            memory = memoryview(blocks.data(i))
            state = memory[self._prefix_bytes:self._prefix_bytes + self.state_bytes]
            expected = self._header(keys[i], tokens[i * size:(i + 1) * size], i * size, state)
            address = self._address(blocks.ids[i]) + self._prefix_bytes
            right = memory[:len(expected)] == expected and self._set(sequence, address, self.state_bytes, i * size)
            state.release()
            memory.release()
            if not right:
                self.counters["refused_blocks"] += 1
                _log.error("block %d of a prefix is not what its key says: computed again", i)
                return i
            self.counters["loaded_blocks"] += 1
        return len(blocks)

    def _address(self, block: int) -> int:
        return self._session.base + block * self._session.block_stride_bytes

    def save(self, tokens: Sequence[int], *, sequence: int = 0, salt: bytes = b"", salt_from: int = 0, extra_keys: Sequence[bytes] = ()) -> int:
        """Shares the full blocks of `sequence`, which holds `tokens` and maybe more, for those who load them with the same salt,
        salt_from and extra keys. Returns how many the pool has then.

        Without room in the pool, or without a daemon, it shares fewer; a pool that had no room is left alone for a while.
        """
        session, blocks = self._there(), len(tokens) // self.tokens_per_block
        if session is None or blocks == 0 or time.monotonic() < self._next_save:
            return 0
        first, last = (f(self._memory, sequence) for f in (self._library.memory_seq_pos_min, self._library.memory_seq_pos_max))
        if first != 0 or last < blocks * self.tokens_per_block - 1:
            raise ValueError(f"sequence: {sequence} has positions {first} to {last}, where {len(tokens)} tokens from 0 are to be "
                             "saved; a context without swa_full lets go of the first ones")
        hasher = session.hasher(salt, salt_from=salt_from)
        try:
            keys = self._keys(hasher, tokens, extra_keys, blocks)
            with session.match(keys).wait(self._timeout) as hit:
                done = len(hit.blocks)
                while done < blocks:
                    end = min(done + _SEALED_AT_ONCE, blocks)
                    try:
                        leased = session.lease(end - done, self._timeout)
                    except (kvpool.ResourceExhaustedError, kvpool.DeadlineExceededError) as error:
                        _log.info("%d blocks are not saved: %s", blocks - done, error)
                        self._next_save = time.monotonic() + self._retry
                        break
                    sealed = self._save(session, leased, keys, tokens, sequence, done)
                    done += sealed
                    if done < end:
                        break
            self.counters["unsaved_blocks"] += blocks - done
            return done
        except kvpool.KvpoolError as error:
            self._lost(error)
            return 0

    def _save(self, session: kvpool.Session, leased: kvpool.Blocks, keys: Sequence[bytes], tokens: Sequence[int], sequence: int, first: int) -> int:
        """Fills and seals `leased`. Returns how many of them, from the first one, are found from now on."""
        size, count = self.tokens_per_block, len(leased)
        with leased:
            for i in range(first, first + count):
                self._share(sequence, self._scratch, i * size, (i + 1) * size)
                address = self._address(leased.ids[i - first]) + self._prefix_bytes
                got = self._library.state_seq_get_size(self._context, self._scratch)
                if got == self.state_bytes:
                    got = self._library.state_seq_get_data(self._context, address, got, self._scratch)
                self._library.memory_seq_rm(self._memory, self._scratch, -1, -1)
                if got != self.state_bytes:
                    raise ValueError(f"block {i} of sequence {sequence} has {got} bytes of state, where all others have "
                                     f"{self.state_bytes}: the context is not the one that was probed")
                memory = memoryview(leased.data(i - first))
                state = memory[self._prefix_bytes:self._prefix_bytes + self.state_bytes]
                header = self._header(keys[i], tokens[i * size:(i + 1) * size], i * size, state)
                memory[:len(header)] = header
                state.release()
                memory.release()
            parent = keys[first - 1] if first else None
            # Where another engine was faster, its block is the one that is found.
            outcome = session.seal(leased, keys[first:first + count], parent_key=parent, leave_duplicates=True).wait(self._timeout)
        sealed = min((index for index, _, _ in outcome.refused), default=count)
        self.counters["saved_blocks"] += sealed
        return sealed
