"""What --hicache-storage-backend-extra-config says to kvpool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Options:
    """Its "kvpool": {...}."""

    socket: str = ""  # kvpoold's; "": $KVPOOL_SOCKET, or where it listens by default.
    tenant: str = ""
    # A name for the spaces. Servers that give the same name must be of the same model, dtype, page size and so on: one that differs is
    # refused at its start. "": those that are the same find each other, others have spaces of their own.
    space: str = ""
    # "own": a server that finds no daemon at its start begins without. "": then it does not start. One that loses its daemon goes on
    # without in either case.
    fallback: str = ""
    guaranteed_blocks: int = 0  # Pages of each pool that the server always gets, whatever others do.
    max_space_bytes: int = 0  # 0: all that the device has.
    open_timeout: float = 30.0
    match_timeout: float = 1.0  # A daemon that takes longer to answer is none: pages are computed.
    lease_timeout: float = 1.0  # How long a backup may wait for blocks when the pool is short: it has a thread of its own.
    wait_ms: int = 0  # How long a query waits for what is in a tier below the pool.
    hold_seconds: float = 30.0  # How long pages that a query has found are kept for the reads behind it.

    @staticmethod
    def checked(given: Any) -> Options:
        where = "hicache_storage_backend_extra_config.kvpool"
        if not isinstance(given, Mapping):
            raise ValueError(f"{where} is {given!r}; must be an object")
        known = {field.name for field in dataclasses.fields(Options)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"{where}: no such option: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        options = Options(**given)
        if options.fallback not in ("", "own"):
            raise ValueError(f"{where}.fallback is {options.fallback!r}; must be \"own\" or nothing")
        return options
