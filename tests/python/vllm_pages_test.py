"""The connector's copies without vLLM: from and to a GPU, as the fake driver imitates it, and host memory; in both blocks are alike in the pool."""

import pathlib
import sys
import threading
import types

import numpy as np
import pytest

import kvpool
from fake_gpu import FAKE

INTEGRATIONS = pathlib.Path(__file__).parents[2] / "client/integrations"
sys.path[:0] = [str(INTEGRATIONS / "shared"), str(INTEGRATIONS / "vllm")]
from kvpool_vllm.pages import DevicePages, HostPages, Pool, Region  # noqa: E402

pytestmark = pytest.mark.skipif(FAKE is None, reason="built without CUDA")
PAGE, LAYERS, BLOCKS = 4096, 3, 70  # vLLM's: more blocks than are copied at a time.


@pytest.fixture
def pool(daemon):
    group = kvpool.LayerGroup(name="full", layers=list(range(LAYERS)), tokens_per_block=16)
    layout = kvpool.Layout([group], block_bytes=PAGE * LAYERS + 64, encoding="opaque")
    with kvpool.Session(layout, "a model", socket=daemon.socket, device_uuids=["host"]) as session:
        yield Pool(session, [(PAGE, LAYERS)])


class Device:
    """vLLM's KV cache: pages of a layer together, or those of a block."""

    def __init__(self, gpu, by_layer):
        self.gpu, self.bytes = gpu, BLOCKS * LAYERS * PAGE
        self.region = Region(gpu.alloc(self.bytes), *((PAGE, BLOCKS * PAGE) if by_layer else (LAYERS * PAGE, PAGE)))
        self.by_layer = by_layer
        self.pages = DevicePages(0, [self.region], lambda: gpu.stream)

    def compute(self, block, value):
        for layer in range(LAYERS):
            self.gpu.fill(self.region.address + block * self.region.block_stride + layer * self.region.layer_stride, value + layer, PAGE)

    def content(self):
        """[block, layer, byte]"""
        everything = self.gpu.read(self.region.address, self.bytes)
        return everything.reshape(LAYERS, BLOCKS, PAGE).swapaxes(0, 1) if self.by_layer else everything.reshape(BLOCKS, LAYERS, PAGE)


@pytest.fixture(params=[True, False], ids=["by layer", "by block"])
def device(request, gpu, pool):
    device = Device(gpu, request.param)
    device.pages.join(pool)
    yield device
    device.pages.leave()


def job(pool, blocks):
    refs = pool.session.lease(len(blocks)).detach()
    return types.SimpleNamespace(groups=[0] * len(blocks), blocks=blocks, refs=refs, keys=[bytes([block]) * 32 for block in blocks])


def test_a_round_trip(device, pool):
    saved = job(pool, list(range(BLOCKS))[::-1])
    for block in range(BLOCKS):
        device.compute(block, block)
    device.pages.copy_out(pool, saved, device.pages.point())
    before = device.content()
    assert (before[5, 2] == 7).all()
    device.gpu.fill(device.region.address, 255, device.bytes)
    assert device.pages.copy_in(pool, saved, device.pages.point()) == []
    assert (device.content() == before).all()
    # An engine in host memory reads the same, and writes it.
    host = np.zeros((BLOCKS, LAYERS, PAGE // 8), np.int64)
    assert HostPages([host]).copy_in(pool, saved, None) == []
    assert (host.view(np.uint8) == before).all()
    host[:] += 1
    HostPages([host]).copy_out(pool, saved, None)
    assert device.pages.copy_in(pool, saved, None) == []
    assert (device.content() == host.view(np.uint8)).all()


def test_what_is_damaged_is_reported(device, pool):
    saved = job(pool, [3, 4, 5, 6])
    for block in saved.blocks:
        device.compute(block, 10 * block)
    device.pages.copy_out(pool, saved, device.pages.point())
    pool.words[kvpool.block_id(saved.refs[1]), 5000] ^= 1
    saved.keys[2] = b"another" * 4
    device.gpu.fill(device.region.address, 255, device.bytes)
    assert device.pages.copy_in(pool, saved, device.pages.point()) == [1, 2]
    assert [int(device.content()[block, 1, 0]) for block in (3, 6)] == [31, 61]


def test_a_block_that_changes_before_it_is_copied_is_reported(device, pool):
    saved = job(pool, [1, 2])
    device.pages.copy_out(pool, saved, None)
    gate = device.gpu.hold_up()
    point, bad = device.pages.point(), []
    loading = threading.Thread(target=lambda: bad.extend(device.pages.copy_in(pool, saved, point)))
    loading.start()
    loading.join(0.1)  # It waits for the kernels.
    pool.words[kvpool.block_id(saved.refs[1]), 0] ^= 1  # Somebody writes to what he does not hold.
    gate.set()
    loading.join()
    assert bad == [1]


@pytest.mark.parametrize("way", ["copy_in", "copy_out"])
def test_a_failure_is_raised_when_the_copies_before_it_are_over(device, pool, way, monkeypatch):
    """Whoever hears of it gives the blocks to others."""
    saved = job(pool, [1, 2, 3])
    device.gpu.fill(device.region.address, 9, device.bytes)
    device.pages.copy_out(pool, saved, device.pages.point())
    copier, begun = device.pages._copier, []

    def begin(ranges, after):
        if len(begun) == 2:
            raise kvpool.ResourceExhaustedError("no more")
        begun.append(getattr(copier, "to_device" if way == "copy_in" else "to_host")(ranges, after))
        return begun[-1]

    monkeypatch.setattr(device.pages, "_copier", types.SimpleNamespace(to_device=begin, to_host=begin, close=copier.close))
    gate = device.gpu.hold_up()
    point, over = copier.record(device.gpu.stream), []

    def copy():
        with pytest.raises(kvpool.ResourceExhaustedError):
            getattr(device.pages, way)(pool, saved, point)
        over.extend(copied.done for copied in begun)

    copying = threading.Thread(target=copy)
    copying.start()
    copying.join(0.1)
    assert copying.is_alive()
    gate.set()
    copying.join()
    assert over == [True, True]


def test_copies_wait_for_the_kernels_before_them(device, pool):
    saved = job(pool, [1])
    gate = device.gpu.hold_up()
    device.compute(1, 20)
    point = device.pages.point()
    done = threading.Thread(target=device.pages.copy_out, args=(pool, saved, point))
    done.start()
    done.join(0.1)
    assert done.is_alive()
    gate.set()
    done.join()
    assert device.pages.copy_in(pool, saved, None) == [] and (device.content()[1, 2] == 22).all()


def test_memory_is_locked_as_it_grows(device, pool):
    session = pool.session
    saved = job(pool, [1])
    device.pages.copy_out(pool, saved, None)
    first = session.mapped_blocks
    assert device.gpu.is_page_locked(session.base) and device.gpu.is_page_locked(session.base + (first - 1) * session.block_stride_bytes)
    with session.lease(first):
        assert session.mapped_blocks > first
        assert not device.gpu.is_page_locked(session.base + first * session.block_stride_bytes)
        device.pages.copy_out(pool, saved, None)
        assert device.gpu.is_page_locked(session.base + first * session.block_stride_bytes)
    device.pages.leave()
    assert not device.gpu.is_page_locked(session.base)


def test_memory_that_goes_back_is_unlocked_before(daemon, gpu):
    layout = kvpool.Layout([kvpool.LayerGroup(name="full", layers=[0], tokens_per_block=16)], block_bytes=64 << 10, encoding="opaque")
    stride = 64 << 10

    def open_session(model, **more):
        return kvpool.Session(layout, model, socket=daemon.socket, device_uuids=["host"], magazine_blocks=0, **more)

    pages = DevicePages(0, [Region(gpu.alloc(stride), stride, stride)], lambda: gpu.stream)
    with open_session("a model", give_back=pages.give_back) as session:
        pool = Pool(session, [(4096, 1)])
        pages.join(pool)
        one = job(pool, [0])
        for blocks in (100, 500, 1000):  # Of the daemon's memory, which has 1,024 such.
            session.lease(blocks, timeout=30).release()
            session.flush()
            pages.copy_out(pool, one, None)  # It locks what has come.
        mapped = session.mapped_blocks
        assert gpu.is_page_locked(session.base + (mapped - 1) * stride)
        # An engine of another model is promised some of it.
        other = []
        opening = threading.Thread(target=lambda: other.append(open_session("another model", guaranteed_blocks=400)))
        opening.start()
        while opening.is_alive():
            if session.slabs_asked_back:
                pages.leave_slabs(session)
            opening.join(0.001)
        assert other and session.mapped_blocks < mapped
        assert not gpu.is_page_locked(session.base + session.mapped_blocks * stride)
        pages.copy_out(pool, one, None)
        assert gpu.is_page_locked(session.base) and gpu.is_page_locked(session.base + (session.mapped_blocks - 1) * stride)
        assert pages.copy_in(pool, one, None) == []
        other[0].close()
        pages.leave()


def test_a_slab_in_front_of_others_goes(daemon):
    layout = kvpool.Layout([kvpool.LayerGroup(name="full", layers=[0], tokens_per_block=16)], block_bytes=64 << 10, encoding="opaque")

    def open_session(model, **more):
        return kvpool.Session(layout, model, socket=daemon.socket, device_uuids=["host"], magazine_blocks=0, **more)

    with open_session("a model", give_back="any_time") as session:
        blocks = session.lease(1000, timeout=30)  # All of the daemon's memory, which has 1,024 such.
        assert session.mapped_ranges == [(0, session.mapped_blocks)]
        end = session.mapped_blocks
        held = max(blocks.refs, key=lambda ref: ref & 0xffffffff)
        refs = blocks.detach()
        session.release([ref for ref in refs if ref != held])
        session.flush()
        with open_session("another model", guaranteed_blocks=400):
            (_, hole), (behind, last) = session.mapped_ranges
            assert 0 < hole < behind <= held & 0xffffffff < last == session.mapped_blocks == end
            assert session.capacity_blocks == hole + last - behind
            # By call an engine says that it keeps to what is mapped; else it gets no space with a hole.
            with open_session("a model", give_back="by_call", holes=True) as other:
                assert other.mapped_ranges == session.mapped_ranges
            with pytest.raises(kvpool.ResourceExhaustedError, match="takes no holes"):
                open_session("a model", give_back="by_call")
        session.release([held])
