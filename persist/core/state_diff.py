"""State diffs: the change between two consecutive States. `apply(diff(a, b), a) == b`.

A State is seen as named collections of keyed entries (writers by id, batches by their lower, ...); a state diff
holds, for each collection that changed, what was set and what was deleted. So its size is that of the
change, never that of the State.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from persist.core.antichain import Antichain
from persist.core.batch import HollowBatch
from persist.core.errors import Corruption
from persist.core.ids import SeqNo
from persist.core.state import State, auxiliary_blob_keys
from persist.core.trace import Trace

MAPPINGS = (
    "schemas",
    "writers",
    "leased_readers",
    "critical_readers",
    "rollups",
    "claims",
    "attributes",
    "attribute_chunks",
)
SCALARS = ("since", "tombstone", "event_count", "byte_count", "attribute_root")

_NAMING_BLOBS = ("rollups", "claims", "attribute_chunks")


@dataclass(frozen=True, slots=True)
class MapDiff:
    """Entries set (new or replaced) and keys deleted."""

    set: Mapping[Any, Any]
    deleted: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The batches at `[first, first + count)` were replaced by `batches`; the others stayed."""

    first: int
    count: int
    batches: tuple[HollowBatch, ...]


@dataclass(frozen=True, slots=True)
class StateDiff:
    """The change from State `seqno - 1` to State `seqno`.

    `commit_id` tells this commit from any other that tried for the same seqno. `gone` are the blobs that
    the earlier State named and the later one does not: what GC may delete one day. `rollup_seqno`/`rollup_key`
    name the newest rollup as of the later State: where one who only has this diff starts to load.
    """

    seqno: SeqNo
    walltime_ms: int
    commit_id: str
    rollup_seqno: SeqNo
    rollup_key: str
    gone: tuple[str, ...]
    scalars: Mapping[str, Any]
    mappings: Mapping[str, MapDiff]
    trace: TraceDiff | None


def diff(old: State, new: State, commit_id: str) -> StateDiff:
    """The state diff that leads from `old` to `new`."""
    mappings = {}
    for name in MAPPINGS:
        before, after = getattr(old, name), getattr(new, name)
        if before is not after and before != after:
            mappings[name] = _diff_mapping(before, after)
    scalars = {name: getattr(new, name) for name in SCALARS if getattr(old, name) != getattr(new, name)}
    rollup_seqno = max(new.rollups, default=SeqNo(0))
    return StateDiff(
        seqno=new.seqno,
        walltime_ms=new.walltime_ms,
        commit_id=commit_id,
        rollup_seqno=rollup_seqno,
        rollup_key=new.rollups[rollup_seqno].key if new.rollups else "",
        gone=_gone(old, new),
        scalars=scalars,
        mappings=mappings,
        trace=_diff_trace(old.trace, new.trace),
    )


def apply(change: StateDiff, state: State) -> State:
    """The State that follows `state`. Raises Corruption when the diff does not fit."""
    if change.seqno != state.seqno + 1:
        raise Corruption(f"state diff {change.seqno} of shard {state.name!r} does not follow {state.seqno}")
    fields: dict[str, Any] = dict(change.scalars)
    for name, map_diff in change.mappings.items():
        fields[name] = _apply_mapping(getattr(state, name), map_diff)
    if change.trace is not None:
        fields["trace"] = _apply_trace(state, change.trace)
    return replace(state, seqno=change.seqno, walltime_ms=change.walltime_ms, **fields)


def _diff_mapping(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> MapDiff:
    changed = {k: v for k, v in after.items() if k not in before or (before[k] is not v and before[k] != v)}
    return MapDiff(changed, tuple(k for k in before if k not in after))


def _apply_mapping(before: Mapping[Any, Any], change: MapDiff) -> dict[Any, Any]:
    after = {**before, **change.set}
    for key in change.deleted:
        after.pop(key, None)
    return after


def _diff_trace(old: Trace, new: Trace) -> TraceDiff | None:
    before, after = old.batches, new.batches
    if before is after or before == after:
        return None
    if after[: len(before)] == before:  # the common case, an append, compared by identity in C
        return TraceDiff(len(before), 0, after[len(before) :])
    shorter = min(len(before), len(after))
    first = 0
    while first < shorter and before[first] is after[first]:
        first += 1
    tail = 0
    while tail < shorter - first and before[-1 - tail] is after[-1 - tail]:
        tail += 1
    return TraceDiff(first, len(before) - first - tail, after[first : len(after) - tail])


def _apply_trace(state: State, change: TraceDiff) -> Trace:
    trace = state.trace
    if change.first + change.count > len(trace.batches):
        raise Corruption(f"a state diff of shard {state.name!r} replaces batches that are not there")
    if change.count == 0 and change.first == len(trace.batches):
        inline = sum(batch.inline_size for batch in change.batches)
        rows = sum(batch.rows for batch in change.batches)
        return Trace((*trace.batches, *change.batches), trace.inline_bytes + inline, trace.rows + rows)
    return trace.splice(change.first, change.count, change.batches)


def _gone(old: State, new: State) -> tuple[str, ...]:
    """Blobs named before and not after. Only what changed is looked at."""
    gone: set[str] = set()
    change = _diff_trace(old.trace, new.trace)
    if change is not None and change.count:
        replaced = old.trace.batches[change.first : change.first + change.count]
        gone.update(key for batch in replaced for key in batch.blob_keys())
    if any(getattr(old, name) is not getattr(new, name) for name in _NAMING_BLOBS):
        gone.update(auxiliary_blob_keys(old))
    if not gone:
        return ()
    still = new.trace.blob_keys.union(auxiliary_blob_keys(new))
    return tuple(sorted(gone - still))


__all__ = ["MAPPINGS", "SCALARS", "Antichain", "MapDiff", "StateDiff", "TraceDiff", "apply", "diff"]
