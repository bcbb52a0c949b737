"""What checks stand on: daemons, engines with the pool and without, prompts, and the answers that are right."""

import base64
import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvpool
from kvpool.conform.processes import Daemon, Engine

SLAB_BYTES = 2 << 20  # The least that daemons take.
_PAGE = 1000          # Blocks that kvpoolctl lists at a time.


class Failed(Exception):
    """What was seen is not what has to be."""


class NotApplicable(Exception):
    """The engine says that it has no such thing."""


def expect(right: bool, message: str) -> None:
    if not right:
        raise Failed(message)


class Bench:
    """command: words of which "{socket}" becomes a daemon's socket, or nothing for an engine without a pool, and "{other}" what of the
    engine is not as usual. timeout: seconds that anything may take before it counts as hanging."""

    def __init__(self, command: Sequence[str], *, capacity: str, device: str, timeout: float) -> None:
        self.command, self.capacity, self.device, self.timeout = command, capacity, device, timeout
        self._dice = random.Random(1)
        self._stock = self._started(None)  # It has no pool.
        self._shared: Daemon | None = None
        self._usual: list[Engine] = []  # Those of the shared daemon.
        self._daemons: list[Daemon] = []  # These two are of one check.
        self._engines: list[Engine] = []
        try:
            self.facts = self._facts()
        except BaseException:
            self.close()
            raise
        self.size: int = self.facts["block"]

    def _facts(self) -> dict[str, Any]:
        facts = self._stock.start()
        if lacking := sorted({"ready", "block", "ids", "longest"} - set(facts)):
            raise Failed(f"the engine's first line does not say {', '.join(lacking)}: {facts}")
        size, longest = facts["block"], facts["longest"]
        if longest < 12 * size:
            raise Failed(f"longest is {longest} tokens, where blocks of {size} need {12 * size}, 12 blocks, to be seen at work")
        return facts

    # ---- Processes

    def daemon(self, capacity: str | None = None) -> Daemon:
        """One for this check alone."""
        self._daemons.append(Daemon(capacity or self.capacity, "0" if capacity is None else str(SLAB_BYTES), self.device))
        return self._daemons[-1]

    @property
    def shared(self) -> Daemon:
        if self._shared is None:
            self._shared = Daemon(self.capacity, "0", self.device)
        return self._shared

    def start(self, daemon: Daemon | None, other: str = "") -> Engine:
        self._engines.append(self._started(daemon, other))
        return self._engines[-1]

    def pair(self) -> list[Engine]:
        """Two engines of the shared daemon, which may have served other checks."""
        self._engines += [engine for engine in self._usual if engine.process.poll() is not None]
        self._usual = [engine for engine in self._usual if engine.process.poll() is None]
        while len(self._usual) < 2:
            self._usual.append(self._started(self.shared))
        for engine in self._usual:
            engine.start()
        return self._usual

    def _started(self, daemon: Daemon | None, other: str = "") -> Engine:
        words = [word.replace("{socket}", daemon.socket if daemon else "").replace("{other}", other) for word in self.command]
        return Engine(words, timeout=self.timeout, log=tempfile.TemporaryFile())

    def settle(self, failed: bool) -> None:
        """After each check: what was its own ends, and after one that failed what is shared, too, for nobody knows how it is."""
        if failed:
            self._engines += self._usual
            self._daemons += [self._shared] if self._shared else []
            self._usual, self._shared = [], None
        for engine in self._engines:
            engine.kill()
        for daemon in self._daemons:
            daemon.close()
        self._engines, self._daemons = [], []

    def close(self) -> None:
        self.settle(failed=True)
        self._stock.kill()

    # ---- Prompts and answers

    def prompts(self, *lengths: int) -> list[list[int]]:
        """Token ids that no check has had before."""
        low, high = self.facts["ids"]
        return [[self._dice.randrange(low, high) for _ in range(length)] for length in lengths]

    def whole(self, prompt: Sequence[int]) -> int:
        """Tokens that are found of a prompt that was computed: full blocks, without the last token, which is computed in any case."""
        return (len(prompt) - 1) // self.size * self.size

    def own(self, prompts: Sequence[Sequence[int]], tokens: int, **more: Any) -> list[list[int]]:
        """What the engine says without a pool."""
        said: list[list[int]] = self._stock.generate(prompts, tokens=tokens, **more)["tokens"]
        expect(all(len(answer) == tokens for answer in said), f"without the pool, answers have {sorted({len(answer) for answer in said})} "
               f"tokens, where {tokens} were asked for: nothing but their number may end an answer")
        return said

    def expect_tokens(self, said: dict[str, Any], own: list[list[int]], prompts: Sequence[Sequence[int]], when: str) -> None:
        """The answers are those of the engine without a pool; where those depend on how much of a prompt is computed by itself, with as
        much as was found."""
        if said["tokens"] != own and self.facts.get("cuts"):
            own = self.own(prompts, len(own[0]), cached=said["cached"])
        for prompt, tokens, right in zip(prompts, said["tokens"], own, strict=True):
            if tokens != right:
                at = next((i for i, (a, b) in enumerate(zip(tokens, right)) if a != b), min(len(tokens), len(right)))
                raise Failed(f"{when}: a prompt of {len(prompt)} tokens has another answer than without the pool, from token {at} of it on: "
                             f"{tokens[at:at + 5]}, not {right[at:at + 5]}")

    # ---- What the daemon says

    def wait(self, done: Callable[[], Any], failure: Callable[[], str]) -> None:
        until = time.monotonic() + self.timeout
        while not done():
            if time.monotonic() > until:
                raise Failed(f"{failure()}, {self.timeout:g} s later")


def sessions(daemon: Daemon) -> dict[int, dict[str, Any]]:
    return {int(session["session"]): session for session in daemon.ctl("sessions")["sessions"]}


def states(daemon: Daemon) -> dict[str, int]:
    """Blocks of all spaces by state."""
    counts: dict[str, int] = {}
    for space in daemon.ctl("spaces")["spaces"]:
        for state, count in space["blocks"].items():
            counts[state] = counts.get(state, 0) + int(count)
    return counts


def _layout(said: dict[str, Any]) -> kvpool.Layout:
    """As `kvpoolctl --json spaces` says it."""
    def plane(of: dict[str, Any] | None) -> kvpool.Plane | None:
        return None if of is None else kvpool.Plane(**{name.removesuffix("_bytes"): int(value) for name, value in of.items()})

    groups = [kvpool.LayerGroup(**{**group, "dtype": group["dtype"].removeprefix("DTYPE_").replace("UNSPECIFIED", "").lower(),
                                   "k": plane(group.get("k")), "v": plane(group.get("v"))}) for group in said["groups"]]
    return kvpool.Layout(groups, block_bytes=int(said["block_bytes"]), encoding=said["encoding"].removeprefix("ENCODING_").lower())


class Observer:
    """A session in a space that engines have opened: it says what they say, and is let in."""

    def __init__(self, daemon: Daemon, space: dict[str, Any]) -> None:
        if space["devices"] != ["host"]:
            raise NotApplicable(f"blocks are on {', '.join(space['devices'])}: only those on the host are looked at")
        self.daemon, self.space = daemon, space["space"]
        self.session = kvpool.Session(_layout(space["layout"]), base64.b64decode(space["fingerprint"]), facts=space["facts"],
                                      socket=daemon.socket, tenant=space["tenant"].partition("@")[0], client_name="kvpool-conform",
                                      magazine_blocks=0)

    def _sealed(self) -> dict[tuple[int, int], str]:
        """Keys of sealed and cached blocks by (block, generation)."""
        found = {}
        for state in ("sealed", "cached"):
            page = {"next": 1}
            while page["next"]:
                page = self.daemon.ctl("blocks", f"--space={self.space}", f"--state={state}", f"--first={page['next']}", f"--limit={_PAGE}")
                found.update({(block["block"], block["generation"]): block["key"] for block in page["blocks"]})
        return found

    def look(self) -> dict[tuple[int, int, str], bytes]:
        """Digests of what is in them by (block, generation, key). Blocks that leave or come meanwhile are left out."""
        before = self._sealed()
        data = np.asarray(self.session.data())
        read = {at: hashlib.sha256(data[at[0]]).digest() for at in before if at[0] < len(data)}
        after = self._sealed()
        return {(*at, key): read[at] for at, key in before.items() if at in read and after.get(at) == key}
