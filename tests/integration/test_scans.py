"""Scans: other engines read a shard in place, only what they need of it, at a time that is held for them."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import persist
import persist.aio
from compactor.worker import Worker
from persist import Client, LocationSettings, Shard
from persist.client.read_leases import Hold
from persist.core import merge_plan
from persist.core.errors import Corruption, Expired, InvalidUsage, NegativeMultiplicity, NotReadable, Unavailable
from persist.core.state import Policy
from persist.parts import codec, part_files
from persist.parts.part_files import PartFile
from tests.support.clocks import HOUR_MS, World
from tests.support.server import url_of
from tests.support.waiting import WAIT_S

KINDS = pa.schema([("id", pa.int64()), ("state", pa.string()), ("amount", pa.float64())])
IN_BLOBS = LocationSettings(policy=Policy(inline_part_bytes_max=0))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with persist.connect(f"persist://{tmp_path}/data", location=IN_BLOBS) as client:
        yield client


@pytest.fixture
def shard(client: Client, monkeypatch: pytest.MonkeyPatch) -> Shard:
    """Rows 0 to 99, the last ones at time 1, when row 7 is changed; ten rows a row group; no history is kept."""
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(part_files, "WHOLE_BYTES_MAX", 0)
    found = client.create_shard("orders", KINDS, ["id"], history="none")
    found.insert([row(number) for number in range(60)])
    found.insert([*(row(number) for number in range(60, 100)), {**row(7), "__diff": -1}, row(7, "paid")])
    return found


def row(number: int, state: str = "new") -> dict[str, Any]:
    return {"id": number, "state": state, "amount": number / 2}


def readers(shard: Shard) -> int:
    machine = shard._transport.inner.location.machine(shard.name)  # type: ignore[attr-defined]
    return len(machine.refresh().leased_readers)


# --- engines


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, frozenset[str]]]:
    """Which row groups are read, and which columns of each."""
    found: list[tuple[int, frozenset[str]]] = []
    real = PartFile._source

    def source(self: PartFile, groups: Any, names: Any) -> Any:
        found.extend((group, frozenset(names)) for group in groups)
        return real(self, groups, names)

    monkeypatch.setattr(PartFile, "_source", source)
    return found


@pytest.fixture
def merged(shard: Shard) -> Shard:
    """The same rows in one file, which needs no merging."""
    shard.downgrade_since(1)
    merge(shard)
    return shard


def merge(shard: Shard) -> None:
    """All files into one."""
    location = shard._transport.inner.location  # type: ignore[attr-defined]
    with patch.object(merge_plan, "REST_FAN_IN", 1):
        Worker(location).run(shard.name, idle=True)


def with_duckdb(scan: persist.Scan) -> list[Any]:
    return duckdb.sql("select id from scan where id >= 90 and state = 'new' order by id").fetchall()


def with_polars(scan: persist.Scan) -> list[Any]:
    found = scan.polars().filter((polars.col("id") >= 90) & (polars.col("state") == "new")).select("id")
    return found.collect().rows()


def with_a_dataset_of_polars(scan: persist.Scan) -> list[Any]:
    wanted = (polars.col("id") >= 90) & (polars.col("state") == "new")
    return polars.scan_pyarrow_dataset(scan).filter(wanted).select("id").collect().rows()


def with_pyarrow(scan: persist.Scan) -> list[Any]:
    found = scan.to_table(columns=["id"], filter=(pc.field("id") >= 90) & (pc.field("state") == "new"))
    return [(number,) for number in found["id"].to_pylist()]


@pytest.mark.parametrize("engine", [with_duckdb, with_polars, with_a_dataset_of_polars, with_pyarrow])
def test_an_engine_reads_only_the_columns_and_row_groups_that_it_needs(
    merged: Shard, read: list[tuple[int, frozenset[str]]], engine: Callable[[persist.Scan], list[Any]]
) -> None:
    with merged.scan() as scan:
        assert engine(scan) == [(number,) for number in range(90, 100)]
    assert {group for group, _ in read} == {9}
    assert {name for _, names in read for name in names} <= {"id", "state"}


def test_whatever_reads_arrow_reads_a_scan(shard: Shard) -> None:
    with shard.scan(where="id < 8 AND id > 5", columns=["id", "state"]) as scan:
        rows = [{"id": 6, "state": "new"}, {"id": 7, "state": "paid"}]
        assert pa.table(scan).to_pylist() == rows
        assert scan.to_reader().read_all().to_pylist() == rows
        assert [found.to_pylist() for found in scan.to_batches(batch_size=1)] == [[one] for one in rows]
        assert polars.DataFrame(scan).to_dicts() == rows
        assert pandas.DataFrame.from_arrow(scan).to_dict("records") == rows
        assert scan.to_table(columns={"twice": pc.field("id") * 2}).to_pylist() == [{"twice": 12}, {"twice": 14}]
        assert scan.filter(pc.field("state") == "paid").filter(pc.field("id") > 0).to_table().to_pylist() == rows[1:]
        assert scan.filter(pc.field("state") == "paid").polars().select("id").collect().rows() == [(7,)]
        assert scan.filter(pc.field("state") == "paid").duckdb().fetchall() == [(7, "paid")]
        assert (scan.count_rows(), scan.count_rows(pc.field("id") > 6), scan.head(1).num_rows) == (2, 1, 1)
        assert scan.polars().select(polars.len()).collect().item() == 2
        assert scan.polars().head(1).collect().rows() == [(6, "new")]
        assert (scan.shard, scan.as_of, scan.schema.names) == ("orders", 1, ["id", "state"])


def test_a_row_that_was_taken_away_too_often_is_told_where_it_would_be_shown(shard: Shard) -> None:
    shard.insert([{**row(300), "__diff": -1}])
    with shard.scan() as scan:
        for read_all in (scan.to_table, scan.count_rows, lambda: scan.polars().collect()):
            with pytest.raises(NegativeMultiplicity):
                read_all()
        with pytest.raises(duckdb.Error, match="retracted more often than added"):
            duckdb.sql("select sum(id) from scan").fetchall()
        assert scan.count_rows(pc.field("id") < 300) == 100


def test_two_row_groups_of_which_one_is_left_out_take_no_row_away_too_often(shard: Shard) -> None:
    """Regression: Polars skipped what an insertion lay in, but not its retraction, which then was there -1 times."""
    shard.insert([{**row(50), "__diff": -1}, row(51, "zz")])
    with shard.scan() as scan:
        assert scan.polars().filter(polars.col("state") == "zz").collect()["id"].to_list() == [51]
        assert scan.to_table(filter=pc.field("state") == "zz")["id"].to_pylist() == [51]


# --- what DuckDB reads by itself


def is_by_itself(relation: Any) -> bool:
    return "PARQUET" in relation.explain().upper()


@pytest.mark.parametrize("kind", ["directory", "server"])
def test_duckdb_reads_files_by_itself_that_have_their_rows_as_they_are(kind: str, tmp_path: Path) -> None:
    with url_of(kind, tmp_path) as url, persist.connect(url) as client:
        shard = client.create_shard("orders", KINDS, ["id"])
        rows = pa.table({"id": range(20_000), "state": ["new"] * 20_000, "amount": [0.5] * 20_000})
        shard.insert(rows)
        shard.insert([row(30_000)])  # which lies in the log, and in no file
        with shard.scan() as scan, duckdb.connect() as connection:
            found = scan.duckdb(connection)
            assert is_by_itself(found)
            assert connection.sql("select count(*), max(id) from found where id > 19990").fetchall() == [(10, 30_000)]
            found.create_view("orders")
            del found, scan
            gc.collect()
            assert connection.sql("select sum(amount) from orders").fetchall() == [(25_000.0,)]


def test_duckdb_loses_no_nan_by_the_bounds_in_files(client: Client) -> None:
    """Regression: NaN is more than all numbers to DuckDB, but the bounds by which it skips row groups leave it out."""
    kinds = pa.schema([("id", pa.int64()), ("f", pa.float64()), ("st", pa.struct([("x", pa.float32())]))])
    within = client.create_shard("within", kinds, ["id"])
    plain = client.create_shard("plain", pa.schema(list(kinds)[:2]), ["id"])
    for shard in (within, plain):
        rows = [{"id": 1, "f": math.nan, "st": {"x": math.nan}}, {"id": 2, "f": -0.0, "st": {"x": -0.0}}]
        shard.insert(pa.Table.from_pylist(rows, shard.schema.arrow))
    with plain.scan() as scan:
        relation = scan.duckdb()
        assert is_by_itself(relation)
        assert [number for number, _ in relation.filter("f > 5").fetchall()] == [1]
        assert str(relation.filter("f = 0").fetchall()) == "[(2, -0.0)]"
    with within.scan() as scan:
        relation = scan.duckdb()
        assert not is_by_itself(relation)
        assert [number for number, *_ in relation.filter("st.x > 5").fetchall()] == [1]


@pytest.mark.parametrize("kind", [pa.float16(), pa.list_(pa.float16()), pa.struct([("x", pa.float16())])])
def test_half_floats_are_widened_for_duckdb_or_refused(client: Client, kind: pa.DataType) -> None:
    """DuckDB has no Arrow half floats, which it said when a query read them."""
    shard = client.create_shard("halves", pa.schema([("id", pa.int64()), ("h", kind)]), ["id"])
    value: Any = {pa.float16(): 1.5, pa.list_(pa.float16()): [1.5, None]}.get(kind, {"x": 1.5})
    shard.insert([{"id": 1, "h": value}, {"id": 2, "h": None}])
    assert shard.snapshot().to_duckdb().fetchall() == [(1, value), (2, None)]
    with shard.scan() as scan, pytest.raises(InvalidUsage, match="'h'"):
        scan.duckdb()
    with shard.scan(columns=["id"]) as scan:
        assert scan.duckdb().fetchall() == [(1,), (2,)]


def test_what_needs_merging_comes_from_the_scan(shard: Shard, merged: Shard) -> None:
    with merged.scan() as scan:
        assert is_by_itself(scan.duckdb())
    merged.insert([{**row(7, "paid"), "__diff": -1}, row(7, "sent")])
    with merged.scan() as scan:
        assert not is_by_itself(scan.duckdb())
        assert scan.duckdb().filter("id = 7").fetchall() == [(7, "sent", 3.5)]
    with merged.scan(1) as scan:  # the time before it, in the same files
        assert is_by_itself(scan.duckdb())
        assert scan.duckdb().filter("id = 7").fetchall() == [(7, "paid", 3.5)]


def test_types_that_duckdb_reads_otherwise_come_from_the_scan(client: Client) -> None:
    shard = client.create_shard("spans", pa.schema([("id", pa.int64()), ("took", pa.duration("us"))]), ["id"])
    shard.insert(pa.table({"id": range(10), "took": pa.array(range(10), pa.duration("us"))}))
    with shard.scan() as scan:
        found = scan.duckdb()
        assert not is_by_itself(found)
        assert [str(kind) for kind in found.types] == ["BIGINT", "INTERVAL"]


def test_a_file_that_is_gone_is_told(merged: Shard, tmp_path: Path) -> None:
    with merged.scan() as scan:
        relation = scan.duckdb()
        for path in (tmp_path / "data").rglob("*.parquet"):
            path.rename(path.with_suffix(".gone"))
        with pytest.raises(duckdb.Error, match=r"\.parquet"):
            relation.fetchall()
        with pytest.raises(duckdb.Error, match="is missing"):
            scan.duckdb().fetchall()
        with pytest.raises(Corruption, match="is missing"):
            scan.to_table()


# --- one time, however often


def test_a_time_is_named_in_every_way(client: Client, shard: Shard) -> None:
    shard.tag("before", at=0)
    assert shard.scan(0).filter(pc.field("id") == 7).to_table()["state"].to_pylist() == ["new"]
    assert shard.scan(tag="before").as_of == 0
    assert shard.scan(-1).count_rows() == 0
    by_then = shard.scan(datetime.now(UTC) + timedelta(seconds=1), wait_s=WAIT_S)
    assert (by_then.as_of, by_then.timestamp is None) == (1, False)
    assert client.create_shard("fresh", KINDS, ["id"]).scan().to_table().num_rows == 0


# --- its hold


def test_a_scan_holds_its_time_until_it_is_closed(shard: Shard) -> None:
    scan = shard.scan()
    relation, frame = scan.duckdb(), scan.polars()
    assert readers(shard) == 1
    scan.close()
    scan.close()
    assert readers(shard) == 0
    assert "closed" in repr(scan)
    message = r"the scan of shard 'orders' as of 1 is closed; call shard.scan\(\) again"
    for read_again in (scan.to_table, scan.keep, frame.collect, scan.count_rows):
        with pytest.raises(Expired, match=message):
            read_again()
    with pytest.raises(duckdb.Error, match=message):
        relation.fetchall()


def test_a_read_that_is_under_way_ends_when_the_scan_is_closed(shard: Shard) -> None:
    scan = shard.scan()
    batches = scan.to_batches(batch_size=1)
    next(batches)
    scan.close()
    with pytest.raises(Expired, match="is closed"):
        list(shard_tables(scan))


def shard_tables(scan: persist.Scan) -> Iterator[pa.Table]:
    return scan._rows.tables(["id"])


@pytest.mark.parametrize("keeper", ["scan", "relation", "frame", "filtered"])
def test_the_hold_is_given_back_when_nobody_refers_to_it(shard: Shard, keeper: str) -> None:
    scan: persist.Scan | None = shard.scan()
    assert scan is not None
    kept = {
        "scan": scan,
        "relation": scan.duckdb(duckdb.connect()),
        "frame": scan.polars(),
        "filtered": scan.filter(pc.field("id") > 1),
    }[keeper]
    del scan
    gc.collect()
    assert readers(shard) == 1
    del kept
    gc.collect()
    assert readers(shard) == 0


def test_a_hold_that_was_lost_is_told() -> None:
    world = World()
    found = world.machine().client.create_shard("orders", KINDS, ["id"], history="none")
    found.insert([row(1)])
    with found.scan() as scan:
        for _ in range(3):  # as a machine that was suspended, whose thread did not run
            world.pass_ms(HOUR_MS)
            found.insert([row(2)])
        with pytest.raises(Expired, match="is gone"):
            scan.to_table()


class Noted:
    """A lease of which is noted when it is renewed and given back."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.renewed = threading.Semaphore(0)
        self.given_back = threading.Event()

    def keep(self) -> None:
        self.renewed.release()
        if self.errors:
            raise self.errors.pop(0)

    def close(self) -> None:
        self.given_back.set()

    release = close


def test_a_hold_is_renewed_by_itself_also_after_a_server_was_away() -> None:
    lease: Any = Noted(Unavailable("nobody answers"))
    hold = Hold(lease, lease_ms=60)
    for _ in range(3):
        assert lease.renewed.acquire(timeout=WAIT_S)
    assert not lease.given_back.is_set()
    hold.close()
    assert lease.given_back.is_set()


def test_a_hold_that_is_gone_is_renewed_no_more() -> None:
    lease: Any = Noted(Expired("gone"))
    before = threading.active_count()
    hold = Hold(lease, lease_ms=60)
    assert lease.renewed.acquire(timeout=WAIT_S)
    while threading.active_count() > before:
        threading.Event().wait(0.01)
    assert not lease.renewed.acquire(blocking=False)
    del hold
    assert lease.given_back.wait(WAIT_S)


# --- other doors, and what is refused


@pytest.mark.parametrize("kind", ["directory", "server"])
def test_asyncio_gives_the_same_scan(kind: str, tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with persist.aio.connect(url) as client:
            shard = await client.create_shard("orders", KINDS, ["id"])
            await shard.insert([row(1), row(2)])
            with await shard.scan(columns=["id"]) as scan:
                found = duckdb.connect().from_arrow(scan).aggregate("sum(id)")
                assert await asyncio.to_thread(found.fetchall) == [(3,)]

    with url_of(kind, tmp_path) as url:
        asyncio.run(main(url))


REFUSED: dict[str, Callable[[Shard], object]] = {
    "`columns` that is empty": lambda shard: shard.scan(columns=[]),
    "`as_of` and `tag` together": lambda shard: shard.scan(1, tag="before"),
    "a column that the scan has not, in `columns` or `filter`": lambda shard: shard.scan().to_table(["nope"]),
    "a `filter` that compares what Arrow does not": lambda shard: shard.scan().to_table(filter=pc.field("id") > "a"),
    "a `filter` that is no expression of Arrow's": lambda shard: shard.scan().to_table(filter="id > 1"),
    "`batch_size` below 1": lambda shard: shard.scan().scanner(batch_size=0),
    "an argument that datasets of pyarrow do not have": lambda shard: shard.scan().scanner(rows=1),
    "`get_fragments`": lambda shard: list(shard.scan().get_fragments()),
    "`replace_schema`": lambda shard: shard.scan().replace_schema(KINDS),
    "a scan in `pyarrow.dataset.dataset([...])`": lambda shard: ds.dataset([shard.scan()]),
    "`sort_by`": lambda shard: shard.scan().sort_by([("amount", "descending")], null_placement="at_end"),
    "`join`": lambda shard: shard.scan().join(shard.scan(), "id", right_suffix="r"),
    "`join_asof`": lambda shard: shard.scan().join_asof(shard.scan(), "id", ["state"], 1),
    "a scan that is pickled": lambda shard: shard.scan().__reduce__(),
}


def test_what_is_refused_leaves_no_hold(shard: Shard) -> None:
    for what, call in REFUSED.items():
        with pytest.raises(InvalidUsage) as refused:
            call(shard)
        assert "\n" not in refused.value.message, what
    del refused
    gc.collect()
    assert readers(shard) == 0


def test_a_time_that_was_forgotten_is_refused(shard: Shard) -> None:
    shard.downgrade_since(1)
    with pytest.raises(NotReadable):
        shard.scan(0)


def test_pyarrows_own_code_gets_no_rows_behind_the_scan(shard: Shard) -> None:
    """Else it would find none, and nobody would be told."""
    missing = r"a scan is read by scanner\(\), to_table\(\) or to_reader\(\)"
    with shard.scan() as scan, pytest.raises(FileNotFoundError, match=missing):
        ds.UnionDataset(scan.schema, [scan]).to_table()
