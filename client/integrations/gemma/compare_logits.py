#!/usr/bin/env python3
"""Holds the logits of a Hugging Face directory made by dequantise.py against llama.cpp's on the same GGUF.

Usage: compare_logits.py GGUF DIRECTORY [--tokens N]

Needs torch, transformers and llama-cpp-py-sync (llama.cpp as a wheel; llama-cpp-python would be compiled). Both compute in float32 here,
but llama.cpp quantises activations of quantised matrices to 8 bits: logits differ by that, and no more. Says how much, token by token, and
ends with status 1 where the two do not agree: correlation below 0.999 at any position, or another first choice at more than 2 % of them.
"""

import argparse
import sys

import llama_cpp_py_sync
import numpy as np
import torch
from llama_cpp_py_sync import Llama
from transformers import AutoModelForCausalLM


def llama_logits(path, tokens):
    """[tokens, vocabulary]: of one batch that asks for every token's."""
    llama = Llama(str(path), n_ctx=max(512, len(tokens)), n_gpu_layers=0)
    rows = []
    for place, token in enumerate(tokens):
        llama._eval_tokens([token], place)
        row = llama._lib.llama_get_logits_ith(llama._ctx, -1)
        rows.append(np.frombuffer(llama._ffi.buffer(row, 4 * llama.n_vocab), np.float32).copy())
    llama.close()
    return np.stack(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("directory")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Of a text that every checkout has, tokenised by llama.cpp; beyond the window of local layers if asked.
    with Llama(arguments.gguf, n_ctx=512, n_gpu_layers=0) as llama:
        tokens = llama.tokenize(open(__file__, encoding="utf-8").read() * 8)[:arguments.tokens]
    theirs = llama_logits(arguments.gguf, tokens)
    model = AutoModelForCausalLM.from_pretrained(arguments.directory, dtype=torch.float32).eval()
    with torch.no_grad():
        ours = model(torch.tensor([tokens])).logits[0].numpy()
    correlations = np.array([np.corrcoef(a, b)[0, 1] for a, b in zip(ours, theirs)])
    same = (ours.argmax(1) == theirs.argmax(1)).mean()
    difference = np.abs(ours - theirs)
    print(f"{len(tokens)} tokens: correlation {correlations.min():.6f} at least, {correlations.mean():.6f} in the mean; first choice the "
          f"same at {same:.1%}; logits differ by {difference.mean():.4f} in the mean, {difference.max():.3f} at most "
          f"(they range over {theirs.std():.2f} standard deviation); llama.cpp {llama_cpp_py_sync.__version__}")
    sys.exit(0 if correlations.min() >= 0.999 and same >= 0.98 else 1)


if __name__ == "__main__":
    main()
