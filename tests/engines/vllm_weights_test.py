"""What K and V depend on changes while an engine runs: nobody takes what was computed with other weights, or with another adapter."""

import functools
import pathlib
import shutil

import pytest

from kvpool.conform import processes
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


TUNED = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory):
    """Directories of two adapters, and a function for what stock vLLM says with one of them."""
    directory = tmp_path_factory.mktemp("adapters")
    one, two = (adapter(directory / name, seed=seed) for name, seed in (("one", 1), ("two", 2)))
    with engines(models / "0") as start:
        own = {path: start(**TUNED) for path in (one, two)}
        yield one, two, lambda path, asked, **more: own[path].generate(asked, lora=["tuned", path], **more)["tokens"]


@pytest.mark.parametrize("how", ["pool", "connector"])
def test_an_adapter_loaded_in_place_while_requests_wait(daemon, engine, adapters, how):
    """What waits is computed by the new one: it takes no prefix of the old one's, and leaves none under its name."""
    one, two, own = adapters
    first, second = by_both(daemon, functools.partial(engine, **TUNED, max_num_seqs=1), how)
    asked = prompts(4, seed=101, shortest=150, shared=100)
    for each in (second, first):
        assert each.generate(asked[:1], lora=["tuned", one])["tokens"] == own(one, asked[:1])
        each.ask("flush")
    said = first.generate(asked, tokens=30, lora=["tuned", one], adapters=[[two, 5]])
    assert said["tokens"][1:] == own(two, asked[1:], tokens=30)
    first.generate(asked, tokens=30, lora=["tuned", two], adapters=[[one, 5]])
    first.ask("flush")
    assert second.generate(asked, lora=["tuned", one])["tokens"] == own(one, asked)
    second.ask("load_in_place", directory=two)
    assert second.generate(asked, lora=["tuned", two])["tokens"] == own(two, asked)


@pytest.mark.parametrize("how", ["pool", "connector"])
def test_an_adapter_loaded_in_place_and_back_while_requests_run(daemon, engine, adapters, how):
    """Their blocks are of both, whatever the last one is."""
    one, two, own = adapters
    first, second = by_both(daemon, functools.partial(engine, **TUNED), how)
    asked = prompts(4, seed=103, shortest=100)
    answers = first.generate(asked, tokens=200, lora=["tuned", one], adapters=[[two, 20], [one, 100]])["tokens"]
    first.ask("flush")
    longer = [prompt + answer + [7] for prompt, answer in zip(asked, answers)]
    assert second.generate(longer, lora=["tuned", one])["tokens"] == own(one, longer)


@pytest.mark.parametrize("how", ["pool", "connector"])
def test_requests_that_load_their_adapter_in_place(daemon, engine, adapters, how):
    """vLLM has what they load from then on for all requests of the adapter's number."""
    one, two, own = adapters
    first, second = by_both(daemon, functools.partial(engine, **TUNED), how)
    asked, fresh = prompts(3, seed=104, shortest=100), prompts(3, seed=105, shortest=100)
    assert first.generate(asked, lora=["tuned", one])["tokens"] == own(one, asked)
    assert first.generate(asked, lora=["tuned", two, True])["tokens"] == own(two, asked)
    first.generate(fresh, lora=["tuned", one])
    first.ask("flush")
    assert second.generate(fresh, lora=["tuned", one]) == {"tokens": own(one, fresh), "cached": [0] * 3}


@pytest.mark.parametrize("how", ["pool", "connector"])
def test_an_adapter_that_could_not_be_loaded_in_place(daemon, engine, adapters, how, tmp_path):
    """vLLM goes on with the one that it has, and its files are others by then: of a rank that only the second engine takes."""
    one, two, own = adapters
    where = {how: {"socket": daemon.socket}}
    first, second, wide = (engine(**some) for some in ({**where, **TUNED}, {**where, **TUNED, "max_lora_rank": 16}, {**TUNED, "max_lora_rank": 16}))
    asked = prompts(3, seed=106, shortest=100)
    path, new = shutil.copytree(one, tmp_path / "copy"), pathlib.Path(adapter(tmp_path / "new", seed=2, rank=16))
    lora = ["tuned", str(path)]
    assert first.generate(asked[:1], lora=lora)["tokens"] == own(one, asked[:1])
    for file in new.iterdir():
        shutil.copyfile(file, path / file.name)
    with pytest.raises(processes.EngineRefused):
        first.ask("load_in_place", directory=str(path))
    assert first.generate(asked, lora=lora)["tokens"] == own(one, asked)
    first.ask("flush")
    assert second.generate(asked, lora=lora) == {"tokens": wide.generate(asked, lora=lora)["tokens"], "cached": [0] * 3}
