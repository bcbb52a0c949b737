"""KvPoolConnector: a KV connector for engines that keep vLLM's own KV cache; full blocks are copied to kvpoold and back.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvPoolConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM makes one in its scheduler and one in each worker, which may be processes of their own. They are members of one session: the
scheduler (lookup.py, saves.py) opens it, asks for prefixes, leases, seals, and holds what is copied; the workers (transfer.py), of which
each has its heads of every block, join it with the first plan, and copy.

When kvpoold is gone, the engine goes on without. The scheduler opens another session as soon as there is a daemon again, and invites
the workers anew. vLLM's chain of hashes starts from the fingerprint; a key is the digest of the space's seed and a hash, so that it
can be told to any daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvpool_vllm import core, patches
from kvpool_vllm.groups import refuse_other_regions
from kvpool_vllm.lookup import Lookup
from kvpool_vllm.space import Options, refuse_ranks_that_can_not_join, refuse_what_is_not_shared
from kvpool_vllm.transfer import Transfer

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpool_vllm.messages import Report

logger = init_logger("vllm.kvpool")


class Counts(KVConnectorStats):
    """Blocks loaded, failed, saved, and so on, as vLLM logs them."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvPoolConnector(KVConnectorBase_V1, SupportsHMA):

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        import vllm
        super().__init__(vllm_config, role, kv_cache_config)
        patches.check_version(vllm.__version__)
        if not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"):
            raise ValueError(f"vLLM {vllm.__version__} tells connectors nothing of its KV cache's blocks: KvPoolConnector needs 0.32; "
                             "kvpool_vllm.Scheduler goes with this one")
        transfer = vllm_config.kv_transfer_config
        options = Options.checked(transfer.kv_connector_extra_config, "kv_connector_extra_config")
        groups = kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        if any(type(spec) not in (FullAttentionSpec, SlidingWindowSpec) for spec in specs) or len({spec.block_size for spec in specs}) != 1:
            kinds = ", ".join(f"{type(spec).__name__} of {spec.block_size} tokens" for spec in specs)
            raise ValueError(f"the model has KV cache groups of {kinds}; KvPoolConnector copies blocks of one length with full attention and "
                             "sliding windows")
        if len(groups) > 1 and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
            raise ValueError("this vLLM does not hear of loads that failed where there are several KV cache groups: "
                             "--disable-hybrid-kv-cache-manager makes one of them")
        refuse_what_is_not_shared(vllm_config, [kv_cache_config], "KvPoolConnector")
        refuse_other_regions(kv_cache_config, "KvPoolConnector")
        refuse_ranks_that_can_not_join(vllm_config, "KvPoolConnector")
        # One of the two, by the role.
        self.lookup: Lookup | None = None
        self.transfer: Transfer | None = None
        self._told: dict[str, int] = {}  # Counts that vLLM knows.
        if role == KVConnectorRole.SCHEDULER:
            patches.take_keys()
            self.lookup = Lookup(vllm_config, kv_cache_config, options)
            core.listen(self.lookup)
            if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
                logger.warning("kv_load_failure_policy is %r: a block that can't be loaded ends its request with an error; with "
                               "\"recompute\" it is computed", transfer.kv_load_failure_policy)
        else:
            self.transfer = Transfer(vllm_config, kv_cache_config, options)

    # ---- Both roles

    def shutdown(self) -> None:
        (self.lookup or self.transfer).shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Counts(data=data or {})

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = dict((self.lookup or self.transfer).counts)
        counted = Counts(data={name: count - self._told.get(name, 0) for name, count in counts.items()})
        self._told = counts
        return None if counted.is_empty() else counted

    # ---- The worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.transfer.take_tensors(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        # The first that is called in a step, whether blocks were preempted or not.
        self.transfer.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass  # It has begun by then, before the step: handle_preemptions.

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # vLLM computes a request once all of its blocks are loaded.

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # A block is saved with all its layers.

    def wait_for_save(self) -> None:
        pass  # It is saved beside a later step; saves.py holds it until then.

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.transfer.take_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        failed = self.transfer.take_failed_requests()
        if len(self._kv_cache_config.kv_cache_groups) > 1:
            results.failed_recving |= failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.transfer.take_failed()

    def build_connector_worker_meta(self) -> Report:
        return self.transfer.report()

    # ---- The scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # What is not saved is computed again.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.lookup.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self.lookup.came(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.lookup.found(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.lookup.admitted(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return self.lookup.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.lookup.loaded(connector_output.finished_recving or ())
        if connector_output.kv_connector_worker_meta is not None:
            failed = bool(connector_output.invalid_block_ids or getattr(connector_output, "failed_recving", None))
            self.lookup.done(connector_output.kv_connector_worker_meta, failed)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.lookup.left(request.request_id)
        return False, None  # Those of its blocks that are being saved are held beside it.

    def has_pending_block_frees(self) -> bool:
        return len(self.lookup.saves) > 0

    def has_pending_push_work(self) -> bool:
        return len(self.lookup.saves) > 0  # Steps go on until all are over.

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        return self.lookup.reset()
