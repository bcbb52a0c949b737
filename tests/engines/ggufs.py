"""Small models with random weights as GGUF, the same in every process: llama.cpp without a download."""

import gguf
import numpy as np

VOCABULARY = 512


def _write(path, architecture, tensors, fields):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(fields["layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(fields["kv_heads"])
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10_000.0)
    if "window" in fields:
        writer.add_sliding_window(fields["window"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    for name, values in tensors:
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _tensors(seed, layers, kv_heads, norms):
    random = np.random.default_rng(seed)

    def weights(rows, columns):
        return random.normal(0, 0.2, (rows, columns))

    yield "token_embd.weight", weights(VOCABULARY, 64)
    yield "output_norm.weight", np.ones(64)
    for i in range(layers):
        for name, rows, columns in (("attn_q", 64, 64), ("attn_k", kv_heads * 16, 64), ("attn_v", kv_heads * 16, 64),
                                    ("attn_output", 64, 64), ("ffn_gate", 128, 64), ("ffn_up", 128, 64), ("ffn_down", 64, 128)):
            yield f"blk.{i}.{name}.weight", weights(rows, columns)
        for name, size in norms:
            yield f"blk.{i}.{name}.weight", np.ones(size)


def llama(path, seed=0):
    tensors = [*_tensors(seed, 3, 2, (("attn_norm", 64), ("ffn_norm", 64)))]
    return _write(path, "llama", tensors + [("output.weight", tensors[0][1][::-1])], {"layers": 3, "kv_heads": 2})


def gemma(path, window=32):
    """Of its seven layers one attends to all; the others have a window."""
    norms = (("attn_norm", 64), ("ffn_norm", 64), ("post_attention_norm", 64), ("post_ffw_norm", 64), ("attn_q_norm", 16),
             ("attn_k_norm", 16))
    return _write(path, "gemma3", [*_tensors(1, 7, 1, norms)], {"layers": 7, "kv_heads": 1, "window": window})
