#!/usr/bin/env python3
"""Makes vectors.json: every policy's formula over again, in float64 and pure Python, on small seeded inputs.

    tests/scorers/make_vectors.py > tests/scorers/vectors.json
"""

import cmath
import json
import math
import random
import statistics

L, T, H, D, B, W, G = 2, 13, 2, 6, 4, 3, 2  # Layers, tokens, kv heads, dims, block, window, query heads of a kv head.
rng = random.Random(20)


def normal(*shape):
    if not shape:
        return struct_float(rng.gauss(0, 1))
    return [normal(*shape[1:]) for _ in range(shape[0])]


def struct_float(x):
    """The nearest number that a float of 11 bits holds: input rounding is not what is tested."""
    m, e = math.frexp(x)
    return math.ldexp(round(m * 2048) / 2048, e)


def norm(x):
    return math.sqrt(sum(a * a for a in x))


def dot(x, y):
    return sum(a * b for a, b in zip(x, y))


def softmax(x):
    top = max(x)
    e = [math.exp(a - top) for a in x]
    return [a / sum(e) for a in e]


K, V = normal(L, T, H, D), normal(L, T, H, D)
Q = normal(L, W, H * G, D)
MASS = [[[struct_float(abs(rng.gauss(1, 0.7)) + 0.01) for _ in range(T)] for _ in range(H)] for _ in range(L)]
SQUARE = [[[m * m / 3 + 0.25 * i for i, m in enumerate(h)] for h in l] for l in MASS]
SQUARE = [[[struct_float(x) for x in h] for h in l] for l in SQUARE]
COUNTS = [[[float(T - i) for i in range(T)] for _ in range(H)] for _ in range(L)]


def token_signal():
    return [[[struct_float(abs(rng.gauss(0, 1))) for _ in range(T)] for _ in range(H)] for _ in range(L)]


LATEST, PEAK, HITS, IMPORTANCE, KEEP = (token_signal() for _ in range(5))
LAST = [[[float(rng.randint(i, 40)) for i in range(T)] for _ in range(H)] for _ in range(L)]
INTERVAL = [[[float(rng.choice([0, 1, 3, 7, 20])) for _ in range(T)] for _ in range(H)] for _ in range(L)]
NOW = 41.0
HIDDEN = normal(L, T, 5)
KV = {"K": K, "V": V}
# Statistics of queries, of a generator of their own: the numbers above and below stay as they are.
calibrated = random.Random(21)


def statistic(*shape):
    return [statistic(*shape[1:]) for _ in range(shape[0])] if shape else struct_float(calibrated.gauss(0, 1))


FILTERS, MEANS, ROOTS = statistic(L, H, D), statistic(L, H * G, D), statistic(L, H * G, D, D)
COVARIANCES = [[[[struct_float(dot(a, b) / D) for b in m] for a in m] for m in l] for l in ROOTS]
TRI = [[[complex(*pair) for pair in h] for h in l] for l in statistic(L, H, D // 2, 2)]
LENGTHS = [[[abs(x) for x in h] for h in l] for l in statistic(L, H, D // 2)]
OMEGA, OFFSETS = [struct_float(10000 ** (-2 * f / D)) for f in range(D // 2)], [1, 2, 4, 8, 16]


def keys(l, h):
    return [K[l][t][h] for t in range(T)]


def values(l, h):
    return [V[l][t][h] for t in range(T)]


def per_plane(f):
    return [[f(l, h) for h in range(H)] for l in range(L)]


def window(l, h):
    """Mean, variance and newest attention per token, as means over the group; the peak is the maximum over it."""
    mean, var, peak, latest = ([0.0] * T for _ in range(4))
    for g in range(G):
        rows = []
        for w in range(W):
            seen = T - (W - 1 - w)
            q = Q[l][w][h * G + g]
            a = softmax([dot(q, k) / math.sqrt(D) for k in keys(l, h)[:seen]])
            rows.append(a + [0.0] * (T - seen))
        for t in range(T):
            column = [r[t] for r in rows]
            m = sum(column) / W
            mean[t] += m / G
            var[t] += sum((c - m) ** 2 for c in column) / (W - 1) / G
            peak[t] = max(peak[t], *column)
            latest[t] += column[-1] / G
    return mean, var, peak, latest


def pooled(x, kernel, how):
    n, half = T - W, kernel // 2
    out = list(x)
    for i in range(n):
        part = [x[j] for j in range(max(0, i - half), min(n, i + half + 1))]
        out[i] = sum(part) / kernel if how == "avg" else max(part)
    return out


def paged(l, h):
    return [norm(v) / norm(k) for k, v in zip(keys(l, h), values(l, h))]


def keydiff(l, h, unit=True):
    ks = keys(l, h)
    anchor = [sum(k[d] / (norm(k) if unit else 1) for k in ks) / T for d in range(D)]
    return [-dot(k, anchor) / norm(k) / norm(anchor) for k in ks]


def lagkv(l, h, lag, sinks, cross):
    parts = (T - sinks) // lag
    if parts < 2:
        return [1 if t < sinks else (t - sinks) / (T - sinks) for t in range(T)]
    out = [1] * T

    def shares(rows, reference):
        low, high = [min(c) for c in zip(*reference)], [max(c) for c in zip(*reference)]
        scaled = [[(x - a) / (b - a) for x, a, b in zip(row, low, high)] for row in rows]
        return softmax([statistics.stdev(row) for row in scaled])

    for p in range(parts - 1):
        a, b, c = (sinks + lag * i for i in (p, p + 1, p + 2))
        u = [(x + y) / 2 for x, y in zip(*(shares(rows[a:b], rows[b:c]) for rows in (keys(l, h), values(l, h))))]
        out[a:b] = u if cross else [sorted(u).index(x) / lag for x in u]
    return out


def mix_bits(x):
    mask = (1 << 64) - 1
    x = ((x ^ x >> 30) * 0xbf58476d1ce4e5b9) & mask
    x = ((x ^ x >> 27) * 0x94d049bb133111eb) & mask
    return x ^ x >> 31


def sketch_of(columns, dim):
    """[column][dim], as parts/leverage.h states it."""
    def element(j, d):
        bits = mix_bits((j << 32) + d + 1)
        u, v = ((bits >> 40) + 1) / 2 ** 24, (bits >> 16 & 0xffffff) / 2 ** 24
        return math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v) / math.sqrt(columns)

    return [[element(j, d) for d in range(dim)] for j in range(columns)]


def z(x):
    return [(a - statistics.mean(x)) / statistics.stdev(x) for a in x]


def solve(matrix, right):
    """Gauss's elimination with pivots."""
    n = len(right)
    rows = [list(row) + [b] for row, b in zip(matrix, right)]
    for i in range(n):
        best = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[best] = rows[best], rows[i]
        for r in range(n):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i])]
    return [rows[i][n] / rows[i][i] for i in range(n)]


def turned_back(k, t, frequencies, interleaved):
    """The key of token t before RoPE."""
    out = list(k)
    for f, w in enumerate(frequencies):
        a, b = (2 * f, 2 * f + 1) if interleaved else (f, f + D // 2)
        pair = complex(k[a], k[b]) * cmath.exp(-1j * t * w)
        out[a], out[b] = pair.real, pair.imag
    return out


def leverage(l, h, columns, frequencies, interleaved=False, first=0, end=T):
    x = [turned_back(k, t, frequencies, interleaved) for t, k in enumerate(keys(l, h))][first:end]
    mean = [sum(column) / len(x) for column in zip(*x)]
    sketched = [[dot(s, [a - m for a, m in zip(row, mean)]) for s in sketch_of(columns, D)] for row in x]
    gram = [[sum(row[i] * row[j] for row in sketched) + 0.01 * (i == j) for j in range(columns)] for i in range(columns)]
    return z([dot(row, solve(gram, row)) for row in sketched])


def compactor(l, h, blending, sinks=8, recent=4, columns=48):
    attended = [m * norm(v) for m, v in zip(MASS[l][h], values(l, h))][sinks:T - recent]
    n = len(attended)
    attended = z([sum(attended[max(0, i - 1):i + 2]) / 3 for i in range(n)])
    inner = [blending * a + b for a, b in zip(leverage(l, h, columns, rope(10000), False, sinks, T - recent), attended)]
    return [max(inner)] * sinks + inner + [max(inner)] * recent


def rope(theta):
    return [theta ** (-2 * f / D) for f in range(D // 2)]


def rkv(l, h, lam, kernel, threshold, search):
    ks, n = keys(l, h), T - W
    attention = [0.0] * n
    for w in range(W):
        logits = [max(dot(Q[l][w][h * G + g], k) for g in range(G)) / math.sqrt(D) for k in ks[:n]]
        attention = [a + b / W for a, b in zip(attention, softmax(logits))]
    alike = [[0 if i == j else dot(ks[i], ks[j]) / norm(ks[i]) / norm(ks[j]) for j in range(T)] for i in range(T)]
    for row in alike:
        row[max([j for j in range(T) if row[j] > threshold and j >= T - search], default=0)] = 0
    redundancy = softmax([sum(column) / T for column in zip(*alike)])
    half = kernel // 2
    pool = [max(attention[max(0, i - half):i + half + 1]) for i in range(n)]
    return [(lam * pool[i] if i < n else 0) - (1 - lam) * redundancy[i] for i in range(T)]


def qfilters(l, h):
    return [-dot(FILTERS[l][h], k) for k in keys(l, h)]


def expected_attention(l, h, sinks=0, covariance=True, vnorm=True, epsilon=0):
    out = [0.0] * T
    for g in range(G):
        mean, form = MEANS[l][h * G + g], COVARIANCES[l][h * G + g]
        logits = [dot(mean, k) / math.sqrt(D) + covariance * dot(k, [dot(row, k) for row in form]) / (2 * D)
                  for k in keys(l, h)[sinks:]]
        for t, a in enumerate(softmax(logits)):
            out[sinks + t] += a / G
    if vnorm:
        out = [(a + epsilon) * norm(v) for a, v in zip(out, values(l, h))]
    return [max(out[sinks:]) + 1] * sinks + out[sinks:]


def triattention(l, h, position, interleaved=False, normalise=True):
    """With complex numbers, and the mean over offsets taken of scores."""
    half, out = D // 2, []
    for k in keys(l, h):
        pairs = [complex(k[2 * f], k[2 * f + 1]) if interleaved else complex(k[f], k[half + f]) for f in range(half)]
        at = [sum((TRI[l][h][f] * cmath.exp(1j * (position + o) * OMEGA[f]) * pairs[f].conjugate()).real
                  for f in range(half)) for o in OFFSETS]
        out.append(sum(at) / len(at) + sum(c * abs(x) for c, x in zip(LENGTHS[l][h], pairs)))
    if normalise:
        out = [(x - statistics.mean(out)) / statistics.stdev(out) for x in out]
    return out


def tri_weights():
    """Means over offsets, for position 0."""
    turns = [sum(cmath.exp(1j * o * w) for o in OFFSETS) / len(OFFSETS) for w in OMEGA]
    turned = [[[q * by for q, by in zip(TRI[l][h], turns)] for h in range(H)] for l in range(L)]
    out = []
    for l in range(L):
        for h in range(H):
            out += [x.real for x in turned[l][h]] + [x.imag for x in turned[l][h]] + LENGTHS[l][h]
    return out + OMEGA


def minmax(x):
    return [(a - min(x)) / (max(x) - min(x)) for a in x]


def l2(x):
    return [a / norm(x) for a in x]


def hybrid(l, h, scale, term):
    attention = [m / T for m in MASS[l][h]]
    recency = [i / T for i in range(T)]
    parts = [scale(attention), scale(recency), scale(term(l, h))]
    return [0.4 * a + 0.3 * r + 0.3 * s for a, r, s in zip(*parts)]


def roco(l, h, budget, recent):
    mean = [m / c for m, c in zip(MASS[l][h], COUNTS[l][h])]
    sd = [math.sqrt(max(0, s / c - m * m)) for s, c, m in zip(SQUARE[l][h], COUNTS[l][h], mean)]
    sd = [1e9 if i >= T - recent else s for i, s in enumerate(sd)]
    candidates = set(sorted(range(T), key=lambda i: (sd[i], i))[:budget - recent])
    return [m if i in candidates else m + 2 for i, m in enumerate(mean)]


def caote(l, h, fast):
    mass = MASS[l][h]
    alpha = [m / sum(mass) for m in mass]
    vs = values(l, h)
    x = [sum((1 / T if fast else a) * v[d] for a, v in zip(alpha, vs)) for d in range(D)]
    return [a / (1 - a) * norm([p - q for p, q in zip(x, v)]) for a, v in zip(alpha, vs)]


def caote_blocks(l, h, fast):
    mass = MASS[l][h]
    alpha = [m / sum(mass) for m in mass]
    vs = values(l, h)
    x = [sum((1 / T if fast else a) * v[d] for a, v in zip(alpha, vs)) for d in range(D)]
    out = []
    for first in range(0, T, B):
        inside = range(first, min(T, first + B))
        m = sum(alpha[i] for i in inside)
        u = [sum(alpha[i] * vs[i][d] for i in inside) / m for d in range(D)]
        out.append(m / (1 - m) * norm([p - q for p, q in zip(x, u)]))
    return out


def graphkv(l, h, sources):
    p, ks, taken = list(IMPORTANCE[l][h]), keys(l, h), []
    for _ in range(sources):
        j = max((i for i in range(T) if i not in taken), key=lambda i: (p[i], -i))
        taken.append(j)
        for i in range(T):
            if i not in taken:
                p[i] *= 1 - max(0, dot(ks[i], ks[j]) / norm(ks[i]) / norm(ks[j]))
    return p


def chunked(x, length):
    out = []
    for first in range(0, T, length):
        part = x[first:first + length]
        out += [sum(part) / len(part)] * len(part)
    return out


def triangle(rows):
    """R of rows = Q R, by Gram and Schmidt."""
    basis, r = [], [[0.0] * D for _ in range(D)]
    for d in range(D):
        column = [row[d] for row in rows]
        for i, q in enumerate(basis):
            r[i][d] = dot(q, column)
            column = [c - r[i][d] * a for c, a in zip(column, q)]
        r[d][d] = norm(column)
        basis.append([c / r[d][d] for c in column])
    return r


def projected(l, h, v, squares):
    """The mean over query heads of the 1-norm of W_o v; or the 2-norm over all of them by their number."""
    of_heads = [[dot(row, v) for row in w] for w in W_O[l][h]]
    if squares:
        return math.sqrt(sum(norm(x) ** 2 for x in of_heads)) / G
    return sum(sum(map(abs, x)) for x in of_heads) / G


def criticalkv(l, h, squares, budget, share=0.5):
    host = IMPORTANCE[l][h]
    scores = [(a + 1e-4) * projected(l, h, v, squares) for a, v in zip(host, values(l, h))]
    first = max(1, int(budget * share)) if budget and share else 0
    above = 2 * (max(scores) - min(scores))
    for t in sorted(range(T), key=lambda t: (host[t], t))[T - first:]:
        scores[t] += above
    return scores


def falling(x):
    return 2 / (1 + math.exp(x))


def lazy(l, h, h2):
    out = []
    for last, mri in zip(LAST[l][h], INTERVAL[l][h]):
        silence = NOW - last
        out.append(falling(silence / mri) + h2(mri) if mri else float(silence <= 0))
    return out


def mpcache_static(l, h):
    mean = window(l, h)[0]
    order = sorted(range(T), key=lambda i: (mean[i], i))
    uia, ia = set(order[:int(0.6 * T)]), set(order[T - int(0.1 * T):])
    return [m + (0 if i in uia else 2 if i in ia else 1) for i, m in enumerate(mean)]


def mpcache_dynamic(l, h, bound):
    ks, out = keys(l, h), []
    for first in range(0, T, B):
        part = ks[first:first + B]
        score = 0
        for g in range(G):
            q = [x / math.sqrt(D) for x in Q[l][W - 1][h * G + g]]
            for d in range(D):
                lo, hi = min(k[d] for k in part), max(k[d] for k in part)
                score += max(q[d] * lo, q[d] * hi) if bound == "upper" else q[d] * (0.6 * hi + 0.4 * lo)
        out += [score / G] * len(part)
    return out


def quest(l, h):
    ks, out = keys(l, h), []
    for first in range(0, T, B):
        part = ks[first:first + B]
        means = [[sum(xs) / G for xs in zip(*Q[l][w][h * G:(h + 1) * G])] for w in range(W)]
        bounds = [sum(max(x * min(c), x * max(c)) for x, c in zip(q, zip(*part))) / math.sqrt(D) for q in means]
        out += [max(bounds)] * len(part)
    return out


GATE = normal(L, H, 11)


def gate(l, h):
    w = GATE[l][h]
    mean = [sum(x[d] for x in HIDDEN[l]) / T for d in range(5)]
    return [1 / (1 + math.exp(-(dot(w[:5], x) + dot(w[5:10], mean) + w[10]))) for x in HIDDEN[l]]


def network(dim):
    return {"W1": normal(3, dim), "b1": normal(3), "w2": normal(3), "b2": normal(1)}


MLP, POOL_MLP = network(5), network(8)


def mlp(net, x):
    units = [max(0, dot(w, x) + b) for w, b in zip(net["W1"], net["b1"])]
    return 1 / (1 + math.exp(-(dot(net["w2"], units) + net["b2"][0])))


def pool_features(l, h, t):
    k, v = norm(K[l][t][h]), norm(V[l][t][h])
    return [k, v, v / k, -keydiff(l, h)[t], (T - 1 - t) / T, (NOW - LAST[l][h][t]) / T, MASS[l][h][t] / COUNTS[l][h][t],
            l / L]


# W_o of each query head, [hidden_dim][D]: of a kv head its group's, one over the other and divided by their number.
HIDDEN_DIM = 7
W_O = normal(L, H, G, HIDDEN_DIM, D)
STACKED = [[[[x / G for x in row] for w in W_O[l][h] for row in w] for h in range(H)] for l in range(L)]
ZAP = [{"W1": normal(3, 5), "b1": normal(3), "w2": normal(H, 3), "b2": normal(H)} for _ in range(L)]
ZAP_LINEAR = [{"w": normal(H, 5), "b": normal(H)} for _ in range(L)]


def gelu(x):
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def kvzap(l, h):
    z = ZAP[l]
    return [dot(z["w2"][h], [gelu(dot(w, x) + b) for w, b in zip(z["W1"], z["b1"])]) + z["b2"][h] for x in HIDDEN[l]]


# Gates of 3 elements and 2 bases, of a generator of their own.
gate_rng = random.Random(22)


def gates(*shape):
    return [gates(*shape[1:]) for _ in range(shape[0])] if shape else struct_float(gate_rng.gauss(0, 1))


FAST = [{"base": gates(H, 2, 3), "b": gates(H, G), "Q": gates(H, G, 3, 5), "c": gates(H, G, 3), "K": gates(H, 3, 5),
         "query_norm": gates(3), "key_norm": gates(3)} for _ in range(L)]


def fast_kvzip(l, h):
    w = FAST[l]

    def normed(x, scale):
        root = math.sqrt(sum(a * a for a in x) / len(x) + 1e-6)
        return [a / root * s for a, s in zip(x, scale)]

    def score(x):
        k = normed([dot(row, x) for row in w["K"][h]], w["key_norm"])
        of_group = []
        for g in range(G):
            q = normed([dot(row, x) + c for row, c in zip(w["Q"][h][g], w["c"][h][g])], w["query_norm"])
            own = math.exp(dot(k, q) / math.sqrt(3) + w["b"][h][g])
            of_group.append(own / (own + sum(math.exp(dot(base, q) / math.sqrt(3)) for base in w["base"][h])))
        return sum(of_group) / G

    return [score(x) for x in HIDDEN[l]]


def flat(x):
    if isinstance(x, dict):
        x = list(x.values())
    return [number for part in x for number in flat(part)] if isinstance(x, list) else [x]


CASES = []


def case(policy, scores, inputs, params=(), budget=0, blocks=None):
    """scores[l][h][t]; blocks[l][h][b] where the policy has its own."""
    sequence = [sum(scores[l][h][t] for l in range(L) for h in range(H)) / (L * H) for t in range(T)]
    if blocks is None:
        of_blocks = [sum(sequence[f:f + B]) / len(sequence[f:f + B]) for f in range(0, T, B)]
    else:
        of_blocks = [sum(blocks[l][h][b] for l in range(L) for h in range(H)) / (L * H) for b in range(len(blocks[0][0]))]
    inputs = dict(inputs, tokens_per_block=B)
    if budget:
        inputs["budget"] = budget
    CASES.append({
        "policy": policy, "params": list(params), "input": inputs, "token_scores": sequence, "block_scores": of_blocks,
        "plane_scores": [scores[l][h] for l in range(L) for h in range(H)]})


case("paged_eviction", per_plane(paged), KV)
sums = []
for l in range(L):
    sums.append([sum(norm(V[l][t][h]) for t in range(f, min(T, f + B)) for h in range(H)) / H /
                 (sum(norm(K[l][t][h]) for t in range(f, min(T, f + B)) for h in range(H)) / H + 1e-8)
                 for f in range(0, T, B)])
case("paged_eviction", per_plane(paged), KV, ["ratio=of_sums"], blocks=[[s, s] for s in sums])
case("streaming_llm", per_plane(lambda l, h: [1 if t < 4 else t / T for t in range(T)]), KV)
case("inverse_key_l2", per_plane(lambda l, h: [-norm(k) for k in keys(l, h)]), KV)
case("keydiff", per_plane(keydiff), KV)
case("keydiff", per_plane(lambda l, h: keydiff(l, h, False)), KV, ["anchor=mean"])
case("lagkv", per_plane(lambda l, h: lagkv(l, h, 128, 4, False)), KV)
case("lagkv", per_plane(lambda l, h: lagkv(l, h, 3, 2, False)), KV, ["lag=3", "sinks=2"])
case("lagkv", per_plane(lambda l, h: lagkv(l, h, 4, 0, True)), KV, ["lag=4", "sinks=0", "cross_scoring=true"])
case("leverage", per_plane(lambda l, h: leverage(l, h, 48, rope(10000))), KV)
case("leverage", per_plane(lambda l, h: leverage(l, h, 4, rope(500), True)), KV, ["sketch=4", "theta=500", "pairing=interleaved"])
case("leverage", per_plane(lambda l, h: leverage(l, h, 2, [])), KV, ["sketch=2", "rope=none"])
case("leverage", per_plane(lambda l, h: leverage(l, h, 5, OMEGA)), {"weights": OMEGA, **KV}, ["sketch=5", "rope=weights"])
case("compactor", per_plane(lambda l, h: compactor(l, h, 0.35, 2, 1)), {"mass": MASS, **KV}, ["sinks=2", "recent=1"])
case("compactor", per_plane(lambda l, h: compactor(l, h, 1 - 5 / T, 0, 3, 6)), {"mass": MASS, **KV},
     ["sinks=0", "recent=3", "sketch=6"], 5)
case("compactor", per_plane(lambda l, h: compactor(l, h, 2, 1, 0, 3)), {"mass": MASS, **KV},
     ["blending=2", "sinks=1", "recent=0", "sketch=3"])
case("qfilters", per_plane(qfilters), {"weights": FILTERS, **KV})
BOTH = [[[m, *c] for m, c in zip(*of_layer)] for of_layer in zip(MEANS, COVARIANCES)]
case("expected_attention", per_plane(lambda l, h: expected_attention(l, h, 4)), {"weights": BOTH, **KV})
case("expected_attention", per_plane(lambda l, h: expected_attention(l, h, 0, epsilon=0.25)), {"weights": BOTH, **KV},
     ["sinks=0", "epsilon=0.25"])
case("expected_attention", per_plane(lambda l, h: expected_attention(l, h, 1, False, False)), {"weights": MEANS, **KV},
     ["sinks=1", "use_covariance=false", "use_vnorm=false"])
TRIS = tri_weights()
case("triattention", per_plane(lambda l, h: triattention(l, h, T - 1)), {"weights": TRIS, **KV})
case("triattention", per_plane(lambda l, h: triattention(l, h, 100003, True)), {"weights": TRIS, "now": 100003.0, **KV},
     ["pairing=interleaved"])
case("triattention", per_plane(lambda l, h: triattention(l, h, 77, False, False)), {"weights": TRIS, "now": 77.0, **KV},
     ["normalise=false"])
case("attention_mean", per_plane(lambda l, h: [m / T for m in MASS[l][h]]), {"mass": MASS, **KV})
case("attention_mean", per_plane(lambda l, h: [m / c for m, c in zip(MASS[l][h], COUNTS[l][h])]), {"mass": MASS, **KV},
     ["norm=visible_queries"])
case("recency", per_plane(lambda l, h: [t / T for t in range(T)]), KV)
case("lru_token", LAST, {"last_attended": LAST, **KV})
for name, scale in (("minmax", minmax), ("l2", l2)):
    for term, f in (("keydiff", keydiff), ("paged_eviction", paged)):
        case("hybrid", per_plane(lambda l, h: hybrid(l, h, scale, f)), {"mass": MASS, **KV},
             ["normalise=" + name, "term=" + term])
case("h2o", MASS, {"mass": MASS, **KV})
case("roco", per_plane(lambda l, h: roco(l, h, 10, 3)), {"mass": MASS, "mass_square": SQUARE, **KV}, budget=10)
case("roco", per_plane(lambda l, h: roco(l, h, 9, 2)), {"mass": MASS, "mass_square": SQUARE, **KV}, ["recent=2"], 9)
case("tova", LATEST, {"latest": LATEST, **KV})
case("tova", per_plane(lambda l, h: window(l, h)[3]), {"queries": Q, **KV})
for policy in ("snapkv", "pyramidkv"):
    case(policy, per_plane(lambda l, h: pooled(window(l, h)[0], 5, "avg")), {"queries": Q, **KV})
    case(policy, per_plane(lambda l, h: pooled(window(l, h)[0], 3, "max")), {"queries": Q, **KV}, ["pool=max", "kernel=3"])
case("cake", per_plane(lambda l, h: pooled([m + 200 * v for m, v in zip(*window(l, h)[:2])], 5, "avg")),
     {"queries": Q, **KV})
case("rkv", per_plane(lambda l, h: rkv(l, h, 0.07, 7, 0.5, 4096)), {"queries": Q, **KV})
case("rkv", per_plane(lambda l, h: rkv(l, h, 0.5, 3, 0.2, 6)), {"queries": Q, **KV},
     ["lambda=0.5", "kernel=3", "threshold=0.2", "search=6"])
case("sage_kv", per_plane(lambda l, h: window(l, h)[3]), {"queries": Q, **KV})
for policy, fast in (("caote", False), ("fast_caote", True)):
    case(policy, per_plane(lambda l, h: caote(l, h, fast)), {"mass": MASS, **KV},
         blocks=per_plane(lambda l, h: caote_blocks(l, h, fast)))
case("graphkv", per_plane(lambda l, h: graphkv(l, h, 3)), {"importance": IMPORTANCE, **KV},
     ["host=importance", "sources=3"])
for length in (3, 5, 20):
    case("chunkkv", per_plane(lambda l, h: chunked(IMPORTANCE[l][h], length if length <= T else 1)),
         {"importance": IMPORTANCE, **KV}, ["host=importance", f"chunk_length={length}"])
case("chunkkv", per_plane(lambda l, h: chunked(pooled(window(l, h)[0], 5, "avg"), 4)), {"queries": Q, **KV},
     ["host=snapkv", "chunk_length=4"])
CRITICAL = {"importance": IMPORTANCE, "weights": STACKED, **KV}
case("criticalkv", per_plane(lambda l, h: criticalkv(l, h, False, 0)), CRITICAL, ["host=importance"])
case("criticalkv", per_plane(lambda l, h: criticalkv(l, h, False, 7)), CRITICAL, ["host=importance"], 7)
case("criticalkv", per_plane(lambda l, h: criticalkv(l, h, False, 1)), CRITICAL, ["host=importance"], 1)
case("criticalkv", per_plane(lambda l, h: criticalkv(l, h, False, 7, 0)), CRITICAL, ["host=importance", "first_stage=0"], 7)
for matrix in (STACKED, [[triangle(STACKED[l][h]) for h in range(H)] for l in range(L)]):
    case("criticalkv", per_plane(lambda l, h: criticalkv(l, h, True, 7)), {**CRITICAL, "weights": matrix},
         ["host=importance", "norm=l2"], 7)
LAZY = {"last_attended": LAST, "interval": INTERVAL, "now": NOW, **KV}
case("lazy_eviction", per_plane(lambda l, h: lazy(l, h, lambda m: falling(m - 1))), LAZY)
case("lazy_eviction", per_plane(lambda l, h: lazy(l, h, lambda m: falling(1 / m))), LAZY, ["h2=inverse"])
case("lazy_eviction", per_plane(lambda l, h: lazy(l, h, lambda m: 0)), LAZY, ["h2=off"])
case("attendre_lra", LAST, {"last_attended": LAST, **KV})
case("attendre_lfa", HITS, {"hits": HITS, **KV})
case("attendre_lfa", MASS, {"mass": MASS, **KV}, ["count=mass"])
case("importance", IMPORTANCE, {"importance": IMPORTANCE, **KV})
case("mpcache", per_plane(mpcache_static), {"queries": Q, **KV})
case("mpcache", per_plane(lambda l, h: mpcache_dynamic(l, h, "upper")), {"queries": Q, **KV}, ["stage=dynamic"])
case("mpcache", per_plane(lambda l, h: mpcache_dynamic(l, h, "linear")), {"queries": Q, **KV},
     ["stage=dynamic", "bound=linear"])
case("quest", per_plane(quest), {"queries": Q, **KV})
case("attention_gate", KEEP, {"keep": KEEP, **KV})
case("attention_gate", per_plane(gate), {"hidden": HIDDEN, "weights": GATE, **KV}, ["source=gate"])
case("learned_mlp", per_plane(lambda l, h: [mlp(MLP, x) for x in HIDDEN[l]]), {"hidden": HIDDEN, **MLP, **KV})
case("learned_mlp", per_plane(lambda l, h: [mlp(POOL_MLP, pool_features(l, h, t)) for t in range(T)]),
     {"mass": MASS, "last_attended": LAST, "now": NOW, **POOL_MLP, **KV}, ["features=pool"])
case("kvzap", per_plane(kvzap), {"hidden": HIDDEN, "weights": flat(ZAP), **KV})
case("kvzap", per_plane(lambda l, h: [float(s >= 0.25) for s in kvzap(l, h)]), {"hidden": HIDDEN, "weights": flat(ZAP), **KV},
     ["output=flag", "threshold=0.25"])
case("kvzap", per_plane(lambda l, h: [dot(ZAP_LINEAR[l]["w"][h], x) + ZAP_LINEAR[l]["b"][h] for x in HIDDEN[l]]),
     {"hidden": HIDDEN, "weights": flat(ZAP_LINEAR), **KV}, ["model=linear"])
case("fast_kvzip", per_plane(fast_kvzip), {"hidden": HIDDEN, "weights": flat(FAST), **KV}, ["dim=3", "bases=2"])
HEADS = [[struct_float(rng.random()) for _ in range(H)] for _ in range(L)]
HEADS[0][0], HEADS[0][1] = 0.75, 0.25  # A layer with a head of either kind.


def duo_attention(l, h, threshold, sinks, recent):
    if HEADS[l][h] >= threshold:
        return [1 + t / T for t in range(T)]
    return [2 if t < sinks or t >= T - recent else t / T for t in range(T)]


case("duo_attention", per_plane(lambda l, h: duo_attention(l, h, 0.5, 2, 4)), {"weights": HEADS, **KV}, ["sinks=2", "recent=4"])
case("duo_attention", per_plane(lambda l, h: duo_attention(l, h, 0.8, 128, 256)), {"weights": HEADS, **KV}, ["threshold=0.8"])
case("epicache", PEAK, {"peak": PEAK, **KV})
case("epicache", per_plane(lambda l, h: window(l, h)[2]), {"queries": Q, **KV})
case("kvzip", PEAK, {"peak": PEAK, **KV})
case("kvzip", per_plane(lambda l, h: window(l, h)[2]), {"queries": Q, **KV})

# K, V and the signals once, by name; a case's input refers to them.
SHARED = {"K": K, "V": V, "queries": Q, "mass": MASS, "mass_square": SQUARE, "last_attended": LAST, "hidden": HIDDEN,
          "interval": INTERVAL, "latest": LATEST, "peak": PEAK, "hits": HITS, "importance": IMPORTANCE, "keep": KEEP}
for c in CASES:
    c["uses"] = [name for name in c["input"] if name in SHARED]
    c["input"] = {name: x for name, x in c["input"].items() if name not in SHARED}


def rounded(x):
    if isinstance(x, list):
        return [rounded(y) for y in x]
    if isinstance(x, dict):
        return {name: rounded(y) for name, y in x.items()}
    return float(f"{x:.10g}") if isinstance(x, float) else x


lines = ",\n".join(json.dumps(rounded(c)) for c in CASES)
print('{"shared": ' + json.dumps(rounded(SHARED)) + ',\n"cases": [\n' + lines + "\n]}")
