"""Keys of blocks: vLLM's own hash chain, from the root of the space, with adapters by their content."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from collections.abc import Callable
from typing import Any

# What the chains of this process start from: the space's seed, and since a reset something that no other process has.
_root: bytes | None = None


def set_root(root: bytes) -> None:
    global _root
    _root = root


def new_root() -> None:
    """From now on no other process has this one's keys."""
    set_root((_root or b"") + secrets.token_bytes(32))


def take_root(hash_fn: Callable[[Any], bytes]) -> None:
    """Makes the root that of vLLM's chains."""
    if _root is None:
        return
    from vllm.v1.core import kv_cache_utils
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_fn(_root))


@functools.lru_cache(maxsize=256)
def _digest_of(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(f"{os.path.basename(path)} {size}\n".encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest() if hasattr(hashlib, "file_digest")
                          else hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def adapter_digest(path: str) -> str:
    """SHA-256 over the files of an adapter's directory; "" if there are none to read."""
    try:
        names = sorted(os.listdir(path))
        files = [(os.path.join(path, name), os.stat(os.path.join(path, name))) for name in names
                 if name.endswith((".safetensors", ".bin", ".pt")) or name == "adapter_config.json"]
        return _digest_of(tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)) if files else ""
    except OSError:
        return ""


_PRIVATE = secrets.token_hex(16)


def adapter_keys(request: Any, original: Callable[[Any], list[Any]]) -> list[Any]:
    if _root is None or not request.lora_request:
        return original(request)
    # An adapter that came without files can't be told from another of its name: nobody else finds its blocks.
    lora = request.lora_request
    return [("lora", adapter_digest(lora.lora_path) or f"{_PRIVATE} {lora.lora_name} {lora.lora_int_id}")]


def is_taken(hash_name: str) -> bool:
    """Whether vLLM's chains start from this root."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    return _root is not None and get_hash_fn_by_name(hash_name)(_root) == kv_cache_utils.NONE_HASH
