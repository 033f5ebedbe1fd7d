"""State diffs: the change between two consecutive States. `apply(diff(a, b), a) == b`.

A State consists of named collections of keyed entries (writers by id, batches by their lower, ...). A state diff
holds, for each collection that changed, the entries set and deleted, so its size is that of the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, is_not
from typing import Any, Generic, TypeVar

from persist.core.attribute import AttributeKey, IndexChunk, IndexRoot
from persist.core.audit_log import Committed, TokenOutcome
from persist.core.batch import HollowBatch, Trace
from persist.core.clock_index import Seal
from persist.core.erasure import Erasure
from persist.core.errors import Corruption
from persist.core.frontier import Antichain
from persist.core.ids import CriticalReaderId, LoanId, ReaderId, SeqNo, WriterId, shard_id_of
from persist.core.named_holds import Loan, Tag
from persist.core.persistent_map import difference, with_changes
from persist.core.record import Record, replace
from persist.core.shard_settings import KeptCut, Retention, ShardSettings
from persist.core.spill import SpillFile, SpillKind
from persist.core.state import (
    Claim,
    CriticalReader,
    LeasedReader,
    Rollup,
    SchemaRecord,
    State,
    WriterState,
    auxiliary_blob_keys,
)
from persist.core.truncations_and_drops import RowDrop, Truncations

_K = TypeVar("_K")
_V = TypeVar("_V")

_NAMING_BLOBS = ("rollups", "claims", "attribute_chunks", "spilled", "long_diffs", "loans", "erasures")


class MapDiff(Record, Generic[_K, _V], frozen=True):
    """Entries set (new or replaced) and keys deleted."""

    set: Mapping[_K, _V]
    deleted: tuple[_K, ...]


_NO_CHANGE: MapDiff[Any, Any] = MapDiff({}, ())


class TraceDiff(Record, frozen=True):
    """The batches at `[first, first + count)` were replaced by `batches`; the others stayed."""

    first: int
    count: int
    batches: tuple[HollowBatch, ...]


class StateDiff(Record, frozen=True):
    """The change from State `seqno - 1` to State `seqno`. None: that field of the State is unchanged.

    `commit_id` distinguishes this commit from any other that tried for the same seqno. `gone` are the blobs that only
    the earlier State named, which garbage collection may delete later. `rollup_seqno`/`rollup_key` name the newest
    rollup as of the later State, from which loading starts. `parent_id` is the commit that made the earlier State;
    empty for the first State. `elsewhere`: the whole state diff is in this blob, and this one only refers to it in the
    log. `emptied` are those bundles among `gone` whose parts did not leave with them (`persist.core.bundles`).
    """

    seqno: SeqNo
    walltime_ms: int
    commit_id: str
    rollup_seqno: SeqNo
    rollup_key: str
    gone: tuple[str, ...] = ()
    trace: TraceDiff | None = None
    writers: MapDiff[WriterId, WriterState] | None = None
    since: Antichain | None = None
    event_count: int | None = None
    byte_count: int | None = None
    leased_readers: MapDiff[ReaderId, LeasedReader] | None = None
    critical_readers: MapDiff[CriticalReaderId, CriticalReader] | None = None
    rollups: MapDiff[SeqNo, Rollup] | None = None
    claims: MapDiff[str, Claim] | None = None
    attributes: MapDiff[AttributeKey, int | None] | None = None
    attribute_root: IndexRoot | None = None
    attribute_chunks: MapDiff[int, IndexChunk] | None = None
    schemas: MapDiff[int, SchemaRecord] | None = None
    tombstone: bool | None = None
    features: tuple[str, ...] | None = None
    left: MapDiff[bytes, int] | None = None
    left_before_ms: int | None = None
    incarnation: int | None = None
    parent_id: str = ""
    lease_clock_ms: int | None = None
    swept_before_ms: int | None = None
    outcomes: MapDiff[str, TokenOutcome] | None = None
    spilled: MapDiff[SpillKind, tuple[SpillFile, ...]] | None = None
    forgotten_ms: int | None = None
    service_times: tuple[tuple[int, int], ...] | None = None
    long_diffs: MapDiff[SeqNo, str] | None = None
    elsewhere: Rollup | None = None
    emptied: tuple[str, ...] = ()
    given_up: SeqNo | None = None
    seal: Seal | None = None
    marks: MapDiff[int, Antichain] | None = None
    settings: ShardSettings | None = None
    history_hold: Antichain | None = None
    entries: MapDiff[SeqNo, Committed] | None = None
    info_bytes: int | None = None
    tags: MapDiff[str, Tag] | None = None
    truncations: Truncations | None = None
    restored_at: int | None = None
    drops: tuple[RowDrop, ...] | None = None
    floor: int | None = None
    cuts: MapDiff[int, KeptCut] | None = None
    retention: Retention | None = None
    erasures: MapDiff[str, Erasure] | None = None
    loans: MapDiff[LoanId, Loan] | None = None
    borrowed: MapDiff[LoanId, str] | None = None
    handed_over: int | None = None
    schema_floor: int | None = None
    schema_times: MapDiff[int, int] | None = None


MAPPINGS = tuple(name for name, kind in StateDiff.__annotations__.items() if kind.startswith("MapDiff"))
SCALARS = tuple(
    name
    for name in State.__struct_fields__
    if name in StateDiff.__struct_fields__ and name not in (*MAPPINGS, "seqno", "walltime_ms", "commit_id", "trace")
)
# One call for all fields, instead of one for each.
_MAPPINGS_OF, _SCALARS_OF, _NAMING_OF = attrgetter(*MAPPINGS), attrgetter(*SCALARS), attrgetter(*_NAMING_BLOBS)


def diff(
    old: State, new: State, commit_id: str, gone: tuple[str, ...] | None = None, emptied: tuple[str, ...] = ()
) -> StateDiff:
    """The state diff that leads from `old` to `new`. `gone`: the blobs that left, if they are known already."""
    changed: dict[str, Any] = {}
    for name, before, after in zip(MAPPINGS, _MAPPINGS_OF(old), _MAPPINGS_OF(new), strict=True):
        if before is not after and (change := MapDiff(*difference(before, after))) != _NO_CHANGE:
            changed[name] = change
    for name, was, now in zip(SCALARS, _SCALARS_OF(old), _SCALARS_OF(new), strict=True):
        if was is not now and was != now:
            changed[name] = now
    rollup_seqno = max(new.rollups, default=SeqNo(0))
    return StateDiff(
        seqno=new.seqno,
        walltime_ms=new.walltime_ms,
        commit_id=commit_id,
        rollup_seqno=rollup_seqno,
        rollup_key=new.rollups[rollup_seqno].key if new.rollups else "",
        gone=gone_between(old, new) if gone is None else gone,
        trace=trace_between(old.trace, new.trace),
        parent_id=old.commit_id,
        emptied=emptied,
        **changed,
    )


def only_holds(change: StateDiff) -> bool:
    """Whether it only changes holds of leased readers, and removes lapsed registrations."""
    kept = {"leased_readers", "lease_clock_ms", "writers", "claims", "left", "left_before_ms", "seal", "marks"}
    if any(getattr(change, name) is not None for name in ("trace", *SCALARS, *MAPPINGS) if name not in kept):
        return False
    return not any(entries.set for entries in (change.writers, change.claims, change.left) if entries is not None)


def in_blob(change: StateDiff, key: str) -> StateDiff:
    """The same state diff for the blob of this key, which the following State names."""
    named = change.long_diffs or _NO_CHANGE
    return replace(change, long_diffs=MapDiff({**named.set, change.seqno: key}, named.deleted))


def referring_to(change: StateDiff, key: str, size: int) -> StateDiff:
    """The log entry for a state diff that is stored in a blob."""
    return StateDiff(
        seqno=change.seqno,
        walltime_ms=change.walltime_ms,
        commit_id=change.commit_id,
        rollup_seqno=change.rollup_seqno,
        rollup_key=change.rollup_key,
        parent_id=change.parent_id,
        elsewhere=Rollup(key, size),
    )


def apply(change: StateDiff, state: State) -> State:
    """The State that follows `state`. Raises Corruption if the diff does not fit."""
    if change.seqno != state.seqno + 1:
        raise Corruption(f"state diff v{change.seqno} of shard {state.name!r} does not follow v{state.seqno}")
    if change.parent_id and state.commit_id and change.parent_id != state.commit_id:
        raise Corruption(
            f"state diff v{change.seqno} of shard {state.name!r} follows another v{state.seqno} than the one in the "
            "log: a process that had read a lost history has written it; restore both stores from one backup"
        )
    fields = {name: value for name in SCALARS if (value := getattr(change, name)) is not None}
    for name in MAPPINGS:
        if (map_diff := getattr(change, name)) is not None:
            fields[name] = with_changes(getattr(state, name), map_diff.set, map_diff.deleted)
    if change.incarnation is not None:
        fields["shard_id"] = shard_id_of(state.name, change.incarnation)
    if change.trace is not None:
        fields["trace"] = _apply_trace(state, change.trace)
    return replace(state, seqno=change.seqno, walltime_ms=change.walltime_ms, commit_id=change.commit_id, **fields)


def trace_between(old: Trace, new: Trace) -> TraceDiff | None:
    """The change from one trace to the other; None: none."""
    change = old.difference(new)
    return None if change is None else TraceDiff(*change)


def _apply_trace(state: State, change: TraceDiff) -> Trace:
    trace = state.trace
    if change.first + change.count > len(trace.batches):
        raise Corruption(f"a state diff of shard {state.name!r} replaces batches that are not there")
    if change.count == 0 and change.first == len(trace.batches):
        return trace.append(change.batches)
    return trace.splice(change.first, change.count, change.batches)


def gone_between(old: State, new: State) -> tuple[str, ...]:
    """The blobs that only the old State named. Costs time in proportion to the change."""
    gone: set[str] = set()
    change = trace_between(old.trace, new.trace)
    if change is not None and change.count:
        replaced = old.trace.batches[change.first : change.first + change.count]
        gone.update(key for batch in replaced for key in batch.blob_keys())
    if any(map(is_not, _NAMING_OF(old), _NAMING_OF(new))):
        gone.update(auxiliary_blob_keys(old))
    if not gone:
        return ()
    still = set(auxiliary_blob_keys(new))
    return tuple(sorted(key for key in gone if key not in still and not new.trace.names(key)))
