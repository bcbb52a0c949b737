"""Time to first token of a prompt that is computed, found in the pool, and brought up from files below it (kvpoold --tier)."""

import lab
import speed
import vllm_speed
from vllm_processes import await_detached, await_shared

PREFIX = 4000
RUNS = 5
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
    """{way: {"seconds": until the first token behind a prefix and a question, "had": tokens that were not computed}}, and how many blocks
    came up."""
    name, run = cell["engine"], cell["run"]
    shared = speed.tokens_of(PREFIX, seed=7000 + run)

    def ask(question):
        seconds, had = engine.first_token(shared + speed.tokens_of(speed.QUESTION, seed=100 * run + question))
        engine.settle()
        return {"seconds": seconds, "had": had}

    daemon = lab.Daemon(CAPACITY, tier=CAPACITY)
    engine = _Vllm(daemon) if name == "vLLM" else _Other(name, daemon)
    try:
        engine.first_token(speed.tokens_of(500, seed=5))  # It is warm.
        said = {"computed": ask(1), "pool": ask(2)}
        daemon.end()  # What is cached goes below.
        engine.lost()
        daemon.start()
        engine.go_on()
        engine.first_token(speed.tokens_of(500, seed=6))
        said["files"] = ask(3)
        (tier,) = daemon.ctl("tier")["tiers"]
        return said | {"promoted": int(tier["promoted_blocks"]), "block_bytes": int(tier["loaded_bytes"]) // max(1, int(tier["loaded"]))}
    finally:
        engine.end()
        daemon.close()
