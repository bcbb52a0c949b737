"""vLLM's scheduler, telling the pool what comes, what was computed, and what is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from kvpool_engines.sessions import Opener, leave
from kvpool_vllm import core, keys, patches
from kvpool_vllm.block_pool import KvPoolBlockPool
from kvpool_vllm.prefills import Prefills

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from kvpool_vllm.space import Space

logger = init_logger("vllm.kvpool")


@contextlib.contextmanager
def building(space: Space) -> Iterator[None]:
    """The coordinator of KV caches that is made meanwhile has a pool of ours. Other modules use vLLM's class in type hints and for pools
    of their own."""
    original = kv_cache_coordinator.BlockPool

    def make(*arguments: Any, **more: Any) -> KvPoolBlockPool:
        return KvPoolBlockPool(space, *arguments, **more)

    kv_cache_coordinator.BlockPool = make
    try:
        yield
    finally:
        kv_cache_coordinator.BlockPool = original


def ask_for_blocks(manager: KVCacheManager, watermark: int) -> None:
    """The manager's pool is told of each allocation what it needs, and has its answer for a request before vLLM looks for a prefix.
    `watermark`: blocks that vLLM leaves free when it admits a request."""
    lookup, plan = manager.get_computed_blocks, manager.coordinator.get_num_blocks_to_allocate
    pool, manager.watermark_blocks = manager.block_pool, watermark
    pool.headroom = watermark
    pool.ends_within_blocks = getattr(manager.coordinator, "enable_partial_hash_hits", False)

    def get_computed_blocks(request: Request, *arguments: Any, **more: Any) -> Any:
        if not pool.settle(request):
            return manager.empty_kv_cache_blocks, 0, 0  # Below.planning has the request left out of the step.
        blocks, tokens, *boundary = lookup(request, *arguments, **more)
        pool.hold(request, [block for group in blocks.blocks for block in group if not block.is_null])
        if boundary and (junction := pool.junction(request)) > tokens:
            boundary = [max(junction, *boundary)]
        return blocks, tokens, *boundary

    def get_num_blocks_to_allocate(*arguments: Any, **more: Any) -> int:
        pool.wanted = count = plan(*arguments, **more)
        return count

    manager.get_computed_blocks = get_computed_blocks
    manager.coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate
    # Where prefixes end within blocks, and windows move, a step does more than to take blocks and fill them.
    if all(type(kind) is FullAttentionManager for kind in manager.coordinator.single_type_managers) and not pool.ends_within_blocks:
        answer_at_once(manager)


def answer_at_once(manager: KVCacheManager) -> None:
    """Most steps of decoding need no block and fill none. What vLLM does to find that out is a quarter of its scheduler's time."""
    allocate, pool, kinds = manager.allocate_slots, manager.block_pool, manager.coordinator.single_type_managers

    def allocate_slots(request: Request, num_new_tokens: int, *arguments: Any, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        if not arguments and not more:  # A request that runs: of others there is more to say.
            name, end = request.request_id, request.num_computed_tokens + num_new_tokens
            final = min(end, request.num_tokens)
            for kind in kinds:
                if (end + num_lookahead_tokens > len(kind.req_to_blocks.get(name, ())) * kind.block_size
                        or final >= (kind.num_cached_block.get(name, -1) + 1) * kind.block_size):
                    break
            else:
                pool.wanted = 0
                return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, *arguments, num_lookahead_tokens=num_lookahead_tokens, **more)

    manager.allocate_slots = allocate_slots


class _Pooled(scheduler.Scheduler):
    """What kvpool adds to each of vLLM's schedulers."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **more: Any) -> None:
        space = kv_cache_config.kvpool
        with building(space):
            super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **more)
        self.pool = self.kv_cache_manager.block_pool
        if not isinstance(self.pool, KvPoolBlockPool):
            raise RuntimeError(f"the block pool is a {type(self.pool).__name__}, not kvpool_vllm's: this vLLM makes it elsewhere")
        self.pool.steps_overlap = isinstance(self, async_scheduler.AsyncScheduler)
        core.listen(self)
        self._prefills = Prefills()
        self._opener = Opener(space.open_again, logger)
        # Behind a move, requests whose layers have a state said something else than before it.
        self._can_move = not any(group.has_states for group in space.terms.groups)
        self.pool.wanted = 1
        if self.pool.get_num_free_blocks() == 0:
            space.session.lease(1, timeout=space.options.open_timeout).release()
        # A share of what this engine may hold: its plan has room for the ids of all of the pool's blocks.
        ask_for_blocks(self.kv_cache_manager, int(self.scheduler_config.watermark * space.limit))

    # ---- Losing a kvpoold, and finding one

    def _follow_the_daemon(self) -> None:
        """Before a step is planned. Requests that run are computed again, as preempted ones are: none of them fails. What a step that is
        under way answers for them is dropped, and workers move once it is done."""
        pool = self.pool
        if pool.detached and not pool.own:
            if not self._can_move:
                raise RuntimeError("kvpoold is gone: an engine whose layers have a state does not go on without it")
            self._opener.lost()
            self._move(None)
        elif pool.own and self._can_move and (session := self._opener.take()) is not None:
            self._move(session)

    def _move(self, session: Any) -> None:
        space, pool = self.pool.space, self.pool
        self._stop_all()
        why = space.move(session)
        if why and session is not None:
            logger.error("the kvpoold that is there again could not be joined: %s", why)
            self._opener.lost()
            session, why = None, space.move(None)
        if why:
            raise RuntimeError(f"kvpoold is gone, and this engine can't go on in memory of its own: {why}")
        if session is None:
            pool.go_own()
            return
        logger.warning("kvpoold is there again: this engine shares what it computes from now on")
        pool.join(session)
        keys.set_root(session.hash_seed)
        self._rehash()
        for request in self.requests.values():
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                pool.ask(request)

    def _stop_all(self) -> None:
        """No request has a block. They begin anew, with the tokens that they have."""
        for request in self.requests.values():
            if request.num_computed_tokens > 0 and request not in self.running:
                self.kv_cache_manager.free(request)
                request.kvpool_mixed = False
                if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                    request.kvpool_begins_anew = True  # With its next input. Until then the number says which of its tokens stay.
                else:
                    request.num_computed_tokens = 0
        super().reset_prefix_cache(reset_running_requests=True)

    def _rehash(self) -> None:
        """Requests that are there have keys of another root."""
        keys.take_root(get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo))
        for request in self.requests.values():
            keys.make_anew(request)

    def weights_changed(self) -> None:
        """Nothing that was computed before is found, and nothing that comes is found by others, who may have other weights."""
        self.pool.forget_what_was_computed()
        for request in self.requests.values():
            self._compute_otherwise(request)
        keys.new_root()
        self._rehash()

    def adapter_changed(self, number: int) -> None:
        """What was sealed stays what it was; what comes is found by others who have the same adapter."""
        changed = keys.renamed(number, self.requests.values())
        if changed:
            self.pool.forget_what_was_computed()
        for request in changed:
            self._compute_otherwise(request)
            request.kvpool_asked = None  # Its prefix is another, and is asked for at its turn.
            keys.make_anew(request)

    def _compute_otherwise(self, request: Request) -> None:
        self.pool.let_go(request.request_id)
        request.kvpool_mixed = request.num_computed_tokens > 0  # It goes on, as vLLM has it.

    def add_request(self, request: Request) -> None:
        goes_on = request.request_id in self.requests  # More input of a session that streams it: behind what it has computed.
        super().add_request(request)
        if not goes_on:
            keys.update(request)
            if keys.reloads_another(request):
                self.adapter_changed(request.lora_request.lora_int_id)
            self.pool.ask(request)

    def _update_request_as_session(self, session: Request, *arguments: Any, **more: Any) -> None:
        super()._update_request_as_session(session, *arguments, **more)
        if getattr(session, "kvpool_begins_anew", False):
            session.kvpool_begins_anew, session.num_computed_tokens = False, 0
            self.pool.ask(session)

    def schedule(self, *arguments: Any, **more: Any) -> SchedulerOutput:
        self._follow_the_daemon()
        with self.pool.below.planning(self):
            output = super().schedule(*arguments, **more)
        output.kvpool_step = 0
        idle = output.total_num_scheduled_tokens == 0
        if not idle or self.pool.release_waits:
            output.kvpool_step = self.pool.scheduled(output.num_scheduled_tokens.keys())
        self._prefills.planned(output)
        return output

    def has_requests(self) -> bool:
        return super().has_requests() or self.pool.release_waits  # Else they would wait for the next request.

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        self.pool.tell(lambda session: self._prefills.over(scheduler_output, session))
        transfers = model_runner_output.kv_connector_output
        if transfers is not None and transfers.invalid_block_ids:
            # What these steps have computed follows from blocks that another connector could not fill. vLLM computes it again.
            self.pool.forget_what_was_computed()
        if step := getattr(scheduler_output, "kvpool_step", 0):
            self.pool.computed(step)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.pool.trim()
        return outputs

    def _preempt_request(self, request: Request, *arguments: Any, **more: Any) -> None:
        super()._preempt_request(request, *arguments, **more)
        request.kvpool_mixed = False
        # Its prefix is asked for at its turn: what was found now would be held, and the requests that it gave way to need blocks.
        request.kvpool_asked = None

    def _free_request(self, request: Request, *arguments: Any, **more: Any) -> Any:
        self.pool.let_go(request.request_id)
        return super()._free_request(request, *arguments, **more)

    def reset_prefix_cache(self, *arguments: Any, **more: Any) -> bool:
        done = super().reset_prefix_cache(*arguments, **more)
        if done:
            keys.new_root()  # What this engine sealed so far is found by its neighbours alone.
            self._rehash()
        return done

    def shutdown(self) -> None:
        super().shutdown()
        leave(self.pool.session, logger)


class PooledScheduler(_Pooled):
    """A step is planned when the one before is done."""


class PooledAsyncScheduler(_Pooled, async_scheduler.AsyncScheduler):
    """A step is planned while the one before is under way: vLLM's default on GPUs."""


class Scheduler:
    """--scheduler-cls kvpool_vllm.Scheduler: vLLM's scheduler on a pool. It starts on nothing else."""

    def __new__(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **more: Any) -> Any:
        if not hasattr(kv_cache_config, "kvpool"):
            raise RuntimeError(patches.failure or "this vLLM plans its KV memory elsewhere than in EngineCore._initialize_kv_caches")
        kind = PooledAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PooledScheduler
        return kind(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **more)
