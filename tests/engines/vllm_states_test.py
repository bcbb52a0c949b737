"""Models whose layers have a state (linear attention) beside layers with full attention: states are blocks of the pool, and what is said and
found is what stock vLLM says and finds."""

import pytest

from models import qwen3_next
from vllm_processes import PYTHON, assert_nothing_is_held, prompts

pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs vLLM: tests/engines.sh --vllm")

USUAL = {"dtype": "bfloat16", "block_size": None, "enable_prefix_caching": True}  # As long as a page of K and V that has room for a state.
GROUPS = ["MambaSpec"] * 3 + ["FullAttentionSpec"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "states"
    qwen3_next().save_pretrained(directory)
    return directory


def test_another_process_prefix_and_its_death(daemon, engine, stock):
    pool = {"socket": daemon.socket}
    first, second = engine(pool), engine(pool)
    asked = prompts(10, seed=71, shortest=100, longest=600)
    fresh, again = stock.generate(asked, tokens=60), stock.generate(asked, tokens=60)
    assert stock.ask("facts")["groups"] == first.ask("facts")["groups"] == GROUPS
    assert fresh["tokens"] == again["tokens"] and sum(again["cached"]) > 2000
    assert first.generate(asked, tokens=60) == fresh
    first.ask("flush")
    assert second.generate(asked, tokens=60) == again
    # Answers are prefixes, too. Where another part of a prompt is computed, numbers differ in their last bits, with stock vLLM as with this.
    longer = [prompt + said + [7] * 80 for prompt, said in zip(asked, fresh["tokens"])]
    own = stock.generate(longer, tokens=20)
    first.kill()
    said = second.generate(longer, tokens=20)
    alike = [i for i in range(10) if said["cached"][i] == own["cached"][i]]
    assert len(alike) > 7 and sum(said["cached"]) >= sum(own["cached"]) > 2000
    assert [said["tokens"][i] for i in alike] == [own["tokens"][i] for i in alike]
    assert_nothing_is_held(second)
    (space,) = daemon.ctl("spaces")["spaces"]
    assert [(group["name"], group["tokens_per_block"], group["window_tokens"]) for group in space["layout"]["groups"]] == [
        *[("states", 128, 128)] * 3, ("full", 128, 0)]


def test_refused_by_name(daemon, engine):
    pool = {"socket": daemon.socket}
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    one, other = engine(pool, speculative_config=drafts), engine(pool, prefix_match_unit=32)
    assert "speculative_config with layers that have a state" in one.refused()
    assert "prefix_match_unit 32" in other.refused()
    assert "mamba_cache_mode none" in engine(pool, enable_prefix_caching=False).refused()
