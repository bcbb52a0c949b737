"""Trains the weights of policies that foresee what a model needs of its cache: kvzap, fast_kvzip and duo_attention, for any model
that open_session takes. The model is frozen. On a CPU it takes minutes for a small model.

    python -m kvpool_transformers.train_gates --model smollm2 --text text.txt --policy kvzap --output kvzap.safetensors
    KvPoolCache(session, policy="kvzap", params={"model": "linear"}, weights=load_file("kvzap.safetensors")["weights"], budget=1024)

kvzap and fast_kvzip learn what KVzip says of a text (arXiv 2505.23416): the model is made to repeat it, chunk by chunk, and a token's score in
a KV head is the greatest attention that it gets of the repeating queries i of the head's query heads.

    kvzap       log(max_i a_ij |W_O v_j| / |x_i|), x being the input of attention, by ridge regression or a network of one hidden layer
                (arXiv 2601.07891, section 3)
    fast_kvzip  max_i a_ij, by binary cross entropy (arXiv 2601.17668, section 3)

duo_attention has a number a for each KV head, by which its attention is a full + (1 - a) streaming; sum |a| is made small while the last
hidden states stay where they were, on texts that hide passkeys and ask for them (arXiv 2410.10819, section 2.2).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import pathlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import binary_cross_entropy, gelu
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpool_transformers.model import pooled_layers

_NAME = "kvpool_train_gates"
REPEAT = "\n\nRepeat the previous context exactly.\n"
_MOST_DIM = 16  # Of fast_kvzip's queries and keys: kMostDim of fast_kvzip.h.


@dataclasses.dataclass(frozen=True)
class Training:
    """How weights are trained. `steps` and `rate` are Adam's, and `rows` are tokens of a step; a linear kvzap has none of them."""

    policy: str = "kvzap"  # Or "fast_kvzip", "duo_attention".
    model: str = "linear"  # Of kvzap, as its parameter: or "mlp".
    units: int = 64  # Of the mlp.
    ridge: float = 1.0  # The penalty of the linear model's weights, but the intercept's.
    bases: int = 16  # Of fast_kvzip, as its parameter.
    steps: int = 300
    rate: float = 5e-3
    rows: int = 512
    chunk: int = 512  # Tokens that are repeated at once.
    sinks: int = 16  # Of duo_attention's streaming heads, as its parameter.
    recent: int = 64
    penalty: float = 0.05  # Of duo_attention's sum |a|.
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Trained:
    """Weights as the policy's header orders them, the parameters that go with them, and what they are worth.

    `rank` is the correlation of ranks (Spearman) with the targets of texts that were not trained on: the mean over texts, layers and KV heads. `r2` is
    the share of the variance of kvzap's targets that is foreseen. NaN: without such texts, or with duo_attention.
    """

    weights: torch.Tensor  # f32, one dimension.
    params: dict[str, Any]
    rank: float = float("nan")
    r2: float = float("nan")

    def save(self, path: str | pathlib.Path) -> None:
        save_file({"weights": self.weights.contiguous()}, path, {name: str(value) for name, value in self.params.items()})


# ---- What KVzip says


@dataclasses.dataclass
class Seen:
    """One pooled layer's of one text."""

    hidden: torch.Tensor  # [tokens, dim]: the input of attention, behind the layer's first norm.
    peak: torch.Tensor  # [kv_heads, tokens]: KVzip's score.
    plus: torch.Tensor  # Of KVzip+, likewise: with the norms of what is written and of the query's input.


@contextmanager
def _attention(model: transformers.PreTrainedModel, attend: Callable[..., Any]) -> Iterator[None]:
    """The model's attention is attend(module, query, key, value, mask, scaling=..., **kwargs)."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def observe(model: transformers.PreTrainedModel, ids: torch.Tensor, ask: torch.Tensor, chunk: int) -> list[Seen]:
    """KVzip's scores of a text [tokens], in the order of pooled layers. `ask` are the token ids that ask for each chunk again."""
    pooled = pooled_layers(model)
    layers = model.get_decoder().layers
    inputs: dict[int, torch.Tensor] = {}  # Of the forward under way.
    seen: dict[int, Seen] = {}
    tokens = len(ids)

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float | None = None,
               **kwargs: Any) -> Any:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if module.layer_idx in seen and key.shape[2] > tokens:
            _score(seen[module.layer_idx], query[0, :, len(ask):], key[0], value[0, :, :tokens], inputs[module.layer_idx][len(ask):], scale,
                   module.o_proj.weight)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)

    def keep(layer: int) -> Callable[..., None]:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[layer] = (args[0] if args else kwargs["hidden_states"])[0]
        return before

    hooks = [layers[i].self_attn.register_forward_pre_hook(keep(i), with_kwargs=True) for i in pooled]
    try:
        with _attention(model, attend), torch.no_grad():
            cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
            model(ids[None], past_key_values=cache, logits_to_keep=1)
            heads = model.config.get_text_config(decoder=True).num_key_value_heads
            hidden = torch.stack([inputs[i] for i in pooled])  # One tensor, since many small ones that stay would leave holes in memory.
            seen.update({i: Seen(of_layer, *(torch.zeros(heads, tokens) for _ in range(2))) for i, of_layer in zip(pooled, hidden)})
            for first in range(0, tokens, chunk):
                again = torch.cat([ask, ids[first:first + chunk]])
                model(again[None], past_key_values=copy.deepcopy(cache), logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return [seen[i] for i in pooled]


def _score(seen: Seen, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: torch.Tensor, scale: float,
           output: torch.Tensor) -> None:
    """Raises a layer's scores to what these queries [q_heads, queries, dim] give the first tokens, those of `value`."""
    kv_heads, keys, dim = key.shape
    queries, tokens = query.shape[1], value.shape[1]
    logits = torch.einsum("hgqd,htd->hgqt", query.reshape(kv_heads, -1, queries, dim).float(), key.float()) * scale
    logits.masked_fill_(torch.arange(keys) > torch.arange(keys - queries, keys)[:, None], -torch.inf)
    attention = logits.softmax(-1)[..., :tokens]
    torch.maximum(seen.peak, attention.amax((1, 2)), out=seen.peak)  # In place: of what stays nothing is allocated among what goes.
    attention = attention / inputs.float().norm(dim=-1)[:, None]
    written = output.float().unflatten(1, (kv_heads, -1, value.shape[2]))  # [hidden, kv_heads, group, dim]
    norms = torch.linalg.norm(torch.einsum("ohgd,htd->hgto", written, value.float()), dim=-1)
    torch.maximum(seen.plus, (attention.amax(2) * norms).amax(1), out=seen.plus)


# ---- kvzap


def _linear(x: torch.Tensor, y: torch.Tensor, how: Training) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Ridge regression of y [tokens, kv_heads] on x [tokens, dim], which is centred."""
    x, y = x.double(), y.double()
    mean, level = x.mean(0), y.mean(0)
    gram = (x - mean).T @ (x - mean) + how.ridge * torch.eye(x.shape[1], dtype=torch.float64)
    w = torch.linalg.solve(gram, (x - mean).T @ (y - level)).T.contiguous()
    b = level - w @ mean
    return torch.cat([w.flatten(), b]).float(), lambda of: (of.double() @ w.T + b).float()


def _mlp(x: torch.Tensor, y: torch.Tensor, how: Training) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A network of one hidden layer, by Adam; x is normalised while it learns, and the weights take that in."""
    mean, spread, level = x.mean(0), x.std(0) + 1e-6, y.mean(0)
    first, second = torch.nn.Linear(x.shape[1], how.units), torch.nn.Linear(how.units, y.shape[1])
    _adam([*first.parameters(), *second.parameters()], how, len(x),
          lambda rows: (second(gelu(first((x[rows] - mean) / spread))) + level - y[rows]).square().mean())
    with torch.no_grad():
        w1 = first.weight / spread
        b1, w2, b2 = first.bias - w1 @ mean, second.weight.clone(), second.bias + level
    return torch.cat([w1.flatten(), b1, w2.flatten(), b2]), lambda of: gelu(of @ w1.T + b1) @ w2.T + b2


def _adam(parameters: list[torch.Tensor], how: Training, rows: int, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.Adam(parameters, how.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.steps)
    for _ in range(how.steps):
        loss = loss_of(torch.randint(rows, (min(rows, how.rows),)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


# ---- fast_kvzip


class _Gate(torch.nn.Module):
    """A layer's gate, as fast_kvzip.h has it: [kv_heads, tokens] of [tokens, dim]."""

    def __init__(self, dim: int, kv_heads: int, group: int, bases: int) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.zeros(kv_heads, bases, _MOST_DIM))
        self.b = torch.nn.Parameter(torch.zeros(kv_heads, group))
        self.q = torch.nn.Parameter((torch.rand(kv_heads, group, _MOST_DIM, dim) * 2 - 1) * dim**-0.5)
        self.c = torch.nn.Parameter(torch.zeros(kv_heads, group, _MOST_DIM))
        self.k = torch.nn.Parameter((torch.rand(kv_heads, _MOST_DIM, dim) * 2 - 1) * dim**-0.5)
        self.query_norm, self.key_norm = (torch.nn.Parameter(torch.ones(_MOST_DIM)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def normed(rows: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
            return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm

        heads, group = self.b.shape
        q = normed((x @ self.q.flatten(0, 2).T).unflatten(1, (heads, group, -1)) + self.c, self.query_norm)  # [tokens, heads, group, e]
        k = normed((x @ self.k.flatten(0, 1).T).unflatten(1, (heads, -1)), self.key_norm)
        logit = torch.einsum("thge,the->htg", q, k) / _MOST_DIM**0.5 + self.b[:, None]
        other = torch.einsum("thge,hse->htgs", q, self.base) / _MOST_DIM**0.5
        return (1 / (1 + (other - logit[..., None]).exp().sum(-1))).mean(-1)


def _gate(x: torch.Tensor, y: torch.Tensor, how: Training, group: int) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """By binary cross entropy with y [tokens, kv_heads], of 0 to 1. x is scaled while it learns, and Q and K take that in."""
    scale = 1 / (x.square().mean(0).sqrt() + 1e-6)
    gate = _Gate(x.shape[1], y.shape[1], group, how.bases)
    _adam(list(gate.parameters()), how, len(x), lambda rows: binary_cross_entropy(gate(x[rows] * scale), y[rows].T, reduction="none").mean(1).sum())
    with torch.no_grad():
        gate.q *= scale
        gate.k *= scale
    weights = torch.cat([part.detach().flatten() for part in (gate.base, gate.b, gate.q, gate.c, gate.k, gate.query_norm, gate.key_norm)])
    return weights, lambda of: gate(of).detach().T


def _ranks(values: torch.Tensor) -> torch.Tensor:
    return values.argsort(0).argsort(0).double()


def _rank_correlation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Spearman's, the mean over the columns of [tokens, kv_heads]."""
    a, b = (ranks - ranks.mean(0) for ranks in (_ranks(ours), _ranks(theirs)))
    return float(((a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))).mean())


def train(model: transformers.PreTrainedModel, seen: Sequence[Sequence[Seen]], how: Training, held: int = 0) -> Trained:
    """Weights of kvzap or fast_kvzip, from what `observe` says of texts. The last `held` of them are not learned from, but measured."""
    if how.policy not in ("kvzap", "fast_kvzip"):
        raise ValueError(f"policy is '{how.policy}'; must be kvzap or fast_kvzip")
    if how.model not in ("linear", "mlp"):
        raise ValueError(f"model is '{how.model}'; must be linear or mlp")
    if not 0 <= held < len(seen):
        raise ValueError(f"held is {held}; must be 0 to {len(seen) - 1}: of {len(seen)} texts one is learned from")
    torch.manual_seed(how.seed)
    config = model.config.get_text_config(decoder=True)
    learned = len(seen) - held
    weights, ranks, errors, variances = [], [], 0.0, 0.0
    for of_layer in zip(*seen):
        texts = [(text.hidden.float(), _target(text, how.policy)) for text in of_layer]
        x, y = (torch.cat(parts) for parts in zip(*texts[:learned]))
        if how.policy == "fast_kvzip":
            numbers, foresee = _gate(x, y, how, config.num_attention_heads // config.num_key_value_heads)
        else:
            numbers, foresee = (_linear if how.model == "linear" else _mlp)(x, y, how)
        weights.append(numbers)
        for x, y in texts[learned:]:
            ours = foresee(x)
            ranks.append(_rank_correlation(ours, y))
            errors += float((ours - y).square().sum())
            variances += float((y - y.mean(0)).square().sum())
    params = {"model": how.model} if how.policy == "kvzap" else {"dim": _MOST_DIM, "bases": how.bases}
    return Trained(torch.cat(weights), params, sum(ranks) / len(ranks) if ranks else float("nan"),
                   1 - errors / variances if ranks and how.policy == "kvzap" else float("nan"))


def _target(seen: Seen, policy: str) -> torch.Tensor:
    """[tokens, kv_heads]"""
    if policy == "fast_kvzip":
        return seen.peak.T.clamp(0, 1)
    return seen.plus.T.clamp(min=1e-12).log()  # A token that no query attends has no logarithm.


# ---- duo_attention

_WORDS = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec romeo sierra tango".split()


def hide_passkeys(tokenize: Callable[[str], list[int]], text: Sequence[int], seed: int, keys: int = 4, words: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, bool of each): a text that hides passkeys of random words, and asks for all of them; True are the answers.

    tokenize(text) -> token ids, with nothing put in front. The text's first token stays the first.
    """
    seeded = random.Random(seed)
    phrases = [" ".join(seeded.choices(_WORDS, k=words)) for _ in range(keys)]
    places = sorted(seeded.sample(range(1, max(keys + 1, len(text))), keys))
    ids, before = [], 0
    for number, (place, phrase) in enumerate(zip(places, phrases), 1):
        ids += [*text[before:place], *tokenize(f"\n\nRemember this. Passkey number {number} is: {phrase}.\n\n")]
        before = place
    ids += text[before:]
    asked = [False] * len(ids)
    for number, phrase in enumerate(phrases, 1):
        for part, counts in ((f"\n\nPasskey number {number} is:", False), (f" {phrase}.", True)):
            added = tokenize(part)
            ids, asked = ids + added, asked + [counts] * len(added)
    return torch.tensor(ids), torch.tensor(asked)


def train_heads(model: transformers.PreTrainedModel, cases: Sequence[tuple[torch.Tensor, torch.Tensor]], how: Training) -> Trained:
    """Weights of duo_attention, [layers, kv_heads] in 0 to 1, from texts as hide_passkeys makes them.

    The loss is the mean square, over dims and answers, by which the last hidden states move, and penalty * sum |a|. Each step has one text; `a`
    begins at 1.
    """
    torch.manual_seed(how.seed)
    config = model.config.get_text_config(decoder=True)
    pooled, kv_heads = pooled_layers(model), config.num_key_value_heads
    heads = torch.ones(len(pooled), kv_heads, requires_grad=True)
    full = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        whole, _ = full(module, query, key, value, mask, **kwargs)
        if module.layer_idx not in pooled:
            return whole, None
        place = torch.arange(key.shape[2])
        age = place[:, None] - place
        streaming, _ = full(module, query, key, value, ((age >= 0) & ((place < how.sinks) | (age < how.recent)))[None, None], **kwargs)
        a = heads[pooled.index(module.layer_idx)].repeat_interleave(query.shape[1] // kv_heads)[:, None]
        return a * whole + (1 - a) * streaming, None

    decoder, learns = model.get_decoder(), [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learns:
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam([heads], how.rate)
    try:
        with torch.no_grad():
            wanted = [decoder(ids[None], use_cache=False).last_hidden_state[0, answers] for ids, answers in cases]
        with _attention(model, attend):
            for step in range(how.steps):
                (ids, answers), target = cases[step % len(cases)], wanted[step % len(cases)]
                moved = decoder(ids[None], use_cache=False).last_hidden_state[0, answers] - target
                loss = moved.float().square().mean() + how.penalty * heads.abs().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    heads.clamp_(0, 1)
    finally:
        for parameter in learns:
            parameter.requires_grad_(True)
    return Trained(heads.detach().flatten(), {"sinks": how.sinks, "recent": how.recent})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name or a folder that Transformers loads")
    parser.add_argument("--text", required=True, action="append", type=pathlib.Path, help="a text to train on; may be given several times")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the safetensors file")
    parser.add_argument("--windows", type=int, default=16, help="windows of the texts that are looked at")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--held", type=int, default=2, help="windows that are not trained on, but measured")
    for field in dataclasses.fields(Training):
        name = "form" if field.name == "model" else field.name
        parser.add_argument(f"--{name}", dest=f"how_{field.name}", type=type(field.default), default=field.default,
                            help="of kvzap: linear or mlp" if name == "form" else None)
    given = parser.parse_args(arguments)
    how = Training(**{field.name: getattr(given, f"how_{field.name}") for field in dataclasses.fields(Training)})
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokens = torch.tensor(tokenizer("\n".join(path.read_text() for path in given.text)).input_ids)
    if len(tokens) < given.windows * given.tokens:
        parser.error(f"the texts have {len(tokens)} tokens; {given.windows} windows take {given.windows * given.tokens}")
    starts = [i * (len(tokens) - given.tokens) // max(1, given.windows - 1) for i in range(given.windows)]
    texts = [tokens[start:start + given.tokens] for start in starts]

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    began = time.monotonic()
    if how.policy == "duo_attention":
        trained = train_heads(model, [hide_passkeys(tokenize, text.tolist(), how.seed + i) for i, text in enumerate(texts)], how)
        print(f"{int((trained.weights >= 0.5).sum())} of {len(trained.weights)} heads are at 0.5 or above")
    else:
        ask = torch.tensor(tokenize(REPEAT))
        trained = train(model, [observe(model, text, ask, how.chunk) for text in texts], how, given.held)
        print(f"rank correlation with KVzip's scores of other texts: {trained.rank:.2f}; share of variance foreseen: {trained.r2:.2f}")
    trained.save(given.output)
    print(f"{time.monotonic() - began:.0f} s; params={trained.params}")


if __name__ == "__main__":
    main()
