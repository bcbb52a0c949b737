"""vLLM's scheduler, telling the pool what comes, what was computed, and what is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched import scheduler

from kvpool_vllm import keys, plugin
from kvpool_vllm.block_pool import KvPoolBlockPool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class PooledScheduler(scheduler.Scheduler):

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **more: Any) -> None:
        space = kv_cache_config.kvpool
        token = plugin.building.set(space)
        try:
            super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **more)
        finally:
            plugin.building.reset(token)
        self.pool = self.kv_cache_manager.block_pool
        if not isinstance(self.pool, KvPoolBlockPool):
            raise RuntimeError(f"the block pool is a {type(self.pool).__name__}, not kvpool_vllm's: this vLLM makes it elsewhere")
        self.pool.want(1)
        if self.pool.get_num_free_blocks() == 0:
            space.session.lease(1, timeout=space.options.open_timeout).release()
        self._wrap(self.kv_cache_manager)

    def _wrap(self, manager: KVCacheManager) -> None:
        lookup, plan = manager.get_computed_blocks, manager.coordinator.get_num_blocks_to_allocate
        pool = self.pool
        # A share of what this engine may hold: its plan has room for the ids of all of the pool's blocks.
        manager.watermark_blocks = watermark = int(self.scheduler_config.watermark * pool.space.limit)

        def get_computed_blocks(request: Request) -> Any:
            pool.settle(request, self.block_size)
            blocks, tokens, *boundary = lookup(request)
            pool.hold(request, [block for group in blocks.blocks for block in group if not block.is_null])
            if boundary and (junction := pool.junction(request)) > tokens:
                boundary = [max(junction, *boundary)]
            return blocks, tokens, *boundary

        def get_num_blocks_to_allocate(*arguments: Any, **more: Any) -> int:
            count = plan(*arguments, **more)
            pool.want(count, watermark)
            return count

        manager.get_computed_blocks = get_computed_blocks
        manager.coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate

    def add_request(self, request: Request) -> None:
        goes_on = request.request_id in self.requests  # More input of a session that streams it: behind what it has computed.
        super().add_request(request)
        if not goes_on:
            self.pool.ask(request, self.block_size)

    def schedule(self, *arguments: Any, **more: Any) -> SchedulerOutput:
        self.pool.starved = False
        output = super().schedule(*arguments, **more)
        output.kvpool_step = 0
        idle = output.total_num_scheduled_tokens == 0
        if not idle or self.pool.release_waits:
            output.kvpool_step = self.pool.scheduled(output.num_scheduled_tokens)
        if idle and self.pool.starved and not self.running:
            raise RuntimeError(f"kvpoold is gone, and the {self.pool.get_num_free_blocks()} blocks that this engine still may "
                               "write are too few for the requests that wait: it has to be started again")
        return output

    def has_requests(self) -> bool:
        return super().has_requests() or self.pool.release_waits  # Else they would wait for the next request.

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        if scheduler_output.kvpool_step:
            self.pool.computed(scheduler_output.kvpool_step)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.pool.trim()
        return outputs

    def _preempt_request(self, request: Request, *arguments: Any, **more: Any) -> None:
        super()._preempt_request(request, *arguments, **more)
        self.pool.ask(request, self.block_size)

    def _free_request(self, request: Request, *arguments: Any, **more: Any) -> Any:
        self.pool.let_go(request.request_id)
        return super()._free_request(request, *arguments, **more)

    def reset_prefix_cache(self, *arguments: Any, **more: Any) -> bool:
        done = super().reset_prefix_cache(*arguments, **more)
        if done:
            # Requests that wait have keys of the old root.
            from vllm.utils.hashing import get_hash_fn_by_name
            keys.take_root(get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo))
            for request in self.requests.values():
                request.block_hashes.clear()
                request.update_block_hashes()
        return done

    def shutdown(self) -> None:
        super().shutdown()
        self.pool.session.close()


class Scheduler:
    """--scheduler-cls kvpool_vllm.Scheduler: vLLM's scheduler on a pool. It starts on nothing else."""

    def __new__(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **more: Any) -> Any:
        if not hasattr(kv_cache_config, "kvpool"):
            raise RuntimeError("vLLM has not loaded the plugin of kvpool_vllm: its log says why, or VLLM_PLUGINS leaves out kvpool")
        # Without a space: fallback="own".
        kind = scheduler.Scheduler if kv_cache_config.kvpool is None else PooledScheduler
        return kind(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **more)
