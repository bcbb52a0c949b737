"""What each query of each panel must show, and where that is known from: kvpoolctl, the daemon's log, the kernel, what the test itself did,
or, where nobody else knows, other series of the daemon's own scrape.
"""

import collections
import pathlib
import re

from programs import samples

# Panels of which nobody can know what they show at a moment.
NOBODY_KNOWS = {
    "Holds of a space's mutex": "each look at the daemon takes the mutex, and so does its housekeeper, every 100 ms",
}
SERIES = re.compile(r'([a-z_0-9]+)(?:\{(.*)\})?')
HISTOGRAM = re.compile(r"histogram_quantile\(([\d.]+), sum by \(([^)]*)\) \(rate\((\w+)_bucket(\{[^}]*\})\[\$__rate_interval\]\)\)\)")
COUNTER = re.compile(r"\b(rate|increase)\((\w+\{[^}]*\})\[\$__rate_interval\]\)")
WINDOW_S = 600  # Longer than the test: it holds all that was counted.


class Evidence:
    """What is known of each daemon."""

    def __init__(self, daemons):
        self.daemons, self.counts, self.shares = daemons, collections.defaultdict(collections.Counter), {}

    def did(self, daemon, what, times=1):
        self.counts[daemon.port][what] += times

    def pruned(self, daemon, words):
        """One run of pruning_example: 1,000 tokens, 16 to a block. Each block that fills is followed by a prune."""
        resident = int(re.search(r"in (\d+) blocks", words)[1])
        for what, times in (("prunes", 1000 // 16), ("pruned blocks", -(-1000 // 16) - resident)):
            self.did(daemon, what, times)

    def shared(self, daemon, space, answer):
        self.shares[daemon.port, space] = [int(answer[what]) for what in ("guaranteed_blocks", "limit_blocks", "weight")]


class Scrape:
    """A daemon's own words."""

    def __init__(self, daemon):
        self.series = []
        for name, value in samples(daemon.scrape()).items():
            metric, labels = SERIES.fullmatch(name).groups()
            self.series.append((metric, dict(re.findall(r'(\w+)="([^"]*)"', labels or "")), value))

    def of(self, metric, by=(), **where):
        """{values of the labels `by`: sum}"""
        found = collections.Counter()
        for name, labels, value in self.series:
            if name == metric and all(labels.get(label) == wanted for label, wanted in where.items()):
                found[tuple(labels.get(label, "") for label in by)] += value
        return found

    def sum(self, metric, **where):
        return sum(self.of(metric, **where).values())


class Process:
    """The kernel's words."""

    def __init__(self, pid):
        folder = pathlib.Path(f"/proc/{pid}")
        self.bytes = {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", (folder / "status").read_text())}
        self.threads, self.files = len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))
        self.most_files = int(re.search(r"Max open files\s+(\d+)", (folder / "limits").read_text())[1])


class Numbers:
    """{(title, number of the query): (labels, {their values: number})}, summed over what has the same labels."""

    def __init__(self):
        self.values, self.counts, self.within, self.some = {}, {}, {}, set()

    def say(self, title, i, labels, number, within=0):
        """`within`: so far off it may be, as it moves while one looks."""
        names, values = self.values.setdefault((title, i), (tuple(labels), collections.Counter()))
        values[tuple(labels.values())] += float(number)
        self.within[title, i] = max(within, self.within.get((title, i), 0))

    def say_some(self, title, i, labels, number):
        """Other labels may have more."""
        self.some.add((title, i))
        self.say(title, i, labels, number)

    def say_count(self, title, labels, number, within=0):
        """How much is in a histogram, whose quantiles are the panel's two queries."""
        for i in range(2):
            self.within[title, i] = max(within, self.within.get((title, i), 0))
            names, values = self.counts.setdefault((title, i), (tuple(labels), collections.Counter()))
            values[tuple(labels.values())] += float(number)


def say_what_operators_see(numbers, daemon, instance, totals):
    say = numbers.say
    status, spaces, sessions = daemon.ctl("status"), daemon.ctl("spaces")["spaces"], daemon.ctl("sessions")["sessions"]
    blocks = {state: int(count) for state, count in status["blocks"].items()}
    totals["held"] += blocks["leased"] + blocks["sealed"] + blocks["quarantined"]
    totals["capacity"] += blocks["capacity"]
    totals["hit_tokens"] += int(status["hit_tokens_total"])
    totals["tokens"] += int(status["lookup_tokens_total"])
    say("Spaces", 0, {}, status["spaces"])
    say("Sessions", 0, {}, len(sessions))
    say("Draining", 0, {}, status["draining"])
    say("Version", 0, {**instance, "version": status["version"]}, 1)
    say("Up for", 0, instance, status["uptime_seconds"], within=5)
    for state, count in blocks.items():
        if state != "capacity":
            say("Blocks by state", 0, {**instance, "state": state}, count)
    say("Blocks by state", 1, instance, blocks["capacity"])
    for device in status["devices"]:
        say("Device memory", 0, {**instance, "device": device["device"]}, device["used_bytes"])
        say("Device memory", 1, {**instance, "device": device["device"]}, device["capacity_bytes"])
        say("Device memory", 2, {**instance, "device": device["device"]}, 0)
    for space in spaces:
        of_space, state = {**instance, "space": space["space"]}, space["blocks"]
        say("Slab memory by space", 0, {**of_space, "tenant": space["tenant"]}, space["bytes"])
        say("Slabs by space", 0, of_space, space["slabs"])
        say("Pinned blocks", 0, of_space, space["pinned_blocks"])
        say("Pinned blocks", 1, of_space, space["pin_budget_blocks"])
        say("Parked verbs", 0, of_space, sum(int(session["parked"]) for session in sessions if session["space"] == space["space"]))
        # Below the low watermark, half a percent.
        say("Under pressure", 0, {}, int(state["free"]) + int(state["cached"]) < 0.005 * int(state["capacity"]))
    for session in sessions:
        for member in session["members"]:
            holds, owes = int(session["leased"]) + int(session["referenced"]) > 0, int(member["slabs_unacknowledged"]) > 0
            say("Silent processes", 0, {}, member["idle_seconds"] >= (5 if owes else 60 if holds else float("inf")))
        if not session["ended"]:
            say("Blocks by session", 0, {**instance, "space": session["space"], "session": session["session"]}, session["charged"])
    for i, verb in enumerate(("leased", "released", "sealed", "deduplicated")):
        say("Blocks leased, released, sealed", i, instance, status[f"{verb}_total"])
    if int(status["lookup_blocks_total"]) > 0:
        say("Hit ratio", 0, instance, int(status["hit_blocks_total"]) / int(status["lookup_blocks_total"]))
        say("Hit ratio", 1, instance, int(status["hit_tokens_total"]) / int(status["lookup_tokens_total"]))
    say("Prefill saved", 0, instance, status["hit_tokens_total"])
    say("Prefill saved", 1, instance, status["lookup_tokens_total"])
    say("Regret", 0, instance, status["regret_total"])
    for title in ("Idle time before eviction", "Block lifetime"):
        # Of many that leave at once some are not looked at.
        numbers.say_count(title, instance, status["evicted_total"], within=0.001 * int(status["evicted_total"]))
    say("Connections", 0, instance, sum(member["alive"] for session in sessions for member in session["members"]))
    return int(status["evicted_total"])


def say_what_is_below(numbers, daemon, instance):
    for tier in daemon.ctl("tier")["tiers"]:
        count, of_tier = {name: value if name in ("tier", "path", "write", "state") else float(value) for name, value in tier.items()}, {**instance, "tier": tier["tier"]}
        for i, name in enumerate(("demoted_blocks", "promoted_blocks", "waits")):
            numbers.say("Blocks down and up", i, instance, count[name])
        for why, name in (("moved", "moved_blocks"), ("dropped", "dropped_blocks"), ("left", "unwritten_blocks"), ("late", "late_blocks"),
                          ("lost", "lost_blocks"), ("no_room", "no_room_blocks"), ("refused_wait", "refused_waits")):
            numbers.say("Blocks that did not go down or come up", 0, {**instance, "why": why}, count[name])
        numbers.say("Bytes read and written", 0, {**of_tier, "direction": "write"}, count["stored_bytes"])
        numbers.say("Bytes read and written", 0, {**of_tier, "direction": "read"}, count["loaded_bytes"])
        numbers.say("Size of the tier", 0, of_tier, count["bytes"])
        numbers.say("Size of the tier", 1, of_tier, count["capacity_bytes"])
        for result in ("stored", "loaded", "evicted", "missed", "corrupt", "late", "full", "failed"):
            numbers.say("What became of values", 0, {**of_tier, "result": result}, count[result])
        numbers.say("Values, and those that wait", 0, of_tier, count["values"])
        numbers.say("Values, and those that wait", 1, of_tier, count["waiting"])
        # None fails here. A value that comes too late, or damaged, was read; one that finds the line full is sent away at once.
        numbers.say_count("Time of writes to the tier", of_tier, count["stored"])
        numbers.say_count("Time of reads from the tier", of_tier, sum(count[result] for result in ("loaded", "missed", "corrupt", "late")))


def say_what_was_done(numbers, daemon, instance, did, own, evicted):
    say, log = numbers.say, daemon.log.read_text(encoding="utf-8")
    say("Faults", 0, {}, did["failed openings"])
    numbers.say_some("RPC errors", 0, {**instance, "method": "OpenSession", "code": "INTERNAL"}, did["failed openings"])
    numbers.say_some("RPC errors", 0, {**instance, "method": "EndSession", "code": "NOT_FOUND"}, did["ends of no session"])
    numbers.say_count("RPC latency", {**instance, "method": "EndSession"}, did["ends of no session"])
    numbers.say_count("RPC latency", {**instance, "method": "OpenSession"}, log.count(" session opened ") + did["failed openings"])
    numbers.say_count("RPC latency", {**instance, "method": "Step"}, own.sum("kvpool_step_batches_total"), within=4)
    say("Openings refused, calls paced", 0, {**instance, "reason": "INTERNAL"}, did["failed openings"])
    say("Openings refused, calls paced", 1, instance, 0)  # No rule has a pace.
    say("Connections", 1, {**instance, "reason": "bad_frame"}, did["strangers"] / 2)
    say("Connections", 2, instance, 0)  # No stream was torn.
    say("Connections", 3, {**instance, "reason": "protocol"}, did["strangers"] / 2)
    say("Connections", 4, instance, 0)  # Prometheus alone comes to the metrics.
    say("Stale refs", 0, instance, did["stale touches"] + did["stale pins"])
    say("Operations that failed", 0, instance, 0)  # None is refused as a whole.
    say("Operations that failed", 1, {**instance, "verb": "pin"}, did["stale pins"])
    for reason in set(re.findall(r" session ended .*\bkind=(\w+)", log)):
        say("Sessions ended", 0, {**instance, "reason": reason}, len(re.findall(rf" session ended .*\bkind={reason}\b", log)))
    numbers.say_some("Step batches and operations", 1, {**instance, "verb": "prune"}, did["prunes"])
    # An engine that is killed may have had a batch under way, and a match that waited for the tier.
    killed = len(re.findall(r" session ended .*\bkind=(?:hangup|member_died)\b", log))
    say("Step batches and operations", 0, instance, own.sum("kvpool_rpc_seconds_count", method="Step"), within=killed)
    say("Lookups", 0, instance, own.sum("kvpool_step_operations_total", verb="match"), within=killed)
    # Until the test chose LRU, which decides inside the lock, the daemon had the policy of its flags.
    policy = next((flag.partition("=")[2] for flag in daemon.flags if flag.startswith("--policy=")), "learned")
    by_lru = evicted - did["evicted before lru"] if "evicted before lru" in did else 0
    say("Evictions", 0, {**instance, "policy": policy}, evicted - by_lru)
    say("Evictions", 0, {**instance, "policy": "lru"}, by_lru)
    by_policy = evicted - by_lru if policy == "cold_rl" else 0
    say("Decisions outside the lock", 1, instance, by_policy, within=0.001 * by_policy)
    decided = own.of("kvpool_policy_decisions_total", ["outcome"])
    for (outcome,), number in decided.items():
        # The series carry the name of the policy of the moment, which is not the one that decided.
        say("Decisions outside the lock", 0, {**instance, "policy": "", "outcome": outcome}, number)
    numbers.say_count("Time of a policy decision", instance, decided["in_time",] + decided["late",])
    say("Memory that went to other spaces", 0, instance, log.count(" slab given back "))
    for i in range(2):  # Nothing restarted.
        say("Sessions after a restart", i, instance, 0)
    for i in range(2):
        say("Recovered after a restart", i, instance, 0)
    kept = "--keeper=on" in daemon.flags
    if kept:
        say("Recovered after a restart", 2, instance, 1)
    say("How the daemon started", 0, {**instance, "start": "nothing_kept" if kept else "no_keeper"}, 1)
    say("How the daemon started", 1, instance, 0)
    say("Time of a start", 0, instance, 0, within=0.01 if kept else 0)  # It looked for what was kept.
    for i in range(4):
        say("Blocks verified", i, instance, 0)  # Without --verify nothing is.
    say("Log lines dropped", 0, instance, 0)  # The log is a file.
    say("Log lines dropped", 1, instance, 0)
    say("Servers of the tier", 0, instance, 0)  # The tier is a folder.
    device = {**instance, "op": "prune"}
    if did["prunes"]:
        numbers.say_count("Time on the device", {**device, "policy": "paged_eviction"}, did["prunes"])
    say("Device operations", 0, {**device, "code": "OK"}, did["prunes"])
    say("Operations that wait for a device", 0, instance, 0)
    say("Features kept", 1, instance, did["prunes"])  # Each prune reads the block that has filled since the one before.
    say("Features kept", 2, instance, 0)
    say("Blocks pruned and compacted", 0, instance, did["pruned blocks"])
    say("Blocks pruned and compacted", 1, instance, 0)
    logged = own.sum("kvpool_lookups_total") + own.sum("kvpool_step_operations_total", verb="seal")
    # Each of these drops one block, and all are measured.
    say("What the guard makes of pruning", 0, {**instance, "policy": "paged_eviction", "outcome": "measured"}, did["pruned blocks"])
    if did["pruned blocks"]:
        numbers.say_count("What pruning costs", {**instance, "policy": "paged_eviction"}, did["pruned blocks"])
    say("What the guard makes of pruning", 1, instance, 0)
    say("What the guard makes of pruning", 2, instance, 0)
    say("Requests recorded", 0, instance, logged if any("--event-log" in flag for flag in daemon.flags) else 0)
    say("Requests recorded", 1, instance, 0)


def say_what_the_kernel_says(numbers, daemon, instance):
    say, process = numbers.say, Process(daemon.pid)
    say("Bookkeeping", 0, instance, process.bytes["RssAnon"], within=16 << 20)
    say("Processors", 1, instance, process.threads, within=4)
    say("Memory of the process", 0, instance, process.bytes["VmRSS"], within=16 << 20)
    say("Memory of the process", 1, instance, process.bytes["VmSize"], within=64 << 20)
    say("Open files", 0, instance, process.files, within=8)
    say("Open files", 1, instance, process.most_files)


# What nobody but the daemon knows: (title, query, metric, labels, off by so much). Its own words show that the panel adds up the right ones.
OWN = [
    ("Slabs that a device refused", 0, "kvpool_growth_failures_total", ["space"], 0),
    ("Leases that came out short", 0, "kvpool_lease_shortfalls_total", ["space", "reason"], 0),
    ("Slabs by space", 4, "kvpool_share_priority", ["space"], 0),
    ("Bookkeeping", 1, "kvpool_space_bookkeeping_bytes", ["space"], 0),
    ("Bookkeeping", 2, "kvpool_heap_bytes", [], 16 << 20),
    ("Circuit breaker of decisions outside the lock", 0, "kvpool_policy_breaker_state", ["space"], 0),
    ("Features kept", 0, "kvpool_feature_cache_hits_total", [], 0),
    ("Memory that went to other spaces", 1, "kvpool_moved_blocks_total", ["space"], 0),
    ("Memory that went to other spaces", 2, "kvpool_give_back_missed_total", ["space"], 0),
    ("Memory that went to other spaces", 3, "kvpool_give_back_asked_total", ["space"], 0),
    ("Memory that went to other spaces", 4, "kvpool_give_back_late_total", ["space"], 0),
    ("Time of a start", 1, "kvpool_first_answer_seconds", [], 0),
    ("Loads: time expected and taken", 0, "kvpool_tier_forecast_seconds_total", ["what"], 0),
    ("Loads: time expected and taken", 1, "kvpool_tier_forecasts_total", [], 0),
    ("Latency of tiers", 0, "kvpool_tier_latency_seconds", ["tier"], 0),
    ("Speed of tiers", 0, "kvpool_tier_bytes_per_second", ["tier"], 0),
    ("Memory of features", 0, "kvpool_feature_cache_bytes", ["device"], 0),
    ("Processors", 0, "process_cpu_seconds_total", [], 5),
]
OWN_HISTOGRAMS = [("Time between uses", "kvpool_block_reuse_gap_seconds"), ("Reclaim time", "kvpool_reclaim_seconds"),
                  ("Wait for guaranteed memory", "kvpool_guarantee_wait_seconds")]


def expected_numbers(evidence):
    numbers, totals = Numbers(), collections.Counter()
    numbers.scrapes = {f"127.0.0.1:{daemon.port}": Scrape(daemon) for daemon in evidence.daemons}
    for daemon in evidence.daemons:
        instance, own = {"instance": f"127.0.0.1:{daemon.port}"}, numbers.scrapes[f"127.0.0.1:{daemon.port}"]
        evicted = say_what_operators_see(numbers, daemon, instance, totals)
        say_what_is_below(numbers, daemon, instance)
        say_what_was_done(numbers, daemon, instance, evidence.counts[daemon.port], own, evicted)
        say_what_the_kernel_says(numbers, daemon, instance)
        for i, metric in enumerate(("kvpool_share_blocks", "kvpool_limit_blocks", "kvpool_share_weight")):
            for (space,), number in own.of(metric, ["space"]).items():
                known = evidence.shares.get((daemon.port, space))
                numbers.say("Slabs by space", i + 1, {**instance, "space": space}, known[i] if known else number)
        for title, i, metric, by, within in OWN:
            for values, number in own.of(metric, by).items():
                numbers.say(title, i, {**instance, **dict(zip(by, values))}, number, within)
        for title, metric in OWN_HISTOGRAMS:
            numbers.say_count(title, instance, own.sum(f"{metric}_count"))
    numbers.say("Held", 0, {}, totals["held"] / totals["capacity"])
    numbers.say("Token hit ratio", 0, {}, totals["hit_tokens"] / totals["tokens"])
    return numbers


def bounds(buckets, quantile):
    """Between what a quantile lies: the bounds of its bucket."""
    edges = sorted((float(le.replace("+Inf", "inf")), count) for le, count in buckets.items())
    below = 0.0
    for edge, count in edges:
        if count >= quantile * edges[-1][1]:
            return below, edge
        below = edge
    raise AssertionError("the last bucket holds all")


def wrong_quantiles(where, found, ask, numbers):
    """A quantile of all that was counted lies in the bucket that the daemon's own words give."""
    quantile, labels, metric, selector = found.groups()
    by = re.split(r"\W+", labels)
    groups = [label for label in by if label not in ("instance", "le")]
    names, expected = numbers.counts[where]
    some, wrong, buckets = where[0] == "RPC latency", [], collections.defaultdict(collections.Counter)  # Each look calls other methods.
    for instance, own in numbers.scrapes.items():
        for values, count in own.of(f"{metric}_bucket", [*groups, "le"]).items():
            buckets[(instance, *values[:-1])][values[-1]] += count
    for sample, shown in ask(f"histogram_quantile({quantile}, sum by ({labels}) ({metric}_bucket{selector}))"):
        counts = buckets[(sample["instance"], *(sample.get(label, "") for label in groups))]
        if not any(counts.values()) or (some and tuple(sample.get(label, "") for label in names) not in expected):
            continue  # Of nothing there is no quantile.
        low, high = bounds(counts, float(quantile))
        if not low <= shown <= high:
            wrong.append(f"{where}: the quantile {quantile} of {sample} is {shown}, and not between {low} and {high}")
    counted = ask(f"sum by ({', '.join(label for label in by if label != 'le')}) ({metric}_count{selector})")
    return wrong + differences(where, counted, names, expected, numbers.within[where], some)


def differences(where, answer, labels, expected, within, some=False):
    shown = collections.Counter()
    for sample, value in answer:
        if value == value:  # A ratio of nothing to nothing is none.
            shown[tuple(sample.get(label, "") for label in labels)] += value
    return [f"{where[0]}, query {where[1]}: shows {shown[key]} for {' '.join(key) or 'all'}, expected is {expected[key]}"
            for key in (set(expected) if some else shown.keys() | expected.keys())
            if abs(shown[key] - expected[key]) > max(within, 1e-9 * abs(expected[key]))]


def wrong_panels(queries, ask, numbers):
    """Rates are taken as what the counters have counted; wrong_rates is about the rest."""
    wrong = [f"no panel {title} with a query {i}" for title, i in (numbers.values | numbers.counts).keys() - queries.keys()]
    for where, expr in queries.items():
        found, totals = HISTOGRAM.fullmatch(expr), COUNTER.sub(r"\2", expr)
        if not found and "$" in totals:
            wrong.append(f"{where[0]}, query {where[1]}: what it makes of a counter is no rate, increase or quantile: {expr}")
        elif found and where in numbers.counts:
            wrong += wrong_quantiles(where, found, ask, numbers)
        elif not found and where in numbers.values:
            names, expected = numbers.values[where]
            wrong += differences(where, ask(totals), names, expected, numbers.within[where], where in numbers.some)
        elif where[0] not in NOBODY_KNOWS:
            wrong.append(f"{where[0]}, query {where[1]}: nothing is expected of it, and no reason is given")
    return wrong


def wrong_rates(queries, ask):
    """Over a window that holds the whole test, a rate is what each counter grew by, divided by the window. Prometheus adds up to
    1.1 of a scrape interval at each end.
    """
    wrong = []
    for where, expr in queries.items():
        if not COUNTER.search(expr) or "/" in expr or "histogram_quantile" in expr:
            continue
        window = f"[{WINDOW_S}s]"
        # The series that has been there for the shortest time gains most by that. It is asked for first: scrapes go on.
        scrapes = min((scrapes for call in COUNTER.findall(expr) for _, scrapes in ask(f"count_over_time({call[1]}{window}) > 1")), default=2)
        shown = {str(sorted(sample.items())): value for sample, value in ask(expr.replace("$__rate_interval", f"{WINDOW_S}s"))}
        grown = COUNTER.sub(lambda call: f"((max_over_time({call[2]}{window}) - min_over_time({call[2]}{window}))"
                            f" / {WINDOW_S if call[1] == 'rate' else 1})", expr)
        for sample, value in ask(grown):
            rate = shown.get(str(sorted(sample.items())), 0)
            if not value * 0.999 <= rate <= value * 1.001 * (1 + 2.2 / (scrapes - 1)):
                wrong.append(f"{where[0]}, query {where[1]}: the rate of {sample} is {rate}, and it grew by {value}")
    return wrong
