"""A worker's part in the engine's session: it maps the pool, ends its warm-up, says which steps are done, and moves when the scheduler does.

An executor has its worker in the engine core's process, whose session it uses, or workers in processes of their own (vLLM's servers
on CPUs, tensor parallelism), each of which joins that session as a rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool_vllm import facts, patches

if TYPE_CHECKING:
    from kvpool_vllm.space import Memory, Space


def _allocate(original: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_kv_cache(kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None) -> Any:
        space = getattr(kv_cache_config, "kvpool", None)
        if space is None or space.session is None or not kv_cache_config.kv_cache_tensors:
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        return space.views(kv_cache_config, device, layout, kernel_block_sizes)
    return allocate_kv_cache


def prepare(wrapper: Any, space: Space, initialize: Callable[[], Any]) -> Any:
    """`wrapper`: the WorkerWrapperBase through which an executor calls its worker. `initialize`: its own, which makes the KV tensors."""
    from vllm.v1.worker import utils as worker_utils
    patches.replace(worker_utils, "allocate_kv_cache", _allocate)
    space.join(wrapper.global_rank)
    runner = getattr(wrapper.worker, "model_runner", None)
    make = getattr(runner, "initialize_kv_cache_tensors", None)
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # How the tensors were made.
    if make is not None:
        def initialize_kv_cache_tensors(*arguments: Any, **more: Any) -> Any:
            made.append((arguments, more))
            return make(*arguments, **more)

        runner.initialize_kv_cache_tensors = initialize_kv_cache_tensors
    try:
        done = initialize()
    finally:
        if make is not None:
            del runner.initialize_kv_cache_tensors
    warm_up, execute, sample = wrapper.worker.compile_or_warm_up_model, wrapper.execute_model, wrapper.sample_tokens
    drafts = facts.has_drafts_with_kv(wrapper.vllm_config)  # Their K and V are computed once tokens are sampled.
    executed: list[int] = []  # The step whose tokens are to be sampled.

    def compile_or_warm_up_model(*arguments: Any, **more: Any) -> Any:
        warm = warm_up(*arguments, **more)
        if space.session is not None:
            space.session.finish_warmup()
        return warm

    def execute_model(scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
        output = execute(scheduler_output, *arguments, **more)
        if step := getattr(scheduler_output, "kvpool_step", 0):
            if drafts:
                executed.append(step)
            else:
                space.computed(step)
        return output

    def sample_tokens(*arguments: Any, **more: Any) -> Any:
        sampled = sample(*arguments, **more)
        if executed:
            space.computed(executed.pop())
        return sampled

    def kvpool_move(memory: Memory) -> str:
        """Makes the KV tensors anew, in other memory; what was in the old is gone. Answers why it could not, or nothing."""
        try:
            if not made:
                raise RuntimeError(f"{type(runner).__name__} makes its KV tensors in a way that kvpool does not know")
            arguments, more = made[-1]
            space.enter(memory, wrapper.global_rank)
            config = arguments[0]
            config.num_blocks, config.kv_cache_tensors = memory.num_blocks, list(memory.tensors)
            from vllm.config import set_current_vllm_config
            runner.kv_caches.clear()
            with set_current_vllm_config(wrapper.vllm_config):
                make(*arguments, **more)
            runner._mamba_bufs = None  # They know where states were.
            if hasattr(runner, "_kv_block_zeroer"):  # It knows where blocks were.
                runner._init_kv_zero_meta()
            if space.session is not None:
                space.session.finish_warmup()
            gc.collect()  # Views of the old memory keep it mapped.
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    wrapper.compile_or_warm_up_model, wrapper.kvpool_move = compile_or_warm_up_model, kvpool_move
    wrapper.execute_model, wrapper.sample_tokens = execute_model, sample_tokens
    return done
