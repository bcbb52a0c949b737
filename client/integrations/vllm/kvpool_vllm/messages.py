"""What the connector's two halves tell each other through vLLM: the worker's Transfer and the scheduler's Lookup.

    Invitation   worker -> scheduler    at start, and inside a Report
    Plan         scheduler -> worker    before each step: the Loads and Copies to begin
    Report       worker -> scheduler    after each step
"""

from __future__ import annotations

import collections
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
class Copy:
    """Blocks to copy out, beside steps; the lists are parallel. vLLM's are full, and the scheduler holds them."""

    number: int
    blocks: list[int]  # vLLM's.
    refs: list[int]  # kvpoold's, leased to the session.
    keys: list[bytes]


@dataclasses.dataclass
class Plan(KVConnectorMetadata):
    """The worker's part in one step."""

    session: int  # Invitation.session; 0: the scheduler is in none.
    blocks_session: int  # Whose blocks are named. They are there still when the scheduler has just lost it.
    is_empty: bool  # The step computes nothing.
    loads: list[Load] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report(KVConnectorWorkerMetadata):
    """What became of the plans."""

    damaged: set[int]  # Refs of blocks whose content is not what their key says.
    copied: dict[int, int]  # {number of a Copy: how many workers have done it since their last report}
    not_copied: set[int]  # Those of them that came to nothing with some worker.
    invitation: Invitation | None  # None: the scheduler is in the worker's session.

    def aggregate(self, other: Report) -> Report:
        copied = collections.Counter(self.copied)
        copied.update(other.copied)
        return Report(self.damaged | other.damaged, dict(copied), self.not_copied | other.not_copied, self.invitation or other.invitation)
