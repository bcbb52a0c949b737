"""Daemons as the tests of client/python have them, models made from a configuration, and engines with vLLM that run them: nothing is
downloaded."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))
from daemon import Daemon
from models import DEVICE, llama
from vllm_processes import engines

torch.set_num_threads(1)


@pytest.fixture
def daemon():
    daemon = Daemon(capacity="256MiB", slab="16MiB", device=DEVICE)
    yield daemon
    daemon.close()


# ---- vLLM


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two directories, of models that differ in their weights."""
    directory = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        llama(seed, head_dim=32).save_pretrained(directory / str(seed))
    return directory


@pytest.fixture(scope="module")
def model(models):
    """What the engines of a module run, unless it has another."""
    return models / "0"


def _usual(module):
    """What all engines of a module are given."""
    return getattr(module, "USUAL", {})


@pytest.fixture
def engine(request, model):
    """A function that starts engines, which end with the test."""
    with engines(model, **_usual(request.module)) as start:
        yield start


@pytest.fixture(scope="module")
def stock(request, model):
    """An engine with vLLM's own KV cache."""
    with engines(model, **_usual(request.module)) as start:
        yield start()
