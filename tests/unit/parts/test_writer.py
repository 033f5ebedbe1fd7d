"""Staging: any input becomes parts, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persist.core.batch import Part
from persist.core.errors import Corruption, InvalidUsage
from persist.parts import codec, consolidate, plan_splits, read_ahead, writer
from persist.parts.prefetch import prefetch_each
from tests.support.waiting import WAIT_S
from tests.unit.parts.strategies import KEYED, Shard, joined


def rows(count: int, first: int = 0) -> pa.Table:
    keys = [f"key-{number:08d}" for number in range(first, first + count)]
    return pa.table({"k": keys, "n": pa.nulls(count, pa.int32()), "v": pa.nulls(count, pa.list_(pa.int8()))})


def content(shard: Shard, runs: Any) -> pa.Table:
    return joined(shard.reader().read_range(runs, since=0), KEYED.updates_schema)


@pytest.mark.parametrize("form", [
    lambda t: t,
    lambda t: t.combine_chunks().to_batches()[0],
    lambda t: pa.RecordBatchReader.from_batches(t.schema, t.to_batches(max_chunksize=7)),
    lambda t: iter(t.to_batches(max_chunksize=7)),
], ids=["table", "batch", "reader", "iterator"])  # fmt: skip
@pytest.mark.parametrize("inline", [0, 65536])
def test_every_form_of_updates_is_staged(form: Any, inline: int) -> None:
    shard = Shard()
    runs = shard.stage(form(rows(20)), inline_bytes_max=inline, default_time=4)
    assert content(shard, runs).equals(consolidate([KEYED.conform(rows(20), 4)], KEYED))


@pytest.mark.parametrize("inline", [0, 65536])
@pytest.mark.parametrize("diffs", [None, pa.array([2, 1, -1, 1], pa.int8())], ids=["without diffs", "with diffs"])
def test_rows_that_get_lost_while_they_are_encoded_are_not_staged(
    inline: int, diffs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, given = Shard(), rows(4) if diffs is None else rows(4).append_column("__diff", diffs)
    (run,) = shard.stage(given, inline_bytes_max=inline)
    assert run.parts[0].diff_sum == (4 if diffs is None else 3)
    encoded, sorted_rows = writer.encode_inline, writer.consolidate
    monkeypatch.setattr(writer, "encode_inline", lambda table, *others: encoded(table.slice(1), *others))
    monkeypatch.setattr(writer, "consolidate", lambda tables, schema: sorted_rows(tables, schema).slice(1))
    with pytest.raises(Corruption) as caught:
        shard.stage(given, inline_bytes_max=inline)
    assert caught.value.details["given"] > caught.value.details["encoded"]


def test_small_updates_touch_no_blob() -> None:
    shard = Shard()
    part = shard.part(rows(10), inline_bytes_max=65536)
    assert part.is_inline
    assert list(shard.blob.list("")) == []


def test_nothing_stages_nothing() -> None:
    shard = Shard()
    assert shard.stage(rows(0)) == ()
    cancelling = pa.concat_tables([rows(1), rows(1)]).append_column("__diff", pa.array([1, -1]))
    assert shard.stage(cancelling) == ()
    assert list(shard.blob.list("")) == []


def test_a_large_input_becomes_parts_as_it_is_read() -> None:
    shard, seen, read = Shard(), [], []

    def batches() -> Any:
        for number in range(40):
            read.append(number)
            yield rows(100, number * 100).combine_chunks().to_batches()[0]

    def on_part(part: Part) -> None:
        seen.append((part.id, len(read)))

    runs = shard.stage(batches(), part_bytes_target=20_000, on_part=on_part)
    assert len(seen) > 5
    assert seen[0][1] < 10, "the first part is durable long before the input ends"
    assert len(runs) == 1, "parts whose keys ascend are one run"
    assert [part.id for part in runs[0].parts] == [part_id for part_id, _ in seen]
    assert content(shard, runs)["k"].to_pylist() == rows(4000)["k"].to_pylist()


def test_parts_that_overlap_are_runs_of_their_own() -> None:
    shard = Shard()
    runs = shard.stage(iter([rows(100), rows(100)]), part_bytes_target=4000)
    assert len(runs) > 1
    assert content(shard, runs)["__diff"].to_pylist() == [2] * 100


def test_what_is_not_arrow_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="not int"):
        Shard().stage(iter([1]))


def test_splits_are_balanced_where_parts_overlap() -> None:
    shard = Shard()
    chance = np.random.default_rng(3)
    runs = []
    for _ in range(8):
        table = rows(40_000)
        runs += shard.stage(table.take(pa.array(np.sort(chance.choice(40_000, 10_000, replace=False)))))
    reader = shard.reader()
    sizes = [
        sum(len(piece) for piece in reader.read_range(runs, as_of=0, key_range=key_range))
        for key_range in plan_splits(runs, 7, KEYED, reader)
    ]
    assert max(sizes) < 2 * min(sizes)


def test_splits_begin_where_row_groups_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 5_000)
    shard = Shard()
    table = rows(40_000)
    runs = [run for start in range(0, 40_000, 10_000) for run in shard.stage(table.slice(start, 10_000))]
    reader = shard.reader()
    splits = plan_splits(runs, 4, KEYED, reader)
    assert [one.lower for one in splits[1:]] == sorted(part.key_lower for run in runs for part in run.parts)[1:]
    firsts = {group.key_lower for run in runs for part in run.parts for group in reader.row_groups(part)}
    assert {one.lower for one in plan_splits(runs, 8, KEYED, reader)[1:]} < firsts
    finer = {one.lower for one in plan_splits(runs, 16, KEYED, reader)[1:]}  # every other one lies within a row group
    assert (len(finer & firsts), len(finer)) == (7, 15)


@pytest.mark.parametrize("count", [0, 100_001])
def test_the_number_of_splits_is_bounded(count: int) -> None:
    with pytest.raises(InvalidUsage, match="num_splits"):
        plan_splits([], count, KEYED, Shard().reader())


def test_working_ahead_keeps_order_and_errors() -> None:
    def items() -> Any:
        yield from range(5)
        raise InvalidUsage("the end")

    found = read_ahead(items())
    assert [next(found) for _ in range(5)] == list(range(5))
    with pytest.raises(InvalidUsage, match="the end"):
        next(found)


def test_sources_side_by_side_keep_their_order_and_errors() -> None:
    begun: list[int] = []

    def items(number: int) -> Iterator[tuple[int, int]]:
        begun.append(number)
        yield from ((number, item) for item in range(5))
        if number == 7:
            raise ValueError("the eighth")

    found = prefetch_each((items(number) for number in range(5)), 3)
    assert list(found) == [(number, item) for number in range(5) for item in range(5)]
    found = prefetch_each((items(number) for number in range(6, 9)), 2)
    assert [next(found) for _ in range(10)][-1] == (7, 4)
    with pytest.raises(ValueError, match="the eighth"):
        next(found)
    assert list(prefetch_each([], 3)) == []
    begun.clear()
    found = prefetch_each((items(number) for number in range(100)), 3)
    assert next(found) == (0, 0)
    found.close()
    assert max(begun) < 3  # and all their threads have ended
    assert not any(thread.name.startswith("persist-ahead") for thread in threading.enumerate())


def test_working_ahead_stops_when_nobody_listens() -> None:
    made = []

    def items() -> Any:
        for number in range(1000):
            made.append(number)
            yield number

    taken = read_ahead(items())
    assert next(taken) == 0
    taken.close()  # type: ignore[attr-defined]
    assert len(made) <= 4


def test_a_forgotten_iterator_does_not_keep_the_process() -> None:
    program = (
        "import itertools; from persist.parts import read_ahead; "
        "kept = read_ahead(itertools.count()); print(next(kept), next(kept))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["0", "1"]
