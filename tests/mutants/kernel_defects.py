#!/usr/bin/env python3
"""Puts known defects back into the kernels, one at a time, and says which test sees each over KVPOOL_FAKE_KERNELS=ptx:
scorers_test, or the bars of kernel_counts.py.

Usage: tests/mutants/kernel_defects.py [--only PART] [--list]

It works in the git worktree of mutants.py, at HEAD. The exit status is 0 if a test fails for every defect, and none without
one. A defect takes about a minute.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

from mutants import ROOT, TREE

BUILD = TREE / "build" / "kernels"
SECONDS = 900  # A busy machine is no defect.
TEAM, KERNELS = "cuda/kernels/cuda_team.h", "cuda/kernels/score_kernels.cu"
TILE = "cuda/kernels/cuda_logit_tile.h"
FEATURES = "cuda/scorers/parts/features.h"
COMPUTE = "cuda/driver/cuda_kv_compute.cc"
COUNTS = BUILD / "defect.tsv"


class Defect(NamedTuple):
    """`old`, which is in the source once, becomes `new`."""

    name: str
    source: str
    old: str
    new: str


DEFECTS = [
    Defect("empty kernels of block scores", KERNELS,
           "Policy::ScoreBlocks(CudaTeam(), context, ", "if (planes_each == 0) Policy::ScoreBlocks(CudaTeam(), context, "),
    Defect("no barrier before a reduction overwrites the one before", TEAM,
           "before they are overwritten.\n    __syncthreads();", "before they are overwritten."),
    Defect("no barrier before a reduction's parts are read", TEAM,
           "if (in_row() == 0) of_warp[row()] = x;\n    __syncthreads();", "if (in_row() == 0) of_warp[row()] = x;"),
    Defect("no barrier before row teams' sums are read", TEAM,
           "of_lane[row()][in_row()] = x;\n    __syncthreads();", "of_lane[row()][in_row()] = x;"),
    Defect("no barrier before ranks are read", TEAM,
           "of_warp[row()] = __popc(flags);\n    __syncthreads();", "of_warp[row()] = __popc(flags);"),
    Defect("sixteen bytes at once whatever the alignment", TEAM,
           "if (aligned % sizeof(uint4) != 0) {", "if (row_bytes % sizeof(uint4) != 0) {"),
    Defect("a stride of eight bytes for chunks of sixteen", TEAM,
           "LoadOnce(at[i] + chunk * sizeof(uint4))", "LoadOnce(at[i] + chunk * sizeof(uint64_t))"),
    Defect("an fp8 that is not a number is one", TEAM,
           "return (none & 0x80808080u) == 0 ? sum", "return none != 0 || true ? sum"),
    Defect("an fp8 that is not scaled", TEAM,
           "if constexpr (op == RowOp::kProduct) sum *= kScale;", ""),
    Defect("the bytes of an fp8 pair in another order", TEAM, "pair == 0 ? 0x1404", "pair == 0 ? 0x0414"),
    Defect("rows past the last are written", TEAM,
           "const bool there = base + i * groups < all;", "const bool there = true;"),
    Defect("lanes leave a loop before the shuffle of their warp", TEAM,
           "for (uint32_t base = group; base - group < all;", "for (uint32_t base = group; base < all;"),
    Defect("the halves of a fragment of queries in another order", TILE,
           "held[0][two * 2 + i] = hi;", "held[0][two + 2 * i] = hi;"),
    Defect("no barrier before a tile of keys is multiplied", TILE,
           "if (chunk >= chunks()) break;\n        __syncthreads();", "if (chunk >= chunks()) break;"),
    Defect("no barrier before the parts of a head's logits are added", TILE,
           "    __syncthreads();\n    if (held_part_ != 0) return;", "    if (held_part_ != 0) return;"),
    Defect("an f32 whose lower part is left out", TILE,
           "MultiplyTf32(d0, d1, d2, d3, hi, LowerPart(first), LowerPart(second));", ""),
    Defect("pieces of keys loaded far apart by neighbouring lanes", TILE,
           "return threadIdx.x / kPieces; }\n  __device__ static uint32_t piece_number() { return threadIdx.x % kPieces; }",
           "return threadIdx.x % kTokens; }\n  __device__ static uint32_t piece_number() { return threadIdx.x / kTokens; }"),
    Defect("no barrier before staged keys are summed", FEATURES,
           "team.staged_norms(), team.stage());\n    team.Sync();", "team.staged_norms(), team.stage());"),
    Defect("no barrier before other keys are staged", FEATURES, "record);\n    team.Sync();\n  }\n}", "record);\n  }\n}"),
    Defect("keys that are summed are not staged", TEAM,
           "return static_cast<uint32_t>(kStageBytes / (tokens * row_bytes));", "return 0;"),
    Defect("no barrier before rows are multiplied with a vector", TEAM,
           "reinterpret_cast<float*>(staged)[d] = x[d];\n    __syncthreads();", "reinterpret_cast<float*>(staged)[d] = x[d];"),
    Defect("counters of a selection that nobody sets to zero", COMPUTE,
           "BinsBytes(request), stream_.get()),", "1, stream_.get()),"),
    Defect("a grid of half the thread blocks", COMPUTE,
           "const PlaneShares shares = PlaneShares::Of(shape.blocks(), scorers::kUnpackBlocks);\n"
           "    RETURN_IF_ERROR(Launch(kernels_.unpack, {uint64_t{shape.planes()} * shares.shares, 1, kBlockThreads},",
           "const PlaneShares shares = PlaneShares::Of(shape.blocks(), scorers::kUnpackBlocks);\n"
           "    RETURN_IF_ERROR(Launch(kernels_.unpack, {uint64_t{shape.planes()} * shares.shares / 2, 1, kBlockThreads},"),
]


def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]


def build() -> str:
    done = run(["bash", "-c", f". deploy/lib.sh && ninja -C {BUILD} bin/scorers_test bin/score_timings fake_cuda"])
    return "" if done.returncode == 0 else f"does not build: {done.stdout[-2000:]}"


def counted(environment: dict[str, str]) -> str:
    """What misses its bar, or nothing."""
    COUNTS.unlink(missing_ok=True)
    timed = run([str(BUILD / "bin/score_timings"), "--quick"], env=environment | {"KVPOOL_FAKE_KERNELS_COUNTS": str(COUNTS)})
    if timed.returncode != 0:
        return f"score_timings: {(timed.stderr or timed.stdout).splitlines()[-1]}"
    done = run([str(TREE / "tests/support/fake_cuda/kernel_counts.py"), "bars", str(COUNTS)])
    return "" if done.returncode == 0 else done.stdout.splitlines()[0]


def test() -> str:
    """What fails, or nothing."""
    environment = os.environ | {
        "KVPOOL_LIBCUDA": str(BUILD / "lib/fake_cuda/libcuda.so.1"), "KVPOOL_TEST_DEVICE": "cuda", "KVPOOL_FAKE_KERNELS": "ptx"}
    try:
        done = run([str(BUILD / "bin/scorers_test"), "--gtest_fail_fast"], env=environment, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "it takes too long"
    if done.returncode == 0:
        return counted(environment)
    words = re.search(r"^fake libcuda: (.*)", done.stderr, re.MULTILINE)
    failed = re.search(r"^\[  FAILED  \] (\S+)", done.stdout, re.MULTILINE)
    return f"{failed[1] if failed else 'ended'}: {words[1] if words else 'wrong scores'}"


def prepare() -> None:
    if not TREE.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(TREE)], cwd=ROOT, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    subprocess.run(["git", "checkout", "--quiet", "--force", "--detach", head.strip()], cwd=TREE, check=True)
    root = (ROOT / "build/deps/cuda_root").read_text(encoding="utf-8").strip()
    done = run(["cmake", "-G", "Ninja", "-S", str(TREE), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release", "-DKVPOOL_PTX_ONLY=ON",
                f"-DKVPOOL_CUDA_ROOT={root}"])
    wrong = done.stderr if done.returncode != 0 else build() or test()
    if wrong:
        sys.exit(f"kernel_defects: without a defect: {wrong}")


def judge(defect: Defect) -> str:
    path: pathlib.Path = TREE / defect.source
    text = path.read_text(encoding="utf-8")
    if text.count(defect.old) != 1:
        sys.exit(f"kernel_defects: {defect.name}: its text is {text.count(defect.old)} times in {defect.source}")
    try:
        path.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
        return build() or test()
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the defects' names")
    parser.add_argument("--list", action="store_true", help="prints the defects, and makes none")
    arguments = parser.parse_args()
    chosen = [defect for defect in DEFECTS if arguments.only in defect.name]
    if arguments.list:
        print("\n".join(f"{defect.source}: {defect.name}" for defect in chosen))
        return 0
    prepare()
    unseen = 0
    for defect in chosen:
        seen = judge(defect)
        unseen += not seen
        print(f"{defect.name}: {seen or 'NOT SEEN'}", flush=True)
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
