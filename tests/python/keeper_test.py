"""Sessions that live through `kill -9` of a daemon with a keeper, and go on sharing."""

import importlib
import pathlib
import sys
import time
import types

import numpy as np
import pytest

import kvpool
from conftest import layout
from daemon import KeptDaemon

PACKAGES = [pathlib.Path(__file__).parents[2] / "client/integrations" / name for name in ("vllm", "shared")]
KILLS = 5
BLOCK = 16  # Tokens.


@pytest.fixture
def kept():
    daemon = KeptDaemon()
    yield daemon
    daemon.close()


def find_again(session, keys):
    """While the daemon is away nothing is found."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        hit = session.match(keys).wait()
        if hit.tokens:
            return hit
        hit.release()
    raise AssertionError("nothing was found again")


def share(session, tokens, value):
    keys = session.hasher().chain(tokens, BLOCK)
    blocks = session.lease(len(keys), timeout=60)
    for i in range(len(keys)):
        np.asarray(blocks.data(i))[:] = value
    session.seal(blocks, keys).wait()
    blocks.release()
    return keys


def test_a_session_goes_on(kept):
    with kvpool.Session(layout(), "a model", socket=kept.socket) as session, \
            kvpool.Session(layout(), "a model", socket=kept.socket) as other:
        mine = session.lease(1, timeout=60)
        np.asarray(mine.data(0))[:] = 77
        shared = [share(session, range(64), 0)]
        for round in range(1, KILLS + 1):
            kept.kill_daemon()
            shared.append(share(session, range(1000 * round, 1000 * round + 64), round))
            for value, keys in enumerate(shared):
                with find_again(other, keys) as hit:
                    blocks = hit.groups[0]
                    assert hit.tokens == 64
                    assert all((np.asarray(blocks.data(i)) == value).all() for i in range(len(blocks)))
            session.check()
            other.check()
        assert (np.asarray(mine.data(0)) == 77).all()
        mine.release()


# ---- vLLM's scheduler, as far as a block pool is concerned

class Block:
    def __init__(self):
        self.block_id, self.ref_cnt, self.is_null, self.block_hash = 0, 0, True, None

    def set_block_hash(self, key, num_tokens):
        self.block_hash = key

    def reset_hash(self):
        self.block_hash = None


class Index(dict):
    def get_one_block(self, key):
        return self.get(key)

    def insert(self, key, block):
        self[key] = block

    def contain(self, key, block_id):
        return key in self and self[key].block_id == block_id


def with_group(key, group):
    return key + group.to_bytes(4, "big")


class BlockPool:
    def __init__(self):
        self.null_block = Block()
        self.blocks = [self.null_block]
        self.num_gpu_blocks, self.enable_caching, self.hash_block_size = 0, True, BLOCK
        self.metrics_collector, self.cached_block_hash_to_block, self.cached_block_hashes_by_block = None, Index(), {}

    def _insert_block_hash(self, key, block, num_tokens):
        block.block_hash = key
        self.cached_block_hash_to_block[key] = block

    def _remove_cached_block_hashes(self, block):
        del self.cached_block_hash_to_block[block.block_hash]
        block.reset_hash()

    def cache_full_blocks(self, request, blocks, cached, full, size, group, mask=None):
        for i in range(cached, full):
            self._insert_block_hash(with_group(request.block_hashes[i], group), blocks[i], None)


@pytest.fixture
def pool_class(monkeypatch):
    """KvPoolBlockPool, over what it needs of vLLM's modules."""
    logs = types.SimpleNamespace(info=lambda *_: None, warning=lambda *_: None, error=lambda *_: None)
    parts = {"vllm": {}, "vllm.logger": {"init_logger": lambda name: logs}, "vllm.v1": {}, "vllm.v1.core": {},
             "vllm.v1.core.block_pool": {"BlockPool": BlockPool},
             "vllm.v1.core.kv_cache_utils": {"make_block_hash_with_group_id": with_group,
                                             "resolve_block_hashes": lambda hashes, *_: hashes, "BlockHash": bytes}}
    for package in PACKAGES:
        monkeypatch.syspath_prepend(str(package))
    for name, attributes in parts.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpool_vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("kvpool_vllm.block_pool").KvPoolBlockPool
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpool_vllm"]:
        del sys.modules[name]


class Engine:
    """A scheduler and a worker: each step computes one request of some blocks, and gives them back."""

    def __init__(self, socket, pool_class):
        opened = {"socket": socket, "warmup": True, "magazine_blocks": 0}
        self.scheduler = kvpool.Session(layout(), "a model", scheduler=True, **opened)
        self.worker = kvpool.Session(layout(), "a model", invitation=self.scheduler.invitation(), **opened)
        self.worker.finish_warmup()
        group = types.SimpleNamespace(tokens_per_block=BLOCK, drafted=False, window_tokens=0, window_blocks=0,
                                      lag=lambda aligned: 0)
        options = types.SimpleNamespace(lease_timeout=0.05, match_timeout=20.0, wait_ms=0)
        self.pool = pool_class(types.SimpleNamespace(
            session=self.scheduler, limit=512, options=options,
            terms=types.SimpleNamespace(groups=[group], ranks=1)))
        self.pool.join(self.scheduler)

    def serve(self, tokens):
        """How many blocks of the request were found. Blocks that are short are waited for, as by a request that waits."""
        hashes = self.scheduler.hasher().chain(tokens, BLOCK)
        request = types.SimpleNamespace(request_id=str(hash(tuple(tokens))), block_hashes=hashes, num_tokens=len(tokens) + 1,
                                        lora_request=None, skip_reading_prefix_cache=False)
        self.pool.ask(request)
        self.pool.settle(request)
        found = []
        for key in hashes:
            block = self.pool.cached_block_hash_to_block.get_one_block(with_group(key, 0))
            if block is None:
                break
            found.append(block)
        self.pool.touch(found)
        missing = len(hashes) - len(found)
        self.pool.wanted = missing
        until = time.monotonic() + 60
        while self.pool.get_num_free_blocks() < missing:
            assert time.monotonic() < until and not self.pool.detached
        blocks = found + self.pool.get_new_blocks(missing)
        self.pool.cache_full_blocks(request, blocks, len(found), len(blocks), BLOCK, 0)
        step = self.pool.scheduled([request.request_id])
        if step:
            self.worker.begin_step(step)
            self.worker.complete_step(step)
            self.pool.computed(step)
        self.pool.free_blocks(reversed(blocks))
        self.pool.trim()
        assert not self.pool.detached
        return len(found)


def test_vllms_scheduler_goes_on(kept, pool_class):
    engine, other = Engine(kept.socket, pool_class), Engine(kept.socket, pool_class)
    for round in range(KILLS):
        kept.kill_daemon()
        # All the time nothing is raised, and nobody goes on without the daemon.
        until = time.monotonic() + 0.5
        served = 0
        while time.monotonic() < until:
            engine.serve(range(10000 * round + 100 * served, 10000 * round + 100 * served + 64))
            served += 1
        assert served > 0
        prompt = range(10000 * round, 10000 * round + 64)
        until = time.monotonic() + 60
        while engine.serve(prompt) != 4 or other.serve(prompt) != 4:
            assert time.monotonic() < until, "nothing is found again"


def test_a_prompt_has_more_keys_than_a_match_may_name(daemon, pool_class):
    """It is asked for as far as that goes: the daemon is not gone."""
    engine = Engine(daemon.socket, pool_class)
    pool = engine.pool
    request = types.SimpleNamespace(request_id="long", block_hashes=[i.to_bytes(32, "big") for i in range(1, 40_001)],
                                    num_tokens=40_000 * BLOCK + 1, lora_request=None, skip_reading_prefix_cache=False)
    pool.ask(request)
    pool.settle(request)
    assert not pool.detached and pool.counters["asked"] == 1
