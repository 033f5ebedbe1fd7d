"""A scan as a lazy frame of Polars, which leaves rows out by its own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from blob import optional
from persist.core.errors import InvalidUsage
from persist.parts.expressions import is_bounded
from persist.parts.files import Keeps
from persist.parts.reader import Finish

_IS_TRUE = "__is_true"

# The rows, each as often as it is there: some columns, of row groups that may match, of tables that are finished first.
Tables = Callable[[list[str], Keeps | None, Finish | None], Iterator[pa.Table]]


def lazy_frame(kinds: pa.Schema, tables: Tables) -> Any:
    """Rows with these columns, read anew whenever the frame is collected. Raises InvalidUsage: there is no Polars."""
    polars = optional("polars", "polars()", "polars", InvalidUsage)
    plugins = optional("polars.io.plugins", "polars()", "polars", InvalidUsage)
    shown = polars.from_arrow(kinds.empty_table()).schema

    def source(columns: list[str] | None, predicate: Any, rows: int | None, batch_rows: int | None) -> Iterator[Any]:
        """As Polars asks: of the first `rows` rows those for which the predicate is true."""
        names = kinds.names if columns is None else columns
        looked_at = [] if predicate is None else predicate.meta.root_names()
        read = list(dict.fromkeys([*names, *looked_at])) or kinds.names[:1]
        if rows is None and predicate is not None:
            for table in tables(read, _may_match(polars, predicate, kinds, shown), _finish(polars, predicate)):
                yield polars.from_arrow(table).select(names)
            return
        for table in tables(read, None, None):
            frame = polars.from_arrow(table)
            if rows is not None:
                frame = frame.head(rows)
                rows -= len(frame)
            yield (frame if predicate is None else frame.filter(predicate)).select(names)
            if rows == 0:
                return

    return plugins.register_io_source(source, schema=shown, is_pure=True)


def _finish(polars: Any, predicate: Any) -> Finish:
    """What leaves the rows of a table for which a predicate is true, before any is repeated.

    Of the others not all updates may have been read: they may seem to be there less than no times.
    """

    def finish(table: pa.Table) -> pa.Table:
        found = polars.from_arrow(table).with_columns(predicate.alias(_IS_TRUE)).get_column(_IS_TRUE)
        return table.filter(found.to_arrow())

    return finish


def _may_match(polars: Any, predicate: Any, kinds: pa.Schema, shown: Any) -> Keeps | None:
    """Which row groups may have rows for which a predicate of Polars is true; None: any may.

    Polars tells by what it calls a skip predicate, which it has for its own readers and promises to nobody: where it
    is not there, or not as it was, all row groups are read.
    """
    try:
        skips = predicate._skip_batch_predicate(shown)
    except Exception:
        return None
    if skips is None:
        return None
    looked_at = [name for name in predicate.meta.root_names() if name in shown]

    def keeps(statistics: dict[str, Any]) -> bool:
        row: dict[str, Any] = {"len": [None]}
        types: dict[str, Any] = {"len": polars.UInt32}
        for name in looked_at:
            known = statistics.get(name) if is_bounded(kinds.field(name).type) else None
            types |= {f"{name}_min": shown[name], f"{name}_max": shown[name], f"{name}_nc": polars.UInt32}
            try:
                least, most, nulls = _told(known)
            except (ValueError, OverflowError):  # a time that Python cannot tell
                return True
            row |= {f"{name}_min": [least], f"{name}_max": [most], f"{name}_nc": [nulls]}
        try:
            return polars.DataFrame(row, schema=types).select(skips).item() is not True
        except Exception:
            return True

    return keeps


def _told(statistics: Any) -> tuple[Any, Any, int | None]:
    """The least and the greatest value, and how many nulls there are; None: it is not known."""
    if statistics is None or not statistics.has_null_count:
        return None, None, None
    if not statistics.has_min_max:
        return None, None, statistics.null_count
    least, most = (one.as_py() if isinstance(one, pa.Scalar) else one for one in (statistics.min, statistics.max))
    return least, most, statistics.null_count
