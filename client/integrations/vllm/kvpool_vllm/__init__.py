"""vLLM whose KV tensors are blocks of a kvpoold: servers of the same model share one KV cache.

    vllm serve MODEL --scheduler-cls kvpool_vllm.Scheduler

The package is a plugin of vLLM: installed, it is there, and does nothing until that scheduler is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Scheduler"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: plugins are loaded by processes that need nothing of vLLM's core.
    if name == "Scheduler":
        from kvpool_vllm.scheduler import Scheduler
        return Scheduler
    raise AttributeError(f"module 'kvpool_vllm' has no attribute {name!r}")
