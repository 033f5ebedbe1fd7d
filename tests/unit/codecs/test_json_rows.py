"""One JSON form of a row, both ways: exact for every type, valid for every reader, and nothing else is let in."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.client.listen import ListenEvent
from persist.codecs import rows
from persist.codecs.json_rows import BLOCK_BYTES, ndjson
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo, ShardId
from persist.core.shard_view import SeenVersion
from persist.parts import ShardSchema
from persist.parts.text_values import is_textual
from rpc.listen_frames import FrameSource, sse
from tests.unit.parts.strategies import ALL, array_of, arrays, canonical

KEYED = pa.schema([pa.field("n", pa.int64())])


def shard_of(kind: pa.DataType) -> ShardSchema:
    return ShardSchema(KEYED.append(pa.field("v", kind)), ("n",))


def table_of(values: pa.Array) -> pa.Table:
    return pa.table({"n": pa.array(range(len(values)), pa.int64()), "v": values})


def read(body: str | bytes, kind: pa.DataType, form: str = "ndjson") -> pa.Array:
    """The column `v` of a body."""
    data = body.encode() if isinstance(body, str) else body
    return rows.read(data, form, shard_of(kind), rows_max=1_000_000).column("v").combine_chunks()


def same(left: pa.Array, right: pa.Array) -> bool:
    """Whether these are the same values; not every time has a Python value, and NaN is no equal of its own."""
    return left.equals(right) or canonical(left.to_pylist()) == canonical(right.to_pylist())


def strictly(text: str | bytes) -> Any:
    """JSON as browsers read it: without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.sampled_from(list(ALL)).flatmap(arrays), st.sampled_from(["ndjson", "csv"]), st.integers(0, 3))
def test_what_goes_out_comes_in_again(values: pa.Array, form: str, skipped: int) -> None:
    table = table_of(values).slice(skipped)
    pieces = [table.slice(0, len(table) // 2), table.slice(len(table) // 2)]
    data = b"".join(rows.write(iter(pieces), table.schema.empty_table(), form))
    back = read(data, values.type, form)
    assert back.type == values.type
    assert same(back, table["v"].combine_chunks())


@given(st.sampled_from(list(ALL)).flatmap(arrays))
def test_every_line_is_json_as_browsers_read_it(values: pa.Array) -> None:
    lines = ndjson(table_of(values)).splitlines()
    assert [strictly(line)["n"] for line in lines] == list(range(len(values)))


@pytest.mark.parametrize(("kind", "value", "text"), [
    (pa.int64(), 2**53 + 1, "9007199254740993"),
    (pa.uint64(), 2**64 - 1, "18446744073709551615"),
    (pa.bool_(), True, "true"),
    (pa.float64(), float("nan"), '"NaN"'),
    (pa.float32(), float("inf"), '"Infinity"'),
    (pa.float16(), float("-inf"), '"-Infinity"'),
    (pa.float64(), -0.0, "-0.0"),
    (pa.string(), "NaN", '"NaN"'),
    (pa.binary(), b"\x00\xff", '"AP8="'),
    (pa.date32(), 0, '"1970-01-01"'),
    (pa.date32(), 2_932_896, '"9999-12-31"'),
    (pa.date32(), 2_932_897, '"@2932897"'),
    (pa.time32("s"), 86_399, '"23:59:59"'),
    (pa.time64("ns"), 1, '"00:00:00.000000001"'),
    (pa.timestamp("ms"), -1, '"1969-12-31T23:59:59.999"'),
    (pa.timestamp("s"), 253_402_300_800, '"@253402300800"'),
    (pa.timestamp("us", "Europe/Berlin"), 0, '"1970-01-01T00:00:00.000000Z"'),
    (pa.duration("ns"), -(2**63), '"-PT9223372036.854775808S"'),
    (pa.duration("ms"), 1_500, '"PT1.500S"'),
    (pa.duration("s"), -1, '"-PT1S"'),
    (pa.list_(pa.binary()), [b"\x01", None], '["AQ==",null]'),
    (pa.struct([("a", pa.float64()), ("b", pa.int8())]), {"a": float("nan"), "b": None}, '{"a":"NaN","b":null}'),
    (pa.map_(pa.string(), pa.binary()), [("k", b"\x01")], '[["k","AQ=="]]'),
])  # fmt: skip
def test_the_form_of_a_value(kind: pa.DataType, value: Any, text: str) -> None:
    values = pa.array([value, None], pa.int32()).cast(kind) if pa.types.is_date(kind) else array_of(kind, [value, None])
    assert ndjson(table_of(values)) == f'{{"n":0,"v":{text}}}\n{{"n":1,"v":null}}\n'.encode()
    assert same(read(f'{{"n": 0, "v": {text}}}\n', kind), values[:1])


def test_events_and_lines_have_one_form() -> None:
    columns = {f"c{n}": array_of(kind, [None]) for n, kind in enumerate(ALL)}
    columns |= {"f": pa.array([float("nan")]), "b": pa.array([[b"\x00\xff"]]), "t": pa.array([0], pa.timestamp("s"))}
    table = pa.table(columns)
    source = FrameSource(SeenVersion(SeqNo(5), "0" * 32), ShardId("s" + "1" * 32))
    event = sse(ListenEvent(Antichain(7), Antichain(8), table), source).decode().splitlines()
    assert event[:2] == ["event: updates", f"id: 8.5.{'0' * 32}.s{'1' * 32}"]
    told = strictly(event[2].removeprefix("data: "))
    assert told == {"lower": [7], "upper": [8], "rows": [strictly(ndjson(table))]}
    assert told["rows"][0] | {"f": "NaN", "b": ["AP8="], "t": "1970-01-01T00:00:00"} == told["rows"][0]


@pytest.mark.parametrize(("kind", "text", "same"), [
    (pa.float64(), "1", "1.0"),
    (pa.float64(), "0e-400", "0"),
    (pa.int64(), "-0", "0"),
    (pa.decimal128(10, 2), "-0", '"0"'),
    (pa.string(), '"-0, \\"1e-400"', '"-0, \\u00221e-400"'),
    (pa.timestamp("us"), '"2024-01-31 12:00"', '"2024-01-31T12:00:00.000000"'),
    (pa.timestamp("s", "UTC"), '"2024-01-31T12:00:00+01:00"', '"2024-01-31T11:00:00Z"'),
    (pa.time64("us"), '"12:00:00.5"', '"12:00:00.500000"'),
    (pa.duration("ms"), '"PT1.5S"', '"PT1.500S"'),
    (pa.decimal128(10, 2), '"1.5"', '"1.50"'),
    (pa.struct([("a", pa.int8()), ("b", pa.int8())]), '{"b": 1}', '{"a": null, "b": 1}'),
])  # fmt: skip
def test_other_spellings_of_a_value(kind: pa.DataType, text: str, same: str) -> None:
    body = '{{"n": 0, "v": {}}}\n'
    assert read(body.format(text), kind).equals(read(body.format(same), kind))


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (pa.string(), r'"\ud800"', r"\ud800"),
        (pa.string(), r'"\ud83d\ude00\\\udc00"', r"\udc00"),
        (pa.string(), r'"\ud800\u0041"', r"\ud800"),
        (pa.decimal128(10, 2), "1.5", '"12.50"'),
        (pa.timestamp("us", "UTC"), '"2024-01-31 12:00"', "has no zone"),
        (pa.timestamp("us", "UTC"), '"x"', "'x' is not a value of timestamp"),
        (pa.timestamp("us"), '"2024-01-31 12:00Z"', "has a zone"),
        (pa.list_(pa.float64()), "[-0, 1.1.1]", "malformed"),
        (pa.int64(), str(2**63), f"column 'v': {2**63} does not fit int64"),
        (pa.uint64(), "-1", "column 'v': -1 does not fit uint64"),
        (pa.list_(pa.int8()), "[0, 128]", "column 'v': 128 does not fit int8"),
    ],
)
def test_a_refusal_names_the_cause(kind: pa.DataType, text: str, named: str) -> None:
    """They were hints of Arrow for Arrow's users, and `Input data was truncated` of a whole text."""
    with pytest.raises(InvalidUsage) as error:
        read(f'{{"n": 0, "v": {text}}}\n', kind)
    assert named in error.value.message
    assert not any(word in error.value.message for word in ("assume_timezone", "truncated", "int |"))


@pytest.mark.parametrize("text", ["-0", "-0.0", "-0e1"])
def test_zero_keeps_its_sign(text: str) -> None:
    kind = pa.struct([("f", pa.float64()), ("l", pa.list_(pa.float32()))])
    [row] = read(f'{{"n": -0, "v": {{"f": {text}, "l": [1.5,{text}]}}}}\n', kind).to_pylist()
    assert [math.copysign(1, zero) for zero in (row["f"], row["l"][1])] == [-1, -1]


@pytest.mark.parametrize(("kind", "text"), [
    (pa.int64(), '"1"'),
    (pa.int64(), "1.0"),
    (pa.int64(), "true"),
    (pa.int8(), "300"),
    (pa.uint8(), "-1"),
    (pa.int64(), "1e400"),
    (pa.float64(), "9007199254740993"),
    (pa.float64(), "123456789012345678901234567890123456789012"),
    (pa.list_(pa.float64()), "[1, 9007199254740993]"),
    (pa.float32(), "16777217"),
    (pa.float16(), "2049"),
    (pa.float64(), "true"),
    (pa.float64(), '"nan"'),
    (pa.float64(), "NaN"),
    (pa.float32(), "1e300"),
    (pa.float64(), "1e-400"),
    (pa.float64(), "-1E-0400"),
    (pa.float64(), "0." + "0" * 400 + "1"),
    (pa.float32(), "1e-60"),
    (pa.list_(pa.float64()), "[1e-400]"),
    (pa.float16(), "70000"),
    (pa.bool_(), "1"),
    (pa.string(), "1"),
    (pa.binary(), '"%%%"'),
    (pa.binary(2), '"AQ=="'),
    (pa.date32(), '"20240131"'),
    (pa.date32(), '"2024-01-31T00:00:00"'),
    (pa.date32(), "19000"),
    (pa.timestamp("us"), '"2024-01-31T12:00:00Z"'),
    (pa.timestamp("us", "UTC"), '"2024-01-31T12:00:00"'),
    (pa.timestamp("ms"), '"2024-01-31T12:00:00.0001"'),
    (pa.time32("s"), '"24:00:00"'),
    (pa.time32("ms"), '"@86400000"'),
    (pa.time64("us"), '"@-1"'),
    (pa.list_(pa.time64("ns")), '["@86400000000000"]'),
    (pa.date64(), '"@1"'),
    (pa.duration("ms"), '"PT1.0005S"'),
    (pa.duration("s"), '"P1D"'),
    (pa.duration("ns"), '"PT9223372037S"'),
    (pa.decimal128(10, 2), '"1.234"'),
    (pa.decimal128(10, 2), "1.5"),
    (pa.list_(pa.int8()), "1"),
    (pa.list_(pa.int8(), 2), "[1]"),
    (pa.list_(pa.field("item", pa.int8(), nullable=False)), "[null]"),
    (pa.struct([("a", pa.int8())]), '{"a": 1, "c": 2}'),
    (pa.struct([pa.field("a", pa.int8(), nullable=False)]), "{}"),
    (pa.map_(pa.string(), pa.int8()), '{"k": 1}'),
    (pa.map_(pa.string(), pa.int8()), '[["k"]]'),
    (pa.map_(pa.string(), pa.int8()), "[[null, 1]]"),
    (pa.string(), '"\\ud800"'),
    (pa.list_(pa.int8()), "[" * 100_000),
])  # fmt: skip
def test_a_value_that_would_lose_something_or_is_none_is_refused(kind: pa.DataType, text: str) -> None:
    with pytest.raises(InvalidUsage, match="nothing was written"):
        read(f'{{"n": 0, "v": {text}}}\n', kind)


@pytest.mark.parametrize("line", ["{}", '{"v": 1}', '{"v": null, "__diff": 1}'])
def test_a_row_that_does_not_name_its_key_is_refused(line: str) -> None:
    with pytest.raises(InvalidUsage, match="required field `n`"):
        read(f'{{"n": null, "v": 2}}\n{line}\n', pa.int64())


COUNTED = [kind for kind in ALL if is_textual(kind) and pa.types.is_temporal(kind)]


@given(st.sampled_from(COUNTED), st.one_of(st.integers(-(2**63), 2**63), st.integers(-2, 90_000_000)), st.booleans())
def test_a_count_is_read_as_its_value_or_is_refused(kind: pa.DataType, count: int, in_list: bool) -> None:
    text = f'["@{count}"]' if in_list else f'"@{count}"'
    try:
        column = read(f'{{"n": 0, "v": {text}}}\n', pa.list_(kind) if in_list else kind)
    except InvalidUsage:
        return
    column.validate(full=True)
    values = column.flatten() if in_list else column
    assert values.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist() == [count]


@pytest.mark.parametrize("line", [
    '{"n": 1, "n": 2}', '{"n": 1, "v": {"a": 1, "a": 2}}', '{"n": 1, "v": {"a": 1}, "n" \t: 2}',
    '{"n": 1, "\\u006e": 2}', '{"n": 1} {"n": 2, "n": 3}',
])  # fmt: skip
def test_a_name_that_comes_twice_is_refused(line: str) -> None:
    kind = pa.struct([("a", pa.int64())])
    for body in (f"{line}\n", f'{{"n": 0}}\n{line}\n{{"n": 3}}\n'):
        with pytest.raises(InvalidUsage, match="two values for one name"):
            read(body, kind)


def test_strings_that_look_like_names_are_strings() -> None:
    hostile = ['":', '"n":', '{"n": 1, "n": 2}', '\\":', "a\n", "\u2028", ""]
    body = "".join(json.dumps({"n": n, "v": text}) + "\n" for n, text in enumerate(hostile))
    assert read(body, pa.string()).to_pylist() == hostile


def test_a_body_is_read_in_pieces_that_end_with_a_line() -> None:
    count = 3 * BLOCK_BYTES // 20
    body = "".join(f'{{"n": {n}, "v": "{n}"}}\n' for n in range(count))
    assert read(body.rstrip("\n"), pa.string()).to_pylist() == [str(n) for n in range(count)]


def test_a_struct_with_two_fields_of_one_name_cannot_be_json() -> None:
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pytest.raises(InvalidUsage, match="use Arrow"):
        ndjson(table_of(twice))


def test_names_with_quotes_and_backslashes_are_read_as_they_are_written() -> None:
    """No shard with such a column could be written as JSON, nor an export of it imported."""
    within = pa.struct([('a"b', pa.string()), ("a\\b", pa.map_(pa.string(), pa.int64()))])
    schema = ShardSchema(pa.schema([('n"', pa.int64()), ("\\v", within)]), ('n"',))
    values = [{'a"b': 'a"b": \\', "a\\b": [('n":', 1)]}, None]
    table = pa.table([pa.array([1, 2]), pa.array(values, within)], schema=schema.arrow)
    for form in ("ndjson", "csv"):
        body = b"".join(rows.write(iter([table]), table.slice(0, 0), form))
        assert rows.read(body, form, schema, 10).select(schema.arrow.names).equals(table)
    flat = ShardSchema(pa.schema([('n"', pa.int64())]), ('n"',))
    bodies = [rb'{"n\"": 1}', rb'{"\u006e\u0022" : -0}', rb'{"n\q": 1}', rb'{"n": 1}']
    together, counts = rows.read_each(bodies, flat, 10, rows.Allowance())
    assert (together.column(0).to_pylist(), counts) == ([1, 0], [1, 1, None, None])
