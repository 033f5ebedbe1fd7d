"""Views of a State for readers and writers, and the digest of what was acknowledged to callers."""

from __future__ import annotations

import hashlib

from persist.core.batch import HollowBatch, Run
from persist.core.erasure_progress import erased_at, pending_erasures, pending_runs
from persist.core.frontier import MINIMUM, Antichain
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo, ShardId
from persist.core.named_holds import Tag
from persist.core.readable_times import visible_truncations
from persist.core.record import Record
from persist.core.shard_settings import ShardSettings
from persist.core.state import LeasedReader, SchemaRecord, State
from persist.core.truncations_and_drops import RowDrop, Truncations


class SeenVersion(Record, frozen=True):
    """A State that a caller has read: its seqno, and the id of the commit that made it."""

    seqno: SeqNo
    commit_id: str


class ShardDetails(Record, frozen=True):
    """Settings, tags and critical readers of a shard: `cursors` maps each critical reader to its since."""

    settings: ShardSettings
    tags: dict[str, Tag]
    cursors: dict[CriticalReaderId, Antichain]


class ShardView(Record, frozen=True):
    """What readers and writers need from a State: frontiers, schemas, and the requested batches.

    For contents, pass the batches to `persist.core.truncations_and_drops.contents`. `truncations` are those that a
    readable time precedes and no restore has undone; only with batches. `service_times` are the intervals of times that
    the service chose, if requested. `erasing` is the number of pending erasures; `retracting` are their retractions at
    the upper; only with batches. `erased` is the time of the last erasure, from which on new readers may hold the
    shard. `reader` is the requested one, None if it is gone; `tagged` the time of the requested tag, None if there is
    none. `details` are set if requested. `schema_times` are those of the State.
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
        """The State of this view, for `ViewRequest.seen` of a later request."""
        return SeenVersion(self.seqno, self.commit_id)

    @property
    def is_dropped(self) -> bool:
        return self.upper.is_empty and self.since.is_empty


def view_of(state: State, request: ViewRequest) -> ShardView:
    """The requested view of a State. Costs time in proportion to the view, not to the State."""
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
        visible_truncations(state) if request.with_batches else (),
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
    """The State to wait for, and how much of it to return.

    Waits at most `timeout_s` until the time `past` is complete (upper beyond it). The State includes every commit that
    was acknowledged before the request, or, with `min_seqno`, every commit up to that one. `lower`: leave out batches
    whose upper is not beyond it. `seen`: the State that the caller has read before, perhaps through another process;
    HistoryLost if it is no longer in the log. `with_service_times`: return the times that the service chose. `reader`,
    `tag`: return the hold of this leased reader, and the time of this tag. `with_details`: return the settings, all
    tags and all critical readers.
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


def digest_of(state: State) -> str:
    """A digest of everything that callers changed. States of one shard with equal digests have the same changes.

    It covers frontiers of writers, the count of rows, schemas, critical readers, attributes, settings, tags and
    erasures. It leaves out what maintenance moves: since, marks of wall clocks, leases, batches, files. Digests may
    also differ because maintenance has moved attributes to their index, or has removed a tag.
    """
    erased = {name: (erasure.at, erasure.question, erasure.reason) for name, erasure in state.erasures.items()}
    acknowledged = (
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
    return hashlib.sha256(repr(acknowledged).encode()).hexdigest()[:32]
