"""What the connector's scheduler saves: blocks of vLLM's that steps have filled, on their way into the pool.

A save is in one of these states:

    planned   a step that fills its blocks is planned; kvpoold is asked what of them it has
    copying   its step is over, and what kvpoold lacks is leased, and in a plan
    over      all workers have reported the copy: it is sealed

Until it is over vLLM's blocks are held by their reference counts, whatever becomes of the request: it may end, or be preempted, and nobody
writes to them. So there is nothing that a finished request has to wait for. A save is left out where kvpoold has no block to lease, or
is gone, and where what the step has computed is not what the keys say.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any

import kvpool

from kvpool_engines.copies import MOST_KEYS, Patience
from kvpool_vllm import keys
from kvpool_vllm.messages import Copy, Report

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


@dataclasses.dataclass(eq=False)
class Save:
    """Consecutive blocks of a sequence, of one group of layers."""

    group: int
    blocks: list[Any]  # vLLM's KVCacheBlock.
    keys: list[bytes]
    parent_key: bytes | None
    adapter: tuple[str, str] | None  # keys.adapter_files: what they have to be still once the step is done.
    question: kvpool.PendingMatch | None = None  # How much of it kvpoold has.
    # How long an answer, and blocks, are waited for once the step is done, and until when that is.
    patience: float = 0.0
    deadline: float | None = None

    def take(self, count: int) -> Save:
        """Its first blocks, which it has no more."""
        first = dataclasses.replace(self, blocks=self.blocks[:count], keys=self.keys[:count])
        if count:
            self.parent_key = self.keys[count - 1]
        self.blocks, self.keys = self.blocks[count:], self.keys[count:]
        return first


class Saves:
    """Errors of kvpoold's are raised when all is as it was, or as it says; drop() is right then."""

    def __init__(self, ranks: int, lease_timeout: float) -> None:
        self.block_pool: BlockPool | None = None
        self.counts = dict.fromkeys(("saved_blocks", "known_blocks", "skipped_blocks"), 0)
        self._ranks = ranks
        self._patience = Patience(lease_timeout)
        self._first_by = 0.0  # Until then a session that has leased nothing yet may still be about to.
        self._planned: list[Save] = []
        self._copying: dict[int, tuple[Save, list[int]]] = {}  # Keyed by Copy.number: (save, refs; none once their session is lost).
        self._copied: dict[int, int] = {}  # How many workers have done a copy that not all have done.
        self._spoilt: set[int] = set()  # Copies that came to nothing with some worker.
        self._numbers = itertools.count(1)
        self._keys: set[tuple[int, bytes]] = set()  # Of all saves, with their groups.

    def __len__(self) -> int:
        return len(self._planned) + len(self._copying)

    @property
    def are_under_way(self) -> bool:
        """Workers copy, as far as they have reported."""
        return bool(self._copying)

    def __contains__(self, key: tuple[int, bytes]) -> bool:
        return key in self._keys

    def opened(self, patience: float) -> None:
        """A session begins; its first blocks take a moment, for memory may have to be made for them."""
        self._first_by = time.monotonic() + patience

    def add(self, session: kvpool.Session, save: Save, ask: bool) -> None:
        """A step is being planned that fills these blocks. `ask`: what of it is there can be asked."""
        self.block_pool.touch(save.blocks)
        self._keys.update((save.group, key) for key in save.keys)
        self._planned.append(save)
        if not ask or len(save.keys) > MOST_KEYS:
            return
        try:
            save.question = session.match_groups([(save.group, save.keys)])
        except kvpool.ResourceExhaustedError:
            pass  # Too much is on its way. Seal sees what is there, too.

    def begin(self, session: kvpool.Session, copies: list[Copy], wait_s: float) -> None:
        """Adds copies that workers can do now. REQUIRES: for workers the steps planned so far come before. `wait_s`: for an answer."""
        for save in list(self._planned):
            if save.adapter is not None and keys.adapter_digest(save.adapter[0]) != save.adapter[1]:
                self._skip(save)  # The step may have loaded others.
                continue
            if save.deadline is None:
                save.patience = self._patience.left()
                save.deadline = max(time.monotonic() + save.patience, self._first_by)
            if save.question is not None and not self._answered(save, wait_s):
                continue
            if refs := self._lease(session, len(save.blocks)):
                self._first_by = 0.0
                number, part = next(self._numbers), save.take(len(refs))
                self._copying[number] = part, refs
                copies.append(Copy(number, [save.group] * len(refs), [block.block_id for block in part.blocks], refs, part.keys))
            if not save.blocks:
                self._planned.remove(save)
            elif time.monotonic() >= save.deadline:
                self._patience.was_in_vain(save.patience)
                self._skip(save)

    def _answered(self, save: Save, wait_s: float) -> bool:
        """Takes from a save what kvpoold has. False: that is not known yet."""
        try:
            with save.question.wait(timeout=wait_s) as hit:
                known = len(hit.groups[0])
        except kvpool.DeadlineExceededError:
            if time.monotonic() < save.deadline:
                return False
            self._patience.was_in_vain(save.patience)
            known = 0
        save.question = None
        self.counts["known_blocks"] += known
        self._free(save.take(known))
        return True

    def _lease(self, session: kvpool.Session, wanted: int) -> list[int]:
        """As many as are at hand. Asking for all is what has the session get more."""
        for count in (wanted, min(wanted, session.free_blocks)):
            try:
                if count > 0:
                    return session.lease(count, timeout=0).detach()
            except kvpool.ResourceExhaustedError:
                pass
        return []

    def done(self, session: kvpool.Session, report: Report) -> None:
        """Seals what all workers have copied."""
        self._spoilt |= report.not_copied
        for number, workers in report.copied.items():
            self._copied[number] = self._copied.get(number, 0) + workers
        for number in sorted(number for number, workers in self._copied.items() if workers == self._ranks):
            save, refs = self._copying.pop(number)
            del self._copied[number]
            self._free(save)
            spoilt = number in self._spoilt
            self._spoilt.discard(number)
            if refs and not spoilt and self._seal(session, save, refs):
                self.counts["saved_blocks"] += len(refs)
            else:
                self.counts["skipped_blocks"] += len(save.keys)
            if refs:
                session.release(refs)

    def _seal(self, session: kvpool.Session, save: Save, refs: list[int]) -> bool:
        try:
            session.seal(refs, save.keys, parent_key=save.parent_key, group=save.group, leave_duplicates=True)
        except kvpool.ResourceExhaustedError:
            return False  # Too much is on its way.
        return True

    def drop_planned(self) -> None:
        """What these steps compute is not what the keys say, or nobody takes it."""
        for save in list(self._planned):
            self._skip(save)

    def drop(self) -> None:
        """The session is lost. Of copies that are under way workers report still."""
        self.drop_planned()
        self._copying = {number: (save, []) for number, (save, _) in self._copying.items()}

    def let_go(self) -> None:
        """vLLM takes its blocks, and copies that are under way may read what comes then: they are not sealed."""
        self.drop_planned()
        for number, (save, _) in self._copying.items():
            self.counts["skipped_blocks"] += len(save.blocks)
            self._free(save)
            save.blocks, save.keys = [], []  # Others may save these keys by the time it is reported.
            self._spoilt.add(number)

    def _skip(self, save: Save) -> None:
        self._planned.remove(save)
        self.counts["skipped_blocks"] += len(save.blocks)
        self._free(save)

    def _free(self, save: Save) -> None:
        self._keys.difference_update((save.group, key) for key in save.keys)
        self.block_pool.free_blocks(reversed(save.blocks))
