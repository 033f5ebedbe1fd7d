"""Where nothing changes nothing is committed, also where the tasks of a job write rows that cancel each other."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.core.errors import InvalidUsage
from tests.support.without_jvm import write

SCHEMA = pa.schema([("k", pa.int64()), ("n", pa.int64())])
REWRITES = {"diffColumn": "d", "readTime": "0", "rewrites": "true"}


@pytest.fixture
def shard(url: str) -> Any:
    """A thousand rows, at time 0: an upsert of one of them leaves the look at what was there to its commit."""
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        shard.insert([{"k": number, "n": number} for number in range(1_000)])
        yield shard


def upper(shard: Any) -> int:
    return shard.upper().element or 0


def rows(*given: tuple[int, int]) -> pa.Table:
    return pa.table({"k": [k for k, _ in given], "n": [n for _, n in given]}, schema=SCHEMA)


def changes(*given: tuple[int, int, int]) -> pa.Table:
    return rows(*((k, n) for k, n, _ in given)).append_column("d", pa.array([d for *_, d in given], pa.int64()))


@pytest.mark.parametrize("tasks", [
    [changes()],
    [changes((1, 1, -1), (1, 1, 1))],
    [changes((1, 1, -1)), changes((1, 1, 1))],
    [changes((1, 1, -1), (2, 2, 1)), changes((2, 2, -2), (1, 1, 1)), changes((2, 2, 1))],
], ids=["no rows", "one task", "two tasks", "three tasks"])  # fmt: skip
def test_a_rewrite_whose_rows_cancel_out_takes_no_time(shard: Any, url: str, tasks: list[pa.Table]) -> None:
    """An update that set what was there took a time, so that everybody's `read_time` was passed."""
    write(url, "orders", *tasks, **REWRITES)
    assert upper(shard) == 1
    assert shard.history(1)[0].operation == "insert"


def test_an_append_without_rows_takes_no_time(shard: Any, url: str) -> None:
    write(url, "orders", rows())
    assert upper(shard) == 1


def test_a_rewrite_of_which_rows_remain_is_one_commit(shard: Any, url: str) -> None:
    write(url, "orders", changes((1, 1, -1), (999, 999, -1)), changes((1, 1, 1), (999, 7, 1)), **REWRITES)
    assert upper(shard) == 2
    assert (shard.get(1), shard.get(999)) == ([{"k": 1, "n": 1}], [{"k": 999, "n": 7}])


def test_a_rewrite_that_changes_nothing_records_its_transaction(shard: Any, url: str) -> None:
    txn = {"txnAppId": "nightly", "txnVersion": "1"}
    write(url, "orders", changes((1, 1, -1)), changes((1, 1, 1)), **REWRITES, **txn)
    assert upper(shard) == 1
    write(url, "orders", changes((1, 1, -1)), **REWRITES, **txn)
    assert shard.get(1) == [{"k": 1, "n": 1}], "it was skipped"


def test_an_append_after_what_was_seen_takes_a_time_without_rows_too(shard: Any, url: str) -> None:
    write(url, "orders", rows(), readTime="0")
    assert upper(shard) == 2


def test_an_upsert_of_what_is_there_takes_no_time(shard: Any, url: str) -> None:
    """It took one where its keys were few among many."""
    write(url, "orders", rows((5, 5)), envelope="upsert")
    write(url, "orders", rows((5, 5), (7, 7)), rows((900, 900)), envelope="upsert", readTime="0")
    assert upper(shard) == 1
    write(url, "orders", rows((5, 5)), envelope="upsert", txnAppId="nightly", txnVersion="1")
    assert upper(shard) == 1
    write(url, "orders", rows((5, 6)), envelope="upsert", txnAppId="nightly", txnVersion="1")
    assert shard.get(5) == [{"k": 5, "n": 5}], "the transaction was recorded"
    write(url, "orders", rows((5, 6), (7, 7)), envelope="upsert")
    assert (upper(shard), shard.get(5), shard.get(7)) == (2, [{"k": 5, "n": 6}], [{"k": 7, "n": 7}])


@pytest.mark.parametrize(("options", "overwrite", "sentence"), [
    ({"rewrites": "true", "diffColumn": "d"}, False, "option 'rewrites' needs 'readTime' and 'diffColumn'"),
    ({"rewrites": "true", "readTime": "0"}, False, "option 'rewrites' needs 'readTime' and 'diffColumn'"),
    ({**REWRITES, "newUpper": "9"}, False, "option 'rewrites' needs 'readTime' and 'diffColumn'"),
    ({"rewrites": "true", "expectedUpper": "1", "restoreTo": "0"}, False, "'rewrites' does not apply to a write with"),
    (REWRITES, True, "option 'rewrites' does not apply to mode 'overwrite'"),
])  # fmt: skip
def test_a_rewrite_is_of_changes_of_what_was_read(
    shard: Any, url: str, options: dict[str, str], overwrite: bool, sentence: str
) -> None:
    with pytest.raises(InvalidUsage, match=sentence):
        write(url, "orders", changes((1, 1, -1)), overwrite=overwrite, **options)
    assert upper(shard) == 1
