"""Pages of one pool of SGLang's host memory, in one space of a kvpoold.

A block is a page, its pieces one behind the other as the host pool names them, and CHECK_BYTES behind them: a sum over the words of the
page, and its key. What was read is held against both.

    unattached   no kvpoold                  -> attached (Opener, asked by each call)
    attached     a session                   -> unattached (an error that no later call can mend) | quiet
    quiet        an answer came too late:    -> attached (_QUIET_S later)
                 nothing is asked

SGLang asks, reads and writes in threads of its own, one for each, and nothing of this waits for the daemon under a lock. What was found
is held until it is read: SGLang counts on it. Who drops the read (too little was found, or other ranks found less) says nothing, so
that holds end by themselves, after hold_seconds.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import kvpool
import numpy as np
import numpy.typing as npt

from kvpool_engines.copies import BLOCK, MOST_KEYS, Patience, lease
from kvpool_engines.sessions import PAUSE_S, Opener, leave
from kvpool_sglang.options import Options

logger = logging.getLogger(__name__)

_QUIET_S = 5.0  # How long nothing is asked after an answer that came too late.
_ON_ITS_WAY = 64  # Questions of one page each that are asked together.
_HELD_PART = 4  # A session holds that part of its blocks at most for reads that may come.
WORD = 8

_CHECK_WORDS = 5

Page = Sequence[npt.NDArray[np.uint64]]  # Pieces of memory.


def _check(page: Page, key: bytes) -> npt.NDArray[np.uint64]:
    """A sum over the words of a page, and its key."""
    total = sum(int(np.add.reduce(piece)) for piece in page) & 0xffffffffffffffff
    return np.frombuffer(total.to_bytes(WORD, "little") + key, np.uint64)


class _Attached:
    """A session, its memory, and what it holds for reads to come."""

    def __init__(self, session: kvpool.Session) -> None:
        self.session = session
        # [block, word]; stays mapped while somebody uses it.
        self.words: npt.NDArray[np.uint64] = np.asarray(session.data(blocks=session.max_blocks)).view(np.uint64)
        self.held: collections.OrderedDict[bytes, tuple[int, float]] = collections.OrderedDict()  # {key: (ref, when it is given back)}
        self.damaged: set[int] = set()  # Refs.

    def key(self, name: bytes) -> bytes:
        return hashlib.sha256(self.session.hash_seed + name).digest()

    def release(self, refs: list[int]) -> None:
        """Also where the session has ended, and all holds with it."""
        if refs:
            try:
                self.session.release(refs)
            except kvpool.KvpoolError:
                pass  # The next question says so.


class PageStore:
    """Thread-safe. No method raises for what a daemon does or doesn't do.

    open_session   of at most so many seconds
    page_bytes     of all pieces of a page: whole words
    """

    def __init__(self, open_session: Callable[[float], kvpool.Session], page_bytes: int, options: Options) -> None:
        self._words, self._options = page_bytes // WORD, options
        self._lock = threading.Lock()
        # Guarded by it.
        self._attached: _Attached | None = None
        self._closed = False
        self._quiet_until = 0.0
        self._timer: threading.Timer | None = None
        self._opener = Opener(lambda: open_session(PAUSE_S), logger)
        self._patience = Patience(options.lease_timeout)
        self.counts = dict.fromkeys(("read_pages", "written_pages", "damaged_pages", "late_answers", "lost_daemons"), 0)
        try:
            self._attached = _Attached(open_session(options.open_timeout))
        except kvpool.UnavailableError as error:
            if options.fallback != "own":
                raise RuntimeError(f"KvPoolStorage needs a kvpoold: {error} (kvpool.fallback = \"own\" would go on without)") from error
            logger.warning("no kvpoold, going on without until there is one: %s", error)

    # ---- The session

    def _there(self) -> _Attached | None:
        """The session; None: there is none, or nothing is to be asked."""
        with self._lock:
            if self._attached is None and not self._closed and (opened := self._opener.take()) is not None:
                try:
                    self._attached = _Attached(opened)
                    logger.warning("kvpoold is there again")
                except Exception as error:
                    logger.error("the kvpoold that is there again is of no use here: %s", error)
                    self._opener.lost()
            return self._attached if time.monotonic() >= self._quiet_until else None

    def _lost(self, attached: _Attached, error: object) -> None:
        with self._lock:
            if self._attached is not attached:
                return
            self._attached = None
            self._opener.lost()
            self.counts["lost_daemons"] += 1
        logger.error("kvpoold is gone, going on without: %s", error)
        leave(attached.session, logger)

    def _late(self) -> None:
        with self._lock:
            self._quiet_until = time.monotonic() + _QUIET_S
            self.counts["late_answers"] += 1
        logger.warning("kvpoold has not answered in time: nothing is asked for the next %s s", _QUIET_S)

    def close(self) -> None:
        with self._lock:
            attached, self._attached, self._closed = self._attached, None, True
            if self._timer is not None:
                self._timer.cancel()
        if attached is not None:
            leave(attached.session, logger)

    # ---- What is there

    def _answers(self, attached: _Attached, questions: Sequence[Sequence[bytes]], wait_ms: int) -> list[list[int]]:
        """For each question the refs of the longest prefix of its keys that is there, held once."""
        answers: list[list[int]] = []
        try:
            pending = [attached.session.match(list(keys), wait_ms=wait_ms) for keys in questions]
            deadline = time.monotonic() + self._options.match_timeout + wait_ms / 1000
            for each in pending:
                answers.append(each.wait(timeout=max(0, deadline - time.monotonic())).blocks.detach())
        except kvpool.ResourceExhaustedError:
            pass  # Too much is on its way.
        except kvpool.DeadlineExceededError:
            self._late()
        except kvpool.KvpoolError as error:
            self._lost(attached, error)
        return answers + [[]] * (len(questions) - len(answers))

    def _match(self, attached: _Attached, keys: Sequence[bytes], wait_ms: int = 0) -> list[int]:
        if not keys:
            return []
        (refs,) = self._answers(attached, [keys[:MOST_KEYS]], wait_ms)  # A longer prefix is found as far as that.
        good = next((i for i, ref in enumerate(refs) if ref in attached.damaged), len(refs))
        attached.release(refs[good:])
        return refs[:good]

    def find(self, names: Sequence[bytes]) -> int:
        """How many pages there are before the first that is missing. They are held for a read."""
        if (attached := self._there()) is None:
            return 0
        keys = [attached.key(name) for name in names]
        refs = self._match(attached, keys, self._options.wait_ms)
        self._hold(attached, keys, refs)
        return len(refs)

    def find_each(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each page is there. Those that are, are held for a read."""
        found: list[bool] = []
        for start in range(0, len(names), _ON_ITS_WAY):
            if (attached := self._there()) is None:
                break
            keys = [attached.key(name) for name in names[start:start + _ON_ITS_WAY]]
            answers = self._answers(attached, [[key] for key in keys], self._options.wait_ms)
            there = [(key, ref) for key, refs in zip(keys, answers) for ref in refs]
            self._hold(attached, [key for key, _ in there], [ref for _, ref in there])
            found += [bool(refs) and refs[0] not in attached.damaged for refs in answers]
        return found + [False] * (len(names) - len(found))

    # ---- Holds

    def _hold(self, attached: _Attached, keys: Sequence[bytes], refs: Sequence[int]) -> None:
        until = time.monotonic() + self._options.hold_seconds
        with self._lock:
            surplus = [attached.held.pop(key)[0] for key in keys if key in attached.held]
            attached.held.update((key, (ref, until)) for key, ref in zip(keys, refs))
            while len(attached.held) > max(1, attached.session.max_blocks // _HELD_PART):
                surplus.append(attached.held.popitem(last=False)[1][0])
            self._start_timer(attached)
        attached.release(surplus)

    def _start_timer(self, attached: _Attached) -> None:
        """REQUIRES: the lock."""
        if attached.held and self._timer is None and not self._closed:
            until = next(iter(attached.held.values()))[1]
            self._timer = threading.Timer(max(0, until - time.monotonic()), self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        overdue: list[int] = []
        with self._lock:
            self._timer = None
            if (attached := self._attached) is None:
                return  # What it held went with the session.
            while attached.held and next(iter(attached.held.values()))[1] <= time.monotonic():
                overdue.append(attached.held.popitem(last=False)[1][0])
            self._start_timer(attached)
        attached.release(overdue)

    def forget(self, names: Sequence[bytes]) -> None:
        """No read of these pages comes."""
        with self._lock:
            if (attached := self._attached) is None:
                return
            refs = [attached.held.pop(key)[0] for key in map(attached.key, names) if key in attached.held]
        attached.release(refs)

    def _take_held(self, attached: _Attached, keys: Sequence[bytes]) -> list[int]:
        """Of the first of these pages that are held."""
        with self._lock:
            held = [attached.held.pop(key, None) for key in keys]
        refs = [each[0] for each in held if each is not None]
        first = next((i for i, each in enumerate(held) if each is None), len(held))
        attached.release(refs[first:])
        return refs[:first]

    # ---- Copies

    def read(self, names: Sequence[bytes], pages: Sequence[Page]) -> int:
        """Fills the first of `pages` that are there, and are what their keys say; answers how many. Those behind may be overwritten."""
        with self._lock:
            attached = self._attached
        if attached is None:
            self._there()  # Another may be on its way.
            return 0
        keys = [attached.key(name) for name in names]
        refs = self._take_held(attached, keys)
        if len(refs) < len(keys) and self._there() is attached:
            refs += self._match(attached, keys[len(refs):])
        done = 0
        # A session that has ended holds nothing: its blocks may be others' by now.
        if refs and self._is_alive(attached):
            for ref, key, page in zip(refs, keys, pages):
                if not self._read(attached, ref, key, page):
                    attached.damaged.add(ref)
                    self.counts["damaged_pages"] += 1
                    logger.error("a page is not what its key says: it is computed")
                    break
                done += 1
        attached.release(refs)
        self.counts["read_pages"] += done
        return done

    def _is_alive(self, attached: _Attached) -> bool:
        try:
            attached.session.check()
            return True
        except kvpool.KvpoolError as error:
            self._lost(attached, error)
            return False

    def _read(self, attached: _Attached, ref: int, key: bytes, page: Page) -> bool:
        block = attached.words[ref & BLOCK]
        start = 0
        for piece in page:
            np.copyto(piece, block[start:start + len(piece)])
            start += len(piece)
        return bool(np.array_equal(block[self._words:self._words + _CHECK_WORDS], _check(page, key)))

    def write(self, names: Sequence[bytes], pages: Sequence[Page], parent: bytes | None) -> int:
        """Shares `pages`; answers how many of the first ones are there then. `parent`: the name of the page in front of them, if it is
        known."""
        if (attached := self._there()) is None:
            return 0
        keys = [attached.key(name) for name in names]
        held = self._match(attached, keys)
        known = len(held)
        written = 0
        if known < len(keys) and self._there() is attached:
            before = keys[known - 1] if known else None if parent is None else attached.key(parent)
            try:
                leased = lease(attached.session, len(keys) - known, self._patience)
                held += leased
                written = self._write(attached, leased, keys[known:], pages[known:], before)
            except kvpool.KvpoolError as error:
                self._lost(attached, error)
        attached.release(held)
        self.counts["written_pages"] += written
        return known + written

    def _write(self, attached: _Attached, leased: list[int], keys: Sequence[bytes], pages: Sequence[Page], before: bytes | None) -> int:
        """Answers how many of the first blocks were sealed, or were there already."""
        if not leased:
            return 0
        for ref, key, page in zip(leased, keys, pages):
            block = attached.words[ref & BLOCK]
            start = 0
            for piece in page:
                np.copyto(block[start:start + len(piece)], piece)
                start += len(piece)
            block[self._words:self._words + _CHECK_WORDS] = _check([block[:self._words]], key)
        try:
            sealed = attached.session.seal(leased, keys[:len(leased)], parent_key=before, leave_duplicates=True)
            outcome = sealed.wait(timeout=self._options.match_timeout)
        except kvpool.ResourceExhaustedError:
            return 0  # Too much is on its way.
        except kvpool.DeadlineExceededError:
            self._late()
            return 0
        return min((index for index, _, _ in outcome.refused), default=len(leased))
