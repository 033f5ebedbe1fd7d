"""The columns of a stream or a DataFrame, which are fixed when it begins, of a shard whose columns change meanwhile.

A stream follows them by their ids: a column that is renamed goes on, one that is dropped is null from then on, and
those that are added are left out, until the query is started again. Where rows are selected by a name that means
another column by now, a stream ends. So does a DataFrame with any such name, since it is loaded again easily.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from persist.core.errors import InvalidUsage
from persist.core.ids import ShardId
from persist.core.state import SchemaRecord
from persist.core.view import ShardView
from persist.parts import newest, sound_schemas
from persist.parts.evolution import moved_names
from persist.parts.predicate import columns_of, parse

Renamed = tuple[tuple[str, str | None], ...]  # names of a stream's columns, and what they are called now


@dataclass(frozen=True)
class Known:
    """By which schema of which shard somebody was told the columns."""

    shard: ShardId
    number: int

    @classmethod
    def of(cls, view: ShardView) -> Known:
        """The current one."""
        return cls(view.shard_id, newest(sound_schemas(view.schemas))[0])


def names_in(where: str | None) -> list[str]:
    """The columns that a predicate names."""
    return [] if where is None else columns_of(parse(where))


def check_means(names: Iterable[str], began: int, schemas: Mapping[int, SchemaRecord], whose: str, remedy: str) -> None:
    """Raise InvalidUsage where a name means another column by now than in the schema `began`, or none."""
    sound = sound_schemas(schemas)
    current = newest(sound)[1]
    for name, became in moved_names(sound.get(began, current), current, names):
        raise InvalidUsage(f"column {name!r}, {whose}, {became}: {remedy}, with the columns as they are named now")


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
