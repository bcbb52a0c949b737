"""Records what real daemons export while engines come, go, hang and die, for the rule tests. Usage: record.py BIN [SCENE...]

Scenes run side by side, most of them for 20 minutes, scraped every 15 s as the PodMonitor does; recordings/SCENE.json gets the series that
rules.yaml reads, in promtool's notation. promtool_test.py says which alerts fire on them and when. Not a test: run it when the daemon's
metrics or the rules that read them change, and look at what is different.
"""

import base64
import contextlib
import json
import os
import pathlib
import re
import resource
import secrets
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time

from programs import Daemon, Programs, samples

INTERVAL_S = 15
HERE = pathlib.Path(__file__).resolve().parent


def engines(daemon):
    """(session, pid) of the engines, the one that holds most first."""
    sessions = daemon.ctl("sessions")["sessions"]
    sessions.sort(key=lambda session: -int(session["leased"]) - int(session["referenced"]))
    return [(session["session"], int(session["members"][0]["pid"])) for session in sessions if not session["ended"]]


class Scene:
    """What happens to one daemon. `steps` are (minute, what to do); `targets` is what Prometheus scrapes at the moment."""
    minutes = 20
    flags = ("--capacity=64MiB", "--slab-bytes=8MiB")
    environment = None

    def __init__(self, programs, bins, folder):
        self.programs, self.bins, self.folder, self.stopped, self.ended = programs, bins, folder, [], False
        self.targets = {}
        self.daemon = self.begin(folder.name)
        self.steps = self.plan()

    def begin(self, name):
        """A daemon, and a target."""
        folder = self.folder / name
        folder.mkdir()
        daemon = self.targets[f"{name}:9400"] = Daemon(self.programs, self.bins, folder, *self.flags, environment=self.environment)
        return daemon

    def leave(self):
        """The first daemon ends, and service discovery drops it."""
        self.targets.pop(f"{self.folder.name}:9400")
        self.programs.forget(self.daemon.process)
        self.daemon.process.terminate()
        self.daemon.process.wait()

    def scrape(self):
        """{series: value} of all targets."""
        found = {}
        for instance, daemon in list(self.targets.items()):
            try:
                scraped = {"up": 1, **samples(daemon.scrape())}
            except OSError:
                scraped = {"up": 0}
            for series, value in scraped.items():
                metric, _, labels = series.rstrip("}").partition("{")
                labels = ",".join(filter(None, ['job="kvpool"', f'instance="{instance}"', labels]))
                found[f"{metric}{{{labels}}}"] = value
        return found

    def plan(self):
        return []

    def load(self, *flags):
        self.replay = self.daemon.replay(*flags)

    def stop_engines(self, count):
        for session, pid in engines(self.daemon)[:count]:
            self.session = session
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append(pid)

    def end(self):
        self.ended = True
        for pid in self.stopped:
            os.kill(pid, signal.SIGKILL)


class Steady(Scene):
    """Two engines serve conversations in real time, in a pool that is large enough."""

    def plan(self):
        return [(0, lambda: self.load("--time-scale=1", "--engines=2", "--decode"))]


class Idle(Scene):
    """Engines that are well and have nothing to do."""

    def plan(self):
        return [(0, lambda: self.load("--time-scale=1000", "--engines=2"))]


class Hung(Scene):
    """Two engines of three stop for good while the pool is short, and the third halts behind them; then an operator ends a session."""
    flags = ("--capacity=2MiB", "--slab-bytes=2MiB")

    def plan(self):
        return [(0, lambda: self.load("--time-scale=0.1", "--engines=3", "--decode", "--magazine=240")), (2, lambda: self.stop_engines(2)),
                (10, lambda: self.daemon.ctl("end", f"--session={self.session}"))]


class Held(Scene):
    """Two engines of three stop for good with so much in their hands that the third takes all the rest, and wants more."""
    flags = ("--capacity=2MiB", "--slab-bytes=2MiB")

    def stop_when_held(self):
        while not self.ended:
            self.stop_engines(2)
            for _ in range(5):
                time.sleep(1)
                counts = self.daemon.ctl("status")["blocks"]
                if int(counts["free"]) + int(counts["cached"]) > 0.02 * int(counts["capacity"]):
                    break
            else:
                return
            while self.stopped:
                os.kill(self.stopped.pop(), signal.SIGCONT)
            time.sleep(0.5)

    def plan(self):
        return [(0, lambda: self.load("--time-scale=0.1", "--engines=3", "--decode", "--magazine=240")), (1, self.stop_when_held)]


class Loop(Scene):
    """The same requests over and over, a little more than the pool holds, under LRU: what leaves is asked for next."""
    flags = ("--capacity=16MiB", "--slab-bytes=8MiB", "--policy=lru")

    def again(self):
        while not self.ended:
            self.load("--time-scale=0.2", "--requests=200", "--run=00")
            self.programs.forget(self.replay)
            self.replay.wait()

    def plan(self):
        return [(0, self.again)]


class Crowd(Scene):
    """Eight engines prune at once, twice a minute, where four operations may wait for the device."""
    flags = ("--capacity=64MiB", "--slab-bytes=8MiB", "--score-queue=4", "--score-threads=1")

    def prune(self):
        example = self.daemon.bins / "pruning_example"
        for _ in range(4):
            engines_at_once = [subprocess.Popen([example], env={**os.environ, "KVPOOL_SOCKET": str(self.daemon.socket)},
                                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(8)]
            for engine in engines_at_once:
                engine.wait()

    def plan(self):
        return [(2 + 0.5 * i, self.prune) for i in range(36)]


class Off(Scene):
    """An engine prunes once a minute by a policy that the guard turns off, until an operator lets it prune some more."""
    flags = (*Scene.flags, "--guard-share=1", "--guard-bound=0.0001", "--guard-samples=16")

    def prune(self):
        subprocess.run([self.daemon.bins / "pruning_example"], env={**os.environ, "KVPOOL_SOCKET": str(self.daemon.socket)},
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    def plan(self):
        return [*((minute, self.prune) for minute in range(2, 10)), (15, lambda: self.daemon.ctl("guard", "--on=paged_eviction"))]


class Drain(Scene):
    """A drain that engines with nothing to do don't follow."""
    minutes = 35

    def plan(self):
        return [(0, lambda: self.load("--time-scale=1000", "--engines=2")), (1, lambda: self.daemon.ctl("drain"))]


class Crashes(Scene):
    """Engines are killed over and over; then the daemon, twice, and at last it stays away."""

    def plan(self):
        def no_engines():
            self.programs.forget(self.replay)
            self.replay.terminate()
            self.replay.wait()

        return [(0, lambda: self.load("--time-scale=1", "--engines=2", "--kill-every=100")), (6, no_engines),
                (8, self.daemon.kill), (8.5, self.daemon.start), (12, self.daemon.kill), (12.5, self.daemon.start), (17, self.daemon.kill)]


class Thrash(Scene):
    """A working set of many times the pool."""
    flags = ("--capacity=16MiB", "--slab-bytes=8MiB")

    def plan(self):
        return [(0, lambda: self.load("--time-scale=0.3", "--engines=2"))]


class Faults(Scene):
    """No file may grow from the second minute on, which ends the event log and the growth of spaces; somebody speaks nonsense on the
    attach socket; and nearly all of the pin budget is spent."""

    def __init__(self, programs, bins, folder):
        self.flags = ("--capacity=64MiB", "--slab-bytes=8MiB", "--pin-budget=0.001", f"--event-log={folder}/events")
        super().__init__(programs, bins, folder)

    def limit(self):
        resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE, (65536, 65536))

    def nonsense(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(f"{self.daemon.socket}.attach")
            peer.send(b"\xff" * 64)
            peer.recv(4096)

    def pin(self):
        budget = int(self.daemon.ctl("spaces")["spaces"][0]["pin_budget_blocks"])
        for block in self.daemon.ctl("blocks", "--space=1", "--state=cached", "--limit=5000")["blocks"]:
            key = base64.b64decode(block["key"]).hex()
            chain = self.daemon.ctl("explain", "--space=1", f"--block={block['block']}")["blocks"]
            if len(chain) == budget:
                self.daemon.ctl("pin", f"--key={key}", "--ttl=1h")
                return

    def plan(self):
        return [(0, lambda: self.load("--time-scale=1", "--engines=2")), (1, self.limit), (2, self.pin)] + [
            (2 + 0.5 * i, self.nonsense) for i in range(36)]


class Below(Scene):
    """A working set of many times the pool, and a folder below it that keeps up."""
    minutes = 36

    def __init__(self, programs, bins, folder):
        self.flags = ("--capacity=4MiB", "--slab-bytes=2MiB", f"--tier=file:{folder}/tier,capacity=64MiB")
        super().__init__(programs, bins, folder)

    def plan(self):
        return [(0, lambda: self.load("--time-scale=1", "--engines=2", "--wait-ms=1000"))]


class Spoilt(Below):
    """The same, and something writes over all that is in the folder in the fourth minute; in the sixteenth the disk takes no more."""
    minutes = 20

    def spoil(self):
        for path in (self.folder / "tier").glob("*.slots"):
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 4)  # Behind the header.
                file.write(secrets.token_bytes(path.stat().st_size - file.tell()))

    def refuse(self):
        resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))

    def plan(self):
        return [*super().plan(), (4, self.spoil), (16, self.refuse)]


class Store(socketserver.ThreadingTCPServer):
    """As much of a Redis as a tier asks for. It takes ten values a second, and has none of them later."""
    daemon_threads = True
    answers = {b"SET": b"+OK\r\n", b"GET": b"$-1\r\n", b"EXISTS": b":0\r\n"}

    class Peer(socketserver.StreamRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionError):
                while head := self.rfile.readline():
                    verb = [self.rfile.read(int(self.rfile.readline()[1:]) + 2) for _ in range(int(head[1:]))][0][:-2]
                    if verb == b"SET":
                        with self.server.turn:
                            time.sleep(0.1)
                    self.wfile.write(self.server.answers.get(verb, b"+OK\r\n"))

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.Peer)
        self.turn = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Behind(Scene):
    """A working set of many times the pool, and a store below it that takes ten values a second."""
    minutes = 33

    def __init__(self, programs, bins, folder):
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(32))
        key.chmod(0o600)
        # What is on its way at a time comes before it is late.
        self.flags = ("--capacity=32MiB", "--slab-bytes=32MiB", "--tier-buffer=1MiB", f"--tier-key-file={key}",
                      f"--tier=resp:127.0.0.1:{Store().server_address[1]},cluster=off")
        super().__init__(programs, bins, folder)

    def plan(self):
        return [(0, lambda: self.load("--time-scale=1", "--engines=2", "--block-bytes=65536"))]


class Stale(Scene):
    """An engine goes on to name blocks of a session that has ended."""

    def plan(self):
        return [(2, lambda: self.daemon.engine("stale"))]


class Slow(Scene):
    """An engine asks for prefixes of 8,192 blocks, while the daemon gets a tenth of a processor from the third minute on."""

    def throttle(self):
        while not self.ended:
            self.daemon.process.send_signal(signal.SIGSTOP)
            time.sleep(0.09)
            self.daemon.process.send_signal(signal.SIGCONT)
            time.sleep(0.01)

    def plan(self):
        return [(0, lambda: self.daemon.engine("long")), (3, self.throttle)]


class Failing(Scene):
    """A GPU makes two slabs, and fails from then on; the driver is an imitation. Three engines can't open a session."""
    flags = ("--device=cuda:0", "--capacity=64MiB", "--slab-bytes=8MiB")

    def __init__(self, programs, bins, folder):
        self.environment = {"KVPOOL_LIBCUDA": str(bins.parent / "lib/fake_cuda/libcuda.so.1"),
                            "KVPOOL_FAKE_CUDA_FAIL": "cuMemCreate#3+=CUDA_ERROR_UNKNOWN"}
        super().__init__(programs, bins, folder)

    def open(self):
        engine = self.daemon.engine("open")
        self.programs.forget(engine)
        engine.wait()

    def plan(self):
        return [(minute, self.open) for minute in (1, 3, 5, 5.5, 6)]


class Leaves(Scene):
    """Of two daemons one ends, and service discovery drops it."""
    minutes = 30

    def plan(self):
        self.begin("stays")
        return [(10, self.leave)]


class Absent(Scene):
    """The only daemon ends, and service discovery drops it."""
    minutes = 30

    def plan(self):
        return [(10, self.leave)]


class Rollout(Scene):
    """A daemon ends, and another one takes its place."""
    minutes = 30

    def plan(self):
        return [(10, lambda: self.begin("next")), (10.5, self.leave)]


class Orphan(Scene):
    """The keeper of a daemon is killed. Four minutes later the same command is started again, and takes over from the daemon."""
    minutes = 10
    flags = (*Scene.flags, "--keeper=on")

    def plan(self):
        return [(2, self.daemon.kill), (6, self.daemon.launch)]


SCENES = {scene.__name__.lower(): scene for scene in (
    Steady, Idle, Thrash, Loop, Hung, Held, Crowd, Off, Drain, Crashes, Faults, Below, Spoilt, Behind, Stale, Slow, Failing, Leaves, Absent,
    Rollout, Orphan)}


def number(value):
    return str(int(value)) if value == int(value) else repr(value)


def notation(values):
    """promtool's: `1x3` is 1 1 1 1; a series that a scrape does not have any more is stale, and then missing: `stale _x2`."""
    words, i = [], 0
    while i < len(values):
        run = 1
        while i + run < len(values) and values[i + run] == values[i]:
            run += 1
        if values[i] is None:
            missing = run - (i > 0)
            words.append(" ".join(["stale"] * (i > 0) + [f"_x{missing}"] * (missing > 0)))
        else:
            words.append(number(values[i]) + (f"x{run - 1}" if run > 1 else ""))
        i += run
    return " ".join(words)


def recorded(scrapes, wanted):
    series = {}
    for i, scrape in enumerate(scrapes):
        for name, value in scrape.items():
            series.setdefault(name, [None] * len(scrapes))[i] = value
    found = {}
    for name, values in sorted(series.items()):
        metric = name.partition("{")[0]
        base = re.sub(r"_(bucket|sum|count)$", "", metric)
        # A histogram's series of a method that nobody calls, and errors that nobody meets.
        quiet = (base != metric or metric == "kvpool_rpc_errors_total") and not any(values)
        if metric in wanted and not quiet:
            found[name] = notation(values)
    return found


def main(bins, names):
    wanted = set(re.findall(r"\b(?:kvpool_[a-z0-9_]+|up)\b", (HERE.parents[1] / "deploy/prometheus/rules.yaml").read_text()))
    programs = Programs()
    with tempfile.TemporaryDirectory() as folder:
        scenes = {}
        for name in names:
            (pathlib.Path(folder) / name).mkdir()
            scenes[name] = SCENES[name](programs, bins, pathlib.Path(folder) / name)
        scrapes = {name: [] for name in names}
        begun = time.monotonic()
        timers = [threading.Timer(minute * 60 + 1, act) for scene in scenes.values() for minute, act in scene.steps]
        for timer in timers:
            timer.start()
        try:
            last = max(scene.minutes for scene in scenes.values()) * 60 // INTERVAL_S
            for i in range(last + 1):
                time.sleep(max(0, begun + i * INTERVAL_S - time.monotonic()))
                for name, scene in scenes.items():
                    if i * INTERVAL_S <= scene.minutes * 60:
                        scrapes[name].append(scene.scrape())
                print(f"scrape {i} of {last}", flush=True)
        finally:
            for timer in timers:
                timer.cancel()
            for scene in scenes.values():
                scene.end()
            programs.stop()
    for name in names:
        recording = {"scene": SCENES[name].__doc__, "minutes": SCENES[name].minutes, "interval": f"{INTERVAL_S}s",
                     "series": recorded(scrapes[name], wanted)}
        (HERE / "recordings" / f"{name}.json").write_text(json.dumps(recording, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] or list(SCENES)))
