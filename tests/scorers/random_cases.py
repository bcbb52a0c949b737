#!/usr/bin/env python3
"""Random problems of every size through kvpool-lab, against the formulas in doubles.

Usage: random_cases.py KVPOOL_LAB [SEEDS [FIRST_SEED]]

Plain lists and math, sharing nothing with make_vectors.py: what both agree on is the formula. A failure prints the seed
and keeps the problem's file.
"""
import json
import math
import os
import random
import subprocess
import sys
import tempfile

LAB = sys.argv[1]
SEEDS = int(sys.argv[2]) if len(sys.argv) > 2 else 8
FIRST_SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1


class Mismatch(Exception):
    pass


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


def norm(a):
    return math.sqrt(dot(a, a))


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def cosine(a, b):
    lengths = norm(a) * norm(b)
    return dot(a, b) / lengths if lengths > 0 else 0.0


def columns(rows):
    return [list(column) for column in zip(*rows)]


def lowest(scores, count, protected=()):
    """The `count` lowest, ties to the lowest index."""
    order = sorted((score, i) for i, score in enumerate(scores) if i not in protected)
    return sorted(i for _, i in order[:count])


class Case:
    """A problem in a file, and kvpool-lab's answer to it."""

    def __init__(self, rng, folder, seed):
        self.rng, self.folder, self.seed, self.name = rng, folder, seed, ""

    def lab(self, verb, policy, problem, *flags):
        self.name = f"{verb} {policy} {' '.join(flags)}"
        path = os.path.join(self.folder, "problem.json")
        with open(path, "w") as file:
            json.dump(problem, file)
        command = [LAB, verb, "--policy", policy, "--input", path, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Mismatch(f"{self.name}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def near(self, actual, expected, tolerance=1e-5, scale=0.0):
        if len(actual) != len(expected):
            raise Mismatch(f"{self.name}: {len(actual)} numbers, expected {len(expected)}")
        # Near 0, where a score is a difference of larger numbers, relative to a hundredth of the largest (of `scale`).
        least = max(scale, *(abs(x) for x in expected)) / 100
        for i, (a, e) in enumerate(zip(actual, expected)):
            if not abs(a - e) <= tolerance * max(abs(e), least, 1e-30):
                raise Mismatch(f"{self.name}: {a} at {i}, expected {e}")

    def same(self, actual, expected):
        if actual != expected:
            raise Mismatch(f"{self.name}: {actual}, expected {expected}")

    # Sizes and numbers, the odd ones among them often.
    def size(self, most):
        return self.rng.choice([1, 2, most, self.rng.randint(1, most), self.rng.randint(1, most)])

    def vectors(self, count, dim):
        scale = self.rng.choice([1, 1, 1e-3, 1e4])
        made = [[self.rng.gauss(0, scale) for _ in range(dim)] for _ in range(count)]
        if count > 2 and self.rng.random() < 0.3:
            made[self.rng.randrange(count)] = list(made[0])  # A tie.
        if self.rng.random() < 0.2:
            made[self.rng.randrange(count)] = [0.0] * dim
        return made

    def heads(self, tokens, heads, dim):
        flat = self.vectors(tokens * heads, dim)
        return [flat[t * heads:(t + 1) * heads] for t in range(tokens)]

    def distribution(self, count):
        weights = [math.exp(2 * self.rng.gauss(0, 1)) for _ in range(count)]
        return [w / sum(weights) for w in weights]


def blocks_of(scores, per_block):
    return [mean(scores[i:i + per_block]) for i in range(0, len(scores), per_block)]


def paged_eviction(case):
    tokens, heads, dim = case.size(60), case.size(5), case.size(40)
    block = case.rng.choice([1, 3, 4, 8, 16])
    budget = case.rng.randint(1, tokens + 5)
    k, v = case.heads(tokens, heads, dim), case.heads(tokens, heads, dim)
    problem = {"L": tokens, "B": block, "C": budget, "H": heads, "D": dim, "K": k, "V": v}
    scores = [mean(norm(v[t][h]) / max(norm(k[t][h]), 1e-6) for h in range(heads)) for t in range(tokens)]
    answer = case.lab("score", "paged_eviction", problem)
    case.near(answer["token_scores"], scores)
    case.near(answer["block_scores"], blocks_of(scores, block))
    # Victims by the scores that were answered: of two that differ in the last bits either may go first.
    answered = answer["token_scores"]
    answer = case.lab("compact", "paged_eviction", problem, "--param", "paper_literal=true")
    case.same(answer["victim_tokens"], lowest(answered, max(0, tokens - budget)))
    rest = tokens % block
    protected = set(range(block)) | set(range(tokens - rest - block, tokens))
    over = max(0, tokens - budget - rest)
    if over <= len([t for t in range(tokens) if t not in protected]):
        answer = case.lab("compact", "paged_eviction", problem)
        case.same(answer["victim_tokens"], lowest(answered, over, protected))
        case.same(answer["kept_tokens"], [t for t in range(tokens) if t not in answer["victim_tokens"]])
    full = tokens // block
    inner = set(range(1, full - 1))
    drop = max(0, -(-(full * block - budget) // block))
    if drop <= len(inner):
        answer = case.lab("prune", "paged_eviction", problem)
        outer = set(range(len(answer["block_scores"]))) - inner
        case.same(answer["victim_blocks"], lowest(answer["block_scores"], drop, outer))


def keys_alone(case):
    tokens, heads, dim = case.size(50), case.size(4), case.size(70)
    k = case.heads(tokens, heads, dim)
    problem = {"K": k}
    norms = [[norm(k[t][h]) for t in range(tokens)] for h in range(heads)]
    answer = case.lab("score", "inverse_key_l2", problem)
    case.near(answer["token_scores"], [-x for x in map(mean, columns(norms))])
    # In one dimension directions cancel, and what is left of their mean is rounding.
    for anchor in ("unit", "mean") if dim > 1 else ():
        expected, scales = [], []
        for h in range(heads):
            counted = [k[t][h] for t in range(tokens) if norms[h][t] > 0]
            unit = [[x / norm(row) for x in row] if anchor == "unit" else row for row in counted]
            center = [mean(column) for column in columns(unit)] if unit else [0.0] * dim
            expected.append([-cosine(k[t][h], center) for t in range(tokens)])
            # Directions that nearly cancel leave a mean that is mostly rounding.
            length = mean(map(norm, unit)) if unit else 0
            scales.append(max(1, length / norm(center) if norm(center) > 0 else 0))
        answer = case.lab("score", "keydiff", problem, "--param", f"anchor={anchor}", "--scope", "head")
        rows = answer["token_scores"] if heads > 1 else [answer["token_scores"]]
        for h in range(heads):
            case.near(rows[h], expected[h], 5e-5, scale=scales[h])


def reference_rows(seed):
    """Logits of the reference runs: a stream of sums of four uniform numbers."""
    x = seed
    while True:
        total = -2.0
        for _ in range(4):
            x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
            total += (x >> 11) / 2**53
        yield 2 * total * math.sqrt(3)


def grow(steps, budget, seed, choose):
    logits = reference_rows(seed)
    residents, evictions = [], []  # token, sum, sum of squares, newest, steps
    for step in range(steps):
        residents.append([step, 0.0, 0.0, 0.0, 0])
        row = [next(logits) for _ in residents]
        exps = [math.exp(x - max(row)) for x in row]
        for resident, e in zip(residents, exps):
            p = e / sum(exps)
            resident[1] += p
            resident[2] += p * p
            resident[3] = p
            resident[4] += 1
        if len(residents) > budget:
            evictions.append([step, residents.pop(choose(residents))[0]])
    return evictions, [resident[0] for resident in residents]


def growth(case):
    steps = case.rng.choice([1, 2, 40, case.rng.randint(1, 70)])
    budget = case.rng.choice([1, 2, steps, steps + 3, case.rng.randint(1, 30)])
    recent = case.rng.randint(0, budget)
    seed = case.rng.choice([3, case.rng.randint(1, 1000)])
    least = lambda values: min((value, i) for i, value in values)[1]

    def h2o(residents):
        return least((i, r[1]) for i, r in enumerate(residents[:len(residents) - recent]))

    def tova(residents):
        return least((i, r[3]) for i, r in enumerate(residents))

    def roco(residents):
        count = len(residents)
        deviation = [math.sqrt(max(0.0, r[2] / r[4] - (r[1] / r[4])**2)) for r in residents]
        for i in range(max(0, count - 3), count):
            deviation[i] = 1e9
        scope = sorted(range(count), key=lambda i: (deviation[i], i))[:max(1, budget - recent)]
        return least((i, residents[i][1] / residents[i][4]) for i in scope)

    problem = {"T": steps, "budget": budget, "recent": recent, "seed": seed}
    for policy, choose in (("h2o", h2o), ("tova", tova), ("roco", roco)):
        evictions, final = grow(steps, budget, seed, choose)
        answer = case.lab("compact", policy, problem)
        case.same(answer["evictions"], evictions)
        case.same(answer["final"], final)


def caote(case):
    tokens, dim = case.size(40), case.size(30)
    alpha, v = case.distribution(tokens + 1)[:tokens], case.vectors(tokens, dim)
    alpha = [a / sum(alpha) for a in alpha]
    if max(alpha) > 0.95:
        return  # 1 - a and X - v are then differences of nearly equal floats; with one token nothing stays at all.
    output = [dot(alpha, column) for column in columns(v)]
    center = [mean(column) for column in columns(v)]
    for policy, x in (("caote", output), ("fast_caote", center)):
        expected = [a / (1 - a) * norm([p - q for p, q in zip(x, row)]) for a, row in zip(alpha, v)]
        case.near(case.lab("score", policy, {"alpha": alpha, "V": v})["token_scores"], expected)


def lazy(case):
    tokens, now = case.size(20), 0
    activations = {}
    for token in range(tokens):
        steps = sorted(case.rng.sample(range(token, token + 60), case.rng.randint(0, 5)))
        activations[str(token)] = steps
        now = max([now, token, *steps])
    now += case.rng.randint(0, 30)
    sigmoid = lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    expected = []
    for token in range(tokens):
        steps = [token, *activations[str(token)]]
        gap = max(b - a for a, b in zip(steps, steps[1:])) if len(steps) > 1 else 0
        silence = now - steps[-1]
        if gap == 0:
            expected.append(1.0 if silence == 0 else 0.0)
        else:
            expected.append(2 * sigmoid(-silence / gap) + 2 * sigmoid(-(gap - 1)))
    case.near(case.lab("score", "lazy_eviction", {"t": now, "activations": activations})["token_scores"], expected)


def graphkv(case):
    tokens, dim = case.size(30), case.size(20)
    k, importance = case.vectors(tokens, dim), case.distribution(tokens)
    count = case.rng.randint(1, tokens + 2)
    decay = lambda i, j: min(1.0, max(0.0, 1 - max(0.0, cosine(k[i], k[j]))))
    scores, taken = list(importance), []
    while len(taken) < min(count, tokens):
        best = max((scores[i], -i) for i in range(tokens) if i not in taken)
        taken.append(-best[1])
        scores = [s if i in taken else s * decay(i, taken[-1]) for i, s in enumerate(scores)]
    problem = {"K": k, "importance": importance}
    case.near(case.lab("score", "graphkv", problem, "--param", f"sources={count}")["token_scores"], scores,
              scale=max(importance))
    sources = sorted(range(tokens), key=lambda i: (-importance[i], i))[:count]
    scores = [s * math.prod(decay(i, j) for j in sources if j != i) for i, s in enumerate(importance)]
    answer = case.lab("score", "graphkv", problem, "--param", f"sources={count}", "--param", "mode=all")
    case.near(answer["token_scores"], scores, scale=max(importance))


def cake(case):
    layers, rows, keys = case.size(5), case.rng.randint(2, 12), case.size(30)
    attention = [[case.distribution(keys) for _ in range(rows)] for _ in range(layers)]
    tau1, tau2 = case.rng.choice([(1, 1), (1.6, 0.4), (0.9, 2.3)])
    budget = case.rng.randint(1, keys)
    preferences, indicators = [], []
    for layer in attention:
        per_key = columns(layer)
        variances = [math.fsum((a - mean(col))**2 for a in col) / (rows - 1) for col in per_key]
        entropy = -math.fsum(a * math.log(a + 1e-10) for row in layer for a in row)
        preferences.append(max(entropy, 0.0)**(1 / tau1) * math.fsum(variances)**(1 / tau2))
        indicators.append([mean(col) + 200 * x for col, x in zip(per_key, variances)])
    problem = {"attn": attention, "tau1": tau1, "tau2": tau2}
    answer = case.lab("score", "cake", problem, "--param", "pool=none", "--scope", "layer")
    rows_of = answer["token_scores"] if layers > 1 else [answer["token_scores"]]
    for actual, expected in zip(rows_of, indicators):
        case.near(actual, expected)
    answer = case.lab("budgets", "cake", problem, "--budget", str(budget))
    case.near(answer["preferences"], preferences)
    total = sum(preferences)
    shares = [p / total if total > 0 else 1 / layers for p in preferences]
    case.near(answer["shares"], [s * budget * layers for s in shares])
    case.same(sum(answer["budgets"]), budget * layers)


def mpcache(case):
    blocks, per_block, dim = case.size(12), case.size(9), case.size(20)
    clusters = [case.vectors(per_block, dim) for _ in range(blocks)]
    q = case.vectors(1, dim)[0]
    problem = {"q": q, "clusters": clusters}
    bounds = [[(max(col), min(col)) for col in columns(cluster)] for cluster in clusters]
    upper = [math.fsum(max(x * hi, x * lo) for x, (hi, lo) in zip(q, bound)) for bound in bounds]
    linear = [math.fsum(x * (0.6 * hi + 0.4 * lo) for x, (hi, lo) in zip(q, bound)) for bound in bounds]
    terms = max(math.fsum(abs(x) * max(abs(hi), abs(lo)) for x, (hi, lo) in zip(q, bound)) for bound in bounds)
    for bound, expected in (("upper", upper), ("linear", linear)):
        answer = case.lab("score", "mpcache", problem, "--param", "stage=dynamic", "--param", f"bound={bound}")
        case.near(answer["block_scores"], expected, scale=terms)
    largest = [max(dot(q, row) for row in cluster) for cluster in clusters]
    if any(bound < true - 1e-9 * abs(true) for bound, true in zip(upper, largest)):
        raise Mismatch("the bound of the reference itself is below a true maximum")


def budgets(case):
    layers, capacity = case.rng.randint(2, 40), case.rng.randint(70, 2000)
    window, beta = case.rng.randint(1, 64), case.rng.randint(1, 30)
    length = case.rng.randint(2 * capacity, 5000)
    least = (capacity - window) // beta
    most = 2 * (capacity - window) - least
    if most >= length - window:
        most = length - window
        least = 2 * (capacity - window) - most
    step = (most - least) // (layers - 1)
    problem = {"layers": layers, "cap": capacity, "win": window, "qlen": length, "beta": beta}
    answer = case.lab("budgets", "pyramid", problem)
    case.same(answer["budgets"], [most - layer * step for layer in range(layers)])

    scores = [case.rng.random() for _ in range(layers)]
    average, power = case.rng.randint(4, 4096), case.rng.choice([1.0, 2.0, 3.5])
    low, high = min(scores), max(scores)
    weights = [(1 - (s - low) / (high - low))**power for s in scores]
    exact = [average * layers * w / sum(weights) for w in weights]
    answer = case.lab("budgets", "epicache", {"scores": scores, "avg": average, "power": power})
    for actual, expected in zip(answer["as_authors"], exact):
        if abs(actual - max(average // 4, expected)) > 1:
            raise Mismatch(f"epicache: {actual}, expected {max(average // 4, int(expected))}")
    case.same(sum(answer["budgets"]), average * layers)

    rho = case.rng.choice([0.05, 0.2, 0.9])
    exps = [math.exp(-f) for f in scores]
    ratios = [min(1.0, max(0.01, e / sum(exps) * layers * rho)) for e in exps]
    answer = case.lab("budgets", "d2o", {"normalised_variance": scores, "rho": rho})
    case.near(answer["ratios"], ratios, 1e-8)


PARTS = (paged_eviction, keys_alone, growth, caote, lazy, graphkv, cake, mpcache, budgets)


def main():
    folder = tempfile.mkdtemp()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        for part in PARTS:
            case = Case(random.Random(f"{part.__name__} {seed}"), folder, seed)
            try:
                part(case)
            except Mismatch as mismatch:
                print(f"{part.__name__}, seed {seed}: {mismatch}\n{folder}/problem.json", file=sys.stderr)
                return 1
    for name in os.listdir(folder):
        os.remove(os.path.join(folder, name))
    os.rmdir(folder)
    print(f"{SEEDS} seeds of {len(PARTS)} kinds of problems agree")
    return 0


sys.exit(main())
