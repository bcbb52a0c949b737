"""vLLM on a pool with a tier below it (kvpoold --tier): what has left the pool comes back to requests that wait for it, no step waits, and
what is said is what stock vLLM says."""

import contextlib
import shutil
import socket
import subprocess
import time

import pytest

from daemon import Daemon
from models import gemma
from vllm_processes import PYTHON, assert_nothing_is_held, await_detached, await_shared, engines, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


def tiered(tmp_path, **more):
    return contextlib.closing(Daemon(slab="4MiB", flags=[f"--tier=file:{tmp_path}/tier,capacity=256MiB"], **more))


@pytest.fixture
def daemon(tmp_path):
    with tiered(tmp_path) as daemon:
        yield daemon


def promoted(daemon):
    """Blocks that came up, of the daemon's life."""
    (tier,) = daemon.ctl("tier")["tiers"]
    return int(tier["promoted_blocks"])


def await_nothing_held(daemon):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        (space,) = daemon.ctl("spaces")["spaces"]
        if int(space["blocks"].get("sealed", 0)) == 0:
            return
    raise AssertionError(f"nobody was to hold blocks: {space}")


def all_below(daemon, one):
    """What `one` has computed is below the pool alone, and it has found the daemon again."""
    daemon.process.terminate()  # What is cached goes below first.
    assert daemon.process.wait(60) == 0
    await_detached(one)
    daemon.start()
    await_shared(one)


def counted(one, before=None):
    """What one has counted of its waits, since `before`."""
    counters = one.ask("facts")["pool"]
    return {name: counters[name] - (before or {}).get(name, 0) for name in ("waited_requests", "promoted_tokens", "late_waits")}


def test_prompts_that_push_each_other_out(engine, stock, tmp_path):
    """They take more than twice the pool."""
    with tiered(tmp_path, capacity="8MiB") as daemon:  # 160 blocks.
        one = engine({"socket": daemon.socket, "guaranteed_blocks": 0, "wait_ms": 60000}, num_gpu_blocks_override=160)
        one.ask("prefills_take", microseconds=1_000_000)
        asked = prompts(24, seed=131, shortest=490, longest=500)
        own = stock.generate(asked)["tokens"]
        first = [one.generate([prompt]) for prompt in asked]
        assert [said["tokens"][0] for said in first] == own and promoted(daemon) == 0
        again = [one.generate([prompt]) for prompt in asked]
        assert [said["tokens"][0] for said in again] == own
        # A block that left before its copy was made is computed, and so is what is behind it.
        assert sum(said["cached"][0] for said in again) > sum(map(len, asked)) / 2
        assert promoted(daemon) > 160 and counted(one)["promoted_tokens"] > 160 * 32
        # All at once they are too much for it.
        for _ in range(2):
            assert one.generate(asked)["tokens"] == own
        assert_nothing_is_held(one)
        await_nothing_held(daemon)


@pytest.mark.parametrize("kind", [{}, {"processes": True}, {"processes": True, "tensor_parallel_size": 2}], ids=["alone", "processes", "ranks"])
def test_the_next_daemon_has_all_of_it(daemon, engine, stock, kind):
    if "tensor_parallel_size" in kind:
        kind = kind | {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    pool = {"socket": daemon.socket, "wait_ms": 60000}
    asked = prompts(8, seed=132, shortest=200)
    own = stock.generate(asked)["tokens"]
    one = engine(pool, **kind)
    assert one.generate(asked) == {"tokens": own, "cached": [0] * 8}
    one.kill()
    daemon.process.terminate()
    assert daemon.process.wait(60) == 0
    daemon.start()
    one = engine(pool, **kind)
    assert one.generate(asked) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
    assert promoted(daemon) == sum(whole_blocks(prompt) for prompt in asked) // 32
    if not kind:
        assert counted(one)["promoted_tokens"] == sum(whole_blocks(prompt) for prompt in asked)
        assert counted(one)["late_waits"] == 0
        assert_nothing_is_held(one)


@contextlib.contextmanager
def redis(directory):
    """A store's port. Debian's redis-tools has the server, by another name."""
    with socket.socket() as claim:
        claim.bind(("127.0.0.1", 0))
        port = claim.getsockname()[1]
    with open(directory / "redis.log", "wb") as log:
        server = subprocess.Popen(["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(directory)],
                                  executable=shutil.which("redis-check-rdb"), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert server.poll() is None and time.monotonic() < deadline, (directory / "redis.log").read_text()
                time.sleep(0.01)
        yield port
    finally:
        server.kill()
        server.wait()


def test_what_another_node_has_left_in_a_store(engine, stock, tmp_path):
    """The daemon has not heard of it."""
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    asked = prompts(6, seed=142, shortest=200)
    own = stock.generate(asked)["tokens"]
    with redis(tmp_path) as port:
        flags = [f"--tier=resp:127.0.0.1:{port},write=evict", f"--tier-key-file={tmp_path}/key"]
        with contextlib.closing(Daemon(slab="4MiB", flags=flags)) as node:
            one = engine({"socket": node.socket})
            assert one.generate(asked)["tokens"] == own
            one.ask("flush")
            one.kill()
            node.process.terminate()
            assert node.process.wait(60) == 0
        with contextlib.closing(Daemon(slab="4MiB", flags=flags)) as node:
            one = engine({"socket": node.socket, "wait_ms": 60000})
            assert one.generate(asked) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
            assert promoted(node) == sum(map(whole_blocks, asked)) // 32
            fresh = prompts(2, seed=143, shortest=200)  # It is asked for these, too, and has nothing.
            assert one.generate(fresh) == {"tokens": stock.generate(fresh)["tokens"], "cached": [0] * 2}
            assert_nothing_is_held(one)


@pytest.mark.parametrize("hybrid", [False, True])
def test_windows(tmp_path, hybrid):
    """As full attention they come back, and as the windows that vLLM's hybrid manager keeps at the ends of requests."""
    gemma(0, layers=7, window=80, kv_heads=2).save_pretrained(tmp_path / "hybrid")
    with tiered(tmp_path) as daemon, engines(tmp_path / "hybrid", disable_hybrid_kv_cache_manager=not hybrid) as engine:
        one, stock = engine({"socket": daemon.socket, "wait_ms": 60000}), engine()
        asked = prompts(6, seed=133, shortest=300)
        own = stock.generate(asked)["tokens"]
        assert one.generate(asked)["tokens"] == own
        all_below(daemon, one)
        assert one.generate(asked) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
        assert promoted(daemon) > 0
        assert_nothing_is_held(one)


def test_beside_another_connector(daemon, engine, stock, tmp_path):
    """It is asked about requests for which nothing comes up any more."""
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "storage")}}
    pool = {"socket": daemon.socket, "wait_ms": 60000}
    asked, others = prompts(4, seed=139, shortest=200), prompts(4, seed=140, shortest=200)
    own = stock.generate(asked + others)["tokens"]
    saves = engine(kv_transfer_config=transfer)
    assert saves.generate(others)["tokens"] == own[4:]
    both = engine(pool, kv_transfer_config=transfer)
    plain = engine(pool)
    assert plain.generate(asked)["tokens"] == own[:4]
    plain.ask("flush")
    plain.kill()
    all_below(daemon, both)
    assert both.generate(asked + others) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked + others]}
    assert counted(both)["promoted_tokens"] == sum(map(whole_blocks, asked))
    assert_nothing_is_held(both)


def test_the_connector_waits_too(daemon, engine, stock):
    connector = {"socket": daemon.socket, "guaranteed_blocks": 100, "match_timeout": 30, "lease_timeout": 30, "wait_ms": 60000}
    asked = prompts(6, seed=141, shortest=200)
    own = stock.generate(asked)["tokens"]
    one = engine(connector=connector)
    assert one.generate(asked)["tokens"] == own
    one.ask("flush")
    one.kill()
    daemon.process.terminate()
    assert daemon.process.wait(60) == 0
    daemon.start()
    one = engine(connector=connector)
    assert one.generate(asked) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
    assert one.ask("facts")["lookup"]["waited_requests"] == 6 and promoted(daemon) == sum(map(whole_blocks, asked)) // 32
    # What vLLM has itself is not waited for.
    assert one.generate(asked) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
    assert one.ask("facts")["lookup"]["waited_requests"] == 6


@pytest.mark.parametrize("microseconds", [1, 1_000_000])
def test_what_is_computed_faster_stays_below(daemon, engine, stock, microseconds):
    """The engine says how long its prefills take."""
    one = engine({"socket": daemon.socket, "wait_ms": 60000})
    asked, fresh = prompts(16, seed=144, shortest=200), prompts(40, seed=145, shortest=40, longest=60)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own
    all_below(daemon, one)
    one.ask("prefills_take", microseconds=microseconds)
    for prompt in fresh:
        one.generate([prompt], tokens=1)
    said = [one.generate([prompt]) for prompt in asked]
    assert [each["tokens"][0] for each in said] == own
    (tier,) = daemon.ctl("tier")["tiers"]
    cached = [each["cached"][0] for each in said]
    if microseconds == 1:  # Until it is known how long loads take they are tried.
        assert int(tier["not_worth_blocks"]) > 0 and 0 in cached, tier
    else:
        assert int(tier["not_worth_blocks"]) == 0 and cached == [whole_blocks(prompt) for prompt in asked], tier
    assert_nothing_is_held(one)


def test_a_tier_that_is_late(daemon, engine, stock):
    """Requests wait for wait_ms, others go on meanwhile, and then they are computed."""
    one = engine({"socket": daemon.socket, "wait_ms": 1500})
    asked, fresh = prompts(6, seed=134, shortest=200), prompts(2, seed=135, shortest=200)
    own = stock.generate(asked + fresh)["tokens"]
    assert one.generate(asked)["tokens"] == own[:6]
    all_below(daemon, one)
    one.ask("slow_tier")
    before = counted(one)
    assert one.generate(fresh)["tokens"] == own[6:]  # Nothing of these is below.
    assert counted(one, before)["late_waits"] == 0
    before = counted(one)
    started = time.monotonic()
    said = one.ask("while_below_comes", prompts=asked)
    assert said["said"] == own[:6] and time.monotonic() - started > 1.5
    since = counted(one, before)
    assert since["waited_requests"] == since["late_waits"] == 6 and since["promoted_tokens"] == 0
    assert_nothing_is_held(one)
    await_nothing_held(daemon)


@pytest.mark.parametrize("wait_ms", [0, 1])
def test_who_does_not_wait_computes(daemon, engine, stock, wait_ms):
    one = engine({"socket": daemon.socket, "wait_ms": wait_ms})
    asked = prompts(6, seed=136, shortest=200)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own
    all_below(daemon, one)
    assert one.generate(asked)["tokens"] == own
    if wait_ms == 0:
        assert counted(one) == {"waited_requests": 0, "promoted_tokens": 0, "late_waits": 0} and promoted(daemon) == 0
    assert_nothing_is_held(one)
    await_nothing_held(daemon)


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_requests_that_end_while_they_wait(daemon, engine, stock, end):
    """What has come for them goes back."""
    one = engine({"socket": daemon.socket, "wait_ms": 3000})
    asked = prompts(4, seed=137, shortest=200)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own
    all_below(daemon, one)
    one.ask("slow_tier")
    said = one.ask("while_below_comes", prompts=asked, end=end)
    assert said["said"] == [None if end == "abort" else own[0], *own[1:]]
    assert_nothing_is_held(one)
    await_nothing_held(daemon)


def test_the_daemon_dies_while_requests_wait(daemon, engine, stock):
    one = engine({"socket": daemon.socket, "wait_ms": 60000})
    asked = prompts(4, seed=138, shortest=200)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own
    all_below(daemon, one)
    one.ask("slow_tier")
    started = time.monotonic()
    said = one.ask("while_below_comes", prompts=asked, kill=daemon.process.pid)
    assert said == {"said": own, "cached": [0] * 4} and time.monotonic() - started < 30
    daemon.process.wait()
    daemon.start()
    await_shared(one)
    assert_nothing_is_held(one)


def test_refused_by_name(daemon, engine):
    for wrong in (-1, 60001, 0.5, True):
        assert f"additional_config.kvpool.wait_ms is {wrong!r}; must be an int from 0 to 60000" in engine(
            {"socket": daemon.socket, "wait_ms": wrong}).refused()
