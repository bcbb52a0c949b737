#!/usr/bin/env python3
"""What the assembler made of the kernels: their machine code, which no test executes without a GPU.

Usage: machine_code.py check FATBIN   for the GPUs below: no kernel is missing, empty or uses local memory, and those that
                                      promise loads in flight have them. Exit status 77: no cuobjdump is installed

tests/support/fake_cuda/kernel_counts.py makes a table of it, for TABLE_ARCHITECTURE.
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple


class Gpu(NamedTuple):
    """One of those that engines run on, the fastest of its architecture."""

    name: str
    threads: int  # that an SM holds
    shared_kib: int  # of an SM
    bandwidth: float  # of its memory, bytes a second
    sms: int


GPUS = {
    "sm_80": Gpu("A100 80GB", 2048, 164, 2.04e12, 108),
    "sm_90": Gpu("H200", 2048, 228, 4.8e12, 132),
    "sm_100": Gpu("B200", 2048, 228, 8.0e12, 148),
}
TABLE_ARCHITECTURE = "sm_90"
EMPTY = 8  # instructions, without padding: less cannot read an argument and store to where it points
REGISTERS = 65536  # of an SM, given to a warp's threads in units of 8
LATENCY_S = 0.7e-6  # of memory that is kept busy
# The threads of a team and the kernels that promise loads in flight for the whole SM (cuda/kernels/cuda_team.h).
TEAM = 256
BATCHED = re.compile(r"kvpool_score_(records|anchor_dots)_")
NO_TOOLS = "no cuobjdump and nvdisasm: deploy/install_deps.sh test installs them"
WIDE = 16  # bytes that a lane loads at once


class Kernel(NamedTuple):
    code: list[str]  # instructions without their guards, padding left out
    registers: int
    shared: int  # bytes


def tools() -> pathlib.Path | None:
    root = pathlib.Path(__file__).parents[2]
    folders = [*root.glob("build/deps/python/lib/python3*/site-packages/nvidia/cu13/bin"), pathlib.Path("/usr/local/cuda/bin")]
    return next((folder for folder in folders if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists()), None)


def cuobjdump(folder: pathlib.Path, *arguments: str) -> str:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{folder}"}
    return subprocess.run([folder / "cuobjdump", *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def kernels_of(folder: pathlib.Path, fatbin: str, architecture: str) -> dict[str, Kernel]:
    usage = {}
    listing = cuobjdump(folder, "-res-usage", "-arch", architecture, fatbin)
    for name, registers, shared in re.findall(r"Function (\w+):\s+REG:(\d+) .*?SHARED:(\d+)", listing):
        usage[name] = (int(registers), int(shared))
    kernels = {}
    for part in cuobjdump(folder, "-sass", "-arch", architecture, fatbin).split("Function : ")[1:]:
        name = part.split(maxsplit=1)[0]
        lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", part, re.MULTILINE)
        code = [re.sub(r"^@!?U?P\w+\s+", "", line) for line in lines]
        kernels[name] = Kernel([line for line in code if not line.startswith("NOP")], *usage[name])
    return kernels


def wide_loads_in_flight(code: list[str]) -> int:
    """How many loads of WIDE bytes are issued, at the most, before what the first of them loads is used."""
    waiting: dict[int, int] = {}  # register -> the first register of its load
    most = 0
    for line in code:
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", line)]
        if line.startswith("LDG") and ".128" in line.split()[0]:
            waiting |= {registers[0] + i: registers[0] for i in range(WIDE // 4)}
            most = max(most, len(set(waiting.values())))
            continue
        used = {waiting[register] for register in registers if register in waiting}
        waiting = {register: load for register, load in waiting.items() if load not in used}
    return most


def teams(kernel: Kernel, gpu: Gpu, threads: int) -> int:
    """How many teams an SM holds."""
    by_registers = REGISTERS // (-(-kernel.registers // 8) * 8 * threads)
    by_shared = gpu.shared_kib * 1024 // (kernel.shared + 1024)  # each team costs a KiB of it besides
    return min(by_registers, by_shared, gpu.threads // threads)


def bytes_in_flight(kernel: Kernel, gpu: Gpu, threads: int) -> int:
    return teams(kernel, gpu, threads) * threads * WIDE * wide_loads_in_flight(kernel.code)


def needed(gpu: Gpu) -> float:
    """Little's law: what an SM must have under way."""
    return gpu.bandwidth * LATENCY_S / gpu.sms


def errors_of(kernels: dict[str, Kernel], gpu: Gpu) -> Iterator[str]:
    for name, kernel in kernels.items():
        if len(kernel.code) < EMPTY:
            yield f"{name} has {len(kernel.code)} instructions: it is empty"
        local = [line for line in kernel.code if re.match(r"(LDL|STL)\b", line)]
        if local:
            yield f"{name} uses local memory, {len(local)} times: {local[0]}"
        if BATCHED.match(name) and bytes_in_flight(kernel, gpu, TEAM) < needed(gpu):
            yield (f"{name} has {bytes_in_flight(kernel, gpu, TEAM) / 1024:.0f} KiB in flight for each SM of the {gpu.name}, which needs"
                   f" {needed(gpu) / 1024:.0f}: {wide_loads_in_flight(kernel.code)} loads of {WIDE} bytes by each of"
                   f" {teams(kernel, gpu, TEAM) * TEAM} threads")


def check(folder: pathlib.Path, fatbin: str) -> int:
    found = {architecture: kernels_of(folder, fatbin, architecture) for architecture in GPUS}
    names = set().union(*found.values())
    errors = [] if any(map(BATCHED.match, names)) else ["there is no kernel of those that promise loads in flight"]
    for architecture, kernels in found.items():
        errors += [f"{architecture}: {error}" for error in errors_of(kernels, GPUS[architecture])]
        errors += [f"{architecture} has no {name}" for name in sorted(names - kernels.keys())]
    print("\n".join(errors) or f"{len(names)} kernels for {' '.join(found)}")
    return 1 if errors else 0


def main() -> int:
    folder = tools()
    match sys.argv[1:]:
        case ["check", fatbin]:
            if folder is None:
                print(NO_TOOLS)
                return 77
            return check(folder, fatbin)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
