"""Time to first token of a prompt that is computed, found in the pool, and brought up from below it (kvpoold --tier)."""

import contextlib
import itertools
import pathlib
import tempfile

import lab
import speed
import stores
import vllm_speed
from vllm_processes import await_detached, await_shared

PREFIX = 4000
RUNS = 3
LITTLE = 1200  # More blocks than loads that a forecast wants.
WAYS = ("computed", "pool", "files", "Redis", "bucket", "throttled")
THROTTLED_BYTES_PER_SECOND = 4e6
CAPACITY = "1GiB"  # Of the pool, and of the files.
WAIT_MS = 60_000
ENGINES = ("vLLM", *speed.ENGINES)


def cells():
    return [{"engine": name, "run": run} for name in ENGINES if name != "vLLM" or vllm_speed.available() for run in range(RUNS)]


class _Vllm:
    """It stays through the daemon's restart."""

    def __init__(self, daemon):
        self._engine = vllm_speed.pooled(daemon, wait_ms=WAIT_MS)

    def first_token(self, tokens):
        said = self._engine.ask("first_token", prompt=tokens)
        return said["seconds"], said["had"]

    def settle(self):
        self._engine.ask("flush")

    def lost(self):
        await_detached(self._engine)

    def go_on(self):
        await_shared(self._engine)

    def end(self):
        self._engine.kill()


class _Other:
    """An engine of speed.py. After a restart there is another."""

    def __init__(self, name, daemon):
        self._make = lambda: speed.ENGINES[name](daemon.socket, wait_ms=WAIT_MS)
        self._engine = self._make()

    def first_token(self, tokens):
        return self._engine.first_token(tokens, keep=False)

    def settle(self):
        self._engine.finish()

    def lost(self):
        self._engine = None

    def go_on(self):
        self._engine = self._make()

    def end(self):
        self._engine = None


def measure(here, cell):
    """{way: {"seconds": until the first token behind a prefix and a question, "had": tokens that were not computed}}, and how many bytes
    came up from each store. "throttled" has how many blocks it was not worth to load, too."""
    name, run = cell["engine"], cell["run"]
    shared, little = speed.tokens_of(PREFIX, seed=7000 + run), speed.tokens_of(LITTLE, seed=8000 + run)
    questions = itertools.count(1)

    def ask(prefix=shared):
        seconds, had = engine.first_token(prefix + speed.tokens_of(speed.QUESTION, seed=100 * run + next(questions)))
        engine.settle()
        return {"seconds": seconds, "had": had}

    def start(tier):
        daemon.start(key, f"--tier={tier}")
        engine.go_on()
        engine.first_token(speed.tokens_of(500, seed=6))

    def counted():
        (tier,) = daemon.ctl("tier")["tiers"]
        return {"bytes": int(tier["loaded_bytes"]), "not_worth": int(tier.get("not_worth_blocks", 0))}

    with tempfile.TemporaryDirectory(prefix="kvpool-results-", dir="/var/tmp") as folder, contextlib.ExitStack() as open_things:
        path = pathlib.Path(folder)
        (path / "key").write_text("5" * 64)
        (path / "key").chmod(0o600)
        key = f"--tier-key-file={path}/key"
        there = {"files": stores.Files(path, CAPACITY)}
        for where, kind in (("Redis", stores.Redis), ("bucket", stores.Bucket)):
            there[where] = open_things.enter_context(contextlib.closing(kind(path)))
        daemon = lab.Daemon(CAPACITY, key, *(f"--tier={store.tier}" for store in there.values()))
        open_things.callback(daemon.close)
        engine = _Vllm(daemon) if name == "vLLM" else _Other(name, daemon)
        open_things.callback(engine.end)
        engine.first_token(speed.tokens_of(500, seed=5))  # It is warm.
        ask(little)
        said = {"computed": ask(), "pool": ask()}
        daemon.end()  # What is cached goes below.
        engine.lost()
        for where, store in there.items():
            start(store.tier)
            said[where] = ask() | counted()
            daemon.kill()
            engine.lost()
        if name == "vLLM":
            # What a prefill takes, and what a load, has to be known.
            slow = stores.Throttled(there["Redis"].port, THROTTLED_BYTES_PER_SECOND)
            start(f"resp:127.0.0.1:{slow.port},write=evict")
            for prefill in range(40):
                engine.first_token(speed.tokens_of(256, seed=9000 + prefill))
            loaded = ask(little)
            said["throttled"] = ask() | counted() | {"little": loaded}
        return said
