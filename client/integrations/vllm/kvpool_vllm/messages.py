"""What the connector's two halves tell each other through vLLM: the worker's Transfer and the scheduler's Lookup.

    Invitation   worker -> scheduler    at start, and inside a Report
    Plan         scheduler -> worker    before each step: the Loads to begin, and the Saves to do
    Report       worker -> scheduler    after each step
"""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorHandshakeMetadata, KVConnectorMetadata,
                                                                KVConnectorWorkerMetadata)


@dataclasses.dataclass
class Invitation(KVConnectorHandshakeMetadata):
    """How the scheduler joins the worker's session. Sent again when the worker has opened another one."""

    session: int  # The worker's how many-th session it is, from 1; 0: none so far, because there was no kvpoold.
    secret: bytes


@dataclasses.dataclass
class Load:
    """Blocks of a request's prefix to copy in, beside steps; the lists are parallel."""

    request_id: str
    blocks: list[int]  # vLLM's.
    refs: list[int]  # kvpoold's, held by the session.
    keys: list[bytes]


@dataclasses.dataclass
class Save:
    """Consecutive blocks of a sequence that are full after the step."""

    blocks: list[int]
    keys: list[bytes]
    parent_key: bytes | None
    adapter: tuple[str, str] | None  # keys.adapter_files: what they have to be still once the step is done.


@dataclasses.dataclass
class Plan(KVConnectorMetadata):
    """The worker's part in one step."""

    session: int  # Invitation.session; 0: the scheduler is in none.
    loads_session: int  # Whose blocks the loads name. They are there still when the scheduler has just lost it.
    is_empty: bool  # The step computes nothing.
    loads: list[Load] = dataclasses.field(default_factory=list)
    saves: list[Save] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report(KVConnectorWorkerMetadata):
    """What became of the plans."""

    damaged: set[int]  # Refs of blocks whose content is not what their key says.
    invitation: Invitation | None  # None: the scheduler is in the worker's session.

    def aggregate(self, other: Report) -> Report:
        return Report(self.damaged | other.damaged, self.invitation or other.invitation)
