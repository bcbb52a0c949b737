"""Daemons, engines and scrapes for the tests beside this file."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request

DEADLINE_S = 60


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def until(what, probe, deadline_s=DEADLINE_S):
    """Polls, because a child process gives no event to wait for."""
    give_up = time.monotonic() + deadline_s
    while time.monotonic() < give_up:
        result = probe()
        if result:
            return result
        time.sleep(0.05)
    raise TimeoutError(f"{what}: not within {deadline_s} s")


def samples(text):
    """{'name{label="value",…}': value} of a scrape."""
    return {series: float(value) for series, value in re.findall(r"^([a-z]\S*) (\S+)$", text, re.MULTILINE)}


class Programs:
    """Child processes that end with the test."""

    def __init__(self):
        self.children = []

    def start(self, name, log, *command, environment=None):
        with open(log, "a", encoding="utf-8") as output:
            # Python ignores SIGXFSZ, and so do its children here: a file over RLIMIT_FSIZE is an error that they see.
            child = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                                     restore_signals=False, env={**os.environ, **(environment or {})})
        self.children.append((name, child, log))
        return child

    def forget(self, child):
        """No longer supervises a child: it may end, and stop() leaves it alone."""
        self.children = [entry for entry in self.children if entry[1] is not child]

    def check(self):
        for name, child, log in self.children:
            if child.poll() is not None:
                raise RuntimeError(f"{name} ended with {child.returncode}:\n{pathlib.Path(log).read_text()[-2000:]}")
        return True

    def stop(self):
        for _, child, _ in reversed(self.children):
            child.send_signal(signal.SIGTERM)
        for _, child, _ in self.children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class Daemon:
    """kvpoold on host memory, unless its flags say otherwise, in a folder of its own."""

    def __init__(self, programs, bins, folder, *flags, environment=None):
        self.programs, self.bins, self.folder, self.flags, self.environment = programs, bins, folder, flags, environment
        self.socket, self.log = folder / "kvpoold.sock", folder / "kvpoold.log"
        self.start()

    def start(self):
        state = self.folder / "kvpoold.json"
        state.unlink(missing_ok=True)
        self.launch()
        until("kvpoold.json", lambda: self.programs.check() and state.exists())
        said = json.loads(state.read_text(encoding="utf-8"))
        self.port, self.pid = said["metrics_port"], said["pid"]  # With a keeper, `process` is the keeper.

    def launch(self):
        self.process = self.programs.start("kvpoold", self.log, self.bins / "kvpoold", "--device=host", f"--socket={self.socket}",
                                           f"--state-dir={self.folder}", "--metrics-listen=127.0.0.1:0", *self.flags, environment=self.environment)

    def kill(self):
        self.programs.forget(self.process)
        self.process.kill()
        self.process.wait()

    def scrape(self):
        return get(f"http://127.0.0.1:{self.port}/metrics")

    def ctl(self, *words):
        """The answer of kvpoolctl, as JSON."""
        done = subprocess.run([self.bins / "kvpoolctl", f"--socket={self.socket}", "--json", *words], capture_output=True, text=True,
                              check=True)
        return json.loads(done.stdout)

    def replay(self, *flags):
        """Starts engine processes that serve generated conversations and check their blocks."""
        return self.programs.start("kvpool-replay", self.folder / "replay.log", self.bins / "kvpool-replay",
                                   "--workload=conversation", "--layout=opaque", f"--socket={self.socket}", *flags)

    def engine(self, what):
        """Starts an engine that does one thing (engine.py)."""
        return self.programs.start("engine.py", self.folder / "engine.log", sys.executable, "-B", pathlib.Path(__file__).with_name("engine.py"),
                                   self.bins.parent / "lib/libkvpool.so", self.socket, what, environment=self.environment)
