"""The plugin that vLLM loads in each of its processes: it puts kvpool's code where vLLM makes KV memory, block pools and keys.

Each replacement does what vLLM does unless the engine has kvpool_vllm.Scheduler. vLLM skips a plugin that fails to load
without a word to the user, so that scheduler refuses to start where the memory is not the pool's.

vLLM has no hook for any of these places:

    replaced                                      because there
    attention utils.resolve_kv_cache_layout       the layout is chosen: a pool needs blocks that hold all layers (space.choose_layout)
    kv_cache_utils.get_kv_cache_configs           memory is planned: the plan becomes one of the pool's blocks (space.attach)
    kv_cache_utils.init_none_hash                 key chains get their root: the space's seed (keys.take_root)
    kv_cache_utils._gen_lora_extra_hash_keys      an adapter enters a key: by content, for its name is local (keys.adapter_keys)
    worker utils.allocate_kv_cache                KV tensors are made: views of the pool (Space.views)
    WorkerWrapperBase's methods                   workers are called: they join, end warm-up, report steps (worker.extend)
    kv_cache_coordinator.BlockPool                a scheduler's block pool is made (block_pool.KvPoolBlockPool)
    CPUAttentionBackend.supported_kv_cache_layouts   a layout is declared: see _widen_cpu_attention
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvpool_vllm import worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvpool_vllm.space import Space

OLDEST = (0, 29)

# The Space of the scheduler that is being made, for the block pool that its coordinator makes.
building: contextvars.ContextVar[Space | None] = contextvars.ContextVar("kvpool_vllm_building", default=None)


def check_version(version: str) -> None:
    """RuntimeError: this vLLM is older than OLDEST, against which the replacements were written."""
    try:
        parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return  # A build from source: "dev".
    if parts < OLDEST:
        raise RuntimeError(f"vLLM is {version}; kvpool_vllm needs {OLDEST[0]}.{OLDEST[1]} or later")


def is_ours(vllm_config: VllmConfig) -> bool:
    asked = vllm_config.scheduler_config.scheduler_cls
    if isinstance(asked, str):
        return asked in ("kvpool_vllm.Scheduler", "kvpool_vllm.scheduler.Scheduler")
    return getattr(asked, "__module__", "").startswith("kvpool_vllm")


def _replace(module: ModuleType, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """module.name becomes make(original). vLLM's modules import these functions by name (`from … import name`), and some of them
    have done so before plugins are loaded: each such binding is replaced too. A module that imports later finds the new one."""
    original = getattr(module, name)
    if getattr(original, "kvpool", False):
        return
    made = make(original)
    made.kvpool = True
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, made)


def _layout(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve_kv_cache_layout(vllm_config: VllmConfig, supported_layouts: Any, *rest: Any, **more: Any) -> Any:
        if is_ours(vllm_config):
            from kvpool_vllm.space import choose_layout
            choose_layout(vllm_config, supported_layouts)
        return original(vllm_config, supported_layouts, *rest, **more)
    return resolve_kv_cache_layout


def _configs(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_configs(vllm_config: VllmConfig, *rest: Any, **more: Any) -> Any:
        configs = original(vllm_config, *rest, **more)
        if is_ours(vllm_config):
            from kvpool_vllm.space import attach
            attach(vllm_config, configs)
        return configs
    return get_kv_cache_configs


def _allocate(original: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_kv_cache(kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: Any = None) -> Any:
        space = getattr(kv_cache_config, "kvpool", None)
        if space is None or not kv_cache_config.kv_cache_tensors:
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        return space.views(kv_cache_config, device, layout, kernel_block_sizes)
    return allocate_kv_cache


def _root(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_none_hash(hash_fn: Callable[..., Any]) -> None:
        original(hash_fn)
        from kvpool_vllm.keys import take_root
        take_root(hash_fn)
    return init_none_hash


def _adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def _gen_lora_extra_hash_keys(request: Any) -> Any:
        from kvpool_vllm.keys import adapter_keys
        return adapter_keys(request, original)
    return _gen_lora_extra_hash_keys


def _block_pool(original: Callable[..., Any]) -> Callable[..., Any]:
    def BlockPool(*arguments: Any, **more: Any) -> Any:
        space = building.get()
        if space is None:
            return original(*arguments, **more)
        from kvpool_vllm.block_pool import KvPoolBlockPool
        return KvPoolBlockPool(space, *arguments, **more)
    return BlockPool


def _widen_cpu_attention() -> None:
    """The kernel takes any stride between blocks, but declares only the layouts that vLLM itself uses. cpu_attention.check_strides
    proves it before a Space is opened."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheLayout
    declared = CPUAttentionBackend.supported_kv_cache_layouts()
    if KVCacheLayout.BLHNC not in declared:
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: (*declared, KVCacheLayout.BLHNC))


def take_keys() -> None:
    """Has vLLM make block keys from the space's root, once there is a space."""
    from vllm.v1.core import kv_cache_utils
    _replace(kv_cache_utils, "init_none_hash", _root)
    _replace(kv_cache_utils, "_gen_lora_extra_hash_keys", _adapter)


def register() -> None:
    import vllm
    check_version(vllm.__version__)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import utils as attention_utils
    from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
    from vllm.v1.worker import utils as worker_utils
    from vllm.v1.worker import worker_base

    _replace(attention_utils, "resolve_kv_cache_layout", _layout)
    _replace(kv_cache_utils, "get_kv_cache_configs", _configs)
    take_keys()
    _replace(worker_utils, "allocate_kv_cache", _allocate)
    worker.extend(worker_base.WorkerWrapperBase)
    if not getattr(kv_cache_coordinator.BlockPool, "kvpool", False):
        # Not by _replace: other modules use the class in type hints and for pools of their own.
        kv_cache_coordinator.BlockPool = _block_pool(kv_cache_coordinator.BlockPool)
        kv_cache_coordinator.BlockPool.kvpool = True
    if current_platform.is_cpu():
        _widen_cpu_attention()
