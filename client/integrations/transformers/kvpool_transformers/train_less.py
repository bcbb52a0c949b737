"""Trains a LessKernel as LESS does (arXiv 2402.09398, section 3): layer by layer, so that attention to the tokens that a policy keeps
and to the state of the others comes near to full attention, behind the output projection. Minutes on a CPU for a small model.

    python -m kvpool_transformers.train_less --model smollm2 --text text.txt --output less.safetensors
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch.nn.functional import gelu, normalize
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpool_transformers import attention
from kvpool_transformers.less import LessKernel

_NAME = "kvpool_train_less"


class _Layer(torch.nn.Module):
    """What is trained of one layer. W3 is diag(|d|) (1 + i diag(d2)), as in the authors' code, which begins near no state at all."""

    def __init__(self, kv_heads: int, q_heads: int, dim: int, hidden: int, rank: int) -> None:
        super().__init__()

        def uniform(heads: int, before: int, behind: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.rand(heads, before, behind) * 2 - 1) * (6 / (before + behind)) ** 0.5)

        self.w1, self.w2 = uniform(kv_heads, dim, hidden), uniform(kv_heads, hidden, rank)
        self.m1, self.m2 = uniform(q_heads, dim, hidden), uniform(q_heads, hidden, rank)
        self.i = uniform(kv_heads, rank, rank)
        self.d, self.d2 = (torch.nn.Parameter(torch.full((kv_heads, 1, rank), 1e-4)) for _ in range(2))

    def w3(self) -> torch.Tensor:
        return self.d.abs().transpose(1, 2) * (torch.eye(self.i.shape[-1]) + self.i * self.d2)

    def forward(self, seen: _Seen, kept: torch.Tensor) -> torch.Tensor:
        """[queries, q_heads, dim]: attention of the queries behind `kept.shape[1]` tokens, of which those with True stayed."""
        prompt = kept.shape[1]
        psi = (gelu(gelu(seen.key[:, :prompt] @ self.w1) @ self.w2) @ self.w3()).abs().masked_fill(kept[..., None], 0)
        values = torch.cat([seen.value[:, :prompt], torch.ones(*kept.shape, 1)], 2)
        return _attend(seen, kept, gelu(gelu(seen.query[:, prompt:] @ self.m1) @ self.m2).abs(), psi.transpose(1, 2) @ values)


@dataclasses.dataclass
class _Seen:
    """One layer's K, V and queries of one text, [heads, tokens, dim] f32."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float


def _attend(seen: _Seen, kept: torch.Tensor, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Attention behind `kept.shape[1]` tokens to those of them that stayed, to those behind, and to the state."""
    prompt = kept.shape[1]
    stays = int(kept[0].sum())
    key, value = (torch.cat([rows[:, :prompt][kept].reshape(kept.shape[0], stays, -1), rows[:, prompt:]], 1) for rows in (seen.key, seen.value))
    return attention.attend_with_state(seen.query[:, prompt:], key, value, seen.scaling, features, state)


def _kept(seen: _Seen, prompt: int, budget: int, policy: str) -> torch.Tensor:
    """[kv_heads, prompt] bool: what the policy leaves each KV head, `budget` tokens."""
    if policy == "keydiff":
        directions = normalize(seen.key[:, :prompt], dim=-1)
        scores = -(directions * normalize(directions.mean(1, keepdim=True), dim=-1)).sum(-1)
    else:  # Attention that tokens received, and a recent half, as H2O.
        parts = attention.attention_of(seen.query[:, :prompt], seen.key[:, :prompt], seen.scaling)
        scores = torch.stack([part.sum(1) for part in parts]).sum(0)
        scores[:, prompt - budget // 2:] = torch.inf
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(budget, 1).indices, True)


def _observe(model: transformers.PreTrainedModel, texts: Iterable[torch.Tensor]) -> list[list[_Seen]]:
    """[layers][texts], by an attention function of its own."""
    layers: list[list[_Seen]] = []

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float | None = None,
               **kwargs: Any) -> Any:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        while len(layers) <= module.layer_idx:
            layers.append([])
        layers[module.layer_idx].append(_Seen(query[0].float(), key[0].float(), value[0].float(), scale))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        with torch.no_grad():
            for ids in texts:
                model(ids[None], use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return layers


@dataclasses.dataclass(frozen=True)
class Training:
    """How a kernel is trained: `prompt` tokens of each text are cut to `budget`, and the queries behind them learn."""

    prompt: int = 384
    budget: int = 96
    rank: int = 8
    hidden: int = 64
    steps: int = 150
    rate: float = 3e-3
    policy: str = "keydiff"  # Or "h2o".
    seed: int = 0


def train(model: transformers.PreTrainedModel, texts: Iterable[torch.Tensor], how: Training) -> tuple[LessKernel, list[tuple[float, float]]]:
    """A kernel, and for each layer the mean squared errors of attention's output that dropping and LESS have over the texts.

    `texts` are token ids, longer than `how.prompt`. The error is that of what stands behind the output projection.
    """
    torch.manual_seed(how.seed)
    trained: list[_Layer] = []
    errors: list[tuple[float, float]] = []
    for index, seen_all in enumerate(_observe(model, texts)):
        first = seen_all[0]
        kv_heads, _, dim = first.key.shape
        layer = _Layer(kv_heads, first.query.shape[0], dim, how.hidden, how.rank)
        project = model.get_decoder().layers[index].self_attn.o_proj.weight.detach().float()
        cases = []
        for seen in seen_all:
            kept = _kept(seen, how.prompt, how.budget, how.policy)
            nothing = torch.zeros(kv_heads, 1, dim + 1), torch.zeros(first.query.shape[0], seen.query.shape[1] - how.prompt, 1)
            full = _attend(seen, torch.ones_like(kept), nothing[1], nothing[0]).flatten(1) @ project.T
            dropped = _attend(seen, kept, nothing[1], nothing[0]).flatten(1) @ project.T
            cases.append((seen, kept, full, (dropped - full).square().mean().item()))
        dropping = sum(case[3] for case in cases) / len(cases)
        optimizer = torch.optim.Adam(layer.parameters(), how.rate)
        for step in range(how.steps):
            seen, kept, full, _ = cases[step % len(cases)]
            loss = ((layer(seen, kept).flatten(1) @ project.T) - full).square().mean() / dropping
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            less = sum(((layer(seen, kept).flatten(1) @ project.T) - full).square().mean().item() for seen, kept, full, _ in cases) / len(cases)
        trained.append(layer)
        errors.append((dropping, less))
    stacked = {name: torch.stack([getattr(layer, name).detach() for layer in trained]) for name in ("w1", "w2", "m1", "m2")}
    return LessKernel(w3=torch.stack([layer.w3().detach() for layer in trained]), **stacked), errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a name or a folder that Transformers loads")
    parser.add_argument("--text", required=True, action="append", type=pathlib.Path, help="a text to train on; may be given several times")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the safetensors file")
    parser.add_argument("--windows", type=int, default=24, help="windows of the texts that are looked at")
    parser.add_argument("--queries", type=int, default=128, help="tokens of a window behind its prompt")
    for field in dataclasses.fields(Training):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = parser.parse_args()
    how = Training(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Training)})
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokens = torch.tensor(tokenizer("\n".join(path.read_text() for path in given.text)).input_ids)
    size = how.prompt + given.queries
    if len(tokens) < given.windows * size:
        parser.error(f"the texts have {len(tokens)} tokens; {given.windows} windows take {given.windows * size}")
    starts = [i * (len(tokens) - size) // max(1, given.windows - 1) for i in range(given.windows)]
    kernel, errors = train(model, [tokens[start:start + size] for start in starts], how)
    kernel.save(given.output)
    for index, (dropping, less) in enumerate(errors):
        print(f"layer {index}: error {dropping:.3g} with dropping, {less:.3g} with LESS")


if __name__ == "__main__":
    main()
