"""SGLang's HiCache on kvpool, by SGLang's own classes on the CPU: its factory, its pools of host memory, its file backend beside ours, its
controller. No server runs here: that takes a GPU."""

import base64
import contextlib
import itertools
import os
import random
import signal
import time
from array import array

import pytest

pytest.importorskip("sglang", reason="needs SGLang: tests/engines.sh --sglang installs it")

import kvpool
import numpy as np
import torch
import torchvision_names  # noqa: F401
from daemon import Daemon
from kvpool_sglang import KvPoolStorage
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer, count_pool_hits
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context
from sglang_pools import PAGES, attention, config, controller, fill, indices, page, states, storage, tensors

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
    daemon = Daemon(capacity="64MiB", slab="2MiB")
    yield daemon
    with contextlib.suppress(ProcessLookupError):
        daemon.go_on()
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


def eventually(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


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
        for ours, theirs in zip(*(pools.values() for _, pools in sides)):
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(tensors(ours), tensors(theirs)))
    assert found > 20


@pytest.mark.parametrize("interface_v1", [0, 1])
def test_controller_writes_and_prefetches(daemon, opened, interface_v1):
    """Threads and queues are those of SGLang's controller; its scheduler is this test."""
    tokens, count = RadixKey(array("q", range(8 * 4)), extra_key="e", cache_salt="s"), 8
    first = fill(attention("layer_first"), 1)
    with controller(daemon, first, interface_v1) as writer:
        assert type(writer.storage_backend) is KvPoolStorage
        names = get_storage_hash_str(tokens, None, page_size=4)
        writer.write_storage(indices(first, range(count)), tokens, hash_value=names, prefix_keys=[])
        assert writer.ack_backup_queue.get(timeout=60).completed_tokens == count * 4
    second = fill(attention("layer_first"), 2)
    with controller(daemon, second, interface_v1) as reader:
        for salt, there in (("s", count), ("t", 0)):
            asked = RadixKey(array("q", range(10 * 4)), extra_key="e", cache_salt=salt)
            reader.prefetch("r", asked)
            operation = reader.prefetch_hit_queue.get(timeout=60)
            assert operation.storage_hit_count == there * 4
            if there:
                operation.host_indices = second.alloc(there * 4)
                reader.prefetch_buffer.put(operation)
                acks = iter(lambda: reader.ack_prefetch_queue.get(timeout=60), None)
                done = [ack.completed_tokens for ack in itertools.takewhile(lambda ack: not ack.completed_req, acks)]
                assert done == [count * 4]
                places = operation.host_indices[::4] // 4
                assert all(torch.equal(page(second, int(place)), page(first, i)) for i, place in enumerate(places))


# ---- What may not be believed


@contextlib.contextmanager
def beside(daemon):
    """Another session in the space of the first pool, as any engine of the tenant may have one."""
    space = daemon.ctl("spaces")["spaces"][0]
    layout = kvpool.Layout.opaque(block_bytes=int(space["layout"]["block_bytes"]), tokens_per_block=space["layout"]["groups"][0]["tokens_per_block"])
    with kvpool.Session(layout, base64.b64decode(space["fingerprint"]), facts=space["facts"], socket=daemon.socket, magazine_blocks=0,
                        give_back="any_time") as session:
        yield session


@pytest.mark.parametrize("word", [0, 63, 64, 65, 68], ids=["first", "last", "sum", "key", "key's end"])
def test_a_flipped_bit(daemon, opened, word):
    kv = fill(attention("page_first"), 1)
    backend, other = opened(kv), opened(kv)
    assert put(backend, kv, range(4)) == [True] * 4
    with beside(daemon) as session:
        words = np.asarray(session.data(blocks=session.max_blocks)).view(np.uint64)
        (block,) = [i for i in range(1, 64) if words[i, :64].tobytes() == page(kv, 2).numpy().tobytes()]
        words[block, word] ^= np.uint64(1 << 40)
        assert backend.batch_exists(keys(4)) == 4
        for each in (backend, other):
            assert get(each, fill(kv, 1), 4) == [True, True, False, False]
            assert each.counts["kv"]["damaged_pages"] == 1
            # It is not promised again.
            assert each.batch_exists(keys(4)) == 2
        del words


def test_a_full_pool(daemon, opened):
    kv = fill(attention("page_first"), 1)
    backend = opened(kv, max_space_bytes=2 << 20)
    with beside(daemon) as session:
        kept = session.lease(3)
        (space,) = daemon.ctl("spaces")["spaces"]
        taken = session.lease(int(space["blocks"]["free"]))
        assert put(backend, kv, range(5)) == [False] * 5
        kept.release()
        session.flush()
        # There is room for fewer than five: the first ones are there, as far as it went.
        done = put(backend, kv, range(5))
        assert done == sorted(done, reverse=True) and not all(done)
        taken.release()
        session.flush()
        eventually(lambda: put(backend, kv, range(5)) == [True] * 5)
        assert get(backend, kv, 5) == [True] * 5


def has_ended(session):
    try:
        session.check()
        return False
    except kvpool.KvpoolError:
        return True


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_daemon_that_goes_between_exists_and_get(daemon, opened, end):
    kv = fill(attention("page_first"), 1)
    pages = [page(kv, i) for i in range(6)]
    backend = opened(kv, match_timeout=2)
    assert put(backend, kv, range(6)) == [True] * 6
    assert backend.batch_exists(keys(4)) == 4
    fill(kv, 2)
    if end == "killed":
        session = backend._pools["kv"].store._attached.session
        daemon.kill()
        eventually(lambda: has_ended(session))
        # Nobody holds what this process still sees in its memory.
        assert get(backend, kv, 4) == [False] * 4
    else:
        daemon.stop()
        assert get(backend, kv, 4) == [True] * 4 and all(torch.equal(page(kv, i), pages[i]) for i in range(4))
    eventually(lambda: get(backend, kv, 6) == [False] * 6)
    fill(kv, 1)
    assert backend.batch_exists(keys(6)) == 0 and put(backend, kv, range(6)) == [False] * 6
    daemon.start() if end == "killed" else daemon.go_on()
    eventually(lambda: put(backend, kv, range(6)) == [True] * 6)
    fill(kv, 2)
    assert get(backend, kv, 6) == [True] * 6 and all(torch.equal(page(kv, i), pages[i]) for i in range(6))
    assert backend.counts["kv"]["lost_daemons" if end == "killed" else "late_answers"] >= 1


# ---- Who shares


def test_models_that_differ_share_nothing(daemon, opened, tmp_path):
    kv = fill(attention("page_first"), 1)
    adapters = [files(tmp_path / name / "adapter", weights, name="adapter_config.json") for name, weights in (("1", b"a"), ("2", b"b"))]
    here = tmp_path / "adapter"

    def adapter(number):
        """The same name and path on two servers, and not the same files."""
        here.unlink(missing_ok=True)
        here.symlink_to(adapters[number])
        return [LoRARef(lora_id="1", lora_name="a", lora_path=str(here))]

    same = {"model_path": str(tmp_path / "model")}
    servers = [same, {"model_path": files(tmp_path / "tuned", b"weightt")}, {"model_path": files(tmp_path / "roped", config=b'{"rope": 1}')},
               {**same, "kv_cache_dtype": "fp8_e5m2"}, {**same, "json_model_override_args": '{"rope": 1}'}, {**same, "attention_backend": "triton"},
               {**same, "load_format": "dummy"}, {**same, "speculative_draft_model_path": files(tmp_path / "draft")},
               {**same, "lora_paths": 0}, {**same, "lora_paths": 1}]
    pools = [attention("page_first", heads=4, dim=4), attention("page_first", layers=4, dim=4), attention("layer_first")]
    makers = [(arguments, kv, {}) for arguments in servers] + [(same, fill(pool, 1), {}) for pool in pools]
    makers += [(same, kv, {"rank": rank, "ranks": 2}) for rank in (0, 1)]
    for arguments, pool, options in makers:
        arguments = {**arguments, **({"lora_paths": adapter(arguments["lora_paths"])} if "lora_paths" in arguments else {})}
        with server(arguments.pop("model_path"), **arguments):
            backend = opened(pool, **options)
            assert backend.batch_exists(keys(2)) == 0, (arguments, options)
            assert put(backend, pool, range(2)) == [True] * 2
            assert opened(pool, **options).batch_exists(keys(2)) == 2, (arguments, options)
    with server(files(tmp_path / "copied")):  # The same files elsewhere.
        assert opened(kv).batch_exists(keys(2)) == 2


def test_ranks_share_what_is_the_same_on_all(daemon, opened):
    """Latent K and V, here in another's clothes, but no states and no heads."""
    kv, latent, mamba = fill(attention("page_first"), 1), fill(states(), 2), fill(states(), 3)
    others = {PoolName.INDEXER: latent, PoolName.MAMBA: mamba}
    backends = [opened(kv, others, mla=True, rank=rank, ranks=2) for rank in (0, 1)]
    transfers = [PoolTransfer(name, keys=keys(2), host_indices=indices(pool, range(2))) for name, pool in others.items()]
    assert put(backends[0], kv, range(2)) == [True] * 2
    assert backends[0].batch_set_v2(transfers) == {name: [True] * 2 for name in others}
    assert backends[1].batch_get_v2(transfers) == {PoolName.INDEXER: [True] * 2, PoolName.MAMBA: [False] * 2}
    assert backends[1].batch_exists(keys(2)) == 0


def test_a_space_by_name_is_for_one_model(daemon, opened, tmp_path):
    opened(space="ours")
    opened(space="ours")
    with server(files(tmp_path / "tuned", b"weightt")), pytest.raises(kvpool.FailedPreconditionError, match="weights"):
        opened(space="ours")


def test_keys_without_salts_are_refused(daemon, monkeypatch):
    monkeypatch.setattr("sglang.srt.mem_cache.utils.storage_namespace_seed", lambda extra_key, cache_salt: None)
    with pytest.raises(RuntimeError, match="extra_key"):
        storage(daemon, attention("page_first"))


def test_clear(opened):
    kv = fill(attention("page_first"), 1)
    backend, rank, other = opened(kv), opened(kv), opened(kv)
    assert put(backend, kv, range(2)) == [True] * 2
    for each in (backend, rank):  # SGLang tells all ranks.
        each.clear()
        assert each.batch_exists(keys(2)) == 0
    assert other.batch_exists(keys(2)) == 2
    assert put(backend, kv, range(1)) == [True] and rank.batch_exists(keys(2)) == 1 and other.batch_exists(keys(2)) == 2
    backend.clear()
    assert backend.batch_exists(keys(2)) == 0


# ---- What it holds, and says


def held(daemon):
    """Blocks that sessions hold, of each space."""
    return [int(space["blocks"]["sealed"]) for space in daemon.ctl("spaces")["spaces"]]


def test_what_was_found_is_held_until_it_is_read(daemon, opened):
    kv, mamba = fill(attention("page_first"), 1), fill(states(), 2)
    backend = opened(kv, {PoolName.MAMBA: mamba})
    transfer = PoolTransfer(PoolName.MAMBA, keys=keys(2), host_indices=indices(mamba, range(2)))
    put(backend, kv, range(4))
    backend.batch_set_v2([transfer])
    eventually(lambda: held(daemon) == [0, 0])
    assert backend.batch_exists(keys(6)) == backend.batch_exists(keys(6)) == 4
    eventually(lambda: held(daemon) == [4, 0])
    assert get(backend, kv, 4) == [True] * 4
    eventually(lambda: held(daemon) == [0, 0])
    # Of a prefix that another pool cuts short, the rest is not held.
    assert backend.batch_exists_v2(keys(4), [PoolTransfer(PoolName.MAMBA)]).kv_hit_pages == 2
    eventually(lambda: held(daemon) == [2, 2])


def test_holds_end_by_themselves(daemon, opened):
    kv = fill(attention("page_first"), 1)
    backend = opened(kv, hold_seconds=0.5)
    put(backend, kv, range(4))
    assert backend.batch_exists(keys(4)) == 4
    eventually(lambda: held(daemon) == [0])
    assert get(backend, kv, 4) == [True] * 4


def test_nothing_raises(daemon, opened):
    kv = fill(attention("page_first"), 1)
    made = config(daemon)
    backend = KvPoolStorage(made, {})
    nothing = PoolTransfer(PoolName.SWA, keys=keys(1))

    def misses():
        assert backend.batch_exists(keys(2)) == 0 and not backend.exists(keys(1)[0])
        assert put(backend, kv, range(2)) == get(backend, kv, 2) == [False] * 2
        assert backend.batch_get(keys(1), [page(kv, 0)]) == [None] and not backend.batch_set(keys(1), [page(kv, 0)])
        assert backend.batch_get_v2([nothing]) == backend.batch_set_v2([nothing]) == {PoolName.SWA: [False]}
        assert backend.batch_exists_v2(keys(2), [nothing]).kv_hit_pages == 0

    misses()  # No pool is registered yet.
    backend.register_mem_pool_host(kv)
    assert put(backend, kv, range(2)) == [True] * 2
    assert backend.batch_set_v1(keys(2), indices(kv, [0])) == backend.batch_get_v1(keys(2), indices(kv, [0])) == [False] * 2
    assert backend.batch_set_v1(keys(1), None) == [False]
    assert backend.get(keys(1)[0]) is None and not backend.set(keys(1)[0])
    assert not backend.set(keys(1)[0], page(kv, 0)[:-8]) and backend.batch_get(keys(1), [page(kv, 0)[:-8]]) == [None]
    backend.register_mem_host_pool_v2(kv, PoolName.SWA)
    assert backend.batch_get_v2([nothing]) == {PoolName.SWA: [False]}
    assert backend.batch_exists_v2(keys(2), [nothing]).kv_hit_pages == 0 and backend.batch_exists(keys(2)) == 2
    backend.close()
    misses()


def test_figures_are_of_each_call(opened):
    kv = fill(attention("page_first"), 1)
    backend = opened(kv, metrics=True)
    assert backend.get_stats() is None
    put(backend, kv, range(3))
    get(backend, kv, 5)
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3]) and all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert backend.get_stats() is None


def test_pools_that_are_not_shared(opened):
    """One whose pages can't be found, and one without memory, of which only indices are known."""
    pool = states()
    pool.slot_state_device_tensors = [torch.zeros(4)]
    with pytest.raises(ValueError, match="mamba .*side states"):
        opened(others={PoolName.MAMBA: pool})
    with pytest.raises(ValueError, match="words of 8 bytes"):
        pool = attention("layer_first")
        pool.get_page_buffer_meta = lambda indices: ([0], [12])
        opened(pool)
    anchor = LogicalHostPool(PAGES * 4, 4)
    backend = opened(anchor)
    assert put(backend, anchor, range(2)) == [True] * 2 and get(backend, anchor, 3) == [True, True, False]


def test_a_server_without_a_daemon(tmp_path):
    kv = fill(attention("page_first"), 1)
    daemon = Daemon(capacity="16MiB", slab="2MiB")
    daemon.kill()
    with pytest.raises(RuntimeError, match="needs a kvpoold"):
        storage(daemon, kv, open_timeout=0.1)
    with pytest.raises(ValueError, match="no such option: sockets"):
        storage(daemon, kv, sockets="")
    backend = storage(daemon, kv, open_timeout=0.1, fallback="own")
    try:
        assert put(backend, kv, range(2)) == [False] * 2
        daemon.start()
        eventually(lambda: put(backend, kv, range(2)) == [True] * 2)
    finally:
        backend.close()
        daemon.close()
