"""The connector in vLLM's scheduler: which blocks of a request kvpoold has, and which of a step are to be saved (saves.py).

A request is, by what is known of its prefix:

    unasked    nothing                                        -> asked (came, found)
    asked      the question is on its way                     -> answered | answered with nothing (late, or no kvpoold)
               (asked again, if there is more below the pool, to be answered when that has come up, or after wait_ms)
    answered   the session holds what was found               -> admitted
    admitted   what is to be loaded is in a plan, and held    -> unasked (preempted, or the load failed; then asked for again)
               until vLLM hears from the workers that it is

What was found is asked for once: it can't leave meanwhile. No step waits for answers longer than _POLL_S: vLLM goes on with its
other requests and asks again, until match_timeout is over. Nor does a step wait for loads. A request that needs a block which is being
loaded for another does: vLLM has it then.
"""

from __future__ import annotations

import atexit
import hashlib
import secrets
import time
from typing import TYPE_CHECKING, Any

import kvpool
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name

from kvpool_engines.copies import MOST_KEYS
from kvpool_engines.sessions import PAUSE_S, Opener, hang_up, leave
from kvpool_vllm import keys
from kvpool_vllm.messages import Invitation, Load, Plan, Report
from kvpool_vllm.saves import Save, Saves
from kvpool_vllm.space import Options, terms_of_copies

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")

_POLL_S = 0.002
_AHEAD = 16  # Requests in the queue whose prefixes are asked for, and held, before it is their turn.
_QUIET_S = 5.0  # How long nothing is asked after an answer that came too late.


class _Asked:
    """A request, and how far it is."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.question: list[tuple[int, list[bytes]]] = []
        self.pending: kvpool.PendingMatch | None = None
        self.deadline = 0.0
        self.waits = False  # For what is below the pool.
        # Once answered: the blocks that the session holds for it, of each group as many; null refs in front of a window.
        self.refs: list[list[int]] | None = None
        self.local = 0  # So many blocks long is the prefix that vLLM has itself.
        self.saved = 0  # Its blocks before this one are kvpoold's, or on their way.
        self.mixed = False  # Some of its tokens are of other weights than the rest.

    @property
    def found(self) -> int:
        """How many blocks long the prefix is."""
        return len(self.refs[0])

    def flat(self, first: int, last: int | None = None) -> list[int]:
        return [ref for of_group in self.refs or () for ref in of_group[first:last] if ref]


class Lookup:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> None:
        transfer = vllm_config.kv_transfer_config
        self.loads, self.fills = transfer.is_kv_consumer, transfer.is_kv_producer
        self.options, self.terms = options, terms_of_copies(vllm_config, kv_cache_config, options)
        keys.set_root(self.terms.digest)
        self.hash_name = vllm_config.cache_config.prefix_caching_hash_algo
        self.groups = self.terms.groups
        self.block_size = self.groups[0].tokens_per_block
        self._nothing: list[list[int]] = [[] for _ in self.groups]
        self.session: kvpool.Session | None = None
        self.manager: KVCacheManager | None = None
        self.detached = True  # No kvpoold, not yet, or no more.
        self.number = 0  # Sessions opened so far.
        self.joined = False  # All workers are in the session, and have mapped its memory: kvpoold finds nothing for it before.
        self._join_by: float | None = None  # How long requests wait for that.
        self.checked = False
        self.damaged: set[int] = set()  # Refs.
        self.private = b""  # Not empty since a reset: chained into keys, so that no other engine has them.
        self.saves = Saves(self.terms.ranks, options.lease_timeout)
        self._counts = {"asked_requests": 0, "found_blocks": 0, "late_answers": 0, "waited_requests": 0}
        self._requests: dict[str, _Asked] = {}  # Keyed by request id.
        self._ahead: set[str] = set()  # Ids of requests that were asked for when they came, until it is their turn.
        self._planned: list[Load] = []  # Loads of the step that is being scheduled.
        self._loading: dict[str, list[int]] = {}  # Keyed by request id: the refs that the session holds until they are copied.
        # vLLM finds what was loaded or computed for one request when another comes.
        self._caches = vllm_config.cache_config.enable_prefix_caching
        self._quiet_until = 0.0
        self._poll_until: float | None = None  # How long the step that is being scheduled waits for answers.
        self._is_idle = True  # The step before computed nothing.
        self._opener = Opener(lambda: self._open(PAUSE_S), logger)
        self._magazine = min(256, max(16, len(self.groups) * -(-vllm_config.scheduler_config.max_num_batched_tokens // self.block_size)))
        # A process may end without shutdown(): kvpool's own hook, which runs after this one, would close the session under the copies
        # of workers that live on.
        atexit.register(self.close)
        try:
            self._use(self._open(options.open_timeout))
        except kvpool.UnavailableError as error:
            if options.fallback != "own":
                raise RuntimeError(f"KvPoolConnector needs a kvpoold: {error} (kv_connector_extra_config.fallback = \"own\" would go on "
                                   "without)") from error
            logger.warning("no kvpoold, going on with vLLM's own KV cache until there is one: %s", error)

    @property
    def counts(self) -> dict[str, int]:
        return {**self._counts, **self.saves.counts}

    def bind(self, manager: KVCacheManager) -> None:
        if (unit := manager.block_pool.hash_block_size) != self.block_size:
            raise ValueError(f"prefix_match_unit {unit}: KvPoolConnector's keys are of whole blocks, of {self.block_size} tokens")
        self.manager, self.saves.block_pool = manager, manager.block_pool
        reset = manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self.saves.let_go()  # A cache of which blocks are held is not reset.
            return reset()

        manager.reset_prefix_cache = reset_prefix_cache

    # ---- The session

    def _open(self, timeout: float) -> kvpool.Session:
        from vllm.platforms import current_platform
        options = self.options
        # Workers copy from blocks that are held until they have reported it, and to blocks that are leased: all else may go at any time,
        # but where a GPU reaches it (pages.DevicePages).
        return self.terms.session(
            client_name="vllm connector", warmup=False, scheduler=True, give_back="any_time", holes=current_platform.is_cpu(), tenant=options.tenant,
            guaranteed_blocks=max(0, options.guaranteed_blocks), max_space_bytes=options.max_space_bytes,
            magazine_blocks=self._magazine, open_timeout=timeout)

    def _use(self, session: kvpool.Session) -> None:
        self.close()
        # What the session before held went with it.
        for asked in self._requests.values():
            asked.pending, asked.refs, asked.saved = None, None, 0
        self._loading = {request_id: [] for request_id in self._loading}
        self.saves.drop()
        self.damaged.clear()
        self.session, self.detached, self.joined, self._join_by = session, False, False, None
        self.number += 1

    def _follow_the_daemon(self) -> None:
        if not self.detached:
            try:
                self.session.check()
            except kvpool.KvpoolError as error:
                self._detach(error)
        elif (session := self._opener.take()) is not None:
            if self.number:
                logger.warning("kvpoold is there again: this engine shares what it computes from now on")
            self._use(session)

    def _heard(self, report: Report) -> None:
        if self.detached or self.joined:
            return
        if report.refused == self.number:
            self._detach("a worker could not join the session")
        elif report.session == self.number and self._is_ready():
            self.joined = True
            self.saves.opened(self.options.match_timeout)

    def _is_ready(self) -> bool:
        """kvpoold has heard that the workers have mapped its memory. Before, it leases nothing, as it finds nothing."""
        try:
            self.session.lease(1, timeout=0).release()
        except kvpool.ResourceExhaustedError:
            return False
        except kvpool.KvpoolError as error:
            self._detach(error)
            return False
        return True

    def _usable(self) -> bool:
        """Whether there is a kvpoold. The keys are checked with the first request: by then vLLM has made their root."""
        if not self.checked:
            self.checked = True
            if not keys.is_taken(self.hash_name):
                raise RuntimeError("KvPoolConnector: vLLM's keys do not start from the fingerprint: this vLLM makes them elsewhere")
        return not self.detached

    def _detach(self, why: object) -> None:
        if not self.detached:
            self.detached = True
            self._opener.lost()
            self.saves.drop()
            logger.error("kvpoold is gone: this engine goes on with its own KV cache, and shares nothing: %s", why)

    def _keys(self, request: Request, first: int, last: int) -> list[bytes]:
        seed = self.session.hash_seed + self.private
        return [hashlib.sha256(seed + name).digest() for name in request.block_hashes[first:last]]

    # ---- What is there

    def came(self, request: Request) -> None:
        keys.update(request)
        asked = self._requests[request.request_id] = _Asked(request)
        if keys.reloads_another(request):
            self.adapter_changed(request.lora_request.lora_int_id)
        if len(self._ahead) < _AHEAD and self._usable() and self.joined:
            self._ahead.add(request.request_id)
            self._ask(asked)

    def _wanted(self, request: Request) -> int:
        """Blocks that may be loaded: the last token is always computed."""
        if request.skip_reading_prefix_cache:
            return 0
        return min((request.num_tokens - 1) // self.block_size, len(request.block_hashes), MOST_KEYS // len(self.groups))

    def _ask(self, asked: _Asked) -> None:
        wanted = self._wanted(asked.request)
        if not (self.loads and wanted) or time.monotonic() < self._quiet_until:
            asked.refs = self._nothing
            return
        try:
            names = self._keys(asked.request, 0, wanted)
            asked.question = [(group, names) for group in range(len(self.groups))]
            asked.pending, asked.waits = self.session.match_groups(asked.question), False
            asked.deadline = time.monotonic() + self.options.match_timeout
            self._counts["asked_requests"] += 1
        except kvpool.ResourceExhaustedError:
            asked.refs = self._nothing  # Too much is on its way: it will be computed.
        except kvpool.KvpoolError as error:
            asked.refs = self._nothing
            self._detach(error)

    def found(self, request: Request, computed: int) -> int | None:
        """Tokens behind the first `computed` that can be loaded; None: not known yet."""
        asked = self._requests.get(request.request_id)
        if asked is None:
            asked = self._requests[request.request_id] = _Asked(request)
        if self.loads and not self.detached and not self.joined and self._waits_for_workers():
            return None
        asked.local = computed // self.block_size
        if asked.refs is None and asked.pending is None:
            if self._usable() and self.joined:
                self._ask(asked)
            else:
                asked.refs = self._nothing
        if asked.refs is None and not self._answered(asked):
            return None
        if self.damaged:
            self._leave_out_damaged(asked)
        if self._caches and not self._being_loaded().isdisjoint(asked.flat(asked.local)):
            return None
        return max(0, asked.found - asked.local) * self.block_size

    def _waits_for_workers(self) -> bool:
        """They join with the first step."""
        if self._join_by is None:
            self._join_by = time.monotonic() + self.options.match_timeout
        return time.monotonic() < self._join_by

    def _being_loaded(self) -> set[int]:
        return {ref for refs in self._loading.values() for ref in refs}

    def _answered(self, asked: _Asked) -> bool:
        if self._poll_until is None:
            self._poll_until = time.monotonic() + _POLL_S
        try:
            hit = asked.pending.wait(timeout=0 if asked.waits and not self._is_idle else max(0, self._poll_until - time.monotonic()))
            if self._is_worth_a_wait(asked, hit):
                self._wait_for_below(asked)
                return False
            asked.refs = [blocks.detach() for blocks in hit.groups]
        except kvpool.DeadlineExceededError:
            if time.monotonic() < asked.deadline:
                return False
            logger.warning("kvpoold has not answered for %s s: prefixes are computed for the next %s s", self.options.match_timeout,
                           _QUIET_S)
            self._counts["late_answers"] += 1
            self._quiet_until = time.monotonic() + _QUIET_S
            asked.refs = self._nothing  # What comes later is given back.
        except kvpool.ResourceExhaustedError:
            asked.refs = self._nothing  # Too much is on its way: it will be computed.
        except kvpool.KvpoolError as error:
            self._detach(error)
            asked.refs = self._nothing
        asked.pending = None
        return True

    def _is_worth_a_wait(self, asked: _Asked, hit: kvpool.MatchHit) -> bool:
        """More is below the pool than vLLM has itself, or may be, and nobody has waited for it."""
        if asked.waits or self.options.wait_ms == 0 or hit.miss == "none":
            return False
        return hit.may_be_below or (hit.below_tokens > 0 and hit.tokens + hit.below_tokens > asked.local * self.block_size)

    def _wait_for_below(self, asked: _Asked) -> None:
        """What was found so far goes back, and is found again with what comes up."""
        asked.pending, asked.waits = self.session.match_groups(asked.question, wait_ms=self.options.wait_ms), True
        asked.deadline = time.monotonic() + self.options.wait_ms / 1000 + self.options.match_timeout
        self._counts["waited_requests"] += 1

    def _leave_out_damaged(self, asked: _Asked) -> None:
        """Another's load may have shown it since the answer."""
        good = min((i for of_group in asked.refs for i, ref in enumerate(of_group) if ref in self.damaged), default=asked.found)
        if good < asked.found:
            if any(group.window_tokens for group in self.groups):
                good = 0  # In front of it there is no window.
            self._release(asked.flat(good))
            asked.refs = [of_group[:good] for of_group in asked.refs]

    def _release(self, refs: list[int] | None) -> None:
        if refs and not self.detached:
            try:
                self.session.release(refs)
            except kvpool.KvpoolError as error:
                self._detach(error)

    def admitted(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        asked = self._requests[request.request_id]
        self._ahead.discard(request.request_id)
        if asked.refs is None:
            return  # Again, for it goes on behind what was loaded.
        asked.saved, asked.mixed = asked.found, False
        load = Load(request.request_id, [], [], [], [])
        first = asked.local
        for group, of_group in enumerate(blocks.blocks if external else ()):
            last = first + external // self.block_size
            for block, ref, key in zip(of_group[first:last], asked.refs[group][first:last], self._keys(request, first, last)):
                if not block.is_null:  # Else a window has passed it.
                    load.groups.append(group)
                    load.blocks.append(block.block_id)
                    load.refs.append(ref)
                    load.keys.append(key)
        if external:
            self._loading[request.request_id] = load.refs
            self._planned.append(load)
            self._counts["found_blocks"] += len(load.blocks)
        held = set(load.refs)
        self._release([ref for ref in asked.flat(0) if ref not in held])
        asked.refs = None

    def left(self, request_id: str) -> None:
        asked = self._requests.pop(request_id, None)
        self._ahead.discard(request_id)
        if asked is not None:
            self._release(asked.flat(0))

    # ---- What is to be done

    def plan(self, scheduler_output: SchedulerOutput) -> Plan:
        self._poll_until = None
        if not self._planned:  # They are of this session.
            self._follow_the_daemon()
        self._is_idle = is_empty = scheduler_output.total_num_scheduled_tokens == 0
        invitation = None if self.detached or self.joined else Invitation(self.number, self.session.invitation())
        plan = Plan(self.number, invitation, is_empty, self._planned)
        self._planned = []
        if self.joined and not self.detached:
            try:
                self.saves.begin(self.session, plan.copies, _POLL_S if is_empty else 0)
                if self.fills:
                    for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
                        self._save(request_id, tokens)
            except kvpool.KvpoolError as error:
                self._detach(error)
        return plan

    def _save(self, request_id: str, tokens: int) -> None:
        asked = self._requests.get(request_id)
        if asked is None:
            return
        request = asked.request
        # Tokens that a step guesses have no hash yet.
        full = min((request.num_computed_tokens + tokens) // self.block_size, len(request.block_hashes))
        if full <= asked.saved or asked.mixed:
            return
        if not keys.adapter_is_the_same(request):
            self._compute_otherwise(asked)  # Later blocks are of that, too: they are not saved, nor found in vLLM's own cache.
            return
        first, asked.saved = asked.saved, full
        names, adapter = self._keys(request, first, full), keys.adapter_files(request)
        parents = [*(self._keys(request, first - 1, first) if first else [None]), *names]
        for group, of_group in enumerate(self.manager.get_blocks(request_id).blocks):
            saves: list[Save] = []
            is_run = False
            for block, name, parent in zip(of_group[first:full], names, parents):
                if not self._is_to_be_saved(group, block, name):
                    is_run = False
                    continue
                if not is_run:
                    saves.append(Save(group, [], [], parent, adapter))
                    is_run = True
                saves[-1].blocks.append(block)
                saves[-1].keys.append(name)
            for save in saves:
                # Of a window kvpoold has all of what is asked, or says nothing of it.
                self.saves.add(self.session, save, ask=not self.groups[group].window_tokens)

    def _is_to_be_saved(self, group: int, block: Any, name: bytes) -> bool:
        if block.is_null or (group, name) in self.saves:
            return False
        # Of windows vLLM has chosen those that can be found later.
        return not self.groups[group].window_tokens or block.block_hash is not None or not self._caches

    def loaded(self, request_ids: Iterable[str]) -> None:
        """All workers are done with the loads of these, or of other connectors'."""
        for request_id in request_ids:
            self._release(self._loading.pop(request_id, None))

    def done(self, report: Report, failed: bool) -> None:
        """Workers have executed a plan; `failed`: there are blocks that could not be loaded, by this connector or another."""
        if report.session == self.number:
            self.damaged |= report.damaged
        try:
            self.saves.done(self.session, report)
        except kvpool.KvpoolError as error:
            self._detach(error)
        self._heard(report)
        if failed:  # Another connector's step may have read them. What is computed anew asks what of it is there.
            self.saves.drop_planned()
            for asked in self._requests.values():
                asked.saved = 0

    def reset(self) -> bool:
        """From now on no other engine has this engine's keys."""
        self.private = secrets.token_bytes(32)
        for asked in self._requests.values():
            self._forget(asked)
        return True

    def _forget(self, asked: _Asked) -> None:
        """What is known of its prefix."""
        asked.pending = None
        self._release(asked.flat(0))
        asked.refs, asked.saved = None, 0

    def weights_changed(self) -> None:
        """What was computed before is not found any more, in vLLM's own cache either: it would be saved. What a request goes on with
        is not saved, and nobody finds it."""
        self.reset()
        keys.new_root()
        keys.take_root(get_hash_fn_by_name(self.hash_name))
        for asked in self._requests.values():
            self._compute_otherwise(asked)

    def adapter_changed(self, number: int) -> None:
        """What was saved stays what it was; what comes is found by others who have the same adapter."""
        for request in keys.renamed(number, [asked.request for asked in self._requests.values()]):
            asked = self._requests[request.request_id]
            self._forget(asked)
            self._compute_otherwise(asked)

    def _compute_otherwise(self, asked: _Asked) -> None:
        request = asked.request
        asked.mixed = request.num_computed_tokens > 0
        if asked.mixed:
            request.cache_salt, request.kvpool_shared = secrets.token_hex(16), 0
        keys.make_anew(request)

    def shutdown(self) -> None:
        self.close()
        atexit.unregister(self.close)

    def close(self) -> None:
        if self._loading or self.saves.are_under_way:
            hang_up(self.session)  # A worker may be copying: whoever closes a session gives all of its blocks to others.
        else:
            leave(self.session, logger)
        self.session, self.detached = None, True
