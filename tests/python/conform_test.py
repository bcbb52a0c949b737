"""kvpool-conform: the toy engine passes, and each check sees the defect that it is for."""

import concurrent.futures
import pathlib
import re
import subprocess
import sys

import pytest

import defective_engine
from kvpool.conform.__main__ import result
from kvpool.conform.bench import Bench
from kvpool.conform.checks import CHECKS

TOY = [sys.executable, "-m", "kvpool.conform.toy", "--socket={socket}", "--other={other}"]
WAIT_S = 15  # Beyond what anything takes on a busy machine.
# Check, defect, what is said of it, and seconds that anything may take: where the defect is a wait, WAIT_S.
DEFECTS = [
    ("same_tokens", "ReadsAnotherRow", "computed: a prompt of 1 tokens has another answer than without the pool, from token 16 of it on", 600),
    ("prefix_of_another", "SharesNothing", "0 of 17 tokens that another process had computed were found", 600),
    ("prefix_of_the_dead", "SharesAtItsEnd", "0 of 17 tokens that a process that was killed had computed were found", 600),
    ("salts", "HasOneSalt", "a prompt with no salt found 64 tokens", 600),
    ("another_model", "HasOneFingerprint", "behind an engine of another model, a usual one found 112 tokens", 600),
    ("another_dtype", "HasOneFingerprint", "behind an engine of another dtype, a usual one found 112 tokens", 600),
    ("another_block", "CountsWhatItComputes", "behind an engine of another block size, a usual one found 112 tokens", 600),
    ("early_token", "ForgetsWhatIsInFront", "one with blocks of another prompt in it found 96 tokens, of which it has 32", 600),
    ("early_token", "HashesHalfOfABlock", "a prompt whose token 20 is another found 96 tokens, of which it has 16", 600),
    ("early_token", "FindsWholePromptsOnly", "a prompt whose token 20 is another found 0 tokens, of which it has 16", 600),
    ("gives_back", "KeepsWhatItFound", r"are \([1-9]\d*, \d+, [1-9]\d*\)", WAIT_S),
    ("gives_back", "KeepsALease", r"are \(0, 18, 0\), where \(0, up to 0, 0\) can be", WAIT_S),
    ("gives_back", "LeavesAProcess", "the engine has ended, and there are 1 sessions of it", WAIT_S),
    ("seals_are_final", "WritesIntoASealedBlock", r"block \d+ \(generation \d+\) has other bytes than before", 600),
    ("engine_dies", "SealsBeforeItWrites", "on what an engine had computed that was killed at its step 1: a prompt of .* has another answer", 600),
    ("engine_dies", "LeavesAProcess", "process group was killed, and 1 of its sessions and", WAIT_S),
    ("daemon_dies", "EndsWithTheDaemon", "the error does not say what is wrong", 600),
    ("daemon_dies", "InventsAnswersWithoutADaemon", "with a daemon that was killed at step 1: a prompt of .* has another answer", 600),
    ("daemon_dies", "NeverSharesAgain", "a daemon is there again, and the engine has no session with it", WAIT_S),
    ("daemon_stops", "RefusesWhenItIsLate", "the engine answers: DeadlineExceededError", 600),
    ("pool_too_small", "TakesItsOldestBlockAgain", "a prompt of 1004 tokens has another answer", 600),
    ("pool_too_small", "WaitsForEver", "the engine: no answer within 15 s", WAIT_S),
]


def conform(*arguments):
    return subprocess.run([sys.executable, "-m", "kvpool.conform", *arguments], capture_output=True, text=True, timeout=1200)


def test_the_toy_passes():
    done = conform("--", *TOY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["TAP version 13", f"1..{len(CHECKS)}", *(f"ok {i} - {check.name}" for i, check in enumerate(CHECKS, 1))]


def result_of(name, defect, timeout):
    (check,) = (check for check in CHECKS if check.name == name)
    bench = Bench([sys.executable, defective_engine.__file__, f"--defect={defect}", "--socket={socket}", "--other={other}"],
                  capacity="256MiB", device="host", timeout=timeout)
    try:
        return result(bench, check)
    finally:
        bench.close()


@pytest.fixture(scope="module")
def waits():
    """What becomes of each defect that is a wait: all at once, since none of them takes a processor."""
    waiting = [(name, defect, timeout) for name, defect, _, timeout in DEFECTS if timeout == WAIT_S]
    with concurrent.futures.ThreadPoolExecutor(len(waiting)) as threads:
        return dict(zip(waiting, threads.map(lambda which: result_of(*which), waiting), strict=True))


@pytest.mark.parametrize("name, defect, seen, timeout", DEFECTS, ids=[f"{name}-{defect}" for name, defect, _, _ in DEFECTS])
def test_a_defect_is_seen(name, defect, seen, timeout, request):
    which = (name, defect, timeout)
    how, reason = request.getfixturevalue("waits")[which] if timeout == WAIT_S else result_of(*which)
    assert how == "not ok" and re.search(seen, reason), (how, reason)


def test_an_engine_that_is_not_let_in_finds_nothing():
    """The daemon sees that blocks of one fingerprint are filled in two ways."""
    assert result_of("another_block", "HasOneFingerprint", 600) == ("ok", "")


def test_every_check_has_a_defect():
    assert {name for name, *_ in DEFECTS} == {check.name for check in CHECKS}


def test_the_page_names_every_check():
    page = (pathlib.Path(__file__).parents[2] / "client/python/kvpool/conform/README.md").read_text()
    assert [name for names in re.findall(r"^\| (`[a-z_`, ]+`) \|", page.partition("## What is checked")[2], re.MULTILINE)
            for name in re.findall(r"\w+", names)] == [check.name for check in CHECKS]


def test_what_an_engine_has_not_is_skipped():
    """An engine that is made one way only, and one without salts."""
    done = conform("--only=another_model,another_dtype", "--", *TOY[:-1])
    assert done.returncode == 0 and done.stdout.splitlines()[2:] == [
        f"ok {i} - another_{what} # SKIP the adapter can't make an engine of another {what} ({{other}} = {what})"
        for i, what in enumerate(("model", "dtype"), 1)]


def test_bad_input():
    done = conform("--only=no_such", "--", *TOY)
    assert done.returncode == 2 and "no such check: no_such" in done.stderr
    done = conform("--", "cat")
    assert done.returncode == 2 and "needs a {socket}" in done.stderr
    done = conform("--only=salts", "--", sys.executable, "-c", "print('{}') # {socket}")
    assert done.returncode == 1 and "Bail out! without a pool (an empty socket), the engine: the engine's first line does not say block, ids" in done.stdout
