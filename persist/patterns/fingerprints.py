"""What a shard keeps of the rows of a numbered append, so that other rows are not taken for them after a restart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from persist.client.columns import ShardSchema
from persist.client.digests import MODULUS, digest_of_rows
from persist.core.attribute import AttributeUpdate, named_key
from persist.patterns.numbered import Numbered

DIFF = "__diff"


@dataclass(frozen=True)
class Fingerprint:
    """Of all rows of an append, as numbers that fit int64: their keys, their columns, and they themselves."""

    keys: int
    columns: int
    rows: int

    @classmethod
    def of(cls, rows: pa.Table, schema: ShardSchema) -> Self:
        """Of rows with the columns of a schema and `__diff`. Columns go by their numbers, whatever they are called."""
        names = [name for name in rows.schema.names if name != DIFF]
        keyed = rows.select([*schema.key, DIFF]).rename_columns([*map(str, range(len(schema.key))), DIFF])
        whole = rows.select([*names, DIFF]).rename_columns([*(str(schema.id_of[name]) for name in names), DIFF])
        columns = sorted((schema.id_of[name], str(schema.arrow.field(name).type)) for name in names)
        said = hashlib.blake2b(json.dumps(columns).encode(), digest_size=8).digest()
        return cls(_signed(digest_of_rows(keyed)), _signed(int.from_bytes(said)), _signed(digest_of_rows(whole)))

    def can_be(self, other: Self) -> bool:
        """Whether the rows may be the same. Where the columns were changed since, only the keys can be compared."""
        return self.keys == other.keys and (self.columns != other.columns or self.rows == other.rows)


class Kept:
    """The fingerprint of a writer's last append to one shard, which changes with its rows. Arguments: as `Numbered`."""

    def __init__(self, numbered: Numbered, name: str, stage: str) -> None:
        self._shard = numbered.shard
        self._keys = [named_key(f"numbered writer's {what} {name}\0{stage}") for what in ("keys", "columns", "rows")]

    def updates(self, found: Fingerprint) -> tuple[AttributeUpdate, ...]:
        """What an append takes with it."""
        values = (found.keys, found.columns, found.rows)
        return tuple(AttributeUpdate.replace(key, value) for key, value in zip(self._keys, values, strict=True))

    def last(self) -> Fingerprint | None:
        """Of the last append that landed. Raises what every call may."""
        keys, columns, rows = (self._shard.attributes.get(key) for key in self._keys)
        return None if keys is None or columns is None or rows is None else Fingerprint(keys, columns, rows)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number
