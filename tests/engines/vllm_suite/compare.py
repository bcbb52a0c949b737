"""Says what became of vLLM's tests on kvpool, and fails where the list of those that do not pass is not the truth.

Usage: compare.py RESULTS [LIST]

RESULTS: lines of on_the_pool.py. LIST: the names of tests, below lines "# REASON".
"""

import collections
import json
import sys


def read_list(path):
    """{test: reason}."""
    reasons, reason = {}, ""
    with open(path) as file:
        for line in file:
            line = line.rstrip("\n")
            if line.startswith("# "):
                reason = line[2:]
            elif line:
                assert line not in reasons, f"{line} is listed twice"
                reasons[line] = reason
    return reasons


def main():
    with open(sys.argv[1]) as file:
        lines = [json.loads(line) for line in file]
    results = {test: (outcome, why) for outcome, test, why, _ in lines}
    makers = [line for line in lines if line[3]]
    for what, some in (("tests", lines), ("that make a KV cache manager or a scheduler", makers)):
        counts = collections.Counter(outcome for outcome, *_ in some)
        print(f"{len(some)} {what}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    if len(sys.argv) < 3 or not sys.argv[2]:
        return 0
    listed = read_list(sys.argv[2])
    for reason, count in collections.Counter(listed.values()).most_common():
        print(f"{count:5}  {reason}")
    wrong = [f"{outcome}, and is not listed: {test}: {why}" for test, (outcome, why) in results.items()
             if outcome != "passed" and test not in listed]
    wrong += [f"passes, and is listed: {test}" for test, (outcome, _) in results.items() if outcome == "passed" and test in listed]
    wrong += [f"is listed, and is no test of this vLLM: {test}" for test in listed if test not in results]
    print("\n".join(wrong) or "the list is the truth")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
