"""Time to first token with a shared prefix, memory of two engines, decoding under a budget."""

import multiprocessing
import signal
import statistics
import time

import torch
from kvpool_llama_cpp import Engine
from kvpool_transformers import KvPoolCache, open_session
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import lab

PREFIXES = (1000, 2000, 4000)
QUESTION = 16  # Tokens behind the prefix, others in each run.
RUNS = 3  # Each way, in turn.
WAYS = ("cold", "cold, saving", "own cache", "other process")
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
BUDGET = 1024
STEPS = 32


def all_global():
    """As large as Gemma 3 270M but for the embedding, and all of its layers attend to all: weights at random.

    They are larger than by default, with which the answer to anything is one token over and over.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32_768, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32_768, initializer_range=0.06,
        bos_token_id=None, eos_token_id=None, pad_token_id=0)).to(torch.bfloat16).eval()


def tokens_of(count, seed):
    return torch.randint(1000, 20_000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- Engines: each has what it takes to time one prompt


class _LlamaCpp:
    def __init__(self, socket, wait_ms=0):
        pool = None if socket is None else {"socket": socket, "wait_ms": wait_ms}
        self.engine = Engine(lab.GGUF, pool=pool, n_ctx=max(PREFIXES) + 512, threads=1)

    def first_token(self, tokens, keep):
        if not keep:
            self.engine.reset()
        began = time.monotonic()
        self.engine.generate(tokens, 1)
        return time.monotonic() - began, self.engine.reused + self.engine.found

    def finish(self):
        if self.engine.cache is not None:
            self.engine.cache.session.flush()


class _Transformers:
    def __init__(self, socket, wait_ms=0):
        self.model, self.session, self._own, self._wait_ms = all_global(), None, None, wait_ms
        if socket is not None:
            self.session = open_session(self.model, socket=socket, magazine_blocks=0)

    def first_token(self, tokens, keep):
        began = time.monotonic()
        if self.session is not None:
            cache = KvPoolCache(self.session, prompt=tokens, wait_ms=self._wait_ms)
            has = cache.shared
        else:
            if not keep or self._own is None:
                self._own = (DynamicCache(), [])
            cache, had = self._own
            has = next((i for i, (ours, theirs) in enumerate(zip(had, tokens)) if ours != theirs), len(had))
            cache.crop(has - len(had))  # What is behind it goes; in number.
            self._own = (cache, tokens)
        with torch.no_grad():
            self.model(torch.tensor([tokens[has:]]), past_key_values=cache, logits_to_keep=1).logits.argmax()
        took = time.monotonic() - began
        if self.session is not None:
            cache.release()
        return took, has

    def finish(self):
        self.session.flush()


ENGINES = {"llama.cpp": _LlamaCpp, "Transformers": _Transformers}


def _compute(name, socket, prompts, ready):
    """Another process: computes prompts, says so, and waits for its end."""
    engine = ENGINES[name](socket)
    for tokens in prompts:
        engine.first_token(tokens, keep=False)
    engine.finish()
    ready.set()
    signal.pause()


def other_process(name, socket, prompts, kill=True):
    """Has another process compute prompts; kills it then, or returns it."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_compute, args=(name, socket, prompts, ready), daemon=True)
    process.start()
    while not ready.wait(1):
        if not process.is_alive():
            raise RuntimeError(f"{name}: the other process ended with {process.exitcode}")
    if kill:
        process.kill()
        process.join()
    return process


# ---- Time to first token


def ttft_cells():
    for name in ENGINES:
        for prefix in PREFIXES:
            for run in range(RUNS):
                for way in WAYS:
                    yield {"engine": name, "prefix": prefix, "run": run, "way": way}


def ttft(here, cell):
    """Seconds until the first token behind a prefix and a question."""
    name, prefix, run = cell["engine"], cell["prefix"], cell["run"]
    shared = tokens_of(prefix, seed=prefix)
    tokens = shared + tokens_of(QUESTION, seed=1000 + run)
    daemon = here.once(("ttft daemon", name), lambda: lab.Daemon("2GiB"))
    if cell["way"] in ("cold", "own cache"):
        engine = here.once(("ttft own", name), lambda: ENGINES[name](None))
        if cell["way"] == "own cache":
            tokens[-QUESTION:] = tokens_of(QUESTION, seed=2000 + run)  # What was asked before is not what is asked now.
            if engine.first_token(shared + [5], keep=True)[1] > prefix:
                raise RuntimeError("the question was asked before")
        seconds, has = engine.first_token(tokens, keep=cell["way"] == "own cache")
    else:
        engine = here.once(("ttft pool", name), lambda: ENGINES[name](daemon.socket))
        if cell["way"] == "cold, saving":
            tokens = tokens_of(prefix + QUESTION, seed=prefix + 10 + run)
        else:
            here.once(("ttft prefix", name, prefix), lambda: other_process(name, daemon.socket, [shared]))
        seconds, has = engine.first_token(tokens, keep=False)
    return {"seconds": seconds, "had": has}


# ---- Memory


def memory_cells():
    return [{"sharing": sharing, "tokens": tokens} for tokens in (1000, 4000) for sharing in (False, True)]


def memory(here, cell):
    """Bytes of K and V that two engines hold, each with the same prompt in use: of a pool, and had each its own cache."""
    model = here.once(("all global",), all_global)
    daemon = lab.Daemon("1GiB")
    tokens = tokens_of(cell["tokens"], seed=1)
    keys = model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    with open_session(model, socket=daemon.socket, magazine_blocks=0) as first, \
            open_session(model, socket=daemon.socket, magazine_blocks=0) as second, torch.no_grad():
        caches = []
        for salt, session in ((b"", first), (b"" if cell["sharing"] else b"other", second)):
            caches.append(KvPoolCache(session, prompt=tokens, salt=salt))
            model(torch.tensor([tokens[caches[-1].shared:]]), past_key_values=caches[-1], logits_to_keep=1)
            caches[-1].settle()
            session.flush()
        (space,) = daemon.ctl("spaces")["spaces"]
        held = sum(int(space["blocks"].get(state, 0)) for state in ("leased", "sealed"))
        value = {"blocks": held, "bytes": held * int(space["block_stride_bytes"]),
                 "own_caches": 2 * 2 * 2 * keys * cell["tokens"], "shared": caches[1].shared}
        for cache in caches:
            cache.release()
    daemon.close()
    return value


# ---- Decoding


def decode_cells():
    for run in range(RUNS):
        for context in CONTEXTS:
            for cache in ("own", "pool", f"paged_eviction {BUDGET}"):
                yield {"context": context, "cache": cache, "run": run}


def decode(here, cell):
    """Mean seconds of a token behind a context. K and V of the context are made up: their values take no time."""
    model = here.once(("all global",), all_global)
    daemon = here.once(("decode daemon",), lambda: lab.Daemon("2GiB"))
    session = here.once(("decode session",), lambda: open_session(
        model, socket=daemon.socket, magazine_blocks=0, guaranteed_blocks=max(CONTEXTS) // 16 + 2 * BUDGET // 16))
    config, context = model.config, cell["context"]
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    if cell["cache"] == "own":
        cache = DynamicCache()
    else:
        held = {"policy": "paged_eviction", "budget": BUDGET} if cell["cache"] != "pool" else {}
        cache = KvPoolCache(session, seal=False, **held)
        cache.tokens_come(torch.zeros(1, context, dtype=torch.long))
    torch.manual_seed(context)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), layer)
    times = []
    with torch.no_grad():
        for _ in range(STEPS + 2):
            began = time.monotonic()
            model(torch.tensor([[5]]), past_key_values=cache)
            if cell["cache"] != "own":
                cache.settle()
            times.append(time.monotonic() - began)
    resident = context + STEPS + 2 if cell["cache"] == "own" else cache.resident
    if cell["cache"] != "own":
        cache.release()
    # The mean, not the median: a block is dropped at one token in sixteen, and that counts.
    return {"seconds": statistics.fmean(times[2:]), "resident": resident}
