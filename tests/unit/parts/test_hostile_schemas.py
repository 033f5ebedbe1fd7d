"""Schemas, indexes and decimals of a few bytes that stand for much: they are counted before they are unfolded."""

from __future__ import annotations

import json
import struct
import zlib
from base64 import b64encode
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.codecs.rows import read
from persist.codecs.schema_json import read_schema
from persist.core.errors import Corruption, InvalidUsage
from persist.core.ids import PartId
from persist.core.record import replace
from persist.core.state import SchemaRecord
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.codec import FOREIGN_BYTES_MAX, MAGIC, decode_footer, encode_parquet
from persist.parts.exact_numbers import parse_decimals
from persist.parts.ipc_guard import FIELDS_MAX, UNFOLDED_BYTES_MAX, check_schema
from persist.parts.parquet_guard import CHUNKS_MAX

ZONED = pa.timestamp("us", "Europe/Berlin")
SCHEMA = ShardSchema(pa.schema([("id", pa.int64()), ("text", pa.string())]), ("id",))


class Flat:
    """Writes a FlatBuffer from its start to its end: places are filled in later."""

    def __init__(self) -> None:
        self.data = bytearray()

    def put(self, form: str, *values: int) -> int:
        while len(self.data) % 8:
            self.data.append(0)
        at = len(self.data)
        self.data += struct.pack("<" + form, *values)
        return at

    def lead(self, at: int, to: int) -> None:
        struct.pack_into("<I", self.data, at, to - at)

    def table(self, places: list[int], size: int, form: str, *values: int) -> int:
        """A table whose fields are at these places of it (0: it has none)."""
        table_of = self.put(f"{2 + len(places)}H", 4 + 2 * len(places), size, *places)
        at = self.put("i" + form, 0, *values)
        struct.pack_into("<i", self.data, at, at - table_of)
        return at


def schema_message(fan: int, levels: int = 1, name: bytes = b"x") -> bytes:
    """An IPC message of a schema: at each level a vector leads to one and the same field, `fan` times."""
    flat = Flat()
    root = flat.put("I", 0)
    message = flat.table([4, 6, 8], 12, "hBxI", 4, 1, 0)
    flat.lead(root, message)
    schema = flat.table([0, 4], 8, "I", 0)
    flat.lead(message + 8, schema)
    hole = schema + 4
    for level in range(levels):
        is_leaf = level == levels - 1
        vector = flat.put(f"I{fan}I", fan, *([0] * fan))
        flat.lead(hole, vector)
        field = flat.table([4, 8, 9, 12, 0, 16], 20, "IBBxxII", 0, 1, 1 if is_leaf else 13, 0, 0)
        for index in range(fan):
            flat.lead(vector + 4 + 4 * index, field)
        flat.lead(field + 4, flat.put(f"I{len(name)}sx", len(name), name))  # type: ignore[arg-type]
        flat.lead(field + 12, flat.table([], 4, ""))
        hole = field + 16
    flat.lead(hole, flat.put("I", 0))
    flat.put("")
    return struct.pack("<Ii", 0xFFFFFFFF, len(flat.data)) + bytes(flat.data)


def test_a_message_that_is_made_here_is_one_that_arrow_reads() -> None:
    found = pa.ipc.read_schema(pa.py_buffer(schema_message(3)))
    assert found == pa.schema([("x", pa.null())] * 3)
    check_schema(schema_message(3))


@pytest.mark.parametrize("message", [
    schema_message(150, 2),
    schema_message(FIELDS_MAX + 1),
    schema_message(3, 200),
    schema_message(2_000, name=b"n" * (UNFOLDED_BYTES_MAX // 1_000)),
    struct.pack("<Ii", 0xFFFFFFFF, 100_000_000) + bytes(100),
    schema_message(3)[:60],
    b"\xff\xff\xff\xff",
], ids=["fields of fields", "fields", "levels", "one long name", "a long message", "cut", "nothing"])  # fmt: skip
def test_a_schema_that_stands_for_much_is_refused_before_arrow_reads_it(message: bytes) -> None:
    """8 MB of it ended the server, by a post of rows, by a new shard and by `evolve_schema`."""
    with pytest.raises(pa.ArrowInvalid):
        check_schema(message)
    with pytest.raises(InvalidUsage):
        read(message + b"\xff\xff\xff\xff\x00\x00\x00\x00", "arrow", SCHEMA, 1_000)
    with pytest.raises(Corruption):
        ShardSchema.from_record(SchemaRecord(message, ("id",)))


def test_a_new_shard_is_refused_such_a_schema() -> None:
    with pytest.raises(InvalidUsage):
        read_schema({"schema": b64encode(schema_message(150, 2)).decode(), "key": ["x"]})


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([pa.field(f"column {n}", ZONED, metadata={"n": str(n)}) for n in range(2_000)]),
        pa.schema([("a", pa.struct([("b", pa.list_(pa.map_(pa.string(), pa.date32())))]))], {"k": "v" * 10_000}),
        pa.schema([("d", pa.dictionary(pa.int32(), pa.large_string())), ("f", pa.list_(pa.int8(), 4))]),
        pa.schema([("u", pa.sparse_union([pa.field("a", pa.int8())])), ("n", pa.null()), ("v", pa.string_view())]),
        pa.schema([]),
    ],
    ids=["wide", "nested", "dictionary", "union", "empty"],
)  # fmt: skip
def test_schemas_that_people_have_pass(schema: pa.Schema) -> None:
    check_schema(schema.serialize().to_pybytes())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema):
        pass
    check_schema(sink.getvalue().to_pybytes())


# --- indexes and footers


def told(index: Any, chunk_count: int = 0) -> tuple[Any, bytes]:
    """A part with this index, whose footer has one row group with so many empty column chunks; and its tail."""
    rows = pa.table({"id": [1], "text": ["x"], TIME: [0], DIFF: [1]}).cast(SCHEMA.updates_schema)
    part, data = encode_parquet(rows, SCHEMA, 1, PartId(f"p{1:032x}"), "key")
    footer = data[-part.footer_size :]
    size = int.from_bytes(footer[8:12], "little")
    text = json.dumps(json.loads(footer[12 : 12 + size]) | index).encode()
    thrift = footer[12 + size :]
    if chunk_count:
        meta = b"\x15\x04\x19\x0c\x16\x02\x19\x1c\x19\xfc" + varint(chunk_count) + b"\x26\x00\x00" * chunk_count
        meta += b"\x16\x00\x16\x02\x00\x00"
        thrift = meta + struct.pack("<I", len(meta)) + b"PAR1"
    tail = MAGIC + struct.pack("<I", len(text)) + text + thrift
    return replace(part, footer_size=len(tail), footer_checksum=zlib.crc32(tail)), tail


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


GROUP = {"rows": 1, "nbytes": 1, "lower": "", "upper": None, "samples": []}


def test_a_part_as_it_is_written_passes() -> None:
    part, tail = told({})
    assert decode_footer(part, tail, is_foreign=True).row_groups[0].rows == 1


@pytest.mark.parametrize(("index", "chunks"), [
    ({"row_groups": [[]] * 100_000}, 0),
    ({"row_groups": 7}, 0),
    ({"has_one_time": []}, 0),
    ({"row_groups": [{**GROUP, "chunks": [[0, 0]]}]}, 0),
    ({"row_groups": [{**GROUP, "chunks": [[0, 0, 0]] * (CHUNKS_MAX + 1)}]}, 0),
    ({"more": "x" * FOREIGN_BYTES_MAX}, 0),
    ({}, 100_000),
    ({"row_groups": []}, 1),
    ({"row_groups": [{**GROUP, "chunks": [[0, 0, 0]]}] * 2}, 1),
], ids=["lists", "number", "flag", "chunk", "chunks", "bytes", "footer chunks", "no group", "groups"])  # fmt: skip
def test_an_index_or_a_footer_that_stands_for_much_is_refused_before_it_is_unfolded(index: Any, chunks: int) -> None:
    """14 million empty lists stopped all other callers for 7 s; 2.9 MB of column chunks took 1 GB."""
    part, tail = told(index, chunks)
    with pytest.raises(Corruption):
        decode_footer(part, tail, is_foreign=True)


# --- decimals

KINDS = [pa.decimal128(10, 2), pa.decimal128(38, 38), pa.decimal128(38, 0), pa.decimal256(76, 76), pa.decimal256(70, 2)]
NUMBERS = st.from_regex(r"[+-]?[0-9]{1,90}(\.[0-9]{0,90})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


def fitting(text: str, kind: Any) -> Decimal | None:
    """The number, if the type can have all of it."""
    number = Decimal(text)
    shifted = number.scaleb(kind.scale, Context(prec=2_000))
    fits = shifted == shifted.to_integral_value() and abs(shifted) < Decimal(10) ** kind.precision
    return number if fits else None


@given(st.sampled_from(KINDS), NUMBERS | st.from_regex(r"-?[0-9]{1,12}(\.[0-9]{1,3})?", fullmatch=True))
def test_a_decimal_written_as_a_text_is_exact_or_refused(kind: Any, text: str) -> None:
    """Of `1` with 5,000 zeros, and of `4` where there is room behind the point alone, another number was stored."""
    wanted = fitting(text, kind)
    if wanted is None:
        with pytest.raises(ValueError, match="fit"):
            parse_decimals(pa.array([text]), kind)
    else:
        assert parse_decimals(pa.array([None, text]), kind).to_pylist() == [None, wanted]


@pytest.mark.parametrize(
    "text", ["", ".", "-", "abc", "1_0", "nan", "Infinity", " 1", "1e", "\u0663", "1" + "0" * 5_000]
)
def test_a_text_that_is_no_decimal_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_decimals(pa.array([text]), KINDS[0])
