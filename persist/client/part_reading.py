"""Readers of parts, for whoever has a view of a shard, or a split of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from persist.client.transport import Transport
from persist.core.state import SchemaRecord
from persist.parts import PartReader, ShardSchema, newest, sound_schemas
from persist.parts.files import Bound, Keeps


class _Schemas(Protocol):
    """A view, or a split of one."""

    @property
    def schemas(self) -> Mapping[int, SchemaRecord]: ...


class _Memory(Protocol):
    """Settings of a read."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def bound(self) -> Bound | None: ...


def part_reader(
    transport: Transport, of: _Schemas, settings: _Memory, keeps: Keeps | None = None
) -> tuple[ShardSchema, PartReader]:
    """The current schema of a view or split, and a reader of parts of any of its sound schemas."""
    sound = sound_schemas(of.schemas)
    _, current = newest(sound)
    memory, bound = settings.memory_bytes, settings.bound
    reader = PartReader(transport.blob, sound, current, keeps=keeps, memory_bytes=memory, bound=bound)
    return current, reader
