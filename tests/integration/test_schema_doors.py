"""What hostile schemas found: shards that began with one that nobody could read. A test for each."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from persist import InvalidUsage
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.state import SchemaRecord
from persist.parts.schema_changes import (
    FIELDS_MAX,
    FIXED_ROW_BYTES_MAX,
    NAME_CHARS_MAX,
    SCHEMA_BYTES_MAX,
    AddColumn,
    DropColumn,
    RelaxColumn,
)
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.embedded import client_of
from tests.support.location import memory_location

ANSWER_BYTES_MAX = 4096


@pytest.fixture
def location() -> Iterator[Location]:
    found = memory_location(small_merges=False)
    yield found
    found.close()


@pytest.fixture
def http(location: Location) -> Iterator[TestClient]:
    with TestClient(create_app(location, ServerSettings()), base_url="http://127.0.0.1") as client:
        yield client


def field(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def arrowed(*fields: Any) -> dict[str, Any]:
    schema = pa.schema([("id", pa.int64()), *fields])
    return {"schema": base64.b64encode(schema.serialize()).decode(), "key": ["id"]}


def nested(depth: int) -> pa.DataType:
    kind = pa.int64()
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


KEY = field("id", "int64", key=True)
PAIR = pa.field("p", pa.list_(pa.float32(), 2), nullable=False)  # Arrow reads none below a null from a file
BAD_SCHEMAS: dict[str, Any] = {
    "lists in lists": {"fields": [KEY, field("l", "list<" * 150 + "int64" + ">" * 150)]},
    "lists in lists, serialized": arrowed(("l", nested(40))),
    "brackets": b"[" * 100_000,
    "a zone": {"fields": [KEY, field("at", "timestamp[us, tz=Nowhere/Bad]")]},
    "a zone, serialized": arrowed(("at", pa.list_(pa.timestamp("us", "Nowhere/Bad")))),
    "many fields": arrowed(
        *[(f"o{n}", pa.struct([(f"f{m}", pa.int8()) for m in range(100)])) for n in range(FIELDS_MAX // 100)]
    ),
    "many columns": {"fields": [KEY, *[field(f"c{n}", "int8") for n in range(2_001)]]},
    "a long name": arrowed(("n" * (NAME_CHARS_MAX + 1), pa.int8())),
    "no name": {"fields": [field("", "int64", key=True), KEY]},
    "no name of a value, serialized": arrowed(("", pa.int8())),
    "a control character": {"fields": [KEY, field("a\x00b", "int8")]},
    "a control character within": arrowed(("o", pa.struct([("a\n", pa.int8())]))),
    "twins": {"fields": [KEY, field("a", "int8"), field("a", "int8")]},
    "twins within": arrowed(("o", pa.struct([("a", pa.int8()), ("a", pa.int8())]))),
    "a reserved name": {"fields": [KEY, field("__diff", "int64")]},
    "a wide value": arrowed(("b", pa.binary(FIXED_ROW_BYTES_MAX))),
    "wide lists": arrowed(("p", pa.list_(pa.list_(pa.int64(), 2**20), 2**20))),
    "a type within a dictionary": arrowed(("d", pa.dictionary(pa.int8(), pa.list_view(pa.int8())))),
    "a fixed list within": arrowed(("o", pa.struct([PAIR]))),
    "a fixed list far within": arrowed(("m", pa.map_(pa.string(), pa.list_(pa.struct([("o", pa.struct([PAIR]))]))))),
    "many bytes": arrowed(*[(f"{n:04}" + "€" * 240, pa.int8()) for n in range(SCHEMA_BYTES_MAX // 600)]),
    "no schema": {"schema": "/////wAAAAA=", "key": ["id"]},
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_SCHEMAS)
def test_a_shard_began_with_a_schema_that_it_cannot_have(http: TestClient, what: str) -> None:
    """Lists of 150 levels were 500, and the shard was there, unreadable for ever."""
    body = BAD_SCHEMAS[what]
    answer = http.put("/v1/shards/new", content=body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), answer.text[:300]
    assert len(answer.content) < ANSWER_BYTES_MAX
    assert http.get("/v1/shards/new").status_code == 404


@pytest.mark.parametrize(
    "what", [what for what, body in BAD_SCHEMAS.items() if "serialized" in what or "within" in what]
)
def test_no_door_lets_such_a_schema_in(location: Location, what: str) -> None:
    """Python, an evolution, and a command of one's own."""
    body = BAD_SCHEMAS[what]
    bad = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(body["schema"])))
    client = client_of(location)
    with pytest.raises(InvalidUsage):
        client.create_shard("new", bad, ["id"])
    assert client.shards() == []
    shard = client.create_shard("new", pa.schema([("id", pa.int64())]), ["id"])
    with pytest.raises(InvalidUsage):
        shard.evolve_schema(bad)
    with pytest.raises(InvalidUsage):
        location.machine("new").apply(c.EvolveSchema(1, SchemaRecord(bad.serialize().to_pybytes(), ("id",))))
    assert shard.insert([{"id": 1}]).lower.element == 0


def test_a_shard_of_old_with_a_bad_schema_goes_on(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    old = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "Nowhere/Bad")), ("a\x00", pa.int8())])
    client = client_of(location)
    with monkeypatch.context() as before:
        before.setattr("persist.client.embedded.check_new", lambda _: None)
        client.create_shard("old", old, ["id"]).insert([{"id": 1, "a\x00": 5}])
    shard = client.create_shard("old", old, ["id"])
    shard.insert([{"id": 2, "a\x00": 6}])
    shard.evolve_schema(old.append(pa.field("w", pa.string())))
    shard.insert([{"id": 3, "w": "new"}])
    assert client.shard("old").snapshot().to_arrow().column("id").to_pylist() == [1, 2, 3]
    with pytest.raises(InvalidUsage, match="Nowhere/Other"):
        shard.evolve_schema(shard.schema.arrow.append(pa.field("x", pa.timestamp("us", "Nowhere/Other"))))


def test_a_change_makes_no_list_of_a_fixed_size_unreadable(location: Location) -> None:
    column = pa.field("o", pa.struct([PAIR]), nullable=False)
    shard = client_of(location).create_shard("s", pa.schema([("id", pa.int64()), column, ("x", pa.int8())]), ["id"])
    bad, fine = pa.struct([PAIR]), pa.struct([PAIR.with_nullable(True)])
    for changes in (
        [RelaxColumn("o")],
        [AddColumn("q", bad)],
        [DropColumn("x"), AddColumn("x", bad)],
        [DropColumn("o"), AddColumn("o", bad)],
    ):
        with pytest.raises(InvalidUsage, match="list of fixed size"):
            shard.alter(*changes)
    shard.alter(AddColumn("q", fine))
    shard.insert([{"id": 1, "o": {"p": [1, 2]}, "q": None}])
    assert shard.snapshot().to_arrow()["o"].to_pylist() == [{"p": [1, 2]}]
