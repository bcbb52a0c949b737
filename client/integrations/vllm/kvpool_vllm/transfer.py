"""The connector in vLLM's worker: copies blocks in and out beside steps.

A load's block that is another than its key says, or damaged, is reported with the load, and vLLM computes it. Until a load is reported no step
reads its blocks, and vLLM gives them to nobody else, whatever becomes of the request.

A thread of its own copies (pages.py), loads before what is to be saved. Between two jobs it gives memory back that the daemon asks for.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
from typing import TYPE_CHECKING

import kvpool
import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from kvpool_engines.sessions import leave
from kvpool_vllm.messages import Copy, Invitation, Load, Plan, Report
from kvpool_vllm.pages import DevicePages, HostPages, Pool, Region
from kvpool_vllm.space import Options, terms_of_copies

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")

_WORD = 8
_JOIN_S = 5.0  # Longest wait for the daemon that the scheduler has just talked to.
_AGAIN_S = 5.0  # After memory could not be given back; a daemon asks again for what it still wants.
_LOOK_S = 0.05  # How often the thread looks whether slabs are asked back, while it has nothing to copy; who wants them waits for seconds.
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
        self.pool: Pool | None = None  # The session's blocks,
        self.pages: HostPages | DevicePages | None = None  # and vLLM's own.
        self.number = self.refused = 0  # As in a Report.
        # Blocks that could not be loaded since these sets were last taken: kvpoold's refs, ids of vLLM's blocks, and of requests.
        self.damaged: set[int] = set()
        self.failed: set[int] = set()
        self.failed_requests: set[str] = set()
        self.counts = dict.fromkeys(("loaded_blocks", "failed_blocks"), 0)
        self._is_empty = False  # The step under way.
        # (1 for copies, which wait until all loads are done, order, job, the kernels that it waits for). None for a job ends the thread.
        self._jobs: queue.PriorityQueue[tuple[int, int, Load | Copy | None, kvpool.StreamPoint | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._under_way = 0  # Jobs that were not taken as done.
        self._changed = threading.Condition()
        self._member = threading.Lock()  # Held while the session is another, or gives memory back.
        self._gives_from = 0.0
        self._done: list[tuple[Load | Copy, list[int], list[int]]] = []  # (job, its blocks that failed, refs that are damaged).
        self._copied: dict[int, int] = {}  # For the next report.
        self._not_copied: set[int] = set()
        self._thread = threading.Thread(target=self._work, daemon=True, name="kvpool copies")
        self._thread.start()
        # A process may end without shutdown(). kvpool's own hook, which is called after this one, gives back what is still being copied.
        atexit.register(self.shutdown)

    def _join(self, invitation: Invitation) -> None:
        self._leave()
        session = None
        try:
            session = self.terms.session(client_name="vllm connector", warmup=False, give_back=self.pages.give_back, open_timeout=_JOIN_S,
                                         invitation=invitation.secret, rank=self.rank)
            pool = Pool(session, self.shapes)
            self.pages.join(pool)
        except Exception as error:  # Its blocks may be in memory that this process can't have.
            logger.error("the session that KvPoolConnector's scheduler has opened can't be joined: %s", error)
            leave(session, logger)
            self.refused = invitation.session
            return
        session.begin_step()  # It is never done: nobody but _leave, behind the thread's end, closes the session.
        with self._member:
            self.session, self.pool, self.number = session, pool, invitation.session

    def take_tensors(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes vLLM's KV cache, of which each group's layers are one region."""
        groups = [[kv_caches[name] for name in tensor.layers] for tensor in self.config.kv_cache_tensors]
        regions = [self._region(layers, tensor.layer_stride, page)
                   for layers, tensor, (page, _) in zip(groups, self.config.kv_cache_tensors, self.shapes)]
        first = groups[0][0]
        if first.is_cuda:
            self.pages = DevicePages(first.device.index, regions, lambda: torch.cuda.current_stream(first.device).cuda_stream)
        else:
            self.pages = HostPages([self._words(layers, region, page) for layers, region, (page, _) in zip(groups, regions, self.shapes)])

    def _region(self, layers: list[torch.Tensor], step: int, page_bytes: int) -> Region:
        first = layers[0]
        parts = first.shape[0] // self.config.num_blocks  # Blocks of the kernels' in one of vLLM's.
        stride = first.stride(0) * first.element_size() * parts
        dense = first[0].numel() * first.element_size() * parts == page_bytes and _is_dense(first[0])
        if not dense or (parts > 1 and stride != page_bytes) or stride % _WORD or step % _WORD or any(
                layer.data_ptr() != first.data_ptr() + i * step or layer.stride() != first.stride() for i, layer in enumerate(layers)):
            raise ValueError(f"KV cache of shape {tuple(first.shape)} and strides {first.stride()}: KvPoolConnector needs pages "
                             f"of {page_bytes} bytes without holes, {step} bytes apart")
        return Region(first.data_ptr(), stride, step)

    def _words(self, layers: list[torch.Tensor], region: Region, page_bytes: int) -> npt.NDArray[np.int64]:
        """[block, layer, word of a page]"""
        first = layers[0]
        words = torch.empty(0, dtype=torch.int64).set_(first.untyped_storage())
        return words.as_strided((self.config.num_blocks, len(layers), page_bytes // _WORD),
                                (region.block_stride // _WORD, region.layer_stride // _WORD, 1),
                                first.storage_offset() * first.element_size() // _WORD).numpy()

    def begin(self, plan: Plan) -> None:
        """A step is about to be computed; its copies are done beside it."""
        invitation = plan.invitation
        # Nobody copies from the session before.
        if invitation is not None and not self._under_way and invitation.session not in (self.number, self.refused):
            self._join(invitation)
        self._is_empty = plan.is_empty
        jobs: list[Load | Copy] = [*plan.loads, *plan.copies]
        is_ours = plan.session == self.number  # Else they are another daemon's.
        point = None
        if jobs and is_ours:
            try:
                point = self.pages.point()
            except kvpool.KvpoolError as error:
                logger.error("blocks are not copied: %s", error)
                is_ours = False
        for job in jobs:
            self._under_way += 1
            if is_ours:
                self._jobs.put((isinstance(job, Copy), next(self._numbers), job, point))
            else:
                self._finish(job, job.blocks, [])

    # ---- The thread

    def _work(self) -> None:
        while True:
            self._give_back()
            try:
                job, point = self._jobs.get(timeout=_LOOK_S)[2:]
            except queue.Empty:
                continue
            if job is None:
                return
            bad: list[int] = []
            try:
                if isinstance(job, Load):
                    bad = self._copy_in(job, point)
                else:
                    self._copy_out(job, point)
            except Exception:  # Unreported, a load would keep its request waiting for ever, and a copy its blocks.
                logger.exception("blocks could not be copied")
                bad = list(range(len(job.blocks)))
            self._finish(job, [job.blocks[i] for i in bad], [job.refs[i] for i in bad])

    def _give_back(self) -> None:
        """REQUIRES: no copy is under way."""
        with self._member:
            if self.session is None or self.session.slabs_asked_back == 0 or time.monotonic() < self._gives_from:
                return
            try:
                self.pages.leave_slabs(self.session)
            except kvpool.KvpoolError as error:  # The daemon goes on without them, and says who keeps them.
                logger.error("memory is not given back: %s", error)
                self._gives_from = time.monotonic() + _AGAIN_S

    def _finish(self, job: Load | Copy, failed: list[int], damaged: list[int]) -> None:
        with self._changed:
            self._done.append((job, failed, damaged))
            self._changed.notify()

    def _copy_in(self, load: Load, after: kvpool.StreamPoint | None) -> list[int]:
        return self.pages.copy_in(self.pool, load, after)

    def _copy_out(self, copy: Copy, after: kvpool.StreamPoint | None) -> None:
        self.pages.copy_out(self.pool, copy, after)

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
        with self._member:
            session, self.session, self.pool = self.session, None, None
            if session is None:
                return
            self.pages.leave()
        if self.terms.ranks == 1:
            leave(session, logger)
        # Else others may copy still: a member that hangs up leaves the blocks to them, and the last process frees them.

    def shutdown(self) -> None:
        self._jobs.put((-1, 0, None, None))  # Before all that waits: nobody would hear of it.
        self._thread.join()
        self._leave()
        atexit.unregister(self.shutdown)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill their range, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
