"""Runs in kvpress's environment: one attention layer after another with random weights, and what each press says of it.

Usage: press_scores.py OUTPUT.npz. It has K, V and the last queries as they are cached (rotated), what an engine
tells of attention, hidden states and weights, and scores by press.
"""

import sys
import types

import numpy as np
import torch
from kvpress import (ChunkKVPress, CriticalKVPress, ExpectedAttentionPress, KeyDiffPress, KnormPress, KVzapPress, LagKVPress, ObservedAttentionPress,
                     PyramidKVPress, QFilterPress, SnapKVPress, StreamingLLMPress, TOVAPress)
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

LAYERS, TOKENS, WINDOW = 2, 1000, 64
KEPT = 0.5  # Of the tokens, where a press's score depends on it.
CONFIG = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_hidden_layers=LAYERS,
                     max_position_embeddings=2048, initializer_range=0.05)
PRESSES = {
    "KnormPress": KnormPress(), "KeyDiffPress": KeyDiffPress(), "ObservedAttentionPress": ObservedAttentionPress(),
    "SnapKVPress": SnapKVPress(window_size=WINDOW, kernel_size=5),
    "PyramidKVPress": PyramidKVPress(compression_ratio=1 - KEPT, window_size=WINDOW, kernel_size=5),
    "TOVAPress": TOVAPress(), "StreamingLLMPress": StreamingLLMPress(compression_ratio=1 - KEPT, n_sink=4),
    "ChunkKVPress": ChunkKVPress(KnormPress(1 - KEPT), chunk_length=20), "CriticalKVPress": CriticalKVPress(KnormPress(1 - KEPT)),
    "LagKVPress": LagKVPress(n_sink=4, lag_size=128), "ExpectedAttentionPress": ExpectedAttentionPress(), "QFilterPress": QFilterPress(),
    "KVzapPress": KVzapPress(),
}
CHOOSE = {"ChunkKVPress", "CriticalKVPress"}  # What stays is compared: one has no scores, the other no end of them for its first stage.
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


def chosen(press, module, hidden, keys, values, rotation):
    """[kv_heads, tokens], 1 where a token stays."""
    places = torch.arange(TOKENS, dtype=values.dtype)[None, None, :, None].expand_as(values)
    stay = torch.zeros(keys.shape[1:3])
    if isinstance(press, ChunkKVPress):  # It takes what stays out of values, which its own press does not read.
        _, kept = press.compress(module, hidden, keys, places, None, {"position_embeddings": rotation})
        return stay.scatter(-1, kept[0, ..., 0].long(), 1)
    scores = press.score(module, hidden, keys, values, None, {"position_embeddings": rotation})[0]
    return stay.scatter(-1, scores.topk(int(TOKENS * KEPT)).indices, 1)


def layer(index):
    """({what an engine has}, {press: [kv_heads, tokens]}) of one layer."""
    torch.manual_seed(index)
    module = LlamaAttention(CONFIG, layer_idx=index).eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=CONFIG.initializer_range)
    # Tokens of unlike length with something in common, so that norms, directions and attention differ.
    hidden = torch.randn(1, TOKENS, CONFIG.hidden_size) * (0.5 + torch.rand(1, TOKENS, 1)) + torch.randn(CONFIG.hidden_size) / 2
    module.rotary_emb = LlamaRotaryEmbedding(CONFIG)
    rotation = module.rotary_emb(hidden, torch.arange(TOKENS)[None])

    def heads(projected):
        return projected.view(1, TOKENS, -1, CONFIG.head_dim).transpose(1, 2)

    queries, keys = apply_rotary_pos_emb(heads(module.q_proj(hidden)), heads(module.k_proj(hidden)), *rotation)
    values = heads(module.v_proj(hidden))
    logits = queries @ repeat_kv(keys, module.num_key_value_groups).transpose(2, 3) * CONFIG.head_dim ** -0.5
    attention = logits.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    scores = {name: press.score(module, hidden, keys, values, attention if name in SEES_ATTENTION else None,
                                {"position_embeddings": rotation})[0] for name, press in PRESSES.items() if name not in CHOOSE}
    scores |= {name: chosen(PRESSES[name], module, hidden, keys, values, rotation) for name in CHOOSE}
    # [kv_heads, query heads of it * hidden_size, head_dim]
    output = module.o_proj.weight.unflatten(1, (CONFIG.num_key_value_heads, -1, CONFIG.head_dim)).permute(1, 2, 0, 3).flatten(1, 2)
    mean, covariance = PRESSES["ExpectedAttentionPress"].get_query_statistics(module, hidden)
    by_kv_head = attention[0].unflatten(0, (CONFIG.num_key_value_heads, -1)).mean(1)
    return {"keys": keys[0], "values": values[0], "window": queries[0, :, -WINDOW:], "mass": by_kv_head.sum(1),
            "latest": by_kv_head[:, -1], "hidden": hidden[0], "output": output / module.num_key_value_groups,
            "expected": torch.cat([mean[0], covariance[0].flatten(1)], 1), "filters": PRESSES["QFilterPress"].q_filters[index]}, scores


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
        layers = [layer(index) for index in range(LAYERS)]
    arrays = {name: np.stack([told[name].numpy() for told, _ in layers]) for name in layers[0][0]}
    arrays["surrogate"] = torch.cat([weight.flatten() for weight in PRESSES["KVzapPress"].kvzap_model.state_dict().values()]).numpy()
    arrays |= {name: np.stack([scores[name].numpy() for _, scores in layers]) for name in PRESSES}
    np.savez(sys.argv[1], kept=KEPT, window_tokens=WINDOW, budgets=budgets(), pyramid_tokens=PYRAMID["tokens"], **arrays)


if __name__ == "__main__":
    main()
