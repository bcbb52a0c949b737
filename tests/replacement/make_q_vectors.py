"""Weights and Q values of cold_rl's network by numpy, in double precision: what tests/replacement/cold_rl_test.cc compares with.

Usage: make_q_vectors.py OUT.safetensors; needs numpy.
"""

import json
import struct
import sys

import numpy as np


def main():
    random = np.random.default_rng(20250812)
    shapes = {"hidden1.weight": (64, 6), "hidden1.bias": (64,), "hidden2.weight": (64, 64), "hidden2.bias": (64,),
              "value.weight": (1, 64), "value.bias": (1,), "advantage.weight": (2, 64), "advantage.bias": (2,)}
    tensors = {name: random.normal(0, 1 / np.sqrt(shape[-1]), shape).astype("<f4") for name, shape in shapes.items()}
    inputs = random.uniform(-1, 2, (32, 6)).astype("<f4")
    inputs[0] = 0
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    h1 = np.maximum(inputs.astype(np.float64) @ w["hidden1.weight"].T + w["hidden1.bias"], 0)
    h2 = np.maximum(h1 @ w["hidden2.weight"].T + w["hidden2.bias"], 0)
    value = h2 @ w["value.weight"].T + w["value.bias"]
    advantage = h2 @ w["advantage.weight"].T + w["advantage.bias"]
    q = value + advantage - advantage.mean(axis=1, keepdims=True)
    tensors |= {"test.inputs": inputs, "test.q": q.astype("<f4")}

    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(sys.argv[1], "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
