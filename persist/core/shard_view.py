"""What readers and writers need of a State, and the digest of what callers have been acknowledged."""

from __future__ import annotations

import hashlib

from persist.core.batch import HollowBatch, Run
from persist.core.erasure_progress import erased_at, pending_erasures, pending_runs
from persist.core.frontier import MINIMUM, Antichain
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo, ShardId
from persist.core.named_holds import Tag
from persist.core.record import Record
from persist.core.shard_settings import ShardSettings
from persist.core.state import LeasedReader, SchemaRecord, State, told_apart
from persist.core.truncation import RowDrop, Truncations

# What readers and writers need of a State, and how they ask for it.


class SeenVersion(Record, frozen=True):
    """A State that somebody has read: its seqno, and the commit that made it."""

    seqno: SeqNo
    commit_id: str


class ShardDetails(Record, frozen=True):
    """Settings and holds of a shard: `cursors` are the times from which on critical readers hold it."""

    settings: ShardSettings
    tags: dict[str, Tag]
    cursors: dict[CriticalReaderId, Antichain]


class ShardView(Record, frozen=True):
    """What readers and writers need of a State: frontiers, schemas, and the batches that they asked for.

    Who reads contents from the batches asks `persist.core.truncation.contents` which of them count. `truncations` are
    those that a readable time comes before and no restore has undone; only with batches. `service_times` are the
    intervals of times that the service chose; only where they were asked for. `erasing` are so many erasures that are
    pending; `retracting` is what they take away at the upper; only with batches. `erased` is the time of the last
    erasure, from which on new readers may hold the shard. `reader` is the one that was asked for, None where it is
    gone; `tagged` the time of the tag, None where there is none. `details` are there where they were asked for.
    `schema_times` are those of the State.
    """

    name: str
    shard_id: ShardId
    seqno: SeqNo
    since: Antichain
    upper: Antichain
    schema_id: int
    schemas: dict[int, SchemaRecord]
    schema_times: dict[int, int]
    batches: tuple[HollowBatch, ...]
    commit_id: str = ""
    drops: tuple[RowDrop, ...] = ()
    truncations: Truncations = ()
    service_times: tuple[tuple[int, int], ...] = ()
    erasing: int = 0
    retracting: tuple[Run, ...] = ()
    erased: Antichain = MINIMUM
    reader: LeasedReader | None = None
    tagged: int | None = None
    details: ShardDetails | None = None

    @property
    def seen(self) -> SeenVersion:
        """By which a later request tells what its caller has read."""
        return SeenVersion(self.seqno, self.commit_id)

    @property
    def is_dropped(self) -> bool:
        """Nobody can write and nobody can read any more."""
        return self.upper.is_empty and self.since.is_empty


def view_of(state: State, request: ViewRequest) -> ShardView:
    """The view of a State with what the request asks for. Costs what is shown, not what is there."""
    batches = state.trace.beyond(request.lower) if request.with_batches else ()
    pending = pending_erasures(state)
    reader = state.leased_readers.get(request.reader) if request.reader is not None else None
    tag = state.tags.get(request.tag)
    return ShardView(
        state.name,
        state.shard_id,
        state.seqno,
        state.since,
        state.upper,
        state.schema_id,
        dict(state.schemas),
        dict(state.schema_times),
        batches,
        state.commit_id,
        state.drops,
        told_apart(state) if request.with_batches else (),
        state.service_times if request.with_service_times else (),
        len(pending),
        pending_runs(pending) if request.with_batches else (),
        Antichain(erased_at(state)),
        reader if reader is not None and not reader.lapsed(state.lease_now_ms) else None,
        tag.time if tag is not None else None,
        _details(state) if request.with_details else None,
    )


def _details(state: State) -> ShardDetails:
    cursors = {name: reader.since for name, reader in state.critical_readers.items()}
    return ShardDetails(state.settings, dict(state.tags), cursors)


class ViewRequest(Record, frozen=True):
    """Which State to wait for, and how much of it to show.

    Wait at most `timeout_s` until the time `past` is complete (upper beyond it). The State holds every commit that was
    acknowledged before the request, or, where `min_seqno` is given, every commit up to that one. `lower`: leave out
    batches whose upper is not beyond it. `seen`: what the caller has read of the shard, perhaps through another
    process; HistoryLost, if that is not in the log any more. `with_service_times`: show the times that the service
    chose. `reader`, `tag`: show what this leased reader holds, and the time of this tag. `with_details`: show the
    settings, all tags and all critical readers.
    """

    past: int | None = None
    timeout_s: float = 0.0
    min_seqno: int = 0
    lower: Antichain = MINIMUM
    with_batches: bool = True
    seen: SeenVersion | None = None
    with_service_times: bool = False
    reader: ReaderId | None = None
    tag: str = ""
    with_details: bool = False


# What callers were told of a shard, besides rows, as a digest: maintenance and leases leave it as it is. Pure.


def digest_of(state: State) -> str:
    """Two States of one shard with the same digest differ in nothing that a caller asked for and was given.

    It has frontiers of writers, the count of rows, schemas, critical readers, attributes, settings, tags and erasures.
    What moves by itself is left out: since, marks of wall clocks, leases, batches, files. Where maintenance has moved
    attributes to their index, or has forgotten a tag, the digests differ although nothing was asked for.
    """
    erased = {name: (erasure.at, erasure.question, erasure.reason) for name, erasure in state.erasures.items()}
    told = (
        state.shard_id,
        state.is_closed,
        state.upper.to_json(),
        state.event_count,
        sorted(state.schemas.items()),
        sorted(state.critical_readers.items()),
        sorted(state.attributes.items(), key=repr),
        state.attribute_root,
        state.settings,
        sorted(state.tags.items()),
        sorted(erased.items()),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
