"""What readers and writers need of a State, and how they ask for it."""

from __future__ import annotations

from persist.core.antichain import MINIMUM, Antichain
from persist.core.batch import HollowBatch, Run
from persist.core.drops import RowDrop
from persist.core.erasing import pending_erasures, pending_runs
from persist.core.ids import SeqNo, ShardId
from persist.core.record import Record
from persist.core.state import SchemaRecord, State, told_apart
from persist.core.truncation import Truncations


class Seen(Record, frozen=True):
    """A State that somebody has read: its seqno, and the commit that made it."""

    seqno: SeqNo
    commit_id: str


class ShardView(Record, frozen=True):
    """What readers and writers need of a State: frontiers, schemas, and the batches that they asked for.

    Who reads contents from the batches asks `persist.core.drops.contents` which of them count. `truncations` are those
    that a readable time comes before and no restore has undone; only with batches. `service_times` are the intervals
    of times that the service chose; only where they were asked for. `erasing` are so many erasures that are pending;
    `retracting` is what they take away at the upper; only with batches.
    """

    name: str
    shard_id: ShardId
    seqno: SeqNo
    since: Antichain
    upper: Antichain
    schema_id: int
    schemas: dict[int, SchemaRecord]
    batches: tuple[HollowBatch, ...]
    commit_id: str = ""
    drops: tuple[RowDrop, ...] = ()
    truncations: Truncations = ()
    service_times: tuple[tuple[int, int], ...] = ()
    erasing: int = 0
    retracting: tuple[Run, ...] = ()

    @property
    def seen(self) -> Seen:
        """By which a later request tells what its caller has read."""
        return Seen(self.seqno, self.commit_id)

    @property
    def is_dropped(self) -> bool:
        """Nobody can write and nobody can read any more."""
        return self.upper.is_empty and self.since.is_empty


def view_of(state: State, request: ViewRequest) -> ShardView:
    """The view of a State with what the request asks for. Costs what is shown, not what is there."""
    batches = state.trace.beyond(request.lower) if request.with_batches else ()
    pending = pending_erasures(state)
    return ShardView(
        state.name,
        state.shard_id,
        state.seqno,
        state.since,
        state.upper,
        state.schema_id,
        dict(state.schemas),
        batches,
        state.commit_id,
        state.drops,
        told_apart(state) if request.with_batches else (),
        state.service_times if request.with_service_times else (),
        len(pending),
        pending_runs(pending) if request.with_batches else (),
    )


class ViewRequest(Record, frozen=True):
    """Which State to wait for, and how much of it to show.

    Wait at most `timeout_s` until the time `past` is complete (upper beyond it). The State holds every commit that was
    acknowledged before the request, or, where `min_seqno` is given, every commit up to that one. `lower`: leave out
    batches whose upper is not beyond it. `seen`: what the caller has read of the shard, perhaps through another
    process; HistoryLost, if that is not in the log any more. `with_service_times`: show the times that the service
    chose.
    """

    past: int | None = None
    timeout_s: float = 0.0
    min_seqno: int = 0
    lower: Antichain = MINIMUM
    with_batches: bool = True
    seen: Seen | None = None
    with_service_times: bool = False
