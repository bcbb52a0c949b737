"""vLLM's HTTP servers under load, while what they stand on fails: no wrong token, no failed request, and prefixes are found again.

Two servers of one model share a pool; clients ask both all the time, and answers are compared with those of vLLM's own cache. With
KVPOOL_RESULTS_DIR in the environment, figures go to vllm_faults.jsonl there, of which results.sh makes a table.
"""

import contextlib
import functools
import http.client
import itertools
import json
import os
import pathlib
import shutil
import signal
import threading
import time

import kvpool
import pytest

from daemon import Daemon, KeptDaemon
from models import adapter, llama
from vllm_processes import PYTHON, Engine, Server, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")

AGAIN_S = 180  # The longest wait for prefixes to be found again: a machine may be busy.
STOP_S = 20
KILLS = 20
FLAGS = ("--dtype=float32", "--enable-lora", "--max-lora-rank=8", "--max-num-seqs=8")
# Adapters and weights that change while a server runs are asked for by HTTP.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
CLIENTS = 4  # A server.
TOKENS = 40
USUAL = {"match_timeout": 1.0}  # kvpool's, where other tests are patient.


class Load:
    """Clients that ask the servers until this ends: `answered`, `wrong` (tokens other than the stock's), `failed` (no answer), and the
    longest that an answer took."""

    def __init__(self, servers, asked, truth, model=None):
        self._cases, self._model = list(zip(asked, truth)), model
        self.answered = self.longest_s = 0
        self.wrong, self.failed = [], []
        self._over, self._changed = threading.Event(), threading.Condition()
        self._threads = [threading.Thread(target=self._ask, args=(server, first), daemon=True)
                         for server in servers for first in range(CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, server, first):
        for turn in itertools.count(first * len(self._cases) // CLIENTS):
            if self._over.is_set():
                return
            prompt, truth = self._cases[turn % len(self._cases)]
            began = time.monotonic()
            try:
                tokens, _ = server.complete(prompt, TOKENS, self._model)
                outcome = self.wrong if tokens != truth else None
            except (OSError, http.client.HTTPException, ValueError) as error:
                outcome, tokens = self.failed, repr(error)
            with self._changed:
                self.answered += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                if outcome is not None:
                    outcome.append((server.address, prompt[:4], tokens))
                self._changed.notify_all()
            if outcome is self.failed:
                return

    def await_more(self, count):
        """Until so many more were answered."""
        with self._changed:
            until = self.answered + count
            assert self._changed.wait_for(lambda: self.answered >= until or self.failed, timeout=600), self.answered

    def assert_right(self):
        assert not self.wrong and not self.failed, (self.wrong[:3], self.failed[:3])


class World:
    """A daemon, two servers on it, the stock, and what servers are asked under load. `how`: "pool", or "connector"."""

    def __init__(self, directory, daemon, how):
        self.directory, self.daemon, self.how = directory, daemon, how
        self._processes, self._seeds = [], itertools.count(1000)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self):
        for seed in (0, 1):
            llama(seed, head_dim=32).save_pretrained(self.directory / str(seed))
        self.model = self.directory / "0"
        self.stock = Engine(self.model, enable_lora=True, max_lora_rank=8)
        self._processes.append(self.stock)
        self.servers = [self.serve() for _ in range(2)]
        for server in self.servers:
            server.started()
        self.asked = prompts(24, seed=201, shortest=40, longest=400, shared=200)
        self.truth = self.stock.generate(self.asked, tokens=TOKENS)["tokens"]

    def serve(self, model=None):
        """Another server."""
        name = self.directory / f"{len(self._processes)}.log"
        self._processes.append(Server(model or self.model, USUAL | {"socket": self.daemon.socket}, name, *FLAGS,
                                      environment=ENVIRONMENT, connector=self.how == "connector"))
        return self._processes[-1]

    def fresh(self, count=1):
        return prompts(count, seed=next(self._seeds), shortest=300, longest=400)

    def load(self, *servers):
        return Load(servers or self.servers, self.asked, self.truth)

    def shared_again(self, first=None, second=None):
        """Seconds until what the one computes the other finds, whole."""
        (first, second), began = (first or self.servers[0], second or self.servers[1]), time.monotonic()
        while True:
            (prompt,) = asked = self.fresh()
            (truth,) = self.stock.generate(asked)["tokens"]
            for server in (first, second):
                tokens, cached = server.complete(prompt)
                assert tokens == truth
            if cached == whole_blocks(prompt):
                return time.monotonic() - began
            assert time.monotonic() - began < AGAIN_S, [server._log.read_text()[-2000:] for server in (first, second)]
            time.sleep(0.1)

    def close(self):
        for process in self._processes:
            process.kill()
        self.daemon.close()


@pytest.fixture(scope="module", params=["pool", "connector"])
def world(request, tmp_path_factory):
    with contextlib.closing(World(tmp_path_factory.mktemp("faults"), Daemon(capacity="256MiB", slab="16MiB"), request.param)) as world:
        yield world


def note(world, fault, load, again_s, **more):
    """A row of the table."""
    row = {"cell": {"fault": fault if world.how == "pool" else f"{world.how}: {fault}"},
           "value": {"answered": load.answered, "wrong": len(load.wrong), "failed": len(load.failed), "longest_s": load.longest_s,
                     "again_s": again_s, **more}}
    print(json.dumps(row))
    if directory := os.environ.get("KVPOOL_RESULTS_DIR"):
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        with open(pathlib.Path(directory) / "vllm_faults.jsonl", "a") as file:
            print(json.dumps(row), file=file)


def found_whole(server, prompt, truth):
    """It has computed the prompt, and finds it; later where kvpoold's answer was too late on a busy machine, for it asks nothing then."""
    until = time.monotonic() + AGAIN_S
    while True:
        tokens, cached = server.complete(prompt)
        assert tokens == truth
        if cached == whole_blocks(prompt):
            return
        assert time.monotonic() < until, server._log.read_text()[-2000:]
        time.sleep(0.1)


@contextlib.contextmanager
def killed(process):
    """In the end."""
    try:
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def stopped(signal_to):
    """`signal_to`: sends a signal to what stands still meanwhile."""
    signal_to(signal.SIGSTOP)
    try:
        yield
    finally:
        signal_to(signal.SIGCONT)


@pytest.fixture
def ready(world):
    """Both servers share what they compute."""
    world.shared_again()
    return world


def test_the_daemon_is_killed(ready):
    with ready.load() as load:
        load.await_more(20)
        ready.daemon.kill()
        load.await_more(60)
        ready.daemon.start()
        load.await_more(20)
    load.assert_right()
    note(ready, "daemon killed, and started later", load, ready.shared_again())


def test_the_daemon_stands_still(ready):
    with ready.load() as load:
        load.await_more(20)
        with stopped(ready.daemon.process.send_signal):
            time.sleep(STOP_S)
        load.await_more(20)
    load.assert_right()
    note(ready, f"daemon stopped for {STOP_S} s (SIGSTOP)", load, ready.shared_again())


def test_the_daemon_is_restarted(ready):
    with ready.load() as load:
        load.await_more(20)
        ready.daemon.process.terminate()
        ready.daemon.process.wait()
        ready.daemon.start()
        load.await_more(60)
    load.assert_right()
    note(ready, "daemon restarted (SIGTERM)", load, ready.shared_again())


def test_the_daemon_is_slow(ready):
    """It runs a tenth of the time, half a second at a stretch."""
    with ready.load() as load:
        load.await_more(20)
        until = time.monotonic() + STOP_S
        while time.monotonic() < until:
            with stopped(ready.daemon.process.send_signal):
                time.sleep(0.45)
            time.sleep(0.05)
        load.await_more(20)
    load.assert_right()
    note(ready, f"daemon slow: 50 of each 500 ms, for {STOP_S} s", load, ready.shared_again())


def test_the_pool_is_full(ready):
    """Another engine takes what is there: the servers have what they hold, and what they are promised."""
    layout = kvpool.Layout.paged(layers=1, kv_heads=1, head_dim=1024, tokens_per_block=16, dtype="float32")
    # This process lives on: it says that its memory is anybody's behind the session.
    greedy_session = kvpool.Session(layout, "a greedy engine", socket=ready.daemon.socket, give_back="any_time", open_timeout=60)
    with ready.load() as load, greedy_session as greedy:
        load.await_more(20)
        held = []
        with contextlib.suppress(kvpool.ResourceExhaustedError, kvpool.DeadlineExceededError):
            while True:
                held.append(greedy.lease(32, timeout=2))
        assert held
        load.await_more(60)
        for blocks in held:
            blocks.release()
        load.await_more(20)
    load.assert_right()
    note(ready, "pool full: another engine leases all that is left", load, ready.shared_again())


def test_an_engine_stands_still(ready):
    with ready.load() as load:
        load.await_more(20)
        with stopped(functools.partial(os.killpg, ready.servers[0].process.pid)):
            time.sleep(STOP_S)
        load.await_more(20)
    load.assert_right()
    note(ready, f"one engine stopped for {STOP_S} s (SIGSTOP)", load, ready.shared_again())


def test_two_models(ready):
    """A server of another model comes to the same daemon, is asked beside the first two, and is killed."""
    other = ready.serve(ready.directory / "1")
    with killed(Engine(ready.directory / "1", enable_lora=True, max_lora_rank=8)) as stock:
        truth = stock.generate(ready.asked, tokens=TOKENS)["tokens"]
        other.started()
        with ready.load() as load, Load([other], ready.asked, truth) as its:
            load.await_more(20)
            its.await_more(20)
        load.assert_right()
        its.assert_right()
        (prompt,) = asked = ready.fresh()
        ready.servers[0].complete(prompt)
        assert other.complete(prompt) == (stock.generate(asked)["tokens"][0], 0)
        assert other.complete(prompt)[1] == whole_blocks(prompt)
    other.kill()
    its.answered += load.answered
    note(ready, "two models at once, of three servers", its, ready.shared_again())


def test_an_adapter_is_overwritten_while_it_is_loaded(ready, tmp_path):
    """A server goes on with what it has loaded; nobody finds that under the name of the new files."""
    path = pathlib.Path(adapter(tmp_path / "tuned", seed=1))
    new = pathlib.Path(adapter(tmp_path / "new", seed=2))
    first, second = ready.servers

    def says(asked, name, **more):
        return ready.stock.generate(asked, lora=[name, str(path)], **more)["tokens"]

    def change(server):
        server.post("/v1/unload_lora_adapter", lora_name="tuned")
        server.post("/v1/load_lora_adapter", lora_name="tuned", lora_path=str(path))

    for server in ready.servers:
        server.post("/v1/load_lora_adapter", lora_name="tuned", lora_path=str(path))
    asked = ready.fresh(4)
    old = says(asked, "old")
    # Requests without an adapter are not among them: vLLM's build for CPUs computes these by the adapter of others in their batch.
    with Load(ready.servers, ready.asked, says(ready.asked, "old", tokens=TOKENS), "tuned") as load:
        load.await_more(20)
        for file in new.iterdir():
            shutil.copyfile(file, path / file.name)
        load.await_more(40)
        assert [first.complete(prompt, model="tuned")[0] for prompt in asked] == old
    load.assert_right()
    change(second)
    ready.stock.ask("unload")
    new = says(asked, "new")
    assert new != old
    assert [second.complete(prompt, model="tuned") for prompt in asked] == [(tokens, 0) for tokens in new]
    change(first)
    assert [first.complete(prompt, model="tuned")[0] for prompt in asked] == new
    ready.stock.ask("unload")
    note(ready, "an adapter's files changed while it is loaded", load, ready.shared_again())


def test_weights_are_updated(ready):
    """By an update in place, as loops of reinforcement learning do it, in one of three servers."""
    other = ready.serve()
    with killed(Engine(ready.model, enable_lora=True, max_lora_rank=8)) as stock:

        def update(seed):
            other.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(ready.directory / seed)})
            stock.ask("change_weights", directory=str(ready.directory / seed), way="reload_weights")
            stock.ask("reset")  # vLLM's own cache is its user's to reset.

        asked = ready.fresh(4)
        old = stock.generate(asked)["tokens"]
        other.started()
        with ready.load() as load:
            assert [other.complete(prompt)[0] for prompt in asked] == old
            update("1")
            new = stock.generate(asked)["tokens"]
            assert new != old
            assert [other.complete(prompt) for prompt in asked] == [(tokens, 0) for tokens in new]
            assert [ready.servers[0].complete(prompt)[0] for prompt in asked] == old
            for prompt, tokens in zip(asked, new):
                found_whole(other, prompt, tokens)
            load.await_more(20)
        load.assert_right()
    other.kill()
    note(ready, "weights updated in one of three engines", load, ready.shared_again())


def test_an_engine_is_killed(ready):
    """Its own requests fail, and no others. What it had shared its successor finds."""
    first, second = ready.servers
    with ready.load(second) as load, ready.load(first) as its:
        load.await_more(20)
        its.await_more(8)
        first.kill()
        load.await_more(40)
    load.assert_right()
    assert not its.wrong and len(its.failed) <= CLIENTS
    ready.servers[0] = ready.serve()
    ready.servers[0].started()
    tokens, cached = ready.servers[0].complete(ready.asked[0], TOKENS)
    assert tokens == ready.truth[0] and cached > 0
    note(ready, "one engine killed", load, ready.shared_again(), failed_of_killed=len(its.failed))


@pytest.mark.parametrize("how", ["pool", "connector"])
def test_the_daemon_is_killed_20_times(tmp_path, how):
    """With a keeper it comes back by itself, with what was shared."""
    with contextlib.closing(World(tmp_path, KeptDaemon(capacity="256MiB", slab="16MiB"), how)) as world:
        world.shared_again()
        with world.load() as load:
            for _ in range(KILLS):
                load.await_more(10)
                world.daemon.kill_daemon()
            load.await_more(20)
        load.assert_right()
        note(world, f"daemon killed {KILLS} times, with --keeper=on", load, world.shared_again())
