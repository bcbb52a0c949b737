"""A plugin of pytest that runs vLLM's own tests with kvpool's block pool, manager and scheduler in place of vLLM's.

vllm_suite.sh runs it as `pytest -p on_the_pool`. With KVPOOL_SUITE=stock vLLM is as it was. KVPOOL_SUITE_RESULTS names a file that gets
one line a test: outcome, test, why, whether it makes a KV cache manager or a scheduler (false for stock).

A pool of a test has as many blocks as the test says, and is empty at its start: each test has spaces of its own. Steps of a scheduler
are done when its output is given back to it; a manager without a scheduler has a step behind each call that plans one.
"""

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import sys
import tempfile
import types

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
STOCK = os.environ.get("KVPOOL_SUITE") == "stock"
MODELS = {  # What the tests take from their configurations alone: {name: (class of Transformers, architecture, what differs from its default)}.
    "facebook/opt-125m": ("OPTConfig", "OPTForCausalLM", {}),
    "facebook/opt-350m": ("OPTConfig", "OPTForCausalLM", {}),
    "Qwen/Qwen1.5-7B": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "Qwen/Qwen3-0.6B": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "hmellor/tiny-random-LlamaForCausalLM": ("LlamaConfig", "LlamaForCausalLM", {}),
}


def _make_models():
    """vLLM takes a directory of that name, below the one that it runs in, for the model."""
    import transformers
    directory = tempfile.TemporaryDirectory(prefix="kvpool-suite-")
    atexit.register(directory.cleanup)
    os.chdir(directory.name)
    for name, (config, architecture, more) in MODELS.items():
        made = getattr(transformers, config)(architectures=[architecture], **more)
        made.save_pretrained(name)


# ---- Spaces

GRANULE = 2 << 20  # Memory of a space comes in multiples of this.
BLOCK = 512
MOST_BLOCKS = 1 << 18
MOST_SPACES = 100  # That a daemon keeps: it closes an idle one when another needs its memory, and this process has mapped all of them.
_opened = []


_daemons = []


def _daemon():
    """One for as many tests as its memory does for."""
    if not _daemons:
        sys.path.insert(0, str(ROOT / "tests/python"))
        from daemon import Daemon
        _daemons.append(Daemon(capacity="4GiB", slab="16MiB", flags=("--policy=lru", "--low-watermark=0", "--high-watermark=0")))
        _daemons[0].spaces = 0
    _daemons[0].spaces += 1
    return _daemons[0]


def _end_daemon():
    while _daemons:
        _daemons.pop().close()


def space_of(groups_of_plan, count, has_drafts=False, sharded=1):
    """A space of `count` blocks, vLLM's null block among them. `sharded`: a block of K and V has the tokens of so many ranks."""
    import kvpool

    from kvpool_vllm import groups, keys, patches, space
    if not 2 <= count <= MOST_BLOCKS:
        pytest.skip(f"a pool of {count} blocks")
    patches.take_keys()
    specs = [group.kv_cache_spec for group in groups_of_plan]
    specs = [dataclasses.replace(spec, block_size=spec.block_size * (sharded if spec.dcp_sharded else 1)) for spec in specs]
    of_model = tuple(groups.Group(spec, None, (number,), 0, drafted=drafted)
                     for number, (spec, drafted) in enumerate(zip(specs, groups.drafted_groups(groups_of_plan, has_drafts))))
    granules = -(-(count + 1) * BLOCK // GRANULE)  # Another block is the session's sink.
    digest = os.urandom(32)
    terms = space.Terms(of_model, BLOCK, digest, {}, _daemon().socket, 1)
    asked = {"max_space_bytes": granules * GRANULE, "guaranteed_blocks": granules * GRANULE // BLOCK - 2,
             "magazine_blocks": space.magazine_of(count)}
    session = kvpool.Session(groups.layout_of(of_model, BLOCK), digest, socket=terms.socket, open_timeout=30, **asked)
    # What is above the count is nobody's.
    refs = session.lease(session.max_blocks - 2).detach()
    session.release(sorted(ref for ref in refs if (ref & 0xffffffff) <= count))
    session.flush()
    made = space.Space(session, space.Options(match_timeout=30, lease_timeout=0.5), terms, space.Memory(count, (), None))
    _opened.append(made)
    keys.set_root(session.hash_seed)
    from vllm.utils.hashing import sha256
    keys.take_root(sha256)
    return made


def _close_all():
    from kvpool_engines.sessions import leave

    from kvpool_vllm import keys
    while _opened:
        leave(_opened.pop().session, logging.getLogger(__name__))
    keys._seed, keys._private = None, b""
    if _daemons and _daemons[0].spaces >= MOST_SPACES:
        _end_daemon()


def planned(config):
    """With regions of pages in blocks that hold all layers, as kvpool has vLLM plan them. Most tests leave them out."""
    layers = [tensor.layers for tensor in config.kv_cache_tensors] or [group.layer_names for group in config.kv_cache_groups]
    regions = [types.SimpleNamespace(layers=names, offset=0, layer_stride=0, block_stride=1 << 40) for names in layers]
    return dataclasses.replace(config, kv_cache_tensors=regions)


@contextlib.contextmanager
def plan_of(space, config):
    """While an engine's parts are made its plan is one of the space's blocks, as space.attach makes it."""
    count, config.num_blocks = config.num_blocks, space.session.max_blocks
    try:
        yield
    finally:
        config.num_blocks = count


class Refused(Exception):
    """kvpool does not start here, and says why."""


@contextlib.contextmanager
def _refusals():
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


# ---- What stands in for vLLM's


class _Free:
    """In the place of vLLM's queue of free blocks, which tests count."""

    def __init__(self, pool):
        self._pool = pool

    @property
    def num_free_blocks(self):
        return self._pool.space.limit - 1 - self._pool.taken()


def _put_in_place():
    from vllm.utils.hashing import sha256
    from vllm.v1.core import block_pool, kv_cache_manager
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

    from kvpool_vllm import facts, groups, keys, space
    from kvpool_vllm import scheduler as ours
    from kvpool_vllm.block_pool import KvPoolBlockPool

    stock_manager = kv_cache_manager.KVCacheManager

    class Counted(KvPoolBlockPool):
        """To a test it says how many blocks nobody holds, as vLLM's does; to kvpool how many are at hand."""

        def __init__(self, space, *rest, **more):
            super().__init__(space, *rest, **more)
            self.free_block_queue, self.num_gpu_blocks = _Free(self), space.limit

        def get_num_free_blocks(self):
            if f"{os.sep}tests{os.sep}v1{os.sep}core{os.sep}" in sys._getframe(1).f_code.co_filename:
                return self.free_block_queue.num_free_blocks
            return super().get_num_free_blocks()

    class Pool(Counted):
        def __init__(self, num_gpu_blocks, enable_caching, hash_block_size, *rest, **more):
            import torch
            spec = FullAttentionSpec(block_size=hash_block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
            space = space_of([KVCacheGroupSpec([str(number)], spec) for number in range(4)], num_gpu_blocks)
            super().__init__(space, space.session.max_blocks, enable_caching, hash_block_size, *rest, **more)

    class Manager(stock_manager):
        def __init__(self, kv_cache_config, *rest, **more):
            _makes_one.add(_running[-1])
            with _refusals():
                groups.refuse_others(planned(kv_cache_config), "kvpool_vllm.Scheduler")
            space = space_of(kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks, more.get("use_eagle", False),
                             more.get("dcp_world_size", 1))
            with ours.building(space), plan_of(space, kv_cache_config):
                super().__init__(kv_cache_config, *rest, **more)
            ours.ask_for_blocks(self, int(more.get("watermark", 0) * kv_cache_config.num_blocks))
            find = self.get_computed_blocks

            def get_computed_blocks(request):
                self.block_pool.ask(request)
                return find(request)

            self.get_computed_blocks = get_computed_blocks

        def _a_step_is_done(self, requests):
            pool = self.block_pool
            if step := pool.scheduled(requests):
                pool.session.complete_step(step)
                pool.computed(step)

        def allocate_slots(self, request, *rest, **more):
            blocks = super().allocate_slots(request, *rest, **more)
            if blocks is not None:
                self._a_step_is_done([request.request_id])
            return blocks

        def cache_blocks(self, request, *rest, **more):
            super().cache_blocks(request, *rest, **more)
            self._a_step_is_done([request.request_id])

        def reset_prefix_cache(self):
            done = super().reset_prefix_cache()
            if done:
                keys.new_root()
                keys.take_root(sha256)
            return done

    answer_at_once = ours.answer_at_once

    def checked(manager):
        """What is answered at once is what vLLM answers."""
        usual, asked = manager.allocate_slots, []

        def watched(*arguments, **more):
            asked.append(arguments)
            return usual(*arguments, **more)

        manager.allocate_slots = watched
        answer_at_once(manager)
        quick = manager.allocate_slots

        def allocate_slots(*arguments, **more):
            asked.clear()
            blocks = quick(*arguments, **more)
            assert asked or usual(*arguments, **more) is blocks
            return blocks

        manager.allocate_slots = allocate_slots

    def in_place(kind):
        class Placed(kind):
            def __init__(self, vllm_config, kv_cache_config, **more):
                _makes_one.add(_running[-1])
                with _refusals():
                    space._refuse_what_is_not_supported(vllm_config, [planned(kv_cache_config)])
                kv_cache_config.kvpool = space_of(kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks,
                                                  facts.has_drafts_with_kv(vllm_config))
                ours.core.watched = True
                with plan_of(kv_cache_config.kvpool, kv_cache_config):
                    super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **more)

            def update_from_output(self, scheduler_output, model_runner_output):
                if step := getattr(scheduler_output, "kvpool_step", 0):
                    self.pool.session.complete_step(step)
                return super().update_from_output(scheduler_output, model_runner_output)

        Placed.__name__ = Placed.__qualname__ = kind.__name__
        return Placed

    # Images of these tests are a byte that nobody has written, and now and then equal: only their names tell them apart.
    keys.content_digest = lambda data: ""
    space.CONNECTORS.append("MockKVConnector")
    ours.KvPoolBlockPool, ours.answer_at_once = Counted, checked
    scheduler.Scheduler = in_place(ours.PooledScheduler)
    async_scheduler.AsyncScheduler = in_place(ours.PooledAsyncScheduler)
    kv_cache_manager.KVCacheManager = Manager
    block_pool.BlockPool = Pool


# ---- pytest

_lines = {}
_running, _makes_one = [], set()  # Tests, by node id.


def pytest_configure(config):
    for name in ("cpu_test", "skip_global_cleanup", "optional", "slow_test", "distributed"):
        config.addinivalue_line("markers", f"{name}: vLLM's")
    _make_models()
    if not STOCK:
        _put_in_place()


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """vLLM's: its logger passes on what it is told."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def _why(excinfo):
    if excinfo is None:
        return ""
    said = re.sub(r"\s+", " ", str(excinfo.value)).strip()
    return f"{type(excinfo.value).__name__}: {said}"[:200]


def pytest_runtest_setup(item):
    _running.append(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and not report.skipped:
        refused, seen = None, call.excinfo.value
        while seen is not None and refused is None:
            refused, seen = seen if isinstance(seen, Refused) else None, seen.__cause__ or seen.__context__
        _lines[report.nodeid] = ("refused", str(refused)) if refused else ("failed", _why(call.excinfo))
    elif report.skipped:
        _lines.setdefault(report.nodeid, ("skipped", _why(call.excinfo)))
    elif report.when == "call":
        _lines.setdefault(report.nodeid, ("passed", ""))
    return report


def pytest_runtest_teardown(item):
    if not STOCK:
        _close_all()


def pytest_sessionfinish(session):
    _end_daemon()
    with open(os.environ["KVPOOL_SUITE_RESULTS"], "w") as file:
        for test, (outcome, why) in _lines.items():
            print(json.dumps([outcome, test.split("tests/v1/core/", 1)[-1], why, test in _makes_one]), file=file)
