#!/usr/bin/env python3
"""What test programs over KVPOOL_FAKE_KERNELS=ptx counted of each kernel.

Usage: kernel_counts.py check FOLDER SUITE...   every kernel does something, and some suite launches it
       kernel_counts.py table FILE              a table in Markdown

FOLDER has a file SUITE.tsv for each suite, which its processes wrote (tests/support/fake_cuda/ptx/launch.h). Exit status 77:
not all suites have run.
"""

import collections
import pathlib
import sys
from typing import NamedTuple

EMPTY = 2  # instructions: the end that nvcc writes, and the one that every kernel is given


class Counts(NamedTuple):
    """In the order of a line in the file."""

    code: int
    launches: int
    thread_blocks: int
    instructions: int
    lane_instructions: int
    barriers: int
    read_bytes: int
    read_sectors: int
    written_bytes: int
    written_sectors: int


def read(paths: list[pathlib.Path]) -> dict[str, Counts]:
    """The sums of all lines, by kernel; `code` is no sum."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0] * len(Counts._fields))
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            name, *numbers = line.split("\t")
            total = sums[name]
            for i, number in enumerate(map(int, numbers)):
                total[i] = number if i == 0 else total[i] + number
    return {name: Counts(*total) for name, total in sorted(sums.items())}


def check(folder: pathlib.Path, suites: list[str]) -> int:
    paths = {suite: folder / f"{suite}.tsv" for suite in suites}
    missing = [suite for suite, path in paths.items() if not path.exists()]
    if missing:
        print(f"these suites have not run over ptx: {' '.join(missing)}")
        return 77
    counts = read(list(paths.values()))
    errors = [f"{name} is empty" for name, of in counts.items() if of.code <= EMPTY]
    errors += [f"{name} is launched by no suite" for name, of in counts.items() if of.launches == 0]
    print("\n".join(errors) or f"{len(counts)} kernels, {sum(of.launches for of in counts.values())} launches")
    return 1 if errors or not counts else 0


def share(part: int, sectors: int) -> str:
    return f"{100 * part / (32 * sectors):.0f} %" if sectors else "–"


def table(path: pathlib.Path) -> int:
    print("| kernel | PTX | launches | blocks | instructions of warps | lanes that execute them | KiB read | of its sectors |"
          " KiB written | of its sectors | barriers |")
    print("| --- " + "| ---: " * 10 + "|")
    for name, of in read([path]).items():
        if of.launches == 0:
            continue
        lanes = 100 * of.lane_instructions / (32 * of.instructions)
        print(f"| `{name.removeprefix('kvpool_')}` | {of.code} | {of.launches} | {of.thread_blocks} | {of.instructions} |"
              f" {lanes:.0f} % | {of.read_bytes / 1024:.1f} | {share(of.read_bytes, of.read_sectors)} |"
              f" {of.written_bytes / 1024:.1f} | {share(of.written_bytes, of.written_sectors)} | {of.barriers} |")
    return 0


def main() -> int:
    match sys.argv[1:]:
        case ["check", folder, *suites] if suites:
            return check(pathlib.Path(folder), suites)
        case ["table", path]:
            return table(pathlib.Path(path))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
