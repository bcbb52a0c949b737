"""A real kvpoold for each test that asks for one, gone with it."""

import signal
import subprocess
import sys

import pytest

import kvpool
from daemon import Daemon
from fake_gpu import FAKE, FakeGpu


@pytest.fixture
def daemon():
    daemon = Daemon()
    yield daemon
    daemon.close()


def layout(dtype="float32", **changes):
    return kvpool.Layout.paged(**{"layers": 2, "kv_heads": 3, "head_dim": 8, "tokens_per_block": 16, "dtype": dtype,
                                  **changes})


@pytest.fixture
def session(daemon):
    with kvpool.Session(layout(), "a model", socket=daemon.socket) as session:
        yield session


def in_child(code, daemon, *arguments):
    """Runs Python code as another process: `socket` and `arguments` are in its sys.argv. Returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code, daemon.socket, *map(str, arguments)], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_9(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def gpu(monkeypatch):
    """The fake driver's GPU, for this process."""
    monkeypatch.setenv("KVPOOL_LIBCUDA", FAKE)
    return FakeGpu()
