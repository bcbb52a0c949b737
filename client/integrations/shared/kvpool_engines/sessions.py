"""Finds a kvpoold again, beside the engine's work, and leaves one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import kvpool

PAUSE_S = 1.0  # Between two attempts; an attempt takes as long at most.
_LONGEST_PAUSE_S = 60.0  # Behind a loss. A session that lived as long is no sign of trouble.


class Opener:
    """Opens a session when it is asked again and again. One that refuses this engine is not asked any more."""

    def __init__(self, open_session: Callable[[], kvpool.Session], logger: logging.Logger) -> None:
        self._open, self._logger = open_session, logger
        self._thread: threading.Thread | None = None
        self._opened: queue.SimpleQueue[kvpool.Session | Exception] = queue.SimpleQueue()
        self._next = 0.0
        self._taken_at = time.monotonic()  # The engine has begun with a session, or with none.
        self._pause_s = 0.0  # Behind the next loss.

    def take(self) -> kvpool.Session | None:
        """The session, once it is there. Never waits."""
        if self._thread is None:
            if time.monotonic() >= self._next:
                self._thread = threading.Thread(target=self._try, daemon=True)
                self._thread.start()
            return None
        try:
            opened = self._opened.get_nowait()
        except queue.Empty:
            return None
        self._thread = None
        if isinstance(opened, kvpool.FailedPreconditionError):
            self._next = float("inf")
            self._logger.error("kvpoold does not take this engine again: %s", opened)
        elif isinstance(opened, Exception):
            self._next = time.monotonic() + PAUSE_S
        else:
            self._taken_at = time.monotonic()
            return opened
        return None

    def lost(self) -> None:
        """The session that was taken is over, or of no use here. Where it costs much to take one, the next is taken behind a pause: none at
        first, and twice as long with each loss until a session has lived."""
        now = time.monotonic()
        if now - self._taken_at >= _LONGEST_PAUSE_S:
            self._pause_s = 0.0
        elif self._pause_s == PAUSE_S:
            self._logger.warning("kvpoold is lost again and again: the next one is joined behind a pause, of up to %.0f s, until one of them lives",
                                 _LONGEST_PAUSE_S)
        self._next = now + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S), _LONGEST_PAUSE_S)

    def _try(self) -> None:
        try:
            self._opened.put(self._open())
        except Exception as error:
            self._opened.put(error)


def leave(session: kvpool.Session | None, logger: logging.Logger) -> None:
    """A daemon that does not answer sees that it is hung up on."""
    if session is not None:
        try:
            session.close(timeout=1.0)
        except kvpool.KvpoolError as error:
            logger.warning("left a session without a word of kvpoold's: %s", error)


def hang_up(session: kvpool.Session | None) -> None:
    """Leaves a session in whose blocks others of its processes may still work: they come free when all of these are gone."""
    if session is not None:
        with session:
            session.begin_step()  # It is never done.
