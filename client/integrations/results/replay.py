"""A prompt is computed once; then each policy and budget gets a KvPoolCache that is told what the model told: K, V, queries, hidden states."""

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
    """What a model computes of a prompt: all K and V, and of the layers that are pooled the queries and the input of attention."""

    def __init__(self, model, facts, ids):
        self.ids, self.pooled = ids, facts.pooled
        self.told, self.inputs = {}, {}
        super().__init__(layers=[_RecordedLayer(self, facts.pooled.index(i)) if i in facts.pooled
                                 else DynamicSlidingWindowLayer(sliding_window=facts.sliding_window)
                                 for i in range(facts.layers)])
        with torch.no_grad():
            self.last_logits = model(ids, past_key_values=self, logits_to_keep=1).logits

    def entered(self, layer, hidden):
        self.inputs[layer] = hidden

    def observed(self, layer, query, key, scaling):
        self.told[layer] = (query, key, scaling)

    def state_of(self, layer, query):
        """Nothing has left."""

    def padding_of(self, layer, tokens):
        """Nothing has left."""

    def peak(self, model, asks, chunk=512):
        """The greatest attention of each token, [layers, kv_heads, tokens], while the model is made to repeat the prompt (KVzip).

        asks(first) -> token ids that ask for a chunk. Chunk by chunk, each behind the prompt alone: softmax over the prompt's keys and the
        chunk's own.
        """
        tokens, found = self.ids.shape[1], None
        for first in range(0, tokens, chunk):
            asked = asks(first)
            behind = Behind(self)
            with torch.no_grad():
                model(torch.cat([torch.tensor([asked]), self.ids[:, first:first + chunk]], 1), past_key_values=behind, logits_to_keep=1)
            # In the order of layers: the queries of the chunk itself, not those that ask for it.
            peaks = torch.stack([_peak(query[0, :, len(asked):], key[0], scaling, tokens)
                                 for _, (query, key, scaling) in sorted(behind.told.items())])
            found = peaks if found is None else torch.maximum(found, peaks)
        return found

    def into(self, cache):
        """As if `cache` had been there: it holds its budget now."""
        cache.tokens_come(self.ids)
        for index, layer in enumerate(self.pooled):
            cache.entered(index, self.inputs[index])
            cache.layers[layer].update(self.layers[layer].keys, self.layers[layer].values)
            attention.take_updated()  # No attention comes now: it has been.
            cache.observed(index, *self.told[index])
        for i, layer in enumerate(self.layers):
            if i not in self.pooled:
                cache.layers[i] = copy.deepcopy(layer)
        cache.settle()
        return cache


class Behind(Record):
    """What a prompt's record becomes with more tokens behind it; the record stays as it is."""

    def __init__(self, record):
        self.told, self.inputs, self.pooled = {}, {}, record.pooled
        layers = [copy.copy(layer) for layer in record.layers]  # Keys are appended by making others.
        for layer in layers:
            if isinstance(layer, _RecordedLayer):
                layer._record = self
        Cache.__init__(self, layers=layers)


def _peak(query, key, scaling, tokens):
    """[kv_heads, tokens] of [q_heads, queries, dim] and [kv_heads, keys, dim], whose first `tokens` all queries see."""
    kv_heads, keys, dim = key.shape
    queries = query.shape[1]
    logits = torch.einsum("hgqd,htd->hgqt", query.reshape(kv_heads, -1, queries, dim).float(), key.float()) * scaling
    logits.masked_fill_(torch.arange(keys) > torch.arange(keys - queries, keys)[:, None], -torch.inf)
    return logits.softmax(-1)[..., :tokens].amax((1, 2))


class BlockwiseCache(KvPoolCache):
    """Behind the prompt, forwards of one block's tokens do what as many of one token do: a block goes when one has filled.

    So text is measured a block at a time. Within a forward all see what is resident, and those of the block before them: just
    what they see one by one. Without `prunes` nothing behind the prompt goes.
    """

    def __init__(self, *args, prompt_tokens, prunes=True, **kwargs):
        super().__init__(*args, **kwargs)
        self._prompt_tokens, self._prunes = prompt_tokens, prunes

    def _hold_budget(self, tokens):
        if self.logical <= self._prompt_tokens:
            super()._hold_budget(tokens)
        elif self._prunes:
            super()._hold_budget(1)
