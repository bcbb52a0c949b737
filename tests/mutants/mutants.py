#!/usr/bin/env python3
"""Breaks sources of the daemon and of its client in small ways, one at a time, and says which of these mutants no test notices.

Usage: tests/mutants/mutants.py [--only PART] [--sample N] [--seed S] [--list]

It works in a git worktree of its own (build/mutants), at HEAD, so that the checkout stays as it is. results.tsv beside
this file keeps what was seen. A mutant that is in there is not made again, and one whose line is gone leaves the table.
The last column is for people: why a survivor may live.
"""

import argparse
import collections
import csv
import pathlib
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutants"
RESULTS = pathlib.Path(__file__).with_name("results.tsv")
SECONDS = 120  # A test program that takes longer hangs: the slowest of these takes a tenth of it.

POOL = ["pool_test", "diary_test", "recover_test", "service_test"]
# Which test programs hold a source to account, the likeliest first.
PROGRAMS = {
    "server/pool/block_pool.cc": POOL,
    "server/pool/hand_over.cc": POOL,
    "server/pool/hold_table.h": POOL,
    "server/pool/match.cc": POOL,
    "server/pool/match_lookup.cc": POOL,
    "server/pool/pool_rep.cc": POOL,
    "server/pool/reclaim.cc": POOL,
    "server/pool/retention.cc": POOL,
    "server/pool/seal.cc": POOL,
    "server/pool/undo_log.h": ["recover_test"],
    "server/space/answer_window.cc": ["service_test", "step_fuzz"],
    "server/space/batch.cc": ["service_test", "score_service_test", "step_fuzz"],
    "server/space/block_gates.cc": ["service_test", "score_service_test", "step_fuzz"],
    "server/space/device_verbs.cc": ["score_service_test", "step_fuzz"],
    "server/space/late_releases.cc": ["service_test", "step_fuzz"],
    "server/space/long_match.cc": ["service_test"],
    "server/space/parked_verbs.cc": ["service_test", "score_service_test", "step_fuzz"],
    "server/space/sessions.cc": ["service_test", "score_service_test", "recovery_test", "step_fuzz"],
    "server/space/space.cc": ["service_test"],
    "server/wire/step_writer.cc": ["service_test"],
    "server/attach/attach_loop.cc": ["attach_test", "attach_fuzz"],
    "server/attach/attach_mailbox.cc": ["attach_test"],
    "server/base/peer_process.cc": ["attach_test"],
    "client/session/refusals.cc": ["client_test"],
    "client/session/step_batches.cc": ["client_test"],
}
ARGUMENTS = {name: ["--random=300", f"tests/fuzz/corpus/{name}"] for name in ("step_fuzz", "attach_fuzz", "stream_fuzz")}

SWAPS = [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "),
         (" && ", " || "), (" || ", " && "), (" + 1", ""), (" - 1", ""), ("true", "false"), ("false", "true"),
         ("std::min", "std::max"), ("std::max", "std::min")]
# What stands on one line: a condition, a jump with its condition, a statement that is no declaration and no jump.
CONDITION = re.compile(r"^(\s*(?:\} else )?(?:if|while) )\(([^;]*)\)( \{| (?:return|continue|break)\b.*;|)$")
GUARD = re.compile(r"^\s*if \(.*\) (?:return|continue|break)\b.*;$")
STATEMENT = re.compile(r"^\s*(?:(?:\+\+|--)[\w.>*-]+|[\w.>:()\[\]*-]+(?: [-+|]?= .*|\(.*\)))\s*;$")
NO_STATEMENT = re.compile(r"^\s*(?:return|break|continue|case|using|const|auto|co_|static|delete)\b")
# Stores whose order counts: a word is saved before it changes, and a fence stands between others.
SAVE = re.compile(r"\bSave\(")
FENCE = re.compile(r"\batomic_signal_fence\(")
# What is said to people is not what is held to account; an invariant's own check is never reached.
LEFT_ALONE = re.compile(r"^\s*//|^\s*#|KVPOOL_CHECK|Log(?:Info|Warning|Error|\()|StrCat|template")


class Mutant(NamedTuple):
    """One change of one line. `nth` tells lines of the same text apart.

    `swapped_with`: it changes places with the line so far behind it, whose text is `mutated`.
    """

    source: str
    line: str
    nth: int
    change: str
    mutated: str
    swapped_with: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.source, self.line.strip(), str(self.nth), self.change)


def changes(line: str, begins: bool) -> Iterator[tuple[str, str]]:
    """(what is changed, the changed line), for all that can be done to a line. `begins`: a statement begins with it."""
    code = line.split("  //")[0].rstrip()
    if found := CONDITION.match(code):
        yield "condition negated", f"{found[1]}(!({found[2]})){found[3]}"
    if begins and GUARD.match(code):
        yield "guard dropped", ";"
    if begins and STATEMENT.match(code) and not NO_STATEMENT.match(code):
        yield "statement dropped", ";"
    for old, new in SWAPS:
        for nth, at in enumerate(re.finditer(re.escape(old) + (r"\b" if old[-1].isalnum() else ""), code)):
            yield f"{old.strip()} to {new.strip() or 'nothing'}, {nth}", code[: at.start()] + new + code[at.end():]


def swap(lines: list[str], at: int) -> tuple[str, int] | None:
    """(what is swapped, how far behind the line `at` the other line is) of stores whose order counts."""
    between = lines[at + 1:at + 2]
    if SAVE.search(lines[at]) and between and not SAVE.search(between[0]):
        what, far = "saved after the store behind it", 1
    elif between and FENCE.search(between[0]):
        what, far = "swapped across a fence", 2
    else:
        return None
    both = [lines[at], *lines[at + far:at + far + 1]]
    return (what, far) if len(both) == 2 and all(STATEMENT.match(line) for line in both) else None


def mutants_of(source: str, text: str) -> Iterator[Mutant]:
    seen: collections.Counter[str] = collections.Counter()
    before = ""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        nth = seen[line.strip()]
        seen[line.strip()] += 1
        if found := swap(lines, at):
            yield Mutant(source, line, nth, found[0], lines[at + found[1]], found[1])
        if not LEFT_ALONE.search(line):
            for change, mutated in changes(line, before.endswith((";", "{", "}", ":"))):
                yield Mutant(source, line, nth, change, mutated)
        if line.strip() and not line.lstrip().startswith("//"):
            before = line.split("  //")[0].rstrip()


def applied(mutant: Mutant, text: str) -> str:
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if line.strip() == mutant.line.strip()][mutant.nth]
    if mutant.swapped_with:
        lines[at + mutant.swapped_with] = lines[at]
    lines[at] = mutant.mutated
    return "\n".join(lines) + "\n"


def run(command: list[str], seconds: int | None = None) -> bool:
    try:
        done = subprocess.run(command, cwd=TREE, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def verdict(programs: list[str]) -> str:
    """What the first of the test programs that is not content says."""
    for program in programs:
        if not run(["bash", "-c", f". deploy/lib.sh && ninja -C build/release bin/{program}"]):
            return "does not build"
        if not run([f"build/release/bin/{program}", *ARGUMENTS.get(program, [])], SECONDS):
            return f"killed by {program}"
    return "survived"


def judge(mutant: Mutant) -> str:
    path = TREE / mutant.source
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(applied(mutant, text), encoding="utf-8")
        return verdict(PROGRAMS[mutant.source])
    finally:
        path.write_text(text, encoding="utf-8")


def prepare(programs: list[str]) -> None:
    """A worktree at HEAD whose tests pass: what fails there by itself would kill every mutant."""
    if not TREE.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(TREE)], cwd=ROOT, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    subprocess.run(["git", "checkout", "--quiet", "--force", "--detach", head.strip()], cwd=TREE, check=True)
    # No test of these runs a kernel, and they take minutes to compile.
    if not run(["cmake", "--preset", "release", "-DKVPOOL_CUDA_ROOT=none"]):
        sys.exit(f"mutants: {TREE} can't be configured")
    if (without := verdict(programs)) != "survived":
        sys.exit(f"mutants: {without} without a mutant")


def read_results() -> dict[tuple[str, str, str, str], tuple[str, str]]:
    if not RESULTS.exists():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    return {(source, line, nth, change): (outcome, note) for outcome, source, change, nth, line, note in rows}


def write_results(results: dict[tuple[str, str, str, str], tuple[str, str]]) -> None:
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(["outcome", "source", "change", "nth", "line", "why it may live"])
        for (source, line, nth, change), (outcome, note) in sorted(results.items()):
            table.writerow([outcome, source, change, nth, line, note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the paths of the sources")
    parser.add_argument("--sample", type=int, help="how many that are not in the table yet; all of them by default")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--list", action="store_true", help="prints how many there are, and makes none")
    arguments = parser.parse_args()

    every = [mutant for source in PROGRAMS
             for mutant in mutants_of(source, (ROOT / source).read_text(encoding="utf-8"))]
    known = {mutant.key for mutant in every}
    results = {key: seen for key, seen in read_results().items() if key in known}
    chosen = [mutant for mutant in every if arguments.only in mutant.source]
    if arguments.list:
        for source, count in collections.Counter(mutant.source for mutant in chosen).items():
            outcomes = collections.Counter(outcome.split(" by ")[0] for key, (outcome, _) in results.items()
                                           if key[0] == source)
            print(f"{source}: {count} mutants; {dict(outcomes)}")
        return
    new = [mutant for mutant in chosen if mutant.key not in results]
    if arguments.sample is not None:
        new = random.Random(arguments.seed).sample(new, min(arguments.sample, len(new)))
    if not new:
        print("mutants: all of these are in the table")
        return
    prepare(sorted({program for mutant in new for program in PROGRAMS[mutant.source]}))
    for mutant in new:
        outcome = judge(mutant)
        results[mutant.key] = (outcome, "")
        write_results(results)
        print(f"{outcome}: {mutant.source}: {mutant.change}: {mutant.line.strip()}", flush=True)


if __name__ == "__main__":
    main()
