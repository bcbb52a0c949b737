"""The cache itself. One sequence: batch 1."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import kvpool
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from kvpool_transformers import attention, model
from kvpool_transformers.less import LessKernel

# What policies need to be told beyond K and V; those that are not here need nothing, or what a cache can't tell.
_MASS = {"attention_mean", "h2o", "roco", "hybrid", "caote", "fast_caote"}
_LATEST = {"tova", "sage_kv"}
_WINDOW = {"snapkv", "pyramidkv", "cake", "rkv", "mpcache", "quest", "graphkv"}
_HOSTS = {"caote": "h2o", "fast_caote": "h2o", "graphkv": "snapkv", "chunkkv": "snapkv", "criticalkv": "snapkv"}  # By default.
_SCOPES = ("sequence", "layer", "head")
_HEADS = ("equal", "ada", "given")
_DISPOSITIONS = ("drop", "merge", "low", "less")
_INLINED_BYTES = 1 << 20  # What a request carries of one array; a larger one lies in blocks.
_HIDDEN_BYTES = 1 << 30


def _kept_of(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Of [layers, kv_heads, tokens]; `kept` is [layers or 1, kv_heads or 1, tokens that stay]."""
    return values.gather(2, kept.to(values.device).expand(*values.shape[:2], -1))


def _hidden_of(hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Of [layers, kv_heads or 1, tokens, dim]; of each KV head where each has kept its own."""
    layers, heads, _, dim = hidden.shape
    heads = max(heads, kept.shape[1])
    return hidden.expand(-1, heads, -1, -1).gather(2, kept.to(hidden.device).expand(layers, heads, -1)[..., None].expand(-1, -1, -1, dim))


def _reads_hidden(policy: str | None, params: Mapping[str, Any]) -> bool:
    return (policy in ("kvzap", "fast_kvzip") or policy == "learned_mlp" and params.get("features", "hidden") == "hidden"
            or policy == "attention_gate" and params.get("source") == "gate")


class _LowTokens:
    """Tokens that one compaction kept in low precision: blocks, the number of tokens in each KV head's list, and how they lie."""

    def __init__(self, blocks: kvpool.Blocks, tokens: int, layout: kvpool.LowLayout, facts: model.ModelFacts, device: torch.device) -> None:
        self.blocks, self.tokens, self._layout, self._facts = blocks, tokens, layout, facts
        groups = -(-tokens // 32)
        records = torch.arange(groups * layout.planes, device=device).reshape(groups, layout.planes // facts.kv_heads, facts.kv_heads)
        self._slots = records % layout.records_per_block  # [groups, layers, kv_heads], as the blocks' numbers.
        self._ids = torch.tensor(blocks.ids, device=device)[records // layout.records_per_block]

    def of_layer(self, pool: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [kv_heads, tokens, dim]. `pool` is all bytes, [blocks, block_bytes]."""
        low = self._layout
        records = pool[:, :low.records_per_block * low.record_bytes].unflatten(1, (low.records_per_block, low.record_bytes))
        record = records[self._ids[:, layer], self._slots[:, layer]].transpose(0, 1)  # [kv_heads, groups, record_bytes]

        def ranges(at: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            return record[..., at:at + 4 * count].contiguous().view(torch.float16).float().unflatten(-1, (count, 2)).unbind(-1)

        def codes(at: int, row_bytes: int) -> torch.Tensor:
            packed = record[..., at:at + 32 * row_bytes].unflatten(-1, (32, row_bytes, 1))
            unpacked = packed >> torch.arange(0, 8, low.bits, dtype=torch.uint8, device=pool.device) & (1 << low.bits) - 1
            return unpacked.flatten(-2)[..., :self._facts.head_dim].float()

        def whole(values: torch.Tensor) -> torch.Tensor:  # [kv_heads, groups, 32, dim]
            return values.to(self._facts.dtype).flatten(1, 2)[:, :self.tokens]

        k_scale, k_zero = ranges(0, self._facts.head_dim)
        v_scale, v_zero = ranges(low.v_ranges_at, 32)
        k = codes(low.k_codes_at, low.k_row_bytes) * k_scale[..., None, :] + k_zero[..., None, :]
        v = codes(low.v_codes_at, low.v_row_bytes) * v_scale[..., None] + v_zero[..., None]
        return whole(k), whole(v)


class PoolLayer(CacheLayerMixin):
    """One layer's K and V in the pool's blocks. Its cache keeps count."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: KvPoolCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True
        every = cache.session.max_blocks
        self.k = torch.from_dlpack(cache.session.k(layer=index, blocks=every))  # [blocks, tokens, heads, dim], in place
        self.v = torch.from_dlpack(cache.session.v(layer=index, blocks=every))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.write(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What comes back has the tokens that are left; the newest of them is the newest there was."""
        self.cache.settle()
        left = self.cache.low + self.cache.resident
        return left + query_length, self.cache.logical - left

    def get_seq_length(self) -> int:
        """Logical: positions go on where they were, whatever was dropped."""
        self.cache.settle()
        return self.cache.logical

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        raise NotImplementedError("blocks of a pool are not offloaded")

    def prefetch(self) -> None:
        raise NotImplementedError("blocks of a pool are not offloaded")

    def reset(self) -> None:
        raise NotImplementedError("a KvPoolCache serves one sequence: make another")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("a KvPoolCache serves one sequence: no beams")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError("blocks may be shared, and are not cropped")


class KvPoolCache(Cache):
    """past_key_values for `generate` and forward calls, of one sequence.

    session   from open_session
    prompt    token ids: the prefix that any engine has sealed is not computed again. The last token always is.
    policy, params, budget   holds `budget` tokens: a prompt beyond is compacted token by token, and while decoding a block is
              dropped each time one fills. Policies are the daemon's (`kvpoolctl policies`). Without a budget nothing is dropped.
    scope     what a prompt keeps: "sequence" the same tokens everywhere, "layer" and "head" each layer's and each KV head's own. Blocks that
              are dropped later are dropped for all.
    heads     with scope "head": "equal", each KV head keeps as many tokens; "ada", the KV heads of a layer share its budget by their scores
              (AdaKV), also while decoding, where it is held token by token each time that a block of tokens has come: `budget` of them stay in a head on average.
              Attention works on as many; the blocks are as many as the longest head's tokens take. "given": each KV head keeps its number of
              `head_tokens`, likewise
    least_share, most  with heads "ada", the share of the budget that each head keeps at least (None: a fifth), and the tokens that it keeps at
              most, which is how long the sequence gets besides a block (None: twice the budget)
    head_tokens  with heads "given", [layers, kv_heads] of the pooled layers: how many tokens each keeps, on average at most `budget`
    disposition  what becomes of a prompt's tokens that do not stay: "drop"; "merge", by which each is merged into the token that stays whose
              key is most like its own (D2O), in each KV head; "low", by which they go on in low precision (MiKV), in blocks besides the
              budget, and attention reads them too; or "less", by which they are added to a small state that attention
              reads besides (LESS), on a CPU. Blocks that are dropped later are dropped
    less      with "less": its LessKernel, trained for this model
    merge_threshold  the cosine of keys from which on it is merged. None: the mean of each KV head's
    low_bits  with "low", bits an element: 2, 4 or 8
    weights   f32 numbers of a policy that wants them, as its header in cuda/scorers/policies orders them
    signals   what this engine knows of the prompt besides, by the names of kvpool.Signal: each [layers, kv_heads, tokens] f32 of the pooled
              layers, such as "peak" for kvzip. Tokens behind the prompt have +inf: what is newest can't be judged, and stays
    seal      full blocks are shared, under keys that tell what was kept
    salt, extra_keys   part what must not be shared (tenants), and what K and V depend on besides tokens (adapters)
    salt_from  the salt counts from the block that holds this token of the prompt on: what is in front, such as a system prompt, is
              shared with everybody. 0: it is in every key. Without a salt it changes nothing.
    window    queries kept for policies that go by the last ones
    hidden_bytes  the most bytes of hidden states, in f32, that policies which go by them (kvzap, fast_kvzip) may take: layers * tokens * dims * 4, and as
              many times that as there are KV heads once each has kept its own tokens. They are in blocks of the pool while one is asked
    guard     the last queries, as many of them as a request carries, go with each prune and compaction whatever the policy, for the daemon to measure
              what it costs (`kvpoold --guard-share`). Where it has turned the policy off, generation raises kvpool.FailedPreconditionError
    wait_ms   how long the prompt may wait for what is in a tier below the pool (`kvpoold --tier`); 0: not
    """

    def __init__(self, session: kvpool.Session, *, prompt: Any = None, policy: str | None = None, params: Mapping[str, Any] | None = None,
                 budget: int | None = None, scope: str = "sequence", heads: str = "equal", least_share: float | None = None,
                 most: int | None = None, head_tokens: Any = None, disposition: str = "drop", merge_threshold: float | None = None,
                 low_bits: int | None = None, less: LessKernel | None = None, weights: Any = None, signals: Mapping[str, Any] | None = None,
                 protection: kvpool.Protection | None = None, seal: bool = True, salt: bytes = b"", salt_from: int = 0, extra_keys: Sequence[bytes] = (),
                 window: int = 32, hidden_bytes: int = _HIDDEN_BYTES, guard: bool = False, timeout: float = 30.0, wait_ms: int = 0) -> None:
        self.session = session
        self.facts = model.facts_of(session)
        if (policy is None) != (budget is None):
            raise ValueError("policy and budget go together")
        self._policy, self._params, self._budget, self._protection = policy, dict(params or {}), budget, protection
        if scope not in _SCOPES:
            raise ValueError(f"scope is '{scope}'; must be one of {', '.join(_SCOPES)}")
        if disposition not in _DISPOSITIONS:
            raise ValueError(f"disposition is '{disposition}'; must be one of {', '.join(_DISPOSITIONS)}")
        if heads not in _HEADS:
            raise ValueError(f"heads is '{heads}'; must be one of {', '.join(_HEADS)}")
        if heads != "equal" and (scope != "head" or disposition != "drop"):
            raise ValueError(f"heads='{heads}' goes with scope='head' and disposition='drop': scope is '{scope}', disposition '{disposition}'")
        if heads != "ada" and (least_share is not None or most is not None):
            raise ValueError("least_share and most go with heads='ada'")
        if (head_tokens is not None) != (heads == "given"):
            raise ValueError("head_tokens and heads='given' go together")
        if least_share is not None and not 0 < least_share <= 1:
            raise ValueError(f"least_share is {least_share}; must be above 0, and at most 1")
        if most is not None and budget is not None and most < budget:
            raise ValueError(f"most is {most}; must be at least the budget, {budget}")
        if merge_threshold is not None and disposition != "merge":
            raise ValueError("merge_threshold goes with disposition='merge'")
        if low_bits is not None and disposition != "low":
            raise ValueError("low_bits goes with disposition='low'")
        if (less is None) != (disposition != "less"):
            raise ValueError("less, a LessKernel, and disposition='less' go together")
        if policy is None and (scope != "sequence" or weights is not None or signals or disposition != "drop" or guard):
            raise ValueError("scope, disposition, weights, signals and guard go with a policy")
        if heads != "equal" and not self.facts.signals:
            raise ValueError(f"heads='{heads}' is part of attention: open_session(model, signals=True)")
        self._dispose: dict[str, Any] = {"disposition": disposition, "merge_thresholds": [] if merge_threshold is None else [merge_threshold]}
        self._heads, self._ada = heads, None
        if heads == "ada":
            self._ada = kvpool.AdaTerms(least_share=least_share or 0.0, most_tokens=most or 0)
        elif heads == "given":
            self._ada = kvpool.AdaTerms(tokens=self._flat(head_tokens))
        # [layers, kv_heads]: how many of the first `_counted` tokens each KV head has; behind them it has padding. None: all have all.
        self._counts: torch.Tensor | None = None
        self._counted = 0
        self._low_layout = session.layout.low(4 if low_bits is None else low_bits) if disposition == "low" else None
        if less is not None:
            self._check(less)
        self._less, self._psi = less, None if less is None else less.psi
        self._state_array: kvpool.BlockArray | None = None
        self._state: torch.Tensor | None = None  # [layers, kv_heads, rank, head_dim + 1], once something left.
        self._scope = scope
        self._weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float32).detach().cpu().contiguous()
        self._signals = {kind: torch.as_tensor(values, dtype=torch.float32).detach().cpu() for kind, values in (signals or {}).items()}
        if "hidden" in self._signals:
            raise ValueError("signals['hidden'] is what the cache is told by the model: open_session(model, signals=True)")
        for kind, values in self._signals.items():
            if values.dim() != 3 or values.shape[:2] != (len(self.facts.pooled), self.facts.kv_heads):
                raise ValueError(f"signals['{kind}'] is {list(values.shape)}; must be [{len(self.facts.pooled)}, {self.facts.kv_heads}, tokens]: "
                                 "layers in the pool, KV heads, tokens of the prompt")
        self._timeout, self._window = timeout, window
        self._seals = seal and self.facts.shareable
        told = {policy, self._params.get("host")}
        if policy in _HOSTS and "host" not in self._params:
            told.add(_HOSTS[policy])
        self._wants_mass = bool(told & _MASS) and self._params.get("host") not in _WINDOW
        self._wants_latest, self._wants_window = bool(told & _LATEST), bool(told & _WINDOW)
        if (self._wants_mass or self._wants_latest or self._wants_window) and not self.facts.signals:
            raise ValueError(f"policy {policy} goes by attention: open_session(model, signals=True)")
        self._wants_hidden, self._hidden_bytes = any(_reads_hidden(each, self._params) for each in told), hidden_bytes
        if self._wants_hidden and not self.facts.hidden_dim:
            raise ValueError(f"policy {policy} goes by hidden states: open_session(model, signals=True), of a model whose layers have self_attn")
        if guard and not self.facts.signals:
            raise ValueError("guard=True goes by queries: open_session(model, signals=True)")
        self._keeps_queries, self._scaling = guard or self._wants_window, 0.0
        self.resident = self.logical = 0  # Tokens in blocks; tokens that there have been.
        self.shared = 0  # Tokens that were found and not computed.
        self.dropped = 0
        self.low = 0  # Tokens in low precision, behind which the resident ones come.
        self._low_tokens: list[_LowTokens] = []
        self._low_pool = None if self._low_layout is None else torch.from_dlpack(session.data(blocks=session.max_blocks))
        self.merged = 0  # Tokens of a prompt that were merged into others, summed over layers and KV heads.
        self.folded = 0  # Tokens of a prompt that were added to the state, likewise.
        self._behind: list[int] = []  # Of the prompt, behind the prefix that was found: what the first forward has to begin with.
        self._coming: list[int] | None = None  # Token ids of this forward.
        self._pending, self._written = 0, 0  # Tokens, and layers that have them.
        # [layers, kv_heads, tokens] f32.
        self._mass: torch.Tensor | None = None
        self._mass_square: torch.Tensor | None = None
        self._latest: torch.Tensor | None = None
        self._queries: list[torch.Tensor | None] = [None] * len(self.facts.pooled)  # Each [queries, q_heads, dim].
        self._hidden: torch.Tensor | None = None  # [layers, 1 or kv_heads, tokens, dim], in the model's type.
        self._entering: list[torch.Tensor] = []  # Of this forward's layers, each [tokens, dim].
        self._sequence = kvpool.LiveSequence(session, salt=salt, salt_from=salt_from, extra_keys=list(extra_keys))
        if prompt is not None:
            self._match(prompt, session.hasher(salt, salt_from=salt_from), list(extra_keys), wait_ms)
        layers: list[Any] = []
        pooled = 0
        for i in range(self.facts.layers):
            if i in self.facts.pooled:
                layers.append(PoolLayer(self, pooled))
                pooled += 1
            else:
                layers.append(DynamicSlidingWindowLayer(sliding_window=self.facts.sliding_window))
        self._device = next(layer.k.device for layer in layers if isinstance(layer, PoolLayer))
        super().__init__(layers=layers)

    def _check(self, less: LessKernel) -> None:
        if not self.facts.signals:
            raise ValueError("disposition='less' is part of attention: open_session(model, signals=True)")
        wanted = (len(self.facts.pooled), self.facts.kv_heads, self.facts.head_dim)
        if less.w1.shape[:3] != wanted:
            raise ValueError(f"less.w1 is {list(less.w1.shape)}; must begin with {list(wanted)}: layers in the pool, KV heads, dims of a head")

    # ---- Sharing

    def _match(self, prompt: Any, hasher: kvpool.PrefixHasher, extra_keys: list[bytes], wait_ms: int) -> None:
        ids = torch.as_tensor(prompt).flatten().tolist()
        size = self.facts.tokens_per_block
        keys = hasher.chain(ids, size, extra_keys)[:(len(ids) - 1) // size]
        if not keys or not self.facts.shareable or self._wants_mass or self._wants_window or self._wants_latest or self._wants_hidden:
            return  # A policy that goes by attention or hidden states has to see all of it.
        with self.session.match(keys, wait_ms=wait_ms).wait(self._timeout + wait_ms / 1000) as hit:
            found = len(hit.blocks)
            if found:
                self._sequence.adopt(hit.blocks, ids[:found * size])
        self.resident = self.logical = self.shared = found * size
        if found:
            self._behind = ids[self.shared:]

    def tokens_come(self, ids: torch.Tensor | None) -> None:
        self.settle()
        self._coming = None if ids is None or ids.shape[0] != 1 else ids.flatten().tolist()
        expected, self._behind = self._behind, []
        if self._coming is not None and expected and self._coming[:len(expected)] != expected[:len(self._coming)]:
            raise ValueError(f"the cache found {self.shared} tokens of its prompt, and is given {len(self._coming)} tokens that do not go on "
                             "from there")

    def activate_past_recording(self) -> None:
        """Transformers announces with this that it will take tokens back."""
        raise ValueError("drafts (assistant_model, prompt_lookup_num_tokens) do not go with a KvPoolCache: its blocks may be shared, and "
                         "rejected tokens can't be taken back")

    # ---- K and V

    def write(self, layer: PoolLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the layer's tokens so far, those that come with this call included."""
        if key_states.shape[0] != 1:
            raise ValueError(f"a batch of {key_states.shape[0]}: a KvPoolCache serves one sequence")
        if key_states.device != self._device:
            raise ValueError(f"K and V are on {key_states.device}, the session's blocks on {self._device}")
        if key_states.dtype != self.facts.dtype:
            raise ValueError(f"K and V are {key_states.dtype}, the session's layout says {self.facts.dtype}")
        if layer.index == 0:
            self.settle()
            self._begin(key_states.shape[2])
        place = torch.arange(self.resident, self.resident + self._pending, device=self._device)
        block, offset = self._table[place // self.facts.tokens_per_block], place % self.facts.tokens_per_block
        layer.k[block, offset] = key_states[0].transpose(0, 1)
        layer.v[block, offset] = value_states[0].transpose(0, 1)
        self._written += 1
        attention.updated(self, layer.index)
        k, v = self._gather(layer.k), self._gather(layer.v)
        if not self._low_tokens:
            return k, v
        # They are older than what is behind them, so that masks may take them for the first tokens.
        parts = [part.of_layer(self._low_pool, layer.index) for part in self._low_tokens]
        return (torch.cat([*(part[0][None] for part in parts), k], 2), torch.cat([*(part[1][None] for part in parts), v], 2))

    def _begin(self, tokens: int) -> None:
        lacking = tokens - self._sequence.room
        if lacking > 0:
            size = self.facts.tokens_per_block
            self._sequence.append(self.session.lease((lacking + size - 1) // size, self._timeout))
        self._table = torch.tensor(self._sequence.ids, device=self._device)
        self._pending, self._written = tokens, 0

    def _gather(self, pool: torch.Tensor) -> torch.Tensor:
        tokens = self.resident + self._pending
        blocks = self._table[:(tokens + self.facts.tokens_per_block - 1) // self.facts.tokens_per_block]
        return pool[blocks].flatten(0, 1)[:tokens].transpose(0, 1).unsqueeze(0).contiguous()

    def settle(self) -> None:
        """The forward is over: counts, shares, and holds the budget."""
        if self._pending == 0 or self._written < len(self.facts.pooled):
            return
        tokens, ids = self._pending, self._coming
        self._pending, self._coming = 0, None
        if ids is None or len(ids) != tokens:
            ids, self._seals = [0] * tokens, False  # Unknown tokens are nobody else's.
        self._fence()
        self._sequence.extend(ids)
        self.resident += tokens
        self._keep_hidden()
        for kind, values in self._signals.items():
            newer = max(0, self.resident - values.shape[2])
            self._signals[kind] = torch.nn.functional.pad(values, (0, newer), value=torch.inf)
        self.logical += tokens
        if self._seals:
            self._sequence.seal()
        if self._budget is not None and self.resident > self._budget:
            self._hold_budget(tokens)

    def _fence(self) -> None:
        """A GPU's kernels are launched, and may not have run: what is sealed, pruned or given back from here on waits for them."""
        if self._device.type == "cuda":
            with self.facts.fences:
                step = self.session.begin_step()
                self.session.complete_step_on_stream(step, torch.cuda.current_stream(self._device).cuda_stream)

    # ---- Budget

    def entered(self, layer: int, hidden: torch.Tensor) -> None:
        """Called before attention, with its input [1, tokens, dim]."""
        if not self._wants_hidden:
            return
        if layer == 0:
            self.settle()
            self._entering = []
            tokens = self.resident + hidden.shape[1]
            nbytes = 4 * len(self.facts.pooled) * (1 if self._hidden is None else self._hidden.shape[1]) * tokens * self.facts.hidden_dim
            if nbytes > self._hidden_bytes:
                raise ValueError(f"policy {self._policy} goes by hidden states, of which {tokens} tokens have {nbytes} bytes; must be at most "
                                 f"hidden_bytes, {self._hidden_bytes}")
        self._entering.append(hidden[0].detach())

    def _keep_hidden(self) -> None:
        if self._entering:
            coming, self._entering = torch.stack(self._entering)[:, None], []
            before = self._hidden
            self._hidden = coming if before is None else torch.cat([before, coming.expand(-1, before.shape[1], -1, -1)], 2)

    def observed(self, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        """Called by attention, with rotated queries and the keys that `write` returned."""
        if self._keeps_queries:
            self._scaling = scaling
            before = self._queries[layer]
            now = query[0].transpose(0, 1)[-self._window:].to(self.facts.dtype)  # [queries, q_heads, dim]
            self._queries[layer] = now if before is None else torch.cat([before, now])[-self._window:]
        if not (self._wants_mass or self._wants_latest):
            return
        if layer == 0:
            self._grow(key.shape[2] - self.low)
        for part in attention.attention_of(query[0], key[0], scaling, self.padding_of(layer, key.shape[2])):
            part = part[..., self.low:]  # What is in low precision is not judged again.
            if self._wants_mass:
                self._mass[layer] += part.sum(1)
                self._mass_square[layer] += part.square().sum(1)
            self._latest[layer] = part[:, -1]

    @property
    def held(self) -> float:
        """Tokens that a KV head has, on average: those resident, unless heads share a budget."""
        if self._counts is None:
            return self.resident
        return self._counts.float().mean().item() + self.resident - self._counted

    def _flat(self, head_tokens: Any) -> list[int]:
        told = torch.as_tensor(head_tokens)
        wanted = [len(self.facts.pooled), self.facts.kv_heads]
        if list(told.shape) != wanted or told.is_floating_point():
            raise ValueError(f"head_tokens is {list(told.shape)} of {told.dtype}; must be {wanted} of integers: layers in the pool, KV heads")
        assert self._budget is not None  # It goes with a policy.
        if told.min() < 1 or told.double().mean() > self._budget:
            raise ValueError(f"head_tokens are {told.min()} to {told.max()}, on average {told.double().mean():.1f}; must be 1 or more, and on average at "
                             f"most the budget, {self._budget}")
        return [int(count) for count in told.flatten()]

    def padding_of(self, layer: int, tokens: int) -> torch.Tensor | None:
        """[kv_heads, tokens]: where each KV head has none of what `write` returned, or None if all have all."""
        if self._counts is None:
            return None
        place = torch.arange(tokens, device=self._device)
        return (place >= self._counts[layer, :, None]) & (place < self._counted)

    def _grow(self, tokens: int) -> None:
        for name in ("_mass", "_mass_square", "_latest"):
            grown = torch.zeros(len(self.facts.pooled), self.facts.kv_heads, tokens, device=self._device)
            before = getattr(self, name)
            if before is not None:
                grown[..., :before.shape[2]] = before
            setattr(self, name, grown)

    def _scorer(self, lent: contextlib.ExitStack) -> kvpool.Scorer:
        """What policies need to be told, for one call; `lent` has the blocks of what is too large for a request."""
        def told(values: torch.Tensor) -> Any:
            values = values.cpu().contiguous()
            if values.nbytes <= _INLINED_BYTES:
                return values
            if self._device.type != "cpu":
                raise NotImplementedError(f"policy {self._policy} is told {values.nbytes} bytes in one array; on a GPU at most {_INLINED_BYTES}")
            array = lent.enter_context(kvpool.BlockArray(self.session, values.nbytes, self._timeout))
            array.write(values)
            return array

        def signal(kind: str, values: torch.Tensor) -> kvpool.Signal:
            return kvpool.Signal(kind, told(values), per_layer=True, per_head=True)

        signals, window = [signal(kind, values) for kind, values in self._signals.items()], None
        if self._wants_mass:
            signals += [signal("mass", self._mass), signal("mass_square", self._mass_square)]
        if self._wants_latest:
            signals.append(signal("latest", self._latest))
        if self._hidden is not None:
            signals.append(kvpool.Signal("hidden", told(self._hidden.float()), per_layer=True, per_head=self._hidden.shape[1] > 1))
        if self._weights is not None:
            given = told(self._weights)
            signals.append(kvpool.Signal("weights", given, nbytes=self._weights.nbytes if isinstance(given, kvpool.BlockArray) else 0))
        if self._wants_window:
            queries = torch.stack(self._queries)
            given = told(queries)  # In blocks it is of the layout's type, which it has.
            window = kvpool.QueryWindow(given) if isinstance(given, torch.Tensor) else kvpool.QueryWindow(
                given, queries=queries.shape[1], q_heads=queries.shape[2])
        elif self._keeps_queries:
            window = self._guards_window()
        # Positions go on whatever was dropped: the newest token's is not the number of those that are left.
        return kvpool.Scorer(self._policy, self._params, signals=signals, window=window, now=float(self.logical - 1),
                             hidden_dim=0 if self._hidden is None else self._hidden.shape[3])

    def _guards_window(self) -> kvpool.QueryWindow | None:
        """Of the newest queries as many as a request carries; None: it can't carry one."""
        queries = torch.stack(self._queries)
        carried = min(_INLINED_BYTES // queries[:, :1].nbytes, self.resident)
        return kvpool.QueryWindow(queries[:, -carried:].cpu().contiguous(), scale=self._scaling) if carried > 0 else None

    def _hold_budget(self, tokens: int) -> None:
        size = self.facts.tokens_per_block
        for kind, values in self._signals.items():
            if values.shape[2] != self.resident:
                raise ValueError(f"signals['{kind}'] tells of {values.shape[2]} tokens, and the budget is first exceeded by {self.resident}: a prompt "
                                 "that signals tell of comes in one forward")
        with contextlib.ExitStack() as lent:
            if self._ada is not None and self.held <= self._budget + (size - 1 if tokens == 1 else 0):
                return
            asked: dict[str, Any] = {"budget_tokens": self._budget, "protection": self._protection, "timeout": self._timeout}
            if self._ada is not None:
                compacted = self._sequence.compact(scorer=self._scorer(lent), scope=self._scope, heads=self._heads, ada=self._ada, **asked)
                if not compacted.counts:  # The policy keeps all of so few tokens beyond the budget.
                    return
                kept = self._share(compacted)
            elif tokens > 1:
                compacted = self._compact(lent, scorer=self._scorer(lent), scope=self._scope, **self._dispose, **asked)
                self.folded += compacted.folded_tokens
                rows = compacted.kept_positions
                self.merged += compacted.merged_tokens
                self.low += compacted.low_tokens
                # [layers or 1, kv_heads or 1, tokens that stay]
                kept = torch.tensor(rows).reshape(1 if len(rows) == 1 else len(self.facts.pooled), -1, len(rows[0]))
            elif self.resident % size == 0:
                victims = set(self._sequence.prune(scorer=self._scorer(lent), **asked).victims)
                kept = torch.tensor([i for i in range(self.resident) if i // size not in victims])[None, None]
            else:
                return
        self.resident = kept.shape[2]
        self.dropped = self.logical - self.resident - self.low
        for name in ("_mass", "_mass_square", "_latest"):
            if getattr(self, name) is not None:
                setattr(self, name, self._moved(getattr(self, name), kept))
        self._signals = {kind: self._moved(values, kept) for kind, values in self._signals.items()}
        if self._hidden is not None:
            self._hidden = _hidden_of(self._hidden, kept)

    def _moved(self, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Of [layers, kv_heads, tokens] what `kept` says, and 0 where a KV head has padding now."""
        moved = _kept_of(values, kept)
        if self._counts is None:
            return moved
        place = torch.arange(moved.shape[2], device=moved.device)
        return moved.masked_fill_(place >= self._counts[..., None].to(moved.device), 0)

    def _share(self, compacted: kvpool.CompactResult) -> torch.Tensor:
        """[layers, kv_heads, tokens of the longest]: the positions that stay, and any behind those of the others."""
        rows = [torch.tensor(row, dtype=torch.int64) for row in compacted.kept_positions]
        of_heads = (len(self.facts.pooled), self.facts.kv_heads)
        kept = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).reshape(*of_heads, -1)
        counts = torch.tensor([len(row) for row in rows]).reshape(of_heads)
        self._counted = kept.shape[2]
        self._counts = counts.to(self._device) if (counts < self._counted).any() else None
        return kept

    def _compact(self, lent: contextlib.ExitStack, **asked: Any) -> kvpool.CompactResult:
        if self._less is not None:
            return self._fold(lent, **asked)
        if self._low_layout is None:
            return self._sequence.compact(**asked)
        with contextlib.ExitStack() as unwritten:
            low = unwritten.enter_context(self.session.lease(self._low_layout.blocks(self.resident - self._budget), self._timeout))
            compacted = self._sequence.compact(low_blocks=low, low_bits=self._low_layout.bits, **asked)
            if compacted.low_tokens:
                unwritten.pop_all()
                self._low_tokens.append(_LowTokens(low, compacted.low_tokens, self._low_layout, self.facts, self._device))
        return compacted

    # ---- A state of what left

    def state_of(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Features of the queries [q_heads, queries, dim], and the layer's state, or None if there is none."""
        if self._state is None:
            return None
        return self._less.phi(layer, query), self._state[layer]

    def _fold(self, lent: contextlib.ExitStack, **asked: Any) -> kvpool.CompactResult:
        with contextlib.ExitStack() as failed:
            state = failed.enter_context(self._next_state())
            compacted = self._sequence.compact(less=self._less_terms(lent, state), **asked)
            self._take_state(state)
            failed.pop_all()
        return compacted

    def _next_state(self) -> kvpool.BlockArray:
        if self._device.type != "cpu":
            raise NotImplementedError("disposition='less': the state is read on a CPU")
        self._state_shape = (len(self.facts.pooled), self.facts.kv_heads, self._less.rank, self.facts.head_dim + 1)
        return kvpool.BlockArray(self.session, 4 * math.prod(self._state_shape), self._timeout)

    def _less_terms(self, lent: contextlib.ExitStack, state: kvpool.BlockArray) -> kvpool.LessTerms:
        weights: Any = self._psi
        if weights.nbytes > _INLINED_BYTES:
            weights = lent.enter_context(kvpool.BlockArray(self.session, self._psi.nbytes, self._timeout))
            weights.write(self._psi)
        return kvpool.LessTerms(rank=self._less.rank, hidden=self._less.hidden, weights=weights, weights_name=self._less.name, state=state,
                                previous=self._state_array)

    def _take_state(self, state: kvpool.BlockArray) -> None:
        read = bytearray(state.read(4 * math.prod(self._state_shape)))
        self._state = torch.frombuffer(read, dtype=torch.float32).reshape(self._state_shape)
        if self._state_array is not None:
            self._state_array.release()
        self._state_array = state

    # ---- Release

    def release(self) -> None:
        """Gives its blocks back; what was sealed stays findable. Also when nobody has it any more."""
        if self._pending:  # A forward that broke off.
            self._fence()
        with contextlib.ExitStack() as rest:  # What it holds besides comes free, whatever becomes of the sequence.
            for part in self._low_tokens:
                rest.callback(part.blocks.release)
            if self._state_array is not None:
                rest.callback(self._state_array.release)
            self._low_tokens, self._state_array = [], None
            self._hidden, self._entering = None, []
            self._sequence.release()

    def __enter__(self) -> KvPoolCache:
        return self

    def __exit__(self, *args: object) -> None:
        self.release()
