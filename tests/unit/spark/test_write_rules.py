"""What surprised a PySpark engineer about writes: jobs that are run again, and updates that were lost in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import persist
from persist.core import commands as c
from persist.core.errors import AttributeMismatch, InvalidUsage, UnknownShard, UpperMismatch
from persist.core.frontier import Antichain
from persist.spark import executors
from persist.spark.options import Options, Target, WriteOptions
from persist.spark.write_job import Job
from tests.support.late import LateTransport
from tests.support.without_jvm import read, write, writer

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
NIGHTLY = "nightly"


@pytest.fixture
def shard(url: str) -> Any:
    """One row, at time 0."""
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        shard.insert([{"k": "a", "n": 0}])
        yield shard


def rows(*given: tuple[str, int]) -> pa.Table:
    return pa.table({"k": [k for k, _ in given], "n": [n for _, n in given]}, schema=SCHEMA)


def contents(shard: Any) -> dict[str, int]:
    table = shard.snapshot().to_arrow(expand=True)
    assert table.num_rows == len(set(table["k"].to_pylist()))
    return dict(zip(table["k"].to_pylist(), table["n"].to_pylist(), strict=True))


def upper(shard: Any) -> int:
    return shard.upper().element or 0


# --- transactions

WAYS = pytest.mark.parametrize(
    ("options", "overwrite"),
    [({}, False), ({"envelope": "upsert"}, False), ({}, True)],
    ids=["append", "upsert", "overwrite"],
)


@WAYS
def test_a_transaction_is_looked_at_before_the_expected_upper(
    shard: Any, url: str, options: dict[str, str], overwrite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that had committed was told UpperMismatch when it was run again, decided anew, and wrote twice."""
    given = {**options, "expectedUpper": 1, "txnAppId": NIGHTLY, "txnVersion": 1}
    write(url, "orders", rows(("b", 1)), overwrite=overwrite, **given)
    assert upper(shard) == 2
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "persist.spark"):
        write(url, "orders", rows(("b", 1)), overwrite=overwrite, **given)
    assert [record.getMessage() for record in caplog.records] == [
        "persist: a write to shard 'orders' was skipped: transaction 1 of 'nightly', or a later one, was committed "
        "before"
    ]
    assert upper(shard) == 2
    assert contents(shard)["b"] == 1
    with pytest.raises(UpperMismatch, match=r"upper \[2\], not the expected \[1\]"):
        write(url, "orders", rows(("b", 2)), overwrite=overwrite, **{**given, "txnVersion": 2})
    assert upper(shard) == 2


@WAYS
def test_a_transaction_that_another_driver_commits_first_is_skipped_with_an_expected_upper_too(
    shard: Any, url: str, options: dict[str, str], overwrite: bool
) -> None:
    given = {**options, "expectedUpper": 1, "txnAppId": NIGHTLY, "txnVersion": 1}
    one, two = (writer(url, "orders", SCHEMA, overwrite=overwrite, **given) for _ in range(2))
    messages = [one.write(iter(rows(("b", 1)).to_batches()))]
    others = [two.write(iter(rows(("b", 1)).to_batches()))]
    two.commit(others)
    one.commit(messages)
    assert upper(shard) == 2
    assert contents(shard)["b"] == 1
    shard.drop()  # nothing is held any more


def test_a_transaction_that_was_committed_is_skipped_whatever_the_shard_is_like_by_now(shard: Any, url: str) -> None:
    given = {"txnAppId": NIGHTLY, "txnVersion": 1}
    write(url, "orders", rows(("b", 1)), **given)
    shard.evolve_schema(pa.schema([*SCHEMA, ("more", pa.int64())]))
    write(url, "orders", rows(("b", 1)), **given)
    assert contents(shard) == {"a": 0, "b": 1}


@pytest.mark.parametrize("options", [{}, {"envelope": "upsert"}], ids=["append", "upsert"])
def test_a_job_without_rows_records_its_transaction(shard: Any, url: str, options: dict[str, str]) -> None:
    """A late run of an earlier version slipped in after it."""
    for version, given in ((1, rows(("b", 1))), (5, rows()), (3, rows(("b", 3)))):
        write(url, "orders", given, txnAppId=NIGHTLY, txnVersion=version, **options)
    assert contents(shard) == {"a": 0, "b": 1}
    assert upper(shard) == 2
    newest = shard.history(1)[0]
    assert (newest.operation, newest.rows) == ("update_attributes", 0)
    write(url, "orders", rows(("c", 6)), txnAppId=NIGHTLY, txnVersion=6, **options)
    assert contents(shard) == {"a": 0, "b": 1, "c": 6}


def test_the_history_tells_of_which_transaction_a_commit_was(shard: Any, url: str) -> None:
    write(url, "orders", rows(("b", 1)), txnAppId=NIGHTLY, txnVersion=7, writeId="w1", info='{"ticket": 1}')
    assert shard.history(1)[0].info == {"spark": {"write": "w1", "txnAppId": NIGHTLY, "txnVersion": "7"}, "ticket": 1}


# --- conditional writes


def change(at: int, url: str) -> pa.Table:
    """The rows as of a time, with 1 added: what a job makes of what it has read."""
    return rows(*((row["k"], row["n"] + 1) for row in read(url, "orders", asOf=at)))


@pytest.mark.parametrize("overwrite", [False, True], ids=["upsert", "overwrite"])
@pytest.mark.parametrize("name", ["readTime", "expectedUpper"])
def test_of_two_jobs_that_read_add_1_and_write_one_wins(shard: Any, url: str, name: str, overwrite: bool) -> None:
    """Both of them succeeded, and one was lost."""
    options = {name: 0 if name == "readTime" else 1} | ({} if overwrite else {"envelope": "upsert"})
    one, two = change(0, url), change(0, url)
    write(url, "orders", one, overwrite=overwrite, **options)
    with pytest.raises(UpperMismatch, match=r"upper \[2\], not the expected \[1\]") as raised:
        write(url, "orders", two, overwrite=overwrite, **options)
    assert raised.value.details == {"expected": [1], "actual": [2]}
    assert contents(shard) == {"a": 1}
    again = {name: 1 if name == "readTime" else 2} | ({} if overwrite else {"envelope": "upsert"})
    write(url, "orders", change(1, url), overwrite=overwrite, **again)
    assert contents(shard) == {"a": 2}


@pytest.mark.parametrize("overwrite", [False, True], ids=["upsert", "overwrite"])
def test_what_comes_between_the_plan_and_the_commit_is_not_replaced_unread(
    shard: Any, url: str, overwrite: bool
) -> None:
    options = {"readTime": 0} | ({} if overwrite else {"envelope": "upsert"})
    job = writer(url, "orders", SCHEMA, overwrite=overwrite, **options)
    messages = [job.write(iter(rows(("a", 5)).to_batches()))]
    shard.insert([{"k": "z", "n": 9}])
    with pytest.raises(UpperMismatch, match=r"upper \[2\], not the expected \[1\]"):
        job.commit(messages)
    job.abort(messages)
    assert contents(shard) == {"a": 0, "z": 9}
    assert upper(shard) == 2
    shard.drop()  # the job holds nothing


def test_an_append_at_a_read_time_comes_right_after_it(shard: Any, url: str) -> None:
    write(url, "orders", rows(("b", 1)), readTime=0)
    with pytest.raises(UpperMismatch):
        write(url, "orders", rows(("c", 1)), readTime=0)
    assert contents(shard) == {"a": 0, "b": 1}


def test_an_upsert_of_a_new_shard_may_expect_that_there_is_none(url: str, shard: Any) -> None:
    write(url, "fresh", rows(("a", 1)), key="k", envelope="upsert", expectedUpper=0)
    assert len(read(url, "fresh")) == 1
    with pytest.raises(UpperMismatch, match="'other' does not exist"):
        write(url, "other", rows(("a", 1)), key="k", envelope="upsert", readTime=3)


def test_a_conditional_upsert_whose_answer_is_lost_is_told_its_outcome(
    shard: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = writer(url, "orders", SCHEMA, envelope="upsert", readTime=0)
    late = LateTransport(executors.transport(job._job.target.connection))
    monkeypatch.setattr(executors, "transport", lambda connection: late)
    messages = [job.write(iter(rows(("a", 5)).to_batches()))]
    late.hold(c.Rewrite)
    job.commit(messages)
    late.deliver()
    assert (contents(shard), upper(shard)) == ({"a": 5}, 2)


BAD = [
    ({"readTime": "x"}, False, "option 'readTime' is 'x'; it must be a whole number"),
    ({"readTime": -2}, False, "option 'readTime' is -2; it must be in"),
    ({"readTime": 2**63 - 2}, False, "no write can follow it"),
    ({"readTime": 0, "expectedUpper": 1}, False, "'expectedUpper' and 'readTime' are exclusive; give one"),
    ({"readTime": 0, "envelope": "upsert", "newUpper": 9}, False, "envelope=upsert sets times and diffs itself"),
    ({"envelope": "upsert", "diffColumn": "n"}, False, "envelope=upsert sets times and diffs itself"),
    ({"readTime": 0, "newUpper": 9}, True, "mode 'overwrite' replaces everything at the next time"),
    ({"readTime": 0, "newUpper": "closed"}, True, "mode 'overwrite' replaces everything at the next time"),
    ({"readTime": 0, "newUpper": 2, "timeColumn": "n"}, True, "mode 'overwrite' replaces everything"),
    ({"readTime": 0, "envelope": "upsert"}, True, "mode 'overwrite' replaces everything"),
    ({"writeId": ""}, False, "option 'writeId' has 0 characters"),
    ({"writeId": "x" * 65}, False, "option 'writeId' has 65 characters"),
    ({"txnAppId": "a"}, False, "'txnAppId' and 'txnVersion' must be given together"),
]


@pytest.mark.parametrize(("options", "overwrite", "sentence"), BAD, ids=[f"{o} {w}" for o, w, _ in BAD])
def test_a_bad_condition_of_a_write_is_one_sentence_and_writes_nothing(
    shard: Any, url: str, options: dict[str, Any], overwrite: bool, sentence: str
) -> None:
    with pytest.raises(InvalidUsage, match=sentence):
        write(url, "orders", rows(("a", 5)), overwrite=overwrite, **options)
    assert (contents(shard), upper(shard)) == ({"a": 0}, 1)
    shard.drop()


# --- a numbered piece of work that another driver has committed is skipped, also where a try of ours is u

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


# --- what spark finds under a name whose shard was dropped: nothing, so that a write makes the shard anew

NEW_SCHEMA = StructType([StructField("id", LongType(), False), StructField("s", StringType())])


@pytest.mark.parametrize(("more", "overwrite"), [
    ({}, False),
    ({}, True),
    ({"txnAppId": "q", "txnVersion": "1"}, False),
    ({"txnAppId": "q", "txnVersion": "1"}, True),
    ({"envelope": "upsert"}, False),
], ids=str)  # fmt: skip
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
    job = Job.open(Target.of(options), WriteOptions.of(options), NEW_SCHEMA, overwrite)
    assert job.schema.arrow.names == ["id", "s"]
    with persist.connect(url) as client:
        assert client.shard("a").upper() == Antichain(0)
