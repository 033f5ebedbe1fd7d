"""What drops took away, as the retractions that nobody wrote: for listeners, change feeds, and who works on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from persist.client.transport import Transport
from persist.core.antichain import Antichain
from persist.core.batch import Run
from persist.core.drops import RowDrop, taken_away
from persist.core.view import ShardView, ViewRequest
from persist.parts import ALL_KEYS, TIME, KeyRange, PartReader, negated


def whole_view(transport: Transport, name: str, view: ShardView) -> ShardView:
    """The shard as of this view or later, with all of its batches: what drops took away lies before any interval.

    Raises what asking for a view may.
    """
    return transport.view(name, ViewRequest(min_seqno=view.seqno, seen=view.seen))


def runs_of(view: ShardView) -> tuple[Run, ...]:
    """All runs of a view."""
    return tuple(run for batch in view.batches for run in batch.runs)


def retractions(
    reader: PartReader,
    runs: Sequence[Run],
    drop: RowDrop,
    key_range: KeyRange = ALL_KEYS,
    columns: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """The rows of `runs` that the drop took away, with negative `__diff`, at its time. `runs` come from `taken_away`.

    Tables are as those of `PartReader.read_updates`, in key order. Raises what reading does.
    """
    parts = [part for run in runs for part in run.parts]
    before = Antichain(drop.cut)
    found = reader.read_updates(parts, Antichain(0), before, since=drop.cut - 1, key_range=key_range, columns=columns)
    return (_at(negated(table), drop.at) for table in found)


def retracted(
    reader: PartReader,
    view: ShardView,
    drops: Sequence[RowDrop],
    key_range: KeyRange = ALL_KEYS,
    columns: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """The retractions of several drops of a view that has all batches, one drop after the other."""
    runs = runs_of(view)
    for drop in drops:
        yield from retractions(reader, taken_away(runs, view.drops, drop), drop, key_range, columns)


def _at(table: pa.Table, time: int) -> pa.Table:
    place = table.column_names.index(TIME)
    return table.set_column(place, table.schema.field(place), pa.repeat(pa.scalar(time, pa.int64()), len(table)))
