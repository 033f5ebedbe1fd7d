"""Routes: which of several shards contains a key, epoch by epoch, and the hash that decides it.

An epoch is a list of shards, stored in a small shard of its own. A change takes two commits there: the first proposes
the next epoch, the second opens it. In between, the gate of every shard of both epochs is moved: an attribute with the
epoch, on which each routed append is conditional. So once an epoch is open, no appends reach the previous one, and its
end in each shard is recorded. Any process that finds a proposal opens it; each step may be repeated by any process.

The hash is the same in every process and version; its name is stored with the routes. Values become numbers first:
integers, dates, times and booleans by their value, so that a wider type routes alike; texts and binaries as the sum of
(byte at i + 1) / BASE^i; null as a number of its own. The finisher of SplitMix64 then mixes the numbers of the columns,
one after the other, modulo 2^64. The hash does not protect against values that are chosen to collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from persist.client.arguments import checked, names
from persist.client.client import Client
from persist.client.schema_lineage import ShardSchema, check_alike
from persist.client.shard import Shard
from persist.core.attribute import AttributeKey, AttributeUpdate, named_key
from persist.core.errors import AttributeMismatch, Conflict, InvalidUsage, Unavailable, UnknownShard, UpperMismatch
from persist.core.frontier import TIME_MAX
from persist.sources.internal_shards import InternalColumns

HASH = "poly-splitmix-64/1"
Hashes: TypeAlias = npt.NDArray[np.uint64]
MODULUS = 2**64
STEP = 0x9E3779B97F4A7C15  # added before a number is mixed
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BASE = 0x100000001B3  # of the polynomial; odd, so that it has an inverse
NULL = 0x6E756C6C


def hashes_of(rows: pa.Table, by: tuple[str, ...]) -> Hashes:
    """The hash of each row by these columns. Raises InvalidUsage (a column is missing, or of a type without a hash)."""
    hashes = np.zeros(len(rows), np.uint64)
    for name in by:
        if name not in rows.schema.names:
            raise InvalidUsage(f"rows have no column {name!r}, by which they are routed")
        hashes = _mix(hashes + _to_numbers(name, rows.column(name).combine_chunks()) + np.uint64(STEP))
    return hashes


def check_type(name: str, kind: pa.DataType) -> None:
    """Raise InvalidUsage unless rows can be routed by a column of this type."""
    whole = types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind) or types.is_timestamp(kind)
    if not whole and not _is_text(kind):
        raise InvalidUsage(
            f"column {name!r} is {kind}, by which rows cannot be routed; choose a column of integers, texts, binaries, "
            "dates, timestamps or booleans"
        )


def _is_text(kind: pa.DataType) -> bool:
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(check(kind) for check in kinds)


def _to_numbers(name: str, values: pa.Array) -> Hashes:
    check_type(name, values.type)
    if _is_text(values.type):
        numbers = _texts_to_numbers(values)
    elif types.is_unsigned_integer(values.type):
        numbers = pc.fill_null(values.cast(pa.uint64()), 0).to_numpy(zero_copy_only=False)
    else:
        is_small = values.type.bit_width <= 32 and not types.is_integer(values.type)  # dates and booleans
        integers = values.cast(pa.int32()).cast(pa.int64()) if is_small else values.cast(pa.int64())
        numbers = pc.fill_null(integers, 0).to_numpy(zero_copy_only=False).view(np.uint64)
    return np.where(values.is_null().to_numpy(zero_copy_only=False), np.uint64(NULL), numbers)


def _texts_to_numbers(values: pa.Array) -> Hashes:
    """The polynomial of the bytes of each value, as the difference of the sums up to its ends."""
    whole = pc.fill_null(values.cast(pa.large_binary()), b"")
    whole = whole if isinstance(whole, pa.Array) else whole.combine_chunks()
    _, offsets, data = whole.buffers()
    ends = np.frombuffer(offsets, np.int64)[whole.offset : whole.offset + len(whole) + 1]
    first, last = int(ends[0]), int(ends[-1])
    content = np.frombuffer(data, np.uint8)[first:last] if last > first else np.zeros(0, np.uint8)
    inverse, powers = pow(BASE, -1, MODULUS), np.ones(last - first + 1, np.uint64)
    powers[1:] = inverse
    powers = np.multiply.accumulate(powers)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((content.astype(np.uint64) + np.uint64(1)) * powers[:-1])])
    places = ends - first
    upwards = np.full(last - first + 1, BASE, np.uint64)
    upwards[0] = 1
    upwards = np.multiply.accumulate(upwards)
    numbers: Hashes = (sums[places[1:]] - sums[places[:-1]]) * upwards[places[:-1]]
    return numbers


def _mix(numbers: Hashes) -> Hashes:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(FIRST)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(SECOND)
    return numbers ^ (numbers >> np.uint64(31))


SHARDS_MAX = 1_000  # of one epoch
EPOCHS_MAX = 10_000
LIKE = "rows are routed to like ones"
OPEN_TRIES_MAX = 100  # a try fails if the routes were changed meanwhile
EPOCH, KIND, SLOT, NAME, AT = "epoch", "kind", "slot", "name", "at"
BY, HASHED, ROUTE, OPENED = "by", "hash", "route", "opened"
_COLUMNS = {EPOCH: pa.int64(), KIND: pa.string(), SLOT: pa.int64(), NAME: pa.string(), AT: pa.int64()}
SCHEMA = pa.schema([pa.field(name, kind, nullable=name == AT) for name, kind in _COLUMNS.items()])
KEY = (EPOCH, KIND, SLOT)


@dataclass(frozen=True, slots=True)
class Epoch:
    """The shards of an epoch, by slot. `began`: the uppers of its shards, and of those of the previous epoch, which
    ended there, when it was opened (TIME_MAX: the shard was closed or dropped). None: it is only proposed."""

    number: int
    shards: tuple[str, ...]
    began: dict[str, int] | None

    def slots(self, rows: pa.Table, by: tuple[str, ...]) -> Any:
        """The slot of each row by its columns `by`: an array of integers."""
        return hashes_of(rows, by) % np.uint64(len(self.shards))


class Routes:
    """The routes of rows over several shards, returned by `Routes.open`. Thread-safe."""

    def __init__(self, client: Client, shard: Shard) -> None:
        self.client = client
        self.shard = shard
        self._columns = InternalColumns(shard, "routes")
        self.gate: AttributeKey = named_key(f"routes {shard.name}")
        self._places: tuple[int, ...] = ()  # in the key, whose order never changes; columns may be renamed
        self._known: tuple[int, list[Epoch]] = (0, [])
        self._shards: dict[str, Shard] = {}

    @classmethod
    def open(
        cls, client: Client, name: str, shards: Sequence[str] | None = None, by: Sequence[str] | None = None
    ) -> Routes:
        """The routes stored in the small shard `name`. They are created if they do not exist.

        Args:
            shards: names of 1 to 1,000 existing shards with the same schema. For existing routes: None, or the current
                ones.
            by: key columns whose values determine the shard of a row; likewise.
        Raises: InvalidUsage (no such shards or columns, or the routes differ: `change` them), UnknownShard (one of the
            shards, or routes without `shards` and `by`, do not exist).
        """
        checked("client", client, Client)
        shard_names = None if shards is None else checked_shards(client, shards)
        by_names = None if by is None else names("by", by)
        if shard_names is None or by_names is None:
            routes = cls(client, client.shard(name))
        else:
            schema = client.shard(shard_names[0]).schema
            if not by_names or not set(by_names) <= set(schema.key):
                some_of = f"some of {list(schema.key)}"
                raise InvalidUsage(f"rows are routed by key columns, {some_of}, not by {list(by_names)}")
            for column in by_names:
                check_type(column, schema.arrow.field(column).type)
            routes = cls(client, InternalColumns.open(client, name, "routes", SCHEMA, KEY).shard)
            routes._begin(shard_names, by_names, [schema.key.index(column) for column in by_names])
        current = routes.current()
        if (shard_names or current.shards) != current.shards or (by_names or routes.by) != routes.by:
            raise InvalidUsage(
                f"routes {name!r} lead by {list(routes.by)} to {list(current.shards)}, unlike the arguments; omit "
                "them, or change the shards with Routes.change"
            )
        return routes

    def __repr__(self) -> str:
        return f"Routes({self.shard.name!r}, {len(self._known[1])} epochs)"

    @property
    def by(self) -> tuple[str, ...]:
        """The key columns whose values determine the shard of a row, by the names that the handles know."""
        return self.by_of(self.of(self.current().shards[0]).schema)

    def by_of(self, schema: ShardSchema) -> tuple[str, ...]:
        """The names of these columns in a schema of one of the shards."""
        return tuple(schema.key[place] for place in self._places)

    def epochs(self) -> list[Epoch]:
        """All epochs. The last one is open: a pending proposal is opened first."""
        for _ in range(OPEN_TRIES_MAX):
            epochs = self._read()
            if epochs and epochs[-1].began is not None:
                return epochs
            if not epochs:
                raise InvalidUsage(f"shard {self.shard.name!r} has no routes yet; pass `shards` and `by`")
            self._open_proposed(epochs)
        raise Unavailable(f"routes {self.shard.name!r} are changed repeatedly; retry")

    def opened(self) -> list[Epoch]:
        """The epochs that are open or have ended, in order. Only reads."""
        return [epoch for epoch in self._read() if epoch.began is not None]

    def current(self) -> Epoch:
        """The open epoch."""
        return self.epochs()[-1]

    def change(self, shards: Sequence[str]) -> Epoch:
        """Route rows to these shards from now on. Writers follow the change. A retry is safe.

        Shards that were dropped can be removed so, too: the rows in them are gone.

        Returns: the epoch of these shards. Raises: InvalidUsage (no such shards), UnknownShard, Conflict (a concurrent
            change: read `current`, and decide again; or one of these shards is closed), Indeterminate (it may have
            happened: retry).
        """
        shard_names = checked_shards(self.client, shards)
        current = self.current()
        if current.shards == shard_names:
            return current
        schemas = {}
        for name in (*current.shards, shard_names[0]):
            with suppress(UnknownShard):
                schemas[name] = self.client.shard(name).schema
        check_alike(LIKE, schemas)
        self._check_open(shard_names)
        number = current.number + 1
        if number >= EPOCHS_MAX:
            raise InvalidUsage(
                f"routes {self.shard.name!r} were changed {number} times, which is the limit; create others"
            )
        if not self._commit(_rows(number, ROUTE, shard_names), 2 * number):
            raise Conflict(f"routes {self.shard.name!r} are changed concurrently; read them, and decide again")
        return self.current()

    def of(self, name: str) -> Shard:
        """The shard of that name, opened once. Raises UnknownShard."""
        if name not in self._shards:
            self._shards[name] = self.client.shard(name)
        return self._shards[name]

    def _end_of(self, name: str) -> int:
        """The upper of a shard; TIME_MAX if it was closed or dropped."""
        try:
            upper = self.of(name).upper().element
        except UnknownShard:
            return TIME_MAX
        return TIME_MAX if upper is None else upper

    def _begin(self, shards: tuple[str, ...], by: tuple[str, ...], places: list[int]) -> None:
        first = [_rows(0, BY, by, places), _rows(0, HASHED, (HASH,)), _rows(0, ROUTE, shards)]
        if self.shard.upper().element == 0:
            self._check_open(shards)
            self._commit(pa.concat_tables(first), 0)

    def _check_open(self, shards: tuple[str, ...]) -> None:
        """Raise Conflict if a shard is closed. A shard that is closed later rejects rows, and can be removed."""
        for name in shards:
            if self.of(name).upper().is_empty:
                raise Conflict(f"shard {name!r} is closed; route rows to one that is open")

    def _commit(self, rows: pa.Table, at: int) -> bool:
        """Write the rows at that time; False if there was another write."""
        try:
            self.shard.compare_and_append(self._columns.rows(rows), at, at + 1)
        except UpperMismatch:
            return False
        return True

    def _read(self) -> list[Epoch]:
        upper = self.shard.upper().element
        if upper == self._known[0]:
            return self._known[1]
        with self.shard.snapshot(purpose="routes") as snapshot:
            self._columns.check(snapshot.schema)
            rows = snapshot.to_arrow().to_pylist()
        places = [row[AT] for row in rows if row[KIND] == BY]
        hashes = [row[NAME] for row in rows if row[KIND] == HASHED]
        if hashes and hashes != [HASH]:
            raise InvalidUsage(f"routes {self.shard.name!r} use the hash {hashes[0]!r}; this version knows {HASH!r}")
        by_number: dict[int, tuple[list[str], dict[str, int]]] = {}
        for row in rows:  # in key order: epoch, kind, slot
            shards, began = by_number.setdefault(row[EPOCH], ([], {}))
            if row[KIND] == ROUTE:
                shards.append(row[NAME])
            elif row[KIND] == OPENED:
                began[row[NAME]] = row[AT]
        epochs = [Epoch(number, tuple(shards), began or None) for number, (shards, began) in by_number.items()]
        self._places, self._known = tuple(places), (snapshot.as_of + 1, epochs)
        return epochs

    def _open_proposed(self, epochs: list[Epoch]) -> None:
        """Close the gates to the previous epoch, and record where it ended."""
        proposed = epochs[-1]
        before = epochs[-2].shards if len(epochs) > 1 else ()
        gate = AttributeUpdate.replace_if_greater(self.gate, proposed.number)
        shards = dict.fromkeys((*before, *proposed.shards))
        for name in shards:
            with suppress(AttributeMismatch, UnknownShard):  # another process was faster; or it was dropped
                self.of(name).attributes.update(gate)
        began = {name: self._end_of(name) for name in shards}
        self._commit(_rows(proposed.number, OPENED, tuple(began), list(began.values())), 2 * proposed.number + 1)


def checked_shards(client: Client, shards: Sequence[str]) -> tuple[str, ...]:
    """The names of the shards. Raises InvalidUsage (none, too many, duplicates, or different schemas), UnknownShard."""
    shard_names = names("shards", shards)
    if not 0 < len(shard_names) <= SHARDS_MAX or len(set(shard_names)) < len(shard_names):
        raise InvalidUsage(f"shards are {len(shard_names)} names; rows are routed to 1 to {SHARDS_MAX} different ones")
    check_alike(LIKE, {name: client.shard(name).schema for name in shard_names})
    return shard_names


def _rows(epoch: int, kind: str, entries: tuple[str, ...], at: Sequence[int | None] | None = None) -> pa.Table:
    count = len(entries)
    columns = {EPOCH: [epoch] * count, KIND: [kind] * count, SLOT: list(range(count)), NAME: entries}
    return pa.table({**columns, AT: at or [None] * count}, schema=SCHEMA)
