"""The founding paper's example as PySpark jobs in DC2: they read S11 and S12 near, and write S2 at home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist
from examples import regions
from persist.spark import ShardTable, executors
from tests.support.two_regions import SCHEMA, TwoCentres


@pytest.fixture
def centres(tmp_path: Path) -> Iterator[TwoCentres]:
    made = TwoCentres(tmp_path)
    yield made
    made.close()


def test_a_batch_and_streams_over_two_regions(spark: Any, centres: TwoCentres, tmp_path: Path) -> None:
    url = centres.dc2.url
    with persist.connect(centres.dc1.url) as ingest:
        for name in (regions.S11, regions.S12):
            shard = ingest.create_shard(name, SCHEMA, ["id"])
            for number in range(4):
                shard.insert([{"id": number, "v": f"{name} {number}"}])
    with persist.connect(url) as client:
        client.create_shard(regions.S2, SCHEMA, ["id"])
    for name in (regions.S11, regions.S12):
        centres.arrived(name, 4)
    assert regions.summarise(spark, url) == 4
    with persist.connect(url) as client:
        assert sorted(client.shard(regions.S2).snapshot().to_arrow().column("id").to_pylist()) == [0, 2, 4, 6]

    seen: list[tuple[str, int]] = []
    checkpoints = str(tmp_path / "checkpoints")
    regions.follow(spark, url, checkpoints, lambda name, ids: seen.extend((name, one) for one in ids))
    assert sorted(seen) == [*(("dc1/s12", n) for n in range(4)), *(("dc2/s2", n) for n in (0, 2, 4, 6))]

    # The copy is away for a while: the stream goes on at home with the same checkpoint.
    seen.clear()
    with persist.connect(centres.dc1.url) as ingest:
        ingest.shard(regions.S12).insert([{"id": 50, "v": "later"}])

    def noted(name: str, ids: list[int]) -> None:
        seen.extend((name, one) for one in ids)

    regions.follow(spark, centres.dc1.url, checkpoints, noted, [regions.S12])
    assert seen == [("dc1/s12", 50)]


def test_a_frame_is_written_home_from_another_region(spark: Any, centres: TwoCentres) -> None:
    frame = spark.range(8).selectExpr("id + 100 as id", "cast(id as string) as v")
    write = frame.write.format("persist").options(url=centres.dc2.url, key="id")
    write.mode("append").save("dc1/made-in-dc2")
    with persist.connect(centres.dc1.url) as home:
        shard = home.shard("dc1/made-in-dc2")
        assert shard.snapshot().to_arrow().num_rows == 8
        centres.arrived("dc1/made-in-dc2", 1)
        shard.insert([{"id": 1, "v": "late"}])  # which the copy need not have yet
        table = ShardTable.for_name(spark, "dc1/made-in-dc2", url=centres.dc2.url)
        done = table.update("v = 'late'", {"v": "'seen'"})
        for target in (table._near, table._named.at(writes=True)):  # this process keeps connections to servers
            executors.transport(target.connection).close()
        assert done.time == 2
        assert "seen" in shard.snapshot().to_arrow().column("v").to_pylist()
