"""How a cache hears of what does not come with K and V: token ids, hidden states, queries, attention.

Token ids come by a hook on the model, hidden states by hooks on the attention of its layers. Queries come through an attention function of Transformers' registry that computes
what the model's own would have computed, and tells the cache that was updated just before in the same thread.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# (cache, layer) that was updated last.
_updated: contextvars.ContextVar[tuple[Any, int] | None] = contextvars.ContextVar("kvpool_updated", default=None)
_PREFIX = "kvpool_"


def updated(cache: Any, layer: int) -> None:
    _updated.set((cache, layer))


def take_updated() -> tuple[Any, int] | None:
    """(cache, layer) that was updated just before and not taken yet, or None."""
    told = _updated.get()
    _updated.set(None)
    return told


def observe(model: PreTrainedModel) -> None:
    """Has the model's attention tell caches of its queries."""
    name = model.config._attn_implementation or "sdpa"
    if name.startswith(_PREFIX):
        return
    if name not in ("sdpa", "eager"):
        raise ValueError(f"signals are had of sdpa and eager attention, not of {name}")

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
               scaling: float | None = None, **kwargs: Any) -> Any:
        told = take_updated()
        if told is not None:
            cache, layer = told
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            cache.observed(layer, query, key, scale)
            padding = cache.padding_of(layer, key.shape[2])
            if padding is not None:
                attention_mask = without_padding(query, attention_mask, padding)
            state = cache.state_of(layer, query[0])
            if state is not None:
                unknown = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
                if unknown:
                    raise NotImplementedError(f"disposition='less' knows no {unknown[0]} of this model's attention")
                return attend_with_state(query[0], key[0], value[0], scale, *state)[None].to(query.dtype), None
        return _model_own(name, module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_PREFIX + name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(_PREFIX + name)


def without_padding(query: torch.Tensor, mask: torch.Tensor | None, padding: torch.Tensor) -> torch.Tensor:
    """What is added to logits, [1, q_heads, queries, tokens], so that no query attends its KV head's `padding`, [kv_heads, tokens].

    query: [1, q_heads, queries, dim] of the last tokens. `mask`, which says what they attend otherwise, is added to logits or true where they
    do; None: all tokens up to their own.
    """
    queries, tokens = query.shape[2], padding.shape[1]
    if mask is None:
        place = torch.arange(tokens, device=query.device)
        mask = (place <= place[tokens - queries:, None])[None, None]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, float("-inf"))
    of_heads = padding.repeat_interleave(query.shape[1] // padding.shape[0], 0)[None, :, None]
    return mask[..., :tokens].expand(1, query.shape[1], queries, tokens).masked_fill(of_heads, float("-inf"))


def _model_own(name: str, module: Any) -> Callable[..., Any]:
    """The attention function that the model would have used."""
    if name == "eager":  # Each model has its own.
        import sys
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _cache_of(kwargs: dict[str, Any]) -> Any:
    """Of a forward call: its argument has another name since Transformers 5.24."""
    cache = kwargs.get("past_key_values")
    return kwargs.get("cache") if cache is None else cache


def tell_tokens(model: PreTrainedModel) -> None:
    """Has the model tell caches which tokens it is given, and when it is done with them."""
    if getattr(model, "_kvpool_hooks", None):
        return

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _cache_of(kwargs)
        if hasattr(cache, "tokens_come"):
            ids = kwargs.get("input_ids")
            cache.tokens_come(args[0] if ids is None and args else ids)

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = _cache_of(kwargs)
        if hasattr(cache, "settle"):
            cache.settle()

    model._kvpool_hooks = (model.register_forward_pre_hook(before, with_kwargs=True),
                           model.register_forward_hook(after, with_kwargs=True))


def tell_inputs(model: PreTrainedModel, pooled: Sequence[int]) -> int:
    """Has the attention of these layers tell caches of its input, behind the layer's first norm. Returns its dims.

    0: the model's layers have no `self_attn`, and caches are told nothing.
    """
    layers = getattr(model.get_decoder(), "layers", ())
    if not all(i < len(layers) and hasattr(layers[i], "self_attn") for i in pooled):
        return 0

    def told_as(index: int) -> Callable[..., None]:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = _cache_of(kwargs)
            if hasattr(cache, "entered"):
                hidden = kwargs.get("hidden_states")
                cache.entered(index, args[0] if hidden is None and args else hidden)
        return before

    if not getattr(model, "_kvpool_inputs", None):
        model._kvpool_inputs = [layers[i].self_attn.register_forward_pre_hook(told_as(index), with_kwargs=True) for index, i in enumerate(pooled)]
    return int(model.config.get_text_config(decoder=True).hidden_size)


def attention_of(query: torch.Tensor, key: torch.Tensor, scaling: float, padding: torch.Tensor | None = None,
                 chunk: int = 256) -> Iterator[torch.Tensor]:
    """Yields softmax attention [kv_heads, chunk of queries, tokens], averaged over the query heads of each kv head.

    query: [q_heads, queries, dim] of the last tokens; key: [kv_heads, tokens, dim]; padding: [kv_heads, tokens], true where no query attends.
    """
    kv_heads, tokens, dim = key.shape
    queries = query.shape[1]
    grouped = query.reshape(kv_heads, -1, queries, dim).float()
    keys = key.float()
    place = torch.arange(tokens, device=key.device)
    for first in range(0, queries, chunk):
        part = grouped[:, :, first:first + chunk]
        logits = torch.einsum("hgqd,htd->hgqt", part, keys) * scaling
        own = tokens - queries + first + torch.arange(part.shape[2], device=key.device)
        logits.masked_fill_(place[None, :] > own[:, None], float("-inf"))
        if padding is not None:
            logits.masked_fill_(padding[:, None, None], float("-inf"))
        yield logits.softmax(-1).mean(1)


def attend_with_state(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, features: torch.Tensor,
                      state: torch.Tensor) -> torch.Tensor:
    """LESS (arXiv 2402.09398): [queries, q_heads, dim] f32, attention of the last tokens' queries to the tokens there are, and to a state.

    query: [q_heads, queries, dim], key and value: [kv_heads, tokens, dim]; features: phi of the queries, [q_heads, queries, rank];
    state: [kv_heads, rank, dim + 1] as LessTerms in score.proto has it.
    """
    kv_heads, tokens, _ = key.shape
    q_heads, queries, dim = query.shape
    logits = torch.einsum("hgqd,htd->hgqt", query.reshape(kv_heads, -1, queries, dim).float(), key.float()) * scaling
    place = torch.arange(tokens, device=key.device)
    logits.masked_fill_(place > place[tokens - queries:, None], float("-inf"))
    of_state = torch.einsum("hgqr,hrd->hgqd", features.reshape(kv_heads, -1, queries, features.shape[-1]).float(), state)
    # Numerators and denominators are divided by exp(greatest), so that none overflows.
    greatest = torch.maximum(logits.amax(-1, keepdim=True), of_state[..., -1:].log()).detach()
    weights = (logits - greatest).exp()
    of_state = of_state * (-greatest).exp()
    out = (weights @ value.float()[:, None] + of_state[..., :-1]) / (weights.sum(-1, keepdim=True) + of_state[..., -1:])
    return out.reshape(q_heads, queries, -1).transpose(0, 1)
