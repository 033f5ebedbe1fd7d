"""A job that replaces rows holds nothing of its shard any more once it has ended, however it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import persist
from persist.client.shard import Shard
from persist.commit.location import open_location
from persist.core import commands as c
from persist.core.errors import Conflict, InvalidUsage
from persist.spark import executors
from persist.spark.batch_io import BatchWriter
from persist.spark.options import Options, Target, WriteOptions
from persist.spark.stream import StreamWriter
from persist.spark.write_job import Job, StagedTask
from rpc.auth import mint
from rpc.settings import ServerSettings
from tests.support.late import LateTransport
from tests.support.served import Served

ROWS = pa.record_batch({"k": ["a"], "n": [5]})
SCHEMA = StructType([StructField("k", StringType(), False), StructField("n", LongType())])
WAYS = pytest.mark.parametrize("overwrite", [False, True], ids=["upsert", "overwrite"])


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target.of(Options({"url": f"persist://{tmp_path}", "path": "orders"}))


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with persist.connect(f"persist://{tmp_path}") as client:
        shard = client.create_shard("orders", pa.schema([("k", pa.string()), ("n", pa.int64())]), ["k"])
        shard.insert([{"k": "a", "n": 1}])
        yield shard


def write_options(overwrite: bool) -> WriteOptions:
    return WriteOptions.of(Options({} if overwrite else {"envelope": "upsert"}))


def opened(target: Target, overwrite: bool) -> Job:
    return Job.open(target, write_options(overwrite), SCHEMA, overwrite)


def committer(target: Target, overwrite: bool) -> StreamWriter:
    """Spark makes one to plan a micro-batch, and another one to end it."""
    return StreamWriter(target, write_options(overwrite), SCHEMA, overwrite)


def planned(target: Target, overwrite: bool, query: str | None = "q") -> StagedTask:
    return opened(target, overwrite).stage([ROWS], query)


@WAYS
def test_micro_batches_leave_no_hold_behind(target: Target, shard: Shard, overwrite: bool) -> None:
    """Spark's second writer took a hold as well, and each micro-batch left one of 15 minutes."""
    for number in (0, 1, 1):  # the last was committed before
        committer(target, overwrite).commit([planned(target, overwrite), None], number)
    assert shard.upper().element == (3 if overwrite else 2)  # the second upsert changes nothing
    shard.drop()


@WAYS
def test_a_job_that_an_erasure_overtook_writes_no_erased_row_once_more(
    target: Target, shard: Shard, overwrite: bool
) -> None:
    """Not even together with what takes it away again: the receipt says that the row is in no byte."""
    staged = planned(target, overwrite)
    told = shard.erase(keys=["a"])
    with pytest.raises(Conflict, match="were erased since this job started, so nothing was changed"):
        committer(target, overwrite).commit([staged, None], 0)
    assert shard.upper().element == told.at + 1
    committer(target, overwrite).commit([planned(target, overwrite), None], 0)
    assert shard.snapshot().to_arrow()["n"].to_pylist() == [5]


@WAYS
def test_a_job_that_may_only_write_goes_on_where_others_wrote_meanwhile(
    tmp_path: Path, shard: Shard, overwrite: bool
) -> None:
    """It asked for the erasures of the shard, which needs another scope."""
    token, digest = mint("job")
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"tokens": [{"id": "job", "sha256": digest, "scopes": ["write"]}]}))
    with Served(open_location(f"persist://{tmp_path}"), ServerSettings(tokens_file=str(file))) as served:
        target = Target.of(Options({"url": served.url, "path": "orders", "token": token}))
        staged = planned(target, overwrite)
        shard.insert([{"k": "b", "n": 2}])
        committer(target, overwrite).commit([staged, None], 0)
    assert sorted(shard.snapshot().to_arrow()["n"].to_pylist()) == ([5] if overwrite else [2, 5])


@WAYS
def test_a_micro_batch_that_is_given_up_leaves_no_hold_behind(target: Target, shard: Shard, overwrite: bool) -> None:
    committer(target, overwrite).abort([planned(target, overwrite), None], 0)
    assert shard.upper().element == 1
    shard.drop()


@WAYS
def test_a_micro_batch_of_no_query_leaves_no_hold_behind(target: Target, shard: Shard, overwrite: bool) -> None:
    with pytest.raises(InvalidUsage, match="has a streaming query id"):
        committer(target, overwrite).commit([planned(target, overwrite, None)], 0)
    shard.drop()


@WAYS
def test_a_job_that_is_given_up_leaves_no_hold_behind(target: Target, shard: Shard, overwrite: bool) -> None:
    BatchWriter(target, write_options(overwrite), SCHEMA, overwrite).abort([None])
    shard.drop()


@WAYS
def test_a_job_that_another_driver_has_committed_leaves_no_hold_behind(
    target: Target, shard: Shard, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own try goes unanswered, and the next is refused: that is told as Indeterminate, which skipped the end."""
    late = LateTransport(executors.transport(target.connection))
    monkeypatch.setattr(executors, "transport", lambda connection: late)
    job, twin = opened(target, overwrite), opened(target, overwrite)
    messages, twins = [job.stage([ROWS])], [twin.stage([ROWS])]
    late.hold(c.Rewrite, lambda: twin.publish(twins, ("app", 1)))
    assert not job.publish(messages, ("app", 1))
    late.deliver()
    assert shard.upper().element == 2
    shard.drop()


@pytest.mark.parametrize(
    "then", [lambda s: s.insert([{"k": "b", "n": 2}]), lambda s: s.erase(keys=["a"])], ids=["insert", "erasure"]
)
@WAYS
def test_a_commit_that_is_repeated_is_told_that_it_has_landed(
    target: Target, shard: Shard, overwrite: bool, then: Callable[[Shard], object]
) -> None:
    """An upsert was told Expired, as its hold was given back; after an erasure both were told Conflict."""
    job = BatchWriter(target, write_options(overwrite), SCHEMA, overwrite)
    messages = [job.write(iter([ROWS]))]
    job.commit(messages)
    then(shard)
    before = shard.upper(), shard.snapshot().to_arrow().to_pylist()
    job.commit(messages)
    assert (shard.upper(), shard.snapshot().to_arrow().to_pylist()) == before
