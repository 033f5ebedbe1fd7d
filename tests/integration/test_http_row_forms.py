"""Rows of every type, the nastiest values among them, out of one shard and into another, in every format."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from compactor.embedded import maintain
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.codecs.rows import MEDIA_TYPES
from persist.commit.location import Location
from rpc.app import create_app
from tests.support.asking import typed
from tests.support.location import memory_location
from tests.unit.parts.strategies import array_of, canonical

_WIDE = 2**63 - 1
_TEXTS = ["", "NA", "null", "nan", "NaN", "N/A", "None", "\\N", "-", "true", "1", "@1", "{}", "[", "x" * 1_200_000]
_TEXTS += [",", '"', '""', '","', "'", " x ", "\t", "\n", "\r", "\r\n", 'a\nb,"c"\n', "\0", "\ufeff", "\u2028", "é\x7f"]
_BYTES = [b"", b"\x00", b"\xff\xfe", b"null", bytes(range(256))]
_FLOATS = [math.nan, math.inf, -math.inf, -0.0, 0.0, 0.1, 1e22]
_MOMENTS = [0, -1, 1, 10**9, -(10**12), 2**53 + 1]


def _decimals(*values: str) -> list[decimal.Decimal]:
    return [decimal.Decimal(value) for value in values]


VALUES: dict[pa.DataType, list[Any]] = {
    pa.bool_(): [True, False],
    **{getattr(pa, f"int{bits}")(): [0, 1, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1] for bits in (8, 16, 32, 64)},
    **{getattr(pa, f"uint{bits}")(): [0, 1, 2**bits - 1] for bits in (8, 16, 32, 64)},
    pa.float16(): [math.nan, math.inf, -math.inf, -0.0, 65504.0, 6e-8],
    pa.float32(): [*_FLOATS, 3.4028234663852886e38, 1e-45],
    pa.float64(): [*_FLOATS, 1.7976931348623157e308, 5e-324, 2.0**53 + 2],
    pa.decimal128(38, 10): _decimals("0", "1.5", "-0.0000000001", "9999999999999999999999999999.9999999999"),
    pa.decimal256(76, 70): _decimals("1e-70", "-123456.7"),
    pa.string(): _TEXTS,
    pa.large_string(): _TEXTS,
    pa.binary(): _BYTES,
    pa.large_binary(): _BYTES,
    pa.binary(3): [b"\0\0\0", b"\xff,\n"],
    pa.date32(): [datetime.date(1, 1, 1), datetime.date(1969, 12, 31), datetime.date(9999, 12, 31)],
    pa.date64(): [datetime.date(1, 1, 1), datetime.date(2024, 2, 29)],
    pa.time32("s"): [0, 86_399],
    pa.time32("ms"): [0, 86_399_999],
    pa.time64("us"): [0, 86_399_999_999],
    pa.time64("ns"): [0, 1, 86_399_999_999_999],
    **{pa.timestamp(unit): [*_MOMENTS, -_WIDE, _WIDE] for unit in ("ms", "us", "ns")},
    pa.timestamp("s"): [*_MOMENTS, 253_402_300_800, -62_135_596_801],
    pa.timestamp("us", "UTC"): [*_MOMENTS, -_WIDE],
    pa.timestamp("ns", "Europe/Berlin"): [*_MOMENTS, _WIDE],
    **{pa.duration(unit): [*_MOMENTS, -_WIDE - 1, _WIDE] for unit in ("s", "ms", "us", "ns")},
    pa.list_(pa.binary()): [[], [None], [b"", b"\x00\xff"], [b"null"]],
    pa.list_(pa.float64()): [[math.nan, math.inf, -math.inf, None, -0.0]],
    pa.list_(pa.string()): [[*_TEXTS[:-1]], [], [None, ""]],
    pa.large_list(pa.timestamp("ns", "UTC")): [[0, None], []],
    pa.list_(pa.float32(), 2): [[math.nan, None], [1.5, -0.0]],
    pa.list_(pa.list_(pa.list_(pa.int64()))): [[], [None, []], [[None], [[_WIDE, None], []]]],
    pa.struct([("a", pa.binary()), ("b", pa.list_(pa.struct([("c", pa.date32())])))]): [
        {"a": None, "b": None},
        {"a": b"\x01", "b": [None, {"c": None}, {"c": datetime.date(2024, 1, 31)}]},
    ],
    pa.struct([("x: 1, ", pa.duration("ms")), ("", pa.decimal128(4, 1)), ("é", pa.uint64())]): [
        {"x: 1, ": datetime.timedelta(milliseconds=-1), "": decimal.Decimal("-0.1"), "é": 2**64 - 1}
    ],
    pa.map_(pa.string(), pa.binary()): [[], [("", None), ("k", b"\x00")], [("k", b"1"), ("k", b"2")]],
    pa.map_(pa.int64(), pa.map_(pa.binary(), pa.float64())): [[(_WIDE, [(b"\xff", math.nan)]), (-1, None)]],
}


@pytest.fixture(scope="module")
def location() -> Iterator[Location]:
    opened = memory_location()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def http(location: Location) -> Iterator[TestClient]:
    with typed(TestClient(create_app(location), base_url="http://127.0.0.1")) as client:
        yield client


def carried(http: TestClient, location: Location, table: pa.Table, key: list[str], form: str) -> tuple[Any, Any]:
    """The rows of a shard, and those of another one into which a snapshot of the first was posted."""
    client = Client(EmbeddedTransport(location, maintain))
    found = []
    for number, name in enumerate((f"from-{len(client.shards())}", f"to-{len(client.shards())}")):
        shard = client.create_shard(name, table.schema, key)
        if number == 0:
            shard.insert(table)
            body = http.get(f"/v1/shards/{name}/snapshot?format={form}").content
        else:
            posted = http.post(f"/v1/shards/{name}/insert?format={form}", content=body)
            assert posted.status_code == 200, posted.text
        found.append(shard.snapshot().to_arrow())
    return found[0], found[1]


def check_same(source: pa.Table, target: pa.Table) -> None:
    assert source.schema == target.schema
    for name in source.schema.names:
        left, right = (table[name].combine_chunks() for table in (source, target))
        assert left.equals(right) or canonical(left.to_pylist()) == canonical(right.to_pylist()), name


@pytest.mark.parametrize("form", MEDIA_TYPES)
def test_values_of_every_type_survive_every_format(http: TestClient, location: Location, form: str) -> None:
    count = 1 + max(map(len, VALUES.values()))
    columns = {str(kind): array_of(kind, [*found, *[None] * (count - len(found))]) for kind, found in VALUES.items()}
    check_same(*carried(http, location, pa.table({"n": pa.array(range(count)), **columns}), ["n"], form))


@pytest.mark.parametrize("kind", [kind for kind in VALUES if not pa.types.is_nested(kind)], ids=str)
def test_no_two_keys_become_one_in_any_format(http: TestClient, location: Location, kind: pa.DataType) -> None:
    table = pa.table({"k": array_of(kind, [*VALUES[kind], None])})
    for form in MEDIA_TYPES:
        source, target = carried(http, location, table, ["k"], form)
        assert len(source) == len(table), "the values are distinct keys"
        check_same(source, target)


@pytest.mark.parametrize("form", MEDIA_TYPES)
def test_columns_of_any_name_survive_every_format(http: TestClient, location: Location, form: str) -> None:
    names = ["id", "", " ", "a,b", "é", "__proto__", "null", "1", "'", "a:b"]
    if form != "ndjson":
        names += ['a"b', "a\u2028b", "\\"]
    table = pa.table([pa.array([number, None]) for number in range(len(names))], names=names)
    check_same(*carried(http, location, table, ["id"], form))


@pytest.mark.parametrize("name", ['a"b', "\\"])
def test_names_that_json_must_escape_are_written_and_refused_when_they_are_read(
    http: TestClient, location: Location, name: str
) -> None:
    shard = Client(EmbeddedTransport(location, maintain)).create_shard(
        f"n{ord(name[-2:][0])}", pa.schema([(name, pa.int64())]), [name]
    )
    shard.insert(pa.table({name: [1]}))
    line = http.get(f"/v1/shards/{shard.name}/snapshot?format=ndjson").text
    assert json.loads(line) == {name: 1, "__diff": 1}
    refused = http.post(f"/v1/shards/{shard.name}/insert?format=ndjson", content=line)
    assert (refused.status_code, "must not contain" in refused.json()["detail"]) == (400, True)


@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_one_column_alone_survives_with_its_nulls(http: TestClient, location: Location, form: str) -> None:
    client = Client(EmbeddedTransport(location, maintain))
    shard = client.create_shard(f"alone-{form}", pa.schema([("id", pa.string())]), ["id"])
    shard.insert(pa.table({"id": ["a", None, "", "b"]}))
    body = http.get(f"/v1/shards/alone-{form}/snapshot?format={form}&expand=true").content
    again = client.create_shard(f"again-{form}", pa.schema([("id", pa.string())]), ["id"])
    assert http.post(f"/v1/shards/again-{form}/insert?format={form}", content=body).status_code == 200
    assert sorted(again.snapshot().to_arrow()["id"].to_pylist(), key=str) == ["", None, "a", "b"]


def test_a_listener_and_a_snapshot_tell_the_same_rows(http: TestClient, location: Location) -> None:
    client = Client(EmbeddedTransport(location, maintain))
    columns = {f"c{n}": array_of(kind, [VALUES[kind][-1]]) for n, kind in enumerate(VALUES)}
    table = pa.table({"id": [1], **columns})
    shard = client.create_shard("told", table.schema, ["id"])
    shard.insert(table)
    shard.advance_upper(None)
    lines = http.get("/v1/shards/told/snapshot?format=ndjson").text
    events = http.get("/v1/shards/told/listen", headers={"accept": "text/event-stream"}).text
    data = next(line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: "))
    (row,) = json.loads(data)["rows"]
    assert row.pop("__time") == 0
    assert row == json.loads(lines)
