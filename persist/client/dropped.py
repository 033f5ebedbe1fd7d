"""What drops took away, as the retractions that nobody wrote: for listeners, change feeds, and who works on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from persist.client.transport import Transport
from persist.core.antichain import Antichain
from persist.core.batch import Run
from persist.core.drops import DROPS_MAX, RowDrop, taken_away
from persist.core.errors import InvalidUsage, NotReadable, TokenReused, UnknownShard, UpgradeNeeded
from persist.core.view import ShardView, ViewRequest
from persist.parts import ALL_KEYS, KeyRange, PartReader, at_time, negated

T = TypeVar("T")
DROPS_FOR_OTHERS = 16  # drops of a shard that an overwrite leaves to truncations


def whole_view(transport: Transport, name: str, view: ShardView) -> ShardView:
    """The shard as of this view or later, with all of its batches: what drops took away lies before any interval.

    Raises what asking for a view may.
    """
    return transport.view(name, ViewRequest(min_seqno=view.seqno, seen=view.seen))


def runs_of(view: ShardView) -> tuple[Run, ...]:
    """All runs of a view."""
    return tuple(run for batch in view.batches for run in batch.runs)


def within(runs: Iterable[Run], low: int, high: int) -> tuple[Run, ...]:
    """The runs with those parts that may have updates at times in `(low, high]`."""
    parts = (tuple(part for part in run.parts if part.time_max > low and part.time_min <= high) for run in runs)
    return tuple(Run(some) for some in parts if some)


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
    return (at_time(negated(table), drop.at) for table in found)


def changes_at(
    reader: PartReader,
    runs: Sequence[Run],
    came: Sequence[Run],
    drop: RowDrop,
    key_range: KeyRange = ALL_KEYS,
    columns: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """All that changed at the time of a drop: `retractions` of `runs`, and what was written then, which is in `came`.

    Rows that went and came cancel out. Tables are as those of `retractions`. Raises what reading does.
    """
    if not came:
        yield from retractions(reader, runs, drop, key_range, columns)
        return
    went = reader.read_range(runs, as_of=drop.cut - 1, key_range=key_range)
    fresh = reader.read_changes(came, drop.at - 1, drop.at, key_range=key_range)
    for table in reader.difference(went, fresh, columns):
        yield at_time(table, drop.at)


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


def may_replace_all(view: ShardView) -> bool:
    """Whether an overwrite may try a drop: there is something, and truncations are left enough drops of the shard."""
    return view.upper.element not in (None, 0) and len(view.drops) < DROPS_MAX - DROPS_FOR_OTHERS


def unless_refused(commit: Callable[[], T]) -> T | None:
    """What the commit of a drop came to; None: a drop is not possible in this shard, and nothing was changed.

    Raises what else the commit may.
    """
    try:
        return commit()
    except (UnknownShard, TokenReused):  # which are no fault of the drop
        raise
    except (InvalidUsage, NotReadable, UpgradeNeeded):
        return None
