"""A real kvpoold for tests: its own process and directory, gone with its object."""

import contextlib
import json
import os
import signal
import threading
import time

from kvpool.conform.processes import Daemon


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

    @contextlib.contextmanager
    def killed_every(self, seconds):
        """Yields the number of kills so far, in a list."""
        over, kills = threading.Event(), [0]

        def kill():
            while not over.wait(seconds):
                self.kill_daemon()
                kills[0] += 1

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield kills
        finally:
            over.set()
            thread.join()

    def close(self):
        self.kill()  # The keeper: nobody starts another.
        self.kill_daemon()  # It goes on without its keeper.
        self.directory.cleanup()
