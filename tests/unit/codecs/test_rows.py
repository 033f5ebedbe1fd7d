"""Rows in bodies: what goes out comes in again, and what is broken is refused in one sentence."""

from __future__ import annotations

import datetime
import decimal

import pyarrow as pa
import pytest

from persist.codecs import rows
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


@pytest.mark.parametrize("form", list(rows.MEDIA_TYPES))
def test_no_rows_travel_too(form: str) -> None:
    data = b"".join(rows.write(iter([]), TABLE.slice(0, 0), form))
    assert rows.read(data, form, SCHEMA, rows_max=10).num_rows == 0


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_cut_body_is_refused_wherever_it_is_cut(form: str) -> None:
    data = b"".join(rows.write(iter([TABLE, TABLE]), TABLE.slice(0, 0), form))
    for size in range(0, len(data) - 1, 7):
        with pytest.raises(InvalidUsage):
            rows.read(data[:size], form, SCHEMA, rows_max=100)


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("arrow", b"not arrow at all"),
        ("parquet", b"PAR1PAR1"),
        ("ndjson", b'{"id": "a"'),
        ("ndjson", b'{"id": "\\ud800"}\n'),
        ("ndjson", b'["a"]\n'),
        ("ndjson", b'{"id": "a", "amount": "many"}\n'),
        ("ndjson", b'{"id": "a", "colour": 1}\n'),
        ("ndjson", b'{"id": "a", "raw": "%%%"}\n'),
        ("csv", b"id,amount\na,many\n"),
        ("csv", b"id,colour\na,1\n"),
        ("csv", b"id,amount\na\n"),
        ("csv", b"\xff\xfe\n"),
    ],
)
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


@pytest.mark.parametrize(
    ("header", "chosen", "form"),
    [
        (None, None, "arrow"),
        ("*/*", None, "arrow"),
        ("text/csv; charset=utf-8", None, "csv"),
        ("application/x-ndjson", "parquet", "parquet"),
        ("text/html, application/x-ndjson", None, "ndjson"),
    ],
)
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
