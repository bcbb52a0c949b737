"""A worker's part in the engine's session: it maps the pool, ends its warm-up, says which steps are done, and moves when the scheduler does.

An executor has its worker in the engine core's process, whose session it uses, or workers in processes of their own (vLLM's servers
on CPUs, tensor parallelism), each of which joins that session as a rank.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import kvpool
from vllm.logger import init_logger

from kvpool_vllm import facts, patches

if TYPE_CHECKING:
    from kvpool_vllm.space import Memory, Space

logger = init_logger("vllm.kvpool")


def _allocate(original: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_kv_cache(kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None) -> Any:
        space = getattr(kv_cache_config, "kvpool", None)
        if space is None or space.session is None or not kv_cache_config.kv_cache_tensors:
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        return space.views(kv_cache_config, device, layout, kernel_block_sizes)
    return allocate_kv_cache


_LOOK_S = 0.05  # How often a worker looks whether slabs are asked back; who wants them waits for seconds.


def _gaps(mapped: Sequence[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """The blocks below `end` that are not mapped, as ranges like those that are."""
    behind = 0
    for first, next_behind in [*mapped, (end, end)]:
        if behind < first:
            yield behind, first
        behind = next_behind


def give_back_slabs(runner: Any, space: Space) -> None:
    """Unmaps the slabs that are asked back. Nobody holds a block of them; tables may name some that earlier requests had, or that a window
    has left: these become the null block. REQUIRES: no kernel runs."""
    session = space.session
    if session is None or not session.slabs_asked_back:
        return
    try:
        session.give_back_slabs()
    finally:  # Some may be unmapped, whatever became of the others.
        for first, end in _gaps(session.mapped_ranges, session.max_blocks):
            for table in runner.input_batch.block_table.block_tables:
                for ids in (table.block_table.cpu, table.block_table.gpu):
                    ids.masked_fill_((ids >= first) & (ids < end), 0)
                for slots in (table.slot_mapping.cpu, table.slot_mapping.gpu):
                    gone = (slots >= first * table.block_size) & (slots < end * table.block_size)
                    slots.masked_fill_(gone, -1)  # vLLM's PAD_SLOT_ID.


def _watch(of_runner: weakref.ref[Any], space: Space, step: threading.Lock) -> None:
    """Between steps, and while the engine is idle; as long as there is the runner."""
    while (runner := of_runner()) is not None:
        try:
            session = space.session  # The engine's thread may leave it at any time.
            if session is not None and session.slabs_asked_back:
                with step:
                    give_back_slabs(runner, space)
        except kvpool.KvpoolError as error:  # The session is over, as the scheduler will see.
            logger.debug("no slab was given back: %s", error)
        del runner
        time.sleep(_LOOK_S)


def prepare(wrapper: Any) -> None:
    """Has a worker make its KV tensors in the space that its plan names. `wrapper`: the WorkerWrapperBase through which an executor calls it."""
    initialize = wrapper.initialize_from_config

    def initialize_from_config(kv_cache_configs: Any, *rest: Any, **more: Any) -> Any:
        return _initialize(wrapper, kv_cache_configs[wrapper.global_rank].kvpool, lambda: initialize(kv_cache_configs, *rest, **more))

    wrapper.initialize_from_config = initialize_from_config


def _initialize(wrapper: Any, space: Space, initialize: Callable[[], Any]) -> Any:
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
    step = threading.Lock()  # Whoever has it runs kernels, or knows that none runs.

    def compile_or_warm_up_model(*arguments: Any, **more: Any) -> Any:
        warm = warm_up(*arguments, **more)
        if space.session is not None:
            space.session.finish_warmup()
        if space.gives_back:
            threading.Thread(target=_watch, args=(weakref.ref(runner), space, step), daemon=True, name="kvpool give back").start()
        return warm

    def execute_model(scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
        with step:
            output = execute(scheduler_output, *arguments, **more)
        if number := getattr(scheduler_output, "kvpool_step", 0):
            if drafts and scheduler_output.total_num_scheduled_tokens > 0:  # Of an empty step nothing is sampled.
                executed.append(number)
            else:
                space.computed(number)
        return output

    def sample_tokens(*arguments: Any, **more: Any) -> Any:
        with step:
            sampled = sample(*arguments, **more)
        if executed:
            space.computed(executed.pop())
        return sampled

    def kvpool_move(memory: Memory) -> str:
        """Makes the KV tensors anew, in other memory; what was in the old is gone. Answers why it could not, or nothing."""
        try:
            if not made:
                raise RuntimeError(f"{type(runner).__name__} makes its KV tensors in a way that kvpool does not know")
            with step:
                move(memory)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def move(memory: Memory) -> None:
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

    wrapper.compile_or_warm_up_model, wrapper.kvpool_move = compile_or_warm_up_model, kvpool_move
    wrapper.execute_model, wrapper.sample_tokens = execute_model, sample_tokens
    return done
