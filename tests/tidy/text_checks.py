"""Checks of what people read: words, the contract's comments, metric names. Each returns a list of messages."""

import json
import re
from typing import Any

from tree import Tree

# Written in pieces, so that this file passes its own check.
BANNED = [
    (r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b", "unfinished work belongs in an issue"),
    (r"\b(issue|session|helper|phase) #?\d+ of\b|\bissue #\d+|\bin issue \d+", "the tree speaks of itself alone"),
    (r"(?<![\w.}])/(wo" + r"rk|ro" + r"ot)/", "a path of one workplace"),
    (r"py" + r"pi\.org|python" + r"hosted\.org|deb\.deb" + r"ian\.org|security\.deb" + r"ian\.org|snapshot\.deb" + r"ian\.org",
     "a registry's host: package tools know where to look"),
    (r"\bsession's (brief|issue)\b|\b(as|which) an AI\b|\blanguage model wrote\b", "the tree speaks of itself alone"),
]


def banned_words(tree: Tree) -> list[str]:
    errors = []
    for name in tree.files():
        for number, line in tree.lines(name):
            for pattern, why in BANNED:
                found = re.search(pattern, line)
                if found:
                    errors.append(f"{name}:{number}: '{found.group(0)}': {why}")
    return errors


def proto_documented(tree: Tree) -> list[str]:
    """Every message, enum, service, method, field and value has a comment before it or behind it."""
    errors = []
    for name in tree.files(".proto", under="proto/"):
        previous_is_comment = False
        for number, line in tree.lines(name):
            stripped = line.strip()
            declares = re.match(r"(message|enum|rpc)\s+(\w+)", stripped) or re.match(
                r"(?:repeated |optional )?(map<[^>]+>|[\w.]+)\s+(\w+)\s*=\s*\d+", stripped) or re.match(
                    r"()([A-Z][A-Z0-9_]*)\s*=\s*-?\d+\s*[;\[]", stripped)
            if declares and not stripped.startswith(("option", "syntax")):
                if "//" not in stripped and not previous_is_comment:
                    errors.append(f"{name}:{number}: {declares.group(2)} has no comment")
            previous_is_comment = stripped.startswith("//")
    return errors


def proto_style(tree: Tree) -> list[str]:
    """Names as protobuf's style guide has them: CamelCase types, lower_snake fields, ENUM_NAME_VALUE from 0."""
    errors = []
    for name in tree.files(".proto", under="proto/kvpool/"):
        text = re.sub(r"//[^\n]*", "", tree.text(name))
        if "package kvpool.v1;" not in text:
            errors.append(f"{name}: not in package kvpool.v1")
        for kind, type_name in re.findall(r"\b(message|enum|service|rpc)\s+(\w+)", text):
            if not re.fullmatch(r"([A-Z][a-z0-9]*)+", type_name):
                errors.append(f"{name}: {kind} {type_name} is not CamelCase")
        for enum, body in re.findall(r"\benum\s+(\w+)\s*\{([^}]*)\}", text):
            prefix = re.sub(r"(?<!^)([A-Z])", r"_\1", enum).upper() + "_"
            values = re.findall(r"(\w+)\s*=\s*(-?\d+)\s*;", body)
            if not values or values[0][1] != "0":
                errors.append(f"{name}: enum {enum} does not start at 0")
            errors += [f"{name}: {value} should start with {prefix}" for value, _ in values if not value.startswith(prefix)]
        for message, body in re.findall(r"\bmessage\s+(\w+)\s*\{([^{}]*)\}", text):
            fields = re.findall(r"(\w+)\s*=\s*(\d+)\s*;", body)
            numbers = [number for _, number in fields]
            if len(numbers) != len(set(numbers)):
                errors.append(f"{name}: message {message} uses a field number twice")
            errors += [f"{name}: {message}.{field} is not lower_snake_case" for field, _ in fields
                       if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field)]
    return errors


def _metric_names(text: str) -> set[str]:
    # level:kvpool_name:operations is the name of a recorded series.
    return set(re.findall(r"(?<![\w:])kvpool_[a-z0-9_]+(?![\w:])", text))


def _defined_metrics(tree: Tree) -> set[str]:
    """Names in string literals of the daemon's metrics source."""
    names: set[str] = set()
    for name in tree.files(".cc", under="server/metrics"):
        names |= set(re.findall(r'"(kvpool_[a-z0-9_]+)"', tree.text(name)))
    return names


def _queries(tree: Tree) -> list[tuple[str, str]]:
    """(file, expression) of every panel and variable of the dashboards and every rule."""
    found = []

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("expr", "query", "definition") and isinstance(inner, str):
                    found.append((name, inner))
                else:
                    walk(name, inner)
        elif isinstance(value, list):
            for inner in value:
                walk(name, inner)

    for name in tree.files(".json", under="dashboards/"):
        walk(name, json.loads(tree.text(name)))
    for name in tree.files("rules.yaml", under="deploy/prometheus/"):
        # Alerts speak of metrics in their text as well: those names must exist too.
        found.append((name, tree.text(name)))
    return found


def metric_names(tree: Tree) -> list[str]:
    """What dashboards and rules ask for is exported, and what is exported is asked for."""
    defined = _defined_metrics(tree)
    queries = _queries(tree)
    if not defined and not queries:
        return []
    errors, used = [], set()
    for name, query in queries:
        for metric in sorted(_metric_names(query)):
            base = re.sub(r"_(bucket|sum|count)$", "", metric)
            if metric in defined or base in defined:
                used.add(metric if metric in defined else base)
            else:
                errors.append(f"{name}: {metric} is not in server/metrics*.cc")
    errors += [f"server/metrics*.cc: no panel and no rule uses {metric}" for metric in sorted(defined - used)]
    return errors


def dashboards(tree: Tree) -> list[str]:
    """Dashboards import anywhere: a datasource variable, a stable uid, no id of one Grafana; panels inside the grid."""
    errors = []
    uids: dict[str, str] = {}
    for name in tree.files(".json", under="dashboards/"):
        board = json.loads(tree.text(name))
        if board.get("id") is not None:
            errors.append(f"{name}: id must be null, Grafana gives it")
        uid = board.get("uid")
        if not uid or uid in uids:
            errors.append(f"{name}: uid {uid!r} is missing or that of {uids.get(uid)}")
        uids[uid] = name
        if "datasource" not in {v.get("type") for v in board.get("templating", {}).get("list", [])}:
            errors.append(f"{name}: no variable of type datasource")
        ids = set()
        for panel in board.get("panels", []):
            where = f"{name}: panel {panel.get('title')!r}"
            if panel.get("id") in ids:
                errors.append(f"{where}: id {panel.get('id')} is used twice")
            ids.add(panel.get("id"))
            grid = panel.get("gridPos", {})
            if grid.get("x", 0) + grid.get("w", 25) > 24:
                errors.append(f"{where}: wider than the 24 columns")
            if panel.get("type") == "row":
                continue
            if panel.get("datasource", {}).get("uid") != "${datasource}":
                errors.append(f"{where}: datasource is not the variable")
            if not panel.get("description"):
                errors.append(f"{where}: no description")
            for target in panel.get("targets", []):
                if re.search(r"\b(rate|increase)\([^()]*\[(?!\$__rate_interval|\$__range)", target.get("expr", "")):
                    errors.append(f"{where}: rate() over a fixed interval; use $__rate_interval")
    return errors


def runbooks(tree: Tree) -> list[str]:
    """Every alert has a severity, a summary, a description and a runbook that exists; every runbook has its alert."""
    errors, seen = [], set()
    for name in tree.files("rules.yaml", under="deploy/prometheus/"):
        for block in re.split(r"\n\s*- alert:", tree.text(name))[1:]:
            alert = block.split()[0]
            for key in ("severity", "summary", "description", "runbook_url"):
                if not re.search(rf"\b{key}:", block):
                    errors.append(f"{name}: {alert} has no {key}")
            for path in re.findall(r"(deploy/runbooks/[\w.-]+\.md)", block):
                seen.add(path)
                if not tree.exists(path):
                    errors.append(f"{name}: {alert}: {path} does not exist")
    errors += [f"{name}: no alert points to it" for name in tree.files(".md", under="deploy/runbooks/")
               if name not in seen and not name.endswith("README.md")]
    return errors
