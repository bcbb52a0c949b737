"""Copies of blocks between vLLM's KV cache and a session's memory: by NumPy where vLLM's is host memory, too, and by kvpool.BlockCopier where
it is a GPU's.

A copied block is the pages of a group's layers, each as the attention kernels fill it, and CHECK_BYTES behind them: a sum over the pages,
the block's key and its group. What a load brought is held against both.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import kvpool
import numpy as np

from kvpool_engines.copies import BLOCK

if TYPE_CHECKING:
    import numpy.typing as npt

logger = logging.getLogger("vllm.kvpool")

_LOCKED_TOGETHER = 256 << 20  # Bytes that are page-locked by one call: what goes back unlocks whole pieces, and no more than it has to.
_UNDER_WAY = 64  # Blocks that are being copied before the sum of the first is taken.


class Blocks(Protocol):
    """Blocks to copy: a Load or a Copy."""

    groups: list[int]
    blocks: list[int]
    refs: list[int]
    keys: list[bytes]


class Block(NamedTuple):
    group: int
    number: int  # vLLM's.
    ref: int
    key: bytes


def blocks_of(job: Blocks) -> Iterator[Block]:
    return itertools.starmap(Block, zip(job.groups, job.blocks, job.refs, job.keys, strict=True))


class Pool:
    """A session's blocks. `shapes`: of each group (bytes of a page, pages of a block)."""

    def __init__(self, session: kvpool.Session, shapes: Sequence[tuple[int, int]]) -> None:
        self.session, self.shapes = session, shapes
        self.words = np.asarray(session.data(blocks=session.max_blocks))

    def pages(self, block: Block) -> npt.NDArray[np.int64]:
        """[layer, word of a page]"""
        page, layers = self.shapes[block.group]
        return self.words[block.ref & BLOCK][:layers * page].view(np.int64).reshape(layers, -1)

    def check(self, block: Block, pages: npt.NDArray[np.int64]) -> bool:
        """Whether these pages, which are the block's or were copied from it, are what its key says."""
        expected = _check_bytes(block, pages)
        return self._behind(block)[:len(expected)].tobytes() == expected

    def sign(self, block: Block, pages: npt.NDArray[np.int64]) -> None:
        word = _check_bytes(block, pages)
        self._behind(block)[:len(word)] = np.frombuffer(word, np.uint8)

    def _behind(self, block: Block) -> npt.NDArray[np.uint8]:
        page, layers = self.shapes[block.group]
        return self.words[block.ref & BLOCK][layers * page:]


def _check_bytes(block: Block, pages: npt.NDArray[np.int64]) -> bytes:
    return pages.sum().tobytes() + block.key + bytes([block.group])


class HostPages:
    """`pages`: of each group [block, layer, word of a page]. NumPy releases the GIL, and leaves alone the threads that PyTorch computes with."""

    give_back = "any_time"

    def __init__(self, pages: Sequence[npt.NDArray[np.int64]]) -> None:
        self._pages = pages

    def join(self, pool: Pool) -> None:
        pass

    def leave(self) -> None:
        pass

    def leave_slabs(self, session: kvpool.Session) -> None:
        pass  # They go by themselves.

    def point(self) -> None:
        pass  # The kernels of the steps so far are done.

    def copy_in(self, pool: Pool, job: Blocks, after: kvpool.StreamPoint | None) -> list[int]:
        """Which of them, by their places in the lists, are not what their keys say."""
        bad = []
        for i, block in enumerate(blocks_of(job)):
            mine = self._pages[block.group][block.number]
            np.copyto(mine, pool.pages(block))
            if not pool.check(block, mine):
                bad.append(i)
        return bad

    def copy_out(self, pool: Pool, job: Blocks, after: kvpool.StreamPoint | None) -> None:
        for block in blocks_of(job):
            mine = self._pages[block.group][block.number]
            np.copyto(pool.pages(block), mine)
            pool.sign(block, mine)  # Of what is meant, whatever is there.


class Region(NamedTuple):
    """Where a group's pages are in a GPU's memory: the address of the first, and bytes from block to block and layer to layer."""

    address: int
    block_stride: int
    layer_stride: int


class DevicePages:
    """`regions`: of each group. `stream`: answers the stream that vLLM's kernels are on, as a number. The session's memory is page-locked as it
    grows, and unlocked before it is given back."""

    give_back = "by_call"

    def __init__(self, device: int, regions: Sequence[Region], stream: Callable[[], int]) -> None:
        self._device, self._regions, self._stream = device, regions, stream
        kvpool.BlockCopier(device).close()  # An engine does not start on a GPU that kvpool can't reach.
        self._copier: kvpool.BlockCopier | None = None
        self._locked: list[tuple[int, int]] = []  # The first block and the one behind the last of each range, in order.
        self._locked_blocks = 0  # All below were looked at.
        self._is_slow = False  # And that was said.

    def join(self, pool: Pool) -> None:
        self._copier = kvpool.BlockCopier(self._device)
        self._locked, self._locked_blocks = [], 0

    def leave(self) -> None:
        """REQUIRES: the pool's memory is mapped still."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    def leave_slabs(self, session: kvpool.Session) -> None:
        """Gives back what is asked back. REQUIRES: no copy is under way."""
        while self._copier is not None and self._locked and self._locked[-1][1] > session.capacity_blocks:
            first, _ = self._locked[-1]
            self._copier.unregister_host(session.base + first * session.block_stride_bytes)
            self._locked.pop()
            self._locked_blocks = first  # What stays of it is locked again at the next copy.
        self._locked_blocks = min(self._locked_blocks, session.capacity_blocks)
        session.give_back_slabs()

    def point(self) -> kvpool.StreamPoint:
        """Behind the kernels of the steps so far: they fill what is saved, and may read yet what is loaded over."""
        return self._copier.record(self._stream())

    def copy_in(self, pool: Pool, job: Blocks, after: kvpool.StreamPoint | None) -> list[int]:
        """As HostPages.copy_in. The sum is taken in host memory, behind the copy: a block that has changed before it was copied is seen."""
        bad = []

        def check(i: int, block: Block, pages: npt.NDArray[np.int64]) -> None:
            if not pool.check(block, pages):
                bad.append(i)

        self._copy(pool, job, self._copier.to_device, after, check)
        return bad

    def copy_out(self, pool: Pool, job: Blocks, after: kvpool.StreamPoint | None) -> None:
        self._copy(pool, job, self._copier.to_host, after, lambda _, block, pages: pool.sign(block, pages))

    def _copy(self, pool: Pool, job: Blocks, begin: Callable[..., kvpool.StreamPoint], after: kvpool.StreamPoint | None,
              copied: Callable[[int, Block, npt.NDArray[np.int64]], None]) -> None:
        """Calls `copied` with each block, its place in the lists before it, and its pages in the pool, once they are copied. However this
        ends, no copy is under way then: others get the blocks."""
        self._lock(pool)
        under_way: collections.deque[tuple[kvpool.StreamPoint, int, Block, npt.NDArray[np.int64]]] = collections.deque()

        def finish_the_first() -> None:
            point, i, block, pages = under_way[0]
            point.wait()
            under_way.popleft()
            copied(i, block, pages)

        try:
            for i, block in enumerate(blocks_of(job)):
                pages = pool.pages(block)
                under_way.append((begin(self._ranges(block, pages), after), i, block, pages))
                if len(under_way) == _UNDER_WAY:
                    finish_the_first()
            while under_way:
                finish_the_first()
        finally:
            if under_way:
                under_way[-1][0].wait()  # They are done in their order.

    def _ranges(self, block: Block, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """[layer, (device address, host address, bytes)]"""
        region = self._regions[block.group]
        first = region.address + block.number * region.block_stride
        ranges = np.empty((len(pages), 3), np.uint64)
        ranges[:, 0] = np.arange(len(pages)) * region.layer_stride + first
        ranges[:, 1] = np.arange(len(pages)) * pages.strides[0] + pages.ctypes.data
        ranges[:, 2] = pages.strides[0]
        return ranges

    def _lock(self, pool: Pool) -> None:
        """Page-locks what has come since the last time."""
        session, first, last = pool.session, self._locked_blocks, pool.session.mapped_blocks
        if last <= first:
            return
        self._locked_blocks = last
        stride = session.block_stride_bytes
        piece = max(1, _LOCKED_TOGETHER // stride)
        try:
            for begin in range(first, last, piece):
                end = min(begin + piece, last)
                self._copier.register_host(session.base + begin * stride, (end - begin) * stride)
                self._locked.append((begin, end))
        except kvpool.KvpoolError as error:
            if not self._is_slow:
                logger.warning("kvpoold's memory can't be page-locked, and copies are slower: %s", error)
            self._is_slow = True
