"""What holds in every vLLM that is promised: tests/engines/vllm_versions.sh runs this in the newest of the package index and in the oldest.

A vLLM whose user has not asked for kvpool is as it was; one whose user has says the same tokens, in bfloat16 as the README has it.
"""

import contextlib

import pytest

from daemon import Daemon
from models import llama
from vllm_processes import PYTHON, assert_nothing_is_held, await_detached, await_shared, engines, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "model"
    llama(0, head_dim=32).save_pretrained(directory)
    with engines(directory, dtype="bfloat16") as start:
        yield start


@pytest.fixture(scope="module")
def stock(engine):
    """Without the plugin."""
    return engine(environment={"VLLM_PLUGINS": ""})


ASKED = prompts(6, seed=61, shortest=100)


def test_installed_and_not_asked_for(engine, stock):
    unused = engine()
    assert unused.generate(ASKED) == stock.generate(ASKED)
    assert stock.ask("touched")["names"] == []
    assert unused.ask("touched")["names"] == ["EngineCore._initialize_kv_caches", "vllm.plugins.load_general_plugins"]


def test_one_pool(daemon, engine, stock):
    first, second = (engine({"socket": daemon.socket}) for _ in range(2))
    own = stock.generate(ASKED)["tokens"]
    assert first.generate(ASKED) == {"tokens": own, "cached": [0] * len(ASKED)}
    first.ask("flush")
    assert second.generate(ASKED) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in ASKED]}
    assert_nothing_is_held(first, second)
    daemon.kill()
    await_detached(second)
    assert second.generate(ASKED)["tokens"] == own
    daemon.start()
    await_shared(second)
    assert second.generate(ASKED)["tokens"] == own


def test_what_has_left_the_pool(engine, stock, tmp_path):
    """Steps are planned without the requests that it comes to."""
    with contextlib.closing(Daemon(slab="4MiB", flags=[f"--tier=file:{tmp_path}/tier,capacity=256MiB"])) as daemon:
        one = engine({"socket": daemon.socket, "wait_ms": 60000})
        own = stock.generate(ASKED)["tokens"]
        assert one.generate(ASKED)["tokens"] == own
        daemon.process.terminate()  # What is cached goes below first.
        assert daemon.process.wait(60) == 0
        await_detached(one)
        daemon.start()
        await_shared(one)
        assert one.generate(ASKED) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in ASKED]}
        assert one.ask("facts")["pool"]["waited_requests"] > 0
        assert_nothing_is_held(one)


def test_connector(daemon, engine, stock):
    if stock.ask("version")["version"] < [0, 32]:
        assert "KvPoolConnector needs 0.32" in engine(connector={"socket": daemon.socket}).refused()
        return
    first, second = (engine(connector={"socket": daemon.socket}) for _ in range(2))
    own = stock.generate(ASKED)["tokens"]
    assert first.generate(ASKED)["tokens"] == own
    first.ask("flush")
    assert second.generate(ASKED) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in ASKED]}
