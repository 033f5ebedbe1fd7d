"""A scan as a relation of DuckDB: it reads files by itself where these have the rows as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from blob import optional
from persist.client.scanning import HeldRows
from persist.core.errors import InvalidUsage

log = logging.getLogger("persist.client")


def relation(whole: Any, rows: HeldRows | None, scan: Callable[[HeldRows], Any], connection: Any) -> Any:
    """The rows of a scan, the `whole`, as a relation; `rows` None: only the scan can tell which rows it shows.

    `scan` makes a scan of some rows. Raises InvalidUsage (there is no DuckDB), and what reading may.
    """
    duckdb = optional("duckdb", "duckdb()", "duckdb", InvalidUsage)
    where = duckdb if connection is None else connection
    names = whole.schema.names
    if rows is None or len({name.lower() for name in names}) < len(names):  # DuckDB takes A and a for one name
        return where.from_arrow(whole)
    files, left = rows.apart()
    # The scan of what is left is there also where nothing is: the relation refers to it, and it holds the files.
    rest = where.from_arrow(scan(left))
    if not files:
        return rest
    try:
        found = where.read_parquet(files, hive_partitioning=False).project(", ".join(map(_quoted, names)))
        if found.types == rest.types:
            return found.union(rest)
        why = "it would show other types than those of the shard"
    except duckdb.Error as error:
        why = str(error).partition("\n")[0]
    log.info("persist: DuckDB does not read the files of shard %r by itself: %s", whole.shard, why)
    return where.from_arrow(whole)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
