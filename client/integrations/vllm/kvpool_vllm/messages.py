"""What the connector's two halves tell each other through vLLM: a worker's Transfer and the scheduler's Lookup.

    Plan      scheduler -> workers    before each step: the Loads and Copies to begin, and an Invitation until all have taken it
    Report    workers -> scheduler    after each step
"""

from __future__ import annotations

import collections
import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclasses.dataclass
class Invitation:
    """How a worker joins the scheduler's session, as its rank."""

    session: int  # The scheduler's how many-th session it is, from 1.
    secret: bytes


@dataclasses.dataclass
class Load:
    """Blocks of a request's prefix to copy in, beside steps; the lists are parallel."""

    request_id: str
    groups: list[int]  # Of each block: whose pages it has.
    blocks: list[int]  # vLLM's.
    refs: list[int]  # kvpoold's, held by the session.
    keys: list[bytes]


@dataclasses.dataclass
class Copy:
    """Blocks to copy out, beside steps; the lists are parallel. vLLM's are full, and the scheduler holds them."""

    number: int
    groups: list[int]
    blocks: list[int]  # vLLM's.
    refs: list[int]  # kvpoold's, leased to the session.
    keys: list[bytes]


@dataclasses.dataclass
class Plan(KVConnectorMetadata):
    """The workers' part in one step."""

    session: int  # Whose blocks are named: Invitation.session. They are there still when the scheduler has just lost it.
    invitation: Invitation | None
    is_empty: bool  # The step computes nothing.
    loads: list[Load] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report(KVConnectorWorkerMetadata):
    """What became of the plans. Those of all workers are one when the scheduler has them."""

    session: int  # Invitation.session that the worker is in; 0: in none so far.
    refused: int  # The newest that it could not join; 0: there was none.
    damaged: set[int]  # Refs of blocks whose content is not what their key says.
    copied: dict[int, int]  # {number of a Copy: how many workers have done it since their last report}
    not_copied: set[int]  # Those of them that came to nothing with some worker.

    def aggregate(self, other: Report) -> Report:
        copied = collections.Counter(self.copied)
        copied.update(other.copied)
        return Report(min(self.session, other.session), max(self.refused, other.refused), self.damaged | other.damaged, dict(copied),
                      self.not_copied | other.not_copied)
