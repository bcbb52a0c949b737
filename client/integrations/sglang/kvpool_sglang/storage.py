"""KvPoolStorage: SGLang's HiCacheStorage on a kvpoold.

Each pool of host memory (K and V; Mamba's states, sliding windows, indexers, drafts) has pages of its own size, and a space of its own.
One is opened when SGLang registers the pool: its constructor does not know them yet.

SGLang's keys are a chain of SHA-256 over tokens, which starts from an adapter's id, a request's extra key and its salt.

SGLang hands pages over as tensors (get, set: what a page is then, is the pool's get_data_page), or as indices of its host memory, from
which a page's pieces follow. The two may order a page's bytes differently, so a page of the one kind is not found as one of the other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import kvpool
import numpy as np
import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvpool_engines.copies import CHECK_BYTES
from kvpool_sglang.facts import digest_of, facts_of
from kvpool_sglang.options import Options
from kvpool_sglang.store import WORD, Page, PageStore

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolTransfer
    from sglang.srt.mem_cache.pool_host import HostKVCache
    from sglang.srt.observability.metrics_collector import StorageMetrics

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_KV = str(PoolName.KV)
_VERSION = "0.5.23"


def _else(nothing: Callable[..., Any]) -> Callable[[Callable[..., _Answer]], Callable[..., _Answer]]:
    """Answers as if nothing were there, where the method raises: SGLang calls it in threads that an exception may end.
    `nothing` takes what the method was called with."""
    def decorate(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
        @functools.wraps(method)
        def guarded(self: KvPoolStorage, *args: Any, **kwargs: Any) -> _Answer:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("%s failed", method.__name__)
                return nothing(*args, **kwargs)
        return guarded
    return decorate


def _refuse_keys_that_others_have() -> None:
    """RuntimeError: this SGLang's keys leave out what its requests are parted by."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    parted: tuple[dict[str, str], ...] = ({}, {"extra_key": "a"}, {"cache_salt": "a"})
    if len({tuple(get_storage_hash_str(RadixKey(array("q", range(4)), **by), None, page_size=4)) for by in parted}) < len(parted):
        raise RuntimeError("KvPoolStorage: this SGLang's keys have no extra_key (adapters) or no cache_salt in them: its requests would find "
                           "each other's pages")


def _pieces(pool: HostKVCache, indices: torch.Tensor) -> list[Page]:
    """For each page of these indices its pieces of the pool's memory."""
    pages = len(indices) // pool.page_size
    addresses, sizes = pool.get_page_buffer_meta(indices) or ((), ())
    each = len(addresses) // pages
    memory = [np.frombuffer((ctypes.c_uint64 * (size // WORD)).from_address(address), np.uint64) for address, size in zip(addresses, sizes)]
    return [memory[i * each:(i + 1) * each] for i in range(pages)]


def _flat(tensor: torch.Tensor) -> Page:
    return [tensor.flatten().view(torch.uint8).numpy().view(np.uint64)]


class _Pool:
    """A pool of host memory, and its pages in a kvpoold."""

    def __init__(self, name: str, memory: HostKVCache, config: HiCacheStorageConfig, options: Options) -> None:
        self.name, self.memory = name, memory
        sizes = self._piece_bytes()
        self.page_bytes = sum(sizes)
        facts = facts_of(name, memory, sizes, config)
        layout = kvpool.Layout.opaque(block_bytes=self.page_bytes + CHECK_BYTES, tokens_per_block=memory.page_size)

        def open_session(timeout: float) -> kvpool.Session:
            # It copies from blocks that it holds and to blocks that it has leased: all else may go at any time.
            return kvpool.Session(layout, digest_of(options, facts), facts=facts, socket=options.socket, tenant=options.tenant,
                                  client_name=f"sglang {name}", give_back="any_time", guaranteed_blocks=options.guaranteed_blocks,
                                  max_space_bytes=options.max_space_bytes, magazine_blocks=0, device_uuids=["host"], open_timeout=timeout)

        self.store = PageStore(open_session, self.page_bytes, options)

    def _piece_bytes(self) -> list[int]:
        """Of one page. ValueError: not known, or not in whole words."""
        memory = self.memory
        what = f"KvPoolStorage: pool {self.name} ({type(memory).__name__}, layout {memory.layout})"
        try:
            meta = memory.get_page_buffer_meta(torch.arange(memory.page_size))
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{what} does not say where its pages are: {error}") from error
        sizes = list(meta[1]) if meta else []  # An anchor has indices and no memory.
        if any(size % WORD for size in sizes):
            raise ValueError(f"{what} has pages of pieces of {sizes} bytes; it copies words of {WORD} bytes")
        return sizes


class KvPoolStorage(HiCacheStorage):
    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        given = storage_config.extra_config or {}
        self.config, self.options = storage_config, Options.checked(given.get("kvpool", {}))
        if sglang.__version__ != _VERSION:
            logger.warning("kvpool_sglang was run with SGLang %s; this is %s", _VERSION, sglang.__version__)
        _refuse_keys_that_others_have()
        # SGLang asks for K and V by one method whichever way it then reads and writes them.
        self._kind = b"pieces" if given.get("interface_v1", 0) else b"flat"
        self._pools: dict[str, _Pool] = {}
        self._cleared = 0
        self._measured_lock = threading.Lock()
        self._measured: StorageMetrics | None = None  # Since SGLang asked; guarded by the lock.

    # ---- Pools

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, memory: HostKVCache) -> None:
        """Raises what keeps the server from starting."""
        before = self._pools.get(name)
        if before is not None and before.memory is memory:
            return  # SGLang registers K and V twice.
        self._pools[name] = _Pool(name, memory, self.config, self.options)
        if before is not None:
            before.store.close()

    def close(self) -> None:
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.store.close()

    # ---- Names of pages

    def _names(self, keys: Sequence[str], kind: bytes) -> list[bytes]:
        prefix = kind + b"\0" + self._private() + b"\0"
        return [prefix + key.encode() for key in keys]

    def _private(self) -> bytes:
        """Nothing; once SGLang's clear was called, what other servers don't have: all ranks of this one are children of one process."""
        if self._cleared == 0:
            return b""
        with open("/proc/sys/kernel/random/boot_id") as boot, open(f"/proc/{os.getppid()}/stat") as parent:
            started = parent.read().rpartition(")")[2].split()[19]
            return hashlib.sha256(f"{boot.read()} {os.getppid()} {started} {self._cleared}".encode()).digest()

    def clear(self) -> None:
        """What was there is not found any more by this server, and by others as before."""
        self._cleared += 1

    # ---- K and V

    @_else(lambda keys, extra_info=None: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._pools[_KV].store.find(self._names(keys, self._kind))

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]) == 1)

    @_else(lambda keys, host_indices, extra_info=None: [False] * len(keys))
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        return self._read_indices(self._pools[_KV], keys, host_indices)

    @_else(lambda keys, host_indices, extra_info=None: [False] * len(keys))
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        return self._write_indices(self._pools[_KV], keys, host_indices, extra_info)

    @_else(lambda keys, *args, **kwargs: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        pool = self._pools[_KV]
        targets = list(target_locations or ())
        if len(targets) != len(keys) or any(target.nbytes != pool.page_bytes or not target.is_contiguous() for target in targets):
            logger.error("get: %d targets for %d pages of %d bytes", len(targets), len(keys), pool.page_bytes)
            return [None] * len(keys)
        done = self._timed("prefetch", pool, lambda: pool.store.read(self._names(keys, b"flat"), [_flat(target) for target in targets]))
        return [*targets[:done], *[None] * (len(keys) - done)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [] if target_location is None else [target_location])[0]

    @_else(lambda *args, **kwargs: False)
    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        pool = self._pools[_KV]
        values = list(values or ())
        if len(values) != len(keys) or any(value.nbytes != pool.page_bytes for value in values):
            logger.error("set: %d values for %d pages of %d bytes", len(values), len(keys), pool.page_bytes)
            return False
        done = self._timed("backup", pool, lambda: pool.store.write(self._names(keys, b"flat"), [_flat(value) for value in values], None))
        return done == len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [] if value is None else [value])

    # ---- All pools

    def _read_indices(self, pool: _Pool, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        if not self._fits(pool, keys, indices):
            return [False] * len(keys)
        done = self._timed("prefetch", pool, lambda: pool.store.read(self._names(keys, b"pieces"), _pieces(pool.memory, indices)))
        return [i < done for i in range(len(keys))]

    def _write_indices(self, pool: _Pool, keys: Sequence[str], indices: torch.Tensor | None,
                       extra_info: HiCacheStorageExtraInfo | None) -> list[bool]:
        if not self._fits(pool, keys, indices):
            return [False] * len(keys)
        prefix = extra_info.prefix_keys if extra_info is not None else None
        (parent,) = self._names(prefix[-1:], b"pieces") if prefix else (None,)
        done = self._timed("backup", pool, lambda: pool.store.write(self._names(keys, b"pieces"), _pieces(pool.memory, indices), parent))
        return [i < done for i in range(len(keys))]

    def _fits(self, pool: _Pool, keys: Sequence[str], indices: torch.Tensor | None) -> bool:
        fits = indices is not None and len(indices) == len(keys) * pool.memory.page_size and len(keys) > 0
        if not fits and keys:
            logger.error("pool %s: %s indices for %d pages of %d", pool.name, None if indices is None else len(indices), len(keys),
                         pool.memory.page_size)
        return fits

    @_else(lambda transfers, extra_info=None: {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers})
    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        return {transfer.name: self._read_indices(self._pools[str(transfer.name)], transfer.keys or (), transfer.host_indices)
                for transfer in transfers}

    @_else(lambda transfers, extra_info=None: {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers})
    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        return {transfer.name: self._write_indices(self._pools[str(transfer.name)], transfer.keys or (), transfer.host_indices, extra_info)
                for transfer in transfers}

    @_else(lambda *args, **kwargs: PoolTransferResult.empty())
    def batch_exists_v2(self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None,
                        extra_info: HiCacheStorageExtraInfo | None = None) -> PoolTransferResult:
        pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))  # Lengths of prefixes that all pools have.
        asked: list[_Pool] = []
        for transfer in pool_transfers or ():
            if not restorable:
                break
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # Groups of blocks never shorten the prefix; a pool that is not answered for says nothing.
            pool = self._pools[str(transfer.name)]
            asked.append(pool)
            names = self._names(keys[:pages], b"pieces")
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, pool.store.find(names) + 1))
            else:
                lengths = _ends_of_runs(pool.store.find_each(names), max(1, len(transfer.keys or ())))
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        final = restorable[-1] if restorable else 0
        self._pools[_KV].store.forget(self._names(keys[final:pages], self._kind))
        for pool in asked:
            pool.store.forget(self._names(keys[final:pages], b"pieces"))
        return PoolTransferResult(final, hits, restorable)

    # ---- Figures

    def _timed(self, what: str, pool: _Pool, work: Callable[[], int]) -> int:
        started = time.perf_counter()
        pages = work()
        if pages and self.config.enable_storage_metrics:
            from sglang.srt.observability.metrics_collector import StorageMetrics
            with self._measured_lock:
                self._measured = self._measured or StorageMetrics()
                getattr(self._measured, f"{what}_pgs").append(pages)
                getattr(self._measured, f"{what}_bandwidth").append(pages * pool.page_bytes / (time.perf_counter() - started) / 1e9)
        return pages

    def get_stats(self) -> StorageMetrics | None:
        """Pages, and GB/s, of each call since it was asked last."""
        with self._measured_lock:
            measured, self._measured = self._measured, None
        return measured

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By pool."""
        return {name: dict(pool.store.counts) for name, pool in self._pools.items()}


def _ends_of_runs(present: Sequence[bool], pages: int) -> set[int]:
    """Lengths of prefixes whose last so many pages are present, or all of a shorter one."""
    ends, run = set(), 0
    for length, there in enumerate(present, 1):
        run = run + 1 if there else 0
        if run >= min(pages, length):
            ends.add(length)
    return ends
