"""The commands that `pip install` makes: each becomes the program of its name, in the same process."""

import os
import pathlib
import sys
from typing import NoReturn


def path(name: str) -> str:
    """Where a program of this package is."""
    return str(pathlib.Path(__file__).with_name("bin") / name)


def _become(name: str) -> NoReturn:
    os.execv(path(name), [name, *sys.argv[1:]])


def kvpoold() -> NoReturn:
    _become("kvpoold")


def kvpoolctl() -> NoReturn:
    _become("kvpoolctl")


def kvpool_replay() -> NoReturn:
    _become("kvpool-replay")


def kvpool_sim() -> NoReturn:
    _become("kvpool-sim")


def kvpool_lab() -> NoReturn:
    _become("kvpool-lab")
