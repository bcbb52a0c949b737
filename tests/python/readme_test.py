"""The examples of client/python/README.md, run as they stand, in order: the second finds what the first one sealed."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

README = pathlib.Path(os.path.dirname(__file__)).parents[1] / "client/python/README.md"


def python_blocks(path):
    """Its ```python blocks, each a program."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def expected(block):
    """What its lines say that they print: `print(...)  # this`."""
    return re.findall(r"^.*\bprint\(.*\)  # (.*)$", block, re.MULTILINE)


def test_examples(daemon):
    blocks = python_blocks(README)
    assert len(blocks) >= 4
    environment = {**os.environ, "KVPOOL_SOCKET": daemon.socket}
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, block + done.stderr
        assert done.stdout.splitlines() == expected(block), block


def test_the_example_finds_its_prefix_the_second_time(daemon):
    example = README.parents[1] / "examples/engine.py"
    environment = {**os.environ, "KVPOOL_SOCKET": daemon.socket}
    said = [subprocess.run([sys.executable, example], env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said == ["0 of 64 blocks were cached\n", "64 of 64 blocks were cached\n"]


def test_it_says_what_there_is():
    """Names of the package that the README mentions exist."""
    import kvpool
    for name in set(re.findall(r"\bkvpool\.([A-Za-z_]\w*)", README.read_text(encoding="utf-8"))):
        assert hasattr(kvpool, name) or importlib.util.find_spec(f"kvpool.{name}"), f"kvpool.{name} does not exist"
