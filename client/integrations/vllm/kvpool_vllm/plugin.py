"""What vLLM loads in each of its processes: the places where it makes KV memory, block pools and keys, by our hands.

Each replacement does what vLLM does unless the engine has kvpool_vllm.Scheduler. vLLM skips a plugin that fails to load
without a word to the user, so that scheduler refuses to start where the memory is not the pool's.
"""

import contextvars
import sys

from kvpool_vllm import worker

OLDEST = (0, 29)

# The Space of the scheduler that is being made, for the block pool that its coordinator makes.
building = contextvars.ContextVar("kvpool_vllm_building", default=None)


def check_version(version):
    """Raises for a vLLM older than what this was read against."""
    try:
        parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return  # A build from source: "dev".
    if parts < OLDEST:
        raise RuntimeError(f"vLLM is {version}; kvpool_vllm needs {OLDEST[0]}.{OLDEST[1]} or later")


def is_ours(vllm_config):
    asked = vllm_config.scheduler_config.scheduler_cls
    if isinstance(asked, str):
        return asked in ("kvpool_vllm.Scheduler", "kvpool_vllm.scheduler.Scheduler")
    return getattr(asked, "__module__", "").startswith("kvpool_vllm")


def _replace(module, name, make):
    """module.name becomes make(what it was), there and wherever it has been imported to by name."""
    original = getattr(module, name)
    if getattr(original, "kvpool", False):
        return
    made = make(original)
    made.kvpool = True
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, made)


def _layout(original):
    def resolve_kv_cache_layout(vllm_config, supported_layouts, *rest, **more):
        if is_ours(vllm_config):
            from kvpool_vllm.space import choose_layout
            choose_layout(vllm_config, supported_layouts)
        return original(vllm_config, supported_layouts, *rest, **more)
    return resolve_kv_cache_layout


def _configs(original):
    def get_kv_cache_configs(vllm_config, *rest, **more):
        configs = original(vllm_config, *rest, **more)
        if is_ours(vllm_config):
            from kvpool_vllm.space import attach
            attach(vllm_config, configs)
        return configs
    return get_kv_cache_configs


def _allocate(original):
    def allocate_kv_cache(kv_cache_config, device, layout, kernel_block_sizes=None):
        space = getattr(kv_cache_config, "kvpool", None)
        if space is None or not kv_cache_config.kv_cache_tensors:
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        return space.views(kv_cache_config, device, layout, kernel_block_sizes)
    return allocate_kv_cache


def _root(original):
    def init_none_hash(hash_fn):
        original(hash_fn)
        from kvpool_vllm.keys import take_root
        take_root(hash_fn)
    return init_none_hash


def _adapter(original):
    def _gen_lora_extra_hash_keys(request):
        from kvpool_vllm.keys import adapter_keys
        return adapter_keys(request, original)
    return _gen_lora_extra_hash_keys


def _block_pool(original):
    def BlockPool(*arguments, **more):
        space = building.get()
        if space is None:
            return original(*arguments, **more)
        from kvpool_vllm.block_pool import KvPoolBlockPool
        return KvPoolBlockPool(space, *arguments, **more)
    return BlockPool


def _widen_cpu_attention():
    """The kernel takes any stride between blocks; what it declares is only what vLLM's own layouts need. The start of a Space
    holds it against the truth (cpu_attention.py)."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheLayout
    declared = CPUAttentionBackend.supported_kv_cache_layouts()
    if KVCacheLayout.BLHNC not in declared:
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: (*declared, KVCacheLayout.BLHNC))


def take_keys():
    """Makes keys of blocks the space's, once there is one."""
    from vllm.v1.core import kv_cache_utils
    _replace(kv_cache_utils, "init_none_hash", _root)
    _replace(kv_cache_utils, "_gen_lora_extra_hash_keys", _adapter)


def register():
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
        # Here alone: other modules have the class for type hints and for pools of their own.
        kv_cache_coordinator.BlockPool = _block_pool(kv_cache_coordinator.BlockPool)
        kv_cache_coordinator.BlockPool.kvpool = True
    if current_platform.is_cpu():
        _widen_cpu_attention()
