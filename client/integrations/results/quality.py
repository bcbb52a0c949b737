"""Every policy at a quarter of the prompt, with models of two families: perplexity, passkeys, one key of several."""

import itertools

import pruning
from lab import MODELS

BUDGET, BLOCK = pruning.PROMPT // 4, 16
SCOPES = ("head", "sequence")  # What a prompt keeps: each KV head its own tokens, or all the same.
POLICIES = {  # What a row is called: (policy, parameters).
    "paged_eviction": ("paged_eviction", {}),
    "streaming_llm": ("streaming_llm", {}),
    "inverse_key_l2": ("inverse_key_l2", {}),
    "keydiff": ("keydiff", {}),
    "attention_mean": ("attention_mean", {"norm": "visible_queries"}),
    "hybrid": ("hybrid", {}),
    "h2o": ("h2o", {}),
    "roco": ("roco", {}),
    "tova": ("tova", {}),
    "snapkv": ("snapkv", {}),
    "cake": ("cake", {}),
    "sage_kv": ("sage_kv", {}),
    "caote over h2o": ("caote", {}),
    "fast_caote over h2o": ("fast_caote", {}),
    "graphkv over snapkv": ("graphkv", {}),
    "mpcache": ("mpcache", {}),
    "random": ("random", {}),
}
# No score of a token or of a head: every head keeps the same.
ONE_SCOPE = {"streaming_llm", "random"}
TEXTS = pruning.SEGMENTS[:4]
SAMPLES = 2  # Prompts at each depth.


def _cells(where):
    for model in MODELS:
        for place in where:
            cell = {"model": model, "block": BLOCK, **place}
            yield {**cell, "policy": "full", "budget": 0}
            for name, scope in itertools.product(POLICIES, SCOPES):
                if scope == "sequence" or name not in ONE_SCOPE:
                    policy, params = POLICIES[name]
                    yield {**cell, "name": name, "policy": policy, "params": params, "scope": scope, "budget": BUDGET}


def perplexity_cells():
    return _cells([{"text": name, "part": part} for name, part in TEXTS])


def retrieval_cells():
    return _cells([{"kind": kind, "depth": depth, "sample": sample}
                   for kind in ("passkey", "keys") for depth in pruning.DEPTHS for sample in range(SAMPLES)])
