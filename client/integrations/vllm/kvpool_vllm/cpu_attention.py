"""How vLLM's CPU attention fills a block, asked of the kernels themselves, and the proof that they take any block stride.

The backend declares one layout, layers outermost. A pool's blocks hold all layers, so the stride between two blocks of a layer is
larger than a page. Before a Space is opened, the kernels write and read a cache of such strides; what they compute must be what
they compute in their own layout, and no byte outside the pages may change.
"""

from __future__ import annotations

from typing import Any

import torch

_BLOCKS = 4


def _cache(spec: Any, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of _BLOCKS blocks, `stride` elements apart, and its memory."""
    heads, tokens, dim = spec.num_kv_heads, spec.block_size, spec.head_size
    raw = torch.zeros(_BLOCKS * stride, dtype=spec.dtype)
    return raw, raw.as_strided((_BLOCKS, heads, 2 * tokens, dim), (stride, 2 * tokens * dim, dim, 1))


def _write(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, isa: str) -> None:
    from vllm import _custom_ops as ops
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)


def _attend(cache: torch.Tensor, query: torch.Tensor, table: torch.Tensor, isa: str, spec: Any, window: int) -> torch.Tensor:
    from vllm import _custom_ops as ops
    keys, values = cache.chunk(2, dim=2)
    tokens = query.shape[0]
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=query.shape[1], num_kv_heads=spec.num_kv_heads, head_dim=spec.head_size, seq_lens=lengths,
        dtype=spec.dtype, query_start_loc=starts, causal=True, sliding_window_size=window, isa=isa, enable_kv_split=False)
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=keys, value_cache=values, output=output, query_start_loc=starts, seq_lens=lengths,
        scale=spec.head_size ** -0.5, causal=True, alibi_slopes=None, sliding_window=window, block_table=table, softcap=0.0,
        scheduler_metadata=plan, s_aux=None)
    return output


def _permit(isa: str) -> None:
    """Asks the kernel for what these kernels need. AMX tiles are a permission of a process, which a worker has from loading its model; an
    engine core without a worker in its process has not, and the first tile instruction would be its last (SIGILL)."""
    if isa == "amx" and not torch.cpu._init_amx():
        raise RuntimeError("vLLM's CPU attention has chosen AMX, and the kernel does not let this process use its tiles")


def isa_of(spec: Any, kv_cache_dtype: str) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    return _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, kv_cache_dtype)


def check_strides(spec: Any, isa: str) -> None:
    """RuntimeError: these kernels do not work in a pool's blocks."""
    _permit(isa)
    from vllm.v1.kv_cache_interface import SlidingWindowSpec
    generator = torch.Generator().manual_seed(1)
    tokens, heads, dim = 2 * spec.block_size + 5, spec.num_kv_heads, spec.head_size
    k, v = (torch.randn(tokens, heads, dim, generator=generator).to(spec.dtype) for _ in range(2))
    query = torch.randn(tokens, 2 * heads, dim, generator=generator).to(spec.dtype)
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, i // spec.block_size]) * spec.block_size + i % spec.block_size for i in range(tokens)])
    page = heads * 2 * spec.block_size * dim
    window = spec.block_size + 3 if isinstance(spec, SlidingWindowSpec) else -1  # Shorter than what there is.
    outputs = []
    for stride in (page, 3 * page + 64):
        raw, cache = _cache(spec, stride)
        raw.fill_(7)
        cache.zero_()
        _write(cache, k, v, slots, isa)
        outputs.append(_attend(cache, query, table, isa, spec, window))
        cache.fill_(7)
        if not bool((raw == 7).all()):
            raise RuntimeError(f"vLLM's CPU attention ({isa}) writes between the pages of a cache whose blocks are "
                               f"{stride} elements apart: it can't have its K and V in a pool")
    if not torch.equal(outputs[0], outputs[1]):
        raise RuntimeError(f"vLLM's CPU attention ({isa}) computes something else when blocks are {3 * page + 64} elements "
                           f"apart than when they are {page}: it can't have its K and V in a pool")
    every = [torch.repeat_interleave(x.float(), 2, dim=1).transpose(0, 1) for x in (k, v)]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window > 0:
        seen = seen.triu(1 - window)
    truth = torch.nn.functional.scaled_dot_product_attention(query.float().transpose(0, 1), *every, attn_mask=seen)
    if not torch.allclose(outputs[1].float(), truth.transpose(0, 1), atol=0.05 if spec.dtype != torch.float32 else 1e-3):
        raise RuntimeError(f"vLLM's CPU attention ({isa}) does not attend to what it wrote: it can't have its K and V in a pool")


def planes(spec: Any, isa: str) -> tuple[Any, ...] | None:
    """((offset, token, head, dim) of K, of V) inside a layer's page in elements, or None: no strides say it (AMX tiles)."""
    _permit(isa)
    tokens, heads, dim = spec.block_size, spec.num_kv_heads, spec.head_size
    page = heads * 2 * tokens * dim
    slots = torch.arange(tokens)
    found = []
    for plane in range(2):
        def place(token: int, head: int, element: int) -> int:
            raw, cache = _cache(spec, page)
            parts = [torch.zeros(tokens, heads, dim, dtype=spec.dtype) for _ in range(2)]
            parts[plane][token, head, element] = 1
            _write(cache, parts[0], parts[1], slots, isa)
            return int(raw.nonzero().flatten()[0])
        origin = place(0, 0, 0)
        found.append((origin, place(1, 0, 0) - origin, place(0, 1, 0) - origin if heads > 1 else 2 * tokens * dim,
                      place(0, 0, 1) - origin))
    # Two neighbours are not all: each element must lie where these strides say.
    values = [torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(i)).to(spec.dtype) for i in (2, 3)]
    raw, cache = _cache(spec, page)
    _write(cache, values[0], values[1], slots, isa)
    for value, (origin, token, head, element) in zip(values, found):
        if min(token, head, element) <= 0 or not torch.equal(raw.as_strided(value.shape, (token, head, element), origin), value):
            return None
    return tuple(found)
