"""vLLM's hybrid KV cache manager on kvpool: groups of layers with sliding windows and with full attention share a block's memory, not its
contents. What is said, found and freed is held against vLLM's own hybrid manager."""

import contextlib
import functools
import os
import random
import subprocess

import pytest

from daemon import Daemon
from models import gemma
from vllm_processes import (BLOCK, PYTHON, Server, assert_nothing_is_held, assert_two_share_a_pool_that_is_too_small, await_blocks,
                            await_detached, engines, prompts, whole_blocks)

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")

WINDOW, WINDOW_BLOCKS = 80, 3  # Tokens; blocks in front of a prefix' end.
GEMMA = os.environ.get("KVPOOL_GEMMA")
GROUPS = ["SlidingWindowSpec"] * 3 + ["FullAttentionSpec"]  # Of 5 and 2 layers: two layers each, and the third has one.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "hybrid"
    gemma(0, layers=7, window=WINDOW, kv_heads=2).save_pretrained(directory)
    return directory


def test_another_process_prefix_and_its_death(daemon, engine, stock):
    pool = {"socket": daemon.socket, "guaranteed_blocks": 2000}
    first, second = engine(pool), engine(pool)
    asked = prompts(40, seed=31, shortest=2 * WINDOW)
    own = stock.generate(asked)["tokens"]
    assert stock.ask("facts")["groups"] == first.ask("facts")["groups"] == GROUPS
    every = {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
    assert first.generate(asked) == {"tokens": own, "cached": [0] * 40}
    assert second.generate(asked) == every
    (space,) = daemon.ctl("spaces")["spaces"]
    groups = space["layout"]["groups"]
    assert [(group["layers"], group["window_tokens"]) for group in groups] == [([0, 4], 79), ([1, 6], 79), ([3], 79), ([2, 5], 0)]
    # Of windows what vLLM keeps: those in front of where a prompt that is sent again goes on.
    assert int(space["blocks"]["cached"]) >= sum(whole_blocks(prompt) // BLOCK + 3 * WINDOW_BLOCKS for prompt in asked)
    # Answers are prefixes too, and prompts go on behind them.
    longer = [prompt + answer + [7] * 40 for prompt, answer in zip(asked[:10], own)]
    own_longer = stock.generate(longer)
    assert first.generate(longer) == own_longer and own_longer["cached"] == every["cached"][:10]
    # The death of the one takes nothing from the other, nor what it had sealed.
    fresh = prompts(10, seed=32, shortest=2 * WINDOW)
    own_fresh = stock.generate(fresh)["tokens"]
    assert first.generate(fresh)["tokens"] == own_fresh
    first.ask("flush")
    first.kill()
    assert second.generate(fresh) == {"tokens": own_fresh, "cached": [whole_blocks(prompt) for prompt in fresh]}
    assert second.generate(asked) == every
    assert_nothing_is_held(second)


def test_keys_of_less_than_a_block_are_no_keys_of_the_connector(daemon, engine):
    """Blocks would be found by the first half of their tokens."""
    said = engine(connector={"socket": daemon.socket}, prefix_match_unit=BLOCK // 2).refused()
    assert f"prefix_match_unit {BLOCK // 2}: KvPoolConnector's keys are of whole blocks, of {BLOCK} tokens" in said


def test_connector(daemon, engine, stock):
    """Copies blocks of all groups to and from vLLM's own cache, the windows that vLLM keeps."""
    pool = {"socket": daemon.socket, "guaranteed_blocks": 1000, "lease_timeout": 30}
    first, second, third = (engine(connector=pool) for _ in range(3))
    asked = prompts(12, seed=44, shortest=2 * WINDOW)
    own = stock.generate(asked)["tokens"]
    every = {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
    assert first.generate(asked) == {"tokens": own, "cached": [0] * 12}
    assert first.ask("facts")["groups"] == GROUPS
    first.ask("flush")
    assert second.generate(asked) == every
    # Of a window a prefix needs three blocks, and of full attention all.
    facts = second.ask("facts")
    assert facts["transfer"]["loaded_blocks"] == sum(whole_blocks(prompt) // BLOCK + 3 * WINDOW_BLOCKS for prompt in asked)
    assert facts["holds"] == 0 and facts["refused"] == 0
    longer = [prompt + answer + [7] * 40 for prompt, answer in zip(asked[:4], own)]
    assert second.generate(longer)["tokens"] == stock.generate(longer)["tokens"]
    # A block of the third window is not what its key says: all of the request is computed, and that block is not asked for again.
    third.started()
    third.ask("damage", blocks=[7], by="bit")
    assert third.generate(asked)["tokens"] == own
    assert third.ask("facts")["transfer"]["failed_blocks"] == 1
    assert third.ask("reset")["done"]
    assert third.generate(asked)["tokens"] == own
    assert third.ask("facts")["transfer"]["failed_blocks"] == 1


def test_a_beginning_that_prompts_share_is_found_once_two_have_parted(daemon, engine, stock):
    """vLLM keeps no window in the middle of a prompt, until the full attention of a second one shows that they part there."""
    pool = {"socket": daemon.socket, "guaranteed_blocks": 1000}
    first, second = engine(pool), engine(pool)
    asked = prompts(4, seed=33, shortest=100, longest=200, shared=300)
    own = [stock.generate([prompt]) for prompt in asked]
    assert [said["cached"] for said in own] == [[0], [0], [288], [288]]
    assert [one.generate([prompt]) for one, prompt in zip((first, second, first, second), asked)] == own
    # It keeps them everywhere if it is asked to; blocks that a window has left long before the prompt is computed are found then.
    asked = prompts(2, seed=42, shortest=100, longest=200, shared=300)
    own = stock.generate(asked)["tokens"]
    dense = engine(pool, prefix_cache_retention_interval=BLOCK, max_num_batched_tokens=64)
    assert dense.generate(asked[:1]) == {"tokens": own[:1], "cached": [0]}
    assert first.generate(asked[1:]) == {"tokens": own[1:], "cached": [288]}


def test_death_of_another_in_the_middle_of_a_generation(daemon, engine, stock):
    pool = {"socket": daemon.socket}
    first, second = engine(pool), engine(pool)
    asked = prompts(8, seed=34, shortest=200)
    own = stock.generate(asked, tokens=100)["tokens"]
    assert first.generate(asked, tokens=1)["cached"] == [0] * 8
    said = second.generate(asked, tokens=100, kill=[first.started(), 40])
    assert said == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
    # What comes now is written where the dead one's blocks were.
    more = prompts(30, seed=35, shortest=2 * WINDOW)
    assert second.generate(more)["tokens"] == stock.generate(more)["tokens"]


def test_windows_that_are_left_come_free(daemon, engine, stock):
    """In chunks of 64 tokens a request has at most 32 blocks with full attention, and 6 of each group with windows: 50, not 128."""
    block_bytes = 32 * 2 * 2 * 2 * 32 * 4  # Tokens, layers, K and V, heads, dims, bytes.
    one = engine({"socket": daemon.socket}, max_num_batched_tokens=64, max_num_seqs=1, kv_cache_memory_bytes=56 * block_bytes)
    asked = prompts(3, seed=36, shortest=880, longest=900)
    own = stock.generate(asked, tokens=100)["tokens"]
    assert one.generate(asked, tokens=100)["tokens"] == own
    (session,) = daemon.ctl("sessions")["sessions"]
    assert int(session["guaranteed"]) == 50 and int(session["max_blocks"]) == 56
    facts = one.ask("facts")
    assert facts["preemptions"] == 0 and facts["in_use"] == 0 and facts["session"]["refused"] == 0
    # And stay, for others.
    said = engine({"socket": daemon.socket}).generate(asked, tokens=100)
    assert said == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}


def test_windows_alone(daemon, tmp_path):
    """A model without full attention has one group, of which a prefix needs the last window."""
    gemma(1, layers=2, window=WINDOW).save_pretrained(tmp_path / "model")
    pool = {"socket": daemon.socket, "guaranteed_blocks": 500}
    with engines(tmp_path / "model") as start:
        stock, first, second = start(), start(pool), start(pool)
        asked = prompts(8, seed=43, shortest=2 * WINDOW)
        own = stock.generate(asked, tokens=100)["tokens"]
        assert first.generate(asked, tokens=100) == {"tokens": own, "cached": [0] * 8}
        assert second.generate(asked, tokens=100) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
        assert second.ask("facts")["groups"] == ["SlidingWindowSpec"]


def test_both_at_once_on_a_pool_that_is_too_small(engine, stock):
    """Requests are preempted, prefixes evicted, windows without the rest and the rest without windows; what has to be is computed again."""
    with contextlib.closing(Daemon(capacity="8MiB", slab="4MiB")) as daemon:  # 255 blocks for 2 * 8 requests of up to 25 and 3 * 5.
        start = functools.partial(engine, max_num_seqs=8, max_num_batched_tokens=256)
        assert_two_share_a_pool_that_is_too_small(daemon, stock, start, count=16, seeds=(37, 38))


def test_daemon_lost_while_serving(daemon, engine, stock):
    one = engine({"socket": daemon.socket}, max_num_seqs=8)
    asked = prompts(6, seed=39, shortest=2 * WINDOW, longest=300)
    own = stock.generate(asked, tokens=100)["tokens"]
    assert one.generate(asked[:4], tokens=100)["tokens"] == own[:4]
    assert one.generate(asked, tokens=100, kill=[daemon.process.pid, 30])["tokens"] == own
    assert one.generate(asked[:1], tokens=100)["tokens"] == own[:1]
    await_detached(one)


def test_ranks_and_servers(daemon, model, engine, tmp_path):
    """Workers in processes of their own, two of an engine: each has its heads of every group's blocks."""
    pool = {"socket": daemon.socket, "guaranteed_blocks": 1000}
    two = {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, "tensor_parallel_size": 2}
    stock, second = engine(**two), engine(pool, **two)
    server = Server(model, pool, tmp_path / "log", "--tensor-parallel-size=2", "--dtype=float32")
    try:
        asked = prompts(8, seed=40, shortest=2 * WINDOW)
        own = stock.generate(asked, tokens=40)["tokens"]
        second.started(), server.started()
        assert [server.complete(prompt, 40) for prompt in asked] == [(tokens, 0) for tokens in own]
        await_blocks(daemon, "cached", sum(whole_blocks(prompt) // BLOCK + 3 * WINDOW_BLOCKS for prompt in asked))
        server.kill()
        assert second.generate(asked, tokens=40) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
        assert_nothing_is_held(second)
    finally:
        server.kill()


OTHER_KINDS = """
import dataclasses
import torch
from vllm.v1.kv_cache_interface import *
from kvpool_vllm.groups import refuse_other_plans, refuse_others
heads = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
full, sliding = FullAttentionSpec(**heads), SlidingWindowSpec(**heads, sliding_window=80)
def plan(*specs, stride=1 << 20, offset=0):
    names = [[f"layers.{i}"] for i in range(len(specs))]
    groups = [KVCacheGroupSpec(name, spec) for name, spec in zip(names, specs)]
    tensors = [KVCacheTensor(size=0, layers=name, layer_stride=0, block_stride=stride, offset=offset) for name in names]
    return KVCacheConfig(num_blocks=2, kv_cache_tensors=tensors, kv_cache_groups=groups)
for taken in (plan(full, sliding, sliding), plan(sliding), plan(full, FullAttentionSpec(**{**heads, "head_size": 64})),
              plan(full, MambaSpec(block_size=32, shapes=((8,),), dtypes=(torch.float32,))), plan(MLAAttentionSpec(**{**heads, "num_kv_heads": 1})),
              plan(full, SlidingWindowSpec(**{**heads, "block_size": 64}, sliding_window=80))):
    refuse_others(taken, "it"), refuse_other_plans(taken, "it")
def say(refuse, config):
    try:
        refuse(config, "it")
    except ValueError as error:
        print("said", error)
for other in (ChunkedLocalAttentionSpec(**heads, attention_chunk_size=64), CrossAttentionSpec(**heads),
              UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layers.1": full})):
    say(refuse_others, plan(full, other))
say(refuse_others, plan(full, *[sliding] * 16))
two = plan(full, sliding)
for tensors in ([two.kv_cache_tensors[0], dataclasses.replace(two.kv_cache_tensors[1], block_stride=1 << 21)],
                [two.kv_cache_tensors[0], dataclasses.replace(two.kv_cache_tensors[1], offset=(1 << 20) - 16383)],
                two.kv_cache_tensors[:1]):
    say(refuse_other_plans, dataclasses.replace(two, kv_cache_tensors=tensors))
"""


def test_other_kinds_and_plans_are_refused_by_name():
    done = subprocess.run([PYTHON, "-c", OTHER_KINDS], capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("said ")]
    assert len(said) == 7, done.stdout
    for line, words in zip(said, (
            "1 of 2 (chunked local attention: ChunkedLocal", "1 of 2 (cross attention: Cross", "UniformTypeKVCacheSpecs", "17 KV cache groups",
            "1 of 2 (sliding window: SlidingWindowSpec of layers.1): its pages end at byte 16384 of blocks of 2097152 bytes",
            "end at byte 1048577 of blocks of 1048576 bytes", "2 KV cache groups in 1 regions")):
        assert words in line, line


def test_with_and_without_the_hybrid_manager_do_not_share(daemon, engine):
    named, pool = {"socket": daemon.socket, "space": "chat"}, {"socket": daemon.socket}
    engine(named).started()
    said = engine(named, disable_hybrid_kv_cache_manager=True).refused()
    assert "FailedPrecondition" in said and "sliding window 80" in said and "1 * full attention of 7 layers" in said
    said = engine(connector=pool).refused()
    assert "4 KV cache groups" in said and "KvPoolConnector copies blocks of one" in said and "--disable-hybrid-kv-cache-manager" in said


@pytest.mark.skipif(GEMMA is None, reason="needs the model: tests/engines.sh --gemma")
def test_gemma_3():
    """Five groups with windows of 512 tokens, and one with full attention."""
    with (contextlib.closing(Daemon(capacity="1GiB")) as daemon,
          engines(GEMMA, max_num_seqs=4, max_model_len=2048, kv_cache_memory_bytes=256 << 20) as start):
        pool = {"socket": daemon.socket, "guaranteed_blocks": 1000}
        stock, first, second = start(), start(pool), start(pool)
        dice = random.Random(41)
        asked = [[2] + [dice.randrange(1000, 20_000) for _ in range(length)] for length in (100, 530, 700, 1100)]
        own = stock.generate(asked, tokens=24)["tokens"]
        assert first.generate(asked, tokens=24) == {"tokens": own, "cached": [0] * 4}
        assert first.ask("facts")["groups"] == ["SlidingWindowSpec"] * 5 + ["FullAttentionSpec"]
        first.ask("flush")
        first.kill()
        assert second.generate(asked, tokens=24) == {"tokens": own, "cached": [whole_blocks(prompt) for prompt in asked]}
