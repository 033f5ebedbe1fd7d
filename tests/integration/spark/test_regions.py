"""The founding paper's example as PySpark jobs in DC2: they read S11 and S12 near, and write S2 at home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist
from tests.support.two_regions import SCHEMA, TwoCentres


@pytest.fixture
def centres(tmp_path: Path) -> Iterator[TwoCentres]:
    made = TwoCentres(tmp_path)
    yield made
    made.close()


def test_a_batch_and_streams_over_two_regions(spark: Any, centres: TwoCentres, tmp_path: Path) -> None:
    url = centres.dc2.url
    with persist.connect(centres.dc1.url) as ingest:
        for name in ("dc1/s11", "dc1/s12"):
            shard = ingest.create_shard(name, SCHEMA, ["id"])
            for number in range(4):
                shard.insert([{"id": number, "v": f"{name} {number}"}])
    with persist.connect(url) as client:
        client.create_shard("dc2/s2", SCHEMA, ["id"])
    for name in ("dc1/s11", "dc1/s12"):
        centres.arrived(name, 4)
    batch = spark.read.format("persist").option("url", url).option("asOf", 3).load("dc1/s11")
    assert batch.count() == 4
    doubled = batch.selectExpr("id * 2 as id", "v")
    doubled.write.format("persist").option("url", url).mode("append").save("dc2/s2")
    with persist.connect(url) as client:
        assert sorted(client.shard("dc2/s2").snapshot().to_arrow().column("id").to_pylist()) == [0, 2, 4, 6]

    seen: list[tuple[str, int]] = []
    for name in ("dc1/s12", "dc2/s2"):
        stream = spark.readStream.format("persist").option("url", url).load(name)

        def collected(rows: Any, _: int, name: str = name) -> None:
            seen.extend((name, row["id"]) for row in rows.collect())

        written = stream.writeStream.foreachBatch(collected).option("checkpointLocation", str(tmp_path / name))
        query = written.trigger(availableNow=True).start()
        query.awaitTermination()
    assert sorted(seen) == [*(("dc1/s12", n) for n in range(4)), *(("dc2/s2", n) for n in (0, 2, 4, 6))]

    # A DataFrame that is written to a shard of DC1 from DC2 goes home as well.
    batch.selectExpr("id + 100 as id", "v").write.format("persist").option("url", url).mode("append").save("dc1/s11")
    with persist.connect(centres.dc1.url) as home:
        assert home.shard("dc1/s11").snapshot().to_arrow().num_rows == 8
