"""A scan as a relation of DuckDB: it reads files by itself where these have the rows as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from blob import optional
from persist.client.scanning import HeldRows
from persist.core.errors import InvalidUsage
from persist.parts.column_types import without_half_floats

log = logging.getLogger("persist.client")


def relation(whole: Any, rows: HeldRows | None, scan: Callable[[HeldRows], Any], connection: Any) -> Any:
    """The rows of a scan, the `whole`, as a relation; `rows` None: only the scan can tell which rows it shows.

    `scan` makes a scan of some rows. Raises InvalidUsage (there is no DuckDB, or it has no such type), and what
    reading may.
    """
    duckdb = optional("duckdb", "duckdb()", "duckdb", InvalidUsage)
    where = duckdb if connection is None else connection
    half = [field.name for field in whole.schema if without_half_floats(field.type) != field.type]
    if half:
        raise InvalidUsage(
            f"column {half[0]!r} of shard {whole.shard!r} has half floats, which DuckDB does not read "
            "from Arrow: leave it out by columns=, or take Snapshot.to_duckdb(), which widens it"
        )
    if rows is None or not _is_read_alike(whole.schema):
        return where.from_arrow(whole)
    files, left = rows.apart()
    # The scan of what is left is there also where nothing is: the relation refers to it, and it holds the files.
    rest = where.from_arrow(scan(left))
    if not files:
        return rest
    try:
        found = where.read_parquet(files, hive_partitioning=False).project(", ".join(map(_column, whole.schema)))
        if found.types == rest.types:
            return found.union(rest)
        why = "it would show other types than those of the shard"
    except duckdb.Error as error:
        why = str(error).partition("\n")[0]
    log.info("persist: DuckDB does not read the files of shard %r by itself: %s", whole.shard, why)
    return where.from_arrow(whole)


def _is_read_alike(kinds: pa.Schema) -> bool:
    """Whether DuckDB's own reader can be kept from losing rows of these columns.

    It goes by bounds in the files, which leave out NaN, and NaN is more than all numbers to it: `x > 5` would lose the
    rows with NaN. Floats within structs cannot be hidden from it. And to it A and a are one name.
    """
    lowered = {name.lower() for name in kinds.names}
    return len(lowered) == len(kinds) and not any(_floats_within(field.type) for field in kinds)


def _floats_within(kind: pa.DataType) -> bool:
    """Whether a filter of DuckDB's may look at a float inside a value. Those of lists and maps reach no file."""
    if not pa.types.is_struct(kind):
        return False
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pa.types.is_floating(one) or _floats_within(one) for one in inner)


def _column(field: pa.Field) -> str:
    """A column of a file; a float by an expression of which the file tells no bounds, and which changes no value."""
    name = _quoted(field.name)
    if not pa.types.is_floating(field.type):
        return name
    return f"CASE WHEN isnan({name}) THEN 'nan' ELSE {name} END AS {name}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
