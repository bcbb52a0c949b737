#!/usr/bin/env python3
"""Makes hits.json: seeded requests, and how many blocks of them each replacement policy finds, as its paper or header says.

    tests/replacement/make_hits.py > tests/replacement/hits.json

The models know contents, not blocks, walk lists, and share nothing with the naive twins. A request asks for a chain of contents;
its leading run of resident ones is found, victims make room for the rest, then all of it is used, the tail first. A victim has no
resident child and is not part of the request.
"""

import json
import math
import random
import struct

FOREVER = 1 << 60


class Policy:
    """Told what happens to contents; victim() gets those that may leave, and names one."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.resident = {}  # content: when it was used last
        self.clock = 0

    def tick(self):
        self.clock += 1
        return self.clock

    def insert(self, x, parent):
        self.resident[x] = self.tick()

    def hit(self, x):
        pass

    def used(self, x):
        self.resident[x] = self.tick()

    def evict(self, x):
        del self.resident[x]

    def rank(self, x):
        return 0

    def victim(self, may_leave):
        return min(may_leave, key=lambda x: (self.rank(x), self.resident[x]))


class Lru(Policy):
    pass


class Fifo(Policy):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.since = {}

    def insert(self, x, parent):
        super().insert(x, parent)
        self.since[x] = self.tick()

    def rank(self, x):
        return self.since[x]


class LruK(Policy):
    """K = 2. The last access of what left is remembered for as many evictions as there are blocks."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.accesses, self.past = {}, {}

    def insert(self, x, parent):
        super().insert(x, parent)
        self.accesses[x] = [self.past.pop(x, 0), self.tick()]

    def hit(self, x):
        self.accesses[x] = [self.accesses[x][1], self.tick()]

    def evict(self, x):
        self.past[x] = self.accesses.pop(x)[1]
        while len(self.past) > len(self.resident):
            del self.past[next(iter(self.past))]
        super().evict(x)

    def rank(self, x):
        return self.accesses[x][0]


class GreedyDual(Policy):
    """Frequency times cost, above the worth of the last victim. With equal costs this is LFU with dynamic ageing."""

    def __init__(self, capacity, cost_per_depth=0.0):
        super().__init__(capacity)
        self.cost_per_depth, self.age = cost_per_depth, 0.0
        self.depth, self.frequency, self.worth = {}, {}, {}

    def access(self, x):
        self.worth[x] = self.age + self.frequency[x] * (1 + self.cost_per_depth * self.depth[x])

    def insert(self, x, parent):
        super().insert(x, parent)
        self.depth[x] = 0 if parent is None else self.depth[parent] + 1
        self.frequency[x] = 1
        self.access(x)

    def hit(self, x):
        self.frequency[x] += 1
        self.access(x)

    def evict(self, x):
        super().evict(x)
        self.age = max(self.age, self.worth[x])

    def rank(self, x):
        return self.worth[x]


class Gdsf(GreedyDual):
    """The cost of prefill, of the 8B model of the simulator's defaults."""

    def __init__(self, capacity):
        super().__init__(capacity, 1.31e-3 * TOKENS_PER_BLOCK / 40)


class LengthAware(GreedyDual):
    """Least frequently used without ageing; among equals the deepest leaves."""

    def rank(self, x):
        return (self.frequency[x], -self.depth[x])


class Retention(Policy):
    """Priorities begin at 50, rise by 50 with each hit up to 100, and halve with each turnover. The first to fall to 1 leaves."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.half_life, self.inserted, self.priority = capacity + 1, 0, {}

    def set(self, x, priority):
        self.priority[x] = struct.unpack("f", struct.pack("f", min(100.0, priority)))[0], self.inserted

    def insert(self, x, parent):
        super().insert(x, parent)
        self.inserted += 1
        self.set(x, 50.0)

    def hit(self, x):
        priority, since = self.priority[x]
        self.set(x, priority * 2.0 ** (-(self.inserted - since) / self.half_life) + 50)

    def rank(self, x):
        priority, since = self.priority[x]
        return math.floor(since + self.half_life * math.log2(max(1.0, priority)))


class Queues(Policy):
    """Lists of contents, the oldest first."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.queues = {"once": [], "again": []}

    def where(self, x):
        return next(name for name, queue in self.queues.items() if x in queue)

    def move(self, x, name):
        for queue in self.queues.values():
            if x in queue:
                queue.remove(x)
        self.queues[name].append(x)

    def insert(self, x, parent):
        super().insert(x, parent)
        self.move(x, "once")

    def evict(self, x):
        super().evict(x)
        self.queues[self.where(x)].remove(x)

    def oldest(self, name, may_leave):
        return next((x for x in self.queues[name] if x in may_leave), None)


class Slru(Queues):
    """A hit protects; four fifths may be protected. Those that are not leave first."""

    def hit(self, x):
        self.move(x, "again")
        while 5 * len(self.queues["again"]) > 4 * len(self.resident):
            self.move(self.queues["again"][0], "once")

    def used(self, x):
        self.move(x, self.where(x))

    def victim(self, may_leave):
        x = self.oldest("once", may_leave)
        return self.oldest("again", may_leave) if x is None else x


class Arc(Queues):
    """Megiddo and Modha, FAST 2003, figure 4, but that room is made before the next content is known."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.b1, self.b2, self.p = [], [], 0

    def insert(self, x, parent):
        super().insert(x, parent)
        c = len(self.resident)
        if x in self.b1:
            self.p = min(c, self.p + max(len(self.b2) // len(self.b1), 1))
            self.b1.remove(x)
            self.move(x, "again")
        elif x in self.b2:
            self.p = max(0, self.p - max(len(self.b1) // len(self.b2), 1))
            self.b2.remove(x)
            self.move(x, "again")

    def hit(self, x):
        self.move(x, "again")

    def used(self, x):
        self.move(x, self.where(x))

    def evict(self, x):
        c = len(self.resident)
        (self.b1 if self.where(x) == "once" else self.b2).append(x)
        super().evict(x)
        while len(self.queues["once"]) + len(self.b1) > c:
            self.b1.pop(0)
        while len(self.resident) + len(self.b1) + len(self.b2) > 2 * c:
            self.b2.pop(0)

    def victim(self, may_leave):
        once, again = self.oldest("once", may_leave), self.oldest("again", may_leave)
        if once is not None and (len(self.queues["once"]) > self.p or again is None):
            return once
        return again


class S3Fifo(Queues):
    """Yang et al., SOSP 2023, algorithm 1: small is `once`, main is `again`."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.frequency, self.ghost = {}, []

    def insert(self, x, parent):
        super().insert(x, parent)
        self.frequency[x] = 0
        if x in self.ghost:
            self.ghost.remove(x)
            self.move(x, "again")

    def hit(self, x):
        self.frequency[x] = min(3, self.frequency[x] + 1)

    def evict(self, x):
        if x in self.queues["once"]:
            self.ghost.append(x)
        while len(self.ghost) > len(self.resident) * 9 // 10:
            self.ghost.pop(0)
        super().evict(x)

    def victim(self, may_leave):
        while True:
            small, main = self.oldest("once", may_leave), self.oldest("again", may_leave)
            if small is not None and (10 * len(self.queues["once"]) >= len(self.resident) or main is None):
                if self.frequency[small] <= 1:
                    return small
                self.frequency[small] = 0
                self.move(small, "again")
            elif self.frequency[main] > 0:
                self.frequency[main] -= 1
                self.move(main, "again")
            else:
                return main


class Sieve(Queues):
    """Zhang et al., NSDI 2024, algorithm 1. The hand stays on what follows the last victim, and passes over what may not leave."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.visited, self.order, self.hand = {}, {}, 0

    def insert(self, x, parent):
        super().insert(x, parent)
        self.visited[x], self.order[x] = False, self.tick()

    def hit(self, x):
        self.visited[x] = True

    def victim(self, may_leave):
        while True:
            for x in self.queues["once"]:
                if self.order[x] >= self.hand and x in may_leave:
                    if not self.visited[x]:
                        self.hand = self.order[x] + 1
                        if all(self.order[y] < self.hand for y in may_leave if y != x):
                            self.hand = 0
                        return x
                    self.visited[x] = False
                    self.hand = self.order[x] + 1
            self.hand = 0


MODELS = {"lru": Lru, "score_weighted": Lru, "fifo": Fifo, "lru_k": LruK, "lfu": GreedyDual, "gdsf": Gdsf, "length_aware": LengthAware,
          "retention": Retention, "slru": Slru, "arc": Arc, "s3_fifo": S3Fifo, "sieve": Sieve}


def play(policy, requests, capacity):
    """(blocks found, evictions)."""
    parents, children, found, evictions = {}, {}, 0, 0
    for chain in requests:
        hits = 0
        while hits < len(chain) and chain[hits] in policy.resident:
            hits += 1
        for x in chain[:hits]:
            policy.hit(x)
        found += hits
        while len(policy.resident) + len(chain) - hits > capacity:
            held = set(chain[:hits])
            x = policy.victim({x for x in policy.resident if not children.get(x) and x not in held})
            policy.evict(x)
            evictions += 1
            if parents[x] is not None:
                children[parents[x]].discard(x)
        for i in range(hits, len(chain)):
            parents[chain[i]] = chain[i - 1] if i > 0 else None
            if i > 0:
                children.setdefault(chain[i - 1], set()).add(chain[i])
            policy.insert(chain[i], parents[chain[i]])
        for x in reversed(chain):
            policy.used(x)
    return found, evictions


def optimal(requests, capacity):
    """Belady, 1966, for requests of one block: those with the next uses soonest stay."""
    following, soon = [], {}
    for i in reversed(range(len(requests))):
        following.append(soon.get(requests[i][0], FOREVER))
        soon[requests[i][0]] = i
    following.reverse()
    resident, found = {}, 0
    for i, (x,) in enumerate(requests):
        found += x in resident
        resident[x] = following[i]
        if len(resident) > capacity:
            del resident[max(resident, key=resident.get)]
    return found


TOKENS_PER_BLOCK = 16


def skewed(rng, count):
    """0 is the likeliest of `count` numbers."""
    return min(int(count * rng.random() ** 3), count - 1)


def keys(rng):
    """Single blocks: popular ones, scans of what never comes again, and a loop somewhat longer than the smaller cache."""
    requests, fresh = [], 1000
    while len(requests) < 5000:
        kind = rng.random()
        if kind < 0.01:
            requests += [[fresh + i] for i in range(30)]
            fresh += 30
        elif kind < 0.02:
            requests += [[500 + i] for i in range(40)]
        else:
            requests.append([skewed(rng, 300)])
    return requests


def chains(rng):
    """Conversations: each turn repeats what came before it, with some blocks more. They begin with one of a few prompts."""
    talks, requests, fresh = [], [], 10
    prompts = [[i, i + 3, i + 6][:length] for i, length in ((0, 3), (1, 2), (2, 1))]
    for _ in range(1100):
        if not talks or rng.random() < 0.3:
            talks.append(list(prompts[skewed(rng, 3)]))
        at = len(talks) - 1 - skewed(rng, min(len(talks), 25))
        if len(talks[at]) > 20:
            continue
        more = rng.randint(1, 4)
        talks[at] = talks[at] + list(range(fresh, fresh + more))
        fresh += more
        requests.append(talks[at])
    return requests


def main():
    rng = random.Random(2003)
    traces = []
    for name, requests, capacities in (("keys", keys(rng), (24, 100)), ("chains", chains(rng), (40, 150))):
        results = []
        for capacity in capacities:
            for policy, model in MODELS.items():
                found, evictions = play(model(capacity), requests, capacity)
                results.append({"policy": policy, "capacity": capacity, "hits": found, "evictions": evictions})
            if name == "keys":
                results.append({"policy": "opt", "capacity": capacity, "hits": optimal(requests, capacity)})
        traces.append((name, requests, results))
    print("[" + ",\n".join(
        f'{{"name": "{name}", "tokens_per_block": {TOKENS_PER_BLOCK},\n"results": [\n' + ",\n".join(map(json.dumps, results)) +
        '],\n"requests": ' + json.dumps(requests, separators=(",", ":")) + "}" for name, requests, results in traces) + "]")


if __name__ == "__main__":
    main()
