"""Engines as kvpool-conform asks for them: conform_engines.py KIND MODELS SOCKET OTHER. For conform_test.py, which runs vllm and
vllm_connector in the environment that has vLLM, and transformers and llama_cpp in its own.

MODELS is a folder with models as conform_test.py makes them, SOCKET may be empty, and OTHER is what differs.
"""

import itertools
import sys

from kvpool.conform import adapter

ABOUT = {"ids": [3, 512], "longest": 1024, "salts": True, "shares_again": True, "others": ["model", "dtype", "block"]}


def vllm(models, socket, other, connector=False):
    import vllm_engine
    from vllm_processes import PATIENT
    size = 64 if other == "block" else 32
    pool = {"socket": socket, **PATIENT} if socket else None
    engine = vllm_engine.Engine(f"{models}/{'1' if other == 'model' else '0'}", block_size=size, max_num_seqs=4,
                                dtype="bfloat16" if other == "dtype" else "float32", **{"connector" if connector else "pool": pool})
    engine.about = {**ABOUT, "block": size}
    return engine


class Sequential:
    """One prompt after the other, step by step."""

    def generate(self, prompts, tokens, salt="", kill=None, stop=None):
        steps = itertools.count(1)
        answers = [self.answer(prompt, tokens, salt.encode(), lambda: adapter.signal_at(next(steps), kill, stop)) for prompt in prompts]
        return {"tokens": [said for said, _ in answers], "cached": [cached for _, cached in answers]}


class Transformers(Sequential):
    def __init__(self, models, socket, other):
        import torch
        from kvpool_transformers import open_session
        from models import llama
        torch.set_num_threads(1)
        size = 32 if other == "block" else 16
        self.model = llama(seed=int(other == "model"), dtype=torch.bfloat16 if other == "dtype" else torch.float32)
        self.session = open_session(self.model, tokens_per_block=size, socket=socket) if socket else None
        self.about = {**ABOUT, "block": size, "shares_again": False}

    def answer(self, prompt, tokens, salt, step):
        import torch
        from kvpool_transformers import KvPoolCache
        ids = torch.tensor([prompt])
        cache = KvPoolCache(self.session, prompt=ids, salt=salt) if self.session else None

        def stepped(ids, scores):
            step()
            return scores

        with torch.no_grad():
            said = self.model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, do_sample=False,
                                       logits_processor=[stepped])[0, len(prompt):].tolist()
        if cache is None:
            return said, 0
        with cache:
            return said, cache.shared

    def flush(self):
        self.session.flush()
        return {}

    def close(self):
        if self.session:
            self.session.close()


class LlamaCpp(Sequential):
    def __init__(self, models, socket, other):
        import kvpool_llama_cpp

        class Engine(kvpool_llama_cpp.Engine):
            def _decode(self, tokens):
                super()._decode(tokens)
                self.step()

        size = 64 if other == "block" else 32
        pool = {"socket": socket, "tokens_per_block": size, "timeout": 60, "open_timeout": 60, "retry": 0} if socket else None
        self.engine = Engine(f"{models}/{'1' if other == 'model' else '0'}.gguf", threads=1, n_ctx=2048, n_batch=256, pool=pool,
                             context={"type_k": 0, "type_v": 0} if other == "dtype" else None)
        # Its Engine is one user's, and has no salts.
        self.about = {**ABOUT, "block": size, "salts": False, "cuts": True}

    def generate(self, prompts, tokens, cached=None, **more):
        self.cached = iter(cached or [])
        return super().generate(prompts, tokens, **more)

    def answer(self, prompt, tokens, salt, step):
        self.engine.reset()
        self.engine.step = lambda: None
        if cached := next(self.cached, 0):
            self.engine.prefill(prompt[:cached] + [prompt[cached] ^ 1])
        self.engine.step = step
        return self.engine.generate(prompt, tokens, stop=False), self.engine.found

    def flush(self):
        if self.engine.cache.session:
            self.engine.cache.session.flush()
        return {}

    def close(self):
        self.engine.close()


KINDS = {"vllm": vllm, "vllm_connector": lambda *given: vllm(*given, connector=True), "transformers": Transformers, "llama_cpp": LlamaCpp}

if __name__ == "__main__":
    sys.exit(adapter.serve(lambda: KINDS[sys.argv[1]](*sys.argv[2:])))
