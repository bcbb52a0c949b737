"""What K and V depend on changes while an engine runs: nobody takes what was computed with other weights, or with another adapter."""

import functools
import pathlib
import shutil

import pytest

from models import adapter
from vllm_processes import PYTHON, assert_nothing_is_held, engines, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


@pytest.fixture(scope="module")
def stocks(models):
    """[before, {way: after}], which differ in their weights."""
    with engines(models / "0") as start:
        before, after = start(), {way: start() for way in ("reload_weights", "load_weights")}
        for way, each in after.items():
            each.ask("change_weights", directory=str(models / "1"), way=way)
        yield before, after | {"a function": after["reload_weights"]}


def by_both(daemon, engine, how):
    """Engines of a kind: on the pool, or with the connector."""
    where = {"socket": daemon.socket}
    return [engine(pool=where) if how == "pool" else engine(connector=where) for _ in range(2)]


@pytest.mark.parametrize("how", ["pool", "connector"])
@pytest.mark.parametrize("way", ["reload_weights", "a function", "load_weights"])
def test_weights_changed_in_place(daemon, models, engine, stocks, how, way):
    first, second = by_both(daemon, engine, how)
    before, after = stocks[0], stocks[1][way]
    asked, fresh = prompts(4, seed=91, shortest=100), prompts(4, seed=92, shortest=100)
    assert first.generate(asked)["tokens"] == before.generate(asked)["tokens"]
    first.ask("flush")
    first.ask("change_weights", directory=str(models / "1"), way=way)
    for some in (asked, fresh):  # What it computed before is not its prefix any more ...
        assert first.generate(some) == {"tokens": after.generate(some)["tokens"], "cached": [0] * 4}
    first.ask("flush")
    # ... though it is the other's, who does not find what comes.
    assert second.generate(asked) == {"tokens": before.generate(asked)["tokens"], "cached": [whole_blocks(prompt) for prompt in asked]}
    assert second.generate(fresh) == {"tokens": before.generate(fresh)["tokens"], "cached": [0] * 4}
    if how == "connector":
        first.ask("reset")  # Of vLLM's own cache: now it finds what it has saved since.
    for some in (asked, fresh):  # Its own it finds.
        assert first.generate(some) == {"tokens": after.generate(some)["tokens"], "cached": [whole_blocks(prompt) for prompt in some]}
    if how == "pool":
        assert_nothing_is_held(first, second)


@pytest.mark.parametrize("how", ["pool", "connector"])
def test_requests_that_were_made_before_and_come_afterwards(daemon, models, engine, stocks, how):
    """vLLM's server makes requests, and their keys, in a thread of its own while the other one changes the weights."""
    first, second = by_both(daemon, engine, how)
    before, after = stocks[0], stocks[1]["load_weights"]
    asked, fresh = prompts(4, seed=96, shortest=100), prompts(4, seed=97, shortest=100)
    assert first.generate(asked)["tokens"] == before.generate(asked)["tokens"]
    first.ask("flush")
    late = first.ask("change_weights_before", prompts=asked + fresh, directory=str(models / "1"), way="load_weights")
    assert late["tokens"] == after.generate(asked + fresh)["tokens"]
    first.ask("flush")
    assert second.generate(fresh) == {"tokens": before.generate(fresh)["tokens"], "cached": [0] * 4}


@pytest.mark.parametrize("how", ["pool", "connector"])
@pytest.mark.parametrize("step", [1, 3, 12])
def test_weights_changed_while_requests_run(daemon, models, engine, stocks, how, step):
    """Such requests go on with what they have, as vLLM has it. Nobody finds any of it."""
    first, second = by_both(daemon, engine, how)
    before, after = stocks[0], stocks[1]["load_weights"]
    asked = prompts(6, seed=93, shortest=100, longest=400)
    first.generate(asked, tokens=60, weights=[str(models / "1"), "load_weights", step])
    first.ask("flush")
    assert second.generate(asked, tokens=60)["tokens"] == before.generate(asked, tokens=60)["tokens"]
    assert first.generate(asked)["tokens"] == after.generate(asked)["tokens"]


@pytest.mark.parametrize("how", ["pool", "connector"])
def test_an_adapter_overwritten_while_it_is_loaded(daemon, engine, tmp_path, how):
    """The engine goes on with what it has loaded: another that loads the new files must not find that under their name."""
    tuned = {"enable_lora": True, "max_lora_rank": 8}
    first, second = by_both(daemon, functools.partial(engine, **tuned), how)
    stock = engine(**tuned)
    path = pathlib.Path(adapter(tmp_path / "tuned", seed=1))
    new = pathlib.Path(adapter(tmp_path / "new", seed=2))
    asked, fresh = prompts(3, seed=94, shortest=100), prompts(3, seed=95, shortest=100)
    old_tokens = stock.generate(asked, lora=["old", str(path)])["tokens"]
    assert first.generate(asked, lora=["tuned", str(path)])["tokens"] == old_tokens
    for file in new.iterdir():
        shutil.copyfile(file, path / file.name)
    said = first.generate(fresh, lora=["tuned", str(path)])  # By the old weights.
    first.ask("flush")
    assert stock.generate(fresh, lora=["old", str(path)])["tokens"] == said["tokens"]
    stock.ask("unload")
    for some in (asked, fresh):
        own = stock.generate(some, lora=["new", str(path)])["tokens"]
        assert second.generate(some, lora=["new", str(path)]) == {"tokens": own, "cached": [0] * 3}
    # Loaded anew, the first one shares it.
    first.ask("unload")
    again = first.generate(fresh, lora=["tuned", str(path)])
    assert again["tokens"] == own
    if how == "pool":
        assert again["cached"] == [whole_blocks(prompt) for prompt in fresh]
