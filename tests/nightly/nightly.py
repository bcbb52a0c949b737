#!/usr/bin/env python3
"""Kills a daemon that has a keeper, and engines on it, again and again under a replay that checks every byte; and has the daemon
upgraded under another one. Adds a line for each of both to results.tsv, with what was done in the time there was.

Exit status: 0 nothing was lost, 1 something was, or a part of it failed.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
COLUMNS = ("date", "commit", "machine", "what", "seed", "asked", "daemon kills", "engine kills", "upgrades", "requests", "blocks checked",
           "verbs failed", "corruptions", "double owners", "seals lost", "longest answer in ms", "seconds", "outcome")
# A replay of its own, with a seed of its own, for so many kills: what is found is found again by a run of some seconds.
SLICE = 100
# Requests between two kills: fewer would find daemons that have done nothing yet.
REQUESTS = 12
# Blocks of a pool that a slice does not fill.
KEEPS_ALL = 60000


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout.strip()
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def kill_slice(binaries: pathlib.Path, seed: int, kills: int, gpu: bool) -> dict:
    """The replay's result; its `failure` says what went wrong. `gpu`: on one that the fake driver imitates. With an even seed nothing is
    evicted, so that each seal that was answered has to be found."""
    driver = binaries.parent / "lib/fake_cuda/libcuda.so.1"
    assert not gpu or driver.exists(), f"{driver} is not there: built without CUDA"
    done = subprocess.run(
        [str(binaries / "kvpool-replay"), "--spawn-daemon", "--keeper", f"--blocks={2000 if seed % 2 else KEEPS_ALL}", "--workload=conversation", f"--seed={seed}",
         f"--requests={REQUESTS * (kills + 1)}", "--engines=3", f"--kill-daemon-every={REQUESTS}", f"--kill-every={REQUESTS}", "--json",
         *(["--daemon-flag=--device=cuda:0"] if gpu else [])],
        capture_output=True, text=True, check=False, env={**os.environ, "KVPOOL_LIBCUDA": str(driver)} if gpu else None)
    result = json.loads(done.stdout) if done.stdout else {}
    if done.returncode != 0 or not result:
        # The daemon's log is there, too.
        words = [line for line in done.stderr.splitlines() if not re.match(r"\d{4}-\d\d-\d\dT", line)]
        result["failure"] = f"seed {seed}: exit status {done.returncode}: {' '.join(words)[:1000]}"
        print(result["failure"], flush=True)
    elif seed % 2 == 0:
        result["seals_lost"] = result["sealed_again"]
        if result["evicted_blocks"]:
            result["failure"] = f"seed {seed}: {result['evicted_blocks']} blocks were evicted from {KEEPS_ALL}"
    return result


def longest_ms(result: dict) -> float:
    return max(verb["max_ns"] for verb in result["verbs"].values()) / 1e6


def kills(binaries: pathlib.Path, seed: int, asked: int, until: float, gpu: bool) -> dict:
    row = {"what": "kills, fake GPU" if gpu else "kills", "seed": seed, "asked": asked, "daemon kills": 0, "engine kills": 0, "upgrades": 0, "requests": 0, "blocks checked": 0,
           "verbs failed": 0, "corruptions": 0, "double owners": 0, "seals lost": 0, "longest answer in ms": 0.0, "outcome": "passed"}
    failures = []
    while row["daemon kills"] < asked and time.monotonic() < until and len(failures) < 3:
        result = kill_slice(binaries, seed, min(SLICE, asked - row["daemon kills"]), gpu)
        if "failure" in result:
            failures.append(result["failure"])
        if "verbs" in result:
            row["daemon kills"] += result["daemon_kills"]
            row["engine kills"] += result["kills"]
            row["requests"] += result["requests"]
            row["blocks checked"] += result["checked_blocks"]
            row["corruptions"] += result["corrupt_blocks"]
            row["double owners"] += result["double_owners"]
            row["seals lost"] += result.get("seals_lost", 0)
            row["verbs failed"] += result["refused"]
            row["longest answer in ms"] = max(row["longest answer in ms"], longest_ms(result))
        print(f"seed {seed}: {row['daemon kills']} of {asked} kills of the daemon, {row['engine kills']} of engines; "
              f"{row['corruptions']} corruptions, {row['double owners']} double owners, {row['seals lost']} seals lost", flush=True)
        seed += 1
    # An engine ends with its first verb that fails.
    row["verbs failed"] += len(failures)
    if row["seals lost"]:
        failures.append(f"{row['seals lost']} blocks were sealed again under keys whose seal had been answered")
    if failures:
        row["outcome"] = "failed: " + re.sub(r"\s+", " ", "; ".join(failures))
    elif row["daemon kills"] < asked:
        row["outcome"] = "passed as far as there was time"
    return row


def upgrades(binaries: pathlib.Path, asked: int) -> dict:
    done = subprocess.run([str(binaries / "tools_test"), "--gtest_filter=Replay.UpgradesOfTheDaemonFailNoVerb"], capture_output=True,
                          text=True, check=False, env={**os.environ, "KVPOOL_UPGRADES": str(asked)})
    found = re.search(r"(\d+) upgrades, (\d+) requests: (\d+) verbs failed, (\d+) corruptions; longest answer (\d+) ms", done.stdout)
    print(found.group(0) if found else done.stdout[-2000:], flush=True)
    row = {"what": "upgrades", "seed": 11, "asked": asked, "daemon kills": 0, "engine kills": 0, "blocks checked": "", "double owners": "", "seals lost": "",
           "outcome": "passed" if done.returncode == 0 and found else "failed"}
    names = ("upgrades", "requests", "verbs failed", "corruptions", "longest answer in ms")
    row.update(zip(names, found.groups() if found else [""] * len(names), strict=True))
    return row


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--kills", type=int, default=1000, help="of the daemon, and as many of engines (%(default)s)")
    flags.add_argument("--gpu-kills", type=int, default=100, help="the same on a GPU that the fake driver imitates (%(default)s)")
    flags.add_argument("--upgrades", type=int, default=50, help="how many (%(default)s)")
    flags.add_argument("--seed", type=int, default=1, help="of the first slice of 100 kills; each that follows has the next (%(default)s)")
    flags.add_argument("--minutes", type=float, default=24 * 60, help="no slice of kills begins later")
    flags.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build/release/bin", help="where the programs are (%(default)s)")
    arguments = flags.parse_args()
    facts = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), "commit": commit(),
             "machine": f"{os.cpu_count()} cores of {platform.machine()}, Linux {platform.release().split('-')[0]}"}
    passed = True
    until = time.monotonic() + 60 * arguments.minutes
    # Of what is not asked for there is nothing to be said.
    for asked, what in ((arguments.kills, lambda: kills(arguments.binaries, arguments.seed, arguments.kills, until, gpu=False)),
                        (arguments.gpu_kills, lambda: kills(arguments.binaries, arguments.seed, arguments.gpu_kills, until, gpu=True)),
                        (arguments.upgrades, lambda: upgrades(arguments.binaries, arguments.upgrades))):
        if asked == 0:
            continue
        begin = time.monotonic()
        row = {**facts, **what()}
        row["seconds"] = round(time.monotonic() - begin)
        passed = passed and row["outcome"].startswith("passed")
        path = HERE / "results.tsv"
        if not path.exists() or path.stat().st_size == 0:
            path.write_text("\t".join(COLUMNS) + "\n")
        with path.open("a") as results:
            line = [f"{value:.0f}" if isinstance(value, float) else str(value) for value in (row[column] for column in COLUMNS)]
            results.write("\t".join(line) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
