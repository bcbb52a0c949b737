"""Two of vLLM's HTTP servers on one pool, as their users have them: the prefix of one is the other's, whose death it survives."""

import concurrent.futures

import pytest

from models import llama
from vllm_processes import BLOCK, PYTHON, Engine, Server, await_blocks, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


@pytest.fixture
def servers(daemon, tmp_path):
    """Two, and what each prompt's answer has to be."""
    llama(0, head_dim=32).save_pretrained(tmp_path / "model")
    two = [Server(tmp_path / "model", {"socket": daemon.socket}, tmp_path / f"{name}.log") for name in "ab"]
    stock = Engine(tmp_path / "model", dtype="bfloat16")
    try:
        for server in two:
            server.started()
        yield *two, lambda asked, tokens=20: stock.generate(asked, tokens=tokens)["tokens"]
    finally:
        for process in (*two, stock):
            process.kill()


def test_a_prefix_and_a_death(daemon, servers):
    first, second, truth = servers
    (prompt,) = asked = prompts(1, seed=1, shortest=600)
    own = truth(asked)[0]
    assert first.complete(prompt) == (own, 0)
    await_blocks(daemon, "cached", whole_blocks(prompt) // BLOCK)
    assert second.complete(prompt) == (own, whole_blocks(prompt))
    # Each of the two is a scheduler that leases and a worker that maps.
    sessions = daemon.ctl("sessions")["sessions"]
    assert [sorted(bool(member.get("scheduler")) for member in session["members"]) for session in sessions] == [[False, True]] * 2
    # Both serve; one dies in the middle. What it had begun to write nobody reads, what it had shared stays.
    asked = prompts(6, seed=2, shortest=100, longest=300, shared=300)
    own = truth(asked, tokens=60)
    with concurrent.futures.ThreadPoolExecutor(2 * len(asked)) as pool:
        theirs = [pool.submit(first.complete, prompt, 60) for prompt in asked]
        ours = [pool.submit(second.complete, prompt, 60) for prompt in asked]
        concurrent.futures.wait(ours, return_when=concurrent.futures.FIRST_COMPLETED)
        first.kill()
        assert [future.result()[0] for future in ours] == own
    assert all(future.result()[0] == tokens for future, tokens in zip(theirs, own) if future.exception() is None)
    assert second.complete(prompt)[1] == whole_blocks(prompt)
    more = prompts(6, seed=3, shortest=300)
    assert [second.complete(prompt)[0] for prompt in more] == truth(more)
    (session,) = daemon.ctl("sessions")["sessions"]


@pytest.mark.parametrize("connector", [False, True])
def test_engines_of_a_data_parallel_server_share(daemon, tmp_path, connector):
    """Each is an engine of its own to the daemon, and finds what the other has computed."""
    llama(0, head_dim=32).save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", {"socket": daemon.socket}, tmp_path / "log", "--data-parallel-size=2", connector=connector)
    stock = Engine(tmp_path / "model", dtype="bfloat16")
    try:
        server.started()
        asked = prompts(6, seed=4, shortest=100)
        own = stock.generate(asked)["tokens"]
        # Copies are saved behind the step, and a later step says so: each has several.
        for number, (prompt, tokens) in enumerate(zip(asked, own)):
            assert server.complete(prompt, engine=number % 2) == (tokens, 0)
        await_blocks(daemon, "cached", sum(whole_blocks(prompt) // BLOCK for prompt in asked))
        for number, (prompt, tokens) in enumerate(zip(asked, own)):
            assert server.complete(prompt, engine=1 - number % 2) == (tokens, whole_blocks(prompt))
        sessions = daemon.ctl("sessions")["sessions"]
        assert [len(session["members"]) for session in sessions] == [2, 2]
    finally:
        server.kill(), stock.kill()
