#!/usr/bin/env python3
"""Makes drift.json: how far attention outputs move when tokens leave (cuda/scorers/parts/drift_rows.h) over again, in float64 and
pure Python, on small seeded inputs.

    tests/scorers/make_drift.py > tests/scorers/drift.json
"""

import json
import math
import random

L, T, H, G, DK, DV, B, Q = 2, 21, 2, 3, 6, 5, 4, 4  # Layers, tokens, kv heads, query heads of each, dims of K and V, block, queries.
rng = random.Random(7)


def rounded(x):
    """The nearest number of 11 bits, which every way to store the input holds."""
    m, e = math.frexp(x)
    return math.ldexp(round(m * 2048) / 2048, e)


def normal(*extents):
    if not extents:
        return rounded(rng.gauss(0.2, 1))
    return [normal(*extents[1:]) for _ in range(extents[0])]


def output(query, keys, values, tokens, scale):
    """softmax(q K^T * scale) V over these tokens, from the definition; zeros without any."""
    logits = {t: scale * math.fsum(a * b for a, b in zip(query, keys[t])) for t in tokens}
    weights = {t: math.exp(logit) for t, logit in logits.items()}
    total = math.fsum(weights.values())
    return [math.fsum(w * values[t][d] for t, w in weights.items()) / total if tokens else 0.0 for d in range(DV)]


def case(per_head, kept_tokens, scale, behind):
    k, v, q = normal(L, T, H, DK), normal(L, T, H, DV), normal(L, Q, H * G, DK)
    kept = [sorted(rng.sample(range(T), kept_tokens)) for _ in range(H if per_head else 1)]
    drifts = []
    for layer in range(L):
        for head in range(H * G):
            keys = [k[layer][t][head // G] for t in range(T)]
            values = [v[layer][t][head // G] for t in range(T)]
            stays = kept[head // G if per_head else 0]
            for query in range(Q):
                seen = T if behind else T - Q + query + 1
                factor = scale or 1 / math.sqrt(DK)
                whole = output(q[layer][query][head], keys, values, range(seen), factor)
                rest = output(q[layer][query][head], keys, values, [t for t in stays if t < seen], factor)
                drifts.append(math.dist(whole, rest) / math.hypot(*whole))
    of_layer = len(drifts) // L
    return {"k": k, "v": v, "q": q, "kept": kept, "scale": scale, "behind": behind,
            "sums": [math.fsum(min(d, 10) for d in drifts[i * of_layer:(i + 1) * of_layer]) for i in range(L)],
            "greatest": [max(drifts[i * of_layer:(i + 1) * of_layer]) for i in range(L)]}


def main():
    cases = [case(False, 10, 0, False), case(True, 7, 0.5, False), case(True, 20, 0, True), case(False, 1, 1.5, True)]
    print(json.dumps({"layers": L, "heads": H, "tokens": T, "q_heads": H * G, "queries": Q, "k_dim": DK, "v_dim": DV,
                      "tokens_per_block": B, "cases": cases}))


if __name__ == "__main__":
    main()
