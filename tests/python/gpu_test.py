"""Memory of a GPU, as the fake driver imitates it: what arrays are told of it."""

import os

import pytest

import kvpool
from conftest import Daemon, layout

FAKE = os.environ.get("KVPOOL_FAKE_CUDA")
pytestmark = pytest.mark.skipif(FAKE is None, reason="built without CUDA")


@pytest.fixture
def daemon(monkeypatch):
    # Two GPUs, and memory on the second.
    monkeypatch.setenv("KVPOOL_LIBCUDA", FAKE)
    monkeypatch.setenv("KVPOOL_FAKE_CUDA_DEVICES", "2")
    daemon = Daemon(device="cuda:1")
    yield daemon
    daemon.close()


def test_views(daemon):
    with kvpool.Session(layout("float16", head_dim=64), "a model", socket=daemon.socket) as session:
        blocks = session.lease(2)
        view = blocks.v(1)
        assert view.device == "cuda:1" and view.__dlpack_device__() == (2, 1)
        assert len(session.device_uuid) == 16 and any(session.device_uuid)
        interface = view.__cuda_array_interface__
        assert interface["data"] == (view.address, False)
        assert interface == {"shape": (2, 16, 3, 64), "strides": view.strides, "typestr": "<f2", "version": 3,
                             "data": (view.address, False), "stream": None}
        plane = 2 * 16 * 3 * 64 * 2
        assert view.address == session.base + blocks.ids[1] * session.block_stride_bytes + plane
        with pytest.raises(BufferError, match="GPU"):
            memoryview(view)
        assert blocks.k(0).bits().__cuda_array_interface__["typestr"] == "<u2"
        session.seal(blocks, session.hasher().chain(range(32), 16)).wait()
        assert blocks.v(1).__cuda_array_interface__["data"][1] is True
        pool = session.k(layer=1, blocks=session.max_blocks).__cuda_array_interface__
        assert pool["shape"] == (session.max_blocks, 16, 3, 64) and pool["strides"][0] == session.block_stride_bytes
        blocks.release()
    with kvpool.Session(layout(), "another", socket=daemon.socket) as session, session.lease(1) as blocks:
        step = session.begin_step()
        with pytest.raises(kvpool.KvpoolError):
            kvpool.BlockArray(session, 100).write(b"abc")
        session.complete_step(step)


def test_bfloat16_goes_by_dlpack(daemon):
    with kvpool.Session(layout("bfloat16"), "a model", socket=daemon.socket) as session, session.lease(1) as blocks:
        assert not hasattr(blocks.k(0), "__cuda_array_interface__")
        assert "capsule" in repr(blocks.k(0).__dlpack__())
