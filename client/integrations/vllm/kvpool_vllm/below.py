"""What is below the pool (kvpoold --tier) of the prefixes of waiting requests. No step waits for it: vLLM leaves a request out of a step and
asks for it again in the next, for wait_ms at most.

A request asks twice: for what the pool has, which is answered at once and says whether there is a daemon; and, if more is below, by a match
that is answered when that has come up, which is then found as the first answer is. Until a request is scheduled, or wants nothing any
more, it is, by its second question:

    ahead      it has asked the first before its turn, and what is below     -> wanting | over (nothing is below)
               comes up for it, which nobody holds
    wanting    more is below, or may be: a store that nodes share has not    -> asked (there is room) | over (late)
               said yet. Others that come up fill the room, or this one's
               gave way when blocks were short
    asked      it is on its way, or has come and is held                     -> over (taken, late) | wanting (gave way)
    over       it goes on with what it has
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Set
from typing import Any

import kvpool

MOST_WAIT_MS = 60_000  # Match.wait_ms.
# kvpoold lets 64 matches of a session wait, or bring up what is below: so many of requests before their turn, and so many of others.
_AHEAD, _AT_TURN = 16, 48
_MOST_LEFT_OUT = 64  # Requests, of a step: others go on at once.
_POLL_S = 0.002


@dataclasses.dataclass
class _Wait:
    question: Any
    blocks: int
    pending: kvpool.PendingMatch | None = None
    room: _Room | None = None  # It fills some of this.
    until: float | None = None  # None: no step was planned without it.
    over: bool = False
    resident_tokens: int = 0  # Those that the pool had,
    held_tokens: int = 0  # of which the request has not let go.
    is_below: bool = False  # The daemon has said that more is below,
    may_be_below: bool = False  # or that more may be.


@dataclasses.dataclass
class _Room:
    """For what comes up at once: so many requests, and so many blocks, unless one request has more."""

    most: int
    most_blocks: int
    count: int = 0
    blocks: int = 0

    def take(self, wait: _Wait) -> bool:
        if self.count >= self.most or (self.count > 0 and self.blocks + wait.blocks > self.most_blocks):
            return False
        wait.room = self
        self.count += 1
        self.blocks += wait.blocks
        return True

    def leave(self, wait: _Wait) -> None:
        wait.room = None
        self.count -= 1
        self.blocks -= wait.blocks


class _NoConnector:
    """What vLLM's scheduler asks of a connector while it plans a step, where there is none."""

    supports_divergent_local_hybrid_hits = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return ()

    def has_pending_block_frees(self) -> bool:
        return False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """Workers have no connector."""


class _HoldsBack:
    """A connector for the time in which a step is planned. That it does not know yet how much there is of a request is how vLLM's
    scheduler comes to leave it out of the step. All else is the engine's own connector's to say."""

    def __init__(self, below: Below, own: Any) -> None:
        self._below, self._own = below, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._below.holds_back(request):
            return None, False
        answer: tuple[int | None, bool] = self._own.get_num_new_matched_tokens(request, num_computed_tokens)
        return answer


class Below:
    """Methods that are given a session raise its KvpoolError."""

    def __init__(self, wait_ms: int, most_blocks: int, counters: dict[str, int]) -> None:
        """`most_blocks`: so many are on their way up at once, for requests whose turn it is; half as many for others."""
        self._wait_ms, self._counters = wait_ms, counters
        counters |= {"waited_requests": 0, "promoted_tokens": 0, "late_waits": 0}
        self._waits: dict[str, _Wait] = {}  # Keyed by request id.
        self._ahead, self._at_turn = _Room(_AHEAD, most_blocks // 2), _Room(_AT_TURN, most_blocks)
        self._left_out: set[str] = set()  # Request ids.
        # The step that is being planned may leave requests out, has nothing else to do, and waits for answers until then.
        self._may_leave_out = self._idle = False
        self._poll_until = 0.0

    def requests(self) -> Set[str]:
        """Ids of those that it knows of."""
        return self._waits.keys()

    # ---- Questions

    def prefetches(self, request: Any, question: Any) -> bool:
        """Whether the first question, which the request is about to ask, is to bring up what is below."""
        wait = self._new(request, question)
        return wait is not None and self._ahead.take(wait)

    def pool_has(self, request: Any, question: Any, hit: kvpool.MatchHit) -> None:
        """The answer to the first question."""
        wait = self._waits.get(request.request_id)
        if wait is None and (hit.below_tokens > 0 or hit.may_be_below):
            wait = self._new(request, question)
        if wait is None:
            return
        wait.resident_tokens = wait.held_tokens = hit.tokens
        wait.is_below, wait.may_be_below = hit.below_tokens > 0, hit.may_be_below
        if wait.pending is None:
            self._stop(wait)
        if hit.miss == "none":
            self._end(wait)

    def _new(self, request: Any, question: Any) -> _Wait | None:
        if self._wait_ms == 0 or request.request_id in self._waits:
            return None
        wait = self._waits[request.request_id] = _Wait(question, sum(len(keys) for _, keys in question))
        return wait

    def _ask(self, session: kvpool.Session, wait: _Wait) -> bool:
        left = self._wait_ms if wait.until is None else int((wait.until - time.monotonic()) * 1000)
        if left <= 0 or not self._at_turn.take(wait):
            return False
        try:
            wait.pending = session.match_groups(wait.question, wait_ms=left)
        except kvpool.ResourceExhaustedError:  # Too much is on its way.
            self._stop(wait)
        return wait.pending is not None

    def _stop(self, wait: _Wait) -> None:
        """What comes is given back, unless it was taken."""
        wait.pending = None
        if wait.room is not None:
            wait.room.leave(wait)

    def _end(self, wait: _Wait) -> None:
        self._stop(wait)
        wait.over = True

    # ---- Steps

    @contextlib.contextmanager
    def planning(self, scheduler: Any) -> Iterator[None]:
        """While the scheduler plans a step."""
        if self._wait_ms == 0 or scheduler.get_request_counts()[1] == 0:
            yield
            return
        own, scheduler.connector = scheduler.connector, _HoldsBack(self, scheduler.connector or _NoConnector())
        self._may_leave_out, self._idle = True, not scheduler.running
        self._poll_until = time.monotonic() + _POLL_S
        try:
            yield
        finally:
            scheduler.connector, self._may_leave_out = own, False

    def is_coming(self, session: kvpool.Session, request: Any, take: Callable[[Any, Any], None]) -> bool:
        """Whether the request is to be left out of the step. `take` is given the second answer and its question."""
        self._left_out.discard(request.request_id)
        wait = self._waits.get(request.request_id)
        if wait is None or wait.over or not (wait.is_below or wait.may_be_below):
            return False
        if wait.pending is not None or self._ask(session, wait):
            hit = self._answer(wait)
            if hit is not None:
                self._end(wait)
                self._counters["promoted_tokens"] += max(0, hit.tokens - wait.resident_tokens)
                self._counters["late_waits"] += hit.below_tokens > 0
                if hit.tokens > wait.held_tokens:
                    take(hit, wait.question)
                return False
        now = time.monotonic()
        if wait.until is None and self._may_leave_out and len(self._left_out) < _MOST_LEFT_OUT:
            wait.until = now + self._wait_ms / 1000
            self._counters["waited_requests"] += 1
        if self._may_leave_out and wait.until is not None and now < wait.until:
            self._left_out.add(request.request_id)
            return True
        self._end(wait)
        self._counters["late_waits"] += wait.until is not None
        request.kvpool_asked = None  # Some of it may have come.
        return False

    def _answer(self, wait: _Wait) -> kvpool.MatchHit | None:
        # That there is nothing below a store says in a moment.
        patience = max(0.0, self._poll_until - time.monotonic()) if self._idle or not wait.is_below else 0.0
        try:
            return wait.pending.wait(timeout=patience)
        except kvpool.DeadlineExceededError:
            return None

    def holds_back(self, request: Any) -> bool:
        return request.request_id in self._left_out

    def asking(self) -> list[str]:
        """Ids of requests whose second answer has not been taken, the oldest first."""
        return [request_id for request_id, wait in self._waits.items() if wait.pending is not None]

    def give_way(self, request_id: str) -> None:
        """Blocks are short. The request may ask again at its turn."""
        if (wait := self._waits.get(request_id)) is not None and not wait.over:
            self._stop(wait)
            wait.held_tokens = 0

    def let_go(self, request_id: str) -> None:
        """The request is scheduled, or wants nothing any more."""
        if (wait := self._waits.pop(request_id, None)) is not None:
            self._stop(wait)
        self._left_out.discard(request_id)

    def clear(self) -> None:
        for request_id in list(self._waits):
            self.let_go(request_id)
