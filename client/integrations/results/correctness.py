"""Greedy output on the pool against the engine's own cache, token by token, on fifty prompts."""

import torch
from kvpool_transformers import KvPoolCache, open_session
from transformers import LlamaConfig, LlamaForCausalLM

import lab
import speed

PROMPTS = 50
TOKENS = 16
CASES = {
    "llama.cpp": ("computing and saving", "prefix of another process", "after its kill -9"),
    "Transformers, Gemma 3 270M": ("its own",),
    "Transformers, all layers global": ("its own", "prefix of another process", "after its kill -9"),
}


def prompts(here):
    """Five beginnings of 300 to 620 tokens of text, ten endings each."""
    names = sorted(here.texts)[:5]
    for i in range(PROMPTS):
        beginning = lab.texts.middle(here.texts[names[i // 10]], here.tokenize, 300 + 80 * (i // 10), 0.2)
        yield beginning + here.tokenize(f"\n\nSaid {'once twice again never always seldom often thus so yes'.split()[i % 10]}, ",
                                        special=False)


def cells():
    return [{"engine": engine, "case": case, "prompt": i} for engine, cases in CASES.items() for case in cases
            for i in range(PROMPTS)]


def small_global():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=262_144, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, initializer_range=0.1, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()


def greedy(model, tokens, cache=None):
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=TOKENS,
                              do_sample=False, eos_token_id=None)[0, len(tokens):].tolist()
