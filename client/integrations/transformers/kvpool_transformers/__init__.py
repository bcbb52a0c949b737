"""A Cache of Transformers whose K and V are blocks of a kvpoold: shared prefixes, and budgets held by any policy of the daemon.

    session = open_session(model)
    model.generate(**inputs, past_key_values=KvPoolCache(session, prompt=inputs.input_ids))
    model.generate(**inputs, past_key_values=KvPoolCache(session, policy="paged_eviction", budget=1024))
"""

from kvpool_transformers.cache import KvPoolCache, PoolLayer
from kvpool_transformers.less import LessKernel
from kvpool_transformers.model import ModelFacts, fingerprint_of, open_session

__all__ = ["KvPoolCache", "LessKernel", "ModelFacts", "PoolLayer", "fingerprint_of", "open_session"]
