#!/usr/bin/env python3
"""Holds a Hugging Face directory made by dequantise.py against llama.cpp on the same GGUF.

Usage: compare_logits.py GGUF DIRECTORY [--lengths N,N,...]

Needs gguf, torch, transformers and xllamacpp (llama.cpp as a wheel). For prefixes of one sequence, the log probabilities of the next
token: llama.cpp's 1,000 likeliest against Transformers' of the same tokens. Twice:

- llama.cpp with the same weights in float32 (a GGUF made beside DIRECTORY, 1.1 GB), which leaves its float16 cache and, for Gemma, its float16
  table of GELU. Status 1 where any differs by more than 0.1, or another token comes first: no wrong norm, window or rotation hides in that.
- llama.cpp with the quantised weights: it quantises the activations that meet them to 8 bits, and what that does is shown.
"""

import argparse
import pathlib
import sys

import gguf
import numpy as np
import torch
import xllamacpp
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM

LIKELIEST = 1000


def tokens_of(count, vocabulary, bos):
    """No text: its tokenizer would be one more thing to differ. Small numbers are frequent pieces."""
    return [bos, *np.random.default_rng(1).integers(1000, min(20_000, vocabulary), count - 1).tolist()]


def in_float32(path, target):
    """The same GGUF, all tensors dequantised."""
    if target.exists():
        return target
    reader = gguf.GGUFReader(path)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind,
                             field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(
            [int(size) for size in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(target)


def llama_cpp(path, tokens, lengths):
    """Of each length: (token ids, log probabilities), likeliest first."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = max(512, max(lengths) + 8)
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    answers = []
    for length in lengths:
        answer = server.handle_completions({"prompt": tokens[:length], "max_tokens": 1, "logprobs": LIKELIEST, "temperature": 0.0,
                                            "cache_prompt": False})
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        answers.append((np.array([entry["id"] for entry in top]), np.array([entry["logprob"] for entry in top])))
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--lengths", default="2,3,5,9,17,33,65,129,257,513,700")  # The last ones beyond the window of 512.
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.directory, dtype=torch.float32).eval()
    tokens = tokens_of(max(lengths), model.config.vocab_size, model.config.bos_token_id)
    with torch.no_grad():
        ours = model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
    exact = in_float32(arguments.gguf, arguments.directory.resolve().parent / (arguments.directory.name + "-f32.gguf"))
    wrong = 0
    print("| weights | prefix | mean difference | largest | same first choice |\n| --- | --- | --- | --- | --- |")
    for weights, path in (("float32", exact), ("quantised", arguments.gguf)):
        for length, (ids, theirs) in zip(lengths, llama_cpp(path, tokens, lengths)):
            row = ours[length - 1]
            difference = np.abs(row[ids] - theirs)
            same = "yes" if int(row.argmax()) == int(ids[0]) else "no"
            if weights == "float32":
                wrong += difference.max() > 0.1 or same == "no"
            print(f"| {weights} | {length} | {difference.mean():.5f} | {difference.max():.5f} | {same} |")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
