"""Keys of blocks: vLLM's own hash chain, from the root of the space, with adapters and images by their content, and salts that may count
from a later token on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

logger = logging.getLogger("vllm.kvpool")

# What the chains of this process start from: the space's seed, and behind it what no other process has, once this one's K and V or
# keys are not theirs.
_seed: bytes | None = None
_private = b""
_roots = 0  # How many vLLM's chains have had.


def set_root(seed: bytes) -> None:
    global _seed
    _seed = seed


def new_root() -> None:
    """From now on no other process has this one's keys, whatever the seed."""
    global _private
    _private = secrets.token_bytes(32)


def take_root(hash_fn: Callable[[Any], bytes]) -> None:
    """Makes the root that of vLLM's chains."""
    global _roots
    if _seed is None:
        return
    from vllm.v1.core import kv_cache_utils
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_fn(_seed + _private))
    _roots += 1  # After the root: a thread that makes a request's first key now notes a number that is too low, or the right one.


def note_root(request: Any) -> None:
    """The first of the request's keys is about to be made."""
    request.kvpool_root = _roots


def make_anew(request: Any) -> None:
    """The request's keys, of the root that is now vLLM's."""
    request.block_hashes.clear()
    request.update_block_hashes()


def update(request: Any) -> None:
    """For a request that comes: vLLM makes it in a thread of its own, and it may have waited while the root or an adapter changed."""
    stale = getattr(request, "kvpool_root", _roots) != _roots
    if getattr(request, "lora_request", None):
        stale |= _rename(request)
    if stale:
        make_anew(request)


# ---- Adapters


@functools.lru_cache(maxsize=256)
def _digest_of(files: tuple[tuple[str, int, int, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, size, *_ in files:
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
        return _digest_of(tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in files)) if files else ""
    except OSError:
        return ""


_OWN = secrets.token_hex(16)  # No other process has it.
# By lora_int_id, of adapters that are loaded: the digest of its files when it was about to be, how many-th load it was, and their
# directory. The digest is "" where nobody knows what is loaded. vLLM loads an adapter again when it has dropped it, from whatever the
# files are by then.
_adapters: dict[int, tuple[str, int, str]] = {}
_loads = itertools.count(1)


@contextlib.contextmanager
def loading(lora: Any) -> Iterator[None]:
    """While vLLM loads an adapter, unless it has it already."""
    number = lora.lora_int_id
    known = number in _adapters
    if known and not getattr(lora, "load_inplace", False):
        yield
        return
    _adapters[number] = digest, *_ = adapter_digest(lora.lora_path), next(_loads), lora.lora_path
    try:
        yield
    except BaseException:
        if known:
            _doubt(number)  # vLLM goes on with what it had.
        else:
            adapter_goes(number)
        raise
    if adapter_digest(lora.lora_path) != digest:
        _doubt(number)


def _doubt(number: int) -> None:
    """Nobody knows what is loaded, until it is loaded again."""
    digest, _, path = _adapters.get(number, ("", 0, ""))
    if digest:
        _adapters[number] = "", next(_loads), path


def adapter_goes(number: int) -> None:
    _adapters.pop(number, None)


def _loaded(lora: Any) -> tuple[str, int, str]:
    """It is about to be loaded, unless something is already under its number."""
    number, path = lora.lora_int_id, lora.lora_path
    return _adapters.get(number) or _adapters.setdefault(number, (adapter_digest(path), next(_loads), path))


def _rename(request: Any) -> bool:
    """Whether the request's keys name another adapter now, or name one at all."""
    lora, before = request.lora_request, getattr(request, "kvpool_adapter", None)
    name, load, path = _loaded(lora)
    files = adapter_digest(lora.lora_path)
    if name and name != files and path == lora.lora_path and not getattr(lora, "load_inplace", False):  # Else reloads_another says so.
        _doubt(lora.lora_int_id)
        name, load, _ = _adapters[lora.lora_int_id]
    # One that came without files can't be told from another of its name, and of one whose files have changed nobody knows which
    # are loaded: others do not find its blocks, nor do this engine's other requests, for which it may have been loaded from others.
    if not name or name != files:
        if before is not None and before.startswith(_OWN) and request.kvpool_load == load:
            return False
        request.kvpool_load = load
        name = f"{_OWN} {lora.lora_name} {lora.lora_path} {lora.lora_int_id} {load} {next(_loads) if files else ''}"
    request.kvpool_adapter = name
    return bool(name != before)


def reloads_another(request: Any) -> bool:
    """vLLM loads the adapter of a request with load_inplace again in each step that has it, and these files are not those that the other
    requests of the adapter's number are named by."""
    lora = request.lora_request
    return bool(lora and getattr(lora, "load_inplace", False) and _loaded(lora)[0] not in ("", adapter_digest(lora.lora_path)))


def renamed(number: int, requests: Iterable[Any]) -> list[Any]:
    """Another adapter is loaded under this number than before, or may be: those of the requests that have another name for it now. They
    want other keys."""
    global _roots
    theirs = [request for request in requests if request.lora_request and request.lora_request.lora_int_id == number]
    if any(map(reloads_another, theirs)):
        _doubt(number)
    _roots += 1  # What is on its way to the scheduler may have the old name.
    return [request for request in theirs if _rename(request)]


def adapter_files(request: Any) -> tuple[str, str] | None:
    """(directory, digest of its files) of the adapter that the request's keys name; None: they name none that others know."""
    named = getattr(request, "kvpool_adapter", _OWN)
    return None if named.startswith(_OWN) else (request.lora_request.lora_path, named)


def adapter_is_the_same(request: Any) -> bool:
    """The files are what they were when the request's keys were made: so what was loaded is. Files that come back prove nothing: once they
    were seen to be others, it is not the same until it is loaded again."""
    files = adapter_files(request)
    if files is None:
        return True
    number = request.lora_request.lora_int_id
    loaded, _, path = _adapters.get(number, ("", 0, ""))
    if (now := adapter_digest(files[0])) != files[1] and path == files[0]:
        _doubt(number)
    return loaded == files[1] == now


def adapter_keys(request: Any) -> list[tuple[str, str]]:
    if not request.lora_request:
        return []
    if getattr(request, "kvpool_adapter", None) is None:
        _rename(request)
    return [("lora", request.kvpool_adapter)]


# ---- Images


def content_digest(data: Any) -> str:
    """SHA-256 over the tensors of what vLLM's processor made of an image or the like; "" where they are not here: an address of shared
    memory, or a handle of a GPU's, is no content."""
    import torch
    digest, pixels = hashlib.sha256(), 0

    def add(value: Any) -> bool:
        nonlocal pixels
        digest.update(f"{type(value).__name__} ".encode())
        if isinstance(value, torch.Tensor):
            pixels += value.numel() if value.is_floating_point() or value.dtype == torch.uint8 else 0
            digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(value, (str, int, float, type(None))):
            digest.update(f"{value!r} ".encode())
        elif isinstance(value, (list, tuple)):
            digest.update(f"{len(value)} ".encode())
            return all(add(each) for each in value)
        elif isinstance(value, Mapping):
            digest.update(f"{len(value)} ".encode())
            return all(add(name) and add(value[name]) for name in sorted(value))
        elif type(value).__name__ == "MultiModalFieldElem":
            return add(value.data)
        else:
            return False
        return True

    return digest.hexdigest() if data is not None and add(data) and pixels > 0 else ""


def name_images(request: Any) -> None:
    """Names what a request has beside text by its content, here: its sender may name it as he likes. vLLM then keeps what its encoder
    made of it under that name, too. What has no content here is found by this engine alone."""
    for feature in request.mm_features or ():
        if getattr(feature, "kvpool_named", False):
            continue
        name, feature.kvpool_named = feature.identifier, True
        feature.mm_hash = feature.mm_hash or name  # By which vLLM keeps what its processor made.
        # With an adapter for the encoder vLLM has put its name in front of the identifier.
        digest = content_digest(feature.data) if name == feature.mm_hash else ""
        feature.identifier = f"kvpool {digest or f'{_OWN} {name}'}"


# ---- Salts

# Of SamplingParams.extra_args, over HTTP of vllm_xargs: how many tokens of the prompt are in front of what cache_salt parts.
SHARED = "kvpool_shared_prefix_tokens"


@functools.lru_cache(maxsize=256)
def _warn(value: str) -> None:
    """Once for each value: a client may send it with every request."""
    logger.warning("%s is %s; must be an int from 0 on. Requests that say so share nothing with others that have another salt or none",
                   SHARED, value)


def shared_tokens(request: Any) -> int:
    """What the request says. 0: the salt is in every key, as it is for requests that say nothing or nothing of sense. An error would not
    do: keys are made where it ends the engine, or leaves vLLM waiting for a request that never came."""
    arguments = getattr(request.sampling_params, "extra_args", None) or getattr(request.pooling_params, "extra_kwargs", None) or {}
    shared = arguments.get(SHARED)
    if shared is None:
        return 0
    if isinstance(shared, bool) or not isinstance(shared, int) or shared < 0:
        _warn(repr(shared)[:100])
        return 0
    return shared


def extra_keys(request: Any, first: int, end: int, original: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """vLLM's extra keys of the block of tokens [first, end), `original`, name an adapter as its sender does, and have the salt in the
    request's first block. Here the adapter is named by content, and the block that holds the token behind what is shared has the salt."""
    if _seed is None:
        return original()
    name_images(request)
    # What it says when it comes holds: later words of a session that streams its input come behind keys that are made.
    if (shared := getattr(request, "kvpool_shared", None)) is None:
        shared = request.kvpool_shared = shared_tokens(request) if request.cache_salt else 0
    salt, lora = request.cache_salt, request.lora_request
    keys = adapter_keys(request)
    try:
        request.lora_request = None
        if shared > 0:
            request.cache_salt = None
        extra, *rest = original()
    finally:
        request.cache_salt, request.lora_request = salt, lora
    keys.extend(extra or ())
    if shared > 0 and first <= shared < end:
        keys.append(("kvpool.salted.v1", salt))
    return (tuple(keys) or None, *rest)


def is_taken(hash_name: str) -> bool:
    """Whether vLLM's chains start from this root."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    return _seed is not None and get_hash_fn_by_name(hash_name)(_seed + _private) == kv_cache_utils.NONE_HASH
