"""Finds a kvpoold again, beside the engine's work, and leaves one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import kvpool

PAUSE_S = 1.0  # Between two attempts; an attempt takes as long at most.
_LONGEST_PAUSE_S = 60.0  # Between two sessions of no use.


class Opener:
    """Opens a session when it is asked again and again. One that refuses this engine is not asked any more."""

    def __init__(self, open_session: Callable[[], kvpool.Session], logger: logging.Logger) -> None:
        self._open, self._logger = open_session, logger
        self._thread: threading.Thread | None = None
        self._opened: queue.SimpleQueue[kvpool.Session | Exception] = queue.SimpleQueue()
        self._next = 0.0
        self._pause_s = PAUSE_S

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
            self._pause_s = PAUSE_S  # The next daemon may be another.
            self._next = time.monotonic() + self._pause_s
        else:
            return opened
        return None

    def failed(self) -> None:
        """The session that was taken is of no use here. To try one costs much: each time the pause is twice as long."""
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next = time.monotonic() + self._pause_s

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
