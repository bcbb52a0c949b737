"""Real daemons under load, scraped by a real Prometheus. Usage: live_test.py ROOT BIN PROMETHEUS_BIN

One daemon has kvpool-replay against a pool far smaller than its working set, with engines that are killed; another, with a keeper, has two
engines that do next to nothing, and drains; the third, on an imitation of a GPU that makes one slab only, has engines that misbehave. All
have a space 1. Then /metrics is held against promtool's lint and against the names in server/metrics/metrics.cc; every panel of the dashboards must run
and, unless it is in MAY_BE_EMPTY, return something. Once all is quiet, every query of every panel must show what shown.py expects of it,
or be named there with the reason why nobody can know; and rates must be those of the counters. Status 77 without prometheus and promtool.
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse

from programs import DEADLINE_S, Daemon, Programs, get, until
from shown import Evidence, expected_numbers, wrong_panels, wrong_rates

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
        try:
            answer = json.loads(get(f"{self.base}/api/v1/query?query={urllib.parse.quote(expr)}"))
        except urllib.error.HTTPError as error:
            if error.code == 400:
                raise ValueError(error.read().decode()) from error
            raise
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


def misbehave(daemon, evidence):
    """Engines and strangers that are refused, each so often as is written down."""
    ready(daemon.engine("stale=5"), daemon)
    evidence.did(daemon, "stale touches", 5 * 8)
    evidence.did(daemon, "stale pins", 8)
    for _ in range(2):
        engine = daemon.engine("open")
        daemon.programs.forget(engine)
        engine.wait()
        evidence.did(daemon, "failed openings")
    for kind, address in ((socket.SOCK_SEQPACKET, f"{daemon.socket}.attach"), (socket.SOCK_STREAM, str(daemon.socket))):
        for _ in range(3):
            with socket.socket(socket.AF_UNIX, kind) as stranger:
                stranger.connect(address)
                stranger.send(b"\xff" * 64)
                try:
                    stranger.recv(4096)
                except ConnectionResetError:
                    pass
                evidence.did(daemon, "strangers")
    for _ in range(2):
        subprocess.run([daemon.bins / "kvpoolctl", f"--socket={daemon.socket}", "end", "--session=999999"], capture_output=True, check=False)
        evidence.did(daemon, "ends of no session")


def hang(daemon):
    """An engine stops, and then its space grows: it owes an answer, and is silent. Who made the space grow is killed."""
    engine = ready(daemon.engine("hold=8"), daemon)
    space = daemon.ctl("sessions")["sessions"][-1]["space"]
    engine.send_signal(signal.SIGSTOP)
    other = daemon.engine("hold=1500")
    daemon.programs.forget(other)
    until("a second slab", lambda: daemon.log.read_text(encoding="utf-8").count(f" slab made space={space} ") == 2)
    other.kill()
    other.wait()
    return engine


def change(daemon, evidence):
    """An operator takes slabs from the replay's space, has another policy choose from then on, and evicts."""
    def spaces():
        return sorted(daemon.ctl("spaces")["spaces"], key=lambda space: int(space["blocks"]["cached"]))

    def evicted():
        return int(daemon.ctl("status")["evicted_total"])

    space = spaces()[-1]["space"]
    evidence.shared(daemon, space, daemon.ctl("share", f"--space={space}", "--guaranteed-blocks=100", "--limit-blocks=5000", "--weight=3"))
    until("a space within its limit", lambda: spaces()[-1]["slabs"] <= 2)
    daemon.ctl("policy", "set", "lru")
    evidence.did(daemon, "evicted before lru", evicted())
    daemon.ctl("evict", f"--space={space}", "--count=50")


def ready(engine, daemon):
    until("an engine", lambda: daemon.programs.check() and "ready" in (daemon.folder / "engine.log").read_text(encoding="utf-8"))
    return engine


def run(root, bins, tools, folder, programs):
    for name in ("busy", "quiet", "faulty"):
        (folder / name).mkdir()
    busy = Daemon(programs, bins, folder / "busy", "--capacity=32MiB", "--slab-bytes=8MiB", "--policy=cold_rl", "--guard-share=1",
                  f"--tier=file:{folder / 'tier'},capacity=64MiB", "--tier-buffer=4MiB", f"--event-log={folder / 'events'}")
    quiet = Daemon(programs, bins, folder / "quiet", "--capacity=16MiB", "--slab-bytes=4MiB", "--keeper=on")
    daemons = [busy, quiet]
    fake_driver = bins.parent / "lib/fake_cuda/libcuda.so.1"
    if fake_driver.exists():  # Builds without CUDA have none.
        daemons.append(Daemon(programs, bins, folder / "faulty", "--device=cuda:0", "--capacity=32MiB", "--slab-bytes=8MiB", environment={
            "KVPOOL_LIBCUDA": str(fake_driver), "KVPOOL_FAKE_CUDA_FAIL": "cuMemCreate#2+=CUDA_ERROR_UNKNOWN"}))
    prometheus = Prometheus(programs, tools, folder, root, daemons)
    evidence = Evidence(daemons)
    for daemon in daemons[2:]:
        misbehave(daemon, evidence)
    quiet.replay("--time-scale=1000", "--engines=2")
    replay = busy.replay("--requests=2000", "--engines=2", "--kill-every=250", "--wait-ms=20")
    programs.forget(replay)

    def empty():
        # A counter that is there only once has no rate: it is counted up between one look and the next.
        done = subprocess.run([bins / "pruning_example"], env={**os.environ, "KVPOOL_SOCKET": str(busy.socket)}, check=True,
                              capture_output=True, text=True)
        evidence.pruned(busy, done.stdout)
        return empty_queries(root, prometheus)

    found = settled("data in every panel", empty)
    if replay.wait(DEADLINE_S) != 0:
        found.append(f"kvpool-replay ended with {replay.returncode}: {(busy.folder / 'replay.log').read_text()[-1000:]}")
    until("the quiet daemon's engines", lambda: len(quiet.ctl("sessions")["sessions"]) == 2)
    hung = hang(quiet)
    quiet.ctl("drain")
    change(busy, evidence)
    found += settled("panels that agree with what is known", lambda: wrong_panels(panel_queries(root), prometheus.ask, expected_numbers(evidence)))
    found += wrong_rates(panel_queries(root), prometheus.ask)
    hung.send_signal(signal.SIGCONT)
    texts = [busy.scrape(), quiet.scrape()]
    for text in texts:
        found += lint(tools / "promtool", text)
    return found + missing_metrics(root, "\n".join(texts))


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
    print("\n".join(found) or "every panel has data and shows what is known, and /metrics passes promtool's lint")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:4])))
