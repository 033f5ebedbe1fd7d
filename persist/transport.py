"""How a client reaches shards: embedded (its own machines over the stores) or through a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from blob import Blob
from persist import commands as c
from persist.antichain import MINIMUM, Antichain
from persist.batch import HollowBatch
from persist.ids import IdSource, SeqNo, ShardId
from persist.state import Policy, SchemaRecord, State
from persist.system import Clock


@dataclass(frozen=True, slots=True)
class ShardView:
    """What readers and writers need of a State: frontiers, schemas, and the batches that they asked for."""

    name: str
    shard_id: ShardId
    seqno: SeqNo
    since: Antichain
    upper: Antichain
    schema_id: int
    schemas: dict[int, SchemaRecord]
    batches: tuple[HollowBatch, ...]


def view_of(state: State, lower: Antichain, with_batches: bool) -> ShardView:
    """The view of a State with the batches that reach beyond `lower`."""
    batches = tuple(b for b in state.trace.batches if lower < b.desc.upper) if with_batches else ()
    return ShardView(
        state.name,
        state.shard_id,
        state.seqno,
        state.since,
        state.upper,
        state.schema_id,
        dict(state.schemas),
        batches,
    )


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """Which State to wait for, and how much of it to show.

    Wait at most `timeout_s` until the time `past` is complete (upper beyond it). The State holds every commit that was
    acknowledged before the request, or, where `min_seqno` is given, every commit up to that one. `lower`: leave out
    batches whose upper is not beyond it.
    """

    past: int | None = None
    timeout_s: float = 0.0
    min_seqno: int = 0
    lower: Antichain = MINIMUM
    with_batches: bool = True


class Transport(Protocol):
    """Errors are those of the tree; calls are safe to repeat."""

    @property
    def blob(self) -> Blob:
        """Where this client reads and writes parts: the store itself, or the server's door to it."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def ids(self) -> IdSource: ...

    @property
    def policy(self) -> Policy:
        """The inline limits that apply to parts of this client."""
        ...

    def create(self, name: str, schema: SchemaRecord) -> ShardView:
        """Create the shard unless it exists; its view either way (without batches)."""
        ...

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Names of shards, ascending, beyond `after`."""
        ...

    def apply(self, name: str, command: c.Command) -> c.Result: ...

    def view(self, name: str, request: ViewRequest) -> ShardView: ...

    def close(self) -> None: ...
