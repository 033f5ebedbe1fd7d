"""The columns of a stream, which are fixed when it begins, of a shard whose columns change meanwhile.

They are followed by their ids: a column that is renamed goes on, one that is dropped is null from then on, and those
that are added are left out, until the query is started again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa

from persist.core.state import SchemaRecord
from persist.parts import newest, sound_schemas

Renamed = tuple[tuple[str, str | None], ...]  # names of a stream's columns, and what they are called now


def names_now(names: Iterable[str], began: int | None, schemas: Mapping[int, SchemaRecord]) -> Renamed:
    """What columns of the schema `began` are called now (None: it was dropped); of other names nothing is told."""
    sound = sound_schemas(schemas)
    current = newest(sound)[1]
    if current.is_plain or began not in sound:
        return ()
    old = sound[began]
    return tuple((name, current.name_of.get(old.id_of[name])) for name in names if name in old.id_of)


def wanted_now(names: Iterable[str], renamed: Renamed) -> list[str]:
    """What is read for a result of these names."""
    now = dict(renamed)
    return [found for name in names if (found := now.get(name, name)) is not None]


def as_began(tables: Iterator[pa.Table], renamed: Renamed, target: pa.Schema) -> Iterator[pa.Table]:
    """The tables with the columns of `target` by the names that they had when the stream began."""
    if all(name == now for name, now in renamed):
        yield from tables
        return
    now = dict(renamed)
    for table in tables:
        columns = []
        for field in target:
            source = now.get(field.name, field.name)
            columns.append(pa.nulls(len(table), field.type) if source is None else table.column(source))
        yield pa.Table.from_arrays(columns, names=target.names)
