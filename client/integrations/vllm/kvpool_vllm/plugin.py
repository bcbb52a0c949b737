"""The plugin that vLLM loads in each of its processes: it puts kvpool's code where vLLM makes KV memory, block pools and keys.

Where it is not asked for, two functions are wrapped, each of which is called once or twice an engine:

    EngineCore._initialize_kv_caches              Here the engine's configuration says whether it is asked for (core.prepare). vLLM resolves
                                                  the scheduler's class, which is a public choice, when KV memory is there already.
    plugins.load_general_plugins                  It is called before that one, also where it was imported after the plugins were loaded,
                                                  and vLLM loads plugins once a process.

And KvPoolConnector's name is given to vLLM's connectors when their module is imported: register_connector is public, and importing that
module takes seconds that only engines with a connector need. Where kvpool is asked for, these are replaced, in that process alone:

    kv_cache_utils.init_none_hash                 Key chains get their root, the space's seed (keys.take_root): vLLM has its own from a word
                                                  of the environment, which is not known before the space.
    kv_cache_utils.generate_block_hash_extra_keys An adapter and an image enter a key by content, a salt where it counts (keys.extra_keys):
                                                  vLLM takes names that are a process's own, and has no other place for more.
    worker utils.allocate_kv_cache                KV tensors are views of the pool (Space.views): vLLM makes them of memory that it allocates.
    kv_cache_coordinator.BlockPool                A scheduler's block pool is ours (scheduler.building), while it is made: coordinators name
                                                  the class, and keep its blocks.

A worker is reached by the executor's collective_rpc (worker.prepare), and methods of one engine's core, executor and worker are replaced
on those objects, not on their classes.
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

    _initialize_kv_caches.kvpool = True  # type: ignore[attr-defined]
    return _initialize_kv_caches


def _meet() -> None:
    """Where the core is imported: one that is not yet is met again when an engine is made."""
    kind = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
    if kind is None or getattr(kind._initialize_kv_caches, "kvpool", False):
        return
    kind._initialize_kv_caches = _of_core(kind._initialize_kv_caches)


def _meet_again() -> None:
    """An engine's core loads the plugins when it is made. By then vLLM may have done that, in a process that had not yet imported it."""
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
        _meet()
        patches.failure = ""
    except Exception as error:
        patches.failure = f"kvpool's plugin does not know this vLLM: {type(error).__name__}: {error}"
        logger.warning("%s. An engine that asks for kvpool will not start; others are as they were", patches.failure)
