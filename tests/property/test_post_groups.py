"""Posts that are prepared together are prepared as each would be alone; what is wrong with one is left to it."""

from __future__ import annotations

import base64
import json
import math
import random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persist.codecs import rows
from persist.codecs.decode_limits import Allowance
from persist.commit.clocks_and_ids import SystemIds
from persist.core.batch import Part, Run
from persist.core.errors import Corruption, PersistError
from persist.core.ids import ShardId, WriterId, mint, shard_id_of
from persist.core.record import replace
from persist.parts import ShardSchema, decode_inline
from persist.parts import writer as writing
from persist.parts.codec import encode_inline_parts
from persist.parts.shard_schema import encode_value

ROWS_MAX = 40
INLINE_MAX = 4_096
IDS = SystemIds()
WRITER, SHARD = mint(WriterId, IDS), shard_id_of("orders")
VALUES: dict[Any, list[Any]] = {
    pa.int64(): [0, 1, -7, 2**63 - 1, -(2**63)],
    pa.int8(): [0, -128, 127],
    pa.uint32(): [0, 2**32 - 1],
    pa.float64(): [0.5, -1.25, 0, 7, "NaN", "Infinity", 2**53],
    pa.float32(): [0.5, -2.0, 3],
    pa.string(): ["", "a", "é", 'a "quoted": text', "b\n", "value-0", "\U0001f600"],
    pa.large_string(): ["a", "zz"],
    pa.binary(): [base64.b64encode(raw).decode() for raw in (b"", b"\x00", b"\xff" * 9)],
    pa.bool_(): [True, False],
    pa.decimal128(10, 2): ["1.50", "-2.25", 3],
    pa.date32(): ["2024-02-29", "1969-12-31"],
    pa.timestamp("us"): ["2030-01-02T03:04:05", "1969-12-31T23:59:59"],
    pa.timestamp("ns", "UTC"): ["2030-01-02T03:04:05Z", "@-1"],
    pa.time32("s"): ["03:04:05", "@0"],
    pa.time64("us"): ["03:04:05.5", "@86399999999"],
    pa.date64(): ["2024-02-29", "@-86400000"],
    pa.duration("ms"): ["PT1.5S", "@-1"],
    pa.float16(): [0.5, "NaN", 2048],
    pa.decimal256(60, 2): ["1.50", -3],
    pa.binary(2): ["AQI="],
}
ODD = [
    "@-1", "@1", "@86400000", "@86400000000", 2**70, -(2**63) - 1, 300, -1, 1.5, "no number", [], {}, True, 1e300,
    None,
]  # fmt: skip
ODD_LINES = [
    b"", b"  ", b"{}", b"[]", b"{", b'{"k": 1', b"null", b'{"k": 1, "k": 2}', b'{"k": -0}', b'{"k": 1e-400}',
    b'{"nowhere": 1}', b'\xff{"k": 1}', b"\xef\xbb\xbf", b'{"k": "\\ud800"}',
]  # fmt: skip


class Story(NamedTuple):
    """A schema, and what writers post."""

    schema: ShardSchema
    bodies: list[bytes]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    pick = random.Random(draw(st.integers(0, 2**32 - 1)))
    key = pick.choice([pa.int64(), pa.string(), pa.float64(), pa.decimal128(10, 2), pa.timestamp("us"), pa.binary()])
    kinds = {"k": key, **{f"c{number}": pick.choice(list(VALUES)) for number in range(pick.randrange(4))}}
    fields = [pa.field(n, kind, nullable=pick.random() < (0.7 if n != "k" else 0.2)) for n, kind in kinds.items()]
    schema = ShardSchema(pa.schema(fields), ("k",))
    if "c0" in kinds and pick.random() < 0.2:
        schema = schema.with_details(not_null=(2,))
    if kinds.get("c0") == pa.int64() and pick.random() < 0.5:
        schema = schema.with_details(defaults=((2, encode_value(pa.scalar(42))),))
    return Story(schema, [_body(pick, schema) for _ in range(pick.randrange(1, 7))])


def _body(pick: random.Random, schema: ShardSchema) -> bytes:
    lines = [_line(pick, schema) for _ in range(pick.choice([0, 1, 1, 2, 3, ROWS_MAX + 1]))]
    if pick.random() < 0.1:
        lines.insert(pick.randrange(len(lines) + 1), pick.choice(ODD_LINES))
    ends = pick.choice([b"\n", b"\n", b"\r\n", b"\n\n"])
    return (b"\xef\xbb\xbf" if pick.random() < 0.05 else b"") + ends.join(lines) + pick.choice([b"", ends])


def _line(pick: random.Random, schema: ShardSchema) -> bytes:
    row: dict[str, Any] = {}
    for field in schema.arrow:
        if field.nullable and pick.random() < 0.3:
            if pick.random() < 0.5:
                row[field.name] = None
        else:
            row[field.name] = pick.choice(ODD) if pick.random() < 0.02 else pick.choice(VALUES[field.type])
    if pick.random() < 0.2:
        row["__diff"] = pick.choice([1, 2, -1, None, 0, 2**62])
    if pick.random() < 0.02:
        row["__time"] = pick.choice([1, None])
    return json.dumps(row, ensure_ascii=pick.random() < 0.5).encode()


class NoBlobs:
    def put(self, key: str, data: bytes) -> None:
        raise AssertionError("no part of a few rows is a blob")


def sink(schema: ShardSchema) -> writing.PartSink:
    return writing.PartSink(schema, 1, NoBlobs(), ShardId(SHARD), WRITER, IDS)


def alone(schema: ShardSchema, body: bytes) -> tuple[Run, ...] | None:
    """Raises as `read` and `stage_inline` do; None: it takes a call of a store."""
    table = rows.read(body, "ndjson", schema, ROWS_MAX)
    return writing.stage_inline(table, sink(schema), default_time=None, inline_bytes_max=INLINE_MAX)


def outcome(schema: ShardSchema, body: bytes) -> tuple[tuple[Run, ...] | None, PersistError | None]:
    try:
        return alone(schema, body), None
    except PersistError as error:
        return None, error


def together(schema: ShardSchema, bodies: list[bytes]) -> list[tuple[Run, ...] | None]:
    """None: left to its own try. Raises the error of one of them."""
    with Allowance() as allowed:
        table, counts = rows.read_each(bodies, schema, ROWS_MAX, allowed)
    staged = writing.stage_inserts(table, [count or 0 for count in counts], sink(schema), INLINE_MAX)
    assert len(table) == sum(count or 0 for count in counts)
    return [None if count is None else runs for count, runs in zip(counts, staged, strict=True)]


def described(runs: tuple[Run, ...], schema: ShardSchema) -> list[tuple[Part, Any]]:
    """The parts, without what is another each time, and their rows in order."""
    found = []
    for run in runs:
        for part in run.parts:
            told = replace(part, id="", data=b"", size=0, checksum=0)
            found.append(
                (told, [tuple(map(_same, row.values())) for row in decode_inline(part, {1: schema}).to_pylist()])
            )
    return found


def _same(value: object) -> object:
    """Values that are equal iff they are the same ones: also NaN, and zeros of either sign."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (value, math.copysign(1, value))
    return value


@given(stories())
@example(Story(ShardSchema(pa.schema([pa.field("k", pa.string(), False)]), ("k",)), [b'{"k": "a"}', b'{"k": null}']))
def test_each_post_is_prepared_as_alone(story: Story) -> None:
    schema, bodies = story
    refused: list[PersistError | None] = []
    try:
        found = together(schema, bodies)
    except PersistError as error:
        found = [None] * len(bodies)
        refused.append(error)
    for body, joined in zip(bodies, found, strict=True):
        own, failed = outcome(schema, body)
        refused += [failed] * (failed is not None)
        if joined is not None:
            assert failed is None, body
            assert own is not None
            assert described(joined, schema) == described(own, schema)
    if all(joined is None for joined in found) and not any(map(_is_odd, bodies)):
        assert refused, "plain rows are prepared together"


def _is_odd(body: bytes) -> bool:
    return any(mark in body for mark in (b"__diff", b"__time")) or body.count(b"\n") > ROWS_MAX


@pytest.mark.parametrize("count", [1, 3])
def test_no_part_holds_rows_of_another_post(count: int) -> None:
    """The IPC format fills buffers up with what lies beyond them: bytes that an erasure would not find."""
    schema = ShardSchema(pa.schema([pa.field("k", pa.string(), False), pa.field("v", pa.int8())]), ("k",))
    names = [f"secret/{number}" for number in range(count)]
    found = together(schema, [json.dumps({"k": name, "v": 7}).encode() for name in names])
    for name, runs in zip(names, found, strict=True):
        assert runs is not None
        data = runs[0].parts[0].data or b""
        assert data.count(b"secret/") == 1
        assert name.encode() in data


def test_what_is_encoded_is_compared_with_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    real, schema = encode_inline_parts, ShardSchema(pa.schema([pa.field("k", pa.int64(), False)]), ("k",))

    def wrong(table: pa.Table, *given: Any) -> list[Part]:
        return real(table.set_column(2, table.schema.field(2), pa.array([2] * len(table))), *given)

    monkeypatch.setattr(writing, "encode_inline_parts", wrong)
    with pytest.raises(Corruption):
        together(schema, [b'{"k": 1}', b'{"k": 2}'])
