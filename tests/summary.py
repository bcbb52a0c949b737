"""Prints the table that ends tests/run.sh. Usage: summary.py DIR

DIR holds, for each check of run.sh, NAME.check (outcome, seconds, reason; tab-separated) and, for each run of ctest,
PRESET.ctest (the run began) and PRESET.xml (JUnit, as ctest writes it). Before the table stands how the first tests that
failed ended, and behind it the lines that say why: often the end of this text is all that is left of a run. The last line is
"N passed, N failed, N skipped"; the exit status is 1 if anything failed or nothing passed.
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree

Result = collections.namedtuple("Result", "suite name outcome seconds reason output", defaults=[""])
SHOWN_FAILURES, SHOWN_LINES, SHOWN_REASONS = 6, 40, 6
# How GoogleTest, the sanitizers, a CHECK and Python say what went wrong.
REASON = re.compile(r": Failure$|Sanitizer: |: runtime error: |\bCHECK\b|^\s*#[0-3] .* /\S*/(server|client|cuda|proto|tests)/|"
                    r"^(Traceback|\w*Error\b)|\*\*\*")


def read_check(path):
    outcome, seconds, reason = path.read_text().rstrip("\n").split("\t")
    return Result("checks", path.stem, outcome, float(seconds), reason)


def skip_reason(case):
    """GoogleTest prints "file:line: Skipped" and the reason on the next line; other tests end with a line that says why."""
    text = case.findtext("system-out") or ""
    found = re.search(r": Skipped\n(.+)", text)
    if found:
        return found.group(1).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"


def read_ctest(path):
    """All results of one run; a run without a results file was killed, and counts as one failure."""
    xml_path = path.with_suffix(".xml")
    if not xml_path.exists():
        return [Result(path.stem, "ctest", "failed", 0.0, "ended without results")]
    results = []
    for case in xml.etree.ElementTree.parse(xml_path).getroot().iter("testcase"):
        status = case.get("status")
        outcome = {"run": "passed", "fail": "failed"}.get(status, "skipped")
        # A test whose program was not built is "notrun" like a skipped one, but it is no choice of anybody's.
        if case.get("name", "").endswith("_NOT_BUILT"):
            outcome = "failed"
        reason = skip_reason(case) if outcome == "skipped" else ""
        if status == "disabled":
            reason = "disabled"
        results.append(Result(path.stem, case.get("name"), outcome, float(case.get("time", 0)), reason,
                              case.findtext("system-out") or ""))
    return results


def print_table(results):
    rows = collections.OrderedDict()
    for result in results:
        key = (result.suite, result.name) if result.suite == "checks" else (result.suite, "tests")
        row = rows.setdefault(key, collections.Counter())
        row[result.outcome] += 1
        row["seconds"] += result.seconds
    print(f"\n{'':24} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for (suite, name), row in rows.items():
        label = name if suite == "checks" else f"{suite} tests"
        print(f"{label:24} {row['passed']:7} {row['failed']:7} {row['skipped']:8} {row['seconds']:8.0f}")
    for title, outcome in (("not run", "skipped"), ("FAILED", "failed")):
        # One reason often holds for many tests: they share a line.
        by_reason = collections.OrderedDict()
        for result in results:
            if result.outcome == outcome:
                by_reason.setdefault((result.suite, result.reason), []).append(result.name)
        for (suite, reason), names in by_reason.items():
            shown = names if outcome == "failed" else names[:3]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            print(f"{title}: {suite}: {', '.join(shown)}{more}{': ' if reason else ''}{reason}")


def print_failures(results):
    failed = [result for result in results if result.outcome == "failed" and result.output]
    for result in failed[:SHOWN_FAILURES]:
        print(f"\n{result.suite}: {result.name}, the end of its output:")
        print("\n".join("    " + line for line in result.output.splitlines()[-SHOWN_LINES:]))
    if failed:
        print()


def print_reasons(results):
    """For each of the first that failed: where, and the line after it, which has the value."""
    for result in [result for result in results if result.outcome == "failed" and result.output][:SHOWN_FAILURES]:
        lines = result.output.splitlines()
        told = sorted({at + after for at, line in enumerate(lines) if REASON.search(line) for after in (0, 1)})
        for at in [at for at in told if at < len(lines)][:SHOWN_REASONS]:
            print(f"    {result.name}: {lines[at].strip()[:200]}")


def main(folder):
    results = []
    for path in sorted(folder.iterdir(), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        if path.suffix == ".check":
            results.append(read_check(path))
        elif path.suffix == ".ctest":
            results.extend(read_ctest(path))
    print_failures(results)
    print_table(results)
    print_reasons(results)
    count = collections.Counter(result.outcome for result in results)
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
