"""Runs in kvpress's environment: one attention layer after another with random weights, and what each press says of it.

Usage: press_scores.py OUTPUT.npz. It has K, V and the last queries as they are cached (rotated), what an engine
tells of attention, hidden states and weights, and scores by press.
"""

import sys
import types
import unittest.mock

import numpy as np
import torch
from kvpress import (AdaKVPress, ChunkKVPress, CompactorPress, CriticalKVPress, DuoAttentionPress, ExpectedAttentionPress, FastKVzipPress, KeyDiffPress, KnormPress,
                     KVzapPress, KVzipPress, LagKVPress, LeverageScorePress, ObservedAttentionPress, PyramidKVPress, QFilterPress, SnapKVPress,
                     StreamingLLMPress, TOVAPress)
from kvpress.presses.fastkvzip_press import FastKVzipGate
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

LAYERS, TOKENS, WINDOW = 2, 1000, 64
KEPT = 0.5  # Of the tokens, where a press's score depends on it.
CONFIG = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_hidden_layers=LAYERS,
                     max_position_embeddings=2048, initializer_range=0.05, attn_implementation="sdpa")
SKETCH = 48
REPEATED, PROMPT = 500, 20  # KVzip's: tokens of the context, and of the prompt before them, in each repetition.
PRESSES = {
    "KnormPress": KnormPress(), "KeyDiffPress": KeyDiffPress(), "ObservedAttentionPress": ObservedAttentionPress(),
    "SnapKVPress": SnapKVPress(window_size=WINDOW, kernel_size=5),
    "PyramidKVPress": PyramidKVPress(compression_ratio=1 - KEPT, window_size=WINDOW, kernel_size=5),
    "TOVAPress": TOVAPress(), "StreamingLLMPress": StreamingLLMPress(compression_ratio=1 - KEPT, n_sink=4),
    "ChunkKVPress": ChunkKVPress(KnormPress(1 - KEPT), chunk_length=20), "CriticalKVPress": CriticalKVPress(KnormPress(1 - KEPT)),
    "AdaKVPress": AdaKVPress(KnormPress(1 - KEPT), alpha_safeguard=0.2), "LagKVPress": LagKVPress(n_sink=4, lag_size=128), "ExpectedAttentionPress": ExpectedAttentionPress(), "QFilterPress": QFilterPress(),
    "KVzapPress": KVzapPress(), "FastKVzipPress": FastKVzipPress(1 - KEPT), "KVzipPress": KVzipPress(1 - KEPT, chunk_size=REPEATED),
    "DuoAttentionPress": DuoAttentionPress(0.5), "LeverageScorePress": LeverageScorePress(sketch_dimension=SKETCH),
    # Chunks that come out even: theirs lets the tokens of a chunk that is not full attend to padding too.
    "CompactorPress": CompactorPress(1 - KEPT, sketch_dimension=SKETCH, chunk_size=(TOKENS - 12) // 4),
}
MASKING = ("FastKVzipPress", "KVzipPress", "DuoAttentionPress")  # They have no scores by layer, and mask what leaves of all layers.
GATE = ("k_base", "b", "q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight")  # As in fast_kvzip.h.
SKETCHING = ("LeverageScorePress", "CompactorPress")
CHOOSE = {"AdaKVPress", "ChunkKVPress", "CriticalKVPress"}  # What stays is compared: two have no scores, one no end of them for its first stage.
PYRAMID = {"layers": 16, "tokens": 4096}  # Of a model and a prompt long enough for a pyramid.
SEES_ATTENTION = {"ObservedAttentionPress"}  # The others compute what they need of the queries themselves.


def surrogate():
    """KVzap's model, with random weights in place of the trained ones, which are had of the network alone."""
    torch.manual_seed(LAYERS)
    model = KVzapModel(KVzapConfig(input_dim=CONFIG.hidden_size, hidden_dim=CONFIG.hidden_size // 8, output_dim=CONFIG.num_key_value_heads,
                                   n_modules=LAYERS))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=CONFIG.initializer_range)
    return model


def gates():
    """Fast KVzip's, likewise."""
    torch.manual_seed(LAYERS + 1)
    heads, group = CONFIG.num_key_value_heads, CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    made = [FastKVzipGate(i, CONFIG.hidden_size, heads, group, torch.float32) for i in range(LAYERS)]
    for gate in made:
        for weight in gate.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return made


def sketch():
    """[head_dim, SKETCH], the standard normal numbers of kvpool's cuda/scorers/parts/leverage.h."""
    column, d = np.meshgrid(np.arange(SKETCH, dtype=np.uint64), np.arange(CONFIG.head_dim, dtype=np.uint64))
    bits = (column << np.uint64(32)) + d + np.uint64(1)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xbf58476d1ce4e5b9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94d049bb133111eb)
    bits ^= bits >> np.uint64(31)
    u, v = ((bits >> np.uint64(40)) + np.uint64(1)) / 2 ** 24, (bits >> np.uint64(16) & np.uint64(0xffffff)) / 2 ** 24
    return torch.from_numpy((np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)).astype(np.float32))


def sketched(press, module, hidden, keys, values, rotation):
    """Its scores with kvpool's sketch, head by head: theirs brings the heads of a layer to mean 0 and deviation 1 together."""
    def rows(weight, head):
        return weight.unflatten(0, (CONFIG.num_key_value_heads, -1))[head]

    scores = []
    for head in range(CONFIG.num_key_value_heads):
        of_head = types.SimpleNamespace(num_attention_heads=module.num_key_value_groups)
        one = types.SimpleNamespace(head_dim=CONFIG.head_dim, config=of_head,
                                    q_proj=lambda x, head=head: x @ rows(module.q_proj.weight, head).T,
                                    k_proj=lambda x, head=head: x @ rows(module.k_proj.weight, head).T)
        with unittest.mock.patch("torch.randn", lambda *shape, **_: sketch().expand(shape)):
            scores.append(press.score(one, hidden, keys[:, head:head + 1], values[:, head:head + 1], None, {"position_embeddings": rotation})[0])
    return torch.cat(scores)


def chunk_attention(queries, keys):
    """[kv_heads, tokens]: what the tokens of a chunk attend of it, not causal and with no factor; 0 for the ends."""
    size = PRESSES["CompactorPress"].chunk_size
    mass = torch.zeros(keys.shape[1:3])
    for first in range(8, TOKENS - 4, size):
        of_heads = queries[0, :, first:first + size].unflatten(0, (CONFIG.num_key_value_heads, -1))
        logits = torch.einsum("hgid,hjd->hgij", of_heads, keys[0, :, first:first + size])
        mass[:, first:first + size] = logits.softmax(-1).sum(2).mean(1)
    return mass


def repeat(module, keys, values, heads):
    """[kv_heads, tokens], the greatest attention of the context's repetitions; tells KVzip's press of them too. `heads` makes
    heads of what is projected."""
    press, peaks = PRESSES["KVzipPress"], torch.zeros(keys.shape[1:3])
    for first in range(0, TOKENS, REPEATED):
        hidden = torch.randn(1, PROMPT + REPEATED, CONFIG.hidden_size)
        length = hidden.shape[1]
        rotation = module.rotary_emb(hidden, torch.arange(TOKENS, TOKENS + length)[None])
        queries, own = apply_rotary_pos_emb(heads(module.q_proj(hidden)), heads(module.k_proj(hidden)), *rotation)
        press.start_idx, press.end_idx = first, first + REPEATED
        press.score_kvzip(module, hidden, torch.cat([keys, own], 2), torch.cat([values, heads(module.v_proj(hidden))], 2), None,
                          {"position_embeddings": rotation})
        sinks = min(4, first)
        seen = torch.cat([keys[:, :, :sinks], keys[:, :, first:first + REPEATED], own], 2)
        logits = queries @ repeat_kv(seen, module.num_key_value_groups).transpose(2, 3) * CONFIG.head_dim ** -0.5
        logits[..., -length:] += torch.full((length, length), -torch.inf).triu(1)
        peak = logits.softmax(-1).amax(2)[0, :, sinks:sinks + REPEATED]
        peaks[:, first:first + REPEATED] = peak.unflatten(0, (CONFIG.num_key_value_heads, -1)).amax(1)
    return peaks


def masked(press, modules):
    """[layers, kv_heads, tokens], 1 where a token stays with a press that masks what leaves."""
    if not isinstance(press, DuoAttentionPress):
        press.compress_post(types.SimpleNamespace(model=types.SimpleNamespace(layers=[types.SimpleNamespace(self_attn=m) for m in modules])))
    stay = torch.ones(LAYERS, CONFIG.num_key_value_heads, TOKENS)
    for layer, module in zip(stay, modules):
        if isinstance(press, DuoAttentionPress):
            keys = torch.zeros(1, CONFIG.num_key_value_heads, TOKENS, CONFIG.head_dim)
            press.compress(module, None, keys, keys, None, {})
        _, head, token = module.masked_key_indices
        layer[head, token] = 0
    return stay


def chosen(press, module, hidden, keys, values, rotation):
    """[kv_heads, tokens], 1 where a token stays."""
    places = torch.arange(TOKENS, dtype=values.dtype)[None, None, :, None].expand_as(values)
    stay = torch.zeros(keys.shape[1:3])
    if isinstance(press, AdaKVPress):  # It masks what leaves.
        press.compress(module, hidden, keys, values, None, {"position_embeddings": rotation})
        _, head, token = module.masked_key_indices
        return stay.index_put((head, token), torch.tensor(-1.0)) + 1
    if isinstance(press, ChunkKVPress):  # It takes what stays out of values, which its own press does not read.
        _, kept = press.compress(module, hidden, keys, places, None, {"position_embeddings": rotation})
        return stay.scatter(-1, kept[0, ..., 0].long(), 1)
    scores = press.score(module, hidden, keys, values, None, {"position_embeddings": rotation})[0]
    return stay.scatter(-1, scores.topk(int(TOKENS * KEPT)).indices, 1)


def layer(index):
    """({what an engine has}, {press: [kv_heads, tokens]}, the module) of one layer."""
    torch.manual_seed(index)
    module = LlamaAttention(CONFIG, layer_idx=index).eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=CONFIG.initializer_range)
    # Tokens of unlike length with something in common, so that norms, directions and attention differ.
    hidden = torch.randn(1, TOKENS, CONFIG.hidden_size) * (0.5 + torch.rand(1, TOKENS, 1)) + torch.randn(CONFIG.hidden_size) / 2
    module.rotary_emb = LlamaRotaryEmbedding(CONFIG)
    rotation = module.rotary_emb(hidden, torch.arange(TOKENS)[None])

    def heads(projected):
        return projected.view(1, projected.shape[1], -1, CONFIG.head_dim).transpose(1, 2)

    queries, keys = apply_rotary_pos_emb(heads(module.q_proj(hidden)), heads(module.k_proj(hidden)), *rotation)
    values = heads(module.v_proj(hidden))
    logits = queries @ repeat_kv(keys, module.num_key_value_groups).transpose(2, 3) * CONFIG.head_dim ** -0.5
    attention = logits.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    scores = {name: press.score(module, hidden, keys, values, attention if name in SEES_ATTENTION else None,
                                {"position_embeddings": rotation})[0] for name, press in PRESSES.items()
              if name not in (*CHOOSE, *MASKING, *SKETCHING)}
    scores |= {name: chosen(PRESSES[name], module, hidden, keys, values, rotation) for name in CHOOSE}
    scores |= {name: sketched(PRESSES[name], module, hidden, keys, values, rotation) for name in SKETCHING}
    PRESSES["FastKVzipPress"]._score_fast(module, hidden)
    # [kv_heads, query heads of it * hidden_size, head_dim]
    output = module.o_proj.weight.unflatten(1, (CONFIG.num_key_value_heads, -1, CONFIG.head_dim)).permute(1, 2, 0, 3).flatten(1, 2)
    mean, covariance = PRESSES["ExpectedAttentionPress"].get_query_statistics(module, hidden)
    by_kv_head = attention[0].unflatten(0, (CONFIG.num_key_value_heads, -1)).mean(1)
    return {"keys": keys[0], "values": values[0], "window": queries[0, :, -WINDOW:], "mass": by_kv_head.sum(1),
            "latest": by_kv_head[:, -1], "hidden": hidden[0], "output": output / module.num_key_value_groups,
            "expected": torch.cat([mean[0], covariance[0].flatten(1)], 1), "filters": PRESSES["QFilterPress"].q_filters[index],
            "chunks": chunk_attention(queries, keys), "peak": repeat(module, keys, values, heads)}, scores, module


def budgets():
    """Tokens that PyramidKV keeps, by layer."""
    config = types.SimpleNamespace(num_hidden_layers=PYRAMID["layers"])
    return [PRESSES["PyramidKVPress"].get_layer_budget(types.SimpleNamespace(config=config, layer_idx=i), PYRAMID["tokens"])
            for i in range(PYRAMID["layers"])]


def main():
    torch.set_num_threads(1)
    with torch.no_grad():
        PRESSES["KVzapPress"].kvzap_model = surrogate()
        PRESSES["QFilterPress"].q_filters = torch.randn(LAYERS, CONFIG.num_key_value_heads, CONFIG.head_dim)
        patterns = np.random.default_rng(0).permutation(np.linspace(0, 1, LAYERS * CONFIG.num_key_value_heads)).reshape(LAYERS, -1)
        PRESSES["DuoAttentionPress"].load_attention_pattern = lambda model: (128, 256, patterns)
        PRESSES["DuoAttentionPress"].post_init_from_model(types.SimpleNamespace(device="cpu"))
        PRESSES["FastKVzipPress"].gates, PRESSES["FastKVzipPress"].score_val = gates(), [None] * LAYERS
        PRESSES["KVzipPress"].context_length = TOKENS
        PRESSES["KVzipPress"].score_val = torch.zeros(LAYERS, 1, CONFIG.num_key_value_heads, TOKENS)
        layers = [layer(index) for index in range(LAYERS)]
        stay = {name: masked(PRESSES[name], [module for _, _, module in layers]) for name in MASKING}
        of_gates = torch.cat([gate.state_dict()[name].flatten() for gate in PRESSES["FastKVzipPress"].gates for name in GATE])
    arrays = {name: np.stack([told[name].numpy() for told, _, _ in layers]) for name in layers[0][0]}
    arrays |= {"gates": of_gates.numpy(), "patterns": patterns.astype(np.float32)}
    arrays["surrogate"] = torch.cat([weight.flatten() for weight in PRESSES["KVzapPress"].kvzap_model.state_dict().values()]).numpy()
    arrays |= {name: np.stack([scores[name].numpy() for _, scores, _ in layers]) for name in PRESSES if name not in MASKING}
    arrays |= {name: of_layers.numpy() for name, of_layers in stay.items()}
    np.savez(sys.argv[1], kept=KEPT, window_tokens=WINDOW, budgets=budgets(), pyramid_tokens=PYRAMID["tokens"], **arrays)


if __name__ == "__main__":
    main()
