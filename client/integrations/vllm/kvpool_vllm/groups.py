"""KV cache groups: layers of a model that share block tables, as vLLM plans them and as kvpoold is told of them.

vLLM splits the layers of a hybrid model (sliding windows here, full attention there) into groups of one kind each and of as many
layers; the last one of a kind may have fewer. So a block has room for the pages of any group's layers, one behind the other. It is of
one group at a time, whose number its key carries.

Layers with a state (Mamba, linear attention) have blocks, too: a block holds what the state is behind its last token, and a prefix
needs the last one alone, as with a window of one block. A request writes its state in place until the block is full, and goes on in
another: so a block that is full does not change any more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import kvpool

from kvpool_engines.copies import CHECK_BYTES

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

MOST = 16  # Groups that a layout may have.
_MOST_TOKENS = 4096  # A block in a layout.


@dataclasses.dataclass(frozen=True)
class Group:
    spec: Any  # vLLM's KVCacheSpec.
    planes: tuple[Any, ...] | None  # cpu_attention.planes.
    layers: tuple[int, ...]  # Their numbers in the model.
    layer_stride: int  # Bytes from a layer's page to the next one's.
    offset: int = 0  # Where in a block the first page is.
    # Drafts have K and V of their own here, or in a group of the same spec: vLLM leaves out the last block of a prefix, which a draft model
    # computes anew.
    drafted: bool = False

    @property
    def has_states(self) -> bool:
        from vllm.v1.kv_cache_interface import MambaSpec
        return isinstance(self.spec, MambaSpec)

    def lag(self, dropped: int) -> int:
        """By so many blocks is what a prefix needs of this group in front of its end, of which vLLM drops `dropped` tokens (dropped_tokens).
        -1: it is a block behind it, which a draft model computes anew."""
        if not self.window_tokens:
            return 0
        return dropped // self.tokens_per_block - (1 if self.drafted and not self.has_states else 0)

    @property
    def window_tokens(self) -> int:
        """How many of the tokens in front of it a token reads; 0: all."""
        from vllm.v1.kv_cache_interface import SlidingWindowSpec
        if self.has_states:
            return self.tokens_per_block
        # Full attention may have one, too, by which it computes; its blocks are kept all the same.
        if not isinstance(self.spec, SlidingWindowSpec):
            return 0
        return max(1, self.spec.sliding_window - 1) + (self.spec.block_size if self.drafted else 0)

    @property
    def window_blocks(self) -> int:
        """How many blocks in front of its end a prefix needs; 0: all."""
        return -(-self.window_tokens // self.tokens_per_block)

    @property
    def tokens_per_block(self) -> int:
        # Where nothing is cached, a request has one state and vLLM says that its block is as long as a request may be.
        return min(self.spec.block_size, _MOST_TOKENS) if self.has_states else self.spec.block_size

    @property
    def kind(self) -> str:
        if self.has_states:
            return f"{self.spec.mamba_type.name} states ({self.spec.mamba_cache_mode})"
        return f"sliding window {self.spec.sliding_window}" if self.window_tokens else "full attention"

    def layer_group(self) -> kvpool.LayerGroup:
        """This group in a kvpool.Layout."""
        spec, planes = self.spec, self.planes
        common: dict[str, Any] = {"name": "states" if self.has_states else "sliding" if self.window_tokens else "full", "layers": list(self.layers),
                  "tokens_per_block": self.tokens_per_block, "window_tokens": self.window_tokens}
        if planes is None:
            return kvpool.LayerGroup(**common)
        element = spec.dtype.itemsize
        k, v = (kvpool.Plane(offset=self.offset + origin * element, layer_stride=self.layer_stride, token_stride=token * element,
                             head_stride=head * element, dim_stride=dim * element) for origin, token, head, dim in planes)
        return kvpool.LayerGroup(**common, kv_heads=spec.num_kv_heads, k_head_dim=spec.head_size, v_head_dim=spec.head_size,
                                 dtype=str(spec.dtype), k=k, v=v)


def dropped_tokens(groups: Sequence[Group]) -> int:
    """Prefixes are found in units of what all groups have whole blocks of. One whose full attention has drafts vLLM takes for one that ends
    a unit earlier."""
    full = [group for group in groups if not group.window_tokens] or groups
    return math.lcm(*(group.tokens_per_block for group in groups)) if any(group.drafted for group in full) else 0


def drafted_groups(specs: Sequence[KVCacheGroupSpec], has_drafts: bool) -> list[bool]:
    """Which of a plan's groups vLLM looks up as those with drafts: those that it has marked, and all of the same spec; without a mark, all."""
    marked = [group.kv_cache_spec for group in specs if getattr(group, "is_eagle_group", False)]
    return [group.kv_cache_spec in marked if marked else has_drafts for group in specs]


def layout_of(groups: Sequence[Group], block_bytes: int) -> kvpool.Layout:
    """The layout of a space. Blocks that no strides describe are shared, and not scored."""
    strided = all(group.planes is not None for group in groups)
    if not strided:
        groups = [dataclasses.replace(group, planes=None) for group in groups]
    return kvpool.Layout([group.layer_group() for group in groups], block_bytes=block_bytes,
                         encoding="strided" if strided else "opaque")


def describe(groups: Sequence[Group]) -> str:
    """For people, and for the fingerprint: "5 * sliding window 512 of 3 layers, 1 * full attention of 3 layers"."""
    runs = itertools.groupby(f"{group.kind} of {len(group.layers)} layers" for group in groups)
    return ", ".join(f"{len(list(run))} * {what}" for what, run in runs)[:256]


def _numbers(config: KVCacheConfig) -> dict[str, int]:
    """{layer: its number in the model}: layers of several groups by the first number in their names."""
    names = [name for group in config.kv_cache_groups for name in group.layer_names]
    if len(config.kv_cache_groups) > 1:
        names.sort(key=lambda name: int((re.search(r"\d+", name) or ["0"])[0]))
    return {name: number for number, name in enumerate(names)}


def groups_of(config: KVCacheConfig, planes_of: Callable[[Any], tuple[Any, ...] | None], has_drafts: bool) -> tuple[Group, ...]:
    """The groups of a plan in which blocks hold all layers. `planes_of` answers the planes of a spec."""
    numbers = _numbers(config)
    return tuple(Group(group.kv_cache_spec, planes_of(group.kv_cache_spec), tuple(numbers[name] for name in tensor.layers),
                       tensor.layer_stride, tensor.offset, drafted)
                 for group, tensor, drafted in zip(config.kv_cache_groups, config.kv_cache_tensors,
                                                   drafted_groups(config.kv_cache_groups, has_drafts)))


def copied_groups(config: KVCacheConfig, planes_of: Callable[[Any], tuple[Any, ...] | None]) -> tuple[tuple[Group, ...], int]:
    """(the groups of blocks whose pages are copied, bytes of such a block): a block has room for the pages of any group, and what is checked."""
    numbers = _numbers(config)
    copied = tuple(Group(group.kv_cache_spec, planes_of(group.kv_cache_spec), tuple(numbers[name] for name in group.layer_names),
                         group.kv_cache_spec.page_size_bytes) for group in config.kv_cache_groups)
    return copied, max(len(group.layers) * group.layer_stride for group in copied) + CHECK_BYTES


# ---- What can't be shared


def _say(config: KVCacheConfig, number: int) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
    group = config.kv_cache_groups[number]
    kind = get_kv_cache_spec_kind(group.kv_cache_spec).value.replace("_", " ")
    return (f"KV cache group {number} of {len(config.kv_cache_groups)} ({kind}: {type(group.kv_cache_spec).__name__} of "
            f"{', '.join(group.layer_names[:3])}{', ...' if len(group.layer_names) > 3 else ''})")


def refuse_others(config: KVCacheConfig, who: str) -> None:
    """ValueError: K and V of such a group can't be shared, or do not share blocks with those of the others."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
    groups = config.kv_cache_groups
    if not groups:
        raise ValueError(f"the model has no KV cache: nothing is there for {who} to share")
    if len(groups) > MOST:
        raise ValueError(f"the model has {len(groups)} KV cache groups; {who} shares at most {MOST}: --disable-hybrid-kv-cache-manager "
                         "makes one of them")
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec):
            raise ValueError(f"{_say(config, number)}: {who} shares full and latent attention, sliding windows and states only")
        if getattr(spec, "kv_quant_mode", KVQuantMode.NONE) != KVQuantMode.NONE:
            raise ValueError(f"{_say(config, number)}: K and V are quantised (kv_cache_dtype: {spec.kv_quant_mode.name}); {who} shares those "
                             "that are not")


def refuse_other_regions(config: KVCacheConfig, who: str) -> None:
    """ValueError: not each group has one region of pages, in its order."""
    groups, tensors = config.kv_cache_groups, config.kv_cache_tensors
    if [tensor.layers for tensor in tensors] != [group.layer_names for group in groups]:
        raise ValueError(f"vLLM plans the pages of {len(groups)} KV cache groups in {len(tensors)} regions: {who} does not know such a plan")


def refuse_other_plans(config: KVCacheConfig, who: str) -> None:
    """ValueError: blocks do not hold all layers of any one group."""
    refuse_other_regions(config, who)
    groups, tensors = config.kv_cache_groups, config.kv_cache_tensors
    for number, (group, tensor) in enumerate(zip(groups, tensors)):
        end = tensor.offset + (len(tensor.layers) - 1) * tensor.layer_stride + group.kv_cache_spec.page_size_bytes
        if tensor.block_stride != tensors[0].block_stride or end > tensor.block_stride:
            raise ValueError(f"{_say(config, number)}: its pages end at byte {end} of blocks of {tensor.block_stride} bytes, and those of "
                             f"{_say(config, 0)} have {tensors[0].block_stride}; {who} needs blocks that can take each other's place")
