"""What surprised a PySpark engineer: options that meant nothing, names of two meanings, places that were mistyped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import persist
from persist.client.client import Client
from persist.core.errors import InvalidUsage, NotReadable, PersistError, UnknownShard
from persist.parts import schema_changes
from persist.spark import options as option_names
from persist.spark import table
from persist.spark.options import Options, Target
from tests.support.without_jvm import read, rows_of, source, write, writer

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def made(client: Client) -> Any:
    """Four rows, at times 0 to 3."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for number in range(4):
        shard.insert([{"k": f"k{number}", "n": number}])
    return shard


@pytest.fixture
def shard(client: Client) -> Any:
    return made(client)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where such a shard is that is only read."""
    url = f"persist://{tmp_path_factory.mktemp('kept')}/shards"
    with persist.connect(url) as client:
        made(client)
    return url


def test_each_option_that_is_read_is_known() -> None:
    """`certificateFile` was documented and read, and refused as unknown."""
    folder = Path(option_names.__file__).parent
    reads = re.compile(r'\boptions\.(?:text|choice|integer|size|seconds|flag|names|values|mapping|has)\("(\w+)"')
    read_names = {name for path in folder.glob("*.py") for name in reads.findall(path.read_text())}
    assert "certificateFile" in read_names
    assert read_names - {name for names in option_names.ALLOWED.values() for name in names} == set()


def test_a_server_is_told_our_certificate(tmp_path: Path) -> None:
    files = {"caFile": str(tmp_path / "ca.pem"), "certificateFile": str(tmp_path / "me.pem")}
    connection = Target.of(Options({"url": "https://host:1", "path": "orders", **files})).connection
    assert (connection.ca_file, connection.certificate_file) == tuple(files.values())
    with pytest.raises(InvalidUsage, match="ca_file"):
        source("https://host:1", "orders", **files).schema()


FEED = {"readChangeFeed": "true"}
# What is refused of a read, by the interface that Spark calls.
READS: list[tuple[dict[str, str], str]] = [
    ({"nonsense": "1"}, "option 'nonsense' is unknown"),
    ({**FEED, "startingVersion": "latest"}, "startingVersion=latest is for streams"),
    ({"startingVersion": "2"}, "option 'startingVersion' does not apply to a snapshot; it applies to readChangeFeed"),
    (
        {"startingTimestamp": "2026-01-01T00:00:00Z"},
        "option 'startingTimestamp' does not apply to a snapshot; it applies to readChangeFeed",
    ),
    ({"timeUnit": "s"}, "option 'timeUnit' does not apply to a snapshot; it applies to readChangeFeed"),
    (
        {**FEED, "multiplicity": "column"},
        "option 'multiplicity' does not apply to readChangeFeed; it applies to a snapshot",
    ),
    ({**FEED, "startingVersion": "earliest"}, "option 'startingVersion' is 'earliest'; it must be a whole number"),
    ({"tag": "eom 10"}, "is no name of a tag"),
    ({"tag": "eom", "asOf": "1"}, "are exclusive; give one"),
    ({**FEED, "tag": "eom"}, "option 'tag' does not apply to readChangeFeed; it applies to a snapshot"),
    ({"timestampAsOf": "2024-01-01"}, "must be an instant with its zone"),
    ({"timestampAsOf": "2024-01-01T00:00:00Z", "asOf": "1"}, "are exclusive; give one"),
    ({"asOf": "soon"}, "option 'asOf' is 'soon'; it must be a whole number"),
    ({"asOf": "1", "versionAsOf": "1"}, "are exclusive; give one"),
    ({"numPartitions": "0"}, "option 'numPartitions' is 0; it must be in"),
    ({"columns": "n,nope"}, "the shard has no column 'nope'; its columns are k, n"),
    ({"multiplicity": "maybe"}, "option 'multiplicity' is 'maybe'; it must be one of expand, column"),
    ({"batchRows": "0"}, "option 'batchRows' is 0; it must be in"),
    ({"expectedUpper": "0"}, "option 'expectedUpper' does not apply to a snapshot; it applies to a batch write"),
    ({"keyPrefix": '["a", 1]'}, r"option 'keyPrefix' has 2 values; the key is \(k\)"),
    ({"blob": "mem:"}, "give either a url, or a blob and a consensus location, not both"),
    ({"start": "1"}, "option 'start' does not apply to a snapshot; it applies to readDiff"),
    ({"readDiff": "yes", "start": "1"}, "option 'readDiff' is 'yes'; it must be true or false"),
    ({"readDiff": "true"}, "readDiff needs option 'start'"),
    ({"readDiff": "true", "start": "soon"}, "option 'start' is 'soon'; it must be a time such as 416"),
    ({"readDiff": "true", "start": "0", "where": "n = 1"}, "'where' does not apply to readDiff"),
    ({"readDiff": "true", "start": "0", "asOf": "1"}, "'asOf' does not apply to readDiff"),
    ({"readDiff": "true", "start": "0", "readChangeFeed": "true"}, "'readChangeFeed' does not apply to readDiff"),
    ({"metadata": "history", "start": "0"}, "'start' does not apply to metadata=history"),
    ({"historyLimit": "3"}, "'historyLimit' does not apply to a snapshot; it applies to metadata=history"),
    ({"metadata": "history", "historyLimit": "0"}, "'historyLimit' is 0"),
    ({"metadata": "history", "asOf": "3"}, "'asOf' does not apply to metadata=history"),
    ({"metadata": "files"}, "'metadata' is 'files'; it must be one of history, parts, readers, cursors, schemas"),
    ({"metadata": ""}, "option 'metadata' is ''; it must be one of"),
    ({"metadata": "parts", "where": "n = 1"}, "option 'where' does not apply to metadata=parts"),
    ({"metadata": "parts", "historyLimit": "1"}, "option 'historyLimit' does not apply to"),
    ({"metadata": "parts", "readDiff": "true", "start": "1"}, "'readDiff' does not apply to"),
    ({"metadata": "detail", **FEED}, "option 'readChangeFeed' does not apply to"),
    ({"changeImages": "true"}, "option 'changeImages' does not apply to a snapshot; it applies to readChangeFeed"),
    ({**FEED, "changeImages": "yes"}, "option 'changeImages' is 'yes'; it must be true or false"),
    ({"readDiff": "true", "start": "9", "waitSeconds": "0.01"}, "wait longer"),
    ({"readDiff": "true", "start": "2020-01-01T00:00:00Z"}, "nothing was written"),
]


@pytest.mark.parametrize(("options", "sentence"), READS, ids=[str(options) for options, _ in READS])
def test_a_bad_option_of_a_read_is_refused(kept: str, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(PersistError, match=sentence):
        read(kept, "orders", **options)


def test_as_of_minus_one_a_shard_is_empty_for_ever(client: Client, shard: Any, url: str) -> None:
    """-1 was told for a shard to which nothing was written, and refused when it was given back."""
    client.create_shard("fresh", SCHEMA, ["k"])
    for name in ("fresh", "orders"):
        assert read(url, name, asOf=-1) == read(url, name, versionAsOf="-1", where="n > 0") == []
    assert read(url, "orders", metadata="readers") == [], "there is nothing to hold"
    assert read(url, "fresh", readDiff="true", start=-1) == []
    first = {"k": "k0", "n": 0}
    assert read(url, "orders", readDiff="true", start=-1, end=0) == [{**first, "__diff": 1}]
    assert read(url, "orders", readDiff="true", start=0, end=-1) == [{**first, "__diff": -1}]
    with pytest.raises(InvalidUsage, match=r"option 'asOf' is -2; it must be in \[-1, "):
        read(url, "orders", asOf=-2)


def test_minus_one_is_forgotten_with_the_history_from_the_beginning(shard: Any, url: str) -> None:
    shard.forget(1)
    for options in ({"asOf": -1}, {"readDiff": "true", "start": -1}):
        with pytest.raises(NotReadable, match="its history was forgotten"):
            read(url, "orders", **options)


def test_a_time_unit_of_a_stream_without_a_feed_is_refused(shard: Any, url: str) -> None:
    given = source(url, "orders", timeUnit="s")
    with pytest.raises(
        InvalidUsage, match="option 'timeUnit' does not apply to a snapshot; it applies to readChangeFeed"
    ):
        given.schema()
    with pytest.raises(
        InvalidUsage, match="option 'timeUnit' does not apply to a streaming read; it applies to readChangeFeed"
    ):
        given.streamReader(source(url, "orders").schema()).initialOffset()


@pytest.mark.parametrize(
    ("start", "rows"),
    [("earliest", 4), ("EARLIEST", 4), ('{"time": 3}', 1), ("3", 1), ("latest", 0)],
)
@pytest.mark.parametrize("name", ["startingVersion", "startingOffsets"])
def test_starting_version_of_a_stream_is_another_name_of_starting_offsets(
    kept: str, name: str, start: str, rows: int
) -> None:
    """`earliest` and a JSON object were refused under the one name."""
    for number, feed in enumerate(({}, FEED)):
        cursor = {"cursor": f"{name}{number}"} if start == "latest" else {}
        given = source(kept, "orders", **{name: start, **feed}, **cursor)
        reader = given.streamReader(given.schema())
        first = reader.initialOffset()
        last = reader.latestOffset(first, ReadAllAvailable())
        assert len(rows_of(reader, reader.partitions(first, last))) == rows  # type: ignore[arg-type]
        reader.stop()


def test_both_names_of_the_start_of_a_stream_are_refused(shard: Any, url: str) -> None:
    given = source(url, "orders", startingVersion="1", startingOffsets="1")
    with pytest.raises(InvalidUsage, match="'startingOffsets' and 'startingVersion' are exclusive; give one"):
        given.streamReader(given.schema()).initialOffset()


def rows(**columns: Any) -> pa.Table:
    return pa.table({"k": ["a"], "n": [1], **columns})


WRITES = [
    (rows(), {}, r"option\('key', 'id'\)"),
    (rows(), {"key": "id"}, "key column 'id' is not among the columns"),
    (rows(), {"key": "k", "newUpper": 4}, "option 'newUpper' needs 'expectedUpper'"),
    (rows(), {"key": "k", "timeColumn": "n"}, "option 'timeColumn' needs 'expectedUpper'"),
    (rows(), {"key": "k", "diffColumn": "d"}, "names 'd', which is not a column of the DataFrame"),
    (rows(), {"key": "k", "asOf": 4}, "option 'asOf' does not apply to a batch write"),
    (rows(), {"key": "k", "info": "{"}, "option 'info'"),
    (rows(__diff=[1]), {"restoreTo": 0}, "'restoreTo' needs 'expectedUpper'"),
    (rows(__diff=[1]), {"restoreTo": -1, "expectedUpper": 4}, "option 'restoreTo' is -1; it must be in"),
    (
        rows(__diff=[1]),
        {"restoreTo": 0, "expectedUpper": 4, "newUpper": 9},
        "'newUpper' does not apply to a write with restoreTo",
    ),
    (
        rows(__diff=[1]),
        {"restoreTo": 0, "expectedUpper": 4, "txnAppId": "a", "txnVersion": 1},
        "'txnAppId' does not apply to a write with restoreTo",
    ),
]


@pytest.mark.parametrize(("table", "options", "sentence"), WRITES)
def test_a_bad_option_of_a_write_is_refused(
    client: Client, url: str, table: pa.Table, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidUsage, match=sentence):
        write(url, "orders", table, **options)
    assert client.shards() == []


RESERVED = [
    (rows(_change_type=["x"]), {}, "cannot have a column '_change_type', which is a column of the change feed"),
    (rows(_commit_version=[1]), {}, "cannot have a column '_commit_version'"),
    (rows(_commit_timestamp=["x"]), {}, "cannot have a column '_commit_timestamp'"),
    (rows(_change_type=["x"]), {"envelope": "upsert"}, "cannot have a column '_change_type'"),
    (rows(__diff=[5]), {}, "has a column __diff, the name of the multiplicity column: set diffColumn=__diff"),
    (rows(__diff=[5]), {"envelope": "upsert"}, "has a column __diff"),
    (rows(__diff=["5"], d=[1]), {"diffColumn": "d"}, "a column occurs twice"),
    (rows(__time=[5]), {}, "has a column __time, .* and timeColumn=__time; or drop the column"),
    (rows(__time=[5]), {"expectedUpper": 0, "newUpper": 9}, "has a column __time"),
]


@pytest.mark.parametrize(("table", "options", "sentence"), RESERVED)
@pytest.mark.parametrize("is_new", [True, False], ids=["new shard", "shard that is there"])
def test_a_column_of_a_name_that_means_something_else_is_refused(
    client: Client, url: str, table: pa.Table, options: dict[str, Any], sentence: str, is_new: bool
) -> None:
    """The feed had two columns of one name, and a row with `__diff` 5 became five rows."""
    if not is_new:
        client.create_shard("orders", SCHEMA, ["k"])
        sentence = (
            sentence.replace(r"cannot have a column '", "the DataFrame has the column '")
            .split(":")[0]
            .split(", which")[0]
        )
    with pytest.raises(InvalidUsage, match=sentence):
        write(url, "orders", table, key="k", **options)
    assert client.shards() == ([] if is_new else ["orders"])
    assert is_new or client.shard("orders").upper().element == 0


def test_the_names_of_times_and_diffs_serve_where_options_say_that_they_are_those(client: Client, url: str) -> None:
    given = rows(__time=[5], __diff=[3])
    write(url, "orders", given, key="k", timeColumn="__time", diffColumn="__diff", expectedUpper=0, newUpper=9)
    assert client.shard("orders").snapshot(5).to_arrow().to_pylist() == [{"k": "a", "n": 1, "__diff": 3}]


def test_a_feed_of_a_shard_that_has_such_a_column_is_refused_and_other_reads_are_not(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python once made such shards."""
    with monkeypatch.context() as once:
        once.setattr(schema_changes, "RESERVED", frozenset())
        shard = client.create_shard("orders", pa.schema([*SCHEMA, ("_change_type", pa.string())]), ["k"])
    shard.insert([{"k": "a", "n": 1, "_change_type": "x"}])
    with pytest.raises(InvalidUsage, match="has a column '_change_type', which is also a column of the change feed"):
        read(url, "orders", **FEED)
    [change] = read(url, "orders", columns="k,n", **FEED)
    assert (change["_change_type"], change["n"]) == ("insert", 1)
    assert read(url, "orders") == [{"k": "a", "n": 1, "_change_type": "x"}]
    write(url, "orders", rows(_change_type=["y"]))
    assert len(read(url, "orders")) == 2


def test_a_read_of_a_mistyped_place_makes_nothing_and_names_it(tmp_path: Path, shard: Any, url: str) -> None:
    """It made a place of that name, and said that it had no such shard."""
    typo = f"persist://{tmp_path}/shrads"
    (tmp_path / "empty").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    for wrong in (typo, f"persist://{tmp_path}/empty"):
        for asked in ({}, FEED, {"metadata": "history"}, {"readDiff": "true", "start": "0"}, {"asOf": "1"}):
            with pytest.raises(UnknownShard, match=f"because {wrong} holds no shards"):
                read(wrong, "orders", **asked)
        with pytest.raises(UnknownShard, match=f"because {wrong} holds no shards"):
            source(wrong, "orders").streamReader(source(url, "orders").schema()).initialOffset()
        with pytest.raises(UnknownShard, match=f"{wrong} holds no shards .* A write with option 'key' creates"):
            writer(wrong, "orders", SCHEMA)
        with pytest.raises(UnknownShard, match=f"because {wrong} holds no shards"):
            table(None, "orders", url=wrong)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_read_of_mistyped_stores_makes_nothing_and_names_them(tmp_path: Path, shard: Any) -> None:
    there, log = f"file://{tmp_path}/shards/blob", f"sqlite://{tmp_path}/shards/consensus.db"
    for blob, consensus in ((f"file://{tmp_path}/blbo", log), (there, f"sqlite://{tmp_path}/log.db")):
        with pytest.raises(UnknownShard, match=f"{blob} and {consensus} holds no shards"):
            persist.spark.PersistDataSource({"blob": blob, "consensus": consensus, "path": "orders"}).schema()
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_a_shard_that_is_not_there_is_told_with_the_place(shard: Any, url: str) -> None:
    with pytest.raises(UnknownShard, match=rf"no shard 'ordres' .*location: {url}\)"):
        read(url, "ordres")
