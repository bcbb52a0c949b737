"""Correctness first: greedy answers on the pool against those of the engine's own cache, token by token."""

import torch
from kvpool_transformers import KvPoolCache, open_session
from transformers import DynamicCache

import lab
import speed
from pruning import SEGMENTS
from texts import middle

BEGINNING = 193  # Tokens: whole blocks of 16 and of llama.cpp's 32, and one: of a prompt the last token is always computed.
BEGINNINGS, ENDINGS = 5, 10  # Fifty prompts: each beginning with each of the endings.
ANSWER = 24
WAYS = ("computed here", "of another process", "of another process, killed")
WORDS = "marriage letter house sister money father evening character package script".split()
ENGINES = {  # A hybrid model's prefixes are not shared with Transformers: they are of a model whose layers are all global.
    "Transformers, Gemma 3 270M": WAYS[:1],
    "Transformers, all layers global": WAYS,
    "llama.cpp, Gemma 3 270M": WAYS,
}


def cells():
    for engine, ways in ENGINES.items():
        for way in ways:
            for prompt in range(BEGINNINGS * ENDINGS):
                yield {"engine": engine, "prefix": way, "prompt": prompt}


def _prompts(here, engine):
    """[(beginning, prompt)]: text, where the model knows any."""
    if engine == "Transformers, all layers global":
        beginnings = [speed.tokens_of(BEGINNING, seed=1 + i) for i in range(BEGINNINGS)]
        endings = [speed.tokens_of(5 + 4 * j, seed=100 + j) for j in range(ENDINGS)]
    else:
        beginnings = [middle(here.texts[name], here.tokenize, BEGINNING, part) for name, part in SEGMENTS]
        endings = [here.tokenize(f"\n\nQuestion {j}: what is said here of the word '{word}'?\nAnswer:", special=False)
                   for j, word in enumerate(WORDS)]
    return [(beginning, beginning + ending) for beginning in beginnings for ending in endings]


# ---- Engines: answers are (tokens, logits), with their own cache and on the pool


class _Transformers:
    """Logits are those of all steps."""

    def __init__(self, model, socket):
        self._model = model
        self._session = open_session(model, socket=socket, magazine_blocks=0)

    def _generate(self, tokens, cache):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            done = self._model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=ANSWER,
                                        do_sample=False, output_logits=True, return_dict_in_generate=True)
        return done.sequences[0, len(tokens):].tolist(), torch.cat(done.logits)

    def own(self, source, tokens, has):
        """With the first `has` tokens' K and V from having computed `source`: another cut changes the last bits of logits."""
        cache = None
        if has:
            cache = DynamicCache(config=self._model.config)
            with torch.no_grad():
                self._model(torch.tensor([source]), past_key_values=cache, logits_to_keep=1)
            cache.crop(has - len(source))  # What is behind it goes; in number.
        return self._generate(tokens, cache)

    def pooled(self, tokens, seal):
        """(answer, tokens found)"""
        with KvPoolCache(self._session, prompt=tokens, seal=seal) as cache:
            answer = self._generate(tokens, cache)
            if seal:
                self._session.flush()
            return answer, cache.shared


class _LlamaCpp:
    """Logits are those of the last step."""

    def __init__(self, own, socket):
        self._own, self._pooled = own, speed.ENGINES["llama.cpp"](socket).engine

    @staticmethod
    def _generate(engine, tokens):
        said = engine.generate(tokens, ANSWER, stop=False)
        return said, torch.frombuffer(engine.logits(), dtype=torch.float32)

    def own(self, source, tokens, has):
        self._own.reset()
        if has:
            self._own.prefill(source)
            self._own.prefill(tokens[:has] + [tokens[has] ^ 1])  # No more of the source than `has`.
        answer = self._generate(self._own, tokens)
        assert self._own.reused == has
        return answer

    def pooled(self, tokens, seal):
        """It saves each prompt's blocks: the pool's keys tell them from those that are looked for."""
        self._pooled.reset()
        answer = self._generate(self._pooled, tokens)
        return answer, self._pooled.found


def _engine(here, engine, way):
    """Each way has a pool of its own, and where it says so another process that has computed the beginnings."""
    daemon = here.once(("alike daemon", engine, way), lambda: lab.Daemon("1GiB"))
    if way != WAYS[0]:
        beginnings = [beginning for beginning, _ in _prompts(here, engine)[::ENDINGS]]
        here.once(("alike other", engine, way), lambda: speed.other_process(
            engine.split(",")[0], daemon.socket, beginnings, kill=way == WAYS[2]))
    if engine.startswith("llama.cpp"):
        own = here.once(("alike own",), lambda: speed.ENGINES["llama.cpp"](None).engine)
        return here.once(("alike", engine, way), lambda: _LlamaCpp(own, daemon.socket))
    model = here.model if "Gemma" in engine else here.once(("all global",), speed.all_global)
    return here.once(("alike", engine, way), lambda: _Transformers(model, daemon.socket))


def measure(here, cell):
    """One prompt: tokens that differ from those with the engine's own cache, and by how much logits do."""
    prompts = here.once(("alike prompts", cell["engine"]), lambda: _prompts(here, cell["engine"]))
    beginning, tokens = prompts[cell["prompt"]]
    engine = _engine(here, cell["engine"], cell["prefix"])
    (said, logits), found = engine.pooled(tokens, seal=cell["prefix"] == WAYS[0])
    if cell["prefix"] == WAYS[0]:  # Here the beginning was computed with its first ending.
        beginning = prompts[cell["prompt"] // ENDINGS * ENDINGS][1]
    key = ("record", cell["engine"], cell["prompt"], tuple(beginning), found)
    own, own_logits = here.once(key, lambda: engine.own(beginning, tokens, found))
    return {"prompt": len(tokens), "found": found, "tokens": len(own), "distinct": len(set(own)),
            "different": sum(a != b for a, b in zip(own, said)) + abs(len(own) - len(said)),
            "logits": (logits.float() - own_logits.float()).abs().max().item() if logits.shape == own_logits.shape else None}
