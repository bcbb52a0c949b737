"""What vLLM's users turn on beside greedy answers: with kvpool it says what stock vLLM says, finds what others left, and holds nothing
afterwards; what can't be is refused at start, by its name."""

import contextlib
import functools
import pathlib

import pytest
from tokenizers import Tokenizer, models as tokenizer_models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from daemon import Daemon
from models import eagle, llama
from vllm_processes import (BLOCK, PYTHON, assert_nothing_is_held, assert_two_share_a_pool_that_is_too_small, await_detached, await_shared,
                            prompts, whole_blocks)

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")

USUAL = {"script": pathlib.Path(__file__).parent / "vllm_features_engine.py"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With a tokenizer, of one character a token for the first 94."""
    directory = tmp_path_factory.mktemp("models") / "model"
    llama(0, head_dim=32).save_pretrained(directory)
    words = {chr(33 + i) if i < 94 else f"t{i}": i for i in range(512)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token="t511"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t510", unk_token="t511").save_pretrained(directory)
    return directory


def test_every_kind_of_sampling(daemon, engine, stock):
    pool = {"socket": daemon.socket}
    first, second = engine(pool), engine(pool)
    asked = prompts(6, seed=51, shortest=100, longest=200, shared=100)
    for params in ({"n": 3, "temperature": 1, "seed": 5}, {"logprobs": 4}, {"prompt_logprobs": 3},
                   {"min_tokens": 6, "stop_token_ids": list(range(0, 512, 4)), "ignore_eos": False},
                   {"regex": "[abcx-z]{40,60}", "max_tokens": 80, "ignore_eos": False}):
        for _ in range(2):  # The second time with what the first has left.
            own = stock.ask("sample", prompts=asked, **params)
            assert first.ask("sample", prompts=asked, **params) == own, params
        assert min(own["cached"]) >= 100 // BLOCK * BLOCK or "prompt_logprobs" in params
    beams = {"prompts": asked[:3], "width": 3, "tokens": 40}
    assert first.ask("beams", **beams) == stock.ask("beams", **beams)
    first.ask("flush")
    said = second.ask("sample", prompts=asked, n=3, temperature=1, seed=5)
    assert said["tokens"] == stock.ask("sample", prompts=asked, n=3, temperature=1, seed=5)["tokens"]
    assert said["cached"] == [whole_blocks(prompt) for prompt in asked]
    assert_nothing_is_held(first, second)


def test_interrupted_requests(daemon, engine, stock):
    """Aborted and paused while they wait, with and without the pool's answer, and while they run; input that comes in parts."""
    pool = {"socket": daemon.socket}
    one, other = engine(pool, max_num_seqs=3), engine(pool)
    asked = prompts(8, seed=52, shortest=100, longest=200, shared=40)
    assert other.generate(asked[:6])["cached"] == [0] + [BLOCK] * 5  # So that answers hold blocks.
    other.ask("flush")
    for what in ({"step": 0, "abort": [1, 5, 6]}, {"step": 0, "abort": list(range(8))}, {"step": 3, "abort": [1, 2, 7]},
                 {"step": 7, "abort": list(range(8))}, {"step": 4, "pause": {"mode": "keep", "clear_cache": False}},
                 {"step": 4, "pause": {"mode": "keep", "clear_cache": True}}):
        assert one.ask("interrupt", prompts=asked, **what) == stock.ask("interrupt", prompts=asked, **what), what
        assert_nothing_is_held(one)
    session = {"chunks": [prompt[:length] for prompt, length in zip(asked, (140, 70, 100, 60))], "tokens": 10}
    said = one.ask("stream", **session)
    assert said["tokens"] == stock.ask("stream", **session)["tokens"]
    assert said["asked"] == [1, 0, 0, 0]  # What comes later is no prefix.
    assert_nothing_is_held(one)
    (space,) = daemon.ctl("spaces")["spaces"]
    assert int(space["blocks"]["sealed"]) == 0, space["blocks"]


def test_a_session_waits_for_input_while_the_daemon_dies_and_comes_back(daemon, engine, stock):
    """Others run meanwhile, and the engine moves: its next input follows what was said before all the same."""
    one = engine({"socket": daemon.socket})
    chunks = [prompt[:length] for prompt, length in zip(prompts(4, seed=63, shortest=200), (140, 70, 100, 60))]
    own = stock.ask("stream", chunks=chunks, tokens=10)["tokens"]
    said = one.ask("stream", chunks=chunks[:2], tokens=10, ends=False)["tokens"]
    daemon.kill()
    await_detached(one)
    one.generate([[1, 2, 3]])
    assert one.ask("facts")["own"]
    said += one.ask("stream", chunks=chunks[2:3], tokens=10, ends=False)["tokens"]
    daemon.start()
    await_shared(one)
    said += one.ask("stream", chunks=chunks[3:], tokens=10)["tokens"]
    assert said == own
    assert_nothing_is_held(one)


def test_a_request_looks_again_when_its_turn_comes(daemon, engine, stock):
    """When it came there was no prefix; the request before it has left one."""
    one = engine({"socket": daemon.socket}, max_num_seqs=1)
    asked = prompts(4, seed=53, shortest=100, longest=200, shared=200)
    every = 200 // BLOCK * BLOCK
    assert one.generate(asked) == {"tokens": stock.generate(asked)["tokens"], "cached": [0, every, every, every]}
    assert_nothing_is_held(one)


def test_drafts_of_which_some_are_rejected(daemon, engine, stock):
    drafting = functools.partial(engine, speculative_config=NGRAM)
    asked = [prompt + prompt[:80] for prompt in prompts(6, seed=54, shortest=100, longest=200)]
    first, second = drafting({"socket": daemon.socket}), engine({"socket": daemon.socket})
    own = stock.generate(asked, tokens=150)["tokens"]
    assert first.generate(asked, tokens=150)["tokens"] == own
    accepted, rejected = first.ask("facts")["drafts"]
    assert accepted > 0 and rejected > 0
    # Blocks that were filled by drafts, too, have what was said in them.
    first.ask("flush")
    longer = [prompt + answer + [7] for prompt, answer in zip(asked, own)]
    said = second.generate(longer)
    assert said["tokens"] == stock.generate(longer)["tokens"]
    assert all(cached >= whole_blocks(prompt + answer[:-1]) for cached, prompt, answer in zip(said["cached"], asked, own))
    assert_nothing_is_held(first, second)
    first.kill(), second.kill()
    with contextlib.closing(Daemon(capacity="8MiB", slab="4MiB")) as small:
        assert_two_share_a_pool_that_is_too_small(small, stock, functools.partial(drafting, max_num_seqs=8), count=8, seeds=(55, 56))


def test_drafts_with_layers_of_their_own(daemon, engine, stock, tmp_path):
    """Blocks hold K and V of the draft model, too. An engine without it, or with another, has a space of its own."""
    drafts = [{"method": "eagle", "model": eagle(tmp_path / str(seed), seed), "num_speculative_tokens": 3} for seed in (0, 1)]
    pool = {"socket": daemon.socket}
    asked = prompts(8, seed=58, shortest=100, longest=300, shared=70)
    own = stock.generate(asked, tokens=100)["tokens"]
    alone, first, second = (engine(some, speculative_config=drafts[0]) for some in (None, pool, pool))
    assert alone.generate(asked, tokens=100)["tokens"] == own
    assert first.generate(asked, tokens=100)["tokens"] == own
    accepted, rejected = alone.ask("facts")["drafts"]
    assert accepted > 0 and rejected > 0
    # With the prefixes that the first has left, as many drafts are right: their K and V are the first's.
    first.ask("flush")
    found, again = (one.generate(asked, tokens=100) for one in (second, alone))
    assert found["tokens"] == own and found["cached"] == again["cached"] and min(found["cached"]) > 0
    assert second.ask("facts")["drafts"] == [now - before for now, before in zip(alone.ask("facts")["drafts"], (accepted, rejected))]
    longer = [prompt + answer + [7] for prompt, answer in zip(asked, own)]
    assert second.generate(longer)["tokens"] == first.generate(longer)["tokens"] == stock.generate(longer)["tokens"]
    assert_nothing_is_held(first, second)
    alone.kill(), first.kill()
    for other in (engine(pool), engine(pool, speculative_config=drafts[1])):
        assert other.generate(asked[:2])["cached"][0] == 0
        other.kill()
    daemon.kill()
    await_detached(second)
    assert second.generate(asked, tokens=100)["tokens"] == own


def test_priorities_in_a_pool_that_is_too_small(daemon, engine, stock):
    one = engine({"socket": daemon.socket}, scheduling_policy="priority", num_gpu_blocks_override=50, watermark=0.05)
    asked = prompts(16, seed=57, shortest=100, longest=300, shared=60)
    own = stock.ask("sample", prompts=asked, max_tokens=60)["tokens"]
    for _ in range(2):
        said = one.ask("sample", prompts=asked, max_tokens=60, priority=[7 * i % 5 for i in range(16)])
        assert said["tokens"] == own
    assert one.ask("facts")["preemptions"] > 0
    assert_nothing_is_held(one)


@pytest.mark.parametrize("settings", [
    {"block_size": 64, "prefix_caching_hash_algo": "sha256_cbor", "kv_cache_metrics": True, "kv_cache_metrics_sample": 1.0,
     "disable_log_stats": False, "long_prefill_token_threshold": 40, "max_num_batched_tokens": 128},
    {"block_size": 128, "dtype": "bfloat16", "enable_chunked_prefill": False, "scheduler_reserve_full_isl": False},
], ids=["small steps", "bfloat16"])
def test_other_settings(daemon, engine, stock, settings):
    pool = {"socket": daemon.socket}
    first, second = (engine(pool, **settings) for _ in range(2))
    if "dtype" in settings:
        stock = engine(**settings)
    asked, block = prompts(6, seed=58, shortest=150), settings["block_size"]
    own = stock.generate(asked)["tokens"]
    assert first.generate(asked) == {"tokens": own, "cached": [0] * 6}
    first.ask("flush")
    assert second.generate(asked) == {"tokens": own, "cached": [(len(prompt) - 1) // block * block for prompt in asked]}
    assert_nothing_is_held(first, second)


def test_without_prefix_caching(daemon, engine, stock):
    """The memory is the pool's, and nobody finds what is in it."""
    pool = {"socket": daemon.socket}
    alone, other = engine(pool, enable_prefix_caching=False), engine(pool)
    asked = prompts(6, seed=59, shortest=100)
    own = stock.generate(asked)["tokens"]
    for _ in range(2):
        assert alone.generate(asked) == {"tokens": own, "cached": [0] * 6}
    assert other.generate(asked) == {"tokens": own, "cached": [0] * 6}
    assert alone.generate(asked)["cached"] == [0] * 6
    assert_nothing_is_held(alone, other)


def test_vectors_of_what_another_has_read(daemon, engine, stock):
    """A pooling model finds the prefixes of one that generates, of the same weights, and it those of the pooling model."""
    pool = {"socket": daemon.socket}
    speaker, pooler, own = engine(pool), engine(pool, runner="pooling"), engine(runner="pooling")
    asked = prompts(6, seed=60, shortest=100)
    assert speaker.generate(asked)["tokens"] == stock.generate(asked)["tokens"]
    speaker.ask("flush")
    assert pooler.ask("embed", prompts=asked) == {"vectors": own.ask("embed", prompts=asked)["vectors"],
                                                  "cached": [whole_blocks(prompt) for prompt in asked]}
    fresh = prompts(3, seed=62, shortest=100)
    pooler.ask("embed", prompts=fresh), pooler.ask("flush")
    assert speaker.generate(fresh) == {"tokens": stock.generate(fresh)["tokens"], "cached": [whole_blocks(prompt) for prompt in fresh]}
    assert_nothing_is_held(speaker, pooler)


def test_an_engine_that_has_lost_its_daemon_may_be_idle(daemon, engine, stock):
    """Its core takes a step after its last request, with nothing in it."""
    one = engine({"socket": daemon.socket}, processes=True)
    asked = prompts(1, seed=61, shortest=40, longest=40)  # A block to ask for, at which it learns it, and few to hold.
    own = stock.generate(asked)["tokens"]
    assert one.generate(asked)["tokens"] == own
    daemon.kill()
    for _ in range(5):
        assert one.generate(asked)["tokens"] == own


def test_another_connector_beside_the_pool(daemon, engine, stock, tmp_path):
    """What it loads is shared as what was computed is. Blocks that it could not load are computed, and nothing of that step is shared."""
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "storage")}}
    pool = {"socket": daemon.socket}
    saves, loads, other = engine(kv_transfer_config=transfer), engine(pool, kv_transfer_config=transfer), engine(pool)
    asked = prompts(6, seed=58, shortest=100, longest=300)
    whole = [whole_blocks(prompt) for prompt in asked]
    own = stock.generate(asked)["tokens"]
    assert saves.generate(asked)["tokens"] == own
    assert loads.generate(asked) == {"tokens": own, "cached": whole}
    loads.ask("flush")
    assert other.generate(asked) == {"tokens": own, "cached": whole}
    assert_nothing_is_held(loads, other)


@pytest.mark.parametrize("settings, words", [
    ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype", "FP8"]),
    ({"prefix_caching_hash_algo": "xxhash"}, ["prefix_caching_hash_algo", "xxhash"]),
    ({"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}, ["kv_events_config"]),
    ({"kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}}, ["kv_transfer_config", "DecodeBenchConnector"]),
    ({"speculative_config": {"method": "draft_model", "model": "drafts", "num_speculative_tokens": 2}}, ["speculative_config", "draft_model"]),
    ({"model": "bert", "runner": "pooling", "max_model_len": 512}, ["no KV cache"])], ids=lambda given: next(iter(given)))
def test_refused_by_name(daemon, model, engine, tmp_path, settings, words):
    if settings.get("model") == "bert":
        BertModel(BertConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)).save_pretrained(tmp_path / "bert")
    if "model" in settings:
        settings = settings | {"model": tmp_path / settings["model"], "skip_tokenizer_init": True}
    if "speculative_config" in settings:
        settings = {"speculative_config": settings["speculative_config"] | {"model": str(model)}}
    said = engine({"socket": daemon.socket}, **settings).refused()
    assert all(word in said for word in words), said
