#!/usr/bin/env python3
"""Makes scenarios.json: what policies choose and plan, step by step, in float64 and pure Python, on small seeded inputs.

    tests/scorers/make_scenarios.py > tests/scorers/scenarios.json

make_vectors.py has the scores of every policy; this has what follows from them: victims of a prompt and of decoding, sequences
that grow, budgets of layers. The sources of the formulas are named in cuda/scorers/policies. Ties go to the lowest index.
"""

import json
import math
import random


def norm(x):
    return math.sqrt(math.fsum(a * a for a in x))


def dot(x, y):
    return math.fsum(a * b for a, b in zip(x, y))


def mean(x):
    x = list(x)
    return math.fsum(x) / len(x)


def columns(rows):
    return [list(column) for column in zip(*rows)]


def lowest(scores, count, candidates):
    return sorted(sorted(candidates, key=lambda i: (scores[i], i))[:count])


def token_ratios(k, v):
    """Mean over the heads of |V| / |K|, for each token."""
    return [mean(norm(x) / norm(y) for x, y in zip(values, keys)) for keys, values in zip(k, v)]


def paged_eviction(given):
    """Compaction of a prompt to C tokens, and then the block that leaves each time one is full: with the first and the newest full
    block protected, and without."""
    length, per_block, budget = given["L"], given["B"], given["C"]
    scores = token_ratios(given["K"], given["V"])
    rest = length % per_block
    inner = range(per_block, length - rest - per_block)
    answer = {
        "S": scores,
        "evict_prefill_paper": lowest(scores, length - budget, range(length)),
        "evict_prefill_first_last_protected": lowest(scores, length - budget - rest, inner),
        "decode": [],
    }
    kept = [t for t in range(length) if t not in set(answer["evict_prefill_paper"])]
    pages = [[scores[t] for t in kept[i:i + per_block]] for i in range(0, len(kept), per_block)]
    pages, new = [mean(page) for page in pages], iter(given["decoded"])
    for step in range(per_block, per_block * (len(given["decoded"]) + 1), per_block):
        pages.append(next(new))
        everywhere, inside = range(len(pages)), range(1, len(pages) - 1)
        protected = lowest(pages, 1, inside)[0]
        answer["decode"].append({"step": step, "page_scores": list(pages), "evict_paper": lowest(pages, 1, everywhere)[0],
                                 "evict_protected": protected})
        pages.pop(protected)
    return answer


def keydiff(keys, unit):
    """Minus the cosine to the mean of all directions, or of all keys."""
    anchor = [mean(column) for column in columns([[x / norm(k) for x in k] if unit else k for k in keys])]
    return [-dot(k, anchor) / norm(k) / norm(anchor) for k in keys]


def logits(seed):
    """Twice a sum of four uniform numbers, scaled to a variance of one."""
    x = seed
    while True:
        total = -2.0
        for _ in range(4):
            x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
            total += (x >> 11) / 2**53
        yield 2 * math.sqrt(3) * total


class Resident:
    def __init__(self, token):
        self.token, self.sum, self.squares, self.latest, self.steps = token, 0.0, 0.0, 0.0, 0

    def attend(self, p):
        self.sum, self.squares, self.latest, self.steps = self.sum + p, self.squares + p * p, p, self.steps + 1

    def mean(self):
        return self.sum / self.steps

    def deviation(self):
        return math.sqrt(max(0.0, self.squares / self.steps - self.mean()**2))


def least(residents, number, places):
    return min(places, key=lambda i: (number(residents[i]), i))


def leaves_h2o(residents, given):
    return least(residents, lambda r: r.sum, range(len(residents) - given["recent"]))


def leaves_tova(residents, _):
    return least(residents, lambda r: r.latest, range(len(residents)))


def leaves_roco(residents, given):
    """Of those whose attention varies least, the one with the least mean. The last three are protected by their variance."""
    deviations = [r.deviation() if i < len(residents) - 3 else math.inf for i, r in enumerate(residents)]
    scope = sorted(range(len(residents)), key=lambda i: (deviations[i], i))[:given["budget"] - given["recent"]]
    return least(residents, lambda r: r.mean(), scope)


def grow(given, leaves):
    source, residents, evictions = logits(3), [], []
    for step in range(given["T"]):
        residents.append(Resident(step))
        row = [math.exp(next(source)) for _ in residents]
        for resident, weight in zip(residents, row):
            resident.attend(weight / math.fsum(row))
        if len(residents) > given["budget"]:
            evictions.append([step, residents.pop(leaves(residents, given)).token])
    return {"evictions": evictions, "final": [r.token for r in residents]}


def caote(given):
    """How far the output moves when a token is taken out; by the formula, and by taking it out."""
    alpha, v = given["alpha"], given["V"]
    output, center = [dot(alpha, x) for x in columns(v)], [mean(x) for x in columns(v)]

    def moved(x):
        return [a / (1 - a) * norm([p - q for p, q in zip(x, row)]) for a, row in zip(alpha, v)]

    without = []
    for j, a in enumerate(alpha):
        rest = [0.0 if i == j else b / (1 - a) for i, b in enumerate(alpha)]
        without.append(norm([dot(rest, x) - y for x, y in zip(columns(v), output)]))
    return {"caote": moved(output), "fast_caote": moved(center), "brute_force": without}


def decay(k, i, j):
    return 1 - max(0.0, dot(k[i], k[j]) / norm(k[i]) / norm(k[j]))


def graphkv_all(given):
    p, k = given["importance"], given["K"]
    sources = sorted(range(len(p)), key=lambda i: (-p[i], i))[:3]
    return {"after_one_round_all_sources_exclude_self": [x * math.prod(decay(k, i, j) for j in sources if j != i)
                                                         for i, x in enumerate(p)]}


def graphkv_sequential(given):
    p, k, sources = list(given["importance"]), given["K"], []
    for _ in range(3):
        best = min((i for i in range(len(p)) if i not in sources), key=lambda i: (-p[i], i))
        sources.append(best)
        p = [x if i in sources else x * decay(k, i, best) for i, x in enumerate(p)]
    return {"after": p}


def falling(x):
    return 2 / (1 + math.exp(x))


def lazy(given):
    """A token was active when it came. MRI is the longest time between two activations."""
    tokens = {}
    for token, active in given["activations"].items():
        steps = [int(token), *active]
        interval = max(b - a for a, b in zip(steps, steps[1:]))
        tokens[token] = {"H1": falling((given["t"] - steps[-1]) / interval), "H2_decreasing_variant": falling(interval - 1)}
    return {"tokens": tokens}


def cake(given):
    preferences, indicators = [], []
    for rows in given["attn"]:
        of_keys = columns(rows)
        variances = [math.fsum((p - mean(key))**2 for p in key) / (len(rows) - 1) for key in of_keys]
        entropy = -math.fsum(p * math.log(p + 1e-10) for row in rows for p in row)
        preferences.append(entropy**(1 / given["tau1"]) * math.fsum(variances)**(1 / given["tau2"]))
        indicators.append([mean(key) + 200 * variance for key, variance in zip(of_keys, variances)])
    return {"pref": preferences, "float_budget": [p / math.fsum(preferences) * 10 * len(preferences) for p in preferences],
            "indicator_gamma200_layer1": indicators[1]}


def mpcache(given):
    scores, q = [], given["q"]
    for cluster in given["clusters"]:
        ends = [(min(x), max(x)) for x in columns(cluster)]
        scores.append({"upper": math.fsum(max(a * low, a * high) for a, (low, high) in zip(q, ends)),
                       "linear_alpha0_6": math.fsum(a * (0.6 * high + 0.4 * low) for a, (low, high) in zip(q, ends)),
                       "true_max": max(dot(q, key) for key in cluster)})
    return {"scores": scores}


def epicache(given):
    low, high = min(given["scores"]), max(given["scores"])
    weights = [(1 - (x - low) / (high - low))**given["power"] for x in given["scores"]]
    total = given["avg"] * len(weights)
    return {"out": [int(max(given["avg"] / 4, total * w / math.fsum(weights))) for w in weights]}


def pyramid(given):
    room = given["cap"] - given["win"]
    bottom = room // given["beta"]
    top = 2 * room - bottom
    if top >= given["qlen"] - given["win"]:
        top = given["qlen"] - given["win"]
        bottom = 2 * room - top
    step = (top - bottom) // (given["layers"] - 1)
    return {"middle_budgets": [top - layer * step for layer in range(given["layers"])]}


def d2o(given):
    weights = [math.exp(-f) for f in given["normalised_variance"]]
    return {"ratio": [min(1.0, max(0.01, w / math.fsum(weights) * len(weights) * given["rho"])) for w in weights]}


def answers(given):
    """The expected part of the file, from its inputs."""
    head0 = [heads[0] for heads in given["paged_eviction"]["K"]]
    return {
        "paged_eviction": paged_eviction(given["paged_eviction"]),
        "knorm_head0": [-norm(k) for k in head0],
        "keydiff_head0_normalised_anchor": keydiff(head0, unit=True),
        "keydiff_head0_plain_mean_anchor": keydiff(head0, unit=False),
        "h2o": grow(given["h2o"], leaves_h2o),
        "roco": grow(given["roco"], leaves_roco),
        "tova": grow(given["tova"], leaves_tova),
        "caote": caote(given["caote"]),
        "graphkv": graphkv_all(given["graphkv"]),
        "graphkv_sequential": graphkv_sequential(given["graphkv"]),
        "lazy": lazy(given["lazy"]),
        "cake": cake(given["cake"]),
        "mpcache": mpcache(given["mpcache"]),
        "budgets": {name: f(given["budgets"][name]) for name, f in (("epicache", epicache), ("pyramid", pyramid), ("d2o", d2o))},
    }


def inputs(rng):
    def normal(*shape):
        return [normal(*shape[1:]) for _ in range(shape[0])] if shape else round(rng.gauss(0, 1), 4)

    def distribution(count, spread):
        weights = [math.exp(spread * rng.gauss(0, 1)) for _ in range(count)]
        # The last takes what rounding leaves, so that the sum is one.
        rounded = [round(w / math.fsum(weights), 6) for w in weights[1:]]
        return [round(1 - math.fsum(rounded), 6), *rounded]

    graph = {"K": normal(12, 4), "importance": distribution(12, 0.8)}
    graph["K"][5] = [2 * x for x in graph["K"][2]]  # Near-duplicates wipe each other out where all are sources at once.
    graph["importance"][2], graph["importance"][5] = 0.28, 0.27
    return {
        "paged_eviction": {"L": 27, "B": 4, "C": 14, "K": normal(27, 2, 6), "V": normal(27, 2, 6),
                           "decoded": [round(rng.uniform(0.8, 1.6), 4) for _ in range(6)]},
        "h2o": {"T": 48, "budget": 14, "recent": 7},
        "roco": {"T": 48, "budget": 14, "recent": 4},
        "tova": {"T": 48, "budget": 14, "recent": 7},
        "caote": {"alpha": distribution(11, 1), "V": normal(11, 5)},
        "graphkv": graph,
        "lazy": {"t": 63, "activations": {"0": [3, 6, 9, 60], "1": [20, 40, 59], "2": [3], "3": [30, 31], "4": [5, 50], "5": [62]}},
        "cake": {"attn": [[distribution(20, spread) for _ in range(8)] for spread in (0.1, 0.7, 1.5)], "tau1": 1.6, "tau2": 0.6},
        "mpcache": {"q": normal(6), "clusters": normal(5, 4, 6)},
        "budgets": {"epicache": {"scores": [0.93, 0.88, 0.71, 0.55], "avg": 1024, "power": 2.0},
                    "pyramid": {"layers": 12, "cap": 256, "win": 32, "qlen": 2048, "beta": 14},
                    "d2o": {"normalised_variance": [0.05, 0.3, 0.4, 0.95], "rho": 0.25}},
    }


def rounded(x):
    if isinstance(x, dict):
        return {name: rounded(y) for name, y in x.items()}
    if isinstance(x, list):
        return [rounded(y) for y in x]
    return float(f"{x:.12g}") if isinstance(x, float) else x


def joined(given, answer):
    """A file's form: what is given and what is expected, side by side."""
    if not isinstance(given, dict):
        return answer
    return {name: joined(given.get(name), answer[name]) if name in answer else given[name] for name in {**given, **answer}}


def main():
    given = inputs(random.Random(31))
    whole = rounded(joined(given, answers(given)))
    print("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(part)}" for name, part in whole.items()) + "\n}")


if __name__ == "__main__":
    main()
