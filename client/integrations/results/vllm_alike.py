"""vLLM on kvpool says what vLLM says: prompts of real text in each mode, compared token by token."""

import contextlib
import dataclasses
import pathlib
import random
import sys

import lab
import texts

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/engines"))
from models import adapter, eagle, llama, qwen3_next
from vllm_processes import Engine

PROMPTS = 200
ANSWER = 16
LENGTHS = (60, 240)  # Tokens of a prompt.
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
WAYS = ("computed here", "of another process, killed")


@dataclasses.dataclass(frozen=True)
class Mode:
    """settings: vLLM's. small: what makes a small model with random weights, which reads the bytes of the texts as tokens; None: Gemma 3 270M."""

    settings: dict = dataclasses.field(default_factory=dict)
    small: object = None
    connector: bool = False  # vLLM's own KV cache, with KvPoolConnector behind it.
    lora: bool = False
    drafts: bool = False  # EAGLE's, with a layer of their own.


def _llama():
    return llama(0, head_dim=32)


_ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
MODES = {
    "zero copy, drafts by EAGLE": Mode(small=_llama, drafts=True),
    "zero copy, layers with a state": Mode({"dtype": "bfloat16", "block_size": None, "enable_prefix_caching": True}, small=qwen3_next),
    "zero copy, LoRA": Mode({"enable_lora": True, "max_lora_rank": 8}, small=_llama, lora=True),
    "connector, LoRA": Mode({"enable_lora": True, "max_lora_rank": 8}, small=_llama, lora=True, connector=True),
    "connector": Mode(_ONE_GROUP, connector=True),
    "zero copy": Mode(_ONE_GROUP),
    "zero copy, asynchronous scheduling": Mode({"async_scheduling": True, **_ONE_GROUP}),
    "zero copy, drafts by n-gram": Mode({"speculative_config": NGRAM, **_ONE_GROUP}),
    "zero copy, hybrid manager": Mode(),
}


def cells():
    return [{"mode": mode, "prefixes": way} for mode in MODES for way in WAYS]


def measure(here, cell):
    return here.once(("vllm alike", cell["mode"]), lambda: _run(here, cell["mode"]))[cell["prefixes"]]


def _prompts(here, small):
    """From all the books."""
    dice = random.Random(1)
    books = sorted(here.texts.items())
    tokenize = (lambda text: [1 + byte for byte in text.encode()]) if small else here.tokenize
    return [texts.middle(books[i % len(books)][1], tokenize, dice.randint(*LENGTHS), dice.uniform(0.1, 0.8)) for i in range(PROMPTS)]


def _made(directory, make):
    if not directory.exists():
        make()
    return directory


def _run(here, name):
    mode = MODES[name]
    asked = _prompts(here, mode.small)
    folder, settings, what = lab.DIRECTORY / "models", dict(mode.settings), {"prompts": asked, "tokens": ANSWER}
    model = lab.GEMMA
    if mode.small:
        model = folder / mode.small.__name__.strip("_")
        _made(model, lambda: mode.small().save_pretrained(model))
    if mode.drafts:
        settings["speculative_config"] = {"method": "eagle", "num_speculative_tokens": 3,
                                          "model": str(_made(folder / "eagle", lambda: eagle(folder / "eagle")))}
    if mode.lora:
        what["lora"] = ["adapter", str(_made(folder / "adapter", lambda: adapter(folder / "adapter")))]
    settings = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 2 << 30, **settings}

    def start(*arguments, **more):
        engine = Engine(model, *arguments, **settings, **more)
        ends.callback(engine.kill)
        return engine

    def of_stock():
        """With an empty cache, and with what that has left there: the last bits of bfloat16 follow from what is computed together."""
        stock = start()
        said = [stock.ask("generate", **what) for _ in (WAYS if settings["dtype"] == "bfloat16" else WAYS[:1])]
        stock.kill()
        return [said[0], said[-1]]

    with contextlib.ExitStack() as ends:
        own = here.once(("vllm alike own", str(model), str(settings), mode.lora), of_stock)
        daemon = lab.Daemon("4GiB")
        ends.callback(daemon.close)
        pool = {"socket": daemon.socket, "guaranteed_blocks": 100, "match_timeout": 60, "open_timeout": 120}
        first, second = (start(connector=pool) if mode.connector else start(pool) for _ in range(2))
        said = [first.ask("generate", **what)]
        first.ask("flush")
        first.kill()
        said.append(second.ask("generate", **what))
    return {way: {"prompts": len(asked), "equal": sum(a == b for a, b in zip(ours["tokens"], theirs["tokens"])),
                  "tokens": sum(len(prompt) for prompt in asked), "cached": sum(ours["cached"])}
            for way, ours, theirs in zip(WAYS, said, own)}
