"""The connector's halves on a GPU, as the fake driver imitates it, without vLLM and PyTorch: these are a few modules of their names, and a
tensor is where its memory is."""

import importlib
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import kvpool
import numpy as np
import pytest

from session_test import held
from fake_gpu import FAKE

INTEGRATIONS = pathlib.Path(__file__).parents[2] / "client/integrations"
pytestmark = pytest.mark.skipif(FAKE is None, reason="built without CUDA")
LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 20, 2, 16, 32
PAGE = 2 * HEADS * TOKENS * DIM * 4
NAMES = [f"layer.{layer}" for layer in range(LAYERS)]


class Tensor:
    """Of float32 on a GPU."""

    is_cuda, device = True, types.SimpleNamespace(index=0)

    def __init__(self, address, shape, strides):
        self.shape, self._address, self._strides = shape, address, strides

    def __getitem__(self, i):
        return Tensor(self._address + i * self._strides[0] * 4, self.shape[1:], self._strides[1:])

    def stride(self, i=None):
        return self._strides if i is None else self._strides[i]

    def element_size(self):
        return 4

    def numel(self):
        return math.prod(self.shape)

    def data_ptr(self):
        return self._address


def kv_cache(address, layout):
    """A tensor of each layer, as vLLM views its memory: blocks of a layer together, or layers of a block."""
    inner = (HEADS * TOKENS * DIM, DIM, HEADS * DIM, 1)  # [K or V, head, token, dim], with tokens outside of heads.
    by_layer = layout == "LBNHC"
    block, layer = (PAGE, BLOCKS * PAGE) if by_layer else (LAYERS * PAGE, PAGE)
    return layer, {name: Tensor(address + i * layer, (BLOCKS, 2, HEADS, TOKENS, DIM), (block // 4, *inner)) for i, name in enumerate(NAMES)}


def made_modules(stream):
    """{name: module} of vLLM and PyTorch on a GPU whose kernels are on this stream."""
    names = ("torch", "vllm", "vllm.logger", "vllm.platforms", "vllm.utils", "vllm.utils.hashing", "vllm.v1", "vllm.v1.kv_cache_interface",
             "vllm.distributed", "vllm.distributed.parallel_state", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector",
             "vllm.distributed.kv_transfer.kv_connector.v1", "vllm.distributed.kv_transfer.kv_connector.v1.base")
    modules = {name: types.ModuleType(name) for name in names}
    for module in modules.values():
        module.__path__ = []
    modules["torch"].__version__ = modules["vllm"].__version__ = "0"
    modules["torch"].cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=stream))
    modules["vllm.logger"].init_logger = lambda name: importlib.import_module("logging").getLogger(name)
    modules["vllm.platforms"].current_platform = types.SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, get_device_name=lambda: "a GPU")
    modules["vllm.utils.hashing"].get_hash_fn_by_name = None
    for kind in ("FullAttentionSpec", "SlidingWindowSpec", "MambaSpec", "MLAAttentionSpec"):
        setattr(modules["vllm.v1.kv_cache_interface"], kind, type(kind, (), {}))
    modules["vllm.distributed.parallel_state"].get_tensor_model_parallel_rank = lambda: 0
    for kind in ("KVConnectorMetadata", "KVConnectorWorkerMetadata"):
        setattr(modules["vllm.distributed.kv_transfer.kv_connector.v1.base"], kind, type(kind, (), {}))
    return modules


def configs(layout):
    """(VllmConfig, KVCacheConfig)"""
    spec = sys.modules["vllm.v1.kv_cache_interface"].FullAttentionSpec()
    spec.block_size, spec.dtype, spec.page_size_bytes = TOKENS, "torch.float32", PAGE
    model = types.SimpleNamespace(hf_config=types.SimpleNamespace(to_dict=dict), seed=0, dtype="torch.float32", quantization=None,
                                  enable_sleep_mode=False)
    cache = types.SimpleNamespace(prefix_caching_hash_algo="sha256", get_resolved_kv_cache_layout=lambda: types.SimpleNamespace(name=layout))
    vllm = types.SimpleNamespace(
        model_config=model, cache_config=cache, load_config=types.SimpleNamespace(load_format="dummy"), speculative_config=None,
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1), device_config=types.SimpleNamespace(device_type="cuda"),
        attention_config=types.SimpleNamespace(backend=None, backend_per_kind={}))
    tensor = types.SimpleNamespace(layers=NAMES, layer_stride=kv_cache(0, layout)[0])
    group = types.SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES)
    return vllm, types.SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group], kv_cache_tensors=[tensor])


@pytest.fixture
def connector(monkeypatch, gpu):
    """The connector's modules by their names."""
    for folder in ("shared", "vllm"):
        monkeypatch.syspath_prepend(str(INTEGRATIONS / folder))
    for name, module in made_modules(gpu.stream).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpool_vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield lambda name: importlib.import_module(f"kvpool_vllm.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpool_vllm"]:
        del sys.modules[name]


class Engine:
    """A scheduler's session, and the worker's Transfer that has joined it."""

    def __init__(self, connector, daemon, memory, layout="LBNHC"):
        self.messages = connector("messages")
        transfer = connector("transfer")
        vllm, config = configs(layout)
        options = connector("space").Options(socket=daemon.socket)
        self.transfer = transfer.Transfer(vllm, config, options)
        self.transfer.take_tensors(kv_cache(memory, layout)[1])
        self.session = self.transfer.terms.session(client_name="a scheduler", warmup=False, scheduler=True, give_back="any_time")
        invitation = self.messages.Invitation(1, self.session.invitation())
        self.transfer.begin(self.messages.Plan(1, invitation, False))
        assert self.transfer.number == 1

    def begin(self, loads=(), copies=()):
        self.transfer.begin(self.messages.Plan(1, None, True, list(loads), list(copies)))

    def copy(self, blocks):
        refs = self.session.lease(len(blocks), timeout=30).detach()
        return self.messages.Copy(1, [0] * len(blocks), list(blocks), refs, [bytes([block]) * 32 for block in blocks])

    def done(self):
        """Waits until one job at least is; answers the requests whose loads are."""
        loaded = set()
        until = time.monotonic() + 60
        while not (loaded or self.transfer._copied):
            assert time.monotonic() < until
            loaded = self.transfer.take_done()
        return loaded


@pytest.fixture(params=["LBNHC", "BLNHC"])
def layout(request):
    return request.param


def test_a_worker_on_a_gpu(connector, daemon, gpu, layout):
    memory = gpu.alloc(BLOCKS * LAYERS * PAGE)
    engine = Engine(connector, daemon, memory, layout)
    stride = kv_cache(memory, layout)[1][NAMES[0]].stride(0) * 4

    def content(block, layer):
        return gpu.read(memory + block * stride + layer * kv_cache(memory, layout)[0], PAGE)

    for block in range(BLOCKS):
        for layer in range(LAYERS):
            gpu.fill(memory + block * stride + layer * kv_cache(memory, layout)[0], 10 * block + layer, PAGE)
    copy = engine.copy([7, 2, 11])
    engine.begin(copies=[copy])
    engine.done()
    gpu.fill(memory, 255, BLOCKS * LAYERS * PAGE)
    report = engine.transfer.report()
    assert (report.copied, report.not_copied) == ({1: 1}, set())
    engine.session.seal(copy.refs, copy.keys)
    engine.begin(loads=[engine.messages.Load("a request", [0] * 3, [0, 1, 19], copy.refs, copy.keys)])
    assert engine.done() == {"a request"} and engine.transfer.take_failed() == set()
    for block, source in zip((0, 1, 19, 2), (7, 2, 11, None)):
        for layer in range(LAYERS):
            assert (content(block, layer) == (255 if source is None else 10 * source + layer)).all(), (block, layer)
    engine.transfer.shutdown()
    engine.session.close()


def test_tensors_that_have_holes_are_refused(connector, daemon, gpu):
    vllm, config = configs("LBNHC")
    transfer = connector("transfer").Transfer(vllm, config, connector("space").Options(socket=daemon.socket))
    _, tensors = kv_cache(gpu.alloc(BLOCKS * LAYERS * PAGE), "LBNHC")
    tensors[NAMES[2]] = tensors[NAMES[1]]
    with pytest.raises(ValueError, match=f"pages of {PAGE} bytes without holes"):
        transfer.take_tensors(tensors)
    transfer.shutdown()


def test_engines_share_by_what_fills_their_pages(connector, gpu):
    terms_of_copies, options = connector("space").terms_of_copies, connector("space").Options()
    vllm, config = configs("BLNHC")

    def attention():
        return terms_of_copies(vllm, config, options).facts["attention"]

    assert attention() == "a GPU, auto, BLNHC"
    flash, triton = types.SimpleNamespace(name="FLASH_ATTN"), types.SimpleNamespace(name="TRITON_ATTN")
    vllm.attention_config.backend = flash
    assert attention() == "a GPU, FLASH_ATTN, BLNHC"
    vllm.attention_config.backend_per_kind = {"sliding_window": triton}
    assert attention() == "a GPU, FLASH_ATTN, sliding_window TRITON_ATTN, BLNHC"
    vllm.model_config.enable_sleep_mode = True  # A copy from memory that is not there takes the engine's GPU along.
    with pytest.raises(ValueError, match="enable_sleep_mode"):
        attention()
    sys.modules["vllm.platforms"].current_platform.is_cuda = lambda: False
    with pytest.raises(ValueError, match="this engine runs on cuda"):
        attention()


def test_an_idle_worker_gives_memory_back(connector, daemon, gpu):
    """Another model is promised what the copies of this one have left."""
    engine = Engine(connector, daemon, gpu.alloc(BLOCKS * LAYERS * PAGE))
    engine.begin(copies=[engine.copy([1])])
    engine.done()
    session, second = engine.session, engine.copy([2])  # One that is leased below may lie in the last slabs.
    most = (64 << 20) // session.block_stride_bytes
    session.lease(most - 100, timeout=30).release()
    session.flush()
    engine.begin(copies=[second])  # It locks all of it.
    engine.done()
    member, before = engine.transfer.session, engine.transfer.session.mapped_blocks
    layout = kvpool.Layout([kvpool.LayerGroup(name="full", layers=[0], tokens_per_block=16)], block_bytes=64 << 10, encoding="opaque")
    with kvpool.Session(layout, "another model", socket=daemon.socket, device_uuids=["host"], guaranteed_blocks=400, open_timeout=30):
        assert member.mapped_blocks < before
        assert not gpu.is_page_locked(member.base + member.mapped_blocks * member.block_stride_bytes)
        engine.begin(copies=[engine.copy([3])])
        engine.done()
    assert engine.transfer.report().not_copied == set()
    engine.transfer.shutdown()
    session.close()


def test_its_end_waits_for_the_copy_under_way_and_begins_no_other(connector, daemon, gpu):
    memory = gpu.alloc(BLOCKS * LAYERS * PAGE)
    engine = Engine(connector, daemon, memory)
    gpu.fill(memory, 1, BLOCKS * LAYERS * PAGE)
    gate = gpu.hold_up()
    copies = [engine.copy([block]) for block in (0, 1)]
    engine.begin(copies=copies)
    while engine.transfer._jobs.qsize() > 1:  # The first is not begun yet.
        time.sleep(0.001)
    closing = threading.Thread(target=engine.transfer.shutdown)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive() and held(daemon)["leased"] >= 2  # Nobody else has them.
    pages = [np.array(engine.transfer.pool.words[copy.refs[0] & 0xffffffff], copy=False) for copy in copies]
    assert not pages[0][:LAYERS * PAGE].any()
    gate.set()
    closing.join()
    assert (pages[0][:LAYERS * PAGE] == 1).all() and not pages[1][:LAYERS * PAGE].any()
    engine.session.close()


def test_an_end_that_is_interrupted_gives_nobody_what_is_copied(connector, daemon, gpu, monkeypatch):
    engine = Engine(connector, daemon, gpu.alloc(BLOCKS * LAYERS * PAGE))
    gate = gpu.hold_up()
    engine.begin(copies=[engine.copy([0])])
    while engine.transfer._jobs.qsize() > 0:  # It is not begun yet.
        time.sleep(0.001)
    thread = engine.transfer._thread
    with monkeypatch.context() as interrupted:
        interrupted.setattr(thread, "join", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            engine.transfer.shutdown()
    importlib.import_module("kvpool_engines.sessions").hang_up(engine.session)  # As a Lookup does whose workers copy.
    kvpool.close_all()  # As at the end of the process.
    states = held(daemon)
    assert states["leased"] + states["quarantined"] > 0 and thread.is_alive()
    gate.set()
    engine.transfer.shutdown()


def test_a_process_that_just_ends_waits_for_its_copies(daemon):
    """Before the sessions are closed, which gives their blocks to others."""
    code = textwrap.dedent("""
        import sys, threading, types
        import kvpool
        sys.path[:0] = sys.argv[2:]
        import vllm_transfer_test as test
        from fake_gpu import FakeGpu
        gpu = FakeGpu()
        sys.modules.update(test.made_modules(gpu.stream))
        engine = test.Engine(lambda name: test.importlib.import_module(f"kvpool_vllm.{name}"), types.SimpleNamespace(socket=sys.argv[1]),
                             gpu.alloc(test.BLOCKS * test.LAYERS * test.PAGE))
        pages, opened = engine.transfer.pages, threading.Event()

        def copied(*arguments):
            opened.set()
            copy_out(*arguments)
            print("copied", "closed" if engine.session.closed else "open")

        copy_out, pages.copy_out = pages.copy_out, copied
        gate = gpu.hold_up()
        engine.begin(copies=[engine.copy([0])])
        opened.wait()
        threading.Timer(0.2, gate.set).start()
    """)
    folders = [pathlib.Path(__file__).parent, *(INTEGRATIONS / folder for folder in ("shared", "vllm"))]
    done = subprocess.run([sys.executable, "-c", code, daemon.socket, *map(str, folders)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "KVPOOL_LIBCUDA": FAKE})
    assert (done.returncode, done.stdout) == (0, "copied open\n"), done.stderr


@pytest.mark.parametrize("of", ["saves", "loads", "none"])
def test_a_scheduler_that_ends_gives_nobody_what_workers_copy(connector, daemon, gpu, of):
    engine = Engine(connector, daemon, gpu.alloc(BLOCKS * LAYERS * PAGE))
    copy = engine.copy([0])
    lookup = connector("lookup").Lookup.__new__(connector("lookup").Lookup)
    lookup.session, lookup.saves = engine.session, connector("saves").Saves(1, 0)
    lookup._loading = {"a request": copy.refs} if of == "loads" else {}
    if of == "saves":
        lookup.saves._copying[1] = None, copy.refs
    del engine.session
    lookup.close()
    states = held(daemon)
    assert states["leased"] == 0 and (states["quarantined"] > 0) == (of != "none"), states
    engine.transfer.shutdown()
