"""Checks rules and dashboards with Prometheus' own parser. Usage: promtool_test.py ROOT PROMTOOL rules|alerts|panels

rules: the rule file passes promtool's lint. alerts: its unit tests pass. panels: every panel's query parses.
Status 77 if there is no promtool.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile


def panel_rules(dashboards):
    """A rule file with one recording rule for each query, Grafana's variables replaced by what they may stand for."""
    rules, count = [], 0
    for path in dashboards:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                expr = re.sub(r"\$__(rate_interval|interval|range)\b", "5m", target["expr"])
                expr = re.sub(r"\$\{?\w+\}?", "any", expr)
                # JSON is YAML: queries need no further quoting.
                rules.append({"record": f"panel:query{count}", "expr": expr})
                count += 1
    return json.dumps({"groups": [{"name": "panels", "rules": rules}]}), count


def main(root, promtool, what):
    program = promtool if shutil.which(promtool) else shutil.which("promtool")
    if program is None:
        print("promtool is not installed")
        return 77
    rules = root / "deploy/prometheus"
    if what == "rules":
        return subprocess.call([program, "check", "rules", "--lint=all", "--lint-fatal", str(rules / "rules.yaml")])
    if what == "alerts":
        return subprocess.call([program, "test", "rules", str(rules / "rules_test.yaml")])
    text, count = panel_rules(sorted((root / "dashboards").glob("*.json")))
    if count == 0:
        print("no dashboard has a query")
        return 1
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return subprocess.call([program, "check", "rules", "--lint=none", file.name])


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
