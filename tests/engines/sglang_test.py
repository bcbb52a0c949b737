"""SGLang's HiCache on kvpool, by SGLang's own classes on the CPU: its factory, its pools of host memory, its file backend beside ours, its
controller. No server runs here: that takes a GPU."""

import base64
import contextlib
import os
import random
import signal
import time

import pytest

pytest.importorskip("sglang", reason="needs SGLang: tests/engines.sh --sglang installs it")

import kvpool
import numpy as np
import torch
from daemon import Daemon
from kvpool_sglang import KvPoolStorage
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer, count_pool_hits
from sglang.srt.runtime_context import get_context
from sglang_pools import PAGES, attention, config, fill, indices, page, states, storage, tensors

LAYOUTS = ("layer_first", "page_first")


def files(directory, weights=b"weights", config=b"{}", name="config.json"):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(weights)
    (directory / name).write_bytes(config)
    return str(directory)


@contextlib.contextmanager
def server(path, **arguments):
    """The arguments that SGLang's processes have."""
    with get_context().override_server_args(model_path=path, **arguments):
        yield


@pytest.fixture(autouse=True)
def arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with server(files(tmp_path / "model")):
        yield


@pytest.fixture
def daemon():
    daemon = Daemon(capacity="16MiB", slab="2MiB")
    yield daemon
    with contextlib.suppress(ProcessLookupError):
        daemon.process.send_signal(signal.SIGCONT)
    daemon.close()


@pytest.fixture
def opened(daemon):
    """A function that makes a server's storage, which is closed with the test."""
    backends = []

    def make(pool=None, others=None, **options):
        backends.append(storage(daemon, pool if pool is not None else fill(attention("page_first"), 1), others, **options))
        return backends[-1]
    yield make
    for backend in backends:
        backend.close()


def keys(count, start=0):
    return [f"{start + i:064x}" for i in range(count)]


def put(backend, pool, wanted):
    return backend.batch_set_v1(keys(len(wanted)), indices(pool, wanted))


def get(backend, pool, count):
    return backend.batch_get_v1(keys(count), indices(pool, range(count)))


@contextlib.contextmanager
def elsewhere(work):
    """Another process that has done `work` and goes on; killed at the end of the block, if not before."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work()
            os.write(done, b"y")
            signal.pause()
            del kept
        finally:
            os._exit(1)
    os.close(done)
    try:
        assert os.read(ready, 1) == b"y"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ---- What one process has put, another one gets


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_pages_of_a_process_that_was_killed(daemon, opened, layout, interface_v1):
    kv, mamba = fill(attention(layout), 1), fill(states(), 2)
    count = PAGES // 2
    transfer = PoolTransfer(PoolName.MAMBA, keys=keys(count), host_indices=indices(mamba, range(count)))

    def work():
        backend = storage(daemon, kv, {PoolName.MAMBA: mamba}, interface_v1=interface_v1)
        assert put(backend, kv, range(count)) == [True] * count if interface_v1 else backend.batch_set(keys(count), [page(kv, i) for i in range(count)])
        assert backend.batch_set_v2([transfer]) == {PoolName.MAMBA: [True] * count}
        return backend

    with elsewhere(work):
        pass  # It is killed here, and its session and memory are gone.
    other, others_states = fill(attention(layout), 3), fill(states(), 4)
    before = [page(other, i) for i in range(PAGES)]
    backend = opened(other, {PoolName.MAMBA: others_states}, interface_v1=interface_v1)
    assert backend.batch_exists(keys(PAGES)) == count
    if interface_v1:
        assert get(backend, other, count + 1) == [True] * count + [False]
    else:
        # As SGLang does: what it got it sets itself.
        targets = [other.get_dummy_flat_data_page() for _ in range(count + 1)]
        got = backend.batch_get(keys(count + 1), targets)
        assert [each is target for each, target in zip(got, targets)] == [True] * count + [False]
        for i in range(count):
            other.set_from_flat_data_page(i * other.page_size, got[i])
    for i in range(PAGES):
        assert torch.equal(page(other, i), page(kv, i) if i < count else before[i]), i
    transfer = PoolTransfer(PoolName.MAMBA, keys=keys(count), host_indices=indices(others_states, range(count)))
    assert backend.batch_get_v2([transfer]) == {PoolName.MAMBA: [True] * count}
    assert all(torch.equal(page(others_states, i), page(mamba, i)) == (i < count) for i in range(PAGES))


def test_a_page_as_tensor_is_none_as_pieces(opened):
    """The two have other orders of the same bytes where pages are layer first."""
    pool = fill(attention("layer_first"), 1)
    flat, pieces = opened(pool, interface_v1=0), opened(pool, interface_v1=1)
    assert flat.set(keys(1)[0], page(pool, 0)) and flat.exists(keys(1)[0])
    assert not pieces.exists(keys(1)[0]) and get(pieces, pool, 1) == [False]


# ---- As SGLang's own


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_sglangs_file_backend(daemon, opened, tmp_path, layout, interface_v1, seed):
    """Random calls to both. SGLang counts the successes of a list before the first failure."""
    chance = random.Random(f"{layout} {interface_v1} {seed}")
    sides = []
    for side in range(2):
        pools = {PoolName.KV: fill(attention(layout), 1), PoolName.MAMBA: fill(states(), 2), PoolName.SWA: fill(attention("page_first", layers=1), 3)}
        extra = {name: pool for name, pool in pools.items() if name != PoolName.KV}
        if side == 0:
            backend = opened(pools[PoolName.KV], extra, interface_v1=interface_v1)
        else:
            backend = HiCacheFile(config(daemon), str(tmp_path / "files"))
            for name, pool in pools.items():
                backend.register_mem_host_pool_v2(pool, name)
        sides.append((backend, pools))
    everything, other = keys(40), fill(attention(layout), 4)

    def chain():
        start = chance.randrange(30)
        return everything[start:start + chance.randrange(1, 10)]

    def both(call):
        ours, theirs = (call(*side, ours=number == 0) for number, side in enumerate(sides))
        assert ours == theirs, call.__name__
        return ours

    def kv(what, names, places):
        """Ours by batch_get_v1 or batch_set_v1 or tensors, as configured; theirs by what they have."""
        def call(backend, pools, ours):
            pool = pools[PoolName.KV]
            if interface_v1 and ours:
                done = getattr(backend, f"batch_{what}_v1")(names, indices(pool, places), HiCacheStorageExtraInfo(prefix_keys=everything[:1]))
                return done.index(False) if False in done else len(done)
            if interface_v1:
                done = getattr(backend, f"batch_{what}_v2")([PoolTransfer(PoolName.KV, keys=names, host_indices=indices(pool, places))])
                return count_pool_hits(done)[PoolName.KV]
            if what == "set":
                return backend.batch_set(names, [page(pool, place) for place in places])
            got = backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
            done = got.index(None) if None in got else len(got)
            for place, each in zip(places, got[:done]):
                pool.set_from_flat_data_page(place * pool.page_size, each)
            return done
        return call

    found = 0
    for _ in range(150):
        names = chain()
        places = chance.sample(range(PAGES), len(names))
        name = chance.choice((PoolName.MAMBA, PoolName.SWA))
        kind = chance.randrange(6)
        if kind == 0:
            both(kv("set", names, places))
        elif kind == 1:
            done = both(kv("get", names, places))
            # What is behind the first page that failed is worth nothing.
            for _, pools in sides:
                pool = pools[PoolName.KV]
                for place in places[done:]:
                    pool.set_from_flat_data_page(place * pool.page_size, other.get_data_page(place * pool.page_size).flatten())
        elif kind == 2:
            found += both(lambda backend, pools, ours: backend.batch_exists(names))
            assert both(lambda backend, pools, ours: backend.exists(names[0])) in (True, False)
        elif kind in (3, 4):
            what = "set" if kind == 3 else "get"
            both(lambda backend, pools, ours: count_pool_hits(getattr(backend, f"batch_{what}_v2")(
                [PoolTransfer(name, keys=names, host_indices=indices(pools[name], places))])))
            if what == "get":
                for _, pools in sides:
                    fill(pools[name], 50)
        else:
            asked = [PoolTransfer(each, keys=names[:chance.randrange(3)] or None, hit_policy=chance.choice((PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)))
                     for each in chance.sample((PoolName.MAMBA, PoolName.SWA), chance.randrange(3))]
            answer = both(lambda backend, pools, ours: backend.batch_exists_v2(names, asked))
            found += answer.kv_hit_pages
        for one, other in zip(*(pools.values() for _, pools in sides)):
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(tensors(one), tensors(other)))
    assert found > 20
