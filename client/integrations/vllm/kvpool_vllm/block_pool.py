"""vLLM's BlockPool over a session of kvpoold.

A block of vLLM's is, by what this engine holds of it:

    unheld    nothing: its metadata mean nothing            -> stocked (lease) | shared (match)
    stocked   leased, with no request                       -> private (get_new_blocks) | unheld (surplus)
    private   leased, with requests; may be in the index    -> shared (its Seal is sent) | stocked or kept (last request gone)
    kept      leased, with no request, in the index         -> private (touch) | stocked (needed, or too many)
    shared    held by reference: read-only                  -> unheld (last request gone: released, kvpoold keeps it cached)

vLLM's own index (cached_block_hash_to_block) lists blocks with requests only: those of this engine that are being computed, as
vLLM does it, and those that a match found. It is asked block by block, so a request's match is one question to kvpoold, sent when
the request comes, and its answer is put into the index before vLLM looks. Other engines find a block once its Seal is sent, after
the step that computed it.

Of a hybrid model each KV cache group has blocks and keys of its own. A match is for all of them, and agrees on one length as vLLM
does: where attention is full a prefix needs all of its blocks, elsewhere those of the last window, and of layers with a state the
last one. A block that a window has left goes with the next step; one that was sealed stays cached in the pool.

With prefix_match_unit a prefix may end within a block. What is there of such a block is found by this engine alone, as long as it
keeps the block; the full ones in front of it are everybody's.

get_num_free_blocks answers with what is stocked, after it has stocked what is wanted. So nothing that vLLM plans on is
taken by others.

Once kvpoold is gone, nothing is leased and released any more. Before the next step is planned the scheduler takes all requests back
to their start and moves the engine to memory of its own (own), of which the stock is all; when there is a kvpoold again, it moves
it back (join). A daemon that is silent while blocks are short counts as gone.
"""

from __future__ import annotations

import collections
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import kvpool
from kvpool_engines.copies import BLOCK, MOST_KEYS
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id, resolve_block_hashes

from kvpool_vllm import keys
from kvpool_vllm.below import Below
from kvpool_vllm.groups import dropped_tokens

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvpool_vllm.space import Space

logger = init_logger("vllm.kvpool")

# (group, request, blocks that were filled, None for those that stay private, their stays, their keys, the key in front of them)
_Filled = tuple[int, "Request", "list[KVCacheBlock | None]", "list[int]", "list[bytes]", "bytes | None"]
_Question = list[tuple[int, "list[BlockHash]"]]  # By group, the keys.
_SPARE = 16  # Blocks a group, leased beyond what is wanted, so that a step of decoding rarely asks.
_SURPLUS = 64  # More than these, a group, go back after a step.
_RETRY_S = 0.01
_STUCK_S = 1.0  # A shortage this long is a deadlock: steps of running requests would have released blocks by then.
_QUIET_S = 5.0  # How long nobody waits for a daemon that has not answered in time.
_PROBE_S = 0.05  # The longest wait for the first answer after that.
_PATIENCE = 3  # A daemon that is silent for so many match_timeouts, while blocks are short, is gone.


class KvPoolBlockPool(BlockPool):
    cached_block_hash_to_block: Any  # BlockPool's.

    def __init__(self, space: Space, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.space, self.session = space, space.session
        self._groups = space.terms.groups
        dropped = dropped_tokens(self._groups)
        # What is said of each block is said often: properties of groups are asked once.
        self._lags = [group.lag(dropped) for group in self._groups]
        self._sizes = [group.tokens_per_block for group in self._groups]
        self._windows = [group.window_blocks for group in self._groups]
        unit = math.lcm(*self._sizes)
        self._most_tokens = MOST_KEYS // sum(unit // size for size in self._sizes) * unit  # Of a prefix that is asked for.
        self._tags = [make_block_hash_with_group_id(BlockHash(b""), number) for number in range(len(self._groups))]  # Behind a key, in the index.
        # A small part of what the engine may hold: what it stocks is nobody's cache.
        self._spare = min(_SPARE * len(self._groups), space.limit // 16)
        self._surplus = max(self._spare, min(_SURPLUS * len(self._groups), space.limit // 4))
        self.detached = self.session is None  # There is no kvpoold.
        self.own = False  # The KV tensors are in the engine's own memory.
        self.wanted = 0  # Blocks that the allocation under way needs.
        self.headroom = 0  # Blocks that it may have to leave free; nobody waits for these.
        self.counters = {"asked": 0, "found_blocks": 0, "sealed_blocks": 0, "lease_calls": 0, "shortages": 0, "late_answers": 0}
        self.below = Below(space.options.wait_ms, space.limit // 2, self.counters)
        # Indexed by block id.
        self._refs: list[int] = []  # The ref that is held; 0: none.
        self._shared = bytearray()
        self._stays: list[int] = []  # Counts how often a private block has left the index.
        self._stock: list[KVCacheBlock] = []
        self.ends_within_blocks = False  # Prefixes may.
        self._kept: dict[int, KVCacheBlock] = {}  # The oldest first.
        # Blocks that the step which is being scheduled fills.
        self._new_seals: list[_Filled] = []
        self._seals: list[tuple[int, list[_Filled]]] = []  # (step, those), oldest first.
        # Keyed by request id.
        self._asked: dict[str, tuple[list[tuple[kvpool.PendingMatch, _Question]], float]] = {}  # The questions, and when.
        # Until the request is scheduled: blocks of its prefix with one reference each, and what _junction says.
        self._waiting: dict[str, list[KVCacheBlock]] = {}
        self._junctions: dict[str, int] = {}
        self._trying: str | None = None  # The request that is being allocated for.
        # So many blocks were not to be had, and are not asked for before that time.
        self._short_of, self._retry_at = 0, 0.0
        self._short_since: float | None = None
        self._in_use = 0  # Blocks with requests.
        self._left = 0  # Counts how often shared blocks have left the index.
        # What was released waits for all ranks to be done with the last step, and no worker has been told to say so.
        self.release_waits = False
        # A step is planned before the one in front of it is done, and may still write to blocks of requests that are over: every step
        # is begun and said to be done, and what is released waits for those that are under way.
        self.steps_overlap = False
        self._step = 0  # The last that was begun. It grows from session to session: a step of an earlier one may be under way.
        # When it was noticed that a question was not answered in time, and none sent since has been; None: the daemon answers.
        self._silent_since: float | None = None
        self._quiet_until = 0.0
        self._probe: tuple[kvpool.PendingMatch, float] | None = None  # Sent while blocks are short, and when.
        self._begin(self.num_gpu_blocks)
        if self.session is None:
            self.go_own()

    # ---- Whose memory

    def _begin(self, count: int) -> None:
        """Nothing is held of `count` blocks. REQUIRES: no request has a block."""
        assert self._in_use == 0, f"{self._in_use} blocks have requests"
        for block_id in range(len(self.blocks), count):
            block = copy.copy(self.null_block)
            block.block_id, block.is_null, block.ref_cnt = block_id, False, 0
            self.blocks.append(block)
        self.num_gpu_blocks = count
        self._refs, self._shared = [0] * len(self.blocks), bytearray(len(self.blocks))
        self._stays = [stays + 1 for stays in self._stays] + [0] * (len(self.blocks) - len(self._stays))
        self._stock.clear()
        self._kept.clear()
        self._asked.clear()
        self.below.clear()
        self._waiting.clear()
        self._junctions.clear()
        self.forget_what_was_computed()
        self.cached_block_hash_to_block = type(self.cached_block_hash_to_block)()
        self.cached_block_hashes_by_block.clear()
        for block in self.blocks:
            block.reset_hash()
        self.release_waits = False
        self._probe = self._short_since = self._silent_since = None
        self._quiet_until = self._retry_at = 0.0

    def go_own(self) -> None:
        """The KV tensors are in the engine's own memory, and hold nothing."""
        self.session, self.detached, self.own = None, True, True
        self._begin(self.space.own.num_blocks)
        self._stock.extend(self.blocks[self.num_gpu_blocks - 1:0:-1])  # Not the null block.

    def join(self, session: kvpool.Session) -> None:
        """The KV tensors are in the session's memory, and hold nothing of this engine's."""
        self.session, self.detached, self.own = session, False, False
        self._begin(session.max_blocks)

    def forget_what_was_computed(self) -> None:
        """What waits to be shared is not."""
        self._seals.clear()
        self._new_seals.clear()

    # ---- Leases

    def get_num_free_blocks(self) -> int:
        # More than there are: vLLM has a request wait by such a number, while a state that it needs is computed in the same step.
        if len(self._stock) < self.wanted + self.headroom and self.wanted < self.num_gpu_blocks:
            self._top_up(self.wanted, self.headroom)
        return len(self._stock) + len(self._kept) if self._kept else len(self._stock)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        stock = self._stock
        if num_blocks > len(stock):
            self._top_up(num_blocks)
            self._stock_kept(len(self._kept) - max(0, num_blocks - len(stock)))
            if num_blocks > len(stock):
                raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        if num_blocks == 0:
            return []
        taken = stock[-num_blocks:]
        del stock[-num_blocks:]
        for block in taken:
            block.ref_cnt = 1
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        self._in_use += num_blocks
        return taken

    def _stock_kept(self, most: int) -> None:
        """Keeps at most so many."""
        while len(self._kept) > max(0, most):
            block = self._kept.pop(next(iter(self._kept)))
            self._forget(block)
            self._stays[block.block_id] += 1
            self._stock.append(block)

    def _top_up(self, count: int, headroom: int = 0) -> None:
        missing = count - len(self._stock)
        if self.detached or (missing >= self._short_of and time.monotonic() < self._retry_at):
            return
        for asked in sorted({missing + headroom + self._spare, missing + headroom, missing}, reverse=True):
            if asked <= 0 or self._lease(asked, 0.0):
                return
        missing -= len(self._kept)
        if missing <= 0:
            return
        patience = 0.0 if self._silent_since is not None else self.space.options.lease_timeout
        if patience > 0 and self._lease(missing, patience):
            return
        # Prefixes that wait for their turn give way, those of the last requests first: what is gone by then is computed, or comes up again.
        self.counters["shortages"] += 1
        if self._lease_what_gives_way(missing, [*self._waiting, *self.below.asking()], patience):
            return
        # What was found for requests that have not looked at it yet is held, too: nobody else may be there to let go of anything.
        now = time.monotonic()
        self._short_since = self._short_since or now
        if now - self._short_since > _STUCK_S and self._lease_what_gives_way(missing, self._asked, patience):
            return
        self._look_for_a_sign_of_life()
        self._short_of, self._retry_at = missing, time.monotonic() + _RETRY_S

    def _look_for_a_sign_of_life(self) -> None:
        """Blocks are short. A daemon that has none says so, and answers other questions; one that is stopped does not."""
        try:
            if self._probe is None:
                self._probe = self.session.match([bytes(32)]), time.monotonic()
            pending, since = self._probe
            pending.wait(timeout=0)
            self._probe = None
            self._heard(since)
        except kvpool.DeadlineExceededError:
            silence = time.monotonic() - since
            if silence > _PATIENCE * self.space.options.match_timeout:
                self._detach(f"it has not answered for {silence:.1f} s, and this engine is short of blocks")
            elif silence > self.space.options.match_timeout and self._silent_since is None:
                self._unheard()
        except kvpool.ResourceExhaustedError:
            pass
        except kvpool.KvpoolError as error:
            self._detach(error)

    def _unheard(self) -> None:
        """A question was not answered in time: for a while nothing is asked, and nobody waits."""
        now = time.monotonic()
        self.counters["late_answers"] += 1
        self._quiet_until = now + _QUIET_S
        if self._silent_since is None:
            self._silent_since = now
            logger.warning("kvpoold has not answered for %s s: prefixes are computed until it does", self.space.options.match_timeout)

    def _heard(self, asked_at: float) -> None:
        """What was asked before may have been answered before."""
        if self._silent_since is not None and asked_at >= self._silent_since:
            logger.warning("kvpoold answers again")
            self._silent_since, self._quiet_until = None, 0.0

    def _patience(self, asked_at: float) -> float:
        """How long an answer may take to a question of that time."""
        if self._silent_since is None:
            return self.space.options.match_timeout
        return min(_PROBE_S, self.space.options.match_timeout) if asked_at >= self._silent_since else 0.0

    def _lease(self, count: int, timeout: float) -> bool:
        if self.detached:
            return False
        self.counters["lease_calls"] += 1
        try:
            refs = self.session.lease(count, timeout=timeout).detach()
        except (kvpool.ResourceExhaustedError, kvpool.DeadlineExceededError):
            return False
        except kvpool.KvpoolError as error:
            self._detach(error)
            return False
        blocks = self.blocks
        for ref in refs:
            block_id = ref & BLOCK
            self._refs[block_id] = ref
            self._stock.append(blocks[block_id])
        self._short_since = None
        return True

    def _detach(self, error: object) -> None:
        if not self.detached:
            self.detached = True
            self.below.clear()
            logger.error("kvpoold is gone: this engine goes on in memory of its own, and shares nothing until there is one again: %s", error)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            count = block.ref_cnt
            if count == 0 and not block.is_null:
                self._in_use += 1
                self._kept.pop(block.block_id, None)
            block.ref_cnt = count + 1
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        shared, refs, released = self._shared, self._refs, []
        for block in ordered_blocks:
            block.ref_cnt = count = block.ref_cnt - 1
            if count > 0 or block.is_null:
                continue
            self._in_use -= 1
            block_id = block.block_id
            if shared[block_id]:
                if not self.detached:
                    self._forget(block)
                    shared[block_id] = 0
                    released.append(refs[block_id])
                    refs[block_id] = 0
            elif self.ends_within_blocks and block.block_hash is not None:
                self._kept[block_id] = block
            else:
                # Its next owner in this engine writes it behind what this one's kernels do.
                self._forget(block)
                self._stays[block_id] += 1
                self._stock.append(block)
        if released:
            self._left += 1
            released.reverse()  # vLLM frees from the tail.
            self._release(released)

    def _forget(self, block: KVCacheBlock) -> None:
        if (key := block.block_hash) is None:
            return
        if self.cached_block_hashes_by_block:
            self._remove_cached_block_hashes(block)
        else:  # The same, where no block has more keys than one.
            self.cached_block_hash_to_block.pop(key, block.block_id)
            block.reset_hash()
        if self.metrics_collector:
            self.metrics_collector.on_block_evicted(block)

    def _release(self, refs: list[int]) -> None:
        self._retry_at = 0.0
        self.release_waits = self.space.terms.ranks > 1
        try:
            self.session.release(refs)
        except kvpool.KvpoolError as error:
            self._detach(error)

    def trim(self) -> None:
        """Gives back what is stocked beyond the likely need. An engine that is idle needs nothing: what it had would keep slabs from others."""
        idle = self._in_use == 0
        if self._kept:
            self._stock_kept(self._surplus)
        if len(self._stock) > (0 if idle else self._surplus) and not self.detached:
            stay = 0 if idle else self._spare
            surplus = self._stock[:len(self._stock) - stay]
            del self._stock[:len(surplus)]
            refs = [self._refs[block.block_id] for block in surplus]
            for block in surplus:
                self._refs[block.block_id] = 0
            self._release(refs)

    # ---- Prefixes

    def _wanted(self, request: Request) -> list[list[BlockHash]]:
        """The keys of the request's prefix, by group."""
        wanted: list[list[BlockHash]] = []
        for group, lag, size in zip(self._groups, self._lags, self._sizes):
            # The last token is always computed; where there are drafts, the last block is.
            count = min(request.num_tokens if group.drafted else request.num_tokens - 1, self._most_tokens) // size
            found = resolve_block_hashes(request.block_hashes, self.hash_block_size, size)[:count]
            # Nobody has a block of key 0: what begins with it is no prefix.
            if lag != 0:
                found = found[-lag:] if lag < 0 else [bytes(32)] * min(lag, len(found)) + found[:max(0, len(found) - lag)]
            wanted.append(found)
        return wanted

    def ask(self, request: Request) -> None:
        """Sends the question for the request's prefix."""
        request.kvpool_asked = self._left
        if self.detached or not self.enable_caching or request.skip_reading_prefix_cache:
            return
        wanted = self._wanted(request)
        if not all(wanted) or self._is_here(wanted):
            return
        if time.monotonic() < self._quiet_until:
            return
        self.counters["asked"] += 1
        questions: list[_Question] = [list(enumerate(wanted))]
        if self.ends_within_blocks:
            # The state may be one within a block, which is not asked for.
            questions.append([(number, wanted[number]) for number, group in enumerate(self._groups) if not group.window_tokens])
        try:
            prefetch = self.below.prefetches(request, questions[0])
            pending = [(self.session.match_groups(question, prefetch=prefetch), question) for question in questions if question]
            self._asked[request.request_id] = pending, time.monotonic()
        except kvpool.ResourceExhaustedError:
            pass  # Too much is on its way: it will be computed.
        except kvpool.KvpoolError as error:
            self._detach(error)

    def _is_here(self, wanted: list[list[BlockHash]]) -> bool:
        """Where attention is full, the last block is not here without those before."""
        index = self.cached_block_hash_to_block
        return all(index.get_one_block(key + tag) is not None
                   for of_group, tag, window in zip(wanted, self._tags, self._windows) for key in of_group[-max(1, window):])

    def settle(self, request: Request) -> bool:
        """What the pool has of the request's prefix is put into the index, with a reference for the waiting request. False: more of it is on
        its way from below the pool, and the request is to be left out of the step."""
        self._trying = request.request_id
        self._take_answer(request)
        # While it waited another's blocks left the index. They may be its prefix, and in the pool since.
        if not self._is_coming(request) and request.kvpool_asked != self._left:
            self.ask(request)
            self._take_answer(request)
        return not self._is_coming(request)

    def _is_coming(self, request: Request) -> bool:
        try:
            return self.below.is_coming(self.session, request, lambda hit, question: self._take(request, [(hit, question)], more=True))
        except kvpool.KvpoolError as error:
            self._detach(error)
            return False

    def _take_answer(self, request: Request) -> None:
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return
        pending, asked_at = asked
        patience = self._patience(asked_at)
        try:
            hits = [each.wait(timeout=patience) for each, _ in pending]
            self._heard(asked_at)
            self.below.pool_has(request, pending[0][1], hits[0])
            self._take(request, [(hit, question) for hit, (_, question) in zip(hits, pending)])
        except kvpool.DeadlineExceededError:
            request.kvpool_asked = self._left  # Once is enough.
            self.below.let_go(request.request_id)
            if patience > 0:
                self._unheard()
            # What comes later is given back.
        except kvpool.KvpoolError as error:
            self._detach(error)

    def _take(self, request: Request, answers: list[tuple[kvpool.MatchHit, _Question]], more: bool = False) -> None:
        """Holds what was found for the request. `more`: beside what is held for it, else in its place."""
        held: list[KVCacheBlock] = self._waiting.pop(request.request_id, []) if more else []
        found = len(held)
        surplus: list[int] = []
        mine, index = self._refs, self.cached_block_hash_to_block
        for hit, question in answers:
            for (number, of_group), refs in zip(question, (blocks.detach() for blocks in hit.groups)):
                tag, size = self._tags[number], self._sizes[number]
                tokens = -self._lags[number] * size
                for key, ref in zip(of_group, refs):
                    tokens += size
                    if not ref:
                        continue
                    block_id = ref & BLOCK
                    block = self.blocks[block_id]
                    held.append(block)
                    if mine[block_id] == ref and self._shared[block_id]:
                        surplus.append(ref)
                        continue
                    assert mine[block_id] == 0, f"block {block_id}: {mine[block_id]:x} is held or leased, {ref:x} found"
                    mine[block_id] = ref
                    self._shared[block_id] = 1
                    block.set_block_hash(key + tag, num_tokens=tokens)
                    index.insert(key + tag, block)
        self.touch(held[found:])
        self.counters["found_blocks"] += len(held) - found
        if surplus:
            self._release(surplus)
        self._hold(request.request_id, held)
        hit, question = answers[0]
        if hit.miss == "window" and (junction := self._junction(question)) > hit.tokens:
            self._junctions[request.request_id] = junction

    def _junction(self, question: _Question) -> int:
        """Where a prefix ends that is there for full attention, while its last window is not. By default vLLM keeps windows at the end of
        prompts only, and, once it is told, where they part from others (Request.shared_prefix_boundary): for the next that comes."""
        full = [(number, of_group) for number, of_group in question if not self._groups[number].window_tokens]
        try:
            if full and not self.detached:
                hit = self.session.match_groups(full).wait(timeout=self._patience(time.monotonic()))
                for blocks in hit.groups:
                    blocks.release(after=0)  # No step reads by these holds.
                return hit.tokens
        except kvpool.DeadlineExceededError:
            self._unheard()  # No window is kept there.
        except kvpool.ResourceExhaustedError:
            pass
        except kvpool.KvpoolError as error:
            self._detach(error)
        return 0

    def junction(self, request: Request) -> int:
        return self._junctions.get(request.request_id, 0)

    def hold(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        """The request's prefix is these blocks, whoever lets go of them before its turn."""
        if self._waiting.get(request.request_id, []) != blocks:
            self.touch(blocks)
            self._hold(request.request_id, blocks)
        request.kvpool_asked = self._left  # What it has let go of itself is no news to it.

    def _hold(self, request_id: str, blocks: list[KVCacheBlock] | None) -> None:
        before = self._waiting.pop(request_id, None)
        if blocks:
            self._waiting[request_id] = blocks
        if before:
            self.free_blocks(reversed(before))

    def let_go(self, request_id: str) -> None:
        """The request has its blocks, or wants none any more."""
        self.below.let_go(request_id)
        self._give_way(request_id)

    def _give_way(self, request_id: str) -> None:
        """What is held for it goes back."""
        self.below.give_way(request_id)
        self._asked.pop(request_id, None)
        self._junctions.pop(request_id, None)
        if request_id in self._waiting:
            self._hold(request_id, None)

    def _lease_what_gives_way(self, count: int, request_ids: Iterable[str], patience: float) -> bool:
        """Lets go of prefixes of these requests, but of the one that is being allocated for, the last first, until so many blocks are had."""
        freed, enough, gave_way = 0, count, False
        for request_id in reversed(list(request_ids)):
            if request_id == self._trying:
                continue
            gave_way, before = True, self._in_use
            self._give_way(request_id)
            freed += before - self._in_use
            if freed >= enough:
                if self._lease(count, 0.0):
                    return True
                enough = 2 * freed  # Others hold them, too.
        return gave_way and self._lease(count, patience)

    # ---- Sharing

    def cache_full_blocks(self, request: Request, blocks: list[KVCacheBlock], num_cached_blocks: int, num_full_blocks: int, block_size: int,
                          kv_cache_group_id: int, block_mask: Sequence[bool] | None = None) -> None:
        if getattr(request, "kvpool_mixed", False):
            return  # Some of its tokens are of other weights: nobody finds them.
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask)
        if num_cached_blocks >= num_full_blocks or self.detached:
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        # Those that are to be sealed; the others are theirs already, or nobody's.
        filled = [None if block.is_null or self._shared[block.block_id] or not named else block
                  for block, named in zip(blocks[num_cached_blocks:num_full_blocks], block_mask or itertools.repeat(True))]
        if any(filled):
            self._new_seals.append((kv_cache_group_id, request, filled, [self._stays[block.block_id] if block else 0 for block in filled],
                                    hashes[num_cached_blocks:num_full_blocks], hashes[num_cached_blocks - 1] if num_cached_blocks else None))

    def scheduled(self, request_ids: Set[str]) -> int:
        """A step was made of these requests. Returns its number if workers have to say that it is done, else 0.

        They have to when it fills blocks that others could find. Most steps of decoding do not, and saying it of each would cost
        more than all else here. What is released is released when no step is under way, if there is one rank and steps do not overlap.
        vLLM takes a step for done when one rank has answered: what is released behind it then waits for all, who say so of the next."""
        for of_waiting in (self._waiting.keys(), self._junctions.keys(), self.below.requests()):
            for request_id in request_ids & of_waiting:
                self.let_go(request_id)
        self._trying = None
        if self.detached:
            return 0
        said, self.release_waits = bool(self._new_seals) or self.release_waits or self.steps_overlap, False
        if self.space.terms.ranks == 1 and not said:
            return 0
        self._step = step = self._step + 1
        try:
            self.session.begin_step(step)
        except kvpool.KvpoolError as error:
            self._detach(error)
            return 0
        if self._new_seals:
            self._seals.append((step, self._new_seals))
            self._new_seals = []
        return step if said else 0

    def tell(self, what: Callable[[kvpool.Session], None]) -> None:
        """Says something to the daemon, if there is one."""
        if self.detached:
            return
        try:
            what(self.session)
        except kvpool.KvpoolError as error:
            self._detach(error)

    def computed(self, step: int) -> None:
        """The step is done: what it has filled is everybody's."""
        if self.detached:
            self._seals.clear()
            return
        try:
            while self._seals and self._seals[0][0] <= step:
                for filled in self._seals.pop(0)[1]:
                    self._seal(*filled)
        except kvpool.ResourceExhaustedError:
            pass  # Too much is on its way: these stay private.
        except kvpool.KvpoolError as error:
            self._detach(error)

    def _seal(self, group: int, request: Request, filled: list[KVCacheBlock | None], stays: list[int], hashes: list[bytes],
              parent: bytes | None) -> None:
        """Runs of `filled` that were not freed meanwhile."""
        if not keys.adapter_is_the_same(request):
            request.kvpool_mixed = True  # Later blocks are of that, too.
            return
        tag, index = self._tags[group], self.cached_block_hash_to_block
        run: list[KVCacheBlock] = []
        of_run: list[bytes] = []
        in_front = parent
        for block, stay, key in zip(filled, stays, hashes):
            # vLLM may have put another state into it than the one that it had named, or know that it could not be loaded.
            if (block is not None and block.ref_cnt > 0 and self._stays[block.block_id] == stay and not self._shared[block.block_id]
                    and index.contain(key + tag, block.block_id)):
                if not run:
                    parent = in_front
                run.append(block)
                of_run.append(key)
            elif run:
                self._seal_run(group, run, of_run, parent)
                run, of_run = [], []
            in_front = key
        if run:
            self._seal_run(group, run, of_run, parent)

    def _seal_run(self, group: int, run: list[KVCacheBlock], of_run: list[bytes], parent: bytes | None) -> None:
        self.session.seal([self._refs[block.block_id] for block in run], of_run, parent_key=parent, group=group,
                          leave_duplicates=True)  # Tables only grow: this block stays in its request's.
        for block in run:
            self._shared[block.block_id] = 1
        self.counters["sealed_blocks"] += len(run)

    # ---- The rest of what vLLM asks of a pool

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Found no more by requests to come. (vLLM: blocks that a connector could not load.)"""
        for block_id in block_ids:
            self._forget(self.blocks[block_id])
            self._stays[block_id] += 1

    def unpin_blocks(self, blocks: Any, on_reuse: Any) -> Any:
        raise NotImplementedError("blocks that stay readable until they are reused: not in a shared pool")

    def reset_prefix_cache(self) -> bool:
        """Nothing is on its way, and the scheduler makes keys of another root."""
        for request_id in {*self._asked, *self._waiting, *self.below.asking()}:
            self.let_go(request_id)
        if self._in_use > 0:
            logger.warning("Failed to reset prefix cache because some blocks (%d) are not freed yet", self._in_use)
            return False
        self.forget_what_was_computed()
        self._stock_kept(0)
        if self.metrics_collector:
            self.metrics_collector.reset()
        logger.info("Successfully reset prefix cache")
        return True

    def get_usage(self) -> float:
        """Of what this engine may hold, which is what limits it; the pool's own use is the daemon's to say."""
        return min(1.0, self.taken() / max(1, self.space.limit - 1))

    def taken(self) -> int:
        """Blocks of requests, without those that are held for waiting requests only: these give way when others need them."""
        waiting = collections.Counter(block.block_id for held in self._waiting.values() for block in held)
        return self._in_use - sum(self.blocks[block_id].ref_cnt == holds for block_id, holds in waiting.items())
