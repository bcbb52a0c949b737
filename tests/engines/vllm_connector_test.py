"""vLLM's own KV cache with KvPoolConnector behind it: the same tokens as without, prefixes of other processes, and nothing wrong when
a block is damaged, or somebody dies. Needs what vllm_test.py needs.
"""

import time

import pytest

from daemon import Daemon
from models import adapter
from vllm_processes import PYTHON, await_blocks, await_detached, await_shared, prompts, whole_blocks

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


UNHURRIED = {"guaranteed_blocks": 100, "match_timeout": 30, "lease_timeout": 30}


def settled(daemon, *engines):
    """What the engines hold is known to the daemon: nothing but leases at hand, and every block is in one state."""
    for one in engines:
        one.ask("flush")
        facts = one.ask("facts")
        assert facts["holds"] == 0 and facts["refused"] == 0, facts
    deadline = time.monotonic() + 60
    while True:  # What came as an answer that nobody waited for is on its way back.
        held = sum(int(session["referenced"]) for session in daemon.ctl("sessions")["sessions"])
        spaces = [{state: int(count) for state, count in space["blocks"].items()} for space in daemon.ctl("spaces")["spaces"]]
        if held == 0 or time.monotonic() > deadline:
            break
    assert held == 0
    for blocks in spaces:
        capacity = blocks.pop("capacity")
        assert sum(blocks.values()) == capacity and blocks["sealed"] == 0, blocks


def every_block(asked):
    return [whole_blocks(prompt) for prompt in asked]


def test_prefixes_of_another_process_and_of_a_dead_one(daemon, engine, stock):
    first, second = (engine(connector={"socket": daemon.socket, "guaranteed_blocks": 300}) for _ in range(2))
    asked = prompts(24, seed=21) + prompts(1, seed=42, shortest=96, longest=96)  # Full blocks: the last token is computed still.
    own = stock.generate(asked)["tokens"]
    said = first.generate(asked)
    assert said["tokens"] == own and said["cached"] == [0] * 25
    first.ask("flush")
    computed = sum(every_block(asked)) // 32
    assert first.ask("facts")["lookup"]["saved_blocks"] >= computed
    said = second.generate(asked)
    assert said["tokens"] == own and said["cached"] == every_block(asked)
    facts = second.ask("facts")
    assert facts["transfer"]["loaded_blocks"] == facts["lookup"]["found_blocks"] == computed
    # Now vLLM has them itself.
    said = second.generate(asked)
    assert said["tokens"] == own and said["cached"] == every_block(asked)
    assert second.ask("facts")["transfer"]["loaded_blocks"] == computed
    # Answers are prefixes too.
    longer = [prompt + answer + [7] for prompt, answer in zip(asked[:8], own)]
    own_longer = stock.generate(longer)["tokens"]
    assert first.generate(longer)["tokens"] == own_longer
    first.ask("flush")
    said = second.generate(longer)
    assert said["tokens"] == own_longer and said["cached"] == every_block(longer)
    # What the first had saved is there when it has died, be it in the middle of another's loads: the batch takes half of them.
    fresh = prompts(30, seed=22, shortest=100)
    own_fresh = stock.generate(fresh)["tokens"]
    assert first.generate(fresh)["tokens"] == own_fresh
    first.ask("flush")
    said = second.generate(fresh, kill=[first.started(), 5])
    assert said["tokens"] == own_fresh and said["cached"] == every_block(fresh)
    settled(daemon, second)


def test_what_is_there_is_not_copied_again(daemon, engine, stock):
    pool = UNHURRIED | {"socket": daemon.socket}
    first, second = engine(connector=pool), engine(connector=pool, enable_prefix_caching=False)
    asked = prompts(4, seed=23, shortest=100, shared=64)
    assert all(len(prompt) % 32 for prompt in asked)  # A full block with the last token in it is computed, and saved perhaps.
    own = stock.generate(asked, tokens=1)["tokens"]
    assert first.generate(asked, tokens=1)["tokens"] == own
    first.ask("flush")
    saved = first.ask("facts")["lookup"]["saved_blocks"]
    # Prompts of one step that have blocks in common save them once.
    assert saved == sum(len(prompt) // 32 for prompt in asked) - 3 * 2
    # The second has no cache of its own: every time it loads all of them, and saves none.
    for turn in (1, 2):
        said = second.generate(asked, tokens=1)
        assert said["tokens"] == own and said["cached"] == every_block(asked)
        assert second.ask("facts")["transfer"]["loaded_blocks"] == turn * sum(every_block(asked)) // 32
    assert second.ask("facts")["lookup"]["saved_blocks"] == 0
    settled(daemon, first, second)


def test_processes_of_its_own(daemon, engine, stock):
    """As vllm serve has it: scheduler and worker are two members of a session."""
    # Threads bound to cores that others have too would be slow, not wrong.
    pool = UNHURRIED | {"socket": daemon.socket, "guaranteed_blocks": 300}
    one = engine(connector=pool, processes=True, environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, disable_log_stats=False)
    other = engine(connector=pool)
    asked = prompts(10, seed=24, shortest=50)
    own = stock.generate(asked)["tokens"]
    assert other.generate(asked)["tokens"] == own
    other.ask("flush")
    said = one.generate(asked)
    assert said["tokens"] == own and said["cached"] == every_block(asked)
    (mine,) = [session for session in daemon.ctl("sessions")["sessions"]
               if len({member["pid"] for member in session["members"]}) == 2]
    assert sorted(member["scheduler"] for member in mine["members"]) == [False, True]
    fresh = prompts(10, seed=25, shortest=50)
    own_fresh = stock.generate(fresh)["tokens"]
    assert one.generate(fresh)["tokens"] == own_fresh
    blocks = sum(len(prompt) // 32 for prompt in asked + fresh)
    deadline = time.monotonic() + 60
    while int(daemon.ctl("spaces")["spaces"][0]["blocks"]["cached"]) < blocks and time.monotonic() < deadline:
        pass  # Its last seals are on their way.
    said = other.generate(fresh)
    assert said["tokens"] == own_fresh and said["cached"] == every_block(fresh)
    settled(daemon, other)


def test_chunks_and_preemption(daemon, models, engine, stock):
    """Prompts in pieces, on a cache of vLLM's that is too small for them: what was preempted is loaded again."""
    pool = {"socket": daemon.socket, "guaranteed_blocks": 500}
    small = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 60}
    one, other = engine(connector=pool, **small), engine(connector=pool, **small)
    asked = prompts(12, seed=26, shortest=200, shared=100)
    own = stock.generate(asked, tokens=120)["tokens"]
    assert one.generate(asked, tokens=120)["tokens"] == own
    facts = one.ask("facts")
    assert facts["preemptions"] > 0 and facts["transfer"]["loaded_blocks"] > 0 and facts["transfer"]["failed_blocks"] == 0
    one.ask("flush")
    said = other.generate(asked, tokens=120)
    assert said["tokens"] == own and said["cached"] == every_block(asked)
    settled(daemon, one, other)


def test_a_pool_too_small_for_all(models, engine, stock):
    """Blocks leave for others, saves are left out: tokens stay what they are."""
    daemon = Daemon(capacity="8MiB", slab="4MiB")  # Some 140 blocks.
    try:
        both = [engine(connector={"socket": daemon.socket}) for _ in range(2)]
        asked = [prompts(16, seed=seed, shortest=300, shared=100) for seed in (27, 28)]
        own = [stock.generate(some, tokens=60)["tokens"] for some in asked]
        for one in both:
            one.started()
        for turn in range(2):
            for i in range(2):
                both[i].tell("generate", prompts=asked[i ^ turn], tokens=60)
            for i in range(2):
                assert both[i].answer()["tokens"] == own[i ^ turn]
        assert sum(one.ask("facts")["transfer"]["failed_blocks"] for one in both) == 0
        settled(daemon, *both)
    finally:
        daemon.close()


CHUNKS = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32}


@pytest.mark.parametrize("by, tail, more", [("bit", 150, {}), ("block", 150, {}), ("block", 4, CHUNKS)])
def test_blocks_that_are_not_what_their_keys_say(daemon, engine, stock, by, tail, more):
    pool = {"socket": daemon.socket, "guaranteed_blocks": 100}
    first, second = engine(connector=pool), engine(connector=pool, max_num_seqs=8, **more)
    # Four that share the damaged blocks are loaded in one step. With CHUNKS what was loaded is computed block by block, and the
    # second would be done before the first has computed the last damaged block.
    asked = prompts(4, seed=29, shortest=tail // 2, longest=tail, shared=300)
    own = stock.generate(asked)["tokens"]
    assert first.generate([asked[0][:300]])["cached"] == [0]
    first.ask("flush")
    second.started()
    second.ask("damage", blocks=[2, 6], by=by)
    assert second.generate(asked)["tokens"] == own
    assert second.ask("facts")["transfer"]["failed_blocks"] == 2
    # Nothing that was computed from them is in its cache, nor in the pool.
    longer = [prompt + answer + [5] for prompt, answer in zip(asked, own)]
    own_longer = stock.generate(longer)["tokens"]
    assert second.generate(longer)["tokens"] == own_longer
    second.ask("flush")
    # They still are what the keys name: who has found them leaves them.
    assert second.ask("reset")["done"]
    assert second.generate(longer)["tokens"] == own_longer
    assert second.ask("facts")["transfer"]["failed_blocks"] == 2
    # With the right bytes in them again, all that is in the pool is right.
    second.ask("heal")
    assert first.ask("reset")["done"]
    said = first.generate(longer)
    assert said["tokens"] == own_longer and said["cached"] == every_block(longer)
    assert first.ask("facts")["transfer"]["failed_blocks"] == 0
    settled(daemon, first, second)


def warmed(first, prompt, stock, tokens=20):
    """What is said to the prompt, of which the pool has all from now on."""
    (own,) = stock.generate([prompt], tokens=tokens)["tokens"]
    assert first.generate([prompt], tokens=tokens)["tokens"] == [own]
    first.ask("flush")
    return own


@pytest.mark.parametrize("end", ["", "abort", "raise", "kill"])
def test_a_load_holds_up_nobody(daemon, engine, stock, end):
    """Others go on beside it, and its blocks are nobody else's until it is over, whatever becomes of the request or the daemon."""
    pool = UNHURRIED | {"socket": daemon.socket}
    first, second = engine(connector=pool), engine(connector=pool, num_gpu_blocks_override=60)
    (loads,), others = prompts(1, seed=50, shortest=320, longest=340), prompts(6, seed=51, shortest=300, longest=400)
    own, own_others = warmed(first, loads, stock), stock.generate(others)["tokens"]
    said = second.ask("while_loading", loads=loads, prompts=others, end=end, kill=daemon.process.pid if end == "kill" else None)
    assert said["beside"] == own_others
    assert said["loading"] == (["FINISHED_ABORTED"] if end == "abort" else ["WAITING_FOR_REMOTE_KVS"])
    assert said["said"] == (None if end == "abort" else own)
    blocks = whole_blocks(loads) // 32
    assert (said["held"], said["held_then"]) == (blocks, 0)
    facts = second.ask("facts")["transfer"]
    assert (facts["loaded_blocks"], facts["failed_blocks"]) == ((0, blocks) if end == "raise" else (blocks, 0))
    # Nothing was left in vLLM's own cache that is not right.
    assert second.generate([loads])["tokens"] == [own] and second.generate(others)["tokens"] == own_others


def test_what_many_need_is_loaded_once(daemon, engine, stock):
    pool = UNHURRIED | {"socket": daemon.socket}
    first, second = engine(connector=pool), engine(connector=pool)
    asked = prompts(6, seed=52, shortest=20, longest=150, shared=320)
    own = stock.generate(asked)["tokens"]
    assert first.generate(asked)["tokens"] == own
    first.ask("flush")
    assert second.generate(asked) == {"tokens": own, "cached": every_block(asked)}
    assert second.ask("facts")["transfer"]["loaded_blocks"] == sum(every_block(asked)) // 32 - 5 * 10


@pytest.mark.parametrize("end", ["", "abort", "preempt", "reset", "kill"])
def test_what_is_being_saved_is_overwritten_by_nobody(daemon, engine, stock, end):
    """Its request has ended long before it is copied, and others take all other blocks of vLLM's again and again."""
    pool = UNHURRIED | {"socket": daemon.socket}
    first, second = engine(connector=pool, num_gpu_blocks_override=60, max_num_seqs=3), engine(connector=pool)
    (saves,), others = prompts(1, seed=53, shortest=330, longest=340), prompts(9, seed=54, shortest=250, longest=400)
    own, own_others = stock.generate([saves])["tokens"], stock.generate(others)["tokens"]
    said = first.ask("while_saving", saves=saves, prompts=others, end=end, kill=daemon.process.pid if end == "kill" else None)
    assert said["beside"] == own_others and said["runs"]
    assert (said["held"], said["in_use"]) == (0 if end == "reset" else 10, 0)
    if end == "kill":
        assert first.generate([saves])["tokens"] == own
        return
    first.ask("flush")
    assert second.generate([saves]) == {"tokens": own, "cached": [0 if end == "reset" else 320]}
    assert second.generate(others)["tokens"] == own_others
    settled(daemon, first, second)


def test_the_first_prompt_of_an_engine_is_saved(daemon, engine):
    """However short its patience with a pool that has nothing is: there is nothing to lease before its workers have joined."""
    one = engine(connector={"socket": daemon.socket, "match_timeout": 30, "lease_timeout": 0})
    one.generate(prompts(1, seed=56, shortest=100, longest=120), tokens=1)
    one.ask("flush")
    assert one.ask("facts")["lookup"]["saved_blocks"] == 3


def test_failure_policy_of_vllm(daemon, engine, stock):
    """Its default ends requests whose blocks can't be loaded; the others go on."""
    pool = {"socket": daemon.socket, "guaranteed_blocks": 100}
    first, second = engine(connector=pool), engine(connector=pool, transfer={"kv_load_failure_policy": "fail"})
    asked = prompts(3, seed=31, shortest=200)
    own = stock.generate(asked)["tokens"]
    assert first.generate(asked)["tokens"] == own
    first.ask("flush")
    second.started()
    second.ask("damage", blocks=[1], by="bit")
    said = second.generate(asked)["tokens"]
    assert said[1:] == own[1:] and said[0] == []
    assert second.generate(asked)["tokens"] == own


def test_what_was_found_before_the_daemon_was_lost(daemon, engine, stock):
    """By vLLM's default a request whose blocks can't be loaded ends with an error. These can: the worker still has them mapped."""
    pool = UNHURRIED | {"socket": daemon.socket}
    first, second = engine(connector=pool), engine(connector=pool, transfer={"kv_load_failure_policy": "fail"})
    asked = prompts(2, seed=46, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert first.generate(asked)["tokens"] == own
    first.ask("flush")
    second.generate(prompts(1, seed=47, shortest=50))  # Its worker has joined.
    second.ask("lose", pid=daemon.process.pid, at=2)
    said = second.generate(asked)
    assert said == {"tokens": own, "cached": [whole_blocks(asked[0]), 0]}
    assert second.ask("facts")["detached"]


@pytest.mark.parametrize("steps", [1, 30])
def test_daemon_lost_while_serving(daemon, engine, stock, steps):
    one = engine(connector={"socket": daemon.socket}, max_num_seqs=4)
    asked = prompts(8, seed=32, shortest=100, longest=300)
    own = stock.generate(asked, tokens=60)["tokens"]
    assert one.generate(asked[:2], tokens=60)["tokens"] == own[:2]
    assert one.generate(asked, tokens=60, kill=[daemon.process.pid, steps])["tokens"] == own
    said = one.generate(asked, tokens=60)
    assert said["tokens"] == own
    facts = one.ask("facts")
    assert facts["detached"] and facts["holds"] == 0


def test_a_daemon_that_does_not_answer(daemon, engine, stock):
    one = engine(connector={"socket": daemon.socket, "match_timeout": 0.1, "lease_timeout": 0.01})
    asked = prompts(6, seed=34, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked[:2])["tokens"] == own[:2]
    daemon.stop()
    try:
        assert one.generate(asked)["tokens"] == own
        facts = one.ask("facts")
        assert facts["lookup"]["late_answers"] > 0 and facts["detached"] is False
    finally:
        daemon.go_on()
    # Once it answers, it is asked again.
    one.ask("flush")
    asked_before, deadline = one.ask("facts")["lookup"]["asked_requests"], time.monotonic() + 60
    while one.ask("facts")["lookup"]["asked_requests"] == asked_before and time.monotonic() < deadline:
        assert one.generate(asked[2:])["tokens"] == own[2:]
    assert one.ask("facts")["lookup"]["asked_requests"] > asked_before
    settled(daemon, one)


def test_salts_and_resets_part(daemon, engine, stock):
    pool = {"socket": daemon.socket, "guaranteed_blocks": 100}
    first, second = engine(connector=pool), engine(connector=pool, enable_prefix_caching=False)
    asked = prompts(4, seed=35, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert first.generate(asked, salt="a")["tokens"] == own
    first.ask("flush")
    for salt in (None, "b"):
        said = second.generate(asked, salt=salt)
        assert said["cached"] == [0] * 4 and said["tokens"] == own
    said = second.generate(asked, salt="a")
    assert said["cached"] == every_block(asked) and said["tokens"] == own
    # A reset is for the one that says it, whose new blocks nobody else finds.
    assert first.ask("reset", connector=True)["done"]
    said = first.generate(asked, salt="a")
    assert said["cached"] == [0] * 4 and said["tokens"] == own
    assert second.generate(asked, salt="a")["cached"] == every_block(asked)
    fresh = prompts(4, seed=36, shortest=100)
    own_fresh = stock.generate(fresh)["tokens"]
    assert first.generate(fresh)["tokens"] == own_fresh
    first.ask("flush")
    said = second.generate(fresh)
    assert said["cached"] == [0] * 4 and said["tokens"] == own_fresh
    settled(daemon, first, second)


def test_a_salt_parts_from_behind_a_shared_prefix(daemon, engine, stock):
    """A system prompt of 100 tokens, three full blocks, is everybody's, in vLLM's own index as in the pool."""
    pool = {"socket": daemon.socket, "guaranteed_blocks": 100}
    first, second = engine(connector=pool), engine(connector=pool, enable_prefix_caching=False)
    one, two = asked = prompts(2, seed=43, shortest=100, shared=100)
    own = stock.generate(asked)["tokens"]
    head, every = 96, whole_blocks(one)

    def said(process, prompt, cached, **salted):
        assert process.generate([prompt], **salted) == {"tokens": [own[asked.index(prompt)]], "cached": [cached]}, salted
        process.ask("flush")

    said(first, one, 0, salt="a", shared=100)
    said(first, one, every, salt="a", shared=100)
    for shared in (100, 127):  # Where the salted block begins decides.
        said(second, one, every, salt="a", shared=shared)
    said(second, one, head, salt="b", shared=100)
    said(second, two, head, salt="a", shared=100)
    said(first, two, whole_blocks(two), salt="a", shared=100)
    said(second, one, head)
    said(second, one, 0, salt="a")


def test_adapters_share_by_what_is_in_them(daemon, engine, tmp_path):
    pool = {"socket": daemon.socket}
    first, second, third, own, anew = (engine(connector=some, enable_lora=True, max_lora_rank=8) for some in (pool, pool, pool, None, None))
    one, same, other = (adapter(tmp_path / name, seed=seed) for name, seed in (("one", 1), ("same", 1), ("other", 2)))
    asked = prompts(3, seed=14, shortest=100)
    plain, tuned = (own.generate(asked, lora=lora)["tokens"] for lora in (None, ["tuned", one]))
    others = anew.generate(asked, lora=["tuned", other])["tokens"]  # vLLM takes an adapter of the same number for the one it has.
    assert plain != tuned != others
    assert first.generate(asked, lora=["tuned", one]) == {"tokens": tuned, "cached": [0] * 3}
    first.ask("flush")
    assert second.generate(asked, lora=["another name", same]) == {"tokens": tuned, "cached": every_block(asked)}
    assert second.generate(asked) == {"tokens": plain, "cached": [0] * 3}
    assert third.generate(asked, lora=["tuned", other]) == {"tokens": others, "cached": [0] * 3}
    settled(daemon, first, second, third)


def test_roles(daemon, engine, stock):
    pool = {"socket": daemon.socket, "guaranteed_blocks": 100}
    writes = engine(connector=pool, transfer={"kv_role": "kv_producer"})
    reads = engine(connector=pool, transfer={"kv_role": "kv_consumer"})
    asked = prompts(4, seed=37, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert reads.generate(asked)["tokens"] == own
    assert reads.ask("facts")["lookup"]["saved_blocks"] == 0
    assert reads.ask("reset")["done"]
    said = writes.generate(asked)
    assert said["tokens"] == own and said["cached"] == [0] * 4
    writes.ask("flush")
    said = reads.generate(asked)
    assert said["tokens"] == own and said["cached"] == every_block(asked)
    settled(daemon, reads, writes)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_among_other_connectors(daemon, engine, stock, tmp_path, place):
    children = [{"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}]
    pool = UNHURRIED | {"socket": daemon.socket}
    children.insert(place, {"kv_connector": "KvPoolConnector", "kv_role": "kv_both", "kv_connector_extra_config": pool})
    one = engine(kv_transfer_config={"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                                     "kv_connector_extra_config": {"connectors": children}}, enable_prefix_caching=False)
    other = engine(connector=pool)
    asked = prompts(4, seed=44, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert other.generate(asked)["tokens"] == own
    other.ask("flush")
    assert one.generate(asked) == {"tokens": own, "cached": every_block(asked)}


def test_ranks_have_their_heads_each(daemon, engine, tmp_path):
    """Nobody finds a block before all ranks have copied it."""
    ranks = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    pool = UNHURRIED | {"socket": daemon.socket}
    stock, first, second = engine(**ranks), engine(connector=pool, **ranks), engine(connector=pool, **ranks)
    asked = prompts(6, seed=55, shortest=100)
    own = stock.generate(asked)["tokens"]
    first.ask("hold_rank", rank=1, until=str(tmp_path / "go on"))
    first.tell("generate", prompts=asked)
    blocks = sum(len(prompt + answer[:-1]) // 32 for prompt, answer in zip(asked, own))
    await_blocks(daemon, "leased", blocks)
    time.sleep(1)
    (space,) = daemon.ctl("spaces")["spaces"]
    assert len(space["devices"]) == 2 and space["layout"]["groups"][0]["kv_heads"] == 1 and space["facts"]["ranks"] == "2"
    assert int(space["blocks"]["cached"]) == int(space["blocks"]["sealed"]) == 0
    (tmp_path / "go on").touch()
    assert first.answer() == {"tokens": own, "cached": [0] * 6}
    first.ask("flush")
    assert int(daemon.ctl("spaces")["spaces"][0]["blocks"]["cached"]) == blocks
    assert second.generate(asked) == {"tokens": own, "cached": every_block(asked)}
    # Without the daemon all ranks go on; with it back again they share.
    assert second.generate(asked, tokens=60, kill=[daemon.process.pid, 10])["tokens"] == stock.generate(asked, tokens=60)["tokens"]
    await_detached(first)
    daemon.start()
    for one in (first, second):
        assert one.ask("reset")["done"]
        await_shared(one)
        assert one.generate(asked)["tokens"] == own
        one.ask("flush")
    assert second.ask("reset")["done"]
    assert second.generate(asked) == {"tokens": own, "cached": every_block(asked)}
    settled(daemon, first, second)


def test_refused_at_start(daemon, models, engine):
    pool = {"socket": daemon.socket, "space": "chat"}
    engine(connector=pool).started()
    for other, words in (({"dtype": "bfloat16"}, ("float32", "bfloat16")), ({"model": models / "1"}, ("weights",))):
        said = engine(connector=pool, **other).refused()
        assert "FailedPrecondition" in said and all(word in said for word in words), said
    # An engine on the pool's own blocks, which lie otherwise. Without the name it has a space of its own.
    said = engine(pool).refused()
    assert "FailedPrecondition" in said and "connector" in said and "BLHNC" in said, said
    assert "no such option: sokcet" in engine(connector={"sokcet": ""}).refused()


def test_no_daemon(engine, stock):
    nowhere = {"socket": "/nowhere/kvpoold.sock", "open_timeout": 1}
    said = engine(connector=nowhere).refused()
    assert "needs a kvpoold" in said and "/nowhere/kvpoold.sock" in said
    own = engine(connector={**nowhere, "fallback": "own"})
    asked = prompts(5, seed=39)
    assert own.generate(asked)["tokens"] == stock.generate(asked)["tokens"]
    said = own.generate(asked)
    assert said["cached"] == every_block(asked) and own.ask("facts")["detached"]


def test_daemon_back_again(daemon, engine, stock):
    """Started again it knows nothing. Engines find it by themselves, and share anew; one tries again that could not at first."""
    pool = {"socket": daemon.socket, "fallback": "own"}
    one = engine(connector=pool)
    asked = prompts(3, seed=40, shortest=100)
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own
    daemon.kill()
    late = engine(connector={**pool, "open_timeout": 0.1})  # Starts without.
    for each in (one, late):
        assert each.generate(asked)["tokens"] == own
        each.ask("reset")
    one.ask("misfit")
    daemon.start()
    deadline = time.monotonic() + 120
    for each in (one, late):
        while each.ask("facts")["detached"] and time.monotonic() < deadline:
            assert each.generate(asked[:1])["tokens"] == own[:1]
    assert one.generate(asked)["tokens"] == own
    one.ask("flush")
    said = late.generate(asked)
    assert said["tokens"] == own and said["cached"] == every_block(asked)
    assert late.ask("facts")["transfer"]["loaded_blocks"] > 0
    fresh = prompts(3, seed=41, shortest=100)
    own_fresh = stock.generate(fresh)["tokens"]
    assert late.generate(fresh)["tokens"] == own_fresh
    late.ask("flush")
    said = one.generate(fresh)
    assert said["tokens"] == own_fresh and said["cached"] == every_block(fresh)
    settled(daemon, one, late)
