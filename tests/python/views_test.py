"""Views: the memory itself, in place, and for as long as it is looked at."""

import ctypes
import gc
import os
import pathlib
import time

import numpy as np
import pytest

import kvpool
from conftest import layout
from session_test import held


def test_strides_are_the_spaces(session):
    # 2 layers, 3 heads, 8 dims, 16 tokens of float32.
    blocks = session.lease(3)
    k, v = np.asarray(blocks.k(1)), np.asarray(blocks.v(1))
    assert k.shape == v.shape == (2, 16, 3, 8) and k.strides == (16 * 96, 96, 32, 4) and k.dtype == np.float32
    k[:] = np.arange(k.size).reshape(k.shape)
    v[:] = -1
    raw = np.asarray(blocks.data(1)).view(np.float32)
    assert raw.shape == (2 * k.size,)
    assert (raw[:k.size] == np.arange(k.size)).all() and (raw[k.size:] == -1).all()
    # The same bytes, through the pool.
    pool = np.asarray(session.k(layer=1, blocks=session.max_blocks))
    assert pool.shape == (session.max_blocks, 16, 3, 8)
    assert pool.strides[0] == session.block_stride_bytes
    assert np.shares_memory(pool, k) and (pool[blocks.ids[1]] == k[1]).all()
    pool[blocks.ids[1], 3, 2, 7] = 1234
    assert k[1, 3, 2, 7] == 1234
    assert np.asarray(session.data(blocks=blocks.ids[1] + 1))[blocks.ids[1]].ctypes.data == blocks.data(1).address
    blocks.release()


def test_column_major_keys(daemon):
    # As CPU attention kernels want it: [head][dim][token].
    k = kvpool.Plane(offset=0, layer_stride=2048, token_stride=2, head_stride=1024, dim_stride=32)
    v = kvpool.Plane(offset=4096, layer_stride=2048, token_stride=64, head_stride=1024, dim_stride=2)
    group = kvpool.LayerGroup(name="full", layers=[0, 1], tokens_per_block=16, kv_heads=2, k_head_dim=32, v_head_dim=32,
                              dtype="float16", k=k, v=v)
    with kvpool.Session(kvpool.Layout([group], block_bytes=8192), "columns", socket=daemon.socket) as session:
        with session.lease(1) as blocks:
            keys = np.asarray(blocks.k(0))
            assert keys.dtype == np.float16 and keys.strides == (2048, 2, 1024, 32)
            keys[1, 5, 1, 31] = 3
            assert np.asarray(blocks.data(0)).view(np.float16)[(2048 + 10 + 1024 + 31 * 32) // 2] == 3
            assert np.from_dlpack(blocks.k(0)).strides == keys.strides


def test_dlpack_is_in_place(session):
    with session.lease(1) as blocks:
        array = np.from_dlpack(blocks.k(0))
        array[:] = 9
        assert np.asarray(blocks.k(0)).min() == 9
        assert blocks.k(0).__dlpack_device__() == (1, 0) and blocks.k(0).device == "cpu"
        assert not hasattr(blocks.k(0), "__cuda_array_interface__")


@pytest.mark.parametrize("dtype, bits", [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8), ("float8_e5m2", np.uint8)])
def test_types_that_numpy_has_not(daemon, dtype, bits):
    with kvpool.Session(layout(dtype, head_dim=16), dtype, socket=daemon.socket) as session, session.lease(1) as blocks:
        view = blocks.k(0)
        assert view.dtype == dtype
        with pytest.raises(BufferError, match=dtype):
            memoryview(view)
        array = np.asarray(view.bits())
        assert array.dtype == bits and array.shape == view.shape
        array[:] = 0x3f
        assert np.asarray(blocks.data(0))[0] == 0x3f


def test_sealed_blocks_are_read_only(session):
    blocks = session.lease(1)
    session.seal(blocks, session.hasher().chain(range(16), 16)).wait()
    assert blocks.k(0).readonly
    array = np.asarray(blocks.k(0))
    with pytest.raises(ValueError):
        array[:] = 1
    assert not np.from_dlpack(blocks.k(0)).flags.writeable
    with pytest.raises((BufferError, TypeError)):
        (ctypes.c_char * 4).from_buffer(blocks.data(0))
    blocks.release()


def test_use_after_release_raises(session):
    blocks = session.lease(2)
    view = blocks.k(0)
    blocks.release()
    blocks.release()  # Again is nothing.
    for use in (lambda: blocks.refs, lambda: blocks.ids, lambda: len(blocks), lambda: blocks.k(0), lambda: blocks.split(0),
                blocks.detach, lambda: session.seal(blocks, [b"x" * 32] * 2)):
        with pytest.raises(kvpool.ReleasedError) as raised:
            use()
        assert isinstance(raised.value, ValueError) and isinstance(raised.value, kvpool.KvpoolError)
    del view


def all_there_is(session):
    """Leases until there is nothing left."""
    taken = []
    while True:
        try:
            taken.append(session.lease(1, timeout=1))
        except kvpool.KvpoolError:
            return taken


def test_what_is_looked_at_stays_held(daemon):
    """Every block that a view shows is its own until the view is gone: nobody else gets it, however short memory is."""
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        blocks = session.lease(4)
        id_of_third = blocks.ids[2]
        array = np.asarray(blocks.k(2))
        array[:] = 77
        blocks.release()
        session.flush()
        assert session.views == 1 and held(daemon)["leased"] == 1 + 1  # One is the sink.
        taken = all_there_is(session)
        assert all(id_of_third not in some.ids for some in taken)
        for some in taken:
            for i in range(len(some)):
                np.asarray(some.data(i))[:] = 1
        assert (array == 77).all()
        for some in taken:
            some.release()
        del array
        gc.collect()
        assert session.views == 0
        taken = all_there_is(session)
        assert any(id_of_third in some.ids for some in taken)
        for some in taken:
            some.release()


def test_views_of_a_match_outlive_it(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket, magazine_blocks=0) as session:
        with session.lease(1) as blocks:
            session.seal(blocks, session.hasher().chain(range(16), 16)).wait()
        with session.match(session.hasher().chain(range(16), 16)).wait() as hit:
            array = np.asarray(hit.blocks.v(0))
        session.flush()
        assert held(daemon)["sealed"] >= 1  # Referenced, so never a victim.
        referenced = held(daemon)["sealed"]
        del array
        gc.collect()
        session.flush()
        assert held(daemon)["sealed"] == referenced - 1


def test_a_session_that_is_closed_ends_with_its_views(daemon):
    session = kvpool.Session(layout(), "a model", socket=daemon.socket)
    blocks = session.lease(1)
    array = np.asarray(blocks.k(0))
    array[:] = 5
    assert session.close() is False
    for use in (lambda: session.lease(1), lambda: blocks.refs, lambda: session.begin_step(), session.check):
        with pytest.raises(kvpool.ReleasedError):
            use()
    assert len(daemon.ctl("sessions")["sessions"]) == 1 and (array == 5).all()
    del array
    gc.collect()
    assert daemon.ctl("sessions").get("sessions", []) == []
    # An array of the whole pool holds no block, but its memory.
    session = kvpool.Session(layout(), "a model", socket=daemon.socket)
    pool = np.asarray(session.k())
    assert session.close() is True
    assert daemon.ctl("sessions").get("sessions", []) == []
    assert pool[1].shape == (2, 16, 3, 8) and float(pool[1].sum()) is not None


def footprint():
    """What sessions take of a process: mapped slabs, threads, descriptors."""
    gc.collect()
    maps = pathlib.Path("/proc/self/maps").read_text()
    return maps.count("kvpool"), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_sessions_that_are_closed_and_kept_take_nothing(daemon):
    def use():
        session = kvpool.Session(layout(), "a model", socket=daemon.socket)
        blocks = session.lease(8)
        np.asarray(blocks.data(0))[:] = 1
        assert session.close() is True
        return session, blocks

    slabs, threads, descriptors = footprint()
    kept = [use() for _ in range(20)]  # Open, each has two threads and three descriptors, and so many slabs again.
    assert footprint()[0] == slabs and footprint()[2] <= descriptors
    # The system lists a thread for a moment more after others have seen its end.
    for _ in range(200):
        if footprint()[1] <= threads:
            break
        time.sleep(0.05)
    assert footprint()[1] <= threads
    session, blocks = kept[-1]
    assert session.closed and session.capacity_blocks > 0 and session.id > 0
    for look in (session.k, session.data, lambda: blocks.k(0), lambda: session.lease(1), session.check):
        with pytest.raises(kvpool.ReleasedError):
            look()
    assert session.close() is True


def test_the_memory_of_a_session_that_is_closed_goes_with_the_last_view_of_the_pool(daemon):
    slabs = footprint()[0]
    session = kvpool.Session(layout(), "a model", socket=daemon.socket)
    pool = np.asarray(session.k())
    part = pool[1:]
    assert session.close() is True
    del pool
    assert footprint()[0] > slabs and part[0].shape == (2, 16, 3, 8) and float(part[0].sum()) is not None
    del part
    assert footprint()[0] == slabs


def test_an_engine_that_leaves_in_the_middle_of_a_step(daemon):
    """Kernels may still run: blocks are not free before the process is gone."""
    with pytest.raises(KeyError):
        with kvpool.Session(layout(), "a model", socket=daemon.socket) as session:
            session.begin_step()
            with session.lease(1) as blocks:
                np.asarray(blocks.data(0))[:] = 1
                raise KeyError
    assert session.closed
    del session, blocks
    gc.collect()
    assert held(daemon)["quarantined"] > 0


def test_indices_and_buffers(session):
    blocks = session.lease(2)
    assert blocks.k(-1).address == blocks.k(1).address
    for index in (2, -3):
        with pytest.raises(IndexError):
            blocks.k(index)
    with pytest.raises(kvpool.InvalidArgumentError, match="layer: 2"):
        blocks.k(0, layer=2)
    with pytest.raises(kvpool.InvalidArgumentError, match="group: 1"):
        blocks.k(0, group=1)
    with pytest.raises(kvpool.InvalidArgumentError):
        session.k(blocks=session.max_blocks + 1)
    # A view has no gaps here, and bytes can be had of it; of the pool's there are gaps between blocks.
    assert len(bytes(blocks.data(0))) == session.layout.block_bytes
    assert memoryview(blocks.k(0)).format == "f" and memoryview(blocks.k(0)).nbytes == 2 * 16 * 3 * 8 * 4
    blocks.release()


def test_opaque_layouts_have_bytes_alone(daemon):
    opaque = kvpool.Layout.opaque(block_bytes=4096)
    with kvpool.Session(opaque, "bytes", socket=daemon.socket) as session, session.lease(1) as blocks:
        np.asarray(blocks.data(0))[:] = 3
        with pytest.raises(kvpool.FailedPreconditionError, match="data"):
            blocks.k(0)
