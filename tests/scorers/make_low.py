#!/usr/bin/env python3
"""Makes low.json: tokens in low precision (LowTerms of proto/kvpool/v1/score.proto) over again, byte by byte and in pure Python.

    tests/scorers/make_low.py > tests/scorers/low.json

Floats are rounded by struct: of two floats, a double's sum, difference, product or quotient rounded to a float is the float's own.
"""

import json
import math
import random
import struct

L, T, H, DK, DV, B = 2, 40, 2, 18, 9, 4  # Layers, tokens, kv heads, dims of K and V, block.
BLOCK_BYTES = 2000  # One to three records, and a rest.
rng = random.Random(5)


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def f16_bits(x):
    return struct.unpack("<H", struct.pack("<e", x))[0]


def f16(bits):
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def of_every_type():
    """A number of three binary digits, which every type of K and V has."""
    return rng.choice((-1, 1)) * rng.choice((4, 5, 6, 7)) * 2.0 ** rng.randint(-6, 3)


def of_f32():
    x = rng.gauss(0, 1)
    odd = (math.nan, math.inf, -math.inf, 1e6, -3e38, 65520.0, 1e-30, -0.0, 0.0, 6e-8)
    return rng.choice(odd) if rng.random() < 0.03 else f32(x * 10 ** rng.choice((0, 0, 0, 1, -3, -7)))


def tensor(of, dim):
    return [[[[of() for _ in range(dim)] for _ in range(H)] for _ in range(T)] for _ in range(L)]


def in_range(x, least, greatest):
    return min(max(x, least), greatest)


def range_of(values, bits):
    """(scale, zero) as the bits of f16."""
    finite = [in_range(x, -65504.0, 65504.0) for x in values if math.isfinite(x)]
    if not finite:
        return 0, 0
    least, greatest = min(finite) + 0.0, max(finite)
    return f16_bits(f32(f32(greatest - least) / (2 ** bits - 1))), f16_bits(least)


def code_of(x, scale_zero, bits):
    scale, zero = map(f16, scale_zero)
    if scale == 0 or math.isnan(x) or x == -math.inf:
        return 0
    if x == math.inf:
        return 2 ** bits - 1
    difference = x - zero if abs(x) > 1e38 else f32(x - zero)
    place = difference * f32(1 / scale)
    return round(in_range(f32(place) if abs(place) < 1e38 else place, 0.0, float(2 ** bits - 1)))  # Of two, the even one.


def row_of(codes, bits):
    """Codes in little-endian words."""
    whole = sum(code << (i * bits) for i, code in enumerate(codes))
    return whole.to_bytes(-(-len(codes) * bits // 32) * 4, "little")


def record_of(keys, values, bits):
    """`keys` and `values` of up to 32 tokens."""
    channels = [range_of([row[d] for row in keys], bits) for d in range(DK)]
    tokens = [range_of(row, bits) for row in values]
    none = 32 - len(keys)
    return b"".join([
        *(struct.pack("<HH", *pair) for pair in channels),
        *(row_of([code_of(x, pair, bits) for x, pair in zip(row, channels)], bits) for row in keys), none * row_of([0] * DK, bits),
        *(struct.pack("<HH", *pair) for pair in tokens), none * b"\0\0\0\0",
        *(row_of([code_of(x, pair, bits) for x in row], bits) for row, pair in zip(values, tokens)), none * row_of([0] * DV, bits)])


def case(name, data, scope, evicted_tokens, bits):
    """`scope` says which planes lose the same tokens."""
    row = {"sequence": lambda l, h: 0, "layer": lambda l, h: l, "head": lambda l, h: l * H + h}[scope]
    rows = [sorted(rng.sample(range(T), evicted_tokens)) for _ in range(row(L - 1, H - 1) + 1)]
    records = []
    for first in range(0, evicted_tokens, 32):
        for l in range(L):
            for h in range(H):
                tokens = rows[row(l, h)][first:first + 32]
                records.append(record_of([data["k"][l][t][h] for t in tokens], [data["v"][l][t][h] for t in tokens], bits))
    each = BLOCK_BYTES // len(records[0])
    blocks = [b"".join(records[i:i + each]) for i in range(0, len(records), each)]
    return {"of": name, "scope": scope, "bits": bits, "evicted": rows, "record_bytes": len(records[0]), "blocks": [b.hex() for b in blocks]}


def main():
    tensors = {name: {"k": tensor(of, DK), "v": tensor(of, DV)} for name, of in (("every_type", of_every_type), ("f32", of_f32))}
    tensors["f32"]["k"][0] = [[[7.25 if d == 2 else math.nan if d == 3 else x for d, x in enumerate(row)] for row in token]
                              for token in tensors["f32"]["k"][0]]  # A channel of one number, and one without.
    cases = [case(name, data, scope, tokens, bits) for name, data in tensors.items()
             for scope, tokens, bits in (("head", 39, 4), ("layer", 32, 2), ("sequence", 39, 8), ("head", 1, 4), ("sequence", 33, 2))]
    flat = lambda values: [bits_of(x) for layer in values for token in layer for row in token for x in row]
    print(json.dumps({"layers": L, "heads": H, "tokens": T, "k_dim": DK, "v_dim": DV, "tokens_per_block": B, "block_bytes": BLOCK_BYTES,
                      "tensors": {name: {k: flat(v) for k, v in data.items()} for name, data in tensors.items()}, "cases": cases}))


if __name__ == "__main__":
    main()
