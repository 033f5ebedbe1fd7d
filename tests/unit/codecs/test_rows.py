"""Rows in bodies: what goes out comes in again, and what is broken is refused in one sentence."""

from __future__ import annotations

import datetime
import decimal
import io
from typing import Any

import pyarrow as pa
import pytest

from persist.codecs import rows
from persist.codecs.rows import read
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema

SCHEMA = ShardSchema(
    pa.schema(
        [
            pa.field("id", pa.string()),
            pa.field("amount", pa.int64()),
            pa.field("price", pa.decimal128(10, 2)),
            pa.field("at", pa.timestamp("us")),
            pa.field("raw", pa.binary()),
        ]
    ),
    ("id",),
)
TABLE = pa.table(
    {
        "id": ["a", 'b,"c"', "d\ne"],
        "amount": [1, None, -3],
        "price": [decimal.Decimal("1.50"), None, decimal.Decimal("-2.25")],
        "at": [
            datetime.datetime.fromisoformat("2030-01-02T03:04:05"),
            None,
            datetime.datetime.fromisoformat("1969-01-01"),
        ],
        "raw": [b"\x00\xff", None, b""],
        "__diff": [1, 2, -1],
    },
    schema=pa.schema([*SCHEMA.arrow, pa.field("__diff", pa.int64())]),
)


@pytest.mark.parametrize("form", list(rows.MEDIA_TYPES))
def test_rows_travel_both_ways(form: str) -> None:
    data = b"".join(rows.write(iter([TABLE.slice(0, 1), TABLE.slice(1)]), TABLE.slice(0, 0), form))
    back = rows.read(data, form, SCHEMA, rows_max=10)
    assert back.select(TABLE.schema.names).to_pylist() == TABLE.to_pylist()
    nothing = b"".join(rows.write(iter([]), TABLE.slice(0, 0), form))
    assert rows.read(nothing, form, SCHEMA, rows_max=10).num_rows == 0


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_cut_body_is_refused_wherever_it_is_cut(form: str) -> None:
    data = b"".join(rows.write(iter([TABLE, TABLE]), TABLE.slice(0, 0), form))
    for size in range(0, len(data) - 1, 7):
        with pytest.raises(InvalidUsage):
            rows.read(data[:size], form, SCHEMA, rows_max=100)


@pytest.mark.parametrize(("form", "body"), [
    ("arrow", b"not arrow at all"), ("parquet", b"PAR1PAR1"), ("ndjson", b'{"id": "a"'),
    ("ndjson", b'{"id": "\\ud800"}\n'), ("ndjson", b'["a"]\n'), ("ndjson", b'{"id": "a", "amount": "many"}\n'),
    ("ndjson", b'{"id": "a", "colour": 1}\n'), ("ndjson", b'{"id": "a", "raw": "%%%"}\n'),
    ("csv", b"id,amount\na,many\n"), ("csv", b"id,colour\na,1\n"), ("csv", b"id,amount\na\n"),
    ("csv", b"\xff\xfe\n"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_in_one_sentence(form: str, body: bytes) -> None:
    with pytest.raises(InvalidUsage) as caught:
        rows.read(body, form, SCHEMA, rows_max=100)
    assert "\n" not in str(caught.value)
    assert "truncated" not in str(caught.value), "msgspec says so of texts that are whole"


def test_a_line_may_be_longer_than_a_block() -> None:
    long = "x" * 3_000_000
    back = rows.read(f'{{"id": "a"}}\n{{"id": "{long}"}}\n'.encode(), "ndjson", SCHEMA, rows_max=10)
    assert back.column("id").to_pylist() == ["a", long]


def test_a_column_may_come_later_than_the_first_line() -> None:
    back = rows.read(b'{"id": "a"}\n{"id": "b", "amount": 2, "__diff": 3}\n', "ndjson", SCHEMA, rows_max=10)
    assert back.column("amount").to_pylist() == [None, 2]
    assert back.column("__diff").to_pylist() == [1, 3]


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="at most 1"):
        rows.read(b'{"id": "a"}\n{"id": "b"}\n', "ndjson", SCHEMA, rows_max=1)


@pytest.mark.parametrize(("header", "chosen", "form"), [
    (None, None, "arrow"),
    ("*/*", None, "arrow"),
    ("text/csv; charset=utf-8", None, "csv"),
    ("application/x-ndjson", "parquet", "parquet"),
    ("text/html, application/x-ndjson", None, "ndjson"),
])  # fmt: skip
def test_how_the_format_is_chosen(header: str | None, chosen: str | None, form: str) -> None:
    assert rows.format_of(header, chosen) == form


@pytest.mark.parametrize(("header", "chosen"), [("text/html", None), (None, "xml")])
def test_unknown_formats_are_refused(header: str | None, chosen: str | None) -> None:
    with pytest.raises(InvalidUsage):
        rows.format_of(header, chosen)


@pytest.mark.parametrize("body", [b'\xef\xbb\xbf{"id": "a"}\n', b"\xef\xbb\xbfid\na\n"])
def test_a_byte_order_mark_before_text_is_passed_over(body: bytes) -> None:
    form = "ndjson" if b"{" in body else "csv"
    assert rows.read(body, form, SCHEMA, rows_max=10).column("id").to_pylist() == ["a"]


# --- types that a stream of rows names and that arrow itself does not bear: 480 bytes ended the server fo

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
