"""vLLM with tensor parallelism on kvpool: each worker is a rank of its engine's session, with its heads of every block."""

import concurrent.futures
import contextlib
import functools

import pytest

from daemon import Daemon
from models import eagle
from vllm_processes import (BLOCK, PYTHON, Server, assert_nothing_is_held, assert_two_share_a_pool_that_is_too_small, await_blocks,
                            await_detached, engines, prompts, whole_blocks)

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


@pytest.fixture
def engine(model):
    """Starts engines of two ranks unless told otherwise, and ends them."""
    # All of them on all cores: by itself vLLM gives those of every engine the same ones.
    with engines(model, environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as start:
        yield lambda pool=None, ranks=2, **more: start(pool, tensor_parallel_size=ranks, **more)


def test_ranks_share_prefixes_and_die_as_one(daemon, model, engine, tmp_path):
    pool = {"socket": daemon.socket, "guaranteed_blocks": 1000}
    stock, second = engine(), engine(pool)
    second.started()
    server = Server(model, pool, tmp_path / "log", "--tensor-parallel-size=2", "--dtype=float32")
    try:
        server.started()
        asked = prompts(12, seed=21)
        own = stock.generate(asked, tokens=40)["tokens"]
        assert [server.complete(prompt, 40) for prompt in asked] == [(tokens, 0) for tokens in own]
        await_blocks(daemon, "cached", sum(whole_blocks(prompt) // BLOCK for prompt in asked))
        every = {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
        assert second.generate(asked, tokens=40) == every
        # One space, in which each rank has its own half of the heads.
        (space,) = daemon.ctl("spaces")["spaces"]
        assert len(space["devices"]) == 2 and space["layout"]["groups"][0]["kv_heads"] == 1 and space["facts"]["ranks"] == "2"
        sessions = daemon.ctl("sessions")["sessions"]
        ranks = [{member["rank"]: int(member["pid"]) for member in session["members"] if not member["scheduler"]} for session in sessions]
        assert [sorted(pids) for pids in ranks] == [[0, 1], [0, 1]] and len({*ranks[0].values(), *ranks[1].values()}) == 4
        # A rank of the server dies while both generate: the server is no more, and takes nothing from the other.
        (pids,) = [pids for session, pids in zip(sessions, ranks) if second.started() not in [int(m["pid"]) for m in session["members"]]]
        fresh = prompts(6, seed=22, shortest=200)
        own_fresh = stock.generate(fresh, tokens=60)["tokens"]
        with concurrent.futures.ThreadPoolExecutor(len(fresh)) as threads:
            theirs = [threads.submit(server.complete, prompt, 60) for prompt in fresh]
            assert second.generate(fresh, tokens=60, kill=[pids[1], 10])["tokens"] == own_fresh
            server.process.wait()
        assert all(future.result()[0] == tokens for future, tokens in zip(theirs, own_fresh) if future.exception() is None)
    finally:
        server.kill()
    # What comes now is written where the dead one's blocks were.
    more = prompts(20, seed=23)
    assert second.generate(more)["tokens"] == stock.generate(more)["tokens"]
    assert second.generate(asked, tokens=40) == every
    assert_nothing_is_held(second)
    (session,) = daemon.ctl("sessions")["sessions"]


def test_other_numbers_of_ranks_do_not_share_and_the_daemon_is_lost(daemon, engine):
    named, pool = {"socket": daemon.socket, "space": "chat"}, {"socket": daemon.socket}
    two = engine(named)
    two.started()
    refused = engine(named, ranks=1).refused()
    assert "FailedPrecondition" in refused and 'ranks "2" there, "1" here' in refused
    # Without a name each has a space of its own.
    two, one = engine(pool), engine(pool, ranks=1)
    asked = prompts(4, seed=24, shortest=100)
    said = two.generate(asked)
    assert said["cached"] == [0] * 4 and one.generate(asked) == said
    spaces = daemon.ctl("spaces")["spaces"]
    assert sorted(len(space["devices"]) for space in spaces) == [1, 2, 2]
    assert "pipeline_parallel_size 2" in engine(pool, ranks=1, pipeline_parallel_size=2).refused()
    # Without the daemon all ranks go on.
    said = one.generate(asked, tokens=60)
    assert two.generate(asked, tokens=60, kill=[daemon.process.pid, 20])["tokens"] == said["tokens"]
    await_detached(two)


def test_ranks_have_drafts_with_layers_of_their_own(daemon, engine, tmp_path):
    drafting = functools.partial(engine, speculative_config={"method": "eagle", "model": eagle(tmp_path / "drafts"), "num_speculative_tokens": 3})
    pool = {"socket": daemon.socket}
    stock, first, second = drafting(), drafting(pool), drafting(pool)
    asked = prompts(8, seed=59, shortest=100, longest=300, shared=70)
    own = stock.generate(asked, tokens=60)["tokens"]
    assert first.generate(asked, tokens=60)["tokens"] == own
    first.ask("flush")
    first.kill()
    found, again = (one.generate(asked, tokens=60) for one in (second, stock))
    assert found == again and found["tokens"] == own and min(found["cached"]) > 0
    assert_nothing_is_held(second)


def test_a_pool_that_is_too_small(engine):
    """Requests are preempted and prefixes evicted; what waits for all ranks to be done comes free."""
    with contextlib.closing(Daemon(capacity="8MiB", slab="4MiB")) as daemon:  # 170 blocks for 8 requests of up to 25, and as many of another.
        start = functools.partial(engine, max_num_seqs=8)
        assert_two_share_a_pool_that_is_too_small(daemon, engine(ranks=1), start, count=12, seeds=(25, 26))
