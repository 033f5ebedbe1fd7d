"""What hostile bodies found: few bytes that became many, and rows that nobody could read. A test for each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from compactor.on_demand import maintain
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.codecs import rows as bodies
from persist.codecs.decode_limits import SMALL_BYTES, Allowance, BodyTooLarge
from persist.commit.location import Location
from persist.core.errors import InvalidUsage, Overloaded
from persist.parts import ShardSchema
from persist.parts.memory_size import column_bytes
from rpc.app import create_app
from rpc.concurrency_limits import Slots
from rpc.settings import Limits, ServerSettings
from tests.support.asking import typed
from tests.support.bombs import file, named, nulls_within, stream, viewed, zeros
from tests.support.location import memory_location

KIB, MIB = 1024, 1024 * 1024
DECODED = 5 * MIB
LIMITS = Limits(decoded_bytes_max=DECODED)
ARROW, PARQUET, NDJSON, CSV = bodies.MEDIA_TYPES.values()
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("s", pa.string()),
        ("b", pa.binary(60_000)),
        ("l", pa.list_(pa.int64())),
        ("p", pa.list_(pa.binary(1_000), 50)),
        ("o", pa.list_(pa.struct([(f"f{n}", pa.int64()) for n in range(200)]))),
    ]
)


@pytest.fixture
def location() -> Iterator[Location]:
    found = memory_location(small_merges=False)
    yield found
    found.close()


@pytest.fixture
def http(location: Location) -> Iterator[TestClient]:
    Client(EmbeddedTransport(location, maintain)).create_shard("t", SCHEMA, ["id"])
    with TestClient(create_app(location, ServerSettings(limits=LIMITS)), base_url="http://127.0.0.1") as client:
        typed(client)
        yield client


ZEROS = zeros(1_000_000)
BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "compressed Arrow": (ARROW, lambda: stream(pa.table({"id": ZEROS}))),
    "compressed Arrow, lz4": (ARROW, lambda: stream(pa.table({"id": ZEROS}), "lz4")),
    "a dictionary": (ARROW, lambda: stream(pa.table({"id": ZEROS[:9_000], "s": named(9_000, 100_000)}))),
    "a compressed dictionary": (ARROW, lambda: stream(pa.table({"id": [1], "s": named(1, 9_000_000)}))),
    "views": (ARROW, lambda: stream(pa.table({"id": ZEROS[:9_000], "s": viewed(9_000, 10_000)}), None)),
    "nulls of a fixed size": (ARROW, lambda: stream(pa.table({"id": ZEROS[:9_000], "b": pa.nulls(9_000)}), None)),
    "a list of nulls": (ARROW, lambda: stream(pa.table({"id": [1], "l": nulls_within(500_000_000)}), None)),
    "many tiny batches": (ARROW, lambda: stream(pa.concat_tables([pa.table({"id": [1]})] * 11_000), None)),
    "Parquet": (PARQUET, lambda: file(pa.table({"id": ZEROS}))),
    "Parquet, a dictionary": (PARQUET, lambda: file(pa.table({"s": named(100_000, 10_000)}), store_schema=False)),
    "NDJSON of a fixed size": (NDJSON, lambda: b'{"id":1}\n' * 1500),
    "NDJSON, fixed lists": (NDJSON, lambda: b'{"id":1,"b":"' + b"A" * 80_000 + b'"}\n' + b'{"id":1}\n' * 1500),
    "NDJSON, one line of lists": (NDJSON, lambda: b'{"id":1,"l":' + b"[" * 500_000),
    "NDJSON, empty objects": (NDJSON, lambda: b'{"id":1,"o":[' + b"{}," * 90_000 + b"{}]}\n"),
    "CSV of a fixed size": (CSV, lambda: b"id,b\n" + b"1,\n" * 1500),
    "CSV, nested cells": (CSV, lambda: b'id,o\n1,"[' + b"{}," * 90_000 + b'{}]"\n'),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_small_body_became_a_large_one(http: TestClient, what: str) -> None:
    """37 kB of Arrow took 1.3 GB, 3.3 kB with a dictionary 2.1 GB, 1.3 MB of Parquet 2.6 GB, NDJSON of 249 kB 1.4."""
    media, make = BOMBS[what]
    answer = http.post("/v1/shards/t/insert", content=make(), headers={"content-type": media})
    assert (answer.status_code, answer.json()["kind"]) == (413, "body_too_large"), answer.text[:300]
    assert "send" in answer.json()["detail"]
    assert http.get("/v1/shards/t").json()["upper"] == [0]
    assert 'persist_pool_used{pool="decoded_bytes"} 0' in http.get("/metrics").text


@pytest.mark.parametrize("verb", ["upsert", "merge", "delete"])
def test_the_objects_of_a_json_body_were_not_counted(http: TestClient, verb: str) -> None:
    """8 million small lines of an upsert, or lists of a merge, took gigabytes of Python's objects."""
    nested = b'{"rows":[' + b"[]," * 100_000 + b"[]]}"
    body = b'{"id":1,"l":[%s]}\n' % (b"[]," * 500_000 + b"1") if verb == "upsert" else nested
    headers = {"content-type": NDJSON if verb == "upsert" else "application/json"}
    answer = http.post(f"/v1/shards/t/{verb}", content=body, headers=headers)
    assert answer.status_code == 413, answer.text[:300]


def test_a_stream_lies_about_what_its_buffers_hold() -> None:
    """Arrow takes what a buffer says, and refuses one that holds other bytes: the lie harms nobody."""
    honest = stream(pa.table({"id": ZEROS[:100_000]}))
    length = struct.pack("<q", 800_000)
    assert honest.count(length) >= 1
    schema = ShardSchema(pa.schema([("id", pa.int64())]), ("id",))
    for lie, error in ((2**62, BodyTooLarge), (8, InvalidUsage), (-5, InvalidUsage)):
        at = honest.rindex(length)
        data = honest[:at] + struct.pack("<q", lie) + honest[at + 8 :]
        with pytest.raises(error):
            bodies.read(data, "arrow", schema, 1_000_000, Allowance(None, DECODED))


def test_what_all_rows_take_is_bounded_and_small_ones_are_never_kept_out() -> None:
    total = Slots(DECODED, "many rows to work on")
    with Allowance(total, DECODED) as large, Allowance(total, DECODED) as other:
        large.spend(DECODED)
        other.spend(SMALL_BYTES)
        other.spend(SMALL_BYTES)
        with pytest.raises(Overloaded):
            other.spend(1)
        assert total.taken == DECODED
    assert total.taken == 0


@pytest.mark.parametrize("form", ["arrow", "ndjson", "csv", "parquet"])
def test_ordinary_rows_are_counted_for_about_what_they_take(form: str) -> None:
    """A bound that refuses what is not large would be none that anybody can live with."""
    rows = pa.table({"id": pa.array(range(20_000), pa.int64()), "s": [f"value {n}" for n in range(20_000)]})
    schema = ShardSchema(rows.schema, ("id",))
    lines = [f'{{"id":{n},"s":"value {n}"}}\n' for n in range(20_000)]
    cells = "id,s\n" + "".join(f"{n},value {n}\n" for n in range(20_000))
    data = {
        "arrow": stream(rows, None),
        "parquet": file(rows),
        "ndjson": "".join(lines).encode(),
        "csv": cells.encode(),
    }
    allowed = Allowance()
    assert bodies.read(data[form], form, schema, 20_000, allowed).num_rows == 20_000
    assert rows.nbytes <= allowed.spent <= 5 * rows.nbytes


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", None, "ccc"]),
        pa.array(["a", None, "c" * 40], pa.string_view()),
        named(5, 100),
        pa.array([[1, 2], None, [3]]),
        pa.array([{"x": 1, "y": "zz"}, None]),
        pa.array([[("a", 1)], [], [("abc", 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([[1, 2], None], pa.list_(pa.int32(), 2)),
        pa.array([None, b"abc"], pa.binary(3)),
        pa.array([True, None]),
    ],
    ids=lambda one: str(one.type),
)
def test_rows_count_for_no_less_than_arrow_takes_for_them(values: pa.Array) -> None:
    for some in (values, values[1:], values[1:2]):
        is_view = some.type == pa.string_view()
        plain = some.dictionary_decode() if pa.types.is_dictionary(some.type) else some
        plain = plain.cast(pa.large_string()) if is_view else plain
        assert column_bytes(some, some.type) >= plain.nbytes - (len(some) + 7) // 8 - 8


def test_a_cell_of_csv_lay_in_two_blocks(location: Location) -> None:
    """A cell of more than a megabyte was refused with `straddling object straddles two block boundaries`."""
    Client(EmbeddedTransport(location, maintain)).create_shard(
        "c", pa.schema([("id", pa.int64()), ("s", pa.string())]), ["id"]
    )
    with TestClient(create_app(location, ServerSettings(limits=LIMITS)), base_url="http://127.0.0.1") as client:
        put = {"content-type": CSV}
        short = client.post("/v1/shards/c/insert", content=b"id,s\n1," + b"x" * 1100 * KIB + b"\n2,b\n", headers=put)
        assert short.status_code == 200
        long = client.post("/v1/shards/c/insert", content=b"id,s\n1," + b"x" * DECODED + b"\n", headers=put)
        assert long.status_code == 413
        assert "straddl" not in long.text
        for head in (b"," * (2 * MIB), b"x" * 200 * KIB, b'"' + b"x" * 2 * MIB):  # the second was 500
            answer = client.post("/v1/shards/c/insert", content=head + b"\n", headers=put)
            assert answer.status_code == 400
            assert len(answer.content) < KIB
        assert client.get("/v1/shards/c/count").json()["count"] == 2
