"""KV-cache blocks of a kvpoold, in place: see README.md beside this package's sources, and the docstrings."""

import atexit as _atexit

from kvpool import errors as errors
from kvpool._core import (AdaTerms, BlockArray, BlockCopier, Blocks, BlockTable, BudgetPlan, CompactResult, EpisodeHit, Layout,
                          LayerGroup, LessTerms, LiveSequence, LowLayout, MatchHit, Notice, PendingCompact, PendingEpisode, PendingMatch,
                          PendingPrune, PendingPutEpisode, PendingScore, PendingSeal, PendingSelect, Plane, PrefixHasher,
                          Protection, PruneResult, PutEpisodeResult, QueryWindow, ScoreResult, Scorer, SealOutcome,
                          SelectResult, Session, Signal, StreamPoint, View, close_all)
from kvpool._core import version as _version
from kvpool.errors import *  # noqa: F403
from kvpool.errors import __all__ as _errors

__all__ = [
    "AdaTerms", "BlockArray", "BlockCopier", "Blocks", "BlockTable", "BudgetPlan", "CompactResult", "EpisodeHit", "Layout",
    "LayerGroup", "LessTerms", "LiveSequence", "LowLayout", "MatchHit", "Notice", "PendingCompact", "PendingEpisode", "PendingMatch",
    "PendingPrune", "PendingPutEpisode", "PendingScore", "PendingSeal", "PendingSelect", "Plane", "PrefixHasher",
    "Protection", "PruneResult", "PutEpisodeResult", "QueryWindow", "ScoreResult", "Scorer", "SealOutcome", "SelectResult",
    "Session", "Signal", "StreamPoint", "View", "__version__",
    "block_id", "errors",
]
__all__ += _errors  # type checkers know this form
__version__ = _version()


def block_id(ref: int) -> int:
    """The number of the block that a ref names: its index in the pool's arrays."""
    return ref & 0xffffffff


# Before the interpreter takes down what sessions' threads need. Sessions are better closed by `with`.
_atexit.register(close_all)
