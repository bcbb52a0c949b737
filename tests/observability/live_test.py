"""Two real daemons under load, scraped by a real Prometheus. Usage: live_test.py ROOT BIN PROMETHEUS_BIN

One daemon has kvpool-replay against a pool far smaller than its working set, with engines that are killed; the other has two engines that
do next to nothing, and drains. Both have a space 1. Then /metrics is held against promtool's lint and against the names in
server/metrics/metrics.cc; every panel of the dashboards must run and, unless it is in MAY_BE_EMPTY, return something; and once all is
quiet, the numbers that panels show must be those of kvpoolctl. Status 77 without prometheus and promtool.
"""

import collections
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import urllib.parse

from programs import DEADLINE_S, Daemon, Programs, get, until

# Words that mark queries about things that did not happen here.
MAY_BE_EMPTY = {
    "kvpool_attach_refused": "nobody was turned away",
    "kvpool_tier_nodes": "the tier is a folder",
}


class Prometheus:
    def __init__(self, programs, tools, folder, root, daemons):
        with socket.socket() as probe:  # Prometheus can't say which port it took
            probe.bind(("127.0.0.1", 0))
            web = probe.getsockname()[1]
        config = folder / "prometheus.yml"
        targets = [f"127.0.0.1:{daemon.port}" for daemon in daemons]
        config.write_text(json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(root / "deploy/prometheus/rules.yaml")],
            "scrape_configs": [{"job_name": "kvpool", "static_configs": [{"targets": targets}]}]}))
        self.base = f"http://127.0.0.1:{web}"
        programs.start("prometheus", folder / "prometheus.log", tools / "prometheus", f"--config.file={config}",
                       f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{web}")

        def scraped():
            programs.check()
            try:
                return len(self.ask('up{job="kvpool"} == 1')) == len(daemons)
            except OSError:
                return False

        until("a scrape", scraped)

    def ask(self, expr):
        """[(labels, value)]; ValueError: the query is wrong."""
        answer = json.loads(get(f"{self.base}/api/v1/query?query={urllib.parse.quote(expr)}"))
        if answer["status"] != "success":
            raise ValueError(answer.get("error"))
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["data"]["result"]]


def panel_queries(root):
    """{(title, number of the query): expression}"""
    found = {}
    for path in sorted((root / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for i, target in enumerate(panel.get("targets", [])):
                found[panel["title"], i] = re.sub(r"\$\{?(instance|space|tenant)\}?", ".*", target["expr"])
    return found


def empty_queries(root, prometheus):
    queries = [(title, expr.replace("$__rate_interval", "1m")) for (title, _), expr in panel_queries(root).items()]
    rules = (root / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8")
    queries += [("recorded", expr) for expr in re.findall(r"record: (\S+)", rules) if not expr.startswith("instance:kvpool_known")]
    found = []
    for title, expr in queries:
        try:
            if not prometheus.ask(expr) and not any(word in expr for word in MAY_BE_EMPTY):
                found.append(f"{title}: {expr}: no data")
        except ValueError as error:
            found.append(f"{title}: {expr}: {error}")
    return found


def what_kvpoolctl_says(daemons):
    """{(title, number of the query): (labels, {their values: number})}, summed over what has the same labels."""
    numbers = {}

    def say(title, i, labels, number):
        names, counts = numbers.setdefault((title, i), (tuple(labels), collections.Counter()))
        counts[tuple(labels.values())] += float(number)

    held = capacity = hit_tokens = tokens = 0
    for daemon in daemons:
        instance = {"instance": f"127.0.0.1:{daemon.port}"}
        status, spaces, sessions = daemon.ctl("status"), daemon.ctl("spaces")["spaces"], daemon.ctl("sessions")["sessions"]
        blocks = {state: int(count) for state, count in status["blocks"].items()}
        held += blocks["leased"] + blocks["sealed"] + blocks["quarantined"]
        capacity += blocks["capacity"]
        hit_tokens += int(status["hit_tokens_total"])
        tokens += int(status["lookup_tokens_total"])
        say("Spaces", 0, {}, status["spaces"])
        say("Sessions", 0, {}, len(sessions))
        say("Draining", 0, {}, status["draining"])
        say("Version", 0, {**instance, "version": status["version"]}, 1)
        for state in ("free", "leased", "sealed", "cached", "quarantined"):
            say("Blocks by state", 0, {**instance, "state": state}, blocks[state])
        say("Blocks by state", 1, instance, blocks["capacity"])
        for device in status["devices"]:
            say("Device memory", 0, {**instance, "device": device["device"]}, device["used_bytes"])
            say("Device memory", 1, {**instance, "device": device["device"]}, device["capacity_bytes"])
        for space in spaces:
            of_space = {**instance, "space": space["space"]}
            say("Slab memory by space", 0, {**of_space, "tenant": space["tenant"]}, space["bytes"])
            say("Slabs by space", 0, of_space, space["slabs"])
            say("Pinned blocks", 0, of_space, space["pinned_blocks"])
            say("Pinned blocks", 1, of_space, space["pin_budget_blocks"])
            say("Parked verbs", 0, of_space, sum(int(session["parked"]) for session in sessions if session["space"] == space["space"]))
        for session in sessions:
            if not session["ended"]:
                say("Blocks by session", 0, {**instance, "space": session["space"], "session": session["session"]}, session["charged"])
        for i, verb in enumerate(("leased", "released", "sealed", "deduplicated")):
            say("Blocks leased, released, sealed", i, instance, status[f"{verb}_total"])
        say("Evictions", 0, instance, status["evicted_total"])
        say("Regret", 0, instance, status["regret_total"])
        say("Connections", 0, instance, sum(member["alive"] for session in sessions for member in session["members"]))
    say("Held", 0, {}, held / capacity)
    say("Token hit ratio", 0, {}, hit_tokens / tokens)
    return numbers


def wrong_numbers(root, prometheus, daemons):
    """Rates are taken as what the counters have counted: a rate over a window can't be told from outside to the last digit."""
    found, queries = [], panel_queries(root)
    for where, (labels, expected) in what_kvpoolctl_says(daemons).items():
        if where not in queries:
            found.append(f"no panel {where[0]} with a query {where[1]}")
            continue
        shown = collections.Counter()
        for metric, value in prometheus.ask(re.sub(r"\brate\((\w+\{[^}]*\})\[\$__rate_interval\]\)", r"\1", queries[where])):
            shown[tuple(metric.get(label, "") for label in labels)] += value
        if any(abs(shown[key] - expected[key]) > 1e-9 * abs(expected[key]) for key in shown.keys() | expected.keys()):
            found.append(f"{where[0]}, query {where[1]}: shows {dict(shown)}, kvpoolctl says {dict(expected)}")
    return found


def lint(promtool, text):
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return [] if result.returncode == 0 else [f"promtool check metrics: {result.stdout}{result.stderr}"]


def missing_metrics(root, text):
    defined = set(re.findall(r'"((?:kvpool|process)_[a-z0-9_]+)"', (root / "server/metrics/metrics.cc").read_text(encoding="utf-8")))
    exported = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    return [f"{name} is in server/metrics/metrics.cc, but not in /metrics" for name in sorted(defined - exported)]


def settled(what, look):
    """What is found wrong still at the end: [] as soon as nothing is."""
    found = []

    def nothing_wrong():
        found[:] = look()
        return not found

    try:
        until(what, nothing_wrong)
    except TimeoutError:
        pass
    return found


def run(root, bins, tools, folder, programs):
    for name in ("busy", "quiet"):
        (folder / name).mkdir()
    busy = Daemon(programs, bins, folder / "busy", "--capacity=32MiB", "--slab-bytes=8MiB", f"--tier=file:{folder / 'tier'},capacity=64MiB")
    quiet = Daemon(programs, bins, folder / "quiet", "--capacity=16MiB", "--slab-bytes=4MiB")
    prometheus = Prometheus(programs, tools, folder, root, (busy, quiet))
    quiet.replay("--time-scale=1000", "--engines=2")
    replay = busy.replay("--requests=4000", "--engines=2", "--kill-every=500")
    programs.forget(replay)

    def empty():
        # A counter that is there only once has no rate: it is counted up between one look and the next.
        subprocess.run([bins / "pruning_example"], env={**os.environ, "KVPOOL_SOCKET": str(busy.socket)}, check=True,
                       stdout=subprocess.DEVNULL)
        return empty_queries(root, prometheus)

    found = settled("data in every panel", empty)
    if replay.wait(DEADLINE_S) != 0:
        found.append(f"kvpool-replay ended with {replay.returncode}: {(busy.folder / 'replay.log').read_text()[-1000:]}")
    until("the quiet daemon's engines", lambda: len(quiet.ctl("sessions")["sessions"]) == 2)
    quiet.ctl("drain")
    found += settled("panels that agree with kvpoolctl", lambda: wrong_numbers(root, prometheus, (busy, quiet)))
    text = busy.scrape()
    return found + lint(tools / "promtool", text) + missing_metrics(root, text)


def main(root, bins, tools):
    if not all(os.access(tools / name, os.X_OK) for name in ("prometheus", "promtool")):
        print("prometheus and promtool are not installed")
        return 77
    programs = Programs()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(root, bins, tools, pathlib.Path(folder), programs)
        finally:
            programs.stop()
    print("\n".join(found) or "every panel has data, shows what kvpoolctl says, and /metrics passes promtool's lint")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:4])))
