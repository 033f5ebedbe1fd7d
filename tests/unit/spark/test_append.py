"""`appendLower` and `appendUpper`: replicated jobs write identical definite data, cut into tasks as each likes."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persist
from persist.core.errors import InvalidUsage, PersistError, UpperMismatch
from persist.parts import DIFF
from tests.support.examples import examples
from tests.support.server import url_of
from tests.support.without_jvm import write, writer

SCHEMA = pa.schema([("id", pa.string()), ("t", pa.int64()), ("change", pa.int32())])
OPTIONS = {"key": "id", "timeColumn": "t", "diffColumn": "change"}
END = 6
# One row each time, which the next time takes away, and two rows that stay: one is there twice.
UPDATES = [
    update
    for t in range(END)
    for update in [("now", t, 1), ("now", t + 1, -1), (f"a{t % 3}", t, 1), (f"b{t}", t, 2)]
    if update[1] < END
]
Interval = tuple[int, int]


def tables(interval: Interval, tasks: int, seed: int = 0) -> list[pa.Table]:
    """The definite data of an interval, dealt out to so many tasks."""
    updates = [update for update in UPDATES if interval[0] <= update[1] < interval[1]]
    random.Random(seed).shuffle(updates)
    return [
        pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
        for columns in ([[update[n] for update in updates[task::tasks]] for n in range(3)] for task in range(tasks))
    ]


def append(url: str, interval: Interval, tasks: int = 1, seed: int = 0) -> None:
    given = {"appendLower": interval[0], "appendUpper": interval[1]}
    write(url, "r", *tables(interval, tasks, seed), **OPTIONS, **given)


@contextmanager
def opened(url: str) -> Iterator[persist.Shard]:
    with persist.connect(url) as client:
        yield client.shard("r")


def contents(shard: persist.Shard, as_of: int) -> Counter[str]:
    rows = shard.snapshot(as_of).to_arrow().to_pylist()
    return Counter({row["id"]: row[DIFF] for row in rows})


def definite(as_of: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    for name, at, change in UPDATES:
        counted[name] += change if at <= as_of else 0
    return +counted


def upper(url: str) -> persist.Antichain:
    with opened(url) as shard:
        return shard.upper()


def check(shard: persist.Shard) -> None:
    until = shard.upper().element
    assert until is not None
    for as_of in range(until):
        assert contents(shard, as_of) == definite(as_of)


@pytest.mark.parametrize("kind", ["directory", "server"])
def test_equal_data_cut_into_other_tasks_counts_once(kind: str, tmp_path: Path) -> None:
    with url_of(kind, tmp_path) as url:
        append(url, (0, 4), tasks=1)
        append(url, (0, 4), tasks=3)
        append(url, (2, 5), tasks=2)  # the shard has its beginning
        append(url, (0, END), tasks=4)
        assert upper(url) == persist.Antichain(END)
        with opened(url) as shard:
            check(shard)


@examples(1)
@given(
    st.lists(
        st.tuples(st.integers(0, END), st.integers(0, 4), st.integers(1, 3), st.sampled_from([1, 1, 0, 2])), max_size=6
    )
)
def test_replicas_that_die_anywhere_leave_the_contents_of_one(steps: list[tuple[int, int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        url = f"persist://{place}"
        append(url, (0, 1))
        with opened(url) as shard:
            for number, (back, length, tasks, commits) in enumerate(steps):
                lower = max((shard.upper().element or 0) - back, 0)
                interval = lower, min(lower + length, END)
                job = writer(url, "r", SCHEMA, **OPTIONS, appendLower=interval[0], appendUpper=interval[1])
                messages = [job.write(iter(table.to_batches())) for table in tables(interval, tasks, number)]
                for _ in range(commits):  # 0: it dies before; 2: Spark tries the commit again
                    job.commit(messages)
            check(shard)


def test_a_job_without_rows_says_that_its_times_are_complete(url: str) -> None:
    append(url, (0, 2))
    write(url, "r", SCHEMA.empty_table(), **OPTIONS, appendLower=1, appendUpper=5)
    assert upper(url) == persist.Antichain(5)
    write(url, "r", SCHEMA.empty_table(), **OPTIONS, appendLower=0, appendUpper="closed")
    assert upper(url).is_empty


def test_rows_without_times_have_the_first_one(url: str) -> None:
    table = pa.table({"id": ["a"]})
    for _ in range(2):
        write(url, "r", table, key="id", appendLower=0, appendUpper=3)
    assert upper(url) == persist.Antichain(3)
    with opened(url) as shard:
        assert contents(shard, 0) == contents(shard, 2) == Counter({"a": 1})


def refused(url: str, kind: type[PersistError], interval: Interval, tables: list[pa.Table]) -> PersistError:
    """The error of such an append, which changes nothing."""
    before = upper(url)
    with pytest.raises(kind) as caught:
        write(url, "r", *tables, **OPTIONS, appendLower=interval[0], appendUpper=interval[1])
    assert type(caught.value) is kind
    assert upper(url) == before
    return caught.value


def test_a_gap_is_refused(url: str) -> None:
    append(url, (0, 2))
    error = refused(url, UpperMismatch, (3, 5), tables((3, 5), 1))
    assert error.details == {"expected": [3], "actual": [2]}


def test_a_shard_that_is_not_there_begins_at_0(url: str) -> None:
    with pytest.raises(UpperMismatch) as caught:
        append(url, (3, 5))
    assert caught.value.details == {"expected": [3], "actual": [0]}
    with persist.connect(url) as client:
        assert client.shards() == []


def test_other_data_over_times_that_the_service_took_is_refused(url: str) -> None:
    """What an insert wrote there is not what a replica would have written: its rows must not be dropped in silence."""
    append(url, (0, 2))
    with opened(url) as shard:
        shard.insert([{"id": "other"}])
    for interval in ((0, 3), (2, 3), (1, 6)):
        error = refused(url, UpperMismatch, interval, tables(interval, 2))
        assert error.details == {"expected": [interval[0]], "actual": [3]}
    with opened(url) as shard:
        assert contents(shard, 2) == definite(1) + Counter({"other": 1})
    append(url, (3, 3))


def test_a_row_outside_of_the_interval_is_refused(url: str) -> None:
    append(url, (0, 2))
    for interval in ((2, 4), (3, 5)):
        refused(url, InvalidUsage, interval, [*tables((2, 5), 1)])


LOWER = {"appendLower": "0"}
BOTH = {**LOWER, "appendUpper": "3"}


@pytest.mark.parametrize(("options", "overwrite", "named"), [
    (LOWER, False, "appendUpper"),
    ({"appendUpper": "3"}, False, "appendLower"),
    (BOTH, True, "overwrite"),
    *(
        ({**BOTH, name: value}, False, name)
        for name, value in {
            "expectedUpper": "0",
            "readTime": "0",
            "envelope": "upsert",
            "restoreTo": "0",
            "rewrites": "true",
            "newUpper": "3",
        }.items()
    ),
    ({**BOTH, "txnAppId": "nightly", "txnVersion": "1"}, False, "txnAppId"),
    ({"appendLower": "3", "appendUpper": "1"}, False, "backwards"),
])  # fmt: skip
def test_what_means_nothing_beside_it_is_refused(
    tmp_path: Path, options: dict[str, str], overwrite: bool, named: str
) -> None:
    url = f"persist://{tmp_path}"
    append(url, (0, 1))
    with pytest.raises(InvalidUsage, match=named):
        write(url, "r", pa.table({"id": ["a"]}), overwrite=overwrite, **options)
    assert upper(url) == persist.Antichain(1)
