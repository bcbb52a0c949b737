"""What a selection of blocks for sparse attention holds of the attention that its queries pay."""

import itertools

import kvpool
import numpy as np
import torch

from lab import MODELS, Daemon
from pruning import PROMPT, SEGMENTS
from replay import Record
from texts import middle

BLOCK, QUERIES, STEP = 16, 16, 4  # Tokens of a block; queries, each so many tokens behind the one before.
KNOWN = PROMPT - QUERIES * STEP  # Tokens that are selected from: all queries are behind them.
SHARES = (8, 4)  # A plane selects one in so many blocks.
TEXTS = SEGMENTS[:2]
WAYS = ("Select", "greatest bound of the heads", "first and newest blocks", "best possible")


def cells():
    for model, (text, part), share in itertools.product(MODELS, TEXTS, SHARES):
        yield {"model": model, "text": text, "part": part, "share": share}


def measure(lab, cell):
    """By way: the share of attention to the first KNOWN tokens that the selected blocks have, the mean over queries, heads and layers."""
    facts = lab.facts({**cell, "block": BLOCK})
    ids = torch.tensor([middle(lab.texts[cell["text"]], lab.tokenizer(cell), PROMPT, cell["part"])])
    record = lab.once(("record", cell["model"], cell["text"], cell["part"]), lambda: Record(lab.model(cell), facts, ids))
    told = [record.told[index] for index in range(len(facts.pooled))]
    keys = torch.stack([key[0, :, :KNOWN].float() for _, key, _ in told])  # [layers, kv_heads, tokens, dim]
    queries = torch.stack([query[0, :, KNOWN::STEP].float() for query, _, _ in told])  # [layers, q_heads, queries, dim]
    layers, kv_heads, _, dim = keys.shape
    grouped = queries.unflatten(1, (kv_heads, -1))
    scaling = told[0][2]
    attention = (torch.einsum("lhgqd,lhtd->lhgqt", grouped, keys) * scaling).softmax(-1)
    mass = attention.unflatten(-1, (-1, BLOCK)).sum(-1).numpy()  # [layers, kv_heads, group, queries, blocks]
    blocks = mass.shape[-1]
    budget = blocks // cell["share"]

    def ends_and(best):
        """[layers, kv_heads, queries, budget]: the first and the last block, and the best of the others."""
        among = np.argsort(-best[..., 1:-1], axis=-1)[..., :budget - 2] + 1
        return np.concatenate([np.broadcast_to([0, blocks - 1], (*among.shape[:-1], 2)), among], -1)

    in_blocks = keys.unflatten(2, (-1, BLOCK))
    least, greatest = in_blocks.amin(3)[:, :, None], in_blocks.amax(3)[:, :, None]
    each = [grouped[:, :, head, :, None] for head in range(grouped.shape[2])]  # Each [layers, kv_heads, queries, 1, dim].
    bounds = torch.stack([torch.maximum(query * least, query * greatest).sum(-1) for query in each])
    newest = np.broadcast_to(np.arange(blocks), mass[:, :, 0].shape)
    chosen = dict(zip(WAYS, (
        _selected(lab, cell, keys, queries, scaling, budget),
        ends_and(bounds.amax(0).numpy()),
        ends_and(newest),
        ends_and(mass.sum(2)))))
    return {way: float(np.take_along_axis(mass, at[:, :, None], -1).sum(-1).mean()) for way, at in chosen.items()}


def _selected(lab, cell, keys, queries, scaling, budget):
    """[layers, kv_heads, queries, budget]: what a daemon answers, query by query."""
    layers, kv_heads, tokens, dim = keys.shape
    daemon = lab.once(("daemon",), lambda: Daemon("1GiB"))
    layout = kvpool.Layout.paged(layers=layers, kv_heads=kv_heads, head_dim=dim, tokens_per_block=BLOCK, dtype="float32")
    with kvpool.Session(layout, f"keys of {cell['model']}", socket=daemon.socket, magazine_blocks=0) as session:
        with session.lease(tokens // BLOCK) as blocks:
            pool = np.asarray(session.k(blocks=session.max_blocks))  # [blocks, layers, tokens, kv_heads, dim]
            pool[blocks.ids] = keys.unflatten(2, (-1, BLOCK)).permute(2, 0, 3, 1, 4).numpy()
            table, answers = kvpool.BlockTable(blocks), []
            for query in range(queries.shape[2]):
                window = kvpool.QueryWindow(np.ascontiguousarray(queries[:, None, :, query].numpy()), scale=scaling)
                answers.append(session.select(table, window, budget_blocks=budget).wait().positions.astype(int))
    return np.stack(answers, 1).reshape(layers, kv_heads, len(answers), budget)
