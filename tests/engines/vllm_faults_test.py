"""vLLM on a pool whose daemon dies, stops or is restarted: no wrong token, no failed request, and it shares again afterwards."""

import contextlib
import functools

import pytest

from daemon import Daemon
from vllm_processes import BLOCK, PYTHON, assert_nothing_is_held, await_detached, await_shared, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


def assert_shared_again(first, second, stock, seed):
    """What one computes, the other finds."""
    asked = prompts(4, seed=seed, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert first.generate(asked)["tokens"] == own
    first.ask("flush")
    said = second.generate(asked)
    assert said["tokens"] == own and said["cached"] == [whole_blocks(prompt) for prompt in asked]
    assert_nothing_is_held(first, second)


@pytest.mark.parametrize("step", [1, 5, 40])
def test_killed_while_requests_decode(daemon, engine, stock, step):
    pool = {"socket": daemon.socket}
    one, idle = engine(pool), engine(pool)
    asked = prompts(24, seed=71, shortest=200, longest=500)
    own = stock.generate(asked, tokens=80)["tokens"]
    idle.started()
    assert one.generate(asked, tokens=80, kill=[daemon.process.pid, step])["tokens"] == own
    daemon.process.wait()
    for each in (one, idle):
        assert each.generate(asked, tokens=80)["tokens"] == own
        facts = each.ask("facts")
        assert facts["own"] and facts["detached"] and facts["in_use"] == 0
    daemon.start()
    for each in (one, idle):
        await_shared(each)
    assert_shared_again(one, idle, stock, seed=72)


def test_a_long_prompt_comes_to_an_engine_that_held_next_to_nothing(daemon, engine):
    long = functools.partial(engine, max_model_len=4096, max_num_batched_tokens=4096)
    one, asked = long({"socket": daemon.socket}), prompts(1, seed=70, shortest=3500, longest=3500)
    one.generate([[1, 2, 3]])
    daemon.kill()
    assert one.generate(asked)["tokens"] == long().generate(asked)["tokens"]


def test_restarted_while_requests_decode(daemon, engine, stock):
    """The way to its own memory and back, both with requests under way."""
    one = engine({"socket": daemon.socket})
    asked = prompts(8, seed=73, shortest=100, longest=300)
    own = stock.generate(asked, tokens=400)["tokens"]
    assert one.generate(asked, tokens=30)["tokens"] == [tokens[:30] for tokens in own]
    daemon.kill()
    await_detached(one)
    daemon.start()
    for _ in range(20):
        assert one.generate(asked, tokens=400)["tokens"] == own
        if not one.ask("facts")["own"]:
            break
    assert_shared_again(one, engine({"socket": daemon.socket}), stock, seed=74)


@pytest.mark.parametrize("settings", [{"processes": True}, {"processes": True, "tensor_parallel_size": 2},
                                      {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3,
                                                              "prompt_lookup_min": 1}}], ids=["processes", "ranks", "ngram"])
def test_other_engines_lose_their_daemon(daemon, engine, stock, settings):
    if "tensor_parallel_size" in settings:
        settings = settings | {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    one = engine({"socket": daemon.socket}, **settings)
    asked = prompts(6, seed=75, shortest=100, longest=300)
    own = stock.generate(asked, tokens=40)["tokens"]
    assert one.generate(asked, tokens=40)["tokens"] == own
    daemon.kill()
    for _ in range(2):
        assert one.generate(asked, tokens=40)["tokens"] == own
    daemon.start()
    two = engine({"socket": daemon.socket}, **settings)
    for _ in range(60):  # It looks for a daemon when it has something to do.
        assert one.generate(asked, tokens=40)["tokens"] == own
        if max(two.generate(asked, tokens=1)["cached"]) > 0 or len(daemon.ctl("sessions")["sessions"]) > 1:
            break
    fresh = prompts(2, seed=76, shortest=100)
    own = stock.generate(fresh)["tokens"]
    assert one.generate(fresh)["tokens"] == own and two.generate(fresh)["tokens"] == own


def test_started_before_its_daemon(daemon, engine, stock):
    daemon.kill()
    pool = {"socket": daemon.socket, "fallback": "own", "open_timeout": 1}
    one = engine(pool)
    asked = prompts(6, seed=77, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own and one.ask("facts")["own"]
    daemon.start()
    await_shared(one)
    assert_shared_again(one, engine(pool), stock, seed=78)


@pytest.mark.parametrize("step", [1, 30])
def test_stopped_while_requests_run(daemon, engine, stock, step):
    """Nobody answers. What needs no answer goes on; what does is computed; short of blocks for long, the engine helps itself."""
    one = engine({"socket": daemon.socket, "match_timeout": 0.3}, max_num_seqs=8)
    asked = prompts(40, seed=79, shortest=200, longest=400)
    own = stock.generate(asked, tokens=40)["tokens"]
    one.started()
    assert one.generate(asked, tokens=40, stop=[daemon.process.pid, step])["tokens"] == own
    await_shared(one)
    assert_shared_again(one, engine({"socket": daemon.socket}), stock, seed=80)


def test_requests_that_come_while_it_is_stopped(daemon, engine, stock):
    """Each asks for its prefix. Only the first waits for match_timeout; the others know that nobody answers."""
    one = engine({"socket": daemon.socket, "match_timeout": 0.3, "guaranteed_blocks": 600})
    asked = prompts(30, seed=81, shortest=40, longest=60)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own
    daemon.stop()
    try:
        for prompt, tokens in zip(asked, own):
            assert one.generate([prompt])["tokens"] == [tokens]
        # Once for match_timeout; then, by the clock, once in _QUIET_S at most.
        assert 1 <= one.ask("facts")["pool"]["late_answers"] < 10
    finally:
        daemon.go_on()
    await_shared(one)
    assert one.generate(asked)["tokens"] == own


def test_usage_is_of_what_this_engine_may_hold(engine):
    """Autoscalers go by it: in a pool that others use, too, an engine that is full has to say so."""
    with contextlib.closing(Daemon(capacity="256MiB", slab="16MiB")) as daemon:
        one = engine({"socket": daemon.socket}, num_gpu_blocks_override=100)
        said = one.ask("usage", prompts=prompts(4, seed=82, shortest=320, longest=320))
        assert said["in_use"] >= 40 and abs(said["usage"] - said["in_use"] / 99) < 1e-6


def test_what_is_stocked_evicts_nothing(engine, stock):
    """A prefix stays cached as long as blocks are free for those who need some."""
    with contextlib.closing(Daemon(capacity="8MiB", slab="4MiB")) as daemon:  # Some 160 blocks.
        start = functools.partial(engine, {"socket": daemon.socket, "guaranteed_blocks": 0}, num_gpu_blocks_override=160)
        one = start()
        asked = prompts(8, seed=83, shortest=12 * BLOCK + 1, longest=12 * BLOCK + 1)
        own = stock.generate(asked, tokens=4)["tokens"]
        for prompt, tokens in zip(asked, own):
            assert one.generate([prompt], tokens=4)["tokens"] == [tokens]
        one.ask("flush")
        (space,) = daemon.ctl("spaces")["spaces"]
        assert int(space["blocks"]["cached"]) >= 8 * 12, space["blocks"]
        assert one.generate(asked[:1], tokens=4) == {"tokens": own[:1], "cached": [12 * BLOCK]}
