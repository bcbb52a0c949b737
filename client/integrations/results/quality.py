"""Every policy at a quarter of the prompt, with models of two families: perplexity, passkeys, one key of several."""

import itertools
import pathlib
import subprocess
import sys
import tempfile
import time

import kvpool
import torch
from kvpool_transformers import train_gates, train_less
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import pruning
from lab import BIN, DIRECTORY, MODELS
from replay import Record
from texts import middle

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
    "lagkv": ("lagkv", {}),
    "leverage": ("leverage", {"rope": "weights"}),
    "compactor": ("compactor", {"rope": "weights"}),
    "rkv": ("rkv", {}),
    "qfilters": ("qfilters", {}),
    "triattention": ("triattention", {}),
    "expected_attention": ("expected_attention", {}),
    "chunkkv over snapkv": ("chunkkv", {}),
    "criticalkv over snapkv": ("criticalkv", {"norm": "l2"}),
    "kvzip": ("kvzip", {}),
    "kvzap, linear": ("kvzap", {"model": "linear"}),
    "kvzap, linear, sinks": ("kvzap", {"model": "linear"}),
    "kvzap, mlp": ("kvzap", {"model": "mlp"}),
    "kvzap, mlp, sinks": ("kvzap", {"model": "mlp"}),
    "fast_kvzip": ("fast_kvzip", {}),
    "fast_kvzip, recent=128": ("fast_kvzip", {"recent": 128}),
    "duo_attention": ("duo_attention", {"sinks": 16, "recent": 64}),
    "duo_attention, ada": ("duo_attention", {"sinks": 16, "recent": 64}),
    "random": ("random", {}),
}
# No score of a token or of a head: every head keeps the same.
ONE_SCOPE = {"streaming_llm", "random"}
# The KV heads of a layer share its budget, and one may keep all of the prompt: for models with several, each head its own tokens.
SHARED = {"duo_attention, ada": {"heads": "ada", "most": pruning.PROMPT}}
TEXTS = pruning.SEGMENTS[:2]
DEPTHS = pruning.DEPTHS[:5]
SAMPLES = 1  # Prompts at each depth.


CALIBRATION = ("Sense And Sensibility", 0.2, 2048)  # A text of which nothing is asked: its part, and tokens.
CALIBRATED = {  # What `kvpool-lab calibrate` is told, beside the model's shape.
    "qfilters": (),
    "triattention": (),
    "expected_attention": (f"position={pruning.PROMPT}", "future=512"),  # Of the prompt's own queries, as kvpress has it.
}


# Weights that are trained for a model, on windows of all of that text; the last two are not learned from.
GATES = {
    "kvzap, linear": train_gates.Training(policy="kvzap", model="linear"),
    "kvzap, mlp": train_gates.Training(policy="kvzap", model="mlp"),
    "fast_kvzip": train_gates.Training(policy="fast_kvzip"),
    "duo_attention": train_gates.Training(policy="duo_attention", steps=36, rate=0.05),
}
GATED = {name: (name, {}) for name in GATES} | {  # (Weights, what a cache is told besides).
    "fast_kvzip, recent=128": ("fast_kvzip", {}),
    "duo_attention, ada": ("duo_attention", {}),
    # Its own window, and sinks, which KVzip+ holds to be worth nothing.
    **{f"{name}, sinks": (name, {"protection": kvpool.Protection(first_tokens=4, last_tokens=128)}) for name in ("kvzap, linear", "kvzap, mlp")}}
GATE_WINDOWS, GATE_TOKENS, GATE_HELD = 18, 1024, 2
HEAD_WINDOWS, HEAD_TOKENS = 12, 512  # Of duo_attention, before passkeys are hidden in them.


def _rotated_back(queries, base):
    """[queries, q_heads, dim] at positions 0, 1, ...: as they were before RoPE, which turns halves together."""
    dim = queries.shape[2]
    angles = torch.arange(len(queries))[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = torch.cat([angles.cos()] * 2, 1)[:, None], torch.cat([angles.sin()] * 2, 1)[:, None]
    first, second = queries.chunk(2, 2)
    return queries * cos + torch.cat([second, -first], 2) * sin


def _rope_base(lab, cell):
    config = lab.model(cell).config.get_text_config()
    return config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]


def _frequencies(lab, cell):
    """[dim / 2], radians for each position."""
    dim = lab.facts(cell).head_dim
    return _rope_base(lab, cell) ** (-torch.arange(0, dim, 2) / dim)


def _attention_of_chunks(lab, cell, record, size=256, sinks=8, recent=4):
    """[layers, kv_heads, tokens]: what the tokens of a chunk attend of it, not causal and with no factor (Compactor); 0 for the ends."""
    kv_heads, found = lab.facts(cell).kv_heads, []
    for _, (query, key, _) in sorted(record.told.items()):
        mass = torch.zeros(key.shape[1:3])
        for first in range(sinks, key.shape[2] - recent, size):
            chunk = slice(first, min(first + size, key.shape[2] - recent))
            logits = torch.einsum("hgid,hjd->hgij", query[0, :, chunk].unflatten(0, (kv_heads, -1)).float(), key[0, :, chunk].float())
            mass[:, chunk] = logits.softmax(-1).sum(2).mean(1)
        found.append(mass)
    return torch.stack(found)


def _calibrated(lab, cell, told):
    """Weights by the queries that a record was told."""
    base = _rope_base(lab, cell)
    layers = [told[layer][0][0].transpose(0, 1).float() for layer in sorted(told)]  # Each [queries, q_heads, dim].
    if cell["policy"] != "qfilters":
        layers = [_rotated_back(layer, base) for layer in layers]
    with tempfile.TemporaryDirectory(prefix="kvpool-calibrate-") as directory:
        dump, weights = (pathlib.Path(directory) / name for name in ("queries.safetensors", "weights.safetensors"))
        save_file({"queries": torch.stack(layers)}, dump)
        params = (f"kv_heads={lab.facts(cell).kv_heads}", f"theta={base}", *CALIBRATED[cell["policy"]])
        subprocess.run([BIN / "kvpool-lab", "calibrate", f"--policy={cell['policy']}", f"--input={dump}", f"--weights={weights}",
                        *(f"--param={param}" for param in params)], check=True, capture_output=True)
        (values,) = load_file(weights).values()
        return values


def _of_another_text(lab, cell):
    name, part, tokens = CALIBRATION
    ids = torch.tensor([middle(lab.texts[name], lab.tokenizer(cell), tokens, part)])
    told = lab.once(("queries", cell["model"]), lambda: Record(lab.model(cell), lab.facts(cell), ids).told)
    return _calibrated(lab, cell, told)


def _projections(lab, cell):
    """[layers, kv_heads, dim, dim]: of the output projections of a kv head's query heads, the triangle that has their 2-norms."""
    facts, found = lab.facts(cell), []
    for index in facts.pooled:
        weight = lab.model(cell).model.layers[index].self_attn.o_proj.weight.detach().float()  # [hidden, q_heads * dim]
        heads = weight.unflatten(1, (facts.kv_heads, -1, facts.head_dim)).permute(1, 2, 0, 3)  # [kv_heads, group, hidden, dim]
        found.append(torch.linalg.qr(heads.flatten(1, 2) / heads.shape[1], mode="r").R)
    return torch.stack(found)


def _less(lab, cell):
    """Trained on another text than those that are measured, for what keydiff keeps."""
    name, part, _ = CALIBRATION
    size = LESS.prompt + LESS_QUERIES
    ids = torch.tensor(middle(lab.texts[name], lab.tokenizer(cell), LESS_TEXTS * size, part))
    model = AutoModelForCausalLM.from_pretrained(MODELS[cell["model"]][0], dtype=torch.float32)
    kernel, errors = train_less.train(model, ids.split(size), LESS)
    shares = sorted(less / dropping for dropping, less in errors)
    print(f"LESS leaves {shares[0]:.2f} to {shares[-1]:.2f} of the error of dropping, {shares[len(shares) // 2]:.2f} in the median layer", file=sys.stderr)
    return kernel


def gate_cells():
    return [{"model": model, "gates": name} for model in MODELS for name in GATES]


def _gates_path(cell, name):
    return DIRECTORY / f"{cell['model']}, {name}.safetensors"


def gates(lab, cell):
    """Trains them, and keeps them beside the figures: seconds of a processor, those of KVzip's scores apart, and what Trained says."""
    how, tokenize = GATES[cell["gates"]], lab.tokenizer(cell)

    def windows(count, tokens):
        return [middle(lab.texts[CALIBRATION[0]], tokenize, tokens, 0.02 + 0.9 * i / count) for i in range(count)]

    def load():
        torch.set_num_threads(1)
        return AutoModelForCausalLM.from_pretrained(MODELS[cell["model"]][0], dtype=torch.float32).eval()

    def observe():
        began, ask = time.process_time(), torch.tensor(tokenize(train_gates.REPEAT, special=False))
        seen = [train_gates.observe(model, torch.tensor(ids), ask, how.chunk) for ids in windows(GATE_WINDOWS, GATE_TOKENS)]
        return seen, time.process_time() - began

    model, observing = lab.once(("model in f32", cell["model"]), load), 0.0
    if how.policy != "duo_attention":
        seen, observing = lab.once(("record", "gates", cell["model"]), observe)
    began = time.process_time()
    if how.policy == "duo_attention":
        trained = train_gates.train_heads(model, [train_gates.hide_passkeys(lambda text: tokenize(text, special=False), ids, i)
                                                  for i, ids in enumerate(windows(HEAD_WINDOWS, HEAD_TOKENS))], how)
    else:
        trained = train_gates.train(model, seen, how, GATE_HELD)
    trained.save(_gates_path(cell, cell["gates"]))
    return {"observing": observing, "seconds": time.process_time() - began, "weights": len(trained.weights), "rank": trained.rank, "r2": trained.r2,
            "retrieval_heads": int((trained.weights >= 0.5).sum()) if how.policy == "duo_attention" else 0}


def options(lab, cell, record):
    """What a KvPoolCache is told for this cell's policy and disposition, of this prompt."""
    of_policy = _options(lab, cell, record)
    if cell.get("disposition") != "less":
        return of_policy
    return {**of_policy, "less": lab.once(("less", cell["model"]), lambda: _less(lab, cell))}


def _options(lab, cell, record):
    policy = cell["policy"]
    if policy == "expected_attention":
        if not hasattr(record, "expected"):
            record.expected = _calibrated(lab, cell, record.told)
        return {"weights": record.expected}
    if cell.get("name") in GATED:
        gates, protected = GATED[cell["name"]]
        return {"weights": load_file(_gates_path(cell, gates))["weights"], **protected}
    if policy in CALIBRATED:
        return {"weights": lab.once(("weights", cell["model"], policy), lambda: _of_another_text(lab, cell))}
    if policy == "criticalkv":
        return {"weights": lab.once(("weights", cell["model"], policy), lambda: _projections(lab, cell))}
    if policy == "leverage":
        return {"weights": _frequencies(lab, cell)}
    if policy == "compactor":
        if not hasattr(record, "chunks"):
            record.chunks = _attention_of_chunks(lab, cell, record)
        return {"weights": _frequencies(lab, cell), "signals": {"mass": record.chunks}}
    if policy == "kvzip":
        ask = lab.tokenizer(cell)("\n\nRepeat the previous context exactly.\n", special=False)
        if not hasattr(record, "repeated"):
            record.repeated = record.peak(lab.model(cell), lambda first: ask)
        return {"signals": {"peak": record.repeated}}
    return {}


DISPOSED = ("keydiff", "h2o", "snapkv", "chunkkv over snapkv")  # What becomes of tokens that leave is compared with these.
DISPOSITIONS = ("drop", "merge", "less")
LESS = train_less.Training(prompt=pruning.PROMPT, budget=BUDGET, rank=8, hidden=32, steps=64)
LESS_TEXTS, LESS_QUERIES = 8, 64  # As many windows of the text of CALIBRATION, and tokens behind the prompt of each.
LESS_TOKENS = BLOCK  # A KV head's state, with 64 dims, has as many bytes as 8.1 tokens in bf16; a budget is of whole blocks here.
LESS_OF = ("SmolLM2 135M", "keydiff")  # The features are trained for a model and for what a policy keeps.


def _disposed_cells(where):
    """Each KV head keeps its own tokens, since merging is within a head."""
    for place in where:
        for model in MODELS:
            cell = {"model": model, "block": BLOCK, **place}
            yield {**cell, "policy": "full", "budget": 0}
            for name, disposition in itertools.product(DISPOSED, DISPOSITIONS):
                if disposition == "less" and (model, name) != LESS_OF:
                    continue
                policy, params = POLICIES[name]
                budget = BUDGET - LESS_TOKENS if disposition == "less" else BUDGET
                yield {**cell, "name": name, "policy": policy, "params": params, "scope": "head", "budget": budget, "disposition": disposition}


# Equal bytes: (share of the prompt's, bits of what leaves). In low precision fewer tokens stay, so that all bytes are as many.
EQUAL_BYTES = ((4, 2), (3, 4), (2, 4))
EQUAL_DISPOSITIONS = ("drop", "merge", "low")
LOW_MODEL, LOW_DISPOSED = "SmolLM2 135M", ("keydiff", "h2o", "chunkkv over snapkv")


def low_budget(share, bits):
    """Whole blocks of tokens that stay in 16 bits where the others are in `bits`, in 1 / `share` of the prompt's bytes."""
    layout = kvpool.Layout.paged(layers=30, kv_heads=3, head_dim=64, tokens_per_block=BLOCK).low(bits)  # SmolLM2's.
    low = layout.record_bytes / (32 * 2 * 64 * 2)
    return int(pruning.PROMPT * (1 / share - low) / (1 - low)) // BLOCK * BLOCK


def _equal_bytes_cells(where):
    for place in where:
        cell = {"model": LOW_MODEL, "block": BLOCK, **place}
        yield {**cell, "policy": "full", "budget": 0}
        for name, (share, bits), disposition in itertools.product(LOW_DISPOSED, EQUAL_BYTES, EQUAL_DISPOSITIONS):
            policy, params = POLICIES[name]
            low = {"low_bits": bits} if disposition == "low" else {}
            yield {**cell, "name": name, "policy": policy, "params": params, "scope": "head", "disposition": disposition, "share": share, **low,
                   "budget": low_budget(share, bits) if low else pruning.PROMPT // share}


# Heads that share a budget: (what each keeps, tokens that stay in a head on average, the longest list and so the sequence's length at most).
# Of two neighbours as many stay in a head; the second and the third take as many bytes at most. Gemma 3 has one KV head a layer, which shares nothing.
HEADS = (("equal", BUDGET // 2, BUDGET // 2), ("ada", BUDGET // 2, BUDGET), ("equal", BUDGET, BUDGET), ("ada", BUDGET, 2 * BUDGET))
HEADS_MODEL, HEADS_OF = "SmolLM2 135M", ("keydiff", "snapkv", "chunkkv over snapkv", "compactor")


def _heads_cells(where):
    for place in where:
        cell = {"model": HEADS_MODEL, "block": BLOCK, **place}
        yield {**cell, "policy": "full", "budget": 0}
        for name, (heads, budget, most) in itertools.product(HEADS_OF, HEADS):
            policy, params = POLICIES[name]
            most = {"most": most} if heads == "ada" else {}
            yield {**cell, "name": name, "policy": policy, "params": params, "scope": "head", "heads": heads, "budget": budget, **most}


def _cells(where):
    for place in where:
        for model in MODELS:
            cell = {"model": model, "block": BLOCK, **place}
            yield {**cell, "policy": "full", "budget": 0}
            for name, scope in itertools.product(POLICIES, SCOPES):
                if name in SHARED and (scope == "sequence" or model != HEADS_MODEL):
                    continue
                if scope == "sequence" or name not in ONE_SCOPE:
                    policy, params = POLICIES[name]
                    yield {**cell, "name": name, "policy": policy, "params": params, "scope": scope, "budget": BUDGET, **SHARED.get(name, {})}


def _texts():
    return [{"text": name, "part": part} for name, part in TEXTS]


def _prompts(depths):
    return [{"kind": kind, "depth": depth, "sample": sample} for sample in range(SAMPLES) for depth in depths for kind in ("passkey", "keys")]


def perplexity_cells():
    return _cells(_texts())


def retrieval_cells():
    return _cells(_prompts(DEPTHS))


def disposition_perplexity_cells():
    return _disposed_cells(_texts())


def disposition_retrieval_cells():
    return _disposed_cells(_prompts(DEPTHS[::2]))


def low_perplexity_cells():
    """What is behind the prompt stays, in each cell as much."""
    return ({**cell, "prunes": False} for cell in _equal_bytes_cells(_texts()))


def low_retrieval_cells():
    return _equal_bytes_cells(_prompts(DEPTHS[::2]))


def heads_perplexity_cells():
    """What is behind the prompt stays: heads that share a budget would drop it token by token, the others whole blocks of it."""
    return ({**cell, "prunes": False} for cell in _heads_cells(_texts()))


def heads_retrieval_cells():
    return _heads_cells(_prompts(DEPTHS))


def perplexity(lab, cell):
    return pruning.perplexity(lab, cell, options)


def retrieval(lab, cell):
    return pruning.retrieval(lab, cell, options)
