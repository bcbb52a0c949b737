"""A prompt is computed once; then each policy and budget gets a KvPoolCache that is told what the model told: K, V, queries."""

import copy

import torch
from kvpool_transformers import KvPoolCache, attention
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer


class _RecordedLayer(DynamicLayer):
    def __init__(self, record, index):
        super().__init__()
        self._record, self._index = record, index

    def update(self, key_states, value_states, *args, **kwargs):
        attention.updated(self._record, self._index)
        return super().update(key_states, value_states, *args, **kwargs)


class Record(Cache):
    """What a model computes of a prompt: all K and V, and the queries of the layers that are pooled."""

    def __init__(self, model, facts, ids):
        self.ids, self.pooled = ids, facts.pooled
        self.told = {}
        super().__init__(layers=[_RecordedLayer(self, facts.pooled.index(i)) if i in facts.pooled
                                 else DynamicSlidingWindowLayer(sliding_window=facts.sliding_window)
                                 for i in range(facts.layers)])
        with torch.no_grad():
            self.last_logits = model(ids, past_key_values=self, logits_to_keep=1).logits

    def observed(self, layer, query, key, scaling):
        self.told[layer] = (query, key, scaling)

    def into(self, cache):
        """As if `cache` had been there: it holds its budget now."""
        cache.tokens_come(self.ids)
        for index, layer in enumerate(self.pooled):
            cache.layers[layer].update(self.layers[layer].keys, self.layers[layer].values)
            attention.take_updated()  # No attention comes now: it has been.
            cache.observed(index, *self.told[index])
        for i, layer in enumerate(self.layers):
            if i not in self.pooled:
                cache.layers[i] = copy.deepcopy(layer)
        cache.settle()
        return cache


class BlockwiseCache(KvPoolCache):
    """Behind the prompt, forwards of one block's tokens do what as many of one token do: a block goes when one has filled.

    So text is measured a block at a time. Within a forward all see what is resident, and those of the block before them: just
    what they see one by one.
    """

    def __init__(self, *args, prompt_tokens, **kwargs):
        super().__init__(*args, **kwargs)
        self._prompt_tokens = prompt_tokens

    def _hold_budget(self, tokens):
        super()._hold_budget(tokens if self.logical <= self._prompt_tokens else 1)
