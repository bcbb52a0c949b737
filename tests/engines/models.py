"""Small models with random weights, the same in every process."""

import json
import os

import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

# Of the daemon, as kvpoold's --device; models are where its blocks are.
DEVICE = os.environ.get("KVPOOL_ENGINES_DEVICE", "host")
PLACE = "cpu" if DEVICE == "host" else DEVICE


def llama(seed=0, dtype=torch.float32, layers=3, head_dim=16):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
                         max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).to(PLACE, dtype).eval()


def gemma(seed=0, layers=6, window=32, kv_heads=1):
    torch.manual_seed(seed)
    pattern = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
                              num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=32, sliding_window=window,
                              max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
                              pad_token_id=0, layer_types=[pattern[i % 3] for i in range(layers)])
    return Gemma3ForCausalLM(config).to(PLACE).eval()


def qwen3_next(seed=0):
    """Layers with a state, and with full attention: two layers for each of vLLM's four groups, whose blocks have 128 tokens."""
    torch.manual_seed(seed)
    config = Qwen3NextConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
                             num_key_value_heads=4, head_dim=128, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None,
                             eos_token_id=None, pad_token_id=0, layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
                             linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
                             num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    return Qwen3NextForCausalLM(config).to(PLACE, torch.bfloat16).eval()


def prompt(tokens, seed=1):
    return torch.randint(1, 512, (1, tokens), generator=torch.Generator().manual_seed(seed)).to(PLACE)


def generate(model, ids, cache=None, tokens=40):
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens,
                              do_sample=False)[0, ids.shape[1]:].tolist()


def eagle(directory, seed=0):
    """A draft model for llama(head_dim=32), with a layer of its own, as vLLM reads EAGLE's: it says again what the model said last, or
    nearly so, and is right where the model repeats itself."""
    config = LlamaConfig(**{**llama(head_dim=32).config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})
    generator = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64), "self_attn.o_proj": (64, 128),
              "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
    weights = {f"layers.0.{name}.weight": 0.1 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    weights |= {"layers.0.post_attention_layernorm.weight": torch.ones(64), "fc.weight": torch.cat([torch.zeros(64, 64), torch.eye(64)], 1)}
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors")
    return str(directory)


def adapter(directory, seed=0, rank=4):
    """A LoRA of llama(head_dim=32), as a directory that vLLM and peft read; strong enough to change what is said."""
    shapes = {"q_proj": (64, 128), "v_proj": (64, 64)}  # In, out.
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, (width, out) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, width, generator=generator)
            weights[f"{at}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted(shapes), "base_model_name_or_path": "llama"}))
    return str(directory)
