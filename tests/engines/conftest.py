"""Daemons as the tests of client/python have them, and models made from a configuration: nothing is downloaded."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))
from daemon import Daemon
from models import DEVICE

torch.set_num_threads(1)


@pytest.fixture
def daemon():
    daemon = Daemon(capacity="256MiB", slab="16MiB", device=DEVICE)
    yield daemon
    daemon.close()
