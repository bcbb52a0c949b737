"""A real kvpoold for each test that asks for one, gone with it."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

import kvpool

BIN = pathlib.Path(os.environ["KVPOOL_BIN"])


class Daemon:
    """A process of its own, with a directory of its own. `environment` is added to the test's."""

    def __init__(self, capacity="64MiB", slab="4MiB", device="host", environment=None, flags=()):
        self.directory = tempfile.TemporaryDirectory(prefix="kvpool-python-")
        self.path = pathlib.Path(self.directory.name)
        self.socket = str(self.path / "kvpoold.sock")
        self.environment = {**os.environ, **(environment or {})}
        with open(self.path / "log", "wb") as log:
            self.process = subprocess.Popen(
                [BIN / "kvpoold", f"--device={device}", f"--capacity={capacity}", f"--slab-bytes={slab}",
                 f"--socket={self.socket}", f"--state-dir={self.path}", "--metrics-listen=127.0.0.1:0",
                 "--shutdown-grace=200ms", *flags], stdout=log, stderr=log, env=self.environment)
        healthy = subprocess.run([BIN / "kvpoolctl", f"--socket={self.socket}", "health", "--wait=60s"],
                                 capture_output=True, text=True)
        assert healthy.returncode == 0, healthy.stderr + self.log()

    def log(self):
        return (self.path / "log").read_text()

    def ctl(self, *words):
        """What kvpoolctl says, as JSON."""
        done = subprocess.run([BIN / "kvpoolctl", f"--socket={self.socket}", "--json", *words], capture_output=True,
                              text=True, check=True)
        return json.loads(done.stdout)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.directory.cleanup()


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
