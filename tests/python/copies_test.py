"""Copies between a GPU, as the fake driver imitates it, and host memory."""

import os
import subprocess
import sys

import numpy as np
import pytest

import kvpool
from fake_gpu import FAKE

pytestmark = pytest.mark.skipif(FAKE is None, reason="built without CUDA")


@pytest.fixture
def copier(gpu):
    copier = kvpool.BlockCopier(0)
    yield copier
    copier.close()


def ranges(*rows):
    return np.array(rows, np.uint64)


def test_both_ways(gpu, copier):
    device, host = gpu.alloc(8192), np.arange(8192, dtype=np.uint8)
    address = host.ctypes.data
    copier.to_device(ranges((device, address + 4096, 4096), (device + 4096, address, 4096))).wait()
    assert (gpu.read(device, 8192) == np.roll(host, 4096)).all()
    back = np.zeros_like(host)
    point = copier.to_host(ranges((device, back.ctypes.data, 8192)))
    point.wait()
    assert point.done and (back == np.roll(host, 4096)).all()


def test_a_copy_waits_for_its_point(gpu, copier):
    device, host = gpu.alloc(4096), np.zeros(4096, np.uint8)
    gate = gpu.hold_up()
    gpu.fill(device, 7, 4096)
    copied = copier.to_host(ranges((device, host.ctypes.data, 4096)), copier.record(gpu.stream))
    assert not copied.done
    gate.set()
    copied.wait()
    assert (host == 7).all()


def test_memory_is_locked_until_it_is_closed(gpu):
    memory = np.zeros(16384, np.uint8)
    copier = kvpool.BlockCopier(0)
    copier.register_host(memory.ctypes.data, 16384)
    assert gpu.is_page_locked(memory.ctypes.data)
    with pytest.raises(kvpool.KvpoolError, match="ALREADY_REGISTERED"):
        copier.register_host(memory.ctypes.data, 16384)
    copier.close()
    copier.close()
    assert not gpu.is_page_locked(memory.ctypes.data)
    with pytest.raises(kvpool.ReleasedError):
        copier.record(gpu.stream)


def test_what_is_refused(gpu, copier):
    device, host = gpu.alloc(4096), np.zeros(4096, np.uint8)
    with pytest.raises(kvpool.InvalidArgumentError, match=r"ranges\[1\] has no bytes"):
        copier.to_host(ranges((device, host.ctypes.data, 1), (device, host.ctypes.data, 0)))
    with pytest.raises(TypeError):
        copier.to_host(np.zeros((4, 2), np.uint64))
    with pytest.raises(kvpool.KvpoolError, match="CUDA_ERROR_INVALID_VALUE"):
        copier.to_host(ranges((0, host.ctypes.data, 1)))
    with pytest.raises(kvpool.NotFoundError):
        kvpool.BlockCopier(7)


def test_a_gpu_whose_processes_share_a_server_is_refused():
    """The server would go on with the copies of one that was killed, into blocks that others have by then."""
    done = subprocess.run([sys.executable, "-c", "import kvpool; kvpool.BlockCopier(0)"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "KVPOOL_LIBCUDA": FAKE, "KVPOOL_FAKE_CUDA_WITHOUT": "own-context"})
    assert done.returncode == 1 and "share a server (MPS), which goes on with the work of one that was killed" in done.stderr
