"""The plugin that vLLM loads in each of its processes: it puts kvpool's code where vLLM makes KV memory, block pools and keys.

Where it is not asked for, a vLLM has two methods wrapped, each of which is called once an engine, and what loads plugins:

    EngineCore._initialize_kv_caches              here the engine's configuration says whether it is asked for (core.prepare)
    WorkerWrapperBase.initialize_from_config      here a worker is given its plan, which says the same (worker.prepare)
    plugins.load_general_plugins                  it is called before those two, also where they were imported after the plugins

And KvPoolConnector's name is given to vLLM's connectors, when their module is imported. Nothing else is touched before one of them finds that it is, and then in that process alone:

    kv_cache_utils.init_none_hash                 key chains get their root: the space's seed (keys.take_root)
    kv_cache_utils._gen_lora_extra_hash_keys      an adapter enters a key: by content, for its name is local (keys.adapter_keys)
    kv_cache_utils._gen_mm_extra_hash_keys        an image enters a key: by content, for its name is its sender's (keys.name_images)
    kv_cache_utils.generate_block_hash_extra_keys a salt enters a key: of the block where it counts (keys.salted_keys);
                                                  and the root: which one it is (keys.note_root)
    worker utils.allocate_kv_cache                KV tensors are made: views of the pool (Space.views)
    kv_cache_coordinator.BlockPool                a scheduler's block pool is made; replaced while ours is made (scheduler.building)

vLLM has no hook for any of these places. The methods of one engine's core, executor and worker are replaced on those objects, not on
their classes.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool_vllm import patches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvpool")


def is_ours(vllm_config: VllmConfig) -> bool:
    asked = vllm_config.scheduler_config.scheduler_cls
    if isinstance(asked, str):
        return asked in ("kvpool_vllm.Scheduler", "kvpool_vllm.scheduler.Scheduler")
    return getattr(asked, "__module__", "").startswith("kvpool_vllm")


def _has_our_connector(vllm_config: VllmConfig) -> bool:
    transfer = vllm_config.kv_transfer_config
    # One may be among those of vLLM's MultiConnector.
    return transfer is not None and "KvPoolConnector" in f"{transfer.kv_connector} {transfer.kv_connector_extra_config}"


def _of_core(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize_kv_caches(self: Any, vllm_config: VllmConfig, *rest: Any, **more: Any) -> Any:
        pooled = is_ours(vllm_config)
        if not pooled and not _has_our_connector(vllm_config):
            return original(self, vllm_config, *rest, **more)
        from kvpool_vllm import core
        return core.prepare(self, vllm_config, pooled, lambda: original(self, vllm_config, *rest, **more))
    return _initialize_kv_caches


def _of_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_from_config(self: Any, kv_cache_configs: Any, *rest: Any, **more: Any) -> Any:
        space = getattr(kv_cache_configs[self.global_rank], "kvpool", None)
        if space is None:
            return original(self, kv_cache_configs, *rest, **more)
        from kvpool_vllm import worker
        return worker.prepare(self, space, lambda: original(self, kv_cache_configs, *rest, **more))
    return initialize_from_config


def _wrap(module_name: str, class_name: str, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Where the module is imported: one that is not yet is met again when an engine is made."""
    module = sys.modules.get(module_name)
    kind = getattr(module, class_name, None)
    if kind is None or getattr(getattr(kind, method), "kvpool", False):
        return
    made = make(getattr(kind, method))
    made.kvpool = True  # type: ignore[attr-defined]
    setattr(kind, method, made)


def _meet_again() -> None:
    """An engine's core and a worker load the plugins when they are made. By then vLLM may have done that, in a process that had not yet
    imported them."""
    from vllm import plugins
    load = plugins.load_general_plugins
    if getattr(load, "kvpool", False):
        return

    def load_general_plugins() -> None:
        load()
        register()

    load_general_plugins.kvpool = True  # type: ignore[attr-defined]
    plugins.load_general_plugins = load_general_plugins


_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"


def _name_connector(module: Any) -> None:
    try:
        module.KVConnectorFactory.register_connector("KvPoolConnector", "kvpool_vllm.connector", "KvPoolConnector")
    except Exception as error:  # ValueError: it has the name already.
        logger.debug("KvPoolConnector's name was not given to vLLM's connectors: %s", error)


class _Finder:
    """Names the connector behind the import of vLLM's connectors, which may never come, and takes seconds."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _CONNECTORS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _name_connector(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _name_the_connector() -> None:
    if (module := sys.modules.get(_CONNECTORS)) is not None:
        _name_connector(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register() -> None:
    """What vLLM calls. Never raises: vLLM would not start, whether kvpool is asked for or not."""
    try:
        _meet_again()
        _name_the_connector()
        _wrap("vllm.v1.engine.core", "EngineCore", "_initialize_kv_caches", _of_core)
        _wrap("vllm.v1.worker.worker_base", "WorkerWrapperBase", "initialize_from_config", _of_worker)
        patches.failure = ""
    except Exception as error:
        patches.failure = f"kvpool's plugin does not know this vLLM: {type(error).__name__}: {error}"
        logger.warning("%s. An engine that asks for kvpool will not start; others are as they were", patches.failure)
