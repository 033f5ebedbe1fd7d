"""Column types, rows and small shards for the property tests of parts."""

from __future__ import annotations

import datetime
import decimal
import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from blob.memory_blobs import MemoryBlob
from persist.core.batch import Part, Run
from persist.core.ids import WriterId, mint, shard_id_of
from persist.parts import PartReader, PartSink, ShardSchema, stage

SHARD = shard_id_of("parts")
KEYED = ShardSchema(pa.schema([("k", pa.string()), ("n", pa.int32()), ("v", pa.list_(pa.int8()))]), ("k", "n"))


class CountingIds:
    """Ids that count up."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def uuid7(self) -> str:
        return f"{next(self._numbers):032x}"


def _numbers(bits: int, signed: bool) -> st.SearchStrategy[int]:
    low = -(2 ** (bits - 1)) if signed else 0
    high = 2 ** (bits - signed) - 1
    return st.one_of(st.integers(low, high), st.sampled_from([low, 0, 1, high]))


def _decimals(digits: int) -> st.SearchStrategy[decimal.Decimal]:
    top = 10**digits - 1
    return st.integers(-top, top).map(lambda n: decimal.Decimal(n).scaleb(-2, decimal.Context(prec=digits + 2)))


_TEXT = st.text(alphabet=st.sampled_from("ab\0é\U0001f600z"), max_size=20)
_BYTES = st.binary(max_size=20) | st.lists(st.sampled_from([0, 1, 255]), max_size=40).map(bytes)
_MS = st.integers(-(2**40), 2**40)
_SECONDS = st.integers(0, 86399)

FLAT: Mapping[Any, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    **{getattr(pa, f"int{bits}")(): _numbers(bits, True) for bits in (8, 16, 32, 64)},
    **{getattr(pa, f"uint{bits}")(): _numbers(bits, False) for bits in (8, 16, 32, 64)},
    pa.float16(): st.floats(width=16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(20, 2): _decimals(20),
    pa.decimal256(60, 2): _decimals(60),
    pa.string(): _TEXT,
    pa.large_string(): _TEXT,
    pa.binary(): _BYTES,
    pa.large_binary(): _BYTES,
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.date32(): st.dates(),
    pa.date64(): st.dates(),
    pa.time32("s"): _SECONDS,
    pa.time32("ms"): _SECONDS.map(lambda n: n * 1000 + 7),
    pa.time64("us"): _SECONDS.map(lambda n: n * 1_000_000 + 7),
    pa.time64("ns"): _SECONDS.map(lambda n: n * 1_000_000_000 + 7),
    **{pa.timestamp(unit): _MS for unit in ("s", "ms", "us", "ns")},
    pa.timestamp("us", "UTC"): _MS,
    pa.timestamp("ns", "Europe/Berlin"): _MS,
    **{pa.duration(unit): _MS for unit in ("s", "ms", "us", "ns")},
}

NESTED: Mapping[Any, st.SearchStrategy[Any]] = {
    pa.list_(pa.int16()): st.lists(st.none() | _numbers(16, True), max_size=3),
    pa.large_list(pa.string()): st.lists(st.none() | _TEXT, max_size=3),
    pa.list_(pa.float32(), 2): st.lists(st.none() | st.floats(width=32), min_size=2, max_size=2),
    pa.struct([("a", pa.bool_()), ("b", pa.binary())]): st.fixed_dictionaries(
        {"a": st.none() | st.booleans(), "b": st.none() | _BYTES}
    ),
    pa.map_(pa.string(), pa.int64()): st.lists(st.tuples(_TEXT, st.none() | _numbers(64, True)), max_size=2),
    pa.list_(pa.struct([("x", pa.list_(pa.decimal128(5, 2)))])): st.lists(
        st.none() | st.fixed_dictionaries({"x": st.none() | st.lists(_decimals(5), max_size=2)}), max_size=2
    ),
}

ALL: Mapping[Any, st.SearchStrategy[Any]] = {**FLAT, **NESTED}


def array_of(kind: Any, values: Sequence[Any]) -> pa.Array:
    return pa.array(values, pa.int64()).cast(kind) if _counted(kind, values) else pa.array(values, kind)


def _counted(kind: Any, values: Sequence[Any]) -> bool:
    temporal = pa.types.is_temporal(kind) and not pa.types.is_time32(kind)
    return temporal and any(isinstance(value, int) for value in values)


def arrays(kind: Any, min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[pa.Array]:
    """Arrays with repeated values and nulls."""
    values = st.none() | ALL[kind]
    pool = st.lists(values, min_size=1, max_size=4)
    picked = pool.flatmap(lambda p: st.lists(st.sampled_from(p), min_size=min_size, max_size=max_size))
    return picked.map(lambda found: array_of(kind, found))


def plain(scalar: Any) -> Any:
    """The value for Python; of times that lie beyond those of Python's the number."""
    return scalar.value if pa.types.is_temporal(scalar.type) else scalar.as_py()


def canonical(value: Any) -> Any:
    """Python values that are equal exactly when the shard takes them for equal."""
    if isinstance(value, float):
        return ("nan",) if value != value else struct.pack(">d", value)
    if isinstance(value, dict):
        return tuple((name, canonical(inner)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(canonical(inner) for inner in value)
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    return value


@st.composite
def updates(draw: st.DrawFn, max_size: int = 30, times: int = 6) -> pa.Table:
    """Updates of KEYED from a small pool, so that they meet and cancel."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["", "a", "a\0", "b", "ba", "é"]),
                st.sampled_from([None, -1, 0, 7]),
                st.sampled_from([None, [], [1], [1, None]]),
                st.integers(0, times),
                st.sampled_from([-2, -1, 1, 1, 1, 2]),
            ),
            max_size=max_size,
        )
    )
    columns = list(zip(*rows, strict=True)) or [()] * 5
    return pa.Table.from_arrays(
        [pa.array(list(c), f.type) for c, f in zip(columns, KEYED.updates_schema, strict=True)],
        schema=KEYED.updates_schema,
    )


def naive(tables: Sequence[pa.Table], *, upto: int | None = None, advance: int = 0) -> dict[Any, int]:
    """The consolidated updates as a dict, the slow and obvious way."""
    sums: dict[Any, int] = {}
    for table in tables:
        for row in table.to_pylist():
            diff = row.pop("__diff")
            if upto is not None and row["__time"] > upto:
                continue
            row["__time"] = max(row["__time"], advance)
            update = canonical(row)
            sums[update] = sums.get(update, 0) + diff
    return {update: diff for update, diff in sums.items() if diff}


def as_dict(table: pa.Table, time: int | None = None) -> dict[Any, int]:
    """A consolidated table as a dict; fails when an update occurs twice."""
    found: dict[Any, int] = {}
    for row in table.to_pylist():
        diff = row.pop("__diff")
        if time is not None:
            row["__time"] = time
        update = canonical(row)
        assert update not in found
        found[update] = diff
    return found


class Shard:
    """A blob store, and batches staged into it."""

    def __init__(self, schema: ShardSchema = KEYED) -> None:
        self.schema = schema
        self.blob = MemoryBlob()
        self.ids = CountingIds()
        self.writer = mint(WriterId, self.ids)

    @property
    def sink(self) -> PartSink:
        return PartSink(self.schema, 1, self.blob, SHARD, self.writer, self.ids)

    def stage(self, updates: Any, **options: Any) -> tuple[Run, ...]:
        given = {"default_time": 0, "inline_bytes_max": 0, **options}
        return stage(updates, self.sink, **given)

    def part(self, updates: Any, **options: Any) -> Part:
        (run,) = self.stage(updates, **options)
        (part,) = run.parts
        return part

    def reader(self, **options: Any) -> PartReader:
        return PartReader(self.blob, {1: self.schema}, self.schema, use_threads=False, **options)


def joined(tables: Any, schema: pa.Schema) -> pa.Table:
    """All tables as one, in `schema`."""
    pieces = list(tables)
    assert all(len(piece) for piece in pieces)
    return pa.concat_tables([schema.empty_table(), *pieces])
