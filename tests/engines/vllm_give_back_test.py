"""Engines of several models on one daemon that has less memory than their peaks together: what one needs no more another gets, while both run."""

import concurrent.futures
import contextlib
import json
import time
import urllib.request

import pytest

from daemon import Daemon
from models import gemma, llama
from vllm_processes import PYTHON, Engine, Server, assert_nothing_is_held, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")

CAPACITY, SLAB = 24 << 20, 2 << 20
LIMIT = 16 << 20  # What each engine may hold.
PATIENCE_S = 120


def spaces(daemon):
    """{id: bytes}."""
    said = daemon.ctl("spaces")["spaces"]
    return {space["space"]: int(space.get("bytes", 0)) for space in said}


def given_back(daemon):
    """Slabs, of all spaces so far."""
    port = json.loads((daemon.path / "kvpoold.json").read_text())["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("kvpool_given_back_slabs_total"))


@pytest.fixture
def small():
    with contextlib.closing(Daemon(capacity=f"{CAPACITY >> 20}MiB", slab=f"{SLAB >> 20}MiB")) as daemon:
        yield daemon


def started(daemon, engine):
    """The engine, and its space, which is new."""
    before = set(spaces(daemon))
    engine.started()
    (space,) = set(spaces(daemon)) - before
    return engine, space


def peak_of(daemon, space, work, bytes_wanted):
    """What the space has when this work was done again and again, until it is as much as is wanted."""
    until = time.monotonic() + PATIENCE_S
    while (now := spaces(daemon)[space]) < bytes_wanted:
        assert time.monotonic() < until, f"{now} of {bytes_wanted} bytes: {spaces(daemon)}"
        work()
    return now


@pytest.mark.parametrize("kind", [{}, {"processes": True}, {"processes": True, "tensor_parallel_size": 2}], ids=["alone", "processes", "ranks"])
def test_an_idle_engine_gives_back_its_slabs(small, engine, tmp_path, kind):
    """Its tables name blocks of memory that is unmapped then, and it goes on."""
    if kind:
        # Else vLLM binds all threads of both workers to the first core: for minutes the idle one's get none of it, the thread that unmaps included.
        kind = kind | {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if "tensor_parallel_size" in kind else "nobind"}}
    start = lambda seed: engine({"socket": small.socket}, model=tmp_path / str(seed), kv_cache_memory_bytes=LIMIT, **kind)
    for seed in (0, 1):
        llama(seed, head_dim=32).save_pretrained(tmp_path / str(seed))
    both = [started(small, start(seed)) for seed in (0, 1)]
    stocks = [engine(model=tmp_path / str(seed)) for seed in (0, 1)]
    asked = prompts(48, seed=111, shortest=500, longest=600)
    own = [stock.generate(asked)["tokens"] for stock in stocks]
    for _ in range(2):
        for (one, space), tokens in zip(both, own):
            def work():
                assert one.generate(asked)["tokens"] == tokens
            peak_of(small, space, work, CAPACITY * 5 // 8)  # More than half: the other one has given.
    if not kind:
        for one, _ in both:
            assert_nothing_is_held(one)
            tables = one.ask("tables")
            assert tables["highest"] < tables["mapped"], tables


def test_windows_leave_blocks_in_slabs_that_go(small, engine, tmp_path):
    """Rows of requests that run keep the numbers of blocks that a window has left; others hold these, or nobody."""
    gemma(window=32).save_pretrained(tmp_path / "windows")
    llama(1, head_dim=32).save_pretrained(tmp_path / "other")
    first, second = (engine({"socket": small.socket}, model=tmp_path / name, kv_cache_memory_bytes=LIMIT) for name in ("windows", "other"))
    stocks = [engine(model=tmp_path / name) for name in ("windows", "other")]
    asked = prompts(32, seed=112, shortest=400, longest=500)
    own = [stock.generate(asked, tokens=100)["tokens"] for stock in stocks]
    first.started(), second.started()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        until = time.monotonic() + PATIENCE_S
        while given_back(small) < 4:
            assert time.monotonic() < until, spaces(small)
            said = [threads.submit(one.generate, asked, tokens=100) for one in (first, second)]
            assert [future.result()["tokens"] for future in said] == own
            assert first.generate(asked, tokens=100)["tokens"] == own[0]  # The other one is idle, then it is the only one that works.
            assert second.generate(asked, tokens=100)["tokens"] == own[1]
    assert_nothing_is_held(first, second)


def test_three_servers_of_three_models(small, tmp_path):
    """As their users have them: each has its turn, and then all are asked at once."""
    for seed in range(3):
        llama(seed, head_dim=32).save_pretrained(tmp_path / str(seed))
    asked = prompts(40, seed=113, shortest=500, longest=600)
    flags = ("--dtype=float32", f"--kv-cache-memory-bytes={LIMIT}", "--max-num-seqs=16")
    with contextlib.ExitStack() as stack:
        servers, own, its_space = [], [], []
        for seed in range(3):
            stock = Engine(tmp_path / str(seed))
            stack.callback(stock.kill)
            servers.append(Server(tmp_path / str(seed), {"socket": small.socket}, tmp_path / f"{seed}.log", *flags))
            stack.callback(servers[-1].kill)
            its_space.append(started(small, servers[-1])[1])
            own.append(stock.generate(asked)["tokens"])
            stock.kill()
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(16 * len(servers)))

        def ask(number):
            return [threads.submit(servers[number].complete, prompt) for prompt in asked]

        def work(number):
            assert [future.result()[0] for future in ask(number)] == own[number]

        peaks = [peak_of(small, its_space[number], lambda: work(number), CAPACITY // 2) for number in range(3)]
        assert sum(peaks) > CAPACITY >= sum(spaces(small).values())
        at_once = [ask(number) for number in range(3)]
        assert [[future.result()[0] for future in futures] for futures in at_once] == own
        print(f"three models: {CAPACITY >> 20} MiB, peaks of {', '.join(str(peak >> 20) for peak in peaks)} MiB")
        assert len(small.ctl("sessions")["sessions"]) == 3
        (fresh,) = prompts(1, seed=114, shortest=300)
        for server in servers:  # Prefixes are found as before.
            server.complete(fresh)
            assert server.complete(fresh)[1] == whole_blocks(fresh)
