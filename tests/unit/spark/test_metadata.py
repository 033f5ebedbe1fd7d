"""What is known of a shard as DataFrames: `option("metadata", ...)`, over a directory and over a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import persist
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import LocationSettings
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.state import Policy
from persist.spark import executors
from persist.spark.options import METADATA, Options, Target
from rpc.auth import mint
from tests.support.server import Server
from tests.support.waiting import wait_until
from tests.support.without_jvm import read, source

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return f"persist://{folder}"


@pytest.fixture(scope="module")
def shard(url: str) -> Iterator[Any]:
    """Three times, two schemas, a tag, a reader and a cursor. It is only read."""
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"], history="forever")
        shard.insert([{"k": "a", "n": 1}, {"k": "b", "n": 2}])
        shard.insert([{"k": "a", "n": 1, "__diff": -1}])
        shard.evolve_schema(pa.schema([*SCHEMA, ("more", pa.uint8())]))
        shard.insert([{"k": "c", "n": 3, "more": 1}])
        shard.tag("eom", at=1)
        shard.open_reader(1, purpose="report")
        shard.critical_reader("copy").downgrade_since(1)
        yield shard


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path, shard: Any) -> Iterator[dict[str, str]]:
    """A server that gives no more than it must."""
    token, digest = mint("reads")
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    file.write_text(json.dumps({"tokens": [{"id": "reads", "sha256": digest, "scopes": ["read"]}]}))
    with Server(folder, "--tokens", str(file)) as running:
        given = {"url": running.url, "token": token}
        yield given
        # this process keeps connections to a server
        executors.transport(Target.of(Options({**given, "path": "orders"})).connection).close()


@pytest.fixture(params=["directory", "server"])
def place(request: pytest.FixtureRequest, url: str, shard: Any) -> dict[str, str]:
    """Where the shard is read."""
    given: dict[str, str] = {"url": url} if request.param == "directory" else request.getfixturevalue("server")
    return given


def test_detail_is_one_row_of_the_shard(shard: Any, place: dict[str, str]) -> None:
    [row] = read(**place, shard="orders", metadata="detail")
    view = shard.view()
    assert (row["name"], row["shard_id"], row["since"], row["upper"]) == ("orders", str(view.shard_id), 0, 3)
    assert (row["key"], row["columns"], row["schema_id"]) == (["k"], ["k", "n", "more"], view.schema_id)
    assert (row["history_ms"], dict(row["tags"])) == (None, {"eom": 1})
    assert row["updates"] == 4
    assert row["batches"] >= 1
    assert row["parts"] >= 1
    assert row["bytes"] > 0


def test_schemas_are_a_row_for_each_column_of_each(shard: Any, place: dict[str, str]) -> None:
    rows = read(**place, shard="orders", metadata="SCHEMAS")
    told = [(r["is_current"], r["position"], r["column"], r["arrow_type"], r["spark_type"], r["is_key"]) for r in rows]
    assert told == [
        (False, 0, "k", "string", "string", True),
        (False, 1, "n", "int64", "bigint", False),
        (True, 0, "k", "string", "string", True),
        (True, 1, "n", "int64", "bigint", False),
        (True, 2, "more", "uint8", "smallint", False),
    ]
    assert len({row["schema_id"] for row in rows}) == 2


def test_parts_add_up_to_the_shard(shard: Any, place: dict[str, str]) -> None:
    rows = read(**place, shard="orders", metadata="parts")
    [detail] = read(**place, shard="orders", metadata="detail")
    assert len(rows) == detail["parts"]
    assert sum(row["updates"] for row in rows) == detail["updates"]
    assert sum(row["bytes"] for row in rows) == detail["bytes"]
    assert all(row["lower"] <= row["time_min"] <= row["time_max"] < row["upper"] for row in rows)
    assert min(row["diff_min"] for row in rows) == -1


def test_the_history_is_what_python_shows(shard: Any, place: dict[str, str]) -> None:
    whole = read(**place, shard="orders", metadata="history", maintenance="true")
    entries = shard.history(maintenance=True)
    assert [(row["place"], row["operation"], row["bytes"]) for row in whole] == [
        (entry.place, entry.operation, entry.size) for entry in entries
    ]
    assert read(**place, shard="orders", metadata="history", maintenance="true", historyLimit=2) == whole[:2]


def test_readers_and_cursors_are_told_where_the_stores_are(shard: Any, url: str) -> None:
    readers = read(url, "orders", metadata="readers")
    assert [(row["purpose"], row["since"], row["is_point"]) for row in readers] == [("report", 1, False)]
    assert readers[0]["lapses_in_s"] <= 900
    cursors = read(url, "orders", metadata="cursors")
    assert [(row["cursor"], row["since"]) for row in cursors] == [("copy", 1)]
    assert not any("opaque" in row for row in cursors), "who knows it may move the hold"


@pytest.mark.parametrize("kind", ["readers", "cursors"])
def test_a_server_does_not_tell_of_readers(server: dict[str, str], kind: str) -> None:
    with pytest.raises(InvalidUsage, match=f"a server does not return the {kind} of a shard; .* from the stores"):
        read(**server, shard="orders", metadata=kind)


def test_parts_that_lie_in_bundles_are_told_one_by_one(tmp_path: Path) -> None:
    settings = LocationSettings(policy=Policy(inline_part_bytes_max=0, plain_parts_max=1))
    url = f"persist://{tmp_path}"
    with persist.connect(url, location=settings) as client:
        assert isinstance(client.transport, EmbeddedTransport)
        writer = client.create_shard("orders", SCHEMA, ["k"]).open_writer()
        staged = [writer.stage([{"k": f"k{n}", "n": n}], None) for n in range(20)]
        writer.commit_insert(tuple(run for runs in staged for run in runs))
        machine = client.transport.location.machine("orders")
        wait_until(lambda: all(part.bundle for part in machine.refresh().trace.parts()), "the parts are bundled")
        rows = read(url, "orders", metadata="parts")
        assert (len(rows), {row["format"] for row in rows}) == (20, {"parquet"})
        assert not machine.refresh().leased_readers, "it holds nothing any more"


def test_a_schema_of_ones_own_names_some_of_the_columns(shard: Any, url: str) -> None:
    schema = StructType([StructField("updates", LongType()), StructField("format", StringType())])
    assert all(set(row) == {"updates", "format"} for row in read(url, "orders", schema, metadata="parts"))
    with pytest.raises(InvalidUsage, match="metadata=parts has no column 'updates' of type string; it has"):
        source(url, "orders", metadata="parts").reader(StructType([StructField("updates", StringType())]))


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_of_a_shard_that_is_not_there_and_of_a_column_that_is_not_there(
    shard: Any, url: str, kind: str
) -> None:
    with pytest.raises(UnknownShard, match="'nowhere'"):
        read(url, "nowhere", metadata=kind)
    with pytest.raises(InvalidUsage, match="has no column 'nope' of type string; it has"):
        source(url, "orders", metadata=kind).reader(StructType([StructField("nope", StringType())]))


def test_a_stream_of_metadata_is_refused(shard: Any, url: str) -> None:
    given = source(url, "orders", metadata="parts")
    with pytest.raises(InvalidUsage, match="option 'metadata' does not apply to a streaming read"):
        given.streamReader(given.schema()).initialOffset()
