"""A numbered piece of work that another driver has committed is skipped, also where a try of ours is under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

import persist
from persist.core import commands as c
from persist.core.errors import AttributeMismatch
from persist.spark import executors
from persist.spark.options import Options, Target, WriteOptions
from persist.spark.write_job import Job
from tests.support.late import LateTransport

ROWS = pa.RecordBatch.from_pydict({"id": pa.array([7], pa.int64())})
PROGRESS = ("app", 1)


def test_a_refusal_after_a_try_that_was_not_answered_means_that_the_work_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number never becomes less, so what is under way cannot land: the job need not fail."""
    options = Options({"url": f"persist://{tmp_path}", "path": "orders", "key": "id"})
    late = LateTransport(executors.transport(Target.of(options).connection))
    monkeypatch.setattr(executors, "transport", lambda connection: late)

    def staged() -> tuple[Job, list[Any]]:
        job = Job.open(Target.of(options), WriteOptions.of(options), StructType([StructField("id", LongType())]), False)
        return job, [job.stage([ROWS])]

    (job, messages), (twin, others) = staged(), staged()
    late.hold(c.Insert, lambda: twin.publish(others, PROGRESS))
    assert not job.publish(messages, PROGRESS)
    assert isinstance(late.deliver(), AttributeMismatch)
    with persist.connect(f"persist://{tmp_path}") as client:
        assert client.shard("orders").snapshot().to_arrow()["id"].to_pylist() == [7]
