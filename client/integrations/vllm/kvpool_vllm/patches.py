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


def _adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def _gen_lora_extra_hash_keys(request: Any) -> Any:
        if not request.lora_request:  # This is called for each block, and of most requests there is nothing to say.
            return original(request)
        from kvpool_vllm.keys import adapter_keys
        return adapter_keys(request, original)
    return _gen_lora_extra_hash_keys


def _images(original: Callable[..., Any]) -> Callable[..., Any]:
    def _gen_mm_extra_hash_keys(request: Any, *rest: Any, **more: Any) -> Any:
        if request.mm_features:
            from kvpool_vllm.keys import name_images
            name_images(request)
        return original(request, *rest, **more)
    return _gen_mm_extra_hash_keys


def _salt(original: Callable[..., Any]) -> Callable[..., Any]:
    from kvpool_vllm.keys import note_root, salted_keys

    def generate_block_hash_extra_keys(request: Any, start_token_idx: int, end_token_idx: int, *rest: Any, **more: Any) -> Any:
        if start_token_idx == 0:
            note_root(request)
        if not request.cache_salt:
            return original(request, start_token_idx, end_token_idx, *rest, **more)
        return salted_keys(request, start_token_idx, end_token_idx, lambda: original(request, start_token_idx, end_token_idx, *rest, **more))
    return generate_block_hash_extra_keys


def take_keys() -> None:
    """Has vLLM make block keys from the space's root, once there is a space."""
    from vllm.v1.core import kv_cache_utils
    replace(kv_cache_utils, "init_none_hash", _root)
    replace(kv_cache_utils, "_gen_lora_extra_hash_keys", _adapter)
    replace(kv_cache_utils, "_gen_mm_extra_hash_keys", _images)
    replace(kv_cache_utils, "generate_block_hash_extra_keys", _salt)
