"""A kvpoold and engines as processes of their own: what a check starts, asks, kills and ends."""

import contextlib
import json
import os
import pathlib
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from kvpool import programs

_ANSWER_BYTES = 1 << 16  # What is read of an engine's answer at a time.


def _program(name: str) -> str:
    """That of $KVPOOL_BIN, as a build has it, or the wheel's own."""
    return os.path.join(folder, name) if (folder := os.environ.get("KVPOOL_BIN")) else programs.path(name)


class Daemon:
    """A kvpoold with a directory of its own, gone with it. `environment` is added to the caller's."""

    def __init__(self, capacity: str = "64MiB", slab: str = "4MiB", device: str = "host", environment: Mapping[str, str] | None = None,
                 flags: Sequence[str] = ()) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="kvpool-python-")
        self.path = pathlib.Path(self.directory.name)
        self.socket = str(self.path / "kvpoold.sock")
        self.environment = {**os.environ, **(environment or {})}
        self.command = [_program("kvpoold"), f"--device={device}", f"--capacity={capacity}", f"--slab-bytes={slab}",
                        f"--socket={self.socket}", f"--state-dir={self.path}", "--metrics-listen=127.0.0.1:0",
                        "--shutdown-grace=200ms", *flags]
        self.start()

    def start(self) -> None:
        """Also again, once it is dead."""
        with open(self.path / "log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.environment)
        healthy = subprocess.run([_program("kvpoolctl"), f"--socket={self.socket}", "health", "--wait=60s"],
                                 capture_output=True, text=True)
        assert healthy.returncode == 0, healthy.stderr + self.log()

    def log(self) -> str:
        return (self.path / "log").read_text()

    def ctl(self, *words: str) -> Any:
        """What kvpoolctl says, as JSON."""
        done = subprocess.run([_program("kvpoolctl"), f"--socket={self.socket}", "--json", *words], capture_output=True,
                              text=True, check=True)
        return json.loads(done.stdout)

    def stop(self) -> None:
        """By SIGSTOP. Its other threads run on until one of them has taken the signal: this returns once all stand still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.directory.cleanup()


class EngineRefused(Exception):
    """Its answer is an error."""


class EngineEnded(Exception):
    """It ended, or said something that is no answer."""


class EngineSilent(Exception):
    """No answer came in time."""


class Process:
    """A process with all that it starts."""

    def __init__(self, command: Sequence[str | os.PathLike[str]], **more: Any) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **more)
        self._killed = False

    def kill(self) -> None:
        """All of it, at once; again it does nothing, for the number may be another's by then."""
        if not self._killed:
            self._killed = True
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


class Engine(Process):
    """A process that answers by lines of JSON, as README.md beside this file says.

    timeout  seconds that an answer may take
    log      a file for what it writes on stderr, closed with it, from which its last words are taken; None: the caller's stderr
    """

    def __init__(self, command: Sequence[str | os.PathLike[str]], environment: Mapping[str, str] | None = None, *, timeout: float | None = None,
                 log: IO[bytes] | None = None) -> None:
        super().__init__(command, stdin=subprocess.PIPE, stderr=log, env={**os.environ, **(environment or {})})
        self._timeout, self._log = timeout, log
        self._read = b""
        self._start: dict[str, Any] | None = None

    def start(self) -> dict[str, Any]:
        """What it says of itself, once it is ready."""
        if self._start is None:
            self._start = self.answer()
        return self._start

    def tell(self, do: str, **what: Any) -> None:
        """Asks, and waits for nothing: answer() does."""
        self.start()
        try:
            self._stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        line = self._line()
        try:
            said = json.loads(line)
        except ValueError:
            raise EngineEnded(f"it said {line[:200]!r}, which is no JSON") from None
        if "error" in said:
            raise EngineRefused(said["error"])
        return dict(said)

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.tell(do, **what)
        return self.answer()

    def generate(self, prompts: Sequence[Sequence[int]], **what: Any) -> dict[str, Any]:
        return self.ask("generate", prompts=prompts, **what)

    def close(self) -> int:
        """Its orderly end. Returns its exit status."""
        self._stdin.close()
        try:
            return self.process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            raise EngineSilent(f"it has not ended {self._timeout:g} s after its input did") from None

    def kill(self) -> None:
        super().kill()
        for file in (self._stdin, self._stdout, self._log):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):  # Of a question that it did not read.
                    file.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def _line(self) -> bytes:
        until = None if self._timeout is None else time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(None if until is None else max(until - time.monotonic(), 0)):
                    raise EngineSilent(f"no answer within {self._timeout:g} s")
                got = os.read(self._stdout.fileno(), _ANSWER_BYTES)
                if not got:
                    raise self._ended()
                self._read += got
        line, self._read = self._read.split(b"\n", 1)
        return line

    def _ended(self) -> EngineEnded:
        self.process.wait()
        words = []
        if self._log is not None:
            self._log.seek(0)
            words = self._log.read().decode(errors="replace").strip().splitlines()[-3:]
        return EngineEnded(f"it ended, with status {self.process.returncode}, without an answer" + (f": {' / '.join(words)}" if words else ""))
