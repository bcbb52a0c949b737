"""kvpool_vllm.worker without vLLM: which steps a worker says to be done."""

import importlib
import sys
import types

import pytest


@pytest.fixture
def prepare(monkeypatch):
    utils = types.ModuleType("vllm.v1.worker.utils")
    utils.allocate_kv_cache = lambda *_: None
    logger = types.ModuleType("vllm.logger")
    logger.init_logger = lambda name: None
    for module in (types.ModuleType("vllm"), types.ModuleType("vllm.v1"), types.ModuleType("vllm.v1.worker"), utils, logger):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["vllm.v1.worker"].utils = utils
    monkeypatch.delitem(sys.modules, "kvpool_vllm.worker", raising=False)
    return importlib.import_module("kvpool_vllm.worker").prepare


def worker(has_drafts):
    """vLLM samples tokens of a step that has some, and of no other: of that execute_model says all."""
    return types.SimpleNamespace(
        global_rank=0, vllm_config=types.SimpleNamespace(speculative_config=types.SimpleNamespace(use_eagle=lambda: True) if has_drafts else None),
        worker=types.SimpleNamespace(model_runner=None, compile_or_warm_up_model=lambda: None),
        execute_model=lambda plan: None if plan.total_num_scheduled_tokens else "an empty output", sample_tokens=lambda: "tokens")


@pytest.mark.parametrize("has_drafts", [False, True])
def test_an_empty_step_is_done_when_it_was_executed(prepare, has_drafts):
    """Its number is how an idle engine's ranks say that nobody reads what was released. With drafts another is done when tokens are sampled."""
    done = []
    space = types.SimpleNamespace(join=lambda rank: None, computed=done.append, session=None, gives_back=False)
    wrapper = worker(has_drafts)
    prepare(wrapper, space, lambda: None)
    wrapper.execute_model(types.SimpleNamespace(kvpool_step=1, total_num_scheduled_tokens=5))
    assert done == ([] if has_drafts else [1])
    wrapper.sample_tokens()
    assert done == [1]
    wrapper.execute_model(types.SimpleNamespace(kvpool_step=2, total_num_scheduled_tokens=0))
    assert done == [1, 2]
    wrapper.execute_model(types.SimpleNamespace(kvpool_step=3, total_num_scheduled_tokens=5))
    wrapper.sample_tokens()
    assert done == [1, 2, 3]
