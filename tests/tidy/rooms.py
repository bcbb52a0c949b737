"""Which folder may include which: the direction between the rooms of the project, and that nothing goes in a circle."""

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping

from tree import Tree

# From the ground up. A source includes its own folder and those on lower floors; folders that share a floor don't know each
# other. What may be said across the top folders stands in code_checks.MAY_INCLUDE.
FLOORS = (
    ("proto/support",),
    ("proto/cli", "proto/formats"),
    ("cuda/base",),
    ("cuda/scorers/parts",),
    ("cuda/scorers/host",),
    ("cuda/scorers/policies",),
    ("cuda/scorers",),
    ("cuda",),
    ("cuda/host", "cuda/kernels"),
    ("cuda/driver",),
    ("cuda/lab",),
    ("server/base",),
    ("server/replacement",),
    ("server/replacement/parts",),
    ("server/replacement/policies",),
    ("server/keeper", "server/pool", "server/tiers", "server/wire"),
    ("server/access", "server/events", "server/scoring"),
    ("server/sim", "server/space"),
    ("server/daemon",),
    ("server/attach", "server/rpc"),
    ("server/metrics",),
    ("server",),
    ("client",),
    ("client/session",),
    ("client/c", "client/examples", "client/python/src", "client/tools"),
    ("client/ctl", "client/replay"),
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}


def includes(tree: Tree, name: str) -> Iterator[tuple[int, str]]:
    """(line number, path) of each include of the project's own files."""
    for number, line in tree.lines(name):
        found = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if found and tree.exists(found.group(1)):
            yield number, found.group(1)


def rooms(tree: Tree) -> list[str]:
    """Includes go down: no folder includes one on its own floor or above."""
    errors = []
    for name in tree.sources():
        folder = posixpath.dirname(name)
        if name.startswith("tests/"):
            continue
        if folder not in FLOOR:
            errors.append(f"{name}: {folder}/ has no floor in tests/tidy/rooms.py")
            continue
        for number, target in includes(tree, name):
            to = posixpath.dirname(target)
            if to != folder and FLOOR.get(to, -1) >= FLOOR[folder]:
                errors.append(f"{name}:{number}: {folder}/ must not include {target}: {to}/ is not on a lower floor")
    return errors


def cycles(tree: Tree) -> list[str]:
    """No circle of units: a unit is a header with the source of the same name."""
    arrows: dict[str, set[str]] = {}
    for name in tree.sources():
        unit = posixpath.splitext(name)[0]
        to = {posixpath.splitext(target)[0] for _, target in includes(tree, name)}
        arrows.setdefault(unit, set()).update(to - {unit})
    return ["a circle of units: " + ", ".join(circle) for circle in circles(arrows)]


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components with more than one member (Tarjan's algorithm, without recursion)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []
    for start in sorted(arrows):
        if start in order:
            continue
        path = [(start, iter(sorted(arrows[start])))]
        order[start] = low[start] = len(order)
        stack.append(start)
        while path:
            unit, targets = path[-1]
            target = next(targets, None)
            if target is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[unit])
                if low[unit] == order[unit]:
                    circle = stack[stack.index(unit):]
                    del stack[stack.index(unit):]
                    low.update({member: len(arrows) + len(order) for member in circle})
                    if len(circle) > 1:
                        circles.append(sorted(circle))
            elif target not in order:
                order[target] = low[target] = len(order)
                stack.append(target)
                path.append((target, iter(sorted(arrows.get(target, ())))))
            else:
                low[unit] = min(low[unit], low[target])
    return circles
