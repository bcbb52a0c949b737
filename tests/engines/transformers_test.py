"""Transformers on kvpool: the same tokens as its own cache, prefixes of other processes, budgets that hold."""

import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvpool
from kvpool_transformers import KvPoolCache, LessKernel, attention, fingerprint_of, open_session, train_gates, train_less
from kvpool_transformers.model import ModelFacts
from daemon import Daemon, KeptDaemon
from models import DEVICE, PLACE, gemma, generate, llama, prompt

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_output_is_that_of_its_own_cache(daemon, dtype):
    model = llama(dtype=dtype)
    with open_session(model, socket=daemon.socket) as session:
        for tokens, seed in ((1, 1), (15, 2), (16, 3), (17, 4), (100, 5), (257, 6)):
            ids = prompt(tokens, seed)
            own = generate(model, ids)
            cache = KvPoolCache(session)
            assert generate(model, ids, cache) == own
            assert cache.get_seq_length() == cache.logical == cache.resident == tokens + 39
            # Again, with the prefix that is there now: of the prompt all but its last tokens.
            again = KvPoolCache(session, prompt=ids)
            assert again.shared == (tokens - 1) // 16 * 16 == again.get_seq_length()
            assert generate(model, ids, again) == own
            assert again.logical == tokens + 39


def test_logits_with_a_prefix_are_those_without(daemon):
    model, ids = llama(), prompt(200)
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        whole = model(ids).logits
        cache = KvPoolCache(session)
        assert torch.equal(model(ids, past_key_values=cache).logits, whole)
        # In chunks, as long prompts come.
        cache, parts = KvPoolCache(session), []
        for first in range(0, 200, 48):
            parts.append(model(ids[:, first:first + 48], past_key_values=cache).logits)
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)
        cache = KvPoolCache(session, prompt=ids)
        assert cache.shared == 192
        assert torch.allclose(model(ids[:, 192:], past_key_values=cache).logits, whole[:, 192:], atol=1e-4)


ENGINE = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from kvpool_transformers import KvPoolCache, open_session
from models import generate, llama, prompt
model, ids = llama(), prompt(300)
session = open_session(model, socket=sys.argv[1])
cache = KvPoolCache(session, prompt=ids)
print(cache.shared, generate(model, ids, cache), flush=True)
session.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_process_prefix_and_its_death(daemon):
    """A prefix that another engine computed is a hit; it stays one, and right, after kill -9 of that engine."""
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, daemon.socket, HERE], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    said = engine.stdout.readline()
    assert engine.stdout.readline() == "ready\n"
    model, ids = llama(), prompt(300)
    own = generate(model, ids)
    assert said == f"0 {own}\n"
    with open_session(model, socket=daemon.socket) as session:
        cache = KvPoolCache(session, prompt=ids)
        assert cache.shared == 288 and generate(model, ids, cache) == own
        engine.kill()
        engine.wait()
        # The first half of the one that goes on lives through it.
        cache = KvPoolCache(session, prompt=ids)
        assert cache.shared == 288 and generate(model, ids, cache) == own
        assert session.counters["refused"] == 0
    engine.stdin.close(), engine.stdout.close()


def test_kill_9_in_the_middle_of_a_generation(daemon):
    """One engine generates on a prefix of another that dies meanwhile."""
    model, ids = llama(), prompt(300)
    own = generate(model, ids)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, daemon.socket, HERE], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    engine.stdout.readline(), engine.stdout.readline()
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        cache = KvPoolCache(session, prompt=ids)
        logits = model(ids[:, cache.shared:], past_key_values=cache).logits
        said = []
        for i in range(40):
            if i == 5:
                engine.kill()
                engine.wait()
                with session.lease(200) as others:  # What it leased is written by others.
                    torch.from_dlpack(session.data(blocks=session.max_blocks))[others.ids] = 255
            said.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([[said[-1]]], device=PLACE), past_key_values=cache).logits
        assert said == own
    engine.stdin.close(), engine.stdout.close()


def test_kills_of_the_daemon():
    """With a keeper an engine goes on through them, with a budget too, and finds again what it had computed."""
    daemon = KeptDaemon(capacity="256MiB", slab="16MiB", device=DEVICE)
    try:
        model, ids = llama(), prompt(300)
        own = generate(model, ids)
        with open_session(model, socket=daemon.socket) as session:
            pruned = generate(model, ids, KvPoolCache(session, policy="paged_eviction", budget=64), tokens=100)
            with daemon.killed_every(0.3) as kills:
                while kills[0] < 20:
                    assert generate(model, ids, KvPoolCache(session, prompt=ids)) == own
                    cache = KvPoolCache(session, policy="paged_eviction", budget=64)
                    assert generate(model, ids, cache, tokens=100) == pruned
            session.flush()
            until = time.monotonic() + 60
            while (cache := KvPoolCache(session, prompt=ids)).shared != 288:
                assert time.monotonic() < until
                time.sleep(0.05)
            assert generate(model, ids, cache) == own
            assert session.counters["refused"] == 0
    finally:
        daemon.close()


@pytest.mark.parametrize("policy", ["paged_eviction", "streaming_llm", "keydiff", "inverse_key_l2", "random", "recency"])
def test_a_budget_holds(daemon, policy):
    model, ids = llama(), prompt(150)
    with open_session(model, socket=daemon.socket) as session:
        cache = KvPoolCache(session, prompt=ids, policy=policy, budget=64)
        seen = []
        write = cache.settle

        def settle():
            write()
            seen.append(cache.resident)

        cache.settle = settle
        said = generate(model, ids, cache, tokens=100)
        assert len(said) == 100 and cache.logical == 249 == cache.get_seq_length()
        # After the prompt no more than the budget, and less than a block above it ever after.
        assert max(seen) < 64 + 16 and cache.resident == cache.logical - cache.dropped
        assert cache.get_mask_sizes(1, 0) == (cache.resident + 1, cache.logical - cache.resident)


def test_pruned_attention_is_that_of_the_kept_tokens(daemon):
    """StreamingLLM, whose kept tokens are known: logits are those of a mask over the full cache."""
    model, ids = llama(layers=1), prompt(100)  # In one layer K and V depend on no other token.
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        cache = KvPoolCache(session, policy="streaming_llm", params={"sinks": 4}, budget=32)
        model(ids[:, :99], past_key_values=cache)
        assert cache.resident == 32
        logits = model(ids[:, 99:], past_key_values=cache).logits[0, -1]
        mask = torch.zeros(1, 100, dtype=torch.long, device=PLACE)
        mask[0, :4] = mask[0, 99 - 28:] = 1
        masked = model(ids, attention_mask=mask, position_ids=torch.arange(100, device=PLACE)[None]).logits[0, -1]
        assert torch.allclose(logits, masked, atol=1e-4)
        assert not torch.allclose(logits, model(ids).logits[0, -1], atol=1e-2)


@pytest.mark.parametrize("policy", ["h2o", "roco", "tova", "snapkv", "attention_mean", "sage_kv", "cake", "rkv", "caote"])
def test_policies_that_go_by_attention(daemon, policy):
    model, ids = llama(), prompt(150)
    own = generate(model, ids)
    with open_session(model, signals=True, socket=daemon.socket) as session:
        assert generate(model, ids, KvPoolCache(session)) == own  # It computes what it computed before.
        params = {"recent": 16} if policy in ("h2o", "roco") else {"recent": 8} if policy == "sage_kv" else {}
        cache = KvPoolCache(session, policy=policy, params=params, budget=64)
        assert len(generate(model, ids, cache, tokens=60)) == 60
        assert 64 - 16 < cache.resident < 64 + 16 and cache.logical == 209


def resident_keys(cache, layer):
    """[kv_heads, tokens, dim]"""
    return cache.layers[layer].k[torch.tensor(cache._sequence.ids)].flatten(0, 1)[:cache.resident].transpose(0, 1)


@pytest.mark.parametrize("scope", ["sequence", "layer", "head"])
@pytest.mark.parametrize("window", [32, 1000])  # The latter has 3 MB of queries, more than a request carries.
def test_a_prompt_keeps_what_its_last_queries_attend(daemon, scope, window):
    model, ids = llama(layers=3, head_dim=64), prompt(1100)
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        whole = KvPoolCache(session)
        asked = []
        whole.observed = lambda layer, query, key, scaling: asked.append((query[0, :, -window:], key[0], scaling))
        model(ids, past_key_values=whole)
        cache = KvPoolCache(session, policy="snapkv", params={"pool": "none"}, budget=window + 64, scope=scope, window=window)
        model(ids, past_key_values=cache)
        assert cache.resident == window + 64 and cache.logical == 1100
        scores = []
        for query, key, scaling in asked:
            logits = torch.einsum("hgqd,htd->hgqt", query.unflatten(0, (2, 2)), key) * scaling
            logits[..., torch.arange(1100) > torch.arange(1100 - window, 1100)[:, None]] = -torch.inf
            scores.append(logits.softmax(-1).mean((1, 2))[:, :1100 - window])
        scores = torch.stack(scores)  # [layers, kv_heads, tokens before the window]
        joined = {"sequence": scores.mean((0, 1), keepdim=True), "layer": scores.mean(1, keepdim=True), "head": scores}[scope]
        for layer, heads in enumerate(joined.topk(64).indices.sort().values.expand(3, 2, -1)):
            kept, all_of_it = (resident_keys(each, layer) for each in (cache, whole))
            for head, places in enumerate(heads):
                assert torch.equal(kept[head, :64], all_of_it[head, places]), (layer, head)
                assert torch.equal(kept[head, 64:], all_of_it[head, -window:])


@pytest.fixture
def guarding():
    daemon = Daemon(capacity="64MiB", slab="16MiB", device=DEVICE, flags=["--guard-share=1", "--guard-bound=0.0001", "--guard-samples=3"])
    yield daemon
    daemon.close()


def test_the_guard_measures_what_the_models_attention_loses(guarding):
    """Against the model's own queries, K and V in PyTorch; then the policy is off, and an operator turns it on."""
    model, ids = llama(), prompt(150)

    with open_session(model, signals=True, socket=guarding.socket) as session, torch.no_grad():
        means = []
        for sample, measured in enumerate([0, 1, 0]):  # The layers that have their turns.
            whole, cache = KvPoolCache(session), KvPoolCache(session, policy="recency", budget=48, guard=True, window=8)
            asked = []
            whole.observed = lambda layer, query, key, scaling: asked.append((query[0, :, -8:], key[0], scaling))
            for each in (whole, cache):
                model(ids, past_key_values=each)
                each.settle()
            query, key, scaling = asked[measured]
            value = whole.layers[measured].v[torch.tensor(whole._sequence.ids)].flatten(0, 1)[:150].transpose(0, 1)
            logits = torch.einsum("hgqd,htd->hgqt", query.unflatten(0, (2, -1)), key) * scaling
            logits[..., torch.arange(150) > torch.arange(142, 150)[:, None]] = -torch.inf
            outputs = torch.einsum("hgqt,htd->hgqd", logits.softmax(-1), value)
            logits[..., :102] = -torch.inf  # The most recent 48 stay.
            moved = torch.einsum("hgqt,htd->hgqd", logits.softmax(-1), value) - outputs
            means.append(float((moved.norm(dim=-1) / outputs.norm(dim=-1)).mean()))
            found = guarding.ctl("guard")["policies"][0]
            assert found["samples"] == sample + 1 and found["off"] == (sample == 2)
            assert found["mean"] == pytest.approx(sum(means) / len(means), rel=1e-4)
        with pytest.raises(kvpool.FailedPreconditionError, match="policy recency is off in space 1"):
            generate(model, ids, KvPoolCache(session, policy="recency", budget=48, guard=True))
        assert len(generate(model, ids, KvPoolCache(session, policy="keydiff", budget=48), tokens=40)) == 40
        guarding.ctl("guard", "--on=recency", "--space=1")
        assert len(generate(model, ids, KvPoolCache(session, policy="recency", budget=140, guard=True), tokens=6)) == 6
        keydiff, recency = guarding.ctl("guard")["policies"]
        assert keydiff["policy"] == "keydiff" and set(keydiff["operations"]) == {"no_window"}
        assert recency["operations"] == {"measured": "5"} and recency["samples"] == 2 and not recency["off"]


@pytest.mark.parametrize("scope", ["sequence", "head"])
def test_what_leaves_is_merged(daemon, scope):
    """Against D2O's formulas in PyTorch, from the whole sequence's K and V and those positions that a cache that drops has kept."""
    model, ids = llama(), prompt(150)
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        told = {"policy": "keydiff", "budget": 48, "scope": scope}
        whole, dropping, merging, fixed = (KvPoolCache(session, **more) for more in (
            {}, told, told | {"disposition": "merge"}, told | {"disposition": "merge", "merge_threshold": 2.0}))
        for cache in (whole, dropping, merging, fixed):
            model(ids, past_key_values=cache)
            cache.settle()
        merged = 0
        for layer in range(3):
            for head in range(2):
                keys, left = resident_keys(whole, layer)[head], resident_keys(dropping, layer)[head]
                assert torch.equal(resident_keys(fixed, layer)[head], left)
                places = torch.tensor([int((keys == key).all(1).nonzero()[0]) for key in left])
                leave = torch.tensor([i for i in range(150) if i not in places.tolist()])
                near = torch.nn.functional.normalize(keys[leave], dim=1) @ torch.nn.functional.normalize(left, dim=1).T
                cosine, to = near.max(1)
                chosen = cosine >= cosine.mean()
                weights = torch.zeros(48, 150).index_put((to[chosen], leave[chosen]), cosine[chosen].exp())
                weights[torch.arange(48), places] = torch.e
                weights /= weights.sum(1, keepdim=True)
                assert torch.allclose(resident_keys(merging, layer)[head], weights @ keys, atol=1e-5)
                merged += int(chosen.sum())
        assert merging.merged == merged > 0 and fixed.merged == dropping.merged == 0
        assert len(generate(model, ids, KvPoolCache(session, **told, disposition="merge"), tokens=60)) == 60


@pytest.mark.parametrize("scope", ["sequence", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_leaves_goes_on_in_low_precision(daemon, scope, dtype):
    """What stays is what a cache that drops keeps, and with eight bits the rest is nearly as good as there."""
    model, ids, more = llama(dtype=dtype), prompt(150), prompt(5, 9)
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        told = {"policy": "keydiff", "budget": 48, "scope": scope}
        uncut = model(torch.cat([ids, more], 1)).logits[:, 150:]
        distance, kept = {}, {}
        for name, terms in {"drop": {}, "8": {"disposition": "low", "low_bits": 8}, "4": {"disposition": "low"},
                            "2": {"disposition": "low", "low_bits": 2}}.items():
            low = 102 if terms else 0
            at_once, one_by_one = KvPoolCache(session, **told, **terms), KvPoolCache(session, **told, **terms)
            for cache in (at_once, one_by_one):
                model(ids, past_key_values=cache)
                assert (cache.resident, cache.low, cache.dropped) == (48, low, 102 - low) and cache.get_seq_length() == 150
            kept[name] = torch.stack([resident_keys(at_once, layer) for layer in range(3)])
            assert torch.equal(kept[name], kept["drop"])
            # Five tokens see all that is in front of them, and each other as they do when they come one by one.
            logits = model(more, past_key_values=at_once).logits
            singly = torch.cat([model(more[:, i:i + 1], past_key_values=one_by_one).logits for i in range(5)], 1)
            assert torch.allclose(logits, singly, atol=1e-4 if dtype == torch.float32 else 0.3)
            distance[name] = (logits - uncut).float().square().mean().sqrt().item()
        assert distance["8"] < distance["4"] < distance["2"] < distance["drop"] and distance["8"] < 0.1 * distance["drop"], distance


def leased(daemon):
    (space,) = daemon.ctl("spaces")["spaces"]
    return int(space["blocks"]["leased"])


def test_low_precision_adds_up_over_turns_and_is_given_back(daemon):
    model = llama(dtype=torch.bfloat16)
    with open_session(model, signals=True, socket=daemon.socket, magazine_blocks=0) as session, torch.no_grad():
        with KvPoolCache(session, policy="h2o", params={"recent": 16}, budget=64, scope="head", disposition="low", low_bits=2, seal=False) as cache:
            for turn, (tokens, low) in enumerate(((150, 86), (40, 126), (1, 126), (31, 158))):
                model(prompt(tokens, turn), past_key_values=cache)
                cache.settle()
                assert cache.low == low and cache.logical == cache.low + cache.resident + cache.dropped and cache.dropped == 0
                assert cache._mass.shape[2] == cache.resident
            # Decoding drops a block each time one fills.
            for i in range(40):
                model(prompt(1, i), past_key_values=cache)
            assert cache.low == 158 and cache.dropped > 0 and cache.resident < 64 + 16
            assert len(cache._low_tokens) == 3
            assert leased(daemon) == 1 + len(cache._sequence.ids) + sum(len(part.blocks) for part in cache._low_tokens), "the sink, and these"
            # A compaction that is refused leaves no block behind.
            before_it, cache._policy = leased(daemon), "no_such_policy"
            with pytest.raises(kvpool.InvalidArgumentError, match="no_such_policy"):
                model(prompt(16, 1), past_key_values=cache)
            assert leased(daemon) == before_it + 1
        session.flush()
        assert leased(daemon) == 1


def less_kernel(rank=4, hidden=5, seed=2):
    random = torch.Generator().manual_seed(seed)
    shapes = {"w1": (3, 2, 16, hidden), "w2": (3, 2, hidden, rank), "w3": (3, 2, rank, rank), "m1": (3, 4, 16, hidden), "m2": (3, 4, hidden, rank)}
    return LessKernel(**{name: torch.randn(shape, generator=random) for name, shape in shapes.items()})


def values_of(cache, layer):
    return cache._gather(cache.layers[layer].v)[0]


def test_a_state_whose_features_are_exact_is_full_attention():
    """Tokens with one key have one logit: with phi = 1 and psi = exp(logit), r = 1, nothing is lost. Two KV heads of two query heads."""
    random = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(shape, generator=random) for shape in ((4, 3, 8), (2, 30, 8), (2, 30, 8)))
    query[:, 1:] = query[:, :1]  # Of all queries of a KV head, as phi says nothing of them.
    query[1::2] = query[::2]
    key[:, :20] = key[:, :1]
    whole = attention.attend_with_state(query, key, value, 0.5, torch.zeros(4, 3, 1), torch.zeros(2, 1, 9))
    softmax = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None].repeat_interleave(2, 1), value[None].repeat_interleave(2, 1), scale=0.5,
        attn_mask=torch.ones(3, 30, dtype=torch.bool).tril(27))[0].transpose(0, 1)
    assert torch.allclose(whole, softmax, atol=1e-5)
    psi = (0.5 * (query[::2, 0] * key[:, 0]).sum(1)).exp()
    state = psi[:, None, None] * torch.cat([value[:, :20].sum(1), torch.full((2, 1), 20.0)], 1)[:, None]
    less = attention.attend_with_state(query, key[:, 20:], value[:, 20:], 0.5, torch.ones(4, 3, 1), state)
    assert torch.allclose(less, whole, atol=1e-5)
    # Nothing overflows, and what stays counts nothing beside a large state.
    large = attention.attend_with_state(query, key[:, 20:], value[:, 20:], 0.5, torch.ones(4, 3, 1), state * 1e30)
    assert torch.allclose(large, (state[..., :-1] / state[..., -1:]).repeat_interleave(2, 0).transpose(0, 1).expand(3, 4, 8), atol=1e-5)


@pytest.mark.parametrize("scope", ["sequence", "head"])
def test_what_leaves_is_in_a_state(daemon, scope):
    """Against LESS's formulas in PyTorch, from the whole sequence's K and V and those positions that a cache that drops has kept."""
    model, ids = llama(), prompt(150)
    kernel = less_kernel()
    blind = dataclasses.replace(kernel, m2=torch.zeros_like(kernel.m2))
    gelu = torch.nn.functional.gelu
    with open_session(model, socket=daemon.socket, signals=True) as session, torch.no_grad():
        told = {"policy": "keydiff", "budget": 48, "scope": scope, "seal": False}
        whole, dropping, less, unseen = (KvPoolCache(session, **more) for more in (
            {}, told, told | {"disposition": "less", "less": kernel}, told | {"disposition": "less", "less": blind}))
        for cache in (whole, dropping, less, unseen):
            model(ids, past_key_values=cache)
            cache.settle()
        for layer in range(3):
            for head in range(2):
                keys, left = resident_keys(whole, layer)[head], resident_keys(dropping, layer)[head]
                assert torch.equal(resident_keys(less, layer)[head], left)
                places = [int((keys == key).all(1).nonzero()[0]) for key in left]
                leave = [i for i in range(150) if i not in places]
                psi = (gelu(gelu(keys[leave] @ kernel.w1[layer, head]) @ kernel.w2[layer, head]) @ kernel.w3[layer, head]).abs()
                state = psi.T @ torch.cat([values_of(whole, layer)[head][leave], torch.ones(len(leave), 1)], 1)
                assert torch.allclose(less._state[layer, head], state, rtol=1e-4, atol=1e-4)
        assert less.folded == 102 * 3 * 2 and dropping.folded == 0
        first = less._state.clone()
        logits = {}
        for name, cache in (("drop", dropping), ("less", less), ("unseen", unseen)):
            logits[name] = model(ids[:, :1], past_key_values=cache).logits
        assert torch.allclose(logits["unseen"], logits["drop"], atol=1e-4)
        assert not torch.allclose(logits["less"], logits["drop"], atol=1e-2)
        model(ids[:, :40], past_key_values=less)  # What leaves now comes on top.
        less.settle()
        assert (less._state[..., -1] >= first[..., -1]).all() and (less._state[..., -1] > first[..., -1]).any()
        assert len(generate(model, ids, KvPoolCache(session, **told, disposition="less", less=kernel), tokens=60)) == 60


def test_a_trained_state_is_nearer_to_full_attention_than_dropping(tmp_path):
    model = llama()
    texts = [prompt(72, seed)[0] for seed in range(6)]
    kernel, errors = train_less.train(model, texts, train_less.Training(prompt=48, budget=12, rank=4, hidden=8, steps=60, rate=1e-2))
    assert all(less < dropping for dropping, less in errors)
    kernel.save(tmp_path / "less.safetensors")
    again = LessKernel.load(tmp_path / "less.safetensors")
    assert again.name == kernel.name != less_kernel().name and torch.equal(again.psi, kernel.psi)
    with pytest.raises(ValueError, match=r"w2 is \[3, 2, 5, 3\]; with this w1 must be \[3, 2, 5, 4\]"):
        dataclasses.replace(less_kernel(), w2=torch.zeros(3, 2, 5, 3))


def test_a_prompt_keeps_what_its_engine_knows_of(daemon):
    """Signals of the prompt choose, and stay with their tokens; tokens behind it stay as long as the prompt has any to give."""
    model, ids = llama(), prompt(150)
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        whole = KvPoolCache(session)
        model(ids, past_key_values=whole)
        peak = torch.zeros(3, 2, 150)
        peak[..., 40:56] = 1
        cache = KvPoolCache(session, policy="kvzip", params={"sinks": 0}, budget=32, signals={"peak": peak})
        model(ids, past_key_values=cache)
        places = [*range(40, 56), *range(134, 150)]  # Equal scores leave oldest first.
        for layer in range(3):
            assert torch.equal(resident_keys(cache, layer), resident_keys(whole, layer)[:, places])
        assert torch.equal(cache._signals["peak"], peak[..., places])
        assert len(generate(model, ids, KvPoolCache(session, policy="kvzip", budget=32, signals={"peak": peak}), tokens=60)) == 60


def inputs_of(model, ids):
    """[layers, tokens, dim]: what enters the attention of each layer, behind its first norm."""
    states = model(ids, output_hidden_states=True).hidden_states
    return torch.stack([layer.input_layernorm(state[0]) for layer, state in zip(model.model.layers, states)])


def random_gates(params, layers, heads=2, dim=64):
    """Weights of kvzap as its header orders them, and what they say of [layers, tokens, dim]: [layers, heads, tokens]."""
    random = torch.Generator().manual_seed(4)
    if params["model"] == "linear":
        parts = w, b = [torch.randn(shape, generator=random) for shape in ((layers, heads, dim), (layers, heads))]
        return torch.cat([part.flatten(1) for part in parts], 1).flatten(), lambda x: w @ x.transpose(1, 2) + b[..., None]
    parts = w1, b1, w2, b2 = [torch.randn(shape, generator=random) for shape in ((layers, 5, dim), (layers, 5), (layers, heads, 5), (layers, heads))]
    return torch.cat([part.flatten(1) for part in parts], 1).flatten(), lambda x: (
        w2 @ torch.nn.functional.gelu(w1 @ x.transpose(1, 2) + b1[..., None]) + b2[..., None])


@pytest.mark.parametrize("scope", ["sequence", "layer", "head"])
@pytest.mark.parametrize("form", ["linear", "mlp"])
def test_hidden_states_choose_and_stay_with_their_tokens(daemon, scope, form):
    """A prompt, then a turn that exceeds the budget again: by then heads have tokens of their own, and the hidden states of these."""
    layers = 9  # Of the prompt they have 1.06 MB, more than a request carries.
    model = llama(layers=layers)
    ids, more = (1 + torch.randperm(511, generator=torch.Generator().manual_seed(3)))[None, :510].split([460, 50], 1)  # No two have one score.
    params = {"model": form, "recent": 0}
    weights, score = random_gates(params, layers)
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        whole = KvPoolCache(session)
        model(ids, past_key_values=whole)
        cache = KvPoolCache(session, policy="kvzap", params=params, budget=64, scope=scope, weights=weights, seal=False)
        hidden = inputs_of(model, ids)[:, None].expand(-1, 2, -1, -1)
        keys = torch.stack([resident_keys(whole, layer) for layer in range(layers)])
        for turn in (None, more):
            if turn is None:
                model(ids, past_key_values=cache)
            else:  # What comes depends on what has stayed, so that the model tells of it.
                coming = []
                hooks = [layer.input_layernorm.register_forward_hook(lambda *told: coming.append(told[2][0])) for layer in model.model.layers]
                cache._budget = 1000
                model(turn, past_key_values=cache)
                for hook in hooks:
                    hook.remove()
                hidden = torch.cat([hidden, torch.stack(coming)[:, None].expand(-1, 2, -1, -1)], 2)
                keys = torch.stack([resident_keys(cache, layer) for layer in range(layers)])
                cache._budget = 64
                cache._hold_budget(50)
            scores = torch.stack([score(hidden[:, head])[:, head] for head in range(2)], 1)
            joined = {"sequence": scores.mean((0, 1), keepdim=True), "layer": scores.mean(1, keepdim=True), "head": scores}[scope]
            kept = joined.topk(64).indices.sort().values.expand(layers, 2, -1)[..., None]
            hidden = hidden.gather(2, kept.expand(-1, -1, -1, 64))
            assert torch.equal(torch.stack([resident_keys(cache, layer) for layer in range(layers)]), keys.gather(2, kept.expand(-1, -1, -1, 16)))
            assert torch.equal(cache._hidden.expand(-1, 2, -1, -1), hidden) and cache._hidden.shape[1] == (2 if scope == "head" else 1)
        assert len(generate(model, ids, KvPoolCache(session, policy="kvzap", params=params, budget=64, scope=scope, weights=weights), tokens=60)) == 60


def test_hidden_states_stay_with_tokens_of_heads_that_share_a_budget(daemon):
    model, ids = llama(), prompt(150)
    params = {"model": "linear", "recent": 0}
    weights, _ = random_gates(params, layers=3)
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        told = {"policy": "kvzap", "params": params, "budget": 48, "scope": "head", "heads": "ada", "weights": weights, "seal": False}
        cache, kept = KvPoolCache(session, **told), []
        share = cache._share
        cache._share = lambda compacted: kept.append(share(compacted)) or kept[-1]
        model(ids, past_key_values=cache)
        inputs = inputs_of(model, ids)
        assert cache._counts is not None and cache._hidden.shape == (3, 2, cache.resident, 64)
        for layer in range(3):
            for head in range(2):
                places = kept[0][layer, head, :int(cache._counts[layer, head])]
                assert torch.equal(cache._hidden[layer, head, :len(places)], inputs[layer, places])
        assert len(generate(model, ids, KvPoolCache(session, **told), tokens=60)) == 60


def test_hidden_states_are_bounded(daemon):
    model, ids = llama(), prompt(150)
    told = {"policy": "fast_kvzip", "budget": 64, "weights": torch.zeros(3 * (2 * 16 * (16 + 64) + 32 + 4 * (1 + 16 * 65)))}
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        assert len(generate(model, ids, KvPoolCache(session, **told, hidden_bytes=4 * 3 * 150 * 64, seal=False), tokens=20)) == 20
        with KvPoolCache(session, **told, hidden_bytes=4 * 3 * 150 * 64 - 1, seal=False) as cache:
            with pytest.raises(ValueError, match="of which 150 tokens have 115200 bytes; must be at most hidden_bytes, 115199"):
                model(ids, past_key_values=cache)
            model(ids[:, :149], past_key_values=cache)
        with pytest.raises(ValueError, match="is what the cache is told by the model"):
            KvPoolCache(session, **told, signals={"hidden": torch.ones(3, 2, 150)})
    with open_session(llama(seed=1), socket=daemon.socket) as session, pytest.raises(ValueError, match="goes by hidden states: open_session"):
        KvPoolCache(session, **told)


def words(tokens, seed):
    """Token ids of which some come often, as in a text."""
    odds = 1 / torch.arange(1, 511)
    return torch.multinomial(odds, tokens, True, generator=torch.Generator().manual_seed(seed))[None] + 1


@pytest.mark.parametrize("chunk", [16, 64])
def test_what_gates_learn_from_is_what_a_repeated_text_attends(chunk):
    """Against eager attention over the text, what asks for a chunk of it, and that chunk: KVzip's and KVzip+'s scores."""
    model, ids, ask = llama(), words(40, 1)[0], torch.tensor([5, 6, 7])
    seen = train_gates.observe(model, ids, ask, chunk)
    model.set_attn_implementation("eager")
    peak, plus = torch.zeros(2, 3, 2, 40)
    with torch.no_grad():
        for part in ids.split(chunk):
            again, cache = torch.cat([ids, ask, part])[None], DynamicCache()
            attentions = model(again, past_key_values=cache, output_attentions=True).attentions
            inputs = inputs_of(model, again)
            for layer in range(3):
                attends = attentions[layer][0, :, 43:, :40]  # [q_heads, queries, tokens]
                peak[layer] = torch.maximum(peak[layer], attends.amax(1).unflatten(0, (2, 2)).amax(1))
                output = model.model.layers[layer].self_attn.o_proj.weight  # [hidden, q_heads * dim]
                values = cache.layers[layer].values[0].repeat_interleave(2, 0)[:, :40]
                written = torch.stack([values[head] @ output[:, 16 * head:16 * head + 16].T for head in range(4)]).norm(dim=2)
                attends = (attends / inputs[layer, 43:].norm(dim=1)[:, None]).amax(1) * written
                plus[layer] = torch.maximum(plus[layer], attends.unflatten(0, (2, 2)).amax(1))
    for layer, each in enumerate(seen):
        assert torch.allclose(each.hidden, inputs[layer, :40], atol=1e-4)
        assert torch.allclose(each.peak, peak[layer], atol=1e-5) and torch.allclose(each.plus, plus[layer], atol=1e-5)


@pytest.mark.parametrize("policy,form", [("kvzap", "linear"), ("kvzap", "mlp"), ("fast_kvzip", "linear")])
def test_trained_gates_foresee_what_kvzip_says(daemon, tmp_path, policy, form):
    """The daemon scores a text that was not trained on as the training says, from the file's weights as they are."""
    model, ask = llama(), torch.tensor([5, 6, 7])
    how = train_gates.Training(policy=policy, model=form, units=16, steps=150, ridge=10.0)
    texts = [words(200, seed)[0] for seed in range(10)]
    seen = [train_gates.observe(model, text, ask, how.chunk) for text in texts]
    trained = train_gates.train(model, seen, how, held=1)
    trained.save(tmp_path / "gates.safetensors")
    (weights,) = load_file(tmp_path / "gates.safetensors").values()
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        found = []
        for each in (weights, torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))):
            with KvPoolCache(session, policy=policy, params=trained.params, budget=1000, weights=each, seal=False) as cache, contextlib.ExitStack() as lent:
                model(texts[9][None], past_key_values=cache)
                scores = cache._sequence.score(cache._scorer(lent), scope="head", token_scores=True).token_scores
                scores = torch.tensor(scores).unflatten(0, (3, 2))
                found.append(sum(train_gates._rank_correlation(ours.T, train_gates._target(layer, policy)) for ours, layer in zip(scores, seen[9])) / 3)
    assert found[0] == pytest.approx(trained.rank, abs=2e-3) and found[0] > 0.35 and found[0] > found[1] + 0.2, found
    for wrong, message in (({"policy": "kvzip"}, "policy is 'kvzip'; must be kvzap or fast_kvzip"), ({"model": "cubic"}, "model is 'cubic'; must be linear or mlp")):
        with pytest.raises(ValueError, match=message):
            train_gates.train(model, seen, dataclasses.replace(how, **wrong))
    with pytest.raises(ValueError, match="held is 10; must be 0 to 9"):
        train_gates.train(model, seen, how, held=10)


def test_passkeys_are_hidden_and_asked_for():
    def tokenize(text):
        return [ord(letter) for letter in text]

    text = [1000 + i for i in range(50)]
    ids, answers = train_gates.hide_passkeys(tokenize, text, seed=3, keys=3, words=2)
    assert [i for i in ids.tolist() if i >= 1000] == text and ids[0] == 1000 and len(answers) == len(ids)
    told = "".join(chr(i) if i < 1000 else "#" for i in ids.tolist())
    for number in (1, 2, 3):
        hidden, asked = told.split(f"asskey number {number} is:")[1:]
        assert hidden.split(".")[0] == asked.split(".")[0] and hidden.startswith(" ")
    assert "".join(letter for letter, answer in zip(told, answers) if answer).count(".") == 3
    assert len(train_gates.hide_passkeys(tokenize, [7], seed=1, keys=1)[0]) > 1  # A text of one token has room behind it.


def test_heads_that_look_back_stay_retrieval_heads(daemon):
    """Of a model's heads whose keys are zero none looks anywhere in particular; the others do, and moving them costs."""
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[16:] = 0
            layer.self_attn.v_proj.weight[16:] = 0
            layer.self_attn.k_proj.weight[:16] *= 3
    cases = [train_gates.hide_passkeys(lambda text: [1 + ord(letter) for letter in text], words(100, seed)[0].tolist(), seed, keys=2, words=1) for seed in range(3)]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    trained = train_gates.train_heads(model, cases, train_gates.Training(policy="duo_attention", steps=25, rate=0.08, recent=32, penalty=0.01))
    heads = trained.weights.reshape(3, 2)
    assert (heads[:, 1] == 0).all() and (heads[:, 0] > 0).any() and heads.max() <= 1, heads
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted and model.config._attn_implementation == "sdpa"
    assert trained.params == {"sinks": 16, "recent": 32}
    # The daemon takes them: a retrieval head keeps its most recent tokens, the others their ends.
    ids = prompt(150)
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        whole = KvPoolCache(session)
        model(ids, past_key_values=whole)
        cache = KvPoolCache(session, policy="duo_attention", params=trained.params, budget=48, scope="head", weights=(heads > 0).float())
        model(ids, past_key_values=cache)
        for layer in range(3):
            for head in range(2):
                places = [*range(102, 150)] if heads[layer, head] > 0 else [*range(16), *range(118, 150)]
                assert torch.equal(resident_keys(cache, layer)[head], resident_keys(whole, layer)[head, places])


def test_gates_are_trained_by_a_program(tmp_path, capsys):
    """As a user runs it, with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    letters = {chr(code): code - 31 for code in range(32, 127)} | {"?": 0}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    text, output = tmp_path / "text.txt", tmp_path / "gates.safetensors"
    text.write_text("".join(chr(32 + i * i % 90) for i in range(1000)))
    for policy, floats, says in (("kvzap", 3 * 2 * 65, "rank correlation with KVzip's scores of other texts: "), ("duo_attention", 6, " of 6 heads are at 0.5 or above")):
        given = [f"--model={tmp_path}", f"--text={text}", f"--policy={policy}", f"--output={output}", "--windows=4", "--tokens=60", "--held=1", "--steps=2"]
        train_gates.main(given)
        assert says in capsys.readouterr().out
        assert load_file(output)["weights"].shape == (floats,)
    with pytest.raises(SystemExit):
        train_gates.main([*given, "--windows=17"])
    assert "the texts have 1000 tokens; 17 windows take 1020" in capsys.readouterr().err


def test_positions_go_on_where_tokens_were_dropped(daemon):
    """triattention scores from the newest token's position: told in full weights, another position keeps other tokens."""
    model, ids = llama(), prompt(150)
    weights = torch.randn(3 * 3 * 2 * 8 + 8, generator=torch.Generator().manual_seed(1))
    weights[-8:] = 0.7 ** torch.arange(8)
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        cache = KvPoolCache(session, policy="triattention", params={"recent": 0}, budget=64, weights=weights)
        model(ids, past_key_values=cache)
        positions = []
        scorer = kvpool.Scorer
        try:
            kvpool.Scorer = lambda *args, **kwargs: positions.append(kwargs["now"]) or scorer(*args, **kwargs)
            for i in range(16):
                model(ids[:, i:i + 1], past_key_values=cache)
        finally:
            kvpool.Scorer = scorer
        assert positions == [165] and cache.logical == 166 and cache.resident == 64


def test_scores_of_each_head_move_with_its_tokens(daemon):
    """Heads that keep tokens of their own, then a whole block less for all: the attention that h2o goes by is that of what is left."""
    model, ids = llama(), prompt(150)
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        cache = KvPoolCache(session, policy="h2o", params={"recent": 16}, budget=64, scope="head")
        full = KvPoolCache(session, policy="h2o", params={"recent": 16}, budget=1000)
        model(ids, past_key_values=full)
        model(ids, past_key_values=cache)
        for layer in range(3):
            ours, theirs = (resident_keys(each, layer) for each in (cache, full))
            for head in range(2):
                place = [int((theirs[head] == key).all(1).nonzero()[0]) for key in ours[head]]
                assert place == sorted(place) and torch.equal(cache._mass[layer, head], full._mass[layer, head, place])
        assert len(generate(model, ids, KvPoolCache(session, policy="h2o", params={"recent": 16}, budget=64, scope="head"), tokens=60)) == 60


def attend_to(visible):
    """An attention function that attends per layer and KV head what `visible`, [layers][kv_heads][tokens], says, of the tokens up to its own."""
    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        tokens, queries = key.shape[2], query.shape[2]
        place = torch.arange(tokens, device=query.device)
        seen = torch.ones(key.shape[1], tokens, dtype=torch.bool, device=query.device)
        told = visible[module.layer_idx]
        if told is not None:
            seen[:, :told.shape[1]] = told
        mask = seen.repeat_interleave(2, 0)[:, None] & (place <= place[tokens - queries:, None])
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask[None], float("-inf"))
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    return attend


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("policy, given", [("keydiff", False), ("snapkv", False), ("h2o", False), ("keydiff", True)])
def test_heads_that_share_a_budget_attend_what_each_keeps(daemon, implementation, policy, given):
    """Through a prompt, 70 tokens behind it and what they push out: logits are those of masks over a cache that has everything."""
    model, reference, ids = llama(), llama(), prompt(170)
    model.set_attn_implementation(implementation)
    visible = [None] * 3
    ALL_ATTENTION_FUNCTIONS.register("kvpool_test_visible", attend_to(visible))
    reference.set_attn_implementation("kvpool_test_visible")
    params = {"recent": 8} if policy == "h2o" else {}
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        counts = torch.tensor([[16, 80], [48, 48], [71, 25]])
        terms = {"heads": "given", "head_tokens": counts} if given else {"heads": "ada", "least_share": 0.25, "most": 80}
        cache = KvPoolCache(session, policy=policy, params=params, budget=48, scope="head", window=8, **terms)
        shared, took = cache._share, []

        def share(compacted):
            took.append(compacted)
            return shared(compacted)

        cache._share = share
        whole = DynamicCache(config=reference.config)
        slots = torch.arange(100).expand(3, 2, 100)  # What token each KV head has where; below 0: none.
        for step in [slice(0, 100), *(slice(i, i + 1) for i in range(100, 170))]:
            ours = model(ids[:, step], past_key_values=cache).logits
            theirs = reference(ids[:, step], past_key_values=whole).logits
            assert torch.allclose(ours, theirs, atol=2e-4), step
            if step.start >= 100:
                slots = torch.cat([slots, torch.full((3, 2, 1), step.start)], 2)
            if took:
                rows = took.pop().kept_positions
                kept = [slots.flatten(0, 1)[row][torch.tensor(places)] for row, places in enumerate(rows)]
                slots = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=-1).reshape(3, 2, -1)
                for layer in range(3):
                    visible[layer] = torch.stack([torch.isin(torch.arange(step.stop), own) for own in slots[layer]])
                assert min(map(len, rows)) >= 12 and cache.resident == max(map(len, rows)) <= 80
                # Of each layer's heads 48 tokens stay on average.
                assert [len(first) + len(second) for first, second in zip(rows[::2], rows[1::2])] == [96] * 3
                assert cache.held == 48 and (not given or list(map(len, rows)) == counts.flatten().tolist())
                for name in ("_mass", "_mass_square"):
                    if policy == "h2o":
                        assert (getattr(cache, name)[slots < 0] == 0).all()
        assert cache.logical == 170 and (slots < 0).any() and cache._sequence.tokens == cache.resident
        keys = torch.stack([resident_keys(cache, layer) for layer in range(3)])
        assert (keys[slots < 0] == 0).all() and (keys[slots >= 0] != 0).any(-1).all()
        # What takes padding for tokens is refused.
        with pytest.raises(kvpool.FailedPreconditionError, match="heads of this sequence keep different numbers"):
            cache._sequence.prune(budget_tokens=32)
        with pytest.raises(kvpool.FailedPreconditionError, match="heads of this sequence keep different numbers"):
            cache._sequence.score()
        with pytest.raises(kvpool.FailedPreconditionError, match="heads of this sequence keep different numbers"):
            cache._sequence.compact(budget_tokens=32, scope="head")


def test_budgets_of_heads_that_are_given_are_checked(daemon):
    with open_session(llama(), signals=True, socket=daemon.socket) as session:
        terms = {"policy": "keydiff", "budget": 32, "scope": "head", "heads": "given"}
        with pytest.raises(ValueError, match=r"head_tokens is \[2, 3\] of torch.int64; must be \[3, 2\] of integers"):
            KvPoolCache(session, **terms, head_tokens=[[1, 2, 3], [4, 5, 6]])
        with pytest.raises(ValueError, match="head_tokens are 30 to 36, on average 32.5; must be 1 or more, and on average at most the budget, 32"):
            KvPoolCache(session, **terms, head_tokens=[[36, 30], [36, 30], [33, 30]])
        with pytest.raises(ValueError, match="head_tokens are 0 to 64"):
            KvPoolCache(session, **terms, head_tokens=[[0, 64], [32, 32], [32, 32]])


def test_mass_is_what_eager_attention_says(daemon):
    model, ids = llama(), prompt(60)
    with open_session(model, signals=True, socket=daemon.socket) as session, torch.no_grad():
        cache = KvPoolCache(session, policy="h2o", budget=1000)
        model(ids[:, :50], past_key_values=cache)
        for i in range(50, 60):
            model(ids[:, i:i + 1], past_key_values=cache)
        model.set_attn_implementation("eager")
        weights = torch.stack(model(ids, output_attentions=True).attentions)[:, 0]  # [layers, q_heads, queries, tokens]
        by_kv_head = weights.reshape(3, 2, 2, 60, 60).mean(2)
        assert torch.allclose(cache._mass, by_kv_head.sum(2), atol=1e-4)
        assert torch.allclose(cache._mass_square, by_kv_head.square().sum(2), atol=1e-4)
        assert torch.allclose(cache._latest, by_kv_head[:, :, -1], atol=1e-5)


def test_a_hybrid_model_is_pruned_where_attention_is_full(daemon):
    model, ids = gemma(), prompt(100)
    own = generate(model, ids, tokens=60)
    with open_session(model, socket=daemon.socket) as session:
        cache = KvPoolCache(session, prompt=ids)
        assert generate(model, ids, cache, tokens=60) == own and cache.shared == 0
        cache = KvPoolCache(session, policy="paged_eviction", budget=48)
        assert len(generate(model, ids, cache, tokens=60)) == 60 and cache.resident < 64
        assert cache.layers[0].get_seq_length() == cache.layers[2].get_seq_length() == 159


def test_what_was_pruned_is_nobodys_prefix(daemon):
    model, ids = llama(), prompt(150)
    with open_session(model, socket=daemon.socket) as session:
        said = generate(model, ids, KvPoolCache(session, policy="keydiff", budget=64), tokens=100)
        session.flush()
        longer = torch.cat([ids, torch.tensor([said], device=PLACE)], 1)
        # Of the prompt, all blocks were sealed before it was pruned; of what came then, none.
        assert KvPoolCache(session, prompt=longer).shared == 144


def test_what_differs_is_not_shared(daemon):
    model = llama()
    assert fingerprint_of(model) == fingerprint_of(llama()) != fingerprint_of(llama(seed=1))
    assert fingerprint_of(model) != fingerprint_of(llama(dtype=torch.bfloat16))
    ids = prompt(100)
    with open_session(model, socket=daemon.socket) as session:
        generate(model, ids, KvPoolCache(session))
        session.flush()
        assert KvPoolCache(session, prompt=ids).shared == 96
        assert KvPoolCache(session, prompt=ids, salt=b"tenant").shared == 0
        assert KvPoolCache(session, prompt=ids, extra_keys=[b"adapter"]).shared == 0
        # A salt behind a system prompt of 40 tokens, which everybody shares: two blocks of 16 are full.
        cache = KvPoolCache(session, prompt=ids, salt=b"tenant", salt_from=40)
        assert cache.shared == 32
        generate(model, ids, cache)
        session.flush()
        for salt, salt_from, shared in ((b"tenant", 40, 96), (b"tenant", 32, 96), (b"tenant", 48, 48), (b"another", 40, 32), (b"tenant", 0, 0)):
            assert KvPoolCache(session, prompt=ids, salt=salt, salt_from=salt_from).shared == shared, (salt, salt_from)
    with open_session(llama(seed=1), socket=daemon.socket) as session:
        assert KvPoolCache(session, prompt=ids).shared == 0


def test_bad_input(daemon):
    model = llama()
    with open_session(model, socket=daemon.socket) as session:
        with pytest.raises(ValueError, match="signals=True"):
            KvPoolCache(session, policy="h2o", budget=64)
        with pytest.raises(ValueError, match="go together"):
            KvPoolCache(session, budget=64)
        with pytest.raises(ValueError, match="scope is 'token'; must be one of sequence, layer, head"):
            KvPoolCache(session, policy="keydiff", budget=32, scope="token")
        with pytest.raises(ValueError, match="disposition is 'keep'; must be one of drop, merge, low, less"):
            KvPoolCache(session, policy="keydiff", budget=32, disposition="keep")
        with pytest.raises(ValueError, match="heads is 'some'; must be one of equal, ada, given"):
            KvPoolCache(session, policy="keydiff", budget=32, heads="some")
        with pytest.raises(ValueError, match="heads='ada' goes with scope='head' and disposition='drop': scope is 'layer', disposition 'drop'"):
            KvPoolCache(session, policy="keydiff", budget=32, scope="layer", heads="ada")
        with pytest.raises(ValueError, match="least_share and most go with heads='ada'"):
            KvPoolCache(session, policy="keydiff", budget=32, most=64)
        with pytest.raises(ValueError, match="head_tokens and heads='given' go together"):
            KvPoolCache(session, policy="keydiff", budget=32, scope="head", heads="given")
        with pytest.raises(ValueError, match="heads='ada' is part of attention: open_session"):
            KvPoolCache(session, policy="keydiff", budget=32, scope="head", heads="ada")
        with pytest.raises(ValueError, match="merge_threshold goes with disposition='merge'"):
            KvPoolCache(session, policy="keydiff", budget=32, merge_threshold=0.5)
        with pytest.raises(ValueError, match="low_bits goes with disposition='low'"):
            KvPoolCache(session, policy="keydiff", budget=32, low_bits=4)
        with pytest.raises(kvpool.InvalidArgumentError, match="bits is 5; must be 2, 4 or 8"):
            KvPoolCache(session, policy="keydiff", budget=32, disposition="low", low_bits=5)
        with pytest.raises(ValueError, match="less, a LessKernel, and disposition='less' go together"):
            KvPoolCache(session, policy="keydiff", budget=32, disposition="less")
        with pytest.raises(ValueError, match="is part of attention: open_session"):
            KvPoolCache(session, policy="keydiff", budget=32, disposition="less", less=less_kernel())
        for told in ({"scope": "head"}, {"scope": "head", "heads": "ada"}, {"disposition": "merge"}, {"weights": torch.ones(4)}, {"guard": True}, {"signals": {"peak": torch.ones(3, 2, 10)}}):
            with pytest.raises(ValueError, match="go with a policy"):
                KvPoolCache(session, **told)
        with pytest.raises(ValueError, match="guard=True goes by queries"):
            KvPoolCache(session, policy="keydiff", budget=32, guard=True)
        with pytest.raises(ValueError, match=r"signals\['peak'\] is \[2, 3, 10\]; must be \[3, 2, tokens\]"):
            KvPoolCache(session, policy="kvzip", budget=32, signals={"peak": torch.ones(2, 3, 10)})
        with pytest.raises(ValueError, match=r"signals\['peak'\] tells of 101 tokens, and the budget is first exceeded by 100"):
            generate(model, prompt(100), KvPoolCache(session, policy="kvzip", budget=32, signals={"peak": torch.ones(3, 2, 101)}))
        with pytest.raises(ValueError, match="batch of 2"):
            generate(model, prompt(10).repeat(2, 1), KvPoolCache(session))
        with pytest.raises(kvpool.InvalidArgumentError, match="no_such_policy"):
            generate(model, prompt(100), KvPoolCache(session, policy="no_such_policy", budget=32))
        with pytest.raises(ValueError, match="bfloat16"):
            generate(llama(dtype=torch.bfloat16), prompt(10), KvPoolCache(session))
        cache = KvPoolCache(session)
        cache.release()
        with pytest.raises(kvpool.ReleasedError):
            generate(model, prompt(10), cache)
    with pytest.raises(kvpool.UnavailableError):
        open_session(model, socket="/nowhere/kvpoold.sock", open_timeout=1)
    plain = kvpool.Session(kvpool.Layout.paged(layers=1, kv_heads=1, head_dim=8), "plain", socket=daemon.socket)
    with plain, pytest.raises(ValueError, match="open_session"):
        KvPoolCache(plain)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_drafts_are_refused(daemon, warm):
    """They write tokens that may be taken back; and on a prefix that was found Transformers would compute all of the prompt again."""
    model, ids = llama(), prompt(100)
    ids[0, 60:] = ids[0, 20:60]  # So that there is something to look up.
    with open_session(model, socket=daemon.socket) as session:
        if warm:
            generate(model, ids, KvPoolCache(session))
        for drafts in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": llama(layers=1)}):
            cache = KvPoolCache(session, prompt=ids)
            assert cache.shared == (96 if warm else 0)
            with torch.no_grad(), pytest.raises(ValueError, match="drafts"):
                model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=20, do_sample=False, **drafts)
        assert generate(model, ids, KvPoolCache(session, prompt=ids)) == generate(model, ids)


def test_what_does_not_go_on_from_the_prefix_is_refused(daemon):
    model, ids = llama(), prompt(100)
    with open_session(model, socket=daemon.socket) as session, torch.no_grad():
        generate(model, ids, KvPoolCache(session))
        for given in (ids, ids[:, 95:], prompt(4, seed=9)):
            cache = KvPoolCache(session, prompt=ids)
            assert cache.shared == 96
            with pytest.raises(ValueError, match="do not go on from there"):
                model(given, past_key_values=cache)
        longer = torch.cat([ids, prompt(5, seed=2)], 1)
        cache = KvPoolCache(session, prompt=ids)
        assert torch.allclose(model(longer[:, 96:], past_key_values=cache).logits, model(longer).logits[:, 96:], atol=1e-4)


def test_steps_of_several_threads_are_recorded_in_their_order(monkeypatch):
    """Of two caches on two streams of a GPU: a later step that is done says that the one before is done, too."""
    facts = ModelFacts(layers=1, pooled=(0,), sliding_window=0, kv_heads=1, head_dim=8, tokens_per_block=16, dtype=torch.float32,
                       signals=False)

    class Steps:
        begun, recorded = 0, []

        def begin_step(self):
            self.begun += 1
            step = self.begun
            if step == 1:  # The other thread has all the time that it needs, if it may go on.
                other.start()
                other.join(0.5)
            return step

        def complete_step_on_stream(self, step, stream):
            self.recorded.append(step)

    def cache_of(session):
        cache = KvPoolCache.__new__(KvPoolCache)
        cache.session, cache.facts, cache._device = session, facts, torch.device("cuda")
        return cache

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    session = Steps()
    other = threading.Thread(target=cache_of(session)._fence)
    cache_of(session)._fence()
    other.join(60)
    assert session.recorded == [1, 2]


def test_caches_give_their_blocks_back(daemon):
    model, ids = llama(), prompt(100)
    with open_session(model, socket=daemon.socket, magazine_blocks=0) as session:
        for _ in range(3):
            with KvPoolCache(session, seal=False) as cache:
                generate(model, ids, cache)
            cache = KvPoolCache(session, seal=False)
            generate(model, ids, cache)
            del cache
        gc.collect()
        session.flush()
        (space,) = daemon.ctl("spaces")["spaces"]
        assert int(space["blocks"].get("leased", 0)) <= 1 + 16 and session.views == 0
