"""vLLM as processes, for tests in an environment without it: engines that answer by lines (vllm_engine.py), and servers by HTTP.

tests/engines.sh --vllm names the Python that has vLLM in KVPOOL_VLLM_PYTHON.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

from kvpool.conform import processes

PYTHON = os.environ.get("KVPOOL_VLLM_PYTHON")
# Another vLLM in front of that Python's: vllm_versions.sh.
OVERLAY = {"PYTHONPATH": path} if (path := os.environ.get("KVPOOL_VLLM_PATH")) else {}
HERE = pathlib.Path(__file__).parent
BLOCK = 32
# On a machine that is busy with other tests a daemon may take long to answer, and a prefix has to be found all the same.
PATIENT = {"match_timeout": 60, "open_timeout": 120}


class Engine(processes.Engine):
    """A process with a vLLM. `pool`: options of additional_config.kvpool; None: stock vLLM. `under`: a command to run it by."""

    def __init__(self, model, pool=None, environment=None, script=HERE / "vllm_engine.py", under=(), **more):
        super().__init__(
            [*under, PYTHON, script, json.dumps({"model": str(model), "pool": pool and PATIENT | pool, **more})],
            {**OVERLAY, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", **(environment or {})})

    def started(self):
        """The process id."""
        return self.start()["ready"]

    def refused(self):
        """Why it did not start."""
        try:
            said = self.start()
        except processes.EngineRefused as error:
            return str(error)
        raise AssertionError(f"it started: {said}")


@contextlib.contextmanager
def engines(model, **usual):
    """A function that starts engines, which end with this."""
    started = []

    def start(pool=None, model=model, **more):
        started.append(Engine(model, pool, **{**usual, **more}))
        return started[-1]

    try:
        yield start
    finally:
        for engine in started:
            engine.kill()


class Server(processes.Process):
    """A `vllm serve`: its HTTP process, its engine core and its worker."""

    def __init__(self, model, pool, log, *flags, environment=None, connector=False):
        """connector: KvPoolConnector with these options, in place of the scheduler."""
        # Bound here too, though not listening: the port is nobody else's until the server has it.
        self._claim = socket.socket()
        self._claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._claim.bind(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._claim.getsockname()[1]}"
        self.model, self._log, self._up = str(model), log, threading.Event()
        pool = PATIENT | pool
        kvpool = (["--kv-transfer-config", json.dumps({"kv_connector": "KvPoolConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                                                       "kv_connector_extra_config": pool})] if connector
                  else ["--scheduler-cls", "kvpool_vllm.Scheduler", "--additional-config", json.dumps({"kvpool": pool})])
        # By its module: the command `vllm` asks for the version of a package of that name, and vLLM's build for CPUs has another.
        super().__init__(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port",
             self.address.rsplit(":")[-1], *kvpool, "--enable-prompt-tokens-details", "--skip-tokenizer-init", "--enforce-eager",
             "--dtype=bfloat16", f"--block-size={BLOCK}", "--max-model-len=1024", "--kv-cache-memory-bytes=64M", *flags],
            stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **OVERLAY, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
                 **(environment or {})})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with open(self._log, "w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if "Application startup complete" in line:
                    self._up.set()
        self._up.set()

    def started(self):
        self._up.wait()
        deadline = time.monotonic() + 60
        while True:  # It says so before it listens.
            assert self.process.poll() is None, self._log.read_text()[-5000:]
            try:
                return urllib.request.urlopen(f"{self.address}/health").close()
            except urllib.error.URLError:
                assert time.monotonic() < deadline, self._log.read_text()[-5000:]
                time.sleep(0.1)

    def post(self, path, headers=None, **what):
        request = urllib.request.Request(f"{self.address}{path}", json.dumps(what).encode(), {"Content-Type": "application/json", **(headers or {})})
        with urllib.request.urlopen(request) as answer:
            return answer.read()

    def complete(self, prompt, tokens=20, model=None, engine=None):
        """(token ids, how many of the prompt's were cached). `model`: an adapter's name; `engine`: which of a data-parallel server's."""
        headers = None if engine is None else {"X-data-parallel-rank": str(engine)}
        said = json.loads(self.post("/v1/completions", headers, model=model or self.model, prompt=prompt, max_tokens=tokens, temperature=0,
                                    ignore_eos=True, return_token_ids=True))
        return said["choices"][0]["token_ids"], said["usage"]["prompt_tokens_details"]["cached_tokens"]

    def kill(self):
        super().kill()
        self._reader.join()
        self._claim.close()


def prompts(count, seed, shortest=1, longest=600, shared=0):
    """Random token ids; `shared` of each are the same."""
    dice = random.Random(seed)
    first = [dice.randrange(1, 512) for _ in range(shared)]
    return [first + [dice.randrange(1, 512) for _ in range(dice.randint(shortest, longest))] for _ in range(count)]


def whole_blocks(prompt):
    """Tokens of it that can be found: the last one is always computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def await_blocks(daemon, state, count):
    """A worker's word that a step is done, and so the seals of its blocks, comes behind the answer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        (space,) = daemon.ctl("spaces")["spaces"]
        if int(space["blocks"].get(state, 0)) >= count:
            return
    raise AssertionError(f"{count} {state} blocks were to come: {space}")


def assert_nothing_is_held(*engines):
    for engine in engines:
        facts = engine.ask("facts")
        assert (facts["in_use"], facts["waiting"], facts["session"]["refused"], facts["detached"]) == (0, 0, 0, False), facts


def assert_two_share_a_pool_that_is_too_small(daemon, stock, start, count, seeds):
    """Each computes what the other has just computed, at once: requests are preempted, and what was found is taken away."""
    both = [start({"socket": daemon.socket}) for _ in range(2)]
    asked = [prompts(count, seed=seed, shortest=300, shared=100) for seed in seeds]
    own = [stock.generate(some, tokens=100)["tokens"] for some in asked]
    for one in both:
        one.started()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for turn in range(2):
            said = [threads.submit(both[i].generate, asked[i ^ turn], tokens=100) for i in range(2)]
            assert [future.result()["tokens"] for future in said] == [own[turn], own[1 ^ turn]]
    assert sum(one.ask("facts")["preemptions"] for one in both) > 0
    assert_nothing_is_held(*both)


def await_detached(engine):
    """It learns that its daemon is gone when it wants something of it."""
    deadline = time.monotonic() + 60
    while not engine.ask("facts")["detached"]:
        assert time.monotonic() < deadline
        engine.generate([[1, 2, 3]], tokens=64)


def await_shared(engine):
    """It finds the daemon again when it has something to do."""
    deadline = time.monotonic() + 60
    while engine.ask("facts")["detached"]:
        assert time.monotonic() < deadline
        engine.generate([[1, 2, 3]], tokens=4)
