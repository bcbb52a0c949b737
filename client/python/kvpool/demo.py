"""Two engines share a prefix, and one of them is killed. Usage: python -m kvpool.demo

Starts a kvpoold on host memory and two processes, each an engine whose model computes 200 blocks a second. It takes some ten
seconds, leaves nothing behind, and ends with status 0 if and only if the second engine found what the first one had sealed, byte
for byte.
"""

import os
import subprocess
import sys
import tempfile
import time

import numpy as np

import kvpool
from kvpool import programs

TOKENS_PER_BLOCK = 16
BLOCKS = 512
SECONDS_PER_BLOCK = 0.005


def engine(document: int) -> None:
    """Computes a document of 8,192 tokens, or finds it: an engine's whole life. Prints what it has, block by block."""
    layout = kvpool.Layout.paged(layers=4, kv_heads=2, head_dim=64, tokens_per_block=TOKENS_PER_BLOCK, dtype="float32")
    with kvpool.Session(layout, "demo") as session:
        keys = session.hasher().chain(range(document * 10000, document * 10000 + BLOCKS * TOKENS_PER_BLOCK), TOKENS_PER_BLOCK)
        with session.match(keys).wait() as hit:
            found = len(hit.blocks)
            for i in range(found):
                if not (np.asarray(hit.blocks.k(i)) == document * 1000 + i).all():
                    sys.exit(f"block {i} of document {document} is not what was sealed")
            print(found, found, flush=True)
            for i in range(found, BLOCKS):
                block = session.lease(1)
                np.asarray(block.k(0))[:] = document * 1000 + i  # The model writes K and V.
                time.sleep(SECONDS_PER_BLOCK)
                session.seal(block, keys[i:i + 1], parent_key=keys[i - 1] if i else None).wait()
                print(found, i + 1, flush=True)
                block.release()


def bar(name: str, found: int, done: int, started: float) -> str:
    width = 40 * found // BLOCKS, 40 * done // BLOCKS
    drawn = "#" * width[0] + "=" * (width[1] - width[0])
    return f"  {name} [{drawn:<40}] {found:3} found, {done - found:3} computed, {time.monotonic() - started:3.1f} s"


def run(name: str, document: int, kill_at: int = BLOCKS + 1) -> int:
    """Runs an engine, draws its progress, and kills it at a block. Returns how many blocks it found."""
    started = time.monotonic()
    found = done = 0
    with subprocess.Popen([sys.executable, "-m", "kvpool.demo", str(document)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found, done = map(int, line.split())
            if sys.stdout.isatty():
                print("\r" + bar(name, found, done, started), end="", flush=True)
            if done >= kill_at:
                process.kill()
                break
    print(("\r" if sys.stdout.isatty() else "") + bar(name, found, done, started), "killed" if done >= kill_at else "", flush=True)
    if done < kill_at and process.returncode != 0:
        sys.exit(f"{name} ended with status {process.returncode}")
    return found


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as folder:
        os.environ["KVPOOL_SOCKET"] = f"{folder}/kvpoold.sock"
        with open(f"{folder}/log", "w", encoding="utf-8") as log:
            daemon = subprocess.Popen([programs.path("kvpoold"), "--device=host", "--capacity=256MiB", "--slab-bytes=32MiB",
                                       f"--socket={folder}/kvpoold.sock", f"--state-dir={folder}/state", "--metrics-listen=",
                                       "--shutdown-grace=100ms"], stdout=log, stderr=log)
        try:
            subprocess.run([programs.path("kvpoolctl"), "health", "--wait=30s"], check=True, stdout=subprocess.DEVNULL)
            print(f"kvpoold {kvpool.__version__} owns 256 MiB. = is computed, # is found.\nA document of 8,192 tokens:")
            run("engine 1", 1)
            whole = run("engine 2", 1)
            print("Another. Engine 1 is killed half way, engine 2 goes on from there:")
            run("engine 1", 2, kill_at=BLOCKS // 2)
            half = run("engine 2", 2)
            print("kvpoolctl spaces:", flush=True)
            subprocess.run([programs.path("kvpoolctl"), "spaces"], check=True)
        finally:
            daemon.terminate()
            daemon.wait()
    return 0 if whole == BLOCKS and half >= BLOCKS // 2 - 1 else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        engine(int(sys.argv[1]))
    else:
        sys.exit(main())
