"""PySpark jobs in two regions, while the home of one is lost: batches and a stream go on at the new home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist
from tests.integration.test_region_disaster import files, promoted, servers
from tests.support.disaster import NAMES, Disaster
from tests.support.waiting import wait_until

ORDERS = NAMES[0]
SERVERS = pytest.param("postgres-s3", marks=[pytest.mark.services, pytest.mark.proof])


@pytest.fixture(params=["files", SERVERS])
def disaster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disaster]:
    stores = files(tmp_path) if request.param == "files" else servers(request, tmp_path.name.replace("-", "_"))
    made = Disaster(tmp_path, stores)
    yield made
    made.close()


def read(spark: Any, url: str) -> set[int]:
    frame = spark.read.format("persist").option("url", url).load(ORDERS)
    return {row["id"] for row in frame.select("id").collect()}


def write(spark: Any, disaster: Disaster, url: str, first: int) -> None:
    frame = spark.range(first, first + 20).selectExpr("id", "'by spark' as v")
    frame.write.format("persist").options(url=url, key="id").mode("append").save(ORDERS)
    disaster.acknowledged[ORDERS] |= set(range(first, first + 20))


def follow(spark: Any, url: str, checkpoint: Path, seen: list[int]) -> None:
    """What has come since the checkpoint."""

    def noted(frame: Any, batch: int) -> None:
        seen.extend(row["id"] for row in frame.select("id").collect())

    source = spark.readStream.format("persist").option("url", url).load(ORDERS)
    query = source.writeStream.foreachBatch(noted).option("checkpointLocation", str(checkpoint))
    query.trigger(availableNow=True).start().awaitTermination()


def test_jobs_go_on_at_the_new_home(spark: Any, disaster: Disaster, tmp_path: Path) -> None:
    here, stores = disaster.region.url, disaster.stores
    write(spark, disaster, disaster.home.url, 10_000)
    disaster.arrived()
    seen: list[int] = []
    assert read(spark, here) == disaster.acknowledged[ORDERS] == read(spark, disaster.home.url)
    write(spark, disaster, here, 20_000)  # to the home, by the index
    disaster.arrived()
    follow(spark, here, tmp_path / "checkpoint", seen)
    assert sorted(seen) == sorted(disaster.acknowledged[ORDERS])
    came = set(disaster.acknowledged[ORDERS])

    disaster.cut()
    write(spark, disaster, disaster.home.url, 30_000)  # acknowledged, and not copied
    lost = disaster.acknowledged[ORDERS] - came
    disaster.home.kill()
    _, url = promoted(disaster)
    assert read(spark, url) == came
    write(spark, disaster, here, 40_000)  # by the index, as before
    wait_until(lambda: disaster.ids(here, ORDERS) >= set(range(40_000, 40_020)), "the region goes on with the new home")
    follow(spark, here, tmp_path / "checkpoint", seen)
    follow(spark, url, tmp_path / "checkpoint", seen)
    assert sorted(seen) == sorted(disaster.acknowledged[ORDERS] - lost), "each row once, and none twice"

    old = disaster.serve(stores.blob, stores.consensus)
    write(spark, disaster, old.url, 50_000)  # goes on to the new home, as the old one's index says
    ended = ("--blob", stores.blob, "--consensus", stores.consensus, "--of", stores.copy)
    code, _, said = disaster.command("region", "salvage", *ended, "--to", str(tmp_path / "salvaged"))
    assert code == 0, said
    assert disaster.in_files(tmp_path / "salvaged")[ORDERS] == lost, "the old home has taken no row since"
    with persist.connect(url) as client:
        client.shard(ORDERS).insert([{"id": one, "v": "again"} for one in sorted(lost)])
    assert read(spark, url) == disaster.acknowledged[ORDERS]
