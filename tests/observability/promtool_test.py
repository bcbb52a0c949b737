"""Checks rules and dashboards with Prometheus' own parser. Usage: promtool_test.py ROOT PROMTOOL rules|alerts|recorded|panels

rules: the rule file passes promtool's lint, and nothing adds up the spaces of different daemons. alerts: its unit tests pass, and each alert
has a test in which it fires and one in which it is silent. recorded: replayed on what real daemons exported (record.py), exactly the expected
alerts fire, at the expected minutes. panels: every query of a panel or a runbook parses. Status 77 if there is no promtool.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from runbooks_test import blocks

# {scene of record.py: {alert: (first, last minute at which it fires)}}
FIRES = {
    "steady": {},
    "idle": {},  # kvpool_members_stale is 2 from the second minute on
    "thrash": {},
    "loop": {"KvpoolRegretHigh": (16, 20)},
    "hung": {"KvpoolLeaseShortfalls": (6, 11), "KvpoolMembersStale": (6, 20), "KvpoolQuarantineStuck": (16, 20)},
    "held": {"KvpoolMembersStale": (5, 20), "KvpoolLeaseShortfalls": (7, 20), "KvpoolPoolHeld": (12, 20)},
    "crowd": {"KvpoolDeviceOpsRefused": (13, 20)},
    "off": {"KvpoolPolicyOff": (3, 15)},
    "drain": {"KvpoolDrainTakesLong": (32, 35)},
    "crashes": {"KvpoolEnginesDying": (3, 20), "KvpoolRestarting": (13, 20), "KvpoolDown": (19, 20)},
    "faults": {"KvpoolEventsLost": (2, 20), "KvpoolGrowthFailing": (7, 20), "KvpoolAttachRefused": (13, 20),
               "KvpoolPinBudgetSpent": (13, 20)},
    "below": {},
    "spoilt": {"KvpoolTierFailing": (5, 20)},
    "behind": {"KvpoolTierBehind": (31, 33)},
    "stale": {"KvpoolStaleRefs": (13, 20)},
    "slow": {"KvpoolRpcSlow": (11, 20)},
    "failing": {"KvpoolRpcFailing": (5, 16)},
    "leaves": {"KvpoolTargetGone": (18, 24)},
    "absent": {"KvpoolAbsent": (15, 30), "KvpoolTargetGone": (18, 24)},
    "rollout": {},
    "orphan": {"KvpoolKeeperLost": (5, 6)},
}


def run_on(program, arguments, document):
    """Runs promtool on one more file. JSON is YAML, so queries need no further quoting."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(document, file)
        file.flush()
        return subprocess.call([program, *arguments, file.name])


def complain(messages):
    print("\n".join(messages))
    return 1 if messages else 0


def queries(root):
    """(panel, expression) of each query."""
    for path in sorted((root / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                yield panel, target["expr"]


def mixed_daemons(root):
    """Aggregations that add up daemons, whose spaces have the same numbers. Only `stat` panels show totals, and say so."""
    found = []
    rules = (root / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8")
    for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", rules):
        if "space" in labels and not {"job", "instance"} <= set(re.split(r"\W+", labels)):
            found.append(f"rules.yaml: ({labels}) has a space without job and instance")
    for panel, expr in queries(root):
        if panel["type"] == "stat":
            continue
        for function, labels in re.findall(r"\b(sum|min|max|avg|count)\s*(?:by\s*)?\(([^)]*)", expr):
            if "instance" not in re.split(r"\W+", labels):
                found.append(f"panel {panel['title']}: {function} over all daemons: {expr}")
    return found


def untested_alerts(rules):
    found = []
    tests = (rules / "rules_test.yaml").read_text(encoding="utf-8")
    for alert in re.findall(r"- alert: (\w+)", (rules / "rules.yaml").read_text(encoding="utf-8")):
        for state, pattern in (("fire", r"\n\s+- exp_labels"), ("be silent", r" \[\]")):
            if not re.search(rf"alertname: {alert}\n\s+exp_alerts:{pattern}", tests):
                found.append(f"rules_test.yaml does not have {alert} {state}")
    return found


def unrecorded_alerts(rules):
    alerts = set(re.findall(r"- alert: (\w+)", (rules / "rules.yaml").read_text(encoding="utf-8")))
    fired = set().union(*FIRES.values())
    return [f"{alert}: no scene of record.py has it fire" for alert in sorted(alerts - fired)]


def recorded(root):
    """A test file: at each minute of each recording, the alerts that fire."""
    tests = []
    for scene, fires in FIRES.items():
        recording = json.loads((root / f"tests/observability/recordings/{scene}.json").read_text(encoding="utf-8"))
        tests.append({
            "name": scene,
            "interval": recording["interval"],
            "input_series": [{"series": series, "values": values} for series, values in recording["series"].items()],
            "promql_expr_test": [{
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert, (first, last) in fires.items()
                                if first <= minute <= last]
            } for minute in range(recording["minutes"] + 1)]})
    # Without an order, promtool evaluates the groups in that of a map of Go, which is a new one in each run.
    return {"rule_files": [str(root / "deploy/prometheus/rules.yaml")], "group_eval_order": ["kvpool.recording", "kvpool.alerts"],
            "evaluation_interval": "15s", "tests": tests}


def panel_rules(root):
    """A rule file with one recording rule for each query, Grafana's variables replaced by what they may stand for."""
    exprs = [re.sub(r"\$\{?\w+\}?", "any", re.sub(r"\$__(rate_interval|interval|range)\b", "5m", expr)) for _, expr in queries(root)]
    assert exprs, "no dashboard has a query"
    for book in sorted((root / "deploy/runbooks").glob("*.md")):
        exprs += blocks(book.read_text(encoding="utf-8"), "promql")
    return {"groups": [{"name": "panels", "rules": [{"record": f"panel:query{i}", "expr": expr} for i, expr in enumerate(exprs)]}]}


def main(root, promtool, what):
    program = promtool if shutil.which(promtool) else shutil.which("promtool")
    if program is None:
        print("promtool is not installed")
        return 77
    rules = root / "deploy/prometheus"
    if what == "rules":
        return complain(mixed_daemons(root)) or subprocess.call(
            [program, "check", "rules", "--lint=all", "--lint-fatal", str(rules / "rules.yaml")])
    if what == "alerts":
        return complain(untested_alerts(rules)) or subprocess.call([program, "test", "rules", str(rules / "rules_test.yaml")])
    if what == "recorded":
        scenes = {path.stem for path in (root / "tests/observability/recordings").glob("*.json")}
        return complain([f"recordings/{scene}.json: no expectation" for scene in scenes - set(FIRES)] + unrecorded_alerts(rules)) or run_on(program, ["test", "rules"], recorded(root))
    return run_on(program, ["check", "rules", "--lint=none"], panel_rules(root))


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]))
