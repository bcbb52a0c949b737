"""vLLM on the pool against vLLM with its own cache: how soon it answers, how fast, at what cost, in how much memory.

Engines are processes of the environment that has vLLM. Those that are compared run on one core (VLLM_CORE), in turn: while one works, the
other waits for its next line. What else the machine does meets both.
"""

import os
import pathlib
import random
import sys

import lab

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/engines"))
from vllm_processes import PYTHON, Engine, prompts, whole_blocks

CORE = os.environ.get("VLLM_CORE", "1")
BENCH = pathlib.Path(__file__).parent / "vllm_bench.py"
PREFIXES = (1000, 2000, 4000)
QUESTION = 16
RUNS = 5
BATCHES = (1, 8, 32)
ANSWER = 128  # Tokens of an answer, where tokens a second are measured.
# By batch: tokens of a prompt, turns, and steps of the one before as many of the other. A processor without instructions for bfloat16 computes
# some 15 tokens a second, whatever the batch.
CONTEXTS, TURNS, SLICES = {1: 256, 8: 256, 32: 64}, {1: 8, 8: 2, 32: 1}, {1: 4, 8: 4, 32: 2}
SERVED = 2000  # Requests of a stream, in turns of 50.


def available():
    return PYTHON is not None


def _engine(pool=None, model=None, **more):
    """Gemma 3 270M, unless another model is given."""
    given = {"dtype": "bfloat16", "max_model_len": 8192, "kv_cache_memory_bytes": 1 << 30, "disable_hybrid_kv_cache_manager": True, **more}
    return Engine(lab.GEMMA if model is None else model, pool, script=BENCH, under=("taskset", "-c", CORE), **given)


def _in(daemon, blocks=300, **more):
    # A pool grows behind demand: this is what an engine has from the start.
    return {"socket": daemon.socket, "guaranteed_blocks": blocks, **more}


def pooled(daemon, **options):
    return _engine(_in(daemon, **options))


# ---- Time to first token


def ttft_cells():
    for prefix in PREFIXES:
        for run in range(RUNS):
            for way in ("cold", "cold, saving", "own cache", "other process"):
                yield {"prefix": prefix, "run": run, "way": way}


def _random(count, seed):
    dice = random.Random(seed)
    return [dice.randrange(1000, 20_000) for _ in range(count)]


def ttft(here, cell):
    """Seconds until the first token behind a prefix and a question."""
    prefix, run, way = cell["prefix"], cell["run"], cell["way"]
    daemon = here.once(("vllm ttft daemon",), lambda: lab.Daemon("2GiB"))
    shared = _random(prefix, seed=prefix)
    if way in ("cold", "own cache"):
        engine = here.once(("vllm ttft own",), _engine)
    else:
        engine = here.once(("vllm ttft pool",), lambda: _engine(_in(daemon)))
    here.once(("vllm ttft warm", way), lambda: engine.ask("first_token", prompt=_random(500, seed=5)))
    if way == "cold":
        engine.ask("reset")
    elif way == "cold, saving":
        shared = _random(prefix, seed=prefix + 10 + run)
    elif way == "own cache":
        engine.ask("first_token", prompt=shared + [5])
    else:
        here.once(("vllm ttft prefix", prefix), lambda: _computed_by_another(daemon, shared))
    return engine.ask("first_token", prompt=shared + _random(QUESTION, seed=1000 * run + len(way)))


def _computed_by_another(daemon, prompt):
    other = _engine(_in(daemon, 10))
    other.ask("first_token", prompt=prompt)
    other.ask("flush")
    other.kill()


# ---- Tokens a second


def rate_cells():
    return [{"batch": batch, "run": run} for run in range(3) for batch in BATCHES]


def rate(here, cell):
    """Decoding by both, a few steps of the one, then of the other."""
    daemon = here.once(("vllm rate daemon",), lambda: lab.Daemon("2GiB"))
    both = {"own": here.once(("vllm rate own",), _engine), "pool": here.once(("vllm rate pool",), lambda: _engine(_in(daemon)))}
    times = {name: [] for name in both}
    batch = cell["batch"]
    for turn in range(TURNS[batch]):
        asked = [_random(CONTEXTS[batch], seed=100 * cell["run"] + 10 * turn + i) for i in range(batch)]
        for engine in both.values():
            engine.ask("begin", prompts=asked, tokens=ANSWER + 1)
            engine.ask("step", count=1)  # All prompts at once: not what is measured here.
        left = True
        while left:
            said = {name: both[name].ask("step", count=SLICES[batch]) for name in (both if len(times["own"]) % 2 else reversed(both))}
            for name in both:
                times[name].append([said[name]["tokens"], said[name]["wall"], said[name]["cpu"]])
            left = said["own"]["left"]
            if left != said["pool"]["left"]:
                raise RuntimeError("the two are not at the same step")
    return times


# ---- Block pools


def stream_cells():
    return [{"turn": turn, "pool": pool} for turn in range(SERVED // 50) for pool in ("own", "kvpool")]


def stream(here, cell):
    """Fifty requests of a stream, by a scheduler whose model takes no time."""
    from models import llama
    model = lab.DIRECTORY / "tiny"
    if not model.exists():
        llama(0, head_dim=32).save_pretrained(model)
    daemon = here.once(("vllm stream daemon",), lambda: lab.Daemon("512MiB"))
    given = {"model": model, "dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20, "without_model": True}
    if cell["pool"] == "own":
        engine = here.once(("vllm stream own",), lambda: _engine(None, **given))
    else:
        engine = here.once(("vllm stream pool",), lambda: _engine(_in(daemon, 2000), **given))
    here.once(("vllm stream warm", cell["pool"]), lambda: engine.ask("stream", prompts=prompts(50, seed=99), tokens=32, at_once=8))
    dice = random.Random(cell["turn"])
    common = prompts(20, seed=7, shortest=512, longest=512)
    asked = [common[min(int(dice.paretovariate(0.8)) - 1, 19)] + [dice.randrange(1, 512) for _ in range(128)] for _ in range(50)]
    return engine.ask("stream", prompts=asked, tokens=32, at_once=8)


# ---- Memory


def memory_cells():
    return [{"tokens": tokens, "sharing": sharing} for tokens in (1000, 4000) for sharing in (False, True)]


def memory(here, cell):
    """What two engines hold while each has the same prompt in use."""
    daemon = lab.Daemon("2GiB")
    prompt = _random(cell["tokens"], seed=cell["tokens"])
    own, first, second = _engine(), _engine(_in(daemon, 100)), _engine(_in(daemon, 100))
    try:
        for engine, salt in ((own, None), (first, None), (second, None if cell["sharing"] else "another")):
            engine.ask("begin", prompts=[prompt], tokens=8, salt=salt)
            while engine.ask("step", count=1)["tokens"] == 0:
                pass
            engine.ask("flush") if engine is not own else None
        held = [engine.ask("held") for engine in (own, first, second)]
        (space,) = daemon.ctl("spaces")["spaces"]
        # Blocks that both have are sealed, and counted twice by their holders.
        both = held[1]["blocks"] + held[2]["blocks"] - (whole_blocks(prompt) // 32 if cell["sharing"] else 0)
        return {"own": 2 * held[0]["blocks"] * held[0]["block_bytes"], "pool": both * held[1]["block_bytes"],
                "sealed": int(space["blocks"].get("sealed", 0)), "leased": int(space["blocks"].get("leased", 0)),
                "block_bytes": held[1]["block_bytes"]}
    finally:
        for engine in (own, first, second):
            engine.kill()
        daemon.close()
