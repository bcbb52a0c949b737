"""The connector in vLLM's worker: copies blocks in beside steps, and out behind each.

A copied block is the pages of all layers, each as the attention kernels fill it, and CHECK_BYTES behind them: a sum over the pages
and the block's key. What a load brought is held against both: a block that is another, or damaged, is reported with the load, and vLLM
computes it. Until a load is reported no step reads its blocks, and vLLM gives them to nobody else, whatever becomes of the request.

Loads are copied by a thread of its own, in their order, through NumPy: it releases the GIL, and leaves alone the threads that PyTorch
computes with.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

import kvpool
import numpy as np
import torch
from vllm.logger import init_logger

from kvpool_engines.copies import BLOCK, Patience, lease
from kvpool_engines.sessions import PAUSE_S, Opener, leave
from kvpool_vllm import keys
from kvpool_vllm.messages import Invitation, Load, Plan, Report
from kvpool_vllm.space import Options, terms_of_copies

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")

_WORD = 8
_IDLE_S = 0.005  # How long a step that computes nothing waits for a load: new requests wait as long.


class Transfer:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> None:
        self.config, self.options = kv_cache_config, options
        self.spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.page_bytes = self.spec.page_size_bytes
        if self.page_bytes % _WORD:
            raise ValueError(f"KvPoolConnector copies words of {_WORD} bytes; a page of this model has {self.page_bytes} bytes")
        self.terms = terms_of_copies(vllm_config, kv_cache_config, options)
        self.layers = len(self.terms.groups[0].layers)
        self.session: kvpool.Session | None = None
        # The session's blocks, as bytes, and vLLM's own: [block, layer, words of a page].
        self.words: np.ndarray | None = None
        self.pages: np.ndarray | None = None
        self.number = 0  # Sessions opened so far.
        self.joined = False  # The scheduler has joined the session.
        self.detached = True  # There is no kvpoold.
        # Blocks that could not be loaded since these sets were last taken: kvpoold's refs, and ids of vLLM's blocks.
        self.damaged: set[int] = set()
        self.failed: set[int] = set()
        self.counts = dict.fromkeys(("loaded_blocks", "failed_blocks", "saved_blocks", "known_blocks", "skipped_blocks"), 0)
        # For each save of the step under way: the question how much of it kvpoold has already.
        self._questions: list[kvpool.PendingMatch | None] = []
        self._patience = Patience(options.lease_timeout)
        self._opener = Opener(lambda: self._open(PAUSE_S), logger)
        self._is_empty = False  # The step under way.
        self._jobs: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._under_way = 0  # Loads that were not taken as done.
        self._changed = threading.Condition()
        self._done: list[tuple[Load, list[int], list[int]]] = []  # (load, its blocks that failed, refs that are damaged).
        self._thread = threading.Thread(target=self._work, daemon=True, name="kvpool copies")
        self._thread.start()
        self._magazine = min(256, max(16, -(-vllm_config.scheduler_config.max_num_batched_tokens // self.spec.block_size)))
        try:
            self._use(self._open(options.open_timeout))
        except kvpool.UnavailableError as error:
            if options.fallback != "own":
                raise RuntimeError(f"KvPoolConnector needs a kvpoold: {error} (kv_connector_extra_config.fallback = \"own\" would go on "
                                   "without)") from error
            logger.warning("no kvpoold, going on with vLLM's own KV cache until there is one: %s", error)

    # ---- The session

    def _open(self, timeout: float) -> kvpool.Session:
        options = self.options
        # It copies from blocks that the scheduler holds until this step is reported, and to blocks that it has leased: all else may
        # go at any time.
        return self.terms.session(
            client_name="vllm connector", warmup=False, give_back="any_time", tenant=options.tenant,
            guaranteed_blocks=max(0, options.guaranteed_blocks), max_space_bytes=options.max_space_bytes,
            magazine_blocks=self._magazine, open_timeout=timeout)

    def _use(self, session: kvpool.Session) -> None:
        self.number += 1
        self.words = np.asarray(session.data(blocks=session.max_blocks))
        self.session = session
        self.joined = self.detached = False

    def invitation(self) -> Invitation:
        return Invitation(self.number, self.session.invitation() if self.session else b"")

    def _detach(self, error: object) -> None:
        if not self.detached:
            self.detached = True
            logger.error("kvpoold is gone: this engine goes on with its own KV cache alone: %s", error)

    def _reopen(self) -> None:
        """Takes another session, once there is one, and nobody copies from the one before."""
        if self._under_way or (opened := self._opener.take()) is None:
            return
        self._leave()
        try:
            self._use(opened)
        except Exception as error:  # Its blocks may be in other memory now.
            logger.error("the kvpoold that is there again is of no use: %s", error)
            self._opener.failed()
            leave(opened, logger)

    def take_tensors(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Views vLLM's KV cache as [block, layer, words of a page]."""
        (tensor,) = self.config.kv_cache_tensors
        layers = [kv_caches[name] for name in tensor.layers]
        first = layers[0]
        parts = first.shape[0] // self.config.num_blocks  # Blocks of the kernels' in one of vLLM's.
        stride, step = first.stride(0) * first.element_size() * parts, tensor.layer_stride
        dense = first[0].numel() * first.element_size() * parts == self.page_bytes and _is_dense(first[0])
        if not dense or (parts > 1 and stride != self.page_bytes) or stride % _WORD or step % _WORD or any(
                layer.data_ptr() != first.data_ptr() + i * step or layer.stride() != first.stride() for i, layer in enumerate(layers)):
            raise ValueError(f"KV cache of shape {tuple(first.shape)} and strides {first.stride()}: KvPoolConnector needs pages "
                             f"of {self.page_bytes} bytes without holes, {step} bytes apart")
        words = torch.empty(0, dtype=torch.int64).set_(first.untyped_storage())
        self.pages = words.as_strided((self.config.num_blocks, self.layers, self.page_bytes // _WORD),
                                      (stride // _WORD, step // _WORD, 1),
                                      first.storage_offset() * first.element_size() // _WORD).numpy()

    def _of_pool(self, ref: int) -> tuple[np.ndarray, np.ndarray]:
        """(its pages, its check bytes)."""
        block, payload = self.words[ref & BLOCK], self.layers * self.page_bytes
        return block[:payload].view(np.int64).reshape(self.layers, self.page_bytes // _WORD), block[payload:]

    def _check_bytes(self, pages: np.ndarray, key: bytes) -> bytes:
        return pages.sum().tobytes() + key

    # ---- In

    def load(self, plan: Plan) -> None:
        """Begins to."""
        self._is_empty = plan.is_empty
        for load in plan.loads:
            self._under_way += 1
            if plan.loads_session == self.number:
                self._jobs.put(load)
            else:  # These were another daemon's.
                self._finish(load, load.blocks, [])

    def _work(self) -> None:
        while (load := self._jobs.get()) is not None:
            try:
                bad = [i for i, good in enumerate(map(self._copy_in, load.blocks, load.refs, load.keys)) if not good]
            except Exception:  # Unreported, the load would keep its request waiting for ever.
                logger.exception("blocks of request %s could not be loaded", load.request_id)
                bad = list(range(len(load.blocks)))
            self._finish(load, [load.blocks[i] for i in bad], [load.refs[i] for i in bad])

    def _finish(self, load: Load, failed: list[int], damaged: list[int]) -> None:
        with self._changed:
            self._done.append((load, failed, damaged))
            self._changed.notify()

    def _copy_in(self, block: int, ref: int, key: bytes) -> bool:
        """Whether it is what its key says."""
        pages, check = self._of_pool(ref)
        mine = self.pages[block]
        np.copyto(mine, pages)
        expected = self._check_bytes(mine, key)
        return check[:len(expected)].tobytes() == expected

    def take_loaded(self) -> set[str]:
        """Ids of requests whose loads are done; take_failed has their blocks that could not be loaded."""
        with self._changed:
            if self._is_empty and self._under_way and not self._done:
                self._changed.wait(_IDLE_S)
            done, self._done = self._done, []
        self._under_way -= len(done)
        for load, failed, damaged in done:
            self.counts["loaded_blocks"] += len(load.blocks) - len(failed)
            self.counts["failed_blocks"] += len(failed)
            self.failed.update(failed)
            self.damaged.update(damaged)
        if self.failed:
            logger.error("%d blocks of kvpoold's could not be loaded, or are not what their keys say: they are computed", len(self.failed))
        return {load.request_id for load, _, _ in done}

    def take_failed(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def report(self) -> Report:
        damaged, self.damaged = self.damaged, set()
        if not self.detached:
            try:
                self.session.check()
            except kvpool.KvpoolError as error:
                self._detach(error)
        if self.detached:
            self._reopen()
        return Report(damaged, None if self.detached or self.joined else self.invitation())

    # ---- Out

    def prepare(self, plan: Plan) -> None:
        """Asks what of the plan's saves is there; by the end of the step it is known."""
        if plan.session == self.number:
            self.joined = True
        elif self.joined and plan.session == 0:
            self._detach("its scheduler has lost it")
        self._questions = []
        for save in plan.saves:
            self._questions.append(self._ask(save.keys))

    def _ask(self, names: list[bytes]) -> kvpool.PendingMatch | None:
        if self.detached:
            return None
        try:
            return self.session.match(names)
        except kvpool.ResourceExhaustedError:
            return None  # Too much is on its way. Seal sees what is there, too.
        except kvpool.KvpoolError as error:
            self._detach(error)
            return None

    def _known(self, question: kvpool.PendingMatch | None, patience: float, deadline: float) -> int:
        """How many of a save's first blocks are there. `patience`: what the deadline was made of."""
        if question is None:
            return 0
        try:
            with question.wait(timeout=max(0, deadline - time.monotonic())) as hit:
                return len(hit.blocks)
        except kvpool.DeadlineExceededError:
            self._patience.was_in_vain(patience)
            return 0
        except kvpool.KvpoolError as error:
            self._detach(error)
            return 0

    def save(self, plan: Plan) -> None:
        questions, self._questions = self._questions, []
        if self.detached or not plan.saves:
            return
        if plan.session != self.number:
            self.counts["skipped_blocks"] += sum(len(save.blocks) for save in plan.saves)
            return
        runs, patience = [], self._patience.left()
        deadline = time.monotonic() + patience
        for save, question in zip(plan.saves, questions):
            if save.adapter is not None and keys.adapter_digest(save.adapter[0]) != save.adapter[1]:
                self.counts["skipped_blocks"] += len(save.blocks)  # The step may have loaded others.
                continue
            known = self._known(question, patience, deadline)
            self.counts["known_blocks"] += known
            if known < len(save.blocks):
                parent = save.keys[known - 1] if known else save.parent_key
                runs.append((save.blocks[known:], save.keys[known:], parent))
        try:
            if runs:
                self._copy_out(runs)
        except kvpool.KvpoolError as error:
            self._detach(error)

    def _copy_out(self, runs: list[tuple[list[int], list[bytes], bytes | None]]) -> None:
        wanted = sum(len(blocks) for blocks, _, _ in runs)
        leased = lease(self.session, wanted, self._patience)
        self.counts["skipped_blocks"] += wanted - len(leased)
        step = self.session.begin_step()
        seals = []
        for blocks, names, parent in runs:
            refs, leased = leased[:len(blocks)], leased[len(blocks):]
            for block, ref, key in zip(blocks, refs, names):
                pages, check = self._of_pool(ref)
                np.copyto(pages, self.pages[block])
                word = self._check_bytes(pages, key)
                check[:len(word)] = np.frombuffer(word, np.uint8)
            if refs:
                seals.append((refs, names[:len(refs)], parent))
        self.session.complete_step(step)
        for refs, names, parent in seals:
            try:
                self.session.seal(refs, names, parent_key=parent, leave_duplicates=True)
                self.counts["saved_blocks"] += len(refs)
            except kvpool.ResourceExhaustedError:
                self.counts["skipped_blocks"] += len(refs)  # Too much is on its way.
            self.session.release(refs)

    def _leave(self) -> None:
        if self.session is not None:
            self.words = None
            leave(self.session, logger)
            self.session = None

    def close(self) -> None:
        self._jobs.put(None)
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
