#!/usr/bin/env python3
"""What test programs over KVPOOL_FAKE_KERNELS=ptx counted of each kernel.

Usage: kernel_counts.py check FOLDER SUITE...   every kernel does something, and some suite launches it
       kernel_counts.py bars FILE               no pass over K and V reads more than it must (READS), whole sectors (SECTORS),
                                                and none is missing
       kernel_counts.py table FILE FATBIN       a table in Markdown, with what machine_code.py says of the kernels

FOLDER has a file SUITE.tsv for each suite, which its processes wrote (tests/support/fake_cuda/ptx/launch.h). Exit status 77:
not all suites have run.
"""

import collections
import pathlib
import re
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "device"))
import machine_code

# How often a pass over K and V may ask for a byte that it reads, on average.
READS = {
    re.compile(r"kvpool_score_records_\w+"): 1.05,
    re.compile(r"kvpool_score_anchor_dots_\w+"): 1.05,
    re.compile(r"kvpool_score_low_\w+"): 1.05,
    re.compile(r"kvpool_score_window(_lse)?_(f32|f16|bf16|fp8_\w+)"): 1.2,
}
# What such a pass uses at least of the sectors that it reads.
SECTORS = 0.85
# An H100, all of whose SMs are busy: bytes of memory and instructions of warps a second. An SM issues four instructions in a
# clock, and multiplies two 16 x 16 x 8 matrices in the time of two, which is eight tenths of what it does with wgmma.
BANDWIDTH = 3.35e12
ISSUE = 132 * 4 * 1.7e9
MATRIX_PRODUCTS = 132 * 1.7e9
SECTOR = 32  # bytes
EMPTY = 2  # instructions: the end that nvcc writes, and the one that every kernel is given


class Counts(NamedTuple):
    """In the order of a line in the file."""

    code: int
    launches: int
    thread_blocks: int
    threads: int
    instructions: int
    lane_instructions: int
    matrix_products: int
    barriers: int
    read_bytes: int
    read_sectors: int
    written_bytes: int
    written_sectors: int
    needed_read_bytes: int  # Each is counted once in a launch.
    needed_written_bytes: int

    @property
    def needed_s(self) -> float:
        """The time in which the memory moves what the launches can't do without."""
        return (self.needed_read_bytes + self.needed_written_bytes) / BANDWIDTH

    @property
    def modelled_s(self) -> float:
        """The longest of three: the memory moves each sector asked for, as if there were no cache; the SMs issue; they multiply."""
        moved_s = SECTOR * (self.read_sectors + self.written_sectors) / BANDWIDTH
        return max(moved_s, self.instructions / ISSUE, self.matrix_products / MATRIX_PRODUCTS)


MOST = {"code", "threads"}  # are no sums


def read(paths: list[pathlib.Path]) -> dict[str, Counts]:
    """All lines, by kernel."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0] * len(Counts._fields))
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            name, *numbers = line.split("\t")
            total = sums[name]
            for i, number in enumerate(map(int, numbers)):
                total[i] = max(total[i], number) if Counts._fields[i] in MOST else total[i] + number
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


def bars(path: pathlib.Path) -> int:
    counts = read([path])
    errors = []
    for pattern, most in READS.items():
        passes = {name: of for name, of in counts.items() if pattern.fullmatch(name) and of.launches > 0}
        if not passes:
            errors.append(f"no kernel {pattern.pattern} is launched")
        for name, of in passes.items():
            if of.read_bytes > most * of.needed_read_bytes:
                errors.append(f"{name} reads {of.read_bytes} bytes, {of.read_bytes / of.needed_read_bytes:.2f} times the"
                              f" {of.needed_read_bytes} that it must: at most {most} times is the bar")
            if of.read_bytes < SECTORS * SECTOR * of.read_sectors:
                errors.append(f"{name} uses {share(of.read_bytes, of.read_sectors)} of the sectors that it reads:"
                              f" at least {100 * SECTORS:.0f} % is the bar")
    print("\n".join(errors) or f"{len(READS)} passes read each byte about once, in whole sectors")
    return 1 if errors else 0


def share(part: int, sectors: int) -> str:
    return f"{100 * part / (SECTOR * sectors):.0f} %" if sectors else "–"


def table(path: pathlib.Path, fatbin: str) -> int:
    folder = machine_code.tools()
    if folder is None:
        print(machine_code.NO_TOOLS)
        return 77
    gpu = machine_code.GPUS[machine_code.TABLE_ARCHITECTURE]
    code = machine_code.kernels_of(folder, fatbin, machine_code.TABLE_ARCHITECTURE)
    print("| kernel | launches | blocks | instructions of warps | lanes that execute them | products of matrices | barriers |"
          " KiB read | of its sectors | of what it must | KiB written | of its sectors | H100, us: modelled | its memory's limit |"
          " machine code, instructions | registers | shared bytes | blocks an SM holds | of its threads | KiB in flight |")
    print("| --- " + "| ---: " * 19 + "|")
    for name, of in read([path]).items():
        if of.launches == 0:
            continue
        lanes = 100 * of.lane_instructions / (32 * of.instructions)
        kernel = code[name]
        teams = machine_code.teams(kernel, gpu, of.threads)
        in_flight = f"{machine_code.bytes_in_flight(kernel, gpu, of.threads) / 1024:.0f}" if machine_code.BATCHED.match(name) else "–"
        print(f"| `{name.removeprefix('kvpool_')}` | {of.launches} | {of.thread_blocks} | {of.instructions} | {lanes:.0f} % |"
              f" {of.matrix_products} | {of.barriers} | {of.read_bytes / 1024:.1f} | {share(of.read_bytes, of.read_sectors)} |"
              f" {of.read_bytes / max(of.needed_read_bytes, 1):.2f} | {of.written_bytes / 1024:.1f} |"
              f" {share(of.written_bytes, of.written_sectors)} | {1e6 * of.modelled_s:.2f} | {1e6 * of.needed_s:.2f} |"
              f" {len(kernel.code)} | {kernel.registers} | {kernel.shared} | {teams} | {100 * teams * of.threads / gpu.threads:.0f} % |"
              f" {in_flight} |")
    return 0


def main() -> int:
    match sys.argv[1:]:
        case ["check", folder, *suites] if suites:
            return check(pathlib.Path(folder), suites)
        case ["bars", path]:
            return bars(pathlib.Path(path))
        case ["table", path, fatbin]:
            return table(pathlib.Path(path), fatbin)
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
