"""What stands in for functions of vLLM's modules once kvpool is asked for, and what is known of the vLLM that is there. plugin.py lists
all places."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

OLDEST = (0, 29)

# Why this process has a vLLM that does not know of kvpool; "": it does.
failure = "vLLM has not loaded the plugin of kvpool_vllm: VLLM_PLUGINS leaves out kvpool"


def check_version(version: str) -> None:
    """RuntimeError: this vLLM is older than OLDEST, against which the replacements were written."""
    try:
        parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return  # A build from source: "dev".
    if parts < OLDEST:
        raise RuntimeError(f"vLLM is {version}; kvpool_vllm needs {OLDEST[0]}.{OLDEST[1]} or later")


def replace(module: ModuleType, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """module.name becomes make(original). vLLM's modules import these functions by name (`from … import name`), and some of them
    have done so before: each such binding is replaced too. A module that imports later finds the new one."""
    original = getattr(module, name)
    if getattr(original, "kvpool", False):
        return
    made = make(original)
    made.kvpool = True
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, made)


def _root(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_none_hash(hash_fn: Callable[..., Any]) -> None:
        original(hash_fn)
        from kvpool_vllm.keys import take_root
        take_root(hash_fn)
    return init_none_hash


def _extra(original: Callable[..., Any]) -> Callable[..., Any]:
    from kvpool_vllm.keys import extra_keys, note_root

    def generate_block_hash_extra_keys(request: Any, start_token_idx: int, end_token_idx: int, *rest: Any, **more: Any) -> Any:
        if start_token_idx == 0:
            note_root(request)
        if not (request.lora_request or request.mm_features or request.cache_salt):  # Of most requests' blocks there is nothing to say.
            return original(request, start_token_idx, end_token_idx, *rest, **more)
        return extra_keys(request, start_token_idx, end_token_idx, lambda: original(request, start_token_idx, end_token_idx, *rest, **more))
    return generate_block_hash_extra_keys


def take_keys() -> None:
    """Has vLLM make block keys from the space's root, once there is a space."""
    from vllm.v1.core import kv_cache_utils
    replace(kv_cache_utils, "init_none_hash", _root)
    replace(kv_cache_utils, "generate_block_hash_extra_keys", _extra)
