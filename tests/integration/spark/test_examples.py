"""The example pipelines do what they say."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples import batch_etl, bindings, change_capture, routed, running_balances, streaming, wal_table
from tests.support.patience import patiently

pytestmark = pytest.mark.spark

KILLS = 1  # bench/spark.py does it twenty times


@pytest.mark.smoke
@pytest.mark.proof
def test_batch_etl(spark: Any, client: Any, url: str) -> None:
    total = sum(n % 7 for n in range(1000))
    expected = [(day, 1000, total) for day in range(3)]
    assert batch_etl.run(spark, url) == expected
    assert batch_etl.run(spark, url) == expected  # every load of a day is recognised
    assert client.shard("readings").snapshot().to_arrow().num_rows == 3000


@pytest.mark.proof
def test_change_capture(spark: Any, url: str) -> None:
    people, told = change_capture.run(spark, url)
    assert people == [("ann", "Narvik"), ("bob", "Bodo"), ("dan", "Oslo")]
    assert told == [
        ("ann", "Narvik", "insert", 2),
        ("ann", "Oslo", "delete", 2),
        ("bob", "Bergen", "delete", 1),
        ("bob", "Bodo", "insert", 1),
        ("dan", "Oslo", "insert", 2),
        ("eve", "Troms", "delete", 1),
    ]


@pytest.mark.smoke
@pytest.mark.proof
def test_streaming(spark: Any, client: Any, url: str, tmp_path: Path) -> None:
    for _ in range(2):
        streaming.feed(client, 3)
        patiently(lambda: streaming.run(spark, url, str(tmp_path / "checkpoints")))
        check(client)


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_running_balances(spark: Any, client: Any, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State over corrections, through a restart: what the entries come to."""
    monkeypatch.setitem(spark.sparkContext.environment, "PYTHONPATH", sysconfig.get_path("purelib"))  # with pandas
    for _ in range(2):
        running_balances.feed(client)
        patiently(lambda: running_balances.run(spark, url, str(tmp_path / "checkpoints")))
        expected: dict[str, tuple[int, int]] = {}
        for row in client.shard("entries").snapshot().to_arrow(expand=True).to_pylist():
            entries, balance = expected.get(row["account"], (0, 0))
            expected[row["account"]] = (entries + 1, balance + row["amount"])
        found = client.shard("balances").snapshot().to_arrow(expand=True).to_pylist()
        assert {row["account"]: (row["entries"], row["balance"]) for row in found} == expected


def check(client: Any) -> None:
    """The copy and the totals are those of the orders."""
    orders = client.shard("orders").snapshot().to_arrow(expand=True).to_pylist()
    copied = client.shard("copied").snapshot().to_arrow(expand=True).to_pylist()
    assert Counter(tuple(row.values()) for row in copied) == Counter(tuple(row.values()) for row in orders)
    totals: Counter[str] = Counter()
    for row in orders:
        totals[row["customer"]] += row["amount"]
    found = client.shard("totals").snapshot().to_arrow(expand=True).to_pylist()
    assert {row["customer"]: row["total"] for row in found} == totals


@pytest.mark.proof
def test_drivers_killed_at_random_lose_nothing_and_double_nothing(client: Any, url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.streaming", url, str(tmp_path / "checkpoints"), "--no-feed"]
    rng = random.Random(3)
    for _ in range(KILLS):
        streaming.feed(client, 6)
        commits = tmp_path / "checkpoints" / "copy" / "commits"
        before = len(list(commits.glob("*"))) if commits.exists() else 0
        child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        while child.poll() is None and (not commits.exists() or len(list(commits.glob("*"))) == before):
            time.sleep(0.05)
        time.sleep(rng.random())
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def to_the_end() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    patiently(to_the_end)
    check(client)


def words(files: int) -> list[tuple[str, int, str]]:
    """The lines of so many files."""
    count = files * bindings.LINES
    return sorted((f"p{name}", at, f"word {name}.{at}") for name in range(bindings.PARTITIONS) for at in range(count))


@pytest.mark.proof
def test_rival_queries_ingest_each_line_once_at_one_time(spark: Any, url: str, tmp_path: Path) -> None:
    files = str(tmp_path / "files")
    for number, name in enumerate("aba", 1):
        bindings.feed(files, number)
        patiently(lambda name=name: bindings.ingest(spark, url, files, str(tmp_path / name)))  # type: ignore[misc]
        assert [line[:3] for line in bindings.read_lines(url)] == words(number)
    before = bindings.read_lines(url)
    patiently(lambda: bindings.ingest(spark, url, files, str(tmp_path / "without what it knew")))
    assert bindings.read_lines(url) == before
    assert {line[3] for line in before} == {0, 1, 2}


@pytest.mark.proof
def test_rival_queries_killed_at_random_ingest_each_line_once(url: str, tmp_path: Path) -> None:
    found = bindings.run(url, str(tmp_path / "files"), kills=1)
    assert [line[:3] for line in found] == words(3)


@pytest.mark.proof
def test_replicas_that_are_killed_apply_the_log(spark: Any, url: str) -> None:
    days = [wal_table.STEPS - 1, 2 * wal_table.STEPS - 1]
    expected = [(customer, (customer + 1) * day, day) for day in days for customer in range(wal_table.CUSTOMERS)]
    assert patiently(lambda: wal_table.run(spark, url)) == expected


@pytest.mark.proof
def test_routed_writers_that_are_killed_append_once_and_in_order(spark: Any, url: str) -> None:
    found = patiently(lambda: routed.run(spark, url))
    for user in range(routed.USERS):
        for writer in range(routed.WRITERS):
            mine = [(visit, epoch) for who, by, visit, epoch in found if (who, by) == (f"user {user}", writer)]
            assert mine == [(visit, visit // routed.APPENDS) for visit in range(2 * routed.APPENDS)]
