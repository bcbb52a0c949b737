"""kvpress, where it has the same method: scores of the daemon and of kvpress for the same K and V."""

import os
import pathlib
import subprocess
import sys
import tempfile

import kvpool
import numpy as np

import lab

PYTHON = os.environ.get("KVPOOL_KVPRESS_PYTHON")
METHODS = {  # kvpress's class: (policy, parameters, what is told beside K and V, how the definitions differ)
    "KnormPress": ("inverse_key_l2", {}, (), "both −‖K‖"),
    "KeyDiffPress": ("keydiff", {}, (), "both −cos to the mean of K/‖K‖"),
    "SnapKVPress": ("snapkv", {}, ("window",), "the window's own tokens: theirs greatest + 1, ours protected whatever their score"),
    "PyramidKVPress": ("pyramidkv", {}, ("window",), "as SnapKV; of budgets by layer see below"),
    "TOVAPress": ("tova", {}, ("latest",), "the newest token: theirs greatest + 1, ours not protected"),
    "ObservedAttentionPress": ("attention_mean", {"norm": "visible_queries"}, ("mass",),
                               "both the sum over queries by how many could see the token; h2o keeps the sum"),
    "StreamingLLMPress": ("streaming_llm", {}, (), "theirs 1 or 0 by what stays, ours by age: what stays is compared"),
    "ChunkKVPress": ("chunkkv", {"host": "inverse_key_l2"}, (), "both of KnormPress, in chunks of 20 tokens for a layer's heads together: what stays "
                     "is compared"),
    "CriticalKVPress": ("criticalkv", {"host": "inverse_key_l2"}, ("output",), "both of KnormPress, by the 1-norm behind the output projection: what "
                        "stays is compared"),
    "AdaKVPress": ("inverse_key_l2", {}, (), "both of KnormPress, with a fifth of the budget for each head; ours is a compaction's `HEADS_ADA`: what stays "
                   "of all heads and layers together is compared"),
    "LagKVPress": ("lagkv", {}, (), "both by partitions of 128; theirs are ranks within one, where a partition's end stays"),
    "ExpectedAttentionPress": ("expected_attention", {}, ("expected",), "both by mean and covariance of this prompt's queries; theirs adds 1 to the "
                               "greatest of all heads for the sinks"),
    "QFilterPress": ("qfilters", {}, ("filters",), "both −filter·k, here with random filters"),
    "KVzapPress": ("kvzap", {}, ("hidden", "surrogate"), "both a network of hidden states, here with random weights"),
    "FastKVzipPress": ("fast_kvzip", {}, ("hidden", "gates"), "both a gate over hidden states, here with random weights: what stays of all heads and "
                       "layers together is compared"),
    "KVzipPress": ("kvzip", {}, ("peak",), "both the greatest attention of two repetitions of 500 tokens, which ours is told: what stays of all heads and "
                   "layers together is compared"),
    "DuoAttentionPress": ("duo_attention", {}, ("patterns",), "both by a weight for each head, here random: what stays of all heads and layers together "
                          "is compared"),
    "LeverageScorePress": ("leverage", {}, (), "both by 48 columns of one sketch, which theirs draws at random; theirs with z over a layer's heads, here "
                           "over one"),
    "CompactorPress": ("compactor", {}, ("chunks",), "as LeverageScorePress, and by the attention within four even chunks, which ours is told; a chunk that is not full "
                       "attends to padding with theirs; the ends of the prompt stay with both"),
}
SIGNALS = {"output": "weights", "surrogate": "weights", "expected": "weights", "filters": "weights", "gates": "weights", "patterns": "weights",
           "chunks": "mass"}  # An array that is told under another name than its own.
OF_LAYER = {"TOVAPress", "ChunkKVPress"}  # Theirs is the same for all heads of a layer; ours is too, where a layer is pruned as one.
# Theirs has one budget for all heads and layers. The first and last tokens stay, by a score of theirs and protected here.
SHARED = {"FastKVzipPress": (4, 20), "KVzipPress": (4, 0), "DuoAttentionPress": (0, 0), "AdaKVPress": (0, 0)}
CHOICES = {"StreamingLLMPress", "ChunkKVPress", "CriticalKVPress", *SHARED}  # Theirs is 1 for what stays.
UNSEEN = {"SnapKVPress": 64, "PyramidKVPress": 64, "TOVAPress": 1, "CompactorPress": 4}  # Last tokens whose score is a definition of its own.
SINKS = {"ExpectedAttentionPress": 4, "CompactorPress": 8}  # First tokens, likewise.


def cells():
    """None, and a line that says why, without kvpress."""
    if PYTHON is None:
        print("kvpress: not measured: it wants another Transformers, in an environment that tests/engines.sh --kvpress makes",
              file=sys.stderr)
        return []
    return [{"press": press} for press in METHODS]


def _of_kvpress():
    """K, V, what an engine tells of attention, and scores, as press_scores.py has made them."""
    with tempfile.TemporaryDirectory(prefix="kvpool-presses-") as directory:
        path = pathlib.Path(directory) / "scores.npz"
        subprocess.run([PYTHON, pathlib.Path(__file__).with_name("press_scores.py"), path], check=True)
        return dict(np.load(path))


def _cached(daemon, arrays):
    """(session, a live sequence in it that has these K and V)"""
    layers, heads, tokens, dim = arrays["keys"].shape
    layout = kvpool.Layout.paged(layers=layers, kv_heads=heads, head_dim=dim, tokens_per_block=16, dtype="float32")
    session = kvpool.Session(layout, "kvpress", socket=daemon.socket)
    sequence = kvpool.LiveSequence(session)
    sequence.append(session.lease(-(-tokens // 16)))
    for name, pool in (("keys", session.k), ("values", session.v)):
        pool = np.asarray(pool(blocks=session.max_blocks))  # [blocks, layers, tokens, heads, dim]
        by_token = arrays[name].transpose(2, 0, 1, 3)
        for i, block in enumerate(sequence.ids):
            part = by_token[16 * i:16 * i + 16]
            pool[block, :, :len(part)] = part.transpose(1, 0, 2, 3)
    sequence.extend(range(tokens))
    return session, sequence


def _budgets(session, arrays):
    """By layer, kvpool's and kvpress's: theirs is beside the window, of which kvpool's tells."""
    theirs, window, tokens = arrays["budgets"], int(arrays["window_tokens"]), int(arrays["pyramid_tokens"])
    plan = session.plan_budgets("pyramid", int(tokens * arrays["kept"]) + window, len(theirs),
                                {"window_tokens": window, "sequence_tokens": tokens})
    return [int(budget) - window for budget in plan.budget_tokens], theirs.tolist()


def _signal(session, name, array):
    """In blocks where it is larger than a message takes."""
    per_layer, per_head = name != "weights", name not in ("weights", "hidden")
    if array.nbytes <= 1 << 20:
        return kvpool.Signal(name, array, per_layer=per_layer, per_head=per_head)
    blocks = kvpool.BlockArray(session, array.nbytes)
    blocks.write(np.ascontiguousarray(array))
    return kvpool.Signal(name, blocks, per_layer=per_layer, per_head=per_head, nbytes=0 if per_layer else array.nbytes)


def _scores(session, sequence, press, arrays):
    """[layers, kv_heads, tokens] by the daemon."""
    policy, params, told, _ = METHODS[press]
    # [layers, q_heads, queries, dim] becomes [layers, queries, q_heads, dim].
    window = kvpool.QueryWindow(np.ascontiguousarray(arrays["window"].transpose(0, 2, 1, 3))) if "window" in told else None
    signals = [_signal(session, SIGNALS.get(name, name), arrays[name]) for name in told if name != "window"]
    scorer = kvpool.Scorer(policy, params, signals=signals, window=window, hidden_dim=arrays["hidden"].shape[-1] if "hidden" in told else 0)
    scores = sequence.score(scorer, scope="head", token_scores=True, fresh=True,
                            budget_tokens=int(arrays["keys"].shape[2] * arrays["kept"])).token_scores.reshape(arrays[press].shape)
    if press in OF_LAYER:
        scores = np.repeat(scores.mean(1, keepdims=True), scores.shape[1], axis=1)
    return scores


def _stays(daemon, press, arrays):
    """[layers, kv_heads, tokens], 1 where a token stays in a compaction whose heads share a budget."""
    _, sequence = _cached(daemon, arrays)
    stays = np.zeros(arrays[press].shape)
    tokens = stays.shape[2]
    compacted = sequence.compact(scorer=kvpool.Scorer(METHODS[press][0]), scope="head", heads="ada", budget_tokens=int(tokens * arrays["kept"]),
                                 ada=kvpool.AdaTerms(least_share=0.2, most_tokens=tokens))
    for head, places, count in zip(stays.reshape(-1, tokens), compacted.kept_positions, compacted.counts, strict=True):
        head[list(places[:count])] = 1
    return stays


def _ranks(scores):
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(len(scores))
    return ranks


def measure(here, cell):
    """The greatest difference by the greatest score of the head, the least rank correlation of a head, and tokens that stay
    with one only."""
    press = cell["press"]
    arrays = here.once(("kvpress",), _of_kvpress)
    daemon = here.once(("kvpress daemon",), lambda: lab.Daemon("64MiB"))
    session, sequence = here.once(("kvpress sequence",), lambda: _cached(daemon, arrays))
    first, last = SINKS.get(press, 0), arrays["keys"].shape[2] - UNSEEN.get(press, 0)
    seen = last - first
    told = _stays(daemon, press, arrays) if press == "AdaKVPress" else _scores(session, sequence, press, arrays)
    ours, theirs = (array[..., first:last].reshape(-1, seen).astype(np.float64) for array in (told, arrays[press]))
    value = {"heads": len(ours), "tokens": seen, "kept": 0, "others": 0}
    if press in SHARED:
        at_start, at_end = SHARED[press]
        ours[:, :at_start] = ours[:, seen - at_end:] = np.inf
        ours, theirs = ours.reshape(1, -1), theirs.reshape(1, -1)
    if press == "PyramidKVPress":
        value["budgets"], value["their_budgets"] = _budgets(session, arrays)
    if press in CHOICES:
        counts = theirs.sum(1).astype(int)  # What stays with them.
    else:
        counts = [int(seen * arrays["kept"])] * len(ours)
        value["difference"] = float((abs(ours - theirs).max(1) / abs(theirs).max(1)).max())
        value["correlation"] = min(float(np.corrcoef(_ranks(a), _ranks(b))[0, 1]) for a, b in zip(ours, theirs))
    for a, b, count in zip(ours, theirs, counts):
        stays = set(np.argsort(-a, kind="stable")[:count])
        value["kept"] += int(count)
        value["others"] += len(stays - set(np.argsort(-b, kind="stable")[:count]))
    return value
