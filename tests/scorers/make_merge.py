#!/usr/bin/env python3
"""Makes merge.json: compactions that merge (cuda/scorers/parts/merge_rows.h) over again, in float64 and pure Python, on small
seeded inputs.

    tests/scorers/make_merge.py > tests/scorers/merge.json

The formulas are those of D2O (arXiv 2406.13035), section 3.3, as merge_rows.h states them.
"""

import json
import math
import random

L, T, H, DK, DV, B = 2, 23, 2, 6, 5, 4  # Layers, tokens, kv heads, dims of K and V, block.
rng = random.Random(4)


def rounded(x):
    """The nearest number of 11 bits, which every way to store the input holds."""
    m, e = math.frexp(x)
    return math.ldexp(round(m * 2048) / 2048, e)


def normal(dim):
    return [[[[rounded(rng.gauss(0.3, 1)) for _ in range(dim)] for _ in range(H)] for _ in range(T)] for _ in range(L)]


def cosine(x, y):
    return math.fsum(a * b for a, b in zip(x, y)) / math.sqrt(math.fsum(a * a for a in x) * math.fsum(b * b for b in y))


def merged_plane(keys, values, kept, given, smoothing):
    """New keys and values of one plane, its threshold, and the number of tokens merged."""
    evicted = [t for t in range(T) if t not in kept]
    nearest = {e: max((cosine(keys[e], keys[c]), -c) for c in kept) for e in evicted}
    threshold = math.fsum(u for u, _ in nearest.values()) / len(evicted)
    if given is not None:
        threshold = smoothing * threshold + (1 - smoothing) * given
    lists = {c: [(1.0, c)] for c in kept}
    for e, (u, c) in nearest.items():
        if u >= threshold:
            lists[-c].append((u, e))
    mean = lambda rows, c: [math.fsum(math.exp(u) * rows[t][d] for u, t in lists[c]) / math.fsum(math.exp(u) for u, _ in lists[c])
                            for d in range(len(rows[c]))]
    return [mean(keys, c) for c in kept], [mean(values, c) for c in kept], threshold, sum(len(of) - 1 for of in lists.values())


def case(scope, kept_tokens, thresholds, smoothing):
    """`scope` says which planes keep the same tokens; thresholds: one for each plane, or none."""
    k, v = normal(DK), normal(DV)
    row = {"sequence": lambda l, h: 0, "layer": lambda l, h: l, "head": lambda l, h: l * H + h}[scope]
    rows = [sorted(rng.sample(range(T), kept_tokens)) for _ in range(row(L - 1, H - 1) + 1)]
    planes = [merged_plane([k[l][t][h] for t in range(T)], [v[l][t][h] for t in range(T)], rows[row(l, h)],
                           thresholds[l * H + h] if thresholds else None, smoothing) for l in range(L) for h in range(H)]
    return {"scope": scope, "k": k, "v": v, "kept": rows, "given": thresholds, "smoothing": smoothing, "merged_k": [p[0] for p in planes],
            "merged_v": [p[1] for p in planes], "thresholds": [p[2] for p in planes], "merged": [p[3] for p in planes]}


def main():
    cases = [case("head", 9, [], 0), case("layer", 5, [], 0), case("sequence", 14, [], 0), case("head", 9, [0.5, 0.6, 0.7, 2.0], 0),
             case("layer", 1, [0.2, 0.9, -0.4, 0.8], 0.7), case("sequence", 22, [-1.0] * 4, 0), case("head", 6, [0.9] * 4, 1)]
    print(json.dumps({"layers": L, "heads": H, "tokens": T, "k_dim": DK, "v_dim": DV, "tokens_per_block": B, "cases": cases}))


if __name__ == "__main__":
    main()
