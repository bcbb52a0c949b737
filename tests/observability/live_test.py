"""A real daemon under load, scraped by a real Prometheus. Usage: live_test.py ROOT BIN PROMETHEUS_BIN

Runs kvpoold and kvpool-replay on a pool far smaller than the working set, and kills an engine. Then /metrics must pass
promtool's lint and export every name in server/metrics/metrics.cc, and each query of the dashboards' panels must run on
Prometheus and, unless it is in MAY_BE_EMPTY, return something. Status 77 without prometheus and promtool.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

# Words that mark queries about things that did not happen here.
MAY_BE_EMPTY = {
    "kvpool_rpc_errors_total": "no call failed",
    "kvpool_attach_refused_total": "nobody was turned away",
}
DEADLINE_S = 60


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def until(what, probe):
    """Polls, because a child process gives no event to wait for."""
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        result = probe()
        if result:
            return result
        time.sleep(0.05)
    raise TimeoutError(f"{what}: not within {DEADLINE_S} s")


class Daemons:
    """Child processes that end with the test."""

    def __init__(self):
        self.children = []

    def start(self, name, log, *command):
        with open(log, "w", encoding="utf-8") as output:
            child = subprocess.Popen([str(word) for word in command], stdout=output, stderr=subprocess.STDOUT)
        self.children.append((name, child, log))
        return child

    def check(self):
        for name, child, log in self.children:
            if child.poll() is not None:
                raise RuntimeError(f"{name} ended with {child.returncode}:\n{pathlib.Path(log).read_text()[-2000:]}")
        return True

    def stop(self):
        for _, child, _ in reversed(self.children):
            child.send_signal(signal.SIGTERM)
        for _, child, _ in self.children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def queries(root):
    for path in sorted((root / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                expr = target["expr"].replace("$__rate_interval", "1m")
                yield panel["title"], re.sub(r"\$\{?(instance|space|tenant)\}?", ".*", expr)
    for expr in re.findall(r"record: (\S+)", (root / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8")):
        yield "recorded", expr


def lint(promtool, text):
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return [] if result.returncode == 0 else [f"promtool check metrics: {result.stdout}{result.stderr}"]


def missing_metrics(root, text):
    defined = set(re.findall(r'"(kvpool_[a-z0-9_]+)"', (root / "server/metrics/metrics.cc").read_text(encoding="utf-8")))
    exported = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    return [f"{name} is in server/metrics/metrics.cc, but not in /metrics" for name in sorted(defined - exported)]


def run_panels(root, base):
    found = []
    for title, expr in queries(root):
        answer = json.loads(get(f"{base}/api/v1/query?query={urllib.parse.quote(expr)}"))
        if answer["status"] != "success":
            found.append(f"{title}: {expr}: {answer.get('error')}")
        elif not answer["data"]["result"] and not any(word in expr for word in MAY_BE_EMPTY):
            found.append(f"{title}: {expr}: no data")
    return found


def free_port():
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(root, bins, tools, folder, daemons):
    socket = folder / "kvpoold.sock"
    daemons.start("kvpoold", folder / "kvpoold.log", bins / "kvpoold", "--device=host", "--capacity=32MiB", "--slab-bytes=8MiB",
                  f"--socket={socket}", f"--state-dir={folder}", "--metrics-listen=127.0.0.1:0")
    state = folder / "kvpoold.json"
    until("kvpoold.json", lambda: daemons.check() and state.exists())
    port = json.loads(state.read_text(encoding="utf-8"))["metrics_port"]

    config = folder / "prometheus.yml"
    config.write_text(json.dumps({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(root / "deploy/prometheus/rules.yaml")],
        "scrape_configs": [{"job_name": "kvpool", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]}))
    web = free_port()  # Prometheus can't say which port it took
    base = f"http://127.0.0.1:{web}"
    daemons.start("prometheus", folder / "prometheus.log", tools / "prometheus", f"--config.file={config}",
                  f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{web}")

    def scrapes():
        daemons.check()
        try:
            answer = json.loads(get(f'{base}/api/v1/query?query=count_over_time(up{{job="kvpool"}}[1m])'))
            return sum(int(sample["value"][1]) for sample in answer["data"]["result"])
        except OSError:
            return 0

    until("a scrape", lambda: scrapes() >= 1)
    # Sessions stay open while panels are asked, so that gauges of sessions have something to show.
    replay = daemons.start("kvpool-replay", folder / "replay.log", bins / "kvpool-replay", "--workload=conversation", "--requests=4000",
                           "--engines=2", "--kill-every=500", f"--socket={socket}", "--layout=opaque")
    found = None

    def panels_full():
        nonlocal found
        # A counter that is there only once has no rate: it is counted up between one look and the next.
        subprocess.run([bins / "pruning_example"], env={**os.environ, "KVPOOL_SOCKET": str(socket)}, check=True,
                       stdout=subprocess.DEVNULL)
        found = run_panels(root, base)
        return not found

    try:
        until("data in every panel", panels_full)
    except TimeoutError:
        pass
    replay.wait(DEADLINE_S)
    daemons.children = [entry for entry in daemons.children if entry[1] is not replay]
    if replay.returncode != 0:
        found.append(f"kvpool-replay ended with {replay.returncode}: {(folder / 'replay.log').read_text()[-1000:]}")
    text = get(f"http://127.0.0.1:{port}/metrics")
    return found + lint(tools / "promtool", text) + missing_metrics(root, text)


def main(root, bins, tools):
    if not all(os.access(tools / name, os.X_OK) for name in ("prometheus", "promtool")):
        print("prometheus and promtool are not installed")
        return 77
    daemons = Daemons()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(root, bins, tools, pathlib.Path(folder), daemons)
        finally:
            daemons.stop()
    print("\n".join(found) or "every panel has data, and /metrics passes promtool's lint")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:4])))
