"""Gemma 3 270M: a real model, whose global layers are in the pool, and pruned; its other layers have windows."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvpool_transformers import KvPoolCache, open_session
from models import generate

DIRECTORY = os.environ.get("KVPOOL_GEMMA")
pytestmark = pytest.mark.skipif(DIRECTORY is None, reason="needs the model: tests/engines.sh --gemma")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


def ids(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.tensor([[2]]), torch.randint(1000, 20_000, (1, tokens - 1), generator=generator)], 1)


def test_greedy_output_is_that_of_its_own_cache(daemon, model):
    with open_session(model, socket=daemon.socket) as session:
        for tokens, seed in ((20, 1), (130, 2), (600, 3)):
            own = generate(model, ids(tokens, seed), tokens=24)
            assert generate(model, ids(tokens, seed), KvPoolCache(session), tokens=24) == own


def test_a_budget_holds(daemon, model):
    with open_session(model, socket=daemon.socket) as session:
        cache = KvPoolCache(session, policy="paged_eviction", budget=256)
        assert len(generate(model, ids(600, 4), cache, tokens=40)) == 40
        assert 256 - 16 < cache.resident < 256 + 16 and cache.logical == 639
        # A budget that nothing exceeds changes nothing.
        own = generate(model, ids(100, 5), tokens=24)
        assert generate(model, ids(100, 5), KvPoolCache(session, policy="paged_eviction", budget=1024), tokens=24) == own
