"""kvpool_vllm.prefills without vLLM: which steps tell how long a prefill takes, and how long that was."""

import types

import pytest

from kvpool_vllm import prefills


def step(new=(), cached=()):
    """Each (name, tokens, tokens in front of them)."""
    return types.SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens for _, tokens, _ in [*new, *cached]),
        num_scheduled_tokens={name: tokens for name, tokens, _ in [*cached, *new]},
        scheduled_new_reqs=[types.SimpleNamespace(req_id=name, num_computed_tokens=before) for name, _, before in new],
        scheduled_cached_reqs=types.SimpleNamespace(req_ids=[name for name, _, _ in cached],
                                                    num_computed_tokens=[before for _, _, before in cached]))


@pytest.mark.parametrize("planned, tells", [
    (step(new=[("a", 512, 64)]), (512, 64)),
    (step(cached=[("b", 1, 90), ("a", 512, 2048)]), (512, 2048)),  # A chunk, beside a request that decodes.
    (step(cached=[("b", 8, 9), ("c", 24, 9)], new=[("a", 512, 0)]), (512, 0)),
    (step(cached=[("c", 33, 9)], new=[("a", 512, 0)]), None),
    (step(new=[("a", 512, 0), ("b", 512, 0)]), None),
    (step(new=[("a", 31, 0)]), None),
    (step(cached=[(str(i), 1, 100) for i in range(64)]), None),
    (step(), None)])
def test_what_a_step_tells(planned, tells):
    assert prefills.prefill_of(planned) == tells


def test_how_long_it_took(monkeypatch):
    now = types.SimpleNamespace(at=10.0)
    monkeypatch.setattr(prefills, "time", types.SimpleNamespace(monotonic=lambda: now.at))
    said, watch = [], prefills.Prefills()
    session = types.SimpleNamespace(report_prefill=lambda *what: said.append(what))

    def plan(output):
        watch.planned(output)
        return output

    def over(output, seconds):
        now.at += seconds
        watch.over(output, session)

    over(plan(step(new=[("a", 100, 0)])), 0.5)
    assert said == [(100, 0, 500_000)]
    # Planned while another is under way.
    first, second = plan(step(cached=[("b", 1, 7)])), plan(step(new=[("a", 200, 100)]))
    over(first, 1.0)
    over(second, 0.25)
    assert said[1:] == [(200, 100, 250_000)]
    now.at += 5  # Nothing to do meanwhile.
    over(plan(step(new=[("a", 100, 0)])), 0)
    assert said[2:] == [(100, 0, 1)]
    over(step(new=[("a", 100, 0)]), 1)  # Of a step that it does not know it tells nothing.
    assert len(said) == 3
