"""The connector in vLLM's worker: copies blocks in and out beside steps.

A copied block is the pages of a group's layers, each as the attention kernels fill it, and CHECK_BYTES behind them: a sum over the pages,
the block's key and its group. What a load brought is held against both: a block that is another, or damaged, is reported with the load, and vLLM
computes it. Until a load is reported no step reads its blocks, and vLLM gives them to nobody else, whatever becomes of the request.

A thread of its own copies, loads before what is to be saved, through NumPy: it releases the GIL, and leaves alone the threads that
PyTorch computes with.
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import TYPE_CHECKING

import kvpool
import numpy as np
import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from kvpool_engines.copies import BLOCK
from kvpool_engines.sessions import leave
from kvpool_vllm.messages import Copy, Invitation, Load, Plan, Report
from kvpool_vllm.space import Options, terms_of_copies

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")

_WORD = 8
_JOIN_S = 5.0  # Longest wait for the daemon that the scheduler has just talked to.
_IDLE_S = 0.005  # How long a step that computes nothing waits for a load: new requests wait as long.


class Transfer:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> None:
        self.config = kv_cache_config
        self.terms = terms_of_copies(vllm_config, kv_cache_config, options)
        # Of each group: bytes of a page, and how many of them a block has.
        self.shapes = [(group.layer_stride, len(group.layers)) for group in self.terms.groups]
        if sizes := [page for page, _ in self.shapes if page % _WORD]:
            raise ValueError(f"KvPoolConnector copies words of {_WORD} bytes; a page of this model has {sizes[0]} bytes")
        self.rank = get_tensor_model_parallel_rank()
        self.session: kvpool.Session | None = None
        # The session's blocks, as bytes, and vLLM's own, of each group: [block, layer, words of a page].
        self.words: np.ndarray | None = None
        self.pages: list[np.ndarray] = []
        self.number = self.refused = 0  # As in a Report.
        # Blocks that could not be loaded since these sets were last taken: kvpoold's refs, ids of vLLM's blocks, and of requests.
        self.damaged: set[int] = set()
        self.failed: set[int] = set()
        self.failed_requests: set[str] = set()
        self.counts = dict.fromkeys(("loaded_blocks", "failed_blocks"), 0)
        self._is_empty = False  # The step under way.
        # (1 for copies, which wait until all loads are done, order, job). Behind them comes what ends the thread.
        self._jobs: queue.PriorityQueue[tuple[int, int, Load | Copy | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._under_way = 0  # Jobs that were not taken as done.
        self._changed = threading.Condition()
        self._done: list[tuple[Load | Copy, list[int], list[int]]] = []  # (job, its blocks that failed, refs that are damaged).
        self._copied: dict[int, int] = {}  # For the next report.
        self._not_copied: set[int] = set()
        self._thread = threading.Thread(target=self._work, daemon=True, name="kvpool copies")
        self._thread.start()

    def _join(self, invitation: Invitation) -> None:
        self._leave()
        session = None
        try:
            session = self.terms.session(client_name="vllm connector", warmup=False, give_back="any_time", open_timeout=_JOIN_S,
                                         invitation=invitation.secret, rank=self.rank)
            self.words = np.asarray(session.data(blocks=session.max_blocks))
        except Exception as error:  # Its blocks may be in memory that this process can't have.
            logger.error("the session that KvPoolConnector's scheduler has opened can't be joined: %s", error)
            leave(session, logger)
            self.refused = invitation.session
            return
        self.session, self.number = session, invitation.session

    def take_tensors(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Views vLLM's KV cache, of which each group's layers are one region."""
        self.pages = [self._view([kv_caches[name] for name in tensor.layers], tensor.layer_stride, page)
                      for tensor, (page, _) in zip(self.config.kv_cache_tensors, self.shapes)]

    def _view(self, layers: list[torch.Tensor], step: int, page_bytes: int) -> np.ndarray:
        first = layers[0]
        parts = first.shape[0] // self.config.num_blocks  # Blocks of the kernels' in one of vLLM's.
        stride = first.stride(0) * first.element_size() * parts
        dense = first[0].numel() * first.element_size() * parts == page_bytes and _is_dense(first[0])
        if not dense or (parts > 1 and stride != page_bytes) or stride % _WORD or step % _WORD or any(
                layer.data_ptr() != first.data_ptr() + i * step or layer.stride() != first.stride() for i, layer in enumerate(layers)):
            raise ValueError(f"KV cache of shape {tuple(first.shape)} and strides {first.stride()}: KvPoolConnector needs pages "
                             f"of {page_bytes} bytes without holes, {step} bytes apart")
        words = torch.empty(0, dtype=torch.int64).set_(first.untyped_storage())
        return words.as_strided((self.config.num_blocks, len(layers), page_bytes // _WORD), (stride // _WORD, step // _WORD, 1),
                                first.storage_offset() * first.element_size() // _WORD).numpy()

    def _of_pool(self, group: int, ref: int) -> tuple[np.ndarray, np.ndarray]:
        """(its pages, its check bytes)."""
        page, layers = self.shapes[group]
        block, payload = self.words[ref & BLOCK], layers * page
        return block[:payload].view(np.int64).reshape(layers, page // _WORD), block[payload:]

    def _check_bytes(self, group: int, pages: np.ndarray, key: bytes) -> bytes:
        return pages.sum().tobytes() + key + bytes([group])

    def begin(self, plan: Plan) -> None:
        """A step is about to be computed; its copies are done beside it."""
        invitation = plan.invitation
        # Nobody copies from the session before.
        if invitation is not None and not self._under_way and invitation.session not in (self.number, self.refused):
            self._join(invitation)
        self._is_empty = plan.is_empty
        jobs: list[Load | Copy] = [*plan.loads, *plan.copies]
        for job in jobs:
            self._under_way += 1
            if plan.session == self.number:
                self._jobs.put((isinstance(job, Copy), next(self._numbers), job))
            else:  # These are another daemon's.
                self._finish(job, job.blocks, [])

    # ---- The thread

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            copy = self._copy_in if isinstance(job, Load) else self._copy_out
            try:
                bad = [i for i, good in enumerate(itertools.starmap(copy, zip(job.groups, job.blocks, job.refs, job.keys, strict=True))) if not good]
            except Exception:  # Unreported, a load would keep its request waiting for ever, and a copy its blocks.
                logger.exception("blocks could not be copied")
                bad = list(range(len(job.blocks)))
            self._finish(job, [job.blocks[i] for i in bad], [job.refs[i] for i in bad])

    def _finish(self, job: Load | Copy, failed: list[int], damaged: list[int]) -> None:
        with self._changed:
            self._done.append((job, failed, damaged))
            self._changed.notify()

    def _copy_in(self, group: int, block: int, ref: int, key: bytes) -> bool:
        """Whether it is what its key says."""
        pages, check = self._of_pool(group, ref)
        mine = self.pages[group][block]
        np.copyto(mine, pages)
        expected = self._check_bytes(group, mine, key)
        return check[:len(expected)].tobytes() == expected

    def _copy_out(self, group: int, block: int, ref: int, key: bytes) -> bool:
        pages, check = self._of_pool(group, ref)
        mine = self.pages[group][block]
        np.copyto(pages, mine)
        word = self._check_bytes(group, mine, key)  # Of what is meant, whatever is there.
        check[:len(word)] = np.frombuffer(word, np.uint8)
        return True

    # ---- What is done

    def take_done(self) -> set[str]:
        """Ids of requests whose loads are done. take_failed and take_failed_requests say which failed, and report() the copies."""
        with self._changed:
            if self._is_empty and self._under_way and not self._done:
                self._changed.wait(_IDLE_S)
            done, self._done = self._done, []
        self._under_way -= len(done)
        loaded = set()
        for job, failed, damaged in done:
            if isinstance(job, Copy):
                self._copied[job.number] = 1
                if failed:
                    self._not_copied.add(job.number)
                continue
            loaded.add(job.request_id)
            self.counts["loaded_blocks"] += len(job.blocks) - len(failed)
            self.counts["failed_blocks"] += len(failed)
            self.failed.update(failed)
            if failed:
                self.failed_requests.add(job.request_id)
            self.damaged.update(damaged)
        if self.failed:
            logger.error("%d blocks of kvpoold's could not be loaded, or are not what their keys say: they are computed", len(self.failed))
        return loaded

    def take_failed(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed if len(self.shapes) == 1 else set()  # vLLM asks for requests where there are several groups.

    def take_failed_requests(self) -> set[str]:
        failed, self.failed_requests = self.failed_requests, set()
        return failed

    def report(self) -> Report:
        report = Report(self.number, self.refused, self.damaged, self._copied, self._not_copied)
        self.damaged, self._copied, self._not_copied = set(), {}, set()
        return report

    def _leave(self) -> None:
        if self.session is not None:
            self.words = None
            if self.terms.ranks == 1:
                leave(self.session, logger)
            # Else others may copy still: a member that hangs up leaves the blocks to them, and the last process frees them.
            self.session = None

    def close(self) -> None:
        self._jobs.put((2, 0, None))
        self._thread.join()
        self._leave()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill their range, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
