"""A prefix cache for llama.cpp over the blocks of a kvpoold: what one process computed, others load.

    engine = Engine("model.gguf", pool={})
    engine.generate(engine.tokenize("..."), 100)
"""

from kvpool_llama_cpp.engine import Engine
from kvpool_llama_cpp.library import Library, LlamaError, fingerprint_of
from kvpool_llama_cpp.prefix_cache import PrefixCache

__all__ = ["Engine", "Library", "LlamaError", "PrefixCache", "fingerprint_of"]
