"""LESS (arXiv 2402.09398, hdong920/LESS): tokens that leave a cache are folded into a small state, which attention reads besides.

A kernel is a pair of small networks for each layer, without biases: psi of keys, one for each KV head, which the daemon computes
(DISPOSITION_LESS in score.proto), and phi of queries, one for each query head, which attention computes here:

    psi(k) = |gelu(gelu(k W1) W2) W3|        phi(q) = |gelu(gelu(q M1) M2)|

`python -m kvpool_transformers.train_less` trains one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu


@dataclasses.dataclass(frozen=True)
class LessKernel:
    """Trained features; f32 tensors."""

    w1: torch.Tensor  # [layers, kv_heads, head_dim, hidden]
    w2: torch.Tensor  # [layers, kv_heads, hidden, rank]
    w3: torch.Tensor  # [layers, kv_heads, rank, rank]
    m1: torch.Tensor  # [layers, q_heads, head_dim, hidden]
    m2: torch.Tensor  # [layers, q_heads, hidden, rank]

    def __post_init__(self) -> None:
        layers, kv_heads, dim, hidden = self.w1.shape
        q_heads, rank = self.m1.shape[1], self.w3.shape[-1]
        for name, shape in (("w2", (layers, kv_heads, hidden, rank)), ("w3", (layers, kv_heads, rank, rank)),
                            ("m1", (layers, q_heads, dim, hidden)), ("m2", (layers, q_heads, hidden, rank))):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} is {list(getattr(self, name).shape)}; with this w1 must be {list(shape)}")
        if q_heads % kv_heads != 0:
            raise ValueError(f"m1 has {q_heads} query heads; must be a multiple of {kv_heads}, w1's KV heads")

    @property
    def rank(self) -> int:
        return self.w3.shape[-1]

    @property
    def hidden(self) -> int:
        return self.w1.shape[-1]

    @property
    def psi(self) -> torch.Tensor:
        """[layers, kv_heads, numbers], as LessTerms.weights has them."""
        return torch.cat([w.flatten(2) for w in (self.w1, self.w2, self.w3)], 2).contiguous()

    @property
    def name(self) -> bytes:
        """SHA-256 of psi's and phi's numbers."""
        return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in self._tensors().values())).digest()

    def phi(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[q_heads, queries, rank] of [q_heads, queries, head_dim], rotated."""
        hidden = gelu(query.float() @ self.m1[layer].to(query.device))
        return gelu(hidden @ self.m2[layer].to(query.device)).abs()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def save(self, path: str | pathlib.Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self._tensors().items()}, path)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> LessKernel:
        tensors = load_file(path)
        wanted = {field.name for field in dataclasses.fields(cls)}
        if set(tensors) != wanted:
            raise ValueError(f"{path} has the tensors {sorted(tensors)}; must have {sorted(wanted)}")
        return cls(**{name: tensor.float() for name, tensor in tensors.items()})
