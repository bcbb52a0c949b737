"""Quality of pruning with a real model: perplexity of long text, passkeys, one key of several."""

import itertools
import random
import statistics

import torch

from replay import BlockwiseCache, Record
from texts import middle

POLICIES = ("paged_eviction", "streaming_llm", "inverse_key_l2", "keydiff", "h2o", "snapkv", "random")
BUDGETS = (256, 512, 1024)
BLOCKS = (8, 16, 32)
PROMPT, SCORED = 1536, 512  # Tokens: computed whole and then compacted to the budget; scored behind it.
SEGMENTS = (("Emma", 0.3), ("Debian Policy", 0.25), ("Mansfield Park", 0.5), ("Persuasion", 0.4), ("Northanger Abbey", 0.6))
DEPTHS = (0, 20, 40, 60, 80, 100)  # Percent of the prompt before what is asked for.
SAMPLES = 4  # Prompts of each depth.
KEYS = 4


# ---- Perplexity


def _likelihoods(model, cache, ids, step):
    """Of each of ids but the first, given the ones before: `step` tokens a forward."""
    with torch.no_grad():
        parts = []
        for first in range(0, ids.shape[1] - 1, step):
            now = ids[:, first:min(first + step, ids.shape[1] - 1)]
            logits = model(now, past_key_values=cache).logits[0].float()
            parts.append(logits.log_softmax(-1).gather(1, ids[0, first + 1:first + 1 + now.shape[1], None])[:, 0])
    return torch.cat(parts)


def perplexity_cells():
    for name, part in SEGMENTS:
        yield {"text": name, "part": part, "policy": "full", "budget": 0, "block": 16}
        for policy, budget, block in itertools.product(POLICIES, BUDGETS, BLOCKS):
            yield {"text": name, "part": part, "policy": policy, "budget": budget, "block": block}


def _nothing(lab, cell, record):
    return {}


def perplexity(lab, cell, options=_nothing):
    """Mean negative log likelihood of the tokens behind the prompt. options(lab, cell, record): what its cache is told besides."""
    ids = torch.tensor([middle(lab.texts[cell["text"]], lab.tokenizer(cell), PROMPT + SCORED + 1, cell["part"])])
    assert ids.shape[1] == PROMPT + SCORED + 1, f"{cell['text']} is too short"
    record = lab.once(("record", cell.get("model"), cell["text"], cell["part"]), lambda: Record(lab.model(cell), lab.facts(cell), ids[:, :PROMPT]))
    with lab.cache(cell, BlockwiseCache, prompt_tokens=PROMPT, prunes=cell.get("prunes", True), **options(lab, cell, record)) as cache:
        scores = _likelihoods(lab.model(cell), record.into(cache), ids[:, PROMPT:], cell["block"])
        return {"nll": -scores.mean().item(), "tokens": scores.numel(), "resident": cache.resident}


# ---- Retrieval

_NAMES = "amber basil cedar delta ember flint grove haven indigo jasper".split()


def _planted(lab, cell):
    """(prompt, answer): facts in a text, at the cell's depth the one that is asked for."""
    kind, depth, sample = (cell[name] for name in ("kind", "depth", "sample"))
    tokenize = lab.tokenizer(cell)
    seeded = random.Random(f"{kind} {depth} {sample}")
    numbers = [str(seeded.randrange(10_000, 100_000)) for _ in range(KEYS)]
    names = seeded.sample(_NAMES, KEYS)
    if kind == "passkey":
        facts = [(depth, f"\n\nThe pass key is {numbers[0]}. Remember it. {numbers[0]} is the pass key.\n\n")]
        question = "\n\nThe pass key is"
    else:
        elsewhere = seeded.sample([at for at in range(5, 96, 10) if abs(at - depth) > 5], KEYS - 1)
        facts = [(at, f"\n\nThe code of {name} is {number}. Remember it. {number} is the code of {name}.\n\n")
                 for at, name, number in zip([depth, *elsewhere], names, numbers)]
        question = f"\n\nThe code of {names[0]} is"
    asked = tokenize(question, special=False)
    told = [(at, tokenize(fact, special=False)) for at, fact in sorted(facts)]
    novel = sorted(lab.texts)[sample % 3]  # Three novels, elsewhere in each.
    room = PROMPT - len(asked) - sum(len(fact) for _, fact in told)
    text = middle(lab.texts[novel], tokenize, room, 0.1 + 0.15 * sample)
    prompt, place = text[:1], 1  # What begins a text stays in front.
    for at, fact in told:
        until = max(1, len(text) * at // 100)
        prompt, place = prompt + text[place:until] + fact, until
    return prompt + text[place:] + asked, tokenize(" " + numbers[0], special=False)


def retrieval_cells():
    for kind in ("passkey", "keys"):
        for depth in DEPTHS:
            for sample in range(SAMPLES):
                where = {"kind": kind, "depth": depth, "sample": sample}
                yield {**where, "policy": "full", "budget": 0, "block": 16}
                for policy, budget, block in itertools.product(POLICIES, BUDGETS, BLOCKS):
                    # No block fills while a number is said. What stays of the prompt goes by tokens, and depends on blocks
                    # only where a policy protects some.
                    if block == 16 or policy == "paged_eviction":
                        yield {**where, "policy": policy, "budget": budget, "block": block}


def retrieval(lab, cell, options=_nothing):
    """Whether greedy decoding says the number; and how likely the model finds it."""
    prompt, answer = _planted(lab, cell)
    ids = torch.tensor([prompt])
    where = (cell.get("model"), cell["kind"], cell["depth"], cell["sample"])
    record = lab.once(("record", *where), lambda: Record(lab.model(cell), lab.facts(cell), ids))
    with lab.cache(cell, BlockwiseCache, prompt_tokens=len(prompt), **options(lab, cell, record)) as cache, torch.no_grad():
        # Greedy decoding says the answer exactly if each token of it is the likeliest behind the ones before.
        logits = lab.model(cell)(torch.tensor([answer[:-1]]), past_key_values=record.into(cache)).logits[0]
        logits = torch.cat([record.last_logits[0], logits]).float().log_softmax(-1)
        told = torch.tensor(answer)
        return {"right": bool((logits.argmax(-1) == told).all()),
                "log_likelihood": logits.gather(1, told[:, None]).sum().item(), "prompt": len(prompt)}


# ---- Tables


def _mean(values):
    return statistics.fmean(values)


def _error(values):
    """Standard error of the mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
