"""vLLM on kvpool: the same tokens as vLLM's own cache, prefixes of other processes, and nothing wrong when something dies.

Engines are processes of the environment that has vLLM: see vllm_processes.py.
"""

import contextlib
import functools
import subprocess

import pytest

from daemon import Daemon
from models import adapter
from vllm_processes import (BLOCK, PYTHON, assert_nothing_is_held, assert_two_share_a_pool_that_is_too_small, await_detached, prompts,
                            whole_blocks)

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")


def test_fifty_prompts_and_another_process_prefix_and_its_death(daemon, engine, stock):
    # A pool grows behind demand, and prefixes may be evicted meanwhile: this one is large from the start.
    pool = {"socket": daemon.socket, "guaranteed_blocks": 1000}
    first, second = engine(pool), engine(pool)
    asked = prompts(50, seed=1)
    own = stock.generate(asked)["tokens"]
    said = first.generate(asked)
    assert said["tokens"] == own and said["cached"] == [0] * 50
    # What the first has computed, the second has not to.
    said = second.generate(asked)
    assert said["tokens"] == own
    assert said["cached"] == [whole_blocks(prompt) for prompt in asked]
    (space,) = daemon.ctl("spaces")["spaces"]
    assert int(space["blocks"]["cached"]) >= sum(whole_blocks(prompt) // BLOCK for prompt in asked)
    # Answers are prefixes too.
    longer = [prompt + answer + [7] for prompt, answer in zip(asked[:10], own)]
    own_longer = stock.generate(longer)["tokens"]
    said = first.generate(longer)
    assert said["tokens"] == own_longer and min(c - whole_blocks(p) for c, p in zip(said["cached"], asked)) >= 0
    # The death of the one takes nothing from the other, nor what it had sealed.
    fresh = prompts(10, seed=2, shortest=100)
    own_fresh = stock.generate(fresh)["tokens"]
    assert first.generate(fresh)["tokens"] == own_fresh
    first.ask("flush")
    first.kill()
    said = second.generate(fresh)
    assert said["tokens"] == own_fresh and said["cached"] == [whole_blocks(prompt) for prompt in fresh]
    assert second.generate(asked)["tokens"] == own
    assert_nothing_is_held(second)


def test_death_of_another_in_the_middle_of_a_generation(daemon, engine, stock):
    pool = {"socket": daemon.socket}
    first, second = engine(pool), engine(pool)
    asked = prompts(8, seed=3, shortest=200)
    own = stock.generate(asked, tokens=60)["tokens"]
    assert first.generate(asked, tokens=1)["cached"] == [0] * 8
    said = second.generate(asked, tokens=60, kill=[first.started(), 10])
    assert said["tokens"] == own and said["cached"] == [whole_blocks(prompt) for prompt in asked]
    # What comes now is written where the dead one's blocks were.
    more = prompts(40, seed=4)
    assert second.generate(more)["tokens"] == stock.generate(more)["tokens"]


def test_both_at_once_on_a_pool_that_is_too_small(engine, stock):
    """Requests are preempted, prefixes evicted, and all is computed again that has to be."""
    with contextlib.closing(Daemon(capacity="8MiB", slab="4MiB")) as daemon:  # 170 blocks for 2 * 8 requests of up to 25.
        start = functools.partial(engine, max_num_seqs=8)
        assert_two_share_a_pool_that_is_too_small(daemon, stock, start, count=16, seeds=(5, 6))


def test_prompts_in_chunks(daemon, engine, stock):
    pool = {"socket": daemon.socket}
    chunked = engine(pool, max_num_batched_tokens=64, max_num_seqs=4)
    asked = prompts(12, seed=7, shared=70)
    own = stock.generate(asked)["tokens"]
    assert chunked.generate(asked)["tokens"] == own
    said = chunked.generate(asked)
    assert said["tokens"] == own and said["cached"] == [whole_blocks(prompt) for prompt in asked]


def test_salts_and_resets_part(daemon, engine, stock):
    pool = {"socket": daemon.socket}
    first, second = engine(pool), engine(pool)
    asked = prompts(4, seed=9, shortest=100)
    every = [whole_blocks(prompt) for prompt in asked]
    own = stock.generate(asked)["tokens"]
    assert first.generate(asked, salt="a")["cached"] == [0] * 4
    assert second.generate(asked)["cached"] == [0] * 4
    assert second.generate(asked, salt="b")["cached"] == [0] * 4
    said = second.generate(asked, salt="a")
    assert said["cached"] == every and said["tokens"] == own
    # A reset is for the one that says it, whose new blocks nobody finds.
    assert first.ask("reset")["done"]
    said = first.generate(asked)
    assert said["cached"] == [0] * 4 and said["tokens"] == own
    assert first.generate(asked)["cached"] == every
    assert second.generate(asked)["cached"] == every
    fresh = prompts(4, seed=10, shortest=100)
    first.generate(fresh)
    assert second.generate(fresh)["cached"] == [0] * 4


def test_a_salt_parts_from_behind_a_shared_prefix(daemon, engine, stock):
    """A system prompt of 100 tokens, three full blocks, is everybody's, in vLLM's own index as in the pool."""
    pool = {"socket": daemon.socket}
    first, second = engine(pool), engine(pool)
    one, two = asked = prompts(2, seed=11, shortest=100, shared=100)
    own = stock.generate(asked)["tokens"]
    head, every = 3 * BLOCK, whole_blocks(one)

    def said(process, prompt, cached, **salted):
        assert process.generate([prompt], **salted) == {"tokens": [own[asked.index(prompt)]], "cached": [cached]}, salted

    said(first, one, 0, salt="a", shared=100)
    for process in (first, second):
        for shared in (100, head, head + BLOCK - 1):  # Where the salted block begins decides.
            said(process, one, every, salt="a", shared=shared)
    said(second, one, head, salt="b", shared=100)
    said(first, one, every, salt="b", shared=100)
    said(second, two, head, salt="a", shared=100)
    said(second, one, head)  # Without a salt, whatever is said: it computes the rest.
    said(first, one, every, shared=100)
    said(first, one, head + BLOCK, salt="a", shared=head + BLOCK)
    said(second, one, 0, salt="a")  # From the root on.
    for process, wrong in ((first, -1), (second, True), (second, "100")):  # The same.
        said(process, one, every, salt="a", shared=wrong)
    said(second, one, every, salt="c", shared=10**6)  # All of it is shared.


def test_adapters_share_by_what_is_in_them(daemon, engine, tmp_path):
    """Not by their names: one name may stand for another adapter in another engine, and one adapter have two names."""
    pool = {"socket": daemon.socket}
    first, second, own = (engine(some, enable_lora=True, max_lora_rank=8) for some in (pool, pool, None))
    one, same, other = (adapter(tmp_path / name, seed=seed) for name, seed in (("one", 1), ("same", 1), ("other", 2)))
    asked = prompts(3, seed=14, shortest=100)
    every = [whole_blocks(prompt) for prompt in asked]
    plain, tuned = (own.generate(asked, lora=lora)["tokens"] for lora in (None, ["tuned", one]))
    assert plain != tuned
    assert first.generate(asked, lora=["tuned", one]) == {"tokens": tuned, "cached": [0] * 3}
    assert second.generate(asked) == {"tokens": plain, "cached": [0] * 3}
    assert second.generate(asked, lora=["another name", same]) == {"tokens": tuned, "cached": every}
    third = engine(pool, enable_lora=True, max_lora_rank=8)
    assert third.generate(asked, lora=["tuned", other])["cached"] == [0] * 3


@pytest.mark.parametrize("steps", [1, 30])
def test_daemon_lost_while_serving(daemon, engine, stock, steps):
    one = engine({"socket": daemon.socket}, max_num_seqs=8)
    asked = prompts(8, seed=11, shortest=100, longest=200)
    own = stock.generate(asked, tokens=60)["tokens"]
    assert one.generate(asked[:4], tokens=60)["tokens"] == own[:4]
    said = one.generate(asked[:6], tokens=60, kill=[daemon.process.pid, steps])
    assert said["tokens"] == own[:6]
    # With what it holds it goes on, and says nothing wrong.
    said = one.generate(asked[:1], tokens=60)
    assert said["tokens"] == own[:1]
    await_detached(one)


def test_daemon_lost_with_answers_to_requests_that_wait(daemon, engine, stock):
    """What they were told is there is what the first of them leaves behind, and nobody can take it back."""
    one = engine({"socket": daemon.socket}, max_num_seqs=1)
    asked = prompts(4, seed=13, shortest=40, longest=100, shared=96)
    own = stock.generate(asked, tokens=60)["tokens"]
    assert one.generate(asked[:1], tokens=60)["tokens"] == own[:1]
    said = one.generate(asked[1:], tokens=60, kill=[daemon.process.pid, 20])
    assert said["tokens"] == own[1:] and all(cached >= 96 for cached in said["cached"])
    await_detached(one)


def test_refused_at_start(daemon, models, engine):
    pool = {"socket": daemon.socket, "space": "chat"}
    one = engine(pool)
    one.started()
    for other, words in (({"dtype": "bfloat16"}, ("float32", "bfloat16")), ({"block_size": 64}, ("32", "64")),
                         ({"model": models / "1"}, ("weights",))):
        said = engine(pool, **other).refused()
        assert "FailedPrecondition" in said and all(word in said for word in words), said
    assert "no such option: sokcet" in engine({"sokcet": ""}).refused()
    assert "did not load" in (said := engine(pool, environment={"VLLM_PLUGINS": ""}).refused()) or "has not loaded the plugin" in said
    assert "calculate_kv_scales" in engine(pool, calculate_kv_scales=True, kv_cache_dtype="fp8").refused()


def test_no_daemon(engine, stock):
    said = engine({"socket": "/nowhere/kvpoold.sock", "open_timeout": 1}).refused()
    assert "needs a kvpoold" in said and "/nowhere/kvpoold.sock" in said
    own = engine({"socket": "/nowhere/kvpoold.sock", "open_timeout": 1, "fallback": "own"})
    asked = prompts(5, seed=12)
    assert own.generate(asked)["tokens"] == stock.generate(asked)["tokens"]


TAMPERED = """
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm import _custom_ops as ops
from kvpool_vllm import cpu_attention
spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
isa = cpu_attention.isa_of(spec, "auto")
cpu_attention.check_strides(spec, isa)
print(cpu_attention.planes(spec, isa))
write = ops.cpu_attn_reshape_and_cache
def dense(k, v, keys, values, slots, isa, **more):  # A kernel that takes blocks for contiguous.
    size = keys.shape[1] * 2 * keys.shape[2] * keys.shape[3]
    flat = [x.as_strided(x.shape, (size, *x.stride()[1:])) for x in (keys, values)]
    write(k, v, *flat, slots, isa, **more)
ops.cpu_attn_reshape_and_cache = dense
try:
    cpu_attention.check_strides(spec, isa)
except RuntimeError as error:
    print(error)
"""


def test_kernels_that_take_no_strides_are_noticed():
    done = subprocess.run([PYTHON, "-c", TAMPERED], capture_output=True, text=True, check=True)
    planes, refusal = done.stdout.strip().splitlines()[-2:]
    assert planes == "((0, 1, 2048, 32), (1024, 32, 2048, 1))"  # K is column-major.
    assert "can't have its K and V in a pool" in refusal
