"""Steps that overlap, as on GPUs, in a pool that two engines share and that is too small for both: no block is another's while a step
that is under way reads or writes it, and what is said follows from the prompt. vllm_overlap_engines.py has the engines."""

import contextlib
import json
import os
import subprocess

import pytest

from daemon import Daemon
from vllm_processes import HERE, OVERLAY, PYTHON

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


def run(daemon, model, kill=None, refused=False, tails=0, **asked):
    """What vllm_overlap_engines.py says."""
    asked |= {"model": str(model), "socket": daemon.socket, "kill": kill, "refused": refused, "tails": tails}
    done = subprocess.run([PYTHON, HERE / "vllm_overlap_engines.py", json.dumps(asked)],
                          capture_output=True, text=True,
                          env={**os.environ, **OVERLAY, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def small():
    with contextlib.closing(Daemon(capacity="4MiB", slab="2MiB", flags=("--policy=random",))) as daemon:  # 64 blocks.
        yield daemon


def test_what_a_step_under_way_reads_is_nobody_elses(small, model):
    said = run(small, model, overlap=True, seed=None)
    assert said == {"sealed": 4, "before": 0, "after": 4}


@pytest.mark.parametrize("kill", [False, True], ids=["daemon lives", "daemon dies"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
@pytest.mark.parametrize("seed", [1, 2])
def test_two_engines(small, model, overlap, kill, seed):
    said = run(small, model, overlap=overlap, seed=seed, kill=small.process.pid if kill else None)
    assert said["sealed"] > 0 and said["found"] > 0, said


@pytest.mark.parametrize("kill", [False, True], ids=["daemon lives", "daemon dies"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
@pytest.mark.parametrize("seed", [1, 2])
def test_two_engines_and_a_tier(model, overlap, kill, seed, tmp_path):
    """What they push out of the pool comes back from files, while others of their steps are under way."""
    flags = ("--policy=random", f"--tier=file:{tmp_path}/tier,capacity=64MiB,write=seal")
    with contextlib.closing(Daemon(capacity="4MiB", slab="2MiB", flags=flags)) as daemon:
        said = run(daemon, model, overlap=overlap, seed=seed, kill=daemon.process.pid if kill else None, tails=12)
        assert said["sealed"] > 0 and (kill or said["promoted"] > 0), said
        if not kill:
            (tier,) = daemon.ctl("tier")["tiers"]
            assert int(tier["promoted_blocks"]) > 0, tier


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one by one"])
def test_a_daemon_that_takes_schedulers_and_not_their_workers(small, model, overlap):
    """To try it costs all requests what they have computed: they are over all the same."""
    said = run(small, model, overlap=overlap, seed=1, refused=True)
    assert said["tokens"] > 0 and said["sealed"] == 0, said
