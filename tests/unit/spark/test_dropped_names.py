"""What Spark finds under a name whose shard was dropped: nothing, so that a write makes the shard anew."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import persist
from persist.core.errors import UnknownShard
from persist.core.frontier import Antichain
from persist.spark import executors
from persist.spark.options import Options, Target, WriteOptions
from persist.spark.write_job import Job

SCHEMA = StructType([StructField("id", LongType(), False), StructField("s", StringType())])


@pytest.mark.parametrize(
    ("more", "overwrite"),
    [
        ({}, False),
        ({}, True),
        ({"txnAppId": "q", "txnVersion": "1"}, False),
        ({"txnAppId": "q", "txnVersion": "1"}, True),
        ({"envelope": "upsert"}, False),
    ],
    ids=str,
)
def test_a_write_to_the_name_of_a_dropped_shard_makes_it_anew(
    tmp_path: Path, more: dict[str, str], overwrite: bool
) -> None:
    """It took the dead shard for the one to write to, and failed at its commit whenever it was repeated."""
    url = f"persist://{tmp_path}"
    options = Options({"url": url, "path": "a", "key": "id", **more})
    with persist.connect(url) as client:
        old = client.create_shard("a", pa.schema([("id", pa.int64())]), ["id"])
        old.insert([{"id": 9}])
        old.drop(force=True)
    with pytest.raises(UnknownShard, match="was dropped"):
        executors.view_of(Target.of(options))
    job = Job.open(Target.of(options), WriteOptions.of(options), SCHEMA, overwrite)
    assert job.schema.arrow.names == ["id", "s"]
    with persist.connect(url) as client:
        assert client.shard("a").upper() == Antichain(0)
