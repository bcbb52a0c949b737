"""Pools of SGLang's host memory, on the CPU, of its own classes, and storage of kvpool for them."""

import contextlib
import threading
import types

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MambaStateBufferInfo, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_parallel

PAGE = 4  # Tokens.
PAGES = 24
# On a machine that is busy with other tests a daemon may take long to answer, and pages have to be found all the same.
PATIENT = {"match_timeout": 60, "open_timeout": 120}


def fill(pool, seed):
    """Random bits in all of its memory."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(pool):
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
    return pool


def tensors(pool):
    return [pool.temporal_buffer, *pool.conv_buffer] if isinstance(pool, MambaPoolHost) else [pool.kv_buffer]


def page(pool, index):
    """The bits of a page, in the order that the pool gives them."""
    return pool.get_data_page(index * pool.page_size, flat=True).contiguous().view(torch.uint8).clone()


def indices(pool, pages):
    return torch.cat([torch.arange(i * pool.page_size, (i + 1) * pool.page_size) for i in pages]) if pages else torch.empty(0, dtype=torch.int64)


def attention(layout, layers=2, heads=2, dim=8):
    """K and V of multi-head attention."""
    device = [tuple(torch.zeros(PAGE, heads, dim, dtype=torch.bfloat16) for _ in range(layers)) for _ in "kv"]
    pointers = [torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64) for tensors in device]
    info = MHABufferInfo(buffers=KVBuffers(k=device[0], v=device[1], k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD),
                         page_size=PAGE, head_num=heads, head_dim=dim, v_head_dim=dim, dtype=torch.bfloat16, device=torch.device("cpu"))
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0, end_layer=layers,
                                    host_token_capacity=PAGES * PAGE)


def states():
    """States of Mamba: a page is one."""
    info = MambaStateBufferInfo(temporal=torch.zeros(2, PAGES, 4, 6), conv=(torch.zeros(2, PAGES, 3, 4, dtype=torch.bfloat16),))
    with host_memory_budget_scope(1 << 30):
        return MambaPoolHost(info, 1.0, 0, device_capacity=PAGES, pin_memory=False, layout="page_first")


def config(daemon, *, interface_v1=1, name="kvpool_sglang", metrics=False, mla=False, rank=0, ranks=1, **options):
    extra = {"backend_name": "kvpool", "module_path": name, "class_name": "KvPoolStorage", "interface_v1": interface_v1,
             "kvpool": {"socket": getattr(daemon, "socket", daemon), **PATIENT, **options}}
    return HiCacheStorageConfig(tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
                                enable_storage_metrics=metrics, is_page_first_layout=True, model_name="m", extra_config=extra)


def storage(daemon, pool, others=None, **options):
    """SGLang's factory makes it, and registers pools as its controllers do."""
    made = config(daemon, **options)
    backend = StorageBackendFactory.create_backend("dynamic", made, pool)
    backend.register_mem_pool_host(pool)
    for name, other in {"kv": pool, **(others or {})}.items():
        backend.register_mem_host_pool_v2(other, name)
    return backend


@contextlib.contextmanager
def controller(daemon, pool, interface_v1):
    """SGLang's, of one rank, whose device has no K and V."""
    device = types.SimpleNamespace(device="cpu", layer_num=pool.layer_num, register_layer_transfer_counter=lambda counter: None)
    allocator = types.SimpleNamespace(get_kvcache=lambda: device)
    with get_parallel().override(tp_rank=0, pp_rank=0, attn_dcp_rank=0):
        made = HiCacheController(allocator, pool, PAGE, None, threading.Event(), storage_backend="dynamic", prefetch_threshold=PAGE, model_name="m",
                                 storage_backend_extra_config=config(daemon, interface_v1=interface_v1).extra_config)
    try:
        yield made
    finally:
        made.detach_storage_backend()
