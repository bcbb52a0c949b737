"""kvpool in vLLM's engine core: the plan of its KV memory becomes one of the pool's blocks, and what changes the model's weights is seen.

All of it is done to one core, its executor and its model, as objects.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.logger import init_logger

from kvpool_vllm import keys, patches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")

watched = False  # This process has a core whose weights are watched.


class Listener(Protocol):
    """Has requests, and is told what they will be computed by. Its keys do not say so yet."""

    def weights_changed(self) -> None: ...

    def adapter_changed(self, number: int) -> None:
        """`number`: its lora_int_id."""


_listeners: list[weakref.ref[Listener]] = []


def listen(listener: Listener) -> None:
    """It is not kept. RuntimeError: nobody would tell."""
    if not watched:
        raise RuntimeError(patches.failure or "this vLLM plans its KV memory elsewhere than in EngineCore._initialize_kv_caches")
    _listeners.append(weakref.ref(listener))


def _tell(what: Callable[[Listener], None]) -> None:
    for each in _listeners:
        if (listener := each()) is not None:
            what(listener)


def prepare(core: Any, vllm_config: VllmConfig, pooled: bool, initialize: Callable[[], KVCacheConfig]) -> KVCacheConfig:
    """The core's own `initialize`, which plans its KV memory. `pooled`: that memory is the pool's; else it has our connector."""
    import vllm
    patches.check_version(vllm.__version__)
    patches.take_keys()
    config = _plan(core, vllm_config, initialize) if pooled else initialize()
    if not pooled:
        _finish_saves(core)
    _watch(core)
    return config


def _plan(core: Any, vllm_config: VllmConfig, initialize: Callable[[], KVCacheConfig]) -> KVCacheConfig:
    from kvpool_vllm import worker
    from kvpool_vllm.space import attach, choose_layout
    executor = core.model_executor
    choose_layout(vllm_config, executor.get_supported_kv_cache_layouts())
    hand_over = executor.initialize_from_config
    planned: list[KVCacheConfig] = []

    def initialize_from_config(kv_cache_configs: Sequence[KVCacheConfig], *rest: Any, **more: Any) -> Any:
        attach(vllm_config, kv_cache_configs, executor)
        planned.append(kv_cache_configs[0])
        vllm_config.cache_config.num_gpu_blocks = kv_cache_configs[0].num_blocks
        executor.collective_rpc(worker.prepare)
        return hand_over(kv_cache_configs, *rest, **more)

    executor.initialize_from_config = initialize_from_config
    try:
        config = initialize()
    finally:
        del executor.initialize_from_config
    if not planned:
        raise RuntimeError("this vLLM hands its workers their plan elsewhere than in Executor.initialize_from_config: kvpool does not know it")
    # The scheduler's is a copy that was made of the plan before.
    config.kvpool, config.num_blocks = planned[0].kvpool, planned[0].num_blocks
    config.kv_cache_tensors = list(planned[0].kv_cache_tensors)
    return config


def _finish_saves(core: Any) -> None:
    """A core in its user's process is stepped while there are requests, and may end with the last of them: the connector's saves are finished
    behind it. A core in a process of its own goes on by itself."""
    from vllm.v1.engine.core import EngineCore
    if type(core) is not EngineCore:
        return
    post = core.post_step

    @functools.wraps(post)
    def post_step(*arguments: Any, **more: Any) -> None:
        post(*arguments, **more)
        scheduler = core.scheduler
        while scheduler.connector.has_pending_push_work() and not scheduler.has_unfinished_requests():
            core.step_fn()

    core.post_step = post_step


# ---- Weights

# Methods of workers that leave the weights alone.
_READERS = frozenset({"check_health", "compute_weight_checksums", "profile", "synchronize_device", "update_max_model_len"})


def only_reads(method: Any) -> bool:
    """Whether a call of this to all workers, by its name or as a function, leaves their weights as they are for sure."""
    return isinstance(method, str) and (method in _READERS or method.startswith(("get_", "list_", "is_")))


def _watch(core: Any) -> None:
    """K and V of other weights are another model's. Reinforcement learning changes weights by workers' methods of any name, by functions,
    and, where the worker is in this process, by the model's load_weights."""
    global watched
    watched = True

    def changed(by: str) -> None:
        logger.info("%s may have changed the weights: what was computed before is not found any more, and what comes is found by this "
                    "engine alone", by)
        _tell(lambda listener: listener.weights_changed())

    def then_changed(call: Callable[..., Any], by: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(*arguments: Any, **more: Any) -> Any:
            try:
                return call(*arguments, **more)
            finally:  # A call that fails may have changed some of them.
                changed(by)
        return called

    rpc = core.collective_rpc

    @functools.wraps(rpc)
    def collective_rpc(method: Any, *arguments: Any, **more: Any) -> Any:
        if only_reads(method):
            return rpc(method, *arguments, **more)
        return then_changed(rpc, f"collective_rpc({method if isinstance(method, str) else 'a function'})")(method, *arguments, **more)

    core.collective_rpc = collective_rpc
    core.wake_up = then_changed(core.wake_up, "wake_up")
    wrapper = getattr(core.model_executor, "driver_worker", None)  # In this process, of an executor that has it here.
    model = wrapper.worker.get_model() if wrapper is not None and hasattr(getattr(wrapper, "worker", None), "get_model") else None
    if hasattr(model, "load_weights"):
        model.load_weights = then_changed(model.load_weights, "load_weights")

    # An adapter is loaded when it is added, or when a request first needs it; which files it is of is asked before.
    add, remove = core.add_lora, core.remove_lora

    @functools.wraps(add)
    def add_lora(lora_request: Any, *arguments: Any, **more: Any) -> Any:
        try:
            with keys.loading(lora_request):
                return add(lora_request, *arguments, **more)
        finally:
            _tell(lambda listener: listener.adapter_changed(lora_request.lora_int_id))

    @functools.wraps(remove)
    def remove_lora(lora_id: int, *arguments: Any, **more: Any) -> Any:
        keys.adapter_goes(lora_id)
        try:
            return remove(lora_id, *arguments, **more)
        finally:
            _tell(lambda listener: listener.adapter_changed(lora_id))

    core.add_lora, core.remove_lora = add_lora, remove_lora
