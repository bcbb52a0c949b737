"""An engine's session with kvpoold: opened by the engine core once vLLM has planned its KV memory, and found by the block pool
and by whoever makes KV tensors in the plan itself (KVCacheConfig.kvpool)."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import kvpool
import torch
from vllm.logger import init_logger

from kvpool_engines.sessions import leave
from kvpool_engines.weights import fingerprint_of
from kvpool_vllm import facts, groups, keys
from kvpool_vllm.below import MOST_WAIT_MS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvpool")


@dataclasses.dataclass(frozen=True)
class Options:
    """--additional-config '{"kvpool": {...}}'."""

    socket: str = ""  # kvpoold's; "": $KVPOOL_SOCKET, or where it listens by default.
    tenant: str = ""
    # A name for the space. Engines that give the same name must be of the same model, dtype, block size and so on: one that
    # differs is refused at its start. "": those that are the same find each other, others have spaces of their own.
    space: str = ""
    # "own": an engine that finds no daemon at its start begins in memory of its own. "": then it does not start. One that loses its daemon
    # goes on in memory of its own in either case.
    fallback: str = ""
    # Blocks that the engine always gets, whatever others do. -1: as many as one request of max_model_len tokens needs.
    guaranteed_blocks: int = -1
    max_space_bytes: int = 0  # 0: all that the device has.
    open_timeout: float = 30.0
    match_timeout: float = 1.0  # A daemon that takes longer to answer is none: the prefix is computed.
    # How long a request may be left out of steps while what is in a tier below the pool comes up (kvpoold --tier); 0: not at all.
    wait_ms: int = 1000
    # How long a step may wait for blocks when the pool is short, and a connector's step to hear what need not be copied.
    lease_timeout: float = 0.05

    @staticmethod
    def of(vllm_config: VllmConfig) -> Options:
        given = vllm_config.additional_config
        return Options.checked(given.get("kvpool", {}) if isinstance(given, dict) else {}, "additional_config.kvpool")

    @staticmethod
    def checked(given: Mapping[str, Any], where: str) -> Options:
        """`where`: the name of what they were given in."""
        known = {field.name for field in dataclasses.fields(Options)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"{where}: no such option: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        options = Options(**given)
        if options.fallback not in ("", "own"):
            raise ValueError(f"{where}.fallback is {options.fallback!r}; must be \"own\" or nothing")
        if type(options.wait_ms) is not int or not 0 <= options.wait_ms <= MOST_WAIT_MS:
            raise ValueError(f"{where}.wait_ms is {options.wait_ms!r}; must be an int from 0 to {MOST_WAIT_MS}")
        return options


def choose_layout(vllm_config: VllmConfig, supported_layouts: Sequence[Sequence[str]]) -> None:
    """A layout whose blocks hold all layers. vLLM takes one that is chosen already. The CPU's kernels take any stride between blocks, as
    cpu_attention.check_strides proves before a Space is opened, but declare only the layouts that vLLM itself uses."""
    from vllm.platforms import current_platform
    for name in ("BLHNC",) if current_platform.is_cpu() else supported_layouts[0] if supported_layouts else ():
        if name in ("BLHNC", "BLNHC"):
            vllm_config.cache_config.kv_cache_layout = name
            return
    raise ValueError(f"the attention backend supports the KV cache layouts {', '.join(supported_layouts[0] if supported_layouts else ())}: none in which a "
                     "block holds all layers, as a pool's blocks do")


_MAGAZINE = 256  # Blocks, as the client's default.
_PART = 16


def magazine_of(blocks: int) -> int:
    """Of an engine that may hold so many. What is in it is leased and no cache: it is a small part."""
    return min(_MAGAZINE, blocks // _PART)


# Drafts by "ngram" are taken from earlier text. Those by "eagle" have layers of their own, in the same blocks.
_DRAFTS = ("ngram", "eagle")

# Of other KV connectors, those that were run beside the pool. They find blocks where the engine has them, and do not go by addresses.
CONNECTORS = ["ExampleConnector"]


def refuse_what_is_not_shared(vllm_config: VllmConfig, configs: Sequence[KVCacheConfig], who: str, drafts: Sequence[str] = ()) -> None:
    """ValueError: K and V of such an engine are its own, or lie where `who` does not reach. `drafts`: methods of speculative decoding
    that it goes with."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ValueError("calculate_kv_scales: each engine would have scales of its own, by what it saw first; K and V can't be shared")
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise ValueError(f"{name} {size}: {who} needs workers that have all layers and all tokens")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in drafts:
        also = f"; those by {', '.join(drafts)} do" if drafts else ""
        raise ValueError(f"speculative_config: drafts by {speculative.method!r} do not go with {who}{also}")
    if cache.prefix_caching_hash_algo.startswith("xxhash"):
        raise ValueError(f"prefix_caching_hash_algo {cache.prefix_caching_hash_algo}: other prompts can be made with the same key; {who} "
                         "shares by sha256 or sha256_cbor")
    for config in configs:
        groups.refuse_others(config, who)


def refuse_ranks_that_can_not_join(vllm_config: VllmConfig, who: str) -> None:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return
    executor = Executor.get_class(vllm_config)
    if executor is not MultiprocExecutor or parallel.local_world_size != parallel.world_size:
        raise ValueError(f"tensor_parallel_size {parallel.tensor_parallel_size} by {executor.__name__} with {parallel.local_world_size} "
                         f"workers here: {who} needs all of them on its machine, of --distributed-executor-backend mp")


def _refuse_what_is_not_supported(vllm_config: VllmConfig, configs: Sequence[KVCacheConfig]) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec
    refuse_what_is_not_shared(vllm_config, configs, "kvpool_vllm.Scheduler", _DRAFTS)
    for config in configs:
        groups.refuse_other_plans(config, "kvpool_vllm.Scheduler")
    refuse_ranks_that_can_not_join(vllm_config, "kvpool_vllm.Scheduler")
    if any(config != configs[0] for config in configs[1:]):
        raise ValueError(f"vLLM plans other KV memory for one rank than for another; a block is the same on each: {configs}")
    if vllm_config.scheduler_config.async_scheduling and vllm_config.speculative_config is not None:
        raise ValueError("async_scheduling with speculative_config: kvpool_vllm.Scheduler plans steps with drafts when the one before is "
                         "done: --no-async-scheduling")
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in CONNECTORS:
        raise ValueError(f"kv_transfer_config: with kvpool_vllm.Scheduler blocks are shared in place; {transfer.kv_connector} was not run with "
                         f"blocks of a pool, {', '.join(CONNECTORS)} was")
    if any(isinstance(group.kv_cache_spec, MambaSpec) for config in configs for group in config.kv_cache_groups):
        for name in ("kv_transfer_config", "speculative_config"):
            if getattr(vllm_config, name) is not None:
                raise ValueError(f"{name} with layers that have a state: kvpool_vllm.Scheduler was not run with both")
    if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
        raise ValueError("kv_events_config: not with kvpool_vllm.Scheduler; it is kvpoold that knows what is cached")
    if vllm_config.model_config.enable_sleep_mode:
        raise ValueError("enable_sleep_mode: KV memory is kvpoold's, and can't be put to sleep")


_STATES_ON_CPU = ("GDN_ATTN",)


def attention_of(vllm_config: VllmConfig, spec: Any) -> tuple[str, tuple[Any, ...] | None]:
    """(the attention kernels and what they run on, cpu_attention.planes of a page): what says how they fill it."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
        raise ValueError(f"states with mamba_cache_mode {spec.mamba_cache_mode}: kvpool_vllm.Scheduler takes those that prefix caching aligns with "
                         "blocks (--enable-prefix-caching)")
    if not current_platform.is_cpu():
        return "", None
    if isinstance(spec, MambaSpec):
        if spec.mamba_type.name not in _STATES_ON_CPU:
            raise ValueError(f"states of {spec.mamba_type.name} on CPUs: kvpool_vllm.Scheduler was run with those of {', '.join(_STATES_ON_CPU)}")
        return "", None
    if isinstance(spec, MLAAttentionSpec):
        raise ValueError("latent attention (MLA) on CPUs: its kernels were not run in blocks of a pool")
    from kvpool_vllm import cpu_attention
    isa = cpu_attention.isa_of(spec, vllm_config.cache_config.cache_dtype)
    return f"{isa} {torch.backends.cpu.get_cpu_capability()}", cpu_attention.planes(spec, isa)


def digest_of(options: Options, known: Mapping[str, str]) -> bytes:
    """The fingerprint's: of the space's name, or of the facts."""
    return hashlib.sha256(b"vllm " + options.space.encode()).digest() if options.space else fingerprint_of(known)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What all members of a session say alike."""

    groups: tuple[groups.Group, ...]
    block_bytes: int
    digest: bytes
    facts: dict[str, str]
    socket: str
    ranks: int  # Workers. Each has its own heads of every block, in memory of its own; the plan is of one rank's part.
    on_host: bool = False  # Workers compute in host memory, of which a daemon may have some beside its GPUs.

    def session(self, **more: Any) -> kvpool.Session:
        return kvpool.Session(groups.layout_of(self.groups, self.block_bytes), self.digest, facts=self.facts, socket=self.socket,
                              ranks=self.ranks, device_uuids=["host"] * self.ranks if self.on_host else [],
                              **{"client_name": "vllm", "warmup": True, **more})


def terms_of_copies(vllm_config: VllmConfig, config: KVCacheConfig, options: Options) -> Terms:
    """A connector's, as its workers and its scheduler say them: blocks have the pages of a group's layers, and what is checked behind them."""
    from vllm.platforms import current_platform
    attentions = {spec: attention_of(vllm_config, spec) for spec in dict.fromkeys(group.kv_cache_spec for group in config.kv_cache_groups)}
    kernels = ", ".join(dict.fromkeys(kernels for kernels, _ in attentions.values()))
    if current_platform.is_cuda():
        if vllm_config.model_config.enable_sleep_mode:
            raise ValueError("enable_sleep_mode: KvPoolConnector copies from a GPU's KV cache beside steps, and one that sleeps is not there")
        # How a page is filled goes by the layout, which vLLM's core chooses for all workers from what their kernels take.
        attention, layout = vllm_config.attention_config, vllm_config.cache_config.get_resolved_kv_cache_layout()
        backends = {"": attention.backend, **attention.backend_per_kind}
        names = ", ".join(f"{kind} {backend.name if backend else 'auto'}".lstrip() for kind, backend in sorted(backends.items()))
        kernels = f"{current_platform.get_device_name()}, {names}, {layout.name}"
    elif not current_platform.is_cpu():
        raise ValueError(f"KvPoolConnector copies from host memory and CUDA GPUs; this engine runs on {vllm_config.device_config.device_type}: "
                         "kvpool_vllm.Scheduler shares blocks in place")
    of_model, block_bytes = groups.copied_groups(config, lambda spec: attentions[spec][1])
    known = facts.facts_of(vllm_config, of_model, kernels,
                           "connector: a page of each layer, sum, key, group")
    return Terms(of_model, block_bytes, digest_of(options, known), known, options.socket, vllm_config.parallel_config.tensor_parallel_size,
                 on_host=True)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where the KV tensors of all workers are: so many blocks of the tensors' strides."""

    num_blocks: int
    tensors: tuple[Any, ...]  # KVCacheTensor, as vLLM plans them.
    invitation: bytes | None  # Into the session whose memory it is; None: the engine's own.


_OPEN_AGAIN_S = 1.0


class Space:
    """An engine's hold on a pool, and what its parts need to know of it. Sent to a worker's process it has no session until it joins
    that of the sender.

    It has a session, or none: then there is no kvpoold, and the KV tensors are in the engine's own memory, of the size that vLLM
    planned. Going from one to the other is the scheduler's to decide, when no request has a block (move)."""

    def __init__(self, session: kvpool.Session | None, options: Options, terms: Terms, own: Memory, invitation: bytes | None = None,
                 gives_back: bool = False) -> None:
        self.session, self.options, self.terms, self.own, self._invitation = session, options, terms, own, invitation
        self.gives_back = gives_back  # Workers let slabs be unmapped between steps (worker.prepare).
        self._on_gpu = False
        # These are known in the engine core's process only.
        self.limit = own.num_blocks  # Blocks that the engine may hold at once.
        self.asked: dict[str, Any] = {}  # Arguments of its session.
        self.executor: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Space:
        return self  # vLLM copies its plans; the memory is one.

    def __reduce__(self) -> tuple[Any, ...]:
        return Space, (None, self.options, self.terms, self.own, self.session.invitation() if self.session else None, self.gives_back)

    def join(self, rank: int) -> None:
        if self.session is None and self._invitation is not None:
            self.session = self._join(self._invitation, rank)

    def _join(self, invitation: bytes, rank: int) -> kvpool.Session:
        return self.terms.session(invitation=invitation, rank=rank, open_timeout=self.options.open_timeout,
                                  give_back="by_call" if self.gives_back else "never", holes=self.gives_back)

    # ---- Losing a kvpoold, and finding one

    def open_again(self) -> kvpool.Session:
        return self.terms.session(open_timeout=_OPEN_AGAIN_S, **self.asked)

    def move(self, session: kvpool.Session | None) -> str:
        """Has all workers go to the memory of this session, or to their own. Answers why they could not, or nothing; then some of them
        may have gone. REQUIRES: no request has a block, and no step is under way."""
        before, self.session = self.session, session
        memory = self.own if session is None else _memory_of(session, self.own)
        why = next(filter(None, self.executor.collective_rpc("kvpool_move", args=(memory,))), "")
        leave(before, logger)
        return why

    def enter(self, memory: Memory, rank: int) -> None:
        """A worker's part of it. One in the scheduler's process has its session already."""
        if self.executor is not None:
            return
        before, self.session = self.session, None
        leave(before, logger)
        self._invitation = memory.invitation
        if memory.invitation is not None:
            self.session = self._join(memory.invitation, rank)

    # ---- Memory

    def computed(self, step: int) -> None:
        """The kernels of the step have been launched, all of them: those of a CPU are done."""
        try:
            if self._on_gpu:
                self.session.complete_step_on_stream(step, torch.cuda.current_stream().cuda_stream)
            else:
                self.session.complete_step(step)
        except kvpool.KvpoolError:  # The step itself is all right. The scheduler sees that the session is over when it next asks for something.
            logger.warning_once("kvpoold is not told of steps any more: it is gone")

    def views(self, config: KVCacheConfig, device: Any, layout: Any, kernel_block_sizes: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """{layer: its KV tensor}, as vLLM's allocate_kv_cache makes them, in the pool."""
        from vllm.v1.kv_cache_interface import create_kv_cache_views
        everything = torch.from_dlpack(self.session.data(blocks=self.session.max_blocks))
        blocks, block_bytes = everything.shape
        flat = everything.view(torch.int8).as_strided(((blocks - 1) * everything.stride(0) + block_bytes,), (1,))
        here = torch.device(device)
        if flat.device.type != here.type or here.index not in (None, flat.device.index):
            raise ValueError(f"kvpoold's blocks are in memory of {flat.device}; this worker runs on {device}")
        self._on_gpu = flat.is_cuda
        views: dict[str, torch.Tensor] = {}
        for number, (group, tensor) in enumerate(zip(config.kv_cache_groups, config.kv_cache_tensors)):
            views |= zip(tensor.layers, create_kv_cache_views(
                flat, group.kv_cache_spec, config.num_blocks, layout, tensor,
                kernel_block_size=kernel_block_sizes[number] if kernel_block_sizes else None))
        return views


def _worker_is_here(vllm_config: VllmConfig) -> bool:
    """In the engine core's process, which is then the only member."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    return issubclass(Executor.get_class(vllm_config), UniProcExecutor)


def _attentions(vllm_config: VllmConfig, config: KVCacheConfig) -> tuple[dict[Any, tuple[Any, ...] | None], str]:
    """({spec: planes of a page}, the attention kernels by name), for the specs of a plan. RuntimeError: kernels that do not work in a pool."""
    from vllm.platforms import current_platform
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    if current_platform.is_cpu() and unit not in (None, config.kv_cache_groups[0].kv_cache_spec.block_size):
        raise ValueError(f"prefix_match_unit {unit}: behind a prefix that ends within a block vLLM's build for CPUs says something else than "
                         "without it, with its own cache, too")
    planes: dict[Any, tuple[Any, ...] | None] = {}
    kernels: list[str] = []
    for spec in dict.fromkeys(group.kv_cache_spec for group in config.kv_cache_groups):
        attention, planes[spec] = attention_of(vllm_config, spec)
        if attention:
            from kvpool_vllm import cpu_attention
            cpu_attention.check_strides(spec, attention.split()[0])
        if attention and attention not in kernels:
            kernels.append(attention)
    return planes, ", ".join(kernels)


def _needed_by_one_request(vllm_config: VllmConfig, config: KVCacheConfig) -> int:
    """Blocks, of all groups, of one of max_model_len tokens."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)


def _gives_back(vllm_config: VllmConfig, of_model: Sequence[groups.Group]) -> bool:
    """Of such an engine it is known which tables name blocks, and when no kernel runs (worker.give_back_slabs)."""
    from vllm.platforms import current_platform
    return (current_platform.is_cpu() and not getattr(vllm_config, "use_v2_model_runner", False)
            and not facts.has_drafts_with_kv(vllm_config) and not any(group.has_states for group in of_model))


def _memory_of(session: kvpool.Session, own: Memory) -> Memory:
    """The session's memory, by vLLM's plan of its own."""
    stride = session.block_stride_bytes
    return Memory(session.max_blocks, tuple(dataclasses.replace(tensor, size=session.max_blocks * stride, block_stride=stride)
                                            for tensor in own.tensors), session.invitation())


def attach(vllm_config: VllmConfig, configs: Sequence[KVCacheConfig], executor: Any) -> None:
    """Opens the space for what vLLM has planned, and makes its plan one of the pool's blocks."""
    options = Options.of(vllm_config)
    _refuse_what_is_not_supported(vllm_config, configs)
    config = configs[0]
    planes, attention = _attentions(vllm_config, config)
    of_model = groups.groups_of(config, planes.get, facts.has_drafts_with_kv(vllm_config))
    known = facts.facts_of(vllm_config, of_model, attention, vllm_config.cache_config.kv_cache_layout)
    guaranteed = options.guaranteed_blocks
    if guaranteed < 0:
        guaranteed = _needed_by_one_request(vllm_config, config)
    from vllm.platforms import current_platform
    terms = Terms(of_model, config.kv_cache_tensors[0].block_stride, digest_of(options, known), known, options.socket, len(configs),
                  on_host=current_platform.is_cpu())
    space = Space(None, options, terms, Memory(config.num_blocks, tuple(config.kv_cache_tensors), None),
                  gives_back=_gives_back(vllm_config, of_model))
    space.executor = executor
    scheduler = not _worker_is_here(vllm_config)  # It maps nothing.
    space.asked = {"tenant": options.tenant, "scheduler": scheduler, "guaranteed_blocks": guaranteed,
                   "give_back": "any_time" if scheduler else "by_call" if space.gives_back else "never",
                   "holes": space.gives_back,  # Between steps no table names what is not mapped (worker.give_back_slabs).
                   "max_blocks": config.num_blocks, "max_space_bytes": options.max_space_bytes,
                   "magazine_blocks": magazine_of(config.num_blocks)}
    for each in configs:
        each.kvpool = space
    try:
        space.session = session = terms.session(open_timeout=options.open_timeout, **space.asked)
    except kvpool.UnavailableError as error:
        if options.fallback != "own":
            raise RuntimeError(f"kvpool_vllm.Scheduler needs a kvpoold: {error} (additional_config.kvpool.fallback = \"own\" "
                               "would go on with vLLM's own memory until there is one)") from error
        logger.warning("no kvpoold, going on in memory of this engine's own until there is one: %s", error)
        keys.set_root(secrets.token_bytes(32))
        return
    logger.info("KV cache: %d blocks of %d tokens at most in kvpoold's space, %d guaranteed to this engine, %d its limit; groups of "
                "layers: %s", session.max_blocks - 1, of_model[0].spec.block_size, guaranteed, config.num_blocks, groups.describe(of_model))
    keys.set_root(session.hash_seed)
    memory = _memory_of(session, space.own)
    for each in configs:
        each.num_blocks, each.kv_cache_tensors = memory.num_blocks, list(memory.tensors)
