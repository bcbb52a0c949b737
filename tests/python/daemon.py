"""A real kvpoold for tests: its own process and directory, gone with its object."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

BIN = pathlib.Path(os.environ["KVPOOL_BIN"])


class Daemon:
    """A process of its own, with a directory of its own. `environment` is added to the test's."""

    def __init__(self, capacity="64MiB", slab="4MiB", device="host", environment=None, flags=()):
        self.directory = tempfile.TemporaryDirectory(prefix="kvpool-python-")
        self.path = pathlib.Path(self.directory.name)
        self.socket = str(self.path / "kvpoold.sock")
        self.environment = {**os.environ, **(environment or {})}
        self.command = [BIN / "kvpoold", f"--device={device}", f"--capacity={capacity}", f"--slab-bytes={slab}",
                        f"--socket={self.socket}", f"--state-dir={self.path}", "--metrics-listen=127.0.0.1:0",
                        "--shutdown-grace=200ms", *flags]
        self.start()

    def start(self):
        """Also again, once it is dead."""
        with open(self.path / "log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.environment)
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


class KeptDaemon(Daemon):
    """Its process is the keeper."""

    def __init__(self, **more):
        super().__init__(flags=["--keeper=on", "--keeper-deaths=1000000"], **more)

    def pid(self):
        return json.loads((self.path / "kvpoold.json").read_text())["pid"]

    def kill_daemon(self):
        """The next one may not be there yet. One that serves says so in its file a little later."""
        until = time.monotonic() + 60
        while True:
            try:
                return os.kill(self.pid(), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                assert time.monotonic() < until, self.log()
                time.sleep(0.005)

    def close(self):
        self.kill()  # The keeper: nobody starts another.
        self.kill_daemon()  # It goes on without its keeper.
        self.directory.cleanup()
