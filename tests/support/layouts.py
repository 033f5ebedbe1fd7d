"""The same rows in any layout that Arrow allows, and in any container that users have.

A layout is what the values do not say: how each column is cut into chunks, where its buffers begin, which of the types
for the same values it has, and what is stored under its nulls. `tables` draws the rows as an Arrow table in any layout,
`containers` in any form that a verb takes.
"""

from __future__ import annotations

import datetime as dt
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
from hypothesis import strategies as st

TAGS, DEEP = pa.list_(pa.string()), pa.struct([("a", pa.int64()), ("b", pa.list_(pa.struct([("x", pa.string())])))])
COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("amount", pa.float64()),
        pa.field("day", pa.date32()), pa.field("at", pa.timestamp("us")), pa.field("flag", pa.bool_()),
        pa.field("data", pa.binary()), pa.field("tags", TAGS), pa.field("deep", DEEP),
    ]
)  # fmt: skip
KEY = ("id",)
TEXTS = ["", "a", "é", "a text that is longer than a view holds in itself"]
_DEEP = [
    {"a": 7, "b": None},
    {"a": None, "b": []},
    {"a": 0, "b": [None, {"x": None}, {"x": "a"}]},
    {"a": None, "b": [{"x": TEXTS[-1]}]},
]
_VALUES: dict[str, list[Any]] = {
    "name": TEXTS,
    "amount": [0.0, -1.5, 2.0**40],
    "day": [dt.date(2024, 2, 29), dt.date(1969, 12, 31)],
    "at": [dt.datetime(2024, 2, 29, 12), dt.datetime(1969, 12, 31, 23, 59)],  # noqa: DTZ001
    "flag": [False, True],
    "data": [b"", b"\x00", b"more bytes than a view holds in itself"],
    "tags": [[], [None], ["", None, "é"], TEXTS],
    "deep": _DEEP,
}
_WIDE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_VIEWS = {pa.string(): pa.string_view(), pa.binary(): pa.binary_view()}
_FLAT: dict[Any, list[Any]] = {  # other types that hold the values above
    pa.int64(): [pa.int8(), pa.uint16(), pa.int32(), pa.decimal128(20, 0)],
    pa.float64(): [pa.float32()],
    pa.date32(): [pa.date64()],
    pa.timestamp("us"): [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("ns")],
    pa.bool_(): [pa.bool8()],
}
Types = Literal["any", "posted", "common"]
"""`any`: all that Arrow has; `posted`: what the HTTP server takes; `common`: what every engine knows."""
CONTAINERS = (
    "table", "batch", "batches", "tables", "generator", "reader", "stream", "array", "pandas", "pandas of arrow",
    "pandas, indexed", "polars", "polars, rechunked", "polars, categorical", "duckdb", "duckdb union", "dicts",
)  # fmt: skip
OF_ARROW = CONTAINERS[:8]


_SEEDS = st.integers(0, 2**32 - 1)  # of what is chosen by chance: drawn one by one it would take most of the time


@st.composite
def rows(draw: st.DrawFn, min_size: int = 0, max_size: int = 8) -> list[dict[str, Any]]:
    """Rows of `COLUMNS`, each with a key of its own, in any order."""
    keys = draw(st.lists(st.integers(0, 20), min_size=min_size, max_size=max_size, unique=True))
    pick = random.Random(draw(_SEEDS))
    return [{"id": key, **{name: pick.choice([None, *some]) for name, some in _VALUES.items()}} for key in keys]


@st.composite
def tables(draw: st.DrawFn, given: list[dict[str, Any]], *, of: Types = "any") -> pa.Table:
    """The rows in any layout; in some of the types that hold its values."""
    return _Layout(random.Random(draw(_SEEDS)), of).table(pa.Table.from_pylist(given, schema=COLUMNS))


@dataclass(frozen=True)
class _Layout:
    """A layout, chosen by chance."""

    pick: random.Random
    of: Types

    def table(self, plain: pa.Table) -> pa.Table:
        names = list(plain.schema.names)
        if self.is_so():
            self.pick.shuffle(names)
        return pa.table([self._column(plain[name].combine_chunks()) for name in names], names=names)

    def is_so(self) -> bool:
        return self.pick.random() < 0.5

    def cuts(self, count: int, most: int) -> list[int]:
        """The ends of some stretches, which may be empty, of so many rows."""
        inner = [self.pick.randint(0, count) for _ in range(self.pick.randint(0, most))]
        return [0, *sorted(inner), count]

    def _column(self, array: pa.Array) -> pa.ChunkedArray:
        """The values of a column, cut into chunks. In some each chunk has a dictionary of its own."""
        array = self._typed(_hidden(array) if self.is_so() else array)
        if self.is_so() and len(array):
            array = pa.concat_arrays([array.slice(0, 1), array, array.slice(len(array) - 1)]).slice(1, len(array))
        chunks = [array.slice(start, end - start) for start, end in pairwise(self.cuts(len(array), 3))]
        if self.of != "common" and array.type == pa.string() and self.is_so():
            chunks = [chunk.dictionary_encode() for chunk in chunks]
        return pa.chunked_array(chunks, chunks[0].type)

    def _typed(self, array: pa.Array) -> pa.Array:
        """The values in any type that holds them."""
        kind, types = array.type, pa.types
        if types.is_struct(kind):
            children = [self._typed(array.field(place)) for place in range(kind.num_fields)]
            fields = [pa.field(kind.field(place).name, child.type) for place, child in enumerate(children)]
            return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
        if types.is_list(kind):
            return self._typed_lists(array)
        options = [kind, _WIDE.get(kind, kind), *_FLAT.get(kind, ())]
        if self.of != "any":
            options = [one for one in options if not isinstance(one, pa.BaseExtensionType)]
        if self.of == "common":
            options = [one for one in options if one != pa.date64()]  # days, which Polars takes for times
        elif kind in _VIEWS:
            options.append(_VIEWS[kind])
        typed = array.cast(self.pick.choice(options))
        ways = {"any": ["", "dictionary", "run ends"], "posted": ["", "dictionary"], "common": [""]}[self.of]
        way = "" if isinstance(typed.type, pa.BaseExtensionType) else self.pick.choice(ways)
        if way == "dictionary":  # Arrow itself makes none of every type
            found = array.dictionary_encode()
            return pa.DictionaryArray.from_arrays(found.indices, found.dictionary.cast(typed.type))
        if way == "run ends":
            return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(array) + 1), pa.int32()), typed)
        return typed

    def _typed_lists(self, array: pa.Array) -> pa.Array:
        values, offsets = self._typed(array.values), array.offsets.to_numpy()
        forms = [pa.ListArray, pa.LargeListArray, *([pa.ListViewArray] if self.of == "any" else [])]
        form: Any = self.pick.choice(forms)
        ends = pa.array(offsets, pa.int64() if form is pa.LargeListArray else pa.int32())
        if form is pa.ListViewArray:
            sizes = pa.array(np.diff(offsets), pa.int32())
            return form.from_arrays(ends.slice(0, len(array)), sizes, values, mask=array.is_null())
        return form.from_arrays(ends, values, mask=array.is_null())


def _hidden(array: pa.Array) -> pa.Array:
    """The same values, where some value lies under each null."""
    values, kind = array.to_pylist(), array.type
    fillers = [value for value in values if value is not None]
    if not array.null_count or not fillers:
        return array
    filled = pa.array([fillers[-1] if value is None else value for value in values], kind)
    children = [filled.field(place) for place in range(kind.num_fields)] if pa.types.is_struct(kind) else None
    if pa.types.is_list(kind):
        children = [filled.values]
    buffers = [array.buffers()[0], *filled.buffers()[1 : kind.num_buffers]]
    return pa.Array.from_buffers(kind, len(array), buffers, children=children)


class Stream:
    """What speaks Arrow's C interface of streams, and nothing else."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class Array:
    """What speaks Arrow's C interface of arrays, and nothing else."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return self._batch.__arrow_c_array__(requested_schema)


@st.composite
def containers(draw: st.DrawFn, given: list[dict[str, Any]]) -> Any:
    """The rows in any container, in any layout that it can have. Each is to be read once."""
    name = draw(st.sampled_from(CONTAINERS))
    if name == "dicts":
        return given
    layout = _Layout(random.Random(draw(_SEEDS)), "any" if name in OF_ARROW else "common")
    table = layout.table(pa.Table.from_pylist(given, schema=COLUMNS))
    if name == "table":
        return table
    if name in ("batch", "array"):
        batch = pa.RecordBatch.from_arrays([_one(column) for column in table.columns], names=table.column_names)
        return batch if name == "batch" else Array(batch)
    pieces = [table.slice(start, end - start) for start, end in pairwise(layout.cuts(len(table), 2))]
    if name == "tables":
        return pieces
    if name == "batches":
        return [batch for piece in pieces for batch in piece.to_batches()]
    if name == "generator":
        return iter(pieces)
    if name == "reader":
        return table.to_reader(max_chunksize=layout.pick.randint(1, 3))
    return Stream(table) if name == "stream" else _frame(name, table, pieces, layout)


def _frame(name: str, table: pa.Table, pieces: list[pa.Table], layout: _Layout) -> Any:
    if name.startswith("pandas"):
        frame = pd.concat([_to_pandas(piece, name) for piece in pieces])
        return frame.set_index(layout.pick.choice(["id", "name", ["at", "id"]])) if name.endswith("indexed") else frame
    if name.startswith("polars"):
        frame = pl.concat(
            [pl.from_arrow(piece, rechunk=False) for piece in pieces], rechunk=name == "polars, rechunked"
        )
        return frame.with_columns(pl.col("name").cast(pl.Categorical)) if name == "polars, categorical" else frame
    if name == "duckdb" or len(pieces) == 1:
        return duckdb.connect().from_arrow(table)
    connection = duckdb.connect()
    first, *others = (connection.from_arrow(piece) for piece in pieces)
    for other in others:
        first = first.union(other)
    return first


def _to_pandas(piece: pa.Table, name: str) -> pd.DataFrame:
    """Nested columns stay Arrow's: what pandas makes of them has no types."""
    if name != "pandas of arrow":
        flat = piece.drop_columns(["tags", "deep", "flag", "day"])
        nested = piece.select(["tags", "deep", "flag", "day"]).to_pandas(types_mapper=pd.ArrowDtype)
        return pd.concat([flat.to_pandas(), nested], axis=1)
    return piece.to_pandas(types_mapper=pd.ArrowDtype)


def _one(column: pa.ChunkedArray) -> pa.Array:
    found = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column
    return found.chunk(0) if found.num_chunks == 1 else pa.concat_arrays(found.chunks)
