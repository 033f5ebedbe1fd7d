"""Bindings as rows of a shard: the columns, and reads that touch few of them.

A row `(partition, position, time, whole)` is written at the time `time`. A mint has a row for each partition that it
moves. A **whole** one has a row for every partition there is, so whoever reads from it on knows where each stands; in
it a partition that has not moved repeats its position, which binds nothing new. No row is ever taken away, so what is
read does not depend on how much history the shard keeps.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import Corruption
from persist.patterns.known import NOT_BOUND, times_by
from persist.patterns.own_columns import OwnColumns
from persist.patterns.positions import Numbers

PARTITION, POSITION, TIME, WHOLE = "partition", "position", "time", "whole"
SCHEMA = pa.schema(
    [
        pa.field(PARTITION, pa.string(), nullable=False),
        pa.field(POSITION, pa.int64(), nullable=False),
        pa.field(TIME, pa.int64(), nullable=False),
        pa.field(WHOLE, pa.bool_(), nullable=False),
    ]
)
KEY = (PARTITION, POSITION)
WINDOW = 2**14  # times; the first look back
WINDOW_GROWS = 4  # times as long is each further look back


def rows_of(positions: dict[str, int], time: int, *, whole: bool) -> pa.Table:
    """The rows of one mint."""
    count = len(positions)
    columns = [
        pa.array(positions, pa.string()),
        pa.array(positions.values(), pa.int64()),
        pa.repeat(pa.scalar(time, pa.int64()), count),
        pa.repeat(whole, count),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def in_time(rows: pa.Table) -> list[tuple[str, int, int]]:
    """The rows as (partition, position, time), by time. They are few: of mints, not of records."""
    ordered = rows.select([PARTITION, POSITION, TIME]).sort_by([(TIME, "ascending"), (POSITION, "ascending")])
    return list(zip(*(column.to_pylist() for column in ordered.columns), strict=True))


def since_a_whole_mint(own: OwnColumns, time: int) -> tuple[int, dict[str, int], pa.Table] | None:
    """The last whole mint up to `time`: its time, where every partition stood then, and the rows that came after it.

    None where there is no binding up to `time`. Looks back further and further, so it reads a few times as many rows
    as were written since that mint. Raises Corruption (there are bindings, and the first ones are gone).
    """
    start, window, rows = time + 1, WINDOW, SCHEMA.empty_table()
    while start > 0:
        start, window = max(0, time + 1 - window), window * WINDOW_GROWS
        rows = _between(own, start, time)
        whole = rows.filter(rows.column(WHOLE))
        if len(whole):
            at = pc.max(whole.column(TIME)).as_py()
            heads = whole.filter(pc.equal(whole.column(TIME), at))
            later = rows.filter(pc.greater(rows.column(TIME), at))
            stands = zip(heads.column(PARTITION).to_pylist(), heads.column(POSITION).to_pylist(), strict=True)
            return at, dict(stands), later
    if len(rows):
        raise Corruption(
            f"shard {own.shard.name!r} has bindings up to time {time}, and the first ones are gone: somebody has taken "
            "rows away; restore it to a time before that (Shard.restore)"
        )
    return None


def _between(own: OwnColumns, start: int, time: int) -> pa.Table:
    where = f"{TIME} >= {start} AND {TIME} <= {time}"
    with own.told(), own.shard.snapshot(where=where, purpose="bindings") as found:
        own.check(found.schema)
        return found.to_arrow().select(SCHEMA.names)


def times_in_the_past(own: OwnColumns, partition: str, positions: Numbers) -> Numbers:
    """The times of positions, none of them beyond the last that is bound: by reading the bindings around them."""
    found = np.full(len(positions), NOT_BOUND, np.int64)
    with (
        own.told(),
        own.shard.snapshot(
            start_key=(partition, int(positions.min())),
            key_prefix=(partition,),
            columns=[POSITION, TIME],
            purpose="bindings",
        ) as snapshot,
    ):
        own.check(snapshot.schema)
        for rows in snapshot.batches():
            missing = found == NOT_BOUND
            found[missing] = _times_by_rows(rows, positions[missing])
            if not (found == NOT_BOUND).any():  # what covers the last one may lie beyond it, and was read by now
                break
    return found


def _times_by_rows(rows: pa.Table, positions: Numbers) -> Numbers:
    """The times by some adjacent rows of one partition. Of rows with one position the earliest counts."""
    ordered = rows.sort_by([(POSITION, "ascending"), (TIME, "ascending")])
    bound, times = (ordered.column(name).to_numpy() for name in (POSITION, TIME))
    return times_by(bound, times, positions)
