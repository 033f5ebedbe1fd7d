"""Sequenced appends: a shard accepts each numbered append once; fingerprints of rows, and their input.

The shard stores two attributes of a writer: its instance, which counts how often it was opened, and the number of its
last append. Each append is conditional on the first and advances the second, atomically with its rows. So a retried
append lands once, and appends in flight of an earlier instance do not land.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from persist.client.arguments import checked
from persist.client.idempotency import MODULUS, digest_of_rows
from persist.client.schema_lineage import ShardSchema, known_schema, learn_schema
from persist.client.shard import Shard
from persist.client.write import PinnedRows, Updates, as_updates, gather_dicts, to_rereadable
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.errors import AttributeMismatch, Indeterminate, InvalidUsage, Unavailable, shown

NAME_CHARS_MAX = 128  # of a writer
OPEN_TRIES_MAX = 100  # a try fails if another instance was opened meanwhile
DIFF, TIME = "__diff", "__time"


def checked_writer_name(name: object) -> str:
    """The name of a sequenced writer. Raises InvalidUsage."""
    checked("name", name, str)
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise InvalidUsage(f"name is {shown(name)}; it must have 1 to {NAME_CHARS_MAX} characters")
    return name


class SequencedWriter:
    """A named writer of one shard. Its numbers start again in each `stage` (an epoch of routes)."""

    def __init__(self, shard: Shard, name: str, stage: str = "") -> None:
        self.shard = shard
        self._name = name
        self._number = named_key(f"numbered writer {name}\0{stage}")
        self._instance = named_key(f"numbered writer's instance {name}")
        hashes = ("keys", "columns", "rows")
        self._fingerprint = [named_key(f"numbered writer's {what} {name}\0{stage}") for what in hashes]
        self.instance = 0

    def take_over(self) -> None:
        """Become the only instance. Raises Unavailable (many instances are opened at the same time; retry)."""
        self._become(None)

    def follow(self, instance: int) -> None:
        """Become the instance `instance` in this shard. Raises AttributeMismatch (there was a later one)."""
        self._become(instance)

    def _become(self, instance: int | None) -> None:
        """Become the instance `instance`, or the next one (None)."""
        for _ in range(OPEN_TRIES_MAX):
            current = self.shard.attributes.get(self._instance)
            if instance is not None and current is not None and current > instance:
                raise self._fenced(current)
            wanted = (current or 0) + 1 if instance is None else instance
            try:
                if current != wanted:
                    change = AttributeUpdate.replace_if_equals(self._instance, wanted, current)
                    self.shard.attributes.update(change)
            except AttributeMismatch:
                continue
            except Indeterminate as error:  # a late update is fenced by the next instance, as any other instance
                if error.details.get("refused") != AttributeMismatch.kind:
                    raise
                continue
            self.instance = wanted
            return
        raise Unavailable(f"writer {self._name!r} of shard {self.shard.name!r} is opened by many at once; retry")

    def check(self) -> None:
        """Raises AttributeMismatch (another instance was opened)."""
        current = self.shard.attributes.get(self._instance)
        if current != self.instance:
            raise self._fenced(current)

    def last(self) -> int:
        """The number of the last append that landed; 0 if there is none."""
        return self.shard.attributes.get(self._number) or 0

    def last_fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the last append that landed; None if its updates had none."""
        keys, columns, rows = map(self.shard.attributes.get, self._fingerprint)
        return None if keys is None or columns is None or rows is None else Fingerprint(keys, columns, rows)

    def conditions(self, number: int, fingerprint: Fingerprint | None = None) -> tuple[AttributeUpdate, ...]:
        """The attribute updates of an append with this number, perhaps with its fingerprint."""
        values = () if fingerprint is None else (fingerprint.keys, fingerprint.columns, fingerprint.rows)
        return (
            AttributeUpdate.replace_if_equals(self._instance, self.instance, self.instance),
            AttributeUpdate.replace_if_greater(self._number, number),
            *map(AttributeUpdate.replace, self._fingerprint, values),
        )

    def landed(self, error: AttributeMismatch, number: int) -> bool:
        """Whether the append was rejected because it has landed. Raises AttributeMismatch (another instance)."""
        actual = error.details.get("actual", {})
        if self._instance in actual:
            raise self._fenced(actual[self._instance]) from error
        last = actual.get(self._number)
        return last is not None and last >= number

    def _fenced(self, current: int | None) -> AttributeMismatch:
        return AttributeMismatch(
            f"writer {self._name!r} of shard {self.shard.name!r} was opened elsewhere, which ends this instance; "
            "reopen it to continue",
            actual={self._instance: current},
        )


@dataclass(frozen=True)
class Fingerprint:
    """Hashes (int64) of the keys, the columns and the rows of an append, to detect other rows after a restart."""

    keys: int
    columns: int
    rows: int

    @classmethod
    def of(cls, rows: pa.Table, schema: ShardSchema) -> Self:
        """Of rows with the columns of a schema and `__diff`. Columns are identified by number, not by name."""
        names = [name for name in rows.schema.names if name != DIFF]
        keyed = rows.select([*schema.key, DIFF]).rename_columns([*map(str, range(len(schema.key))), DIFF])
        whole = rows.select([*names, DIFF]).rename_columns([*(str(schema.id_of[name]) for name in names), DIFF])
        columns = sorted((schema.id_of[name], str(schema.arrow.field(name).type)) for name in names)
        of_columns = hashlib.blake2b(json.dumps(columns).encode(), digest_size=8).digest()
        return cls(_signed(digest_of_rows(keyed)), _signed(int.from_bytes(of_columns)), _signed(digest_of_rows(whole)))

    def can_be(self, other: Self) -> bool:
        """Whether the rows may be the same. If the columns were changed meanwhile, only the keys are compared."""
        return self.keys == other.keys and (self.columns != other.columns or self.rows == other.rows)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number


def pin_rows(updates: Updates, shard: Shard, who: str) -> PinnedRows:
    """The rows as one table that can be sent again, with the columns that the handle knows and `__diff`.

    If they do not fit and the columns of the shard were changed, the handle learns the new columns. Raises InvalidUsage
    (an iterator, rows with `__time`, rows that do not fit, a name that now means another column).
    """
    rows, (number, known) = rereadable(updates), known_schema(shard)
    try:
        return PinnedRows(table_by(known, rows, who), number, known)
    except InvalidUsage:
        newer = learn_schema(shard, number, known)
        if newer is None:
            raise
        return PinnedRows(table_by(newer[1], rows, who), *newer)


def rereadable(updates: Updates) -> Updates:
    """Rows that can be read twice: an Arrow stream is read into memory."""
    is_arrow = hasattr(updates, "__arrow_c_stream__") or hasattr(updates, "__arrow_c_array__")
    return to_rereadable(updates) if is_arrow else gather_dicts(updates)


def table_by(schema: ShardSchema, updates: Updates, who: str) -> pa.Table:
    """The rows with the columns of a schema and `__diff`, without times. Raises as `pin_rows`."""
    rows: Any = as_updates(updates, schema)
    if not isinstance(rows, (pa.Table, pa.RecordBatch)):
        raise InvalidUsage(f"{who} takes the rows of a write as one table, not as an iterator of batches")
    if TIME in rows.schema.names:
        raise InvalidUsage(f"{who} takes no {TIME}: it chooses the time")
    return schema.conform(rows, 0).drop_columns([TIME])
