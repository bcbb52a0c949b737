"""How long an engine's prefills take. Its daemon learns from them what to load from below the pool, and what to have computed."""

from __future__ import annotations

import time
from typing import Any

import kvpool

# A step tells of a prefill if there is enough to measure, and if all else in it is so small a part.
_LEAST_TOKENS = 32
_OTHER_PART = 1 / 16


class Prefills:
    """Steps are over in the order in which they were planned."""

    def __init__(self) -> None:
        self._over_at = 0.0  # The last step.

    def planned(self, output: Any) -> None:
        """A step is about to be executed."""
        output.kvpool_prefill = prefill_of(output), time.monotonic()

    def over(self, output: Any, session: kvpool.Session) -> None:
        """The step was executed. KvpoolError: the session is over."""
        prefill, began = getattr(output, "kvpool_prefill", (None, 0.0))
        now = time.monotonic()
        # One that was planned while another was under way is executed behind that.
        took, self._over_at = now - max(began, self._over_at), now
        if prefill is not None:
            tokens, tokens_before = prefill
            session.report_prefill(tokens, tokens_before, max(1, int(1e6 * took)))


def prefill_of(output: Any) -> tuple[int, int] | None:
    """(tokens of one request in the step, tokens in front of them), if all others' are next to nothing."""
    if output.total_num_scheduled_tokens < _LEAST_TOKENS:
        return None
    request_id, tokens = max(output.num_scheduled_tokens.items(), key=lambda item: item[1])
    if tokens < _LEAST_TOKENS or output.total_num_scheduled_tokens - tokens > _OTHER_PART * tokens:
        return None
    for request in output.scheduled_new_reqs:
        if request.req_id == request_id:
            return tokens, request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    return tokens, cached.num_computed_tokens[cached.req_ids.index(request_id)]
