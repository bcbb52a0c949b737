"""The checks, in the order in which they run. Each raises Failed, NotApplicable or what a process of it did, or it passes."""

import contextlib
import dataclasses
import functools
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

import kvpool
from kvpool.conform.bench import SLAB_BYTES, Bench, Failed, NotApplicable, Observer, expect, sessions, states
from kvpool.conform.processes import Daemon, Engine, EngineEnded, EngineRefused

ANSWER = 20     # Tokens of most answers.
PAUSE_S = 5.0   # What a daemon that is stopped, and a neighbour that holds all blocks, let others wait.
_GONE, _SHORT = "kvpool|daemon", "kvpool|block|memory"  # Words that say what is missing.


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    says: str  # What holds, if it passes.
    why: str   # What goes wrong, if it does not.
    run: Callable[[Bench], None]


CHECKS: list[Check] = []


def check(says: str, why: str, name: str = "") -> Callable[[Callable[[Bench], None]], None]:
    """Adds a function to CHECKS, by its own name or another."""
    return lambda run: CHECKS.append(Check(name or run.__name__, says, why, run))


def _expect_found(bench: Bench, said: dict[str, Any], prompts: Sequence[Sequence[int]], whose: str) -> None:
    for prompt, cached in zip(prompts, said["cached"], strict=True):
        expect(cached >= bench.whole(prompt), f"{cached} of {len(prompt)} tokens that {whose} had computed were found, where its full blocks have "
               f"{bench.whole(prompt)}")


def _expect_nothing_found(said: dict[str, Any], what: str) -> None:
    expect(not any(said["cached"]), f"{what} found {max(said['cached'])} tokens")


@check("Answers are the same with the pool as without.", "A pool saves work. What changes answers is a cache of something else.")
def same_tokens(bench: Bench) -> None:
    first, size = bench.pair()[0], bench.size
    prompts = bench.prompts(1, size - 1, size, size + 1, 2 * size, 3 * size + size // 2, 8 * size)
    own = bench.own(prompts, ANSWER)
    bench.expect_tokens(first.generate(prompts, tokens=ANSWER), own, prompts, "computed")
    bench.expect_tokens(first.generate(prompts, tokens=ANSWER), own, prompts, "asked again")
    longer = [prompt + answer + more for prompt, answer, more in zip(prompts, own, bench.prompts(*[1] * len(prompts)))]
    own = bench.own(longer, ANSWER)
    for prompt, right in zip(longer, own):
        bench.expect_tokens(first.generate([prompt], tokens=ANSWER), [right], [prompt], "behind its last answer, and by itself")


@check("What one process has computed, another finds.", "Each engine computes everything by itself: the pool is of no use.")
def prefix_of_another(bench: Bench) -> None:
    _prefix(bench, dies=False)


@check("What a process has shared outlives its kill -9.", "A crash of one engine costs all others what it had computed.")
def prefix_of_the_dead(bench: Bench) -> None:
    _prefix(bench, dies=True)


def _prefix(bench: Bench, dies: bool) -> None:
    (first, second), size = bench.pair(), bench.size
    prompts = bench.prompts(size + 1, 2 * size, 5 * size + 3, 8 * size)
    own = bench.own(prompts, ANSWER)
    bench.expect_tokens(first.generate(prompts, tokens=ANSWER), own, prompts, "computed")
    first.ask("flush")
    if dies:
        first.kill()
    said = second.generate(prompts, tokens=ANSWER)
    _expect_found(bench, said, prompts, "another process" if not dies else "a process that was killed")
    bench.expect_tokens(said, own, prompts, "on a prefix that another process computed")


@check("Users with different salts find nothing of each other's.", "Who finds a prefix learns that somebody has asked it: a salt is to prevent that.")
def salts(bench: Bench) -> None:
    if not bench.facts.get("salts"):
        raise NotApplicable("the engine has no salts")
    (first, second), size = bench.pair(), bench.size
    prompts = bench.prompts(2 * size + 1, 5 * size)
    own = bench.own(prompts, ANSWER)
    bench.expect_tokens(first.generate(prompts, tokens=ANSWER, salt="a"), own, prompts, "with a salt")
    first.ask("flush")
    for salt, whose in (({}, "no salt"), ({"salt": "b"}, "another salt")):
        said = second.generate(prompts, tokens=ANSWER, **salt)
        _expect_nothing_found(said, f"a prompt with {whose}")
        bench.expect_tokens(said, own, prompts, f"with {whose}")
    said = second.generate(prompts, tokens=ANSWER, salt="a")
    _expect_found(bench, said, prompts, "a process with the same salt")
    bench.expect_tokens(said, own, prompts, "with the same salt")


def _another(what: str, name: str) -> None:
    @check(f"Engines of another {name} share nothing.", f"K and V of another {name} are other numbers: answers are wrong without a sign of it. "
           f"A fingerprint covers all that K and V depend on.", f"another_{what}")
    def another(bench: Bench) -> None:
        if what not in bench.facts.get("others", []) or not any("{other}" in word for word in bench.command):
            raise NotApplicable(f"the adapter can't make an engine of another {name} ({{other}} = {what})")
        first, size = bench.pair()[0], bench.size
        prompts = bench.prompts(4 * size + 1, 8 * size)
        engine = bench.start(bench.shared, what)
        try:
            engine.start()
        except EngineRefused as error:
            if re.search("FAILED.?PRECONDITION", str(error), re.IGNORECASE) is None:
                raise
            return  # The daemon does not let it into the space of the others, which is as good.
        engine.generate(prompts, tokens=ANSWER)
        engine.ask("flush")
        said = first.generate(prompts, tokens=ANSWER)
        _expect_nothing_found(said, f"behind an engine of another {name}, a usual one")
        bench.expect_tokens(said, bench.own(prompts, ANSWER), prompts, f"behind an engine of another {name}")


_another("model", "model")
_another("dtype", "dtype")
_another("block", "block size")


@check("Prompts share what is in front of the first token that differs, and nothing else.",
       "K and V depend on every token in front: a key that does not name them all gives a block to a prompt that it is not for. "
       "One that names tokens behind the block finds nothing for conversations that part.")
def early_token(bench: Bench) -> None:
    (first, second), size = bench.pair(), bench.size
    one, two = bench.prompts(6 * size + 1, 6 * size + 1)
    first.generate([one, two], tokens=1)
    first.ask("flush")
    at = size + size // 4
    low = bench.facts["ids"][0]
    changed = [*one[:at], low + 1 if one[at] == low else low, *one[at + 1:]]
    spliced = two[:2 * size] + one[2 * size:4 * size] + two[4 * size:]
    for prompt, found, what in ((changed, size, f"a prompt whose token {at} is another"), (spliced, 2 * size, "one with blocks of another prompt in it")):
        own = bench.own([prompt], ANSWER)
        said = second.generate([prompt], tokens=ANSWER)
        expect(said["cached"][0] == found, f"{what} found {said['cached'][0]} tokens, of which it has {found} in common with what was computed")
        bench.expect_tokens(said, own, [prompt], what)


@check("What requests held comes back with their end, and the rest with the engine's.",
       "Blocks that nobody uses and nobody gives back are lost to all engines: a pool that shrinks until nothing runs.")
def gives_back(bench: Bench) -> None:
    daemon, size = bench.daemon(), bench.size
    engine = bench.start(daemon)
    for _ in range(3):
        prompts = bench.prompts(size // 2, 2 * size + 1, 5 * size)
        for _ in range(2):  # Computed, then found.
            engine.generate(prompts, tokens=ANSWER)
    engine.ask("flush")
    stock = engine.start().get("stock", 0)

    def held() -> tuple[int, int, int]:
        daemon.ctl("revoke", "--blocks=1000000")  # What is leased for later, and unused, comes back.
        each = sessions(daemon).values()  # Of which each has a block for padding writes.
        return (sum(int(one["referenced"]) for one in each), sum(int(one["leased"]) - 1 for one in each), states(daemon)["sealed"])

    bench.wait(lambda: (now := held())[0] == now[2] == 0 and now[1] <= stock,
               lambda: f"no request runs, and (sealed blocks held by sessions, leased ones, sealed ones of the space) are {held()}, where "
                       f"(0, up to {stock}, 0) can be")
    status = engine.close()
    expect(status == 0, f"it ended with status {status}")

    def left() -> dict[str, int]:
        return {state: count for state, count in states(daemon).items() if state in ("leased", "sealed", "quarantined") and count}

    bench.wait(lambda: not sessions(daemon) and not left(),
               lambda: f"the engine has ended, and there are {len(sessions(daemon))} sessions of it and {left()}")


@check("Nothing is written into a block once it is sealed.", "Others read it: an answer of theirs changes while it is being said.")
def seals_are_final(bench: Bench) -> None:
    (first, second), size, daemon = bench.pair(), bench.size, bench.shared
    prompts = bench.prompts(2 * size, 3 * size + 1, 5 * size + size // 2)
    first.generate(prompts, tokens=ANSWER)
    first.ask("flush")
    inhabited = {session["space"] for session in sessions(daemon).values()}
    observers = [Observer(daemon, space) for space in daemon.ctl("spaces")["spaces"] if space["space"] in inhabited]
    compared = 0
    try:
        before = [observer.look() for observer in observers]
        for engine in (second, first, second):
            prompts = [prompt + more for prompt, more in zip(prompts, bench.prompts(size // 2, size, 1))]
            engine.generate(prompts, tokens=ANSWER)
            engine.ask("flush")
            for i, observer in enumerate(observers):
                now = observer.look()
                for at in now.keys() & before[i].keys():
                    compared += 1
                    expect(now[at] == before[i][at], f"block {at[0]} (generation {at[1]}) has other bytes than before, and the key {at[2]} still")
                before[i] = now
    finally:
        for observer in observers:
            observer.session.close()
    expect(compared > 0, "there was no sealed block to look at twice")


@check("An engine that is killed takes nothing with it, and its neighbour's answers stay right.",
       "Crashes happen in the middle of a step: what was half written must be nobody's, and come back.")
def engine_dies(bench: Bench) -> None:
    neighbour, size, daemon = bench.pair()[1], bench.size, bench.shared
    for step in (1, ANSWER):
        (shared,) = bench.prompts(3 * size)
        theirs, its = ([shared + more for more in bench.prompts(4 * size, size + 1, 2 * size)] for _ in range(2))
        own, own_its = bench.own(theirs, 2 * ANSWER), bench.own(its, 2 * ANSWER)
        neighbour.generate(theirs[:1], tokens=1)
        neighbour.ask("flush")  # So that the victim begins behind it.
        known = set(sessions(daemon))
        victim = bench.start(daemon)
        process = victim.start()["ready"]
        of_victim = set(sessions(daemon)) - known
        expect(bool(of_victim), "the engine is ready, and the daemon has no session of it")
        neighbour.tell("generate", prompts=theirs, tokens=2 * ANSWER)
        _expect_killed(lambda: victim.generate(its, tokens=2 * ANSWER, kill=[process, step]), "itself", step)
        victim.kill()  # What is left of it.
        bench.expect_tokens(neighbour.answer(), own, theirs, f"while another engine was killed at its step {step}")
        bench.wait(lambda: not of_victim & set(sessions(daemon)) and not states(daemon)["quarantined"],
                   lambda: f"the engine's process group was killed, and {len(of_victim & set(sessions(daemon)))} of its sessions and "
                           f"{states(daemon)['quarantined']} quarantined blocks are there")
        bench.expect_tokens(neighbour.generate(its, tokens=2 * ANSWER), own_its, its, f"on what an engine had computed that was killed at its step {step}")


def _expect_killed(ask: Callable[[], Any], whom: str, step: int) -> None:
    try:
        ask()
    except EngineEnded:
        return
    raise Failed(f"asked to kill {whom} at step {step}, the adapter has not")


def _right_or_refused(bench: Bench, answer: Callable[[], dict[str, Any]], own: list[list[int]], prompts: Sequence[Sequence[int]],
                      words: str, when: str, *, may_end: bool = False) -> bool:
    """True: the answers are right. False: it says why there are none, in words that match."""
    try:
        said = answer()
    except (EngineRefused, EngineEnded) as error:
        if isinstance(error, EngineEnded) and not may_end:
            raise
        expect(re.search(words, str(error), re.IGNORECASE) is not None, f"{when}: the error does not say what is wrong (no {words!r} in it): {error}")
        return False
    bench.expect_tokens(said, own, prompts, when)
    return True


@check("An engine whose daemon is killed goes on with right answers, or says that the daemon is gone.",
       "A daemon dies, too, or is upgraded: engines that hang, or say something else, then are an outage of all of them.")
def daemon_dies(bench: Bench) -> None:
    size, daemon = bench.size, bench.daemon()
    engine = bench.start(daemon)
    for step in (1, ANSWER):
        prompts, more = (bench.prompts(*lengths) for lengths in ((size, 4 * size, 6 * size), (2 * size, 4 * size)))
        own, own_more = bench.own(prompts, 2 * ANSWER), bench.own(more, ANSWER)
        engine.generate(bench.prompts(5 * size), tokens=1)
        asked = functools.partial(engine.generate, prompts, tokens=2 * ANSWER, kill=[daemon.process.pid, step])
        goes_on = _right_or_refused(bench, asked, own, prompts, _GONE, f"with a daemon that was killed at step {step}", may_end=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.process.wait(PAUSE_S)
        expect(daemon.process.poll() is not None, f"asked to kill the daemon at step {step}, the adapter has not")
        if goes_on:
            asked = functools.partial(engine.generate, more, tokens=ANSWER)
            goes_on = _right_or_refused(bench, asked, own_more, more, _GONE, "without a daemon", may_end=True)
        daemon.start()
        if not engine.start().get("shares_again"):
            engine = bench.start(daemon)
            continue
        expect(goes_on, "it says that it shares again once there is a daemon again (shares_again), and has refused requests")
        bench.wait(lambda: engine.generate(bench.prompts(size), tokens=1) and sessions(daemon),
                   lambda: "a daemon is there again, and the engine has no session with it")
    prompts = bench.prompts(3 * size, 5 * size + 1)
    own = bench.own(prompts, ANSWER)
    bench.expect_tokens(engine.generate(prompts, tokens=ANSWER), own, prompts, "with a new daemon")
    engine.ask("flush")
    said = bench.start(daemon).generate(prompts, tokens=ANSWER)
    _expect_found(bench, said, prompts, "an engine of the new daemon")
    bench.expect_tokens(said, own, prompts, "on what an engine of the new daemon computed")


@check("A daemon that pauses makes answers late at most.",
       "A daemon that is swapped out, or looked at by a debugger, is not gone: a request that fails for it need not have.")
def daemon_stops(bench: Bench) -> None:
    (first, second), size, daemon = bench.pair(), bench.size, bench.shared
    process = daemon.process.pid

    def answered(engine: Engine, prompts: Sequence[Sequence[int]], **how: Any) -> dict[str, Any]:
        timer = threading.Timer(PAUSE_S, os.kill, (process, signal.SIGCONT))
        timer.start()
        try:
            return engine.generate(prompts, tokens=2 * ANSWER, **how)
        finally:
            timer.cancel()
            os.kill(process, signal.SIGCONT)

    prompts = bench.prompts(size, 4 * size, 6 * size + 1)
    own = bench.own(prompts, 2 * ANSWER)
    bench.expect_tokens(answered(first, prompts, stop=[process, 1]), own, prompts, "with a daemon that stopped at step 1")
    os.kill(process, signal.SIGSTOP)
    bench.expect_tokens(answered(second, prompts), own, prompts, "with a daemon that had stopped")
    bench.expect_tokens(second.generate(prompts, tokens=2 * ANSWER), own, prompts, "with a daemon that goes on")


@check("Where blocks are short, answers are right or refused with the reason.",
       "A pool is full most of the time. An engine that reads what it no longer holds, or waits for ever, is found out by its users.")
def pool_too_small(bench: Bench) -> None:
    size, longest = bench.size, bench.facts["longest"]
    most = -(-longest // size)  # Blocks of the longest request.
    bench.pair()
    (space, *_) = (space for space in bench.shared.ctl("spaces")["spaces"] if space["sessions"])
    slabs = -(-6 * most * int(space["block_stride_bytes"]) // SLAB_BYTES)
    daemon = bench.daemon(str(slabs * SLAB_BYTES))
    engines = [bench.start(daemon) for _ in range(2)]
    for engine in engines:
        engine.start()
    mine, yours = ([shared + more for more in bench.prompts(*[longest - ANSWER - 2 * size] * 4)] for shared in bench.prompts(2 * size, 2 * size))
    own = [bench.own(prompts, ANSWER) for prompts in (mine, yours)]
    neighbour = Observer(daemon, daemon.ctl("spaces")["spaces"][0])
    try:
        with _all_but(bench, daemon, neighbour.session, most + most // 2):  # Each takes from the other.
            for turn in (0, 1):
                for i, engine in enumerate(engines):
                    engine.tell("generate", prompts=(mine, yours)[i ^ turn], tokens=ANSWER)
                for i, engine in enumerate(engines):
                    _right_or_refused(bench, engine.answer, own[i ^ turn], (mine, yours)[i ^ turn], _SHORT,
                                      "with blocks for one and a half requests for two engines")
        held = _all_but(bench, daemon, neighbour.session, most // 2)
        timer = threading.Timer(PAUSE_S, held.release)
        timer.start()
        asked = bench.prompts(longest - ANSWER)
        _right_or_refused(bench, functools.partial(engines[0].generate, asked, tokens=ANSWER), bench.own(asked, ANSWER), asked, _SHORT,
                          "with fewer blocks than the request has, for some seconds")
        timer.join()
    finally:
        neighbour.session.close()
    for engine in engines:
        asked = bench.prompts(longest - ANSWER)
        bench.expect_tokens(engine.generate(asked, tokens=ANSWER), bench.own(asked, ANSWER), asked, "once there are blocks again")


def _all_but(bench: Bench, daemon: Daemon, session: kvpool.Session, room: int) -> kvpool.Blocks:
    """Leases what is there but for `room` blocks, or, where engines are promised more, but for those."""
    daemon.ctl("revoke", "--blocks=1000000")
    now = states(daemon)
    while True:
        try:
            return session.lease(max(now["free"] + now["cached"] - room, 0), PAUSE_S)
        except (kvpool.ResourceExhaustedError, kvpool.DeadlineExceededError):
            room += max(room // 4, 1)
