"""Blocks that an engine copies: how many of them it gets from a pool that is short, and what stands behind each."""

from __future__ import annotations

import time

import kvpool

MOST_KEYS = 32_768  # That a match may name, of all groups together.
BLOCK = 0xffffffff  # The part of a ref that is the block's number.
CHECK_BYTES = 64  # They follow what is copied: a sum over its words, and its key.
_RETRY_S = 0.5  # How long nobody waits after a wait in vain.


class Patience:
    """How long a copy waits for its daemon: `seconds`, and not at all for a while after it has done so in vain."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._retry_at = 0.0

    def left(self) -> float:
        return self._seconds if time.monotonic() >= self._retry_at else 0

    def was_in_vain(self, waited: float) -> None:
        """`waited`: what left() said before."""
        if waited > 0:
            self._retry_at = time.monotonic() + _RETRY_S


def lease(session: kvpool.Session, wanted: int, patience: Patience) -> list[int]:
    """Refs of as many blocks as there are, at most `wanted`."""
    for count, timeout in ((wanted, patience.left()), (min(wanted, session.free_blocks), 0)):
        try:
            if count > 0:
                return session.lease(count, timeout=timeout).detach()
        except (kvpool.ResourceExhaustedError, kvpool.DeadlineExceededError):
            patience.was_in_vain(timeout)
    return []
