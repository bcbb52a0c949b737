"""kvpool-conform: holds an engine to what engines on a kvpoold have to do. See README.md beside this file."""

import argparse
import signal
import sys

from kvpool.conform.bench import Bench, Failed, NotApplicable
from kvpool.conform.checks import CHECKS, Check
from kvpool.conform.processes import EngineEnded, EngineRefused, EngineSilent


def result(bench: Bench, check: Check) -> tuple[str, str]:
    """("ok" or "not ok" or "skip", why)."""
    try:
        check.run(bench)
    except NotApplicable as reason:
        return "skip", str(reason)
    except EngineRefused as error:
        return "not ok", f"the engine answers: {error}"
    except (EngineEnded, EngineSilent) as error:
        return "not ok", f"the engine: {error}"
    except Failed as error:
        return "not ok", str(error)
    except Exception as error:  # An answer without its fields, a daemon that does not answer: the next check may pass all the same.
        return "not ok", f"{type(error).__name__}: {error}"
    return "ok", ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvpool-conform", description="Checks an engine's use of a kvpoold. It prints TAP, and ends with status 1 if "
                                     "a check failed.", epilog="COMMAND starts an engine: {socket} in it becomes the daemon's socket, or nothing for an "
                                     "engine without a pool, {other} what of the engine is not as usual.")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these checks")
    parser.add_argument("--list", action="store_true", help="what there is to check, and why")
    parser.add_argument("--capacity", default="1GiB", metavar="BYTES", help="memory of the daemons [1GiB]")
    parser.add_argument("--device", default="host", help="as kvpoold takes it [host]")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="what takes longer hangs [600]")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="behind --")
    given = parser.parse_args()
    if given.list:
        for check in CHECKS:
            print(f"{check.name}\n  {check.says}\n  {check.why}")
        return 0
    wanted = [name for name in given.only.split(",") if name]
    if unknown := sorted(set(wanted) - {check.name for check in CHECKS}):
        parser.error(f"--only: no such check: {', '.join(unknown)}")
    if not any("{socket}" in word for word in given.command):
        parser.error("COMMAND: needs a {socket}, where the daemon's goes")
    checks = [check for check in CHECKS if not wanted or check.name in wanted]
    print(f"TAP version 13\n1..{len(checks)}", flush=True)
    try:
        bench = Bench(given.command, capacity=given.capacity, device=given.device, timeout=given.timeout)
    except (Failed, EngineRefused, EngineEnded, EngineSilent) as error:
        print(f"Bail out! without a pool (an empty socket), the engine: {error}")
        return 1
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that nothing is left behind.
    try:
        for number, check in enumerate(checks, 1):
            how, reason = result(bench, check)
            bench.settle(how == "not ok")
            failed += how == "not ok"
            print(f"{'not ok' if how == 'not ok' else 'ok'} {number} - {check.name}{f' # SKIP {reason}' if how == 'skip' else ''}", flush=True)
            if how == "not ok":
                print(f"# must hold: {check.says}\n# seen: {reason}\n# matters: {check.why}", flush=True)
    finally:
        bench.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
