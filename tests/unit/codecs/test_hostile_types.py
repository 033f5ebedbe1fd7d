"""Types that a stream of rows names and that Arrow itself does not bear: 480 bytes ended the server for everybody."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest

from persist.codecs.rows import read
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema

FAR = 16_777_218  # beyond every table of powers of ten
DECIMALS = [pa.decimal32(9, -FAR), pa.decimal128(38, FAR), pa.decimal128(38, -1), pa.decimal256(76, 77)]
HOSTILE: list[Any] = [
    *DECIMALS,
    *(pa.list_(kind) for kind in DECIMALS),
    *(pa.struct([pa.field("x", pa.list_(kind))]) for kind in DECIMALS),
    *(pa.map_(pa.string(), kind) for kind in DECIMALS),
    pa.dictionary(pa.int8(), pa.decimal128(38, FAR)),
    pa.list_(pa.dictionary(pa.int8(), pa.decimal128(5, 6))),
    pa.run_end_encoded(pa.int32(), pa.int64()),
    pa.list_view(pa.int8()),
    pa.month_day_nano_interval(),
    pa.binary(0),
]
SHARD = [
    pa.decimal128(38, 38), pa.decimal256(76, 0), pa.int64(), pa.float64(), pa.string(), pa.date64(),
    pa.list_(pa.decimal128(38, 38)), pa.struct([pa.field("x", pa.list_(pa.decimal256(76, 76)))]),
    pa.map_(pa.string(), pa.decimal128(38, 38)),
]  # fmt: skip


def stream(kind: pa.DataType, rows: int) -> bytes:
    """Rows of nulls in a column of this type."""
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("v", kind)])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        if rows:
            writer.write_table(pa.table([pa.array([1] * rows), pa.nulls(rows, kind)], schema=schema))
    return sink.getvalue()


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("kind", HOSTILE, ids=str)
def test_a_type_that_no_shard_can_store_is_refused_before_anything_is_done_with_it(kind: Any, rows: int) -> None:
    try:
        body = stream(kind, rows)
    except (pa.ArrowException, ValueError):  # no such nulls can be made
        body = stream(kind, 0)
    for target in SHARD:
        schema = ShardSchema(pa.schema([pa.field("id", pa.int64()), pa.field("v", target)]), ("id",))
        with pytest.raises(InvalidUsage, match="column 'v'"):
            read(body, "arrow", schema, 1_000)


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.null()), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_nulls_of_no_type_and_dictionaries_are_taken(kind: Any) -> None:
    target = pa.list_(pa.int64()) if pa.types.is_list(kind) else pa.string()
    schema = ShardSchema(pa.schema([pa.field("id", pa.int64()), pa.field("v", target)]), ("id",))
    assert schema.conform(read(stream(kind, 3), "arrow", schema, 1_000), 7).column("v").null_count == 3


def test_a_time_zone_that_is_no_text_is_bad_input() -> None:
    body = stream(pa.timestamp("us", "Europe/Berlin"), 2).replace(b"Europe/Berlin", b"Europe/\xff\xfe\xfd\xfc\xfb\xfa")
    schema = ShardSchema(pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.timestamp("us", "UTC"))]), ("id",))
    with pytest.raises(InvalidUsage):
        schema.conform(read(body, "arrow", schema, 1_000), 7)
