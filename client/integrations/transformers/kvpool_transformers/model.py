"""What a pool must know of a model: the layout of its blocks, and a fingerprint of all that K and V depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import kvpool
import torch
import transformers

from kvpool_transformers import attention

_FACTS: weakref.WeakKeyDictionary[kvpool.Session, ModelFacts] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    layers: int  # All layers of the model.
    pooled: tuple[int, ...]  # Layers whose K and V are in the pool: those with full attention.
    sliding_window: int  # The other layers' window; they stay the engine's own. 0: there are none.
    kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: torch.dtype
    signals: bool  # Attention tells the cache of queries and of attention.
    hidden_dim: int = 0  # Of the hidden states that attention tells the cache of; 0: of none.
    # Held from the begin of a step until it is recorded on its stream: a step that completes completes those before it.
    fences: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def shareable(self) -> bool:
        """A prefix is found whole or not at all: layers that are not in the pool would have to be computed again."""
        return len(self.pooled) == self.layers


def facts_of(session: kvpool.Session) -> ModelFacts:
    try:
        return _FACTS[session]
    except KeyError:
        raise ValueError("this session knows no model: open it with kvpool_transformers.open_session") from None


def fingerprint_of(model: transformers.PreTrainedModel, **more: Any) -> bytes:
    """SHA-256 of config, weights, attention and versions: K and V of equal fingerprints may be shared."""
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "_attn_implementation_autoset"):
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    digest.update(json.dumps([torch.__version__, platform.machine(), transformers.__version__, sorted(more.items())]).encode())
    return digest.digest()


def _layer_facts(config: Any) -> tuple[tuple[int, ...], int]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layers of {', '.join(unknown)}: only full and sliding attention are supported")
    pooled = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if not pooled:
        raise ValueError("no layer has full attention: there is nothing to pool")
    sliding = 0 if len(pooled) == len(kinds) else config.sliding_window
    return pooled, sliding


def pooled_layers(model: transformers.PreTrainedModel) -> tuple[int, ...]:
    """Those whose K and V are in a pool: of full attention."""
    return _layer_facts(model.config.get_text_config(decoder=True))[0]


def open_session(model: transformers.PreTrainedModel, *, tokens_per_block: int = 16, signals: bool = False,
                 facts: Mapping[str, str] | None = None, **options: Any) -> kvpool.Session:
    """A kvpool.Session for this model. `options` are those of kvpool.Session.

    Full-attention layers are in the pool; sliding ones keep what they keep. Engines that open the same model with the same
    code share prefixes, if all its layers are pooled. Caches touch no block that they don't hold, so that the daemon may take
    memory back at any time, unless give_back="never": whoever looks at more than that, by session.k() and the like, says so. signals=True has the model's attention tell caches of queries, attention mass and
    hidden states, for policies that go by them; mass costs one more product of queries and keys.
    """
    config = model.config.get_text_config(decoder=True)
    pooled, sliding_window = _layer_facts(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = model.dtype
    known = ModelFacts(layers=config.num_hidden_layers, pooled=pooled, sliding_window=sliding_window, kv_heads=kv_heads,
                       head_dim=head_dim, tokens_per_block=tokens_per_block, dtype=dtype, signals=signals,
                       hidden_dim=attention.tell_inputs(model, pooled) if signals else 0)
    layout = kvpool.Layout.paged(layers=len(pooled), kv_heads=kv_heads, head_dim=head_dim, tokens_per_block=tokens_per_block,
                                 dtype=str(dtype))
    if signals:
        attention.observe(model)
    digest = fingerprint_of(model, pooled=pooled, tokens_per_block=tokens_per_block)
    options = {"give_back": "any_time", "device_uuids": ["host"] * options.get("ranks", 1) if model.device.type == "cpu" else [],
               **options}
    session = kvpool.Session(layout, digest, client_name="transformers", facts={
        "model_type": config.model_type, "dtype": str(dtype), "torch": torch.__version__,
        "transformers": transformers.__version__, "attention": config._attn_implementation or "", **(facts or {})}, **options)
    _FACTS[session] = known
    attention.tell_tokens(model)
    return session
