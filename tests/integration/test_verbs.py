"""Verbs that read before they write, as users of Python see them: what they do, and what is refused."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pandas as pd
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist
from persist import InvalidUsage, Shard, TokenReused, UpperMismatch
from persist.client.client import AT_HOME, FarShard
from persist.client.edit_verbs import EditMethods
from persist.parts import codec, part_files
from persist.parts.part_files import PartFiles
from tests.support.clocks import Machine

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("state", pa.string()), ("n", pa.int64()), ("at", pa.date32())]
)
ROWS = [{"id": n, "state": "new", "n": n * 10} for n in range(1, 5)]


@pytest.fixture
def shard(machine: Machine) -> Shard:
    found = machine.client.create_shard("orders", SCHEMA, ["id"])
    found.insert(ROWS)
    return found


def rows(shard: Shard, as_of: int | None = None) -> list[tuple[Any, ...]]:
    found = shard.snapshot(as_of).to_arrow(expand=True)
    return [(row["id"], row["state"], row["n"]) for row in found.to_pylist()]


def test_an_upsert_puts_rows_by_their_keys(shard: Shard) -> None:
    done = shard.upsert([{"id": 2, "state": "paid", "n": 20}, {"id": 9, "state": "new", "n": 90}])
    assert (done.verb, done.as_of, done.added, done.removed, done.retries) == ("upsert", 0, 2, 1, 0)
    assert rows(shard) == [(1, "new", 10), (2, "paid", 20), (3, "new", 30), (4, "new", 40), (9, "new", 90)]
    assert rows(shard, 0) == [(n, "new", n * 10) for n in range(1, 5)], "history is as it was"


def test_a_row_that_is_there_already_is_not_written(shard: Shard) -> None:
    done = shard.upsert(ROWS)
    assert (done.changed, done.lower) == (False, done.upper)
    assert shard.upper().element == 1


def test_a_generator_of_dicts_names_columns_that_the_handle_does_not_know(machine: Machine, shard: Shard) -> None:
    machine.client.shard("orders").add_column("note", pa.string())
    shard.insert({"id": number, "note": "late"} for number in (7, 8))
    assert [row["note"] for row in shard.snapshot(start_key=7).to_arrow().to_pylist()] == ["late", "late"]


def test_zeros_of_either_sign_are_two_keys_and_one_number(machine: Machine) -> None:
    shard = machine.client.create_shard(
        "zeros", pa.schema([("k", pa.float64()), ("n", pa.int64())]), ["k"], unique=True
    )
    for key, number in ((0.0, 1), (-0.0, 2), (math.nan, 3), (-math.nan, 4)):
        shard.upsert([{"k": key, "n": number}])
    assert shard.snapshot().to_arrow()["n"].to_pylist() == [2, 1, 4]
    assert [row["n"] for row in shard.get(-0.0)] == [2]
    assert shard.count("k = 0") == 2


def test_an_empty_upsert_does_nothing(shard: Shard) -> None:
    for given in ([], (), iter([])):
        assert not shard.upsert(given, delete_column="gone").changed
        assert not shard.upsert(given).changed
    with pytest.raises(InvalidUsage):
        shard.upsert([], delete_column="state")


def test_an_overwrite_reads_nothing_and_is_one_time(shard: Shard) -> None:
    done = shard.overwrite([{"id": 3, "state": "new", "n": 30}, {"id": 5, "state": "x", "n": 1}])
    assert (done.added, done.removed) == (2, None)
    assert rows(shard) == [(3, "new", 30), (5, "x", 1)]
    changes = [event.updates.to_pylist() for event in shard.listen(0, until=2)]
    assert sorted((row["id"], row["__time"], row["__diff"]) for event in changes for row in event) == [
        (1, 1, -1), (2, 1, -1), (4, 1, -1), (5, 1, 1),
    ]  # fmt: skip
    shard.restore(0)
    assert rows(shard) == [(n, "new", n * 10) for n in range(1, 5)]


def overwritten(shard: Shard, times: int) -> list[int | None]:
    """How many rows each overwrite took away; None: it read nothing."""
    return [shard.overwrite([{"id": n, "state": "x", "n": n}]).removed for n in range(times)]


@pytest.mark.proof
def test_six_weeks_of_hourly_overwrites_read_nothing(machine: Machine) -> None:
    shard = machine.client.create_shard("hourly", SCHEMA, ["id"])
    assert set(overwritten(shard, 985)[1:]) == {None}
    assert [shard.snapshot(time).to_arrow()["id"].to_pylist() for time in (0, 500, 984)] == [[0], [500], [984]]
    assert overwritten(shard, 2) == [1, 1]


def test_a_merge_says_what_becomes_of_which_rows(shard: Shard) -> None:
    source = [
        {"id": 1, "state": "same", "n": 5},
        {"id": 2, "state": "gone", "n": 0},
        {"id": 9, "state": "came", "n": 9},
        {"id": 8, "state": "no", "n": -1},
    ]
    done = (
        shard.merge(source)
        .when_matched_delete("source.n = 0")
        .when_matched_update({"n": persist.source("n") + persist.target("n")})
        .when_not_matched_insert(condition="source.n > 0")
        .when_not_matched_by_source_update({"state": "old"}, condition="target.id = 3")
        .when_not_matched_by_source_delete("target.id = 4")
        .execute()
    )
    assert rows(shard) == [(1, "new", 15), (3, "old", 30), (9, "came", 9)]
    assert (done.verb, done.added, done.removed) == ("merge_into", 3, 4)


NUMBERS = [None, float("nan"), float("-inf"), -1.0, -0.0, 0.0, 2.0, float("inf")]
COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq, "<>": operator.ne,
}  # fmt: skip


def rank(number: float) -> tuple[bool, float]:
    """NaN is greater than every number, and equals itself."""
    return math.isnan(number), 0.0 if math.isnan(number) else number


@pytest.mark.parametrize("op", [*COMPARED, "<=>"])
def test_a_condition_of_a_merge_compares_columns_as_spark_does(machine: Machine, op: str) -> None:
    pairs = list(product(NUMBERS, NUMBERS))
    shard = machine.client.create_shard("pairs", pa.schema([("id", pa.int64()), ("n", pa.float64())]), ["id"])
    shard.insert([{"id": number, "n": ours} for number, (_, ours) in enumerate(pairs)])
    source = pa.table({"id": range(len(pairs)), "n": pa.array([theirs for theirs, _ in pairs], pa.float32())})
    shard.merge(source).when_matched_delete(f"source.n {op} target.n").execute()
    if op == "<=>":
        meant = [one == other or (None not in (one, other) and rank(one) == rank(other)) for one, other in pairs]
    else:
        meant = [None not in (one, other) and COMPARED[op](rank(one), rank(other)) for one, other in pairs]
    assert shard.count() == len(pairs) - sum(meant)


CONDITIONS = {
    "source.n > target.n AND NOT source.id <> target.id": True,
    "source.`state` >= target.state": True,
    "source.extra <=> target.state": False,
    "target.n < source.n": True,
    "source.date = 'd'": True,
    "source.n > target.state": None,
    "source.n > source": None,
    "source.n.x > 1": None,
    "n > target.n": None,
    "source.n > ": None,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_of_a_merge_is_exact_or_refused(shard: Shard, condition: str) -> None:
    merge = shard.merge([{"id": 1, "n": 99, "state": "z", "extra": None, "date": "d"}])
    merge = merge.when_matched_update({"n": persist.source("n")}, condition)
    if CONDITIONS[condition] is None:
        with pytest.raises(InvalidUsage):
            merge.execute()
    else:
        assert merge.execute().added == CONDITIONS[condition]


def test_a_merge_by_other_columns_and_with_columns_of_its_own(shard: Shard) -> None:
    source = pa.table({"state": ["new"], "bonus": [7]})
    shard.merge(source, on=["state"]).when_matched_update(
        {"n": persist.target("n") + persist.source("bonus")}, persist.target("id") > 3
    ).execute()
    assert rows(shard)[2:] == [(3, "new", 30), (4, "new", 47)]


SOURCES = {
    "uuid": pa.array([b"x" * 16] * 2, pa.binary(16)).cast(pa.uuid()),
    "bool8": pa.array([1, None], pa.int8()).cast(pa.bool8()),
    "list view": pa.array([[1], None], pa.list_view(pa.int64())),
    "run ends": pa.RunEndEncodedArray.from_arrays([2], ["a"]),
    "dictionary of views": pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array(["a"], pa.string_view())),
    "view": pa.array(["a", None], pa.string_view()),
    "views in lists": pa.array([["a"], None], pa.list_(pa.string_view())),
    "binary view": pa.array([b"a", None], pa.binary_view()),
    "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
}


@pytest.mark.parametrize("extra", SOURCES)
def test_a_merge_takes_a_source_with_columns_of_any_type(shard: Shard, extra: str) -> None:
    table = pa.table({"id": [1, 9], "n": [5, 6], "extra": SOURCES[extra]})
    merge = shard.merge(table).when_matched_update({"n": persist.source("n")})
    merge.when_not_matched_insert({"id": persist.source("id"), "n": persist.source("n")}).execute()
    assert {key: n for key, _, n in rows(shard)} == {1: 5, 2: 20, 3: 30, 4: 40, 9: 6}


def test_a_merge_refuses_a_source_that_it_cannot_read(shard: Shard) -> None:
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    for table in (pa.table({"id": [1], "extra": union}), pa.table([[1], [2], [3]], names=["id", "n", "n"])):
        with pytest.raises(InvalidUsage):
            shard.merge(table).when_matched_update().execute()


def test_frames_that_arrow_cannot_read_are_refused(shard: Shard) -> None:
    frames = [pd.DataFrame({"id": [2**70]}), pd.DataFrame([[1, 2, 3]], columns=["id", "n", "n"])]
    for frame in [*frames, pd.DataFrame({"id": [1, "a"]})]:
        for write in (shard.insert, shard.upsert, lambda rows: shard.merge(rows).when_matched_delete().execute()):
            with pytest.raises(InvalidUsage):
                write(frame)


@pytest.mark.parametrize(
    "frame",
    [
        polars.DataFrame({"id": [1]}).lazy(),
        polars.DataFrame({"id": [1]}).lazy().select("nope"),
        polars.DataFrame({"id": [1], "state": polars.Series([object()], dtype=polars.Object)}),
        pd.DataFrame(index=[1, 2]),
        [{"id": 1, "n": 1}, {"n": 2}],
        [{}],
    ],
    ids=["lazy", "lazy and wrong", "objects", "no columns", "no key", "nothing"],
)
def test_rows_without_values_or_keys_are_refused(shard: Shard, frame: Any) -> None:
    before = rows(shard)
    for write in (shard.insert, shard.overwrite, shard.upsert):
        with warnings.catch_warnings(action="error"), pytest.raises(InvalidUsage):
            write(frame)
    assert rows(shard) == before


def test_a_stream_that_fails_is_told_in_one_line(shard: Shard) -> None:
    class Failing:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            def batches() -> Iterator[pa.RecordBatch]:
                yield pa.record_batch({"id": [9]})
                raise ValueError("boom")

            schema = pa.schema([("id", pa.int64())])
            return pa.RecordBatchReader.from_batches(schema, batches()).__arrow_c_stream__(requested_schema)

    with pytest.raises(InvalidUsage, match=r"boom$"):
        shard.insert(Failing())


def test_a_token_stands_for_the_verb_and_its_arguments(machine: Machine, shard: Shard) -> None:
    token = machine.client.new_token()
    done = shard.update({"state": "once"}, "id = 1", token=token)
    shard.update({"state": "later"}, "id = 1")
    again = shard.update({"state": "once"}, "id = 1", token=token)
    assert (again.lower, again.upper, again.added, again.removed) == (done.lower, done.upper, 1, 1)
    assert rows(shard)[0] == (1, "later", 10)
    for other in (
        lambda: shard.update({"state": "other"}, "id = 1", token=token),
        lambda: shard.update({"state": "once"}, "id = 2", token=token),
        lambda: shard.delete("id = 1", token=token),
        lambda: shard.update({"state": "once"}, "id = 1", token=token, read_time=2),
    ):
        with pytest.raises(TokenReused):
            other()


def test_a_token_remembers_that_nothing_was_to_do(machine: Machine, shard: Shard) -> None:
    token = machine.client.new_token()
    assert not shard.delete("id = 6", token=token).changed
    shard.insert([{"id": 6, "state": "later", "n": 6}])
    assert not shard.delete("id = 6", token=token).changed
    assert len(rows(shard)) == 5


def test_attributes_change_with_the_rows_or_not_at_all(shard: Shard) -> None:
    key = "ab" * 16
    update = persist.AttributeUpdate.replace_if_greater(key, 1)
    shard.delete("id = 1", attributes=update)
    with pytest.raises(persist.AttributeMismatch):
        shard.delete("id = 2", attributes=update)
    assert len(rows(shard)) == 3


def test_an_upsert_of_few_keys_reads_few_row_groups(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one part; `bench.tables` measures it."""
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 6_000)
    monkeypatch.setattr(part_files, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(part_files, "GAP_BYTES_MAX", 0)
    shard = machine.client.create_shard("wide", SCHEMA, ["id"])
    count = 60_000
    numbers = pa.array(range(count))
    nulls = pa.nulls(count, pa.date32())
    shard.insert(pa.table({"id": numbers, "state": pc.cast(numbers, pa.string()), "n": numbers, "at": nulls}))
    fetched: list[int] = []
    real = PartFiles.fetch

    def fetch(self: PartFiles, part: Any, start: int, length: int) -> bytes:
        fetched.append(length)
        return real(self, part, start, length)

    monkeypatch.setattr(PartFiles, "fetch", fetch)

    def bytes_of(verb: Callable[[], object]) -> int:
        fetched.clear()
        verb()
        return sum(fetched)

    whole = bytes_of(lambda: shard.snapshot().to_arrow())
    assert bytes_of(lambda: shard.upsert([{"id": 5, "n": 1}])) < whole / 3
    assert bytes_of(lambda: shard.upsert([{"id": 5, "n": 1}, {"id": count - 5, "n": 1}])) < whole / 2
    assert bytes_of(lambda: shard.delete(keys=[7, 8])) < whole / 3
    assert bytes_of(lambda: shard.merge([{"id": 9, "n": 1}]).when_matched_update().execute()) < whole / 3
    assert bytes_of(lambda: shard.overwrite([{"id": 1}])) == 0


# What is refused, and a few words of why.
BAD: list[tuple[Callable[[Shard], Any], str]] = [
    (lambda s: s.upsert([{"id": 1, "state": "a"}, {"id": 1, "state": "b"}]), "occurs more than once"),
    (lambda s: s.upsert([{"state": "a"}]), "column 'id' is absent"),
    (lambda s: s.upsert([{"id": 1, "nn": 1}]), "no column 'nn'"),
    (lambda s: s.upsert([{"id": 1, "__diff": 2}]), "which this write does not take"),
    (lambda s: s.upsert([{"id": 1, "n": "x"}]), "column 'n'"),
    (lambda s: s.upsert([{"id": 1}], delete_column="gone"), "column 'gone' is absent"),
    (
        lambda s: (s.insert([{"id": 1, "state": "twice"}]), s.upsert([{"id": 1, "n": 1}])),
        "some of the columns takes one",
    ),
    (lambda s: s.upsert(ROWS, read_time="now"), "read_time is 'now'"),
    (lambda s: s.delete(), "give either where or keys"),
    (lambda s: s.delete("id = 1", keys=[1]), "give either where or keys"),
    (lambda s: s.delete(keys="1"), "a non-empty list of keys"),
    (lambda s: s.delete(keys=[(1, 2)]), "a key has 2 values"),
    (lambda s: s.update({}), "map column names to values"),
    (lambda s: s.update({"nn": 1}), "no column 'nn'"),
    (lambda s: s.update({"id": None}), "'id' would be null"),
    (lambda s: s.update({"n": pc.field("nn")}), "cannot be computed"),
    (lambda s: s.update({"n": pc.field("state")}), "cast it first"),
    (lambda s: s.replace_where("n < 30", [{"id": 7, "state": "x", "n": 70}]), "do not match `where`"),
    (lambda s: s.overwrite(pa.table({"state": ["a"]})), "column 'id' is absent"),
    (lambda s: s.merge(ROWS).execute(), "a merge needs a clause"),
    (
        lambda s: s.merge([{"id": 1}], on=["state"]).when_matched_delete().execute(),
        "column 'state', by which rows match",
    ),
    (lambda s: s.merge([{"x": 1}], on=["x"]).when_matched_delete().execute(), "no column 'x'"),
    (lambda s: s.merge(ROWS).when_matched_update({"id": 1}).execute(), "is of the key"),
    (
        lambda s: s.merge([{"id": 1, "n": 1}, {"id": 1, "n": 2}]).when_matched_update().execute(),
        "two rows of the source",
    ),
    (lambda s: s.merge(ROWS).when_matched_delete(persist.source("n")).execute(), "not boolean"),
    (lambda s: s.merge(ROWS).when_matched_delete(7), "condition is 7"),
    (
        lambda s: s.merge([{"id": 9, "n": 1}]).when_not_matched_insert({"n": persist.source("n")}).execute(),
        "a new row needs a value in it",
    ),
]


@pytest.mark.parametrize(("call", "why"), BAD)
def test_what_is_refused_writes_nothing(machine: Machine, shard: Shard, call: Callable[[Shard], Any], why: str) -> None:
    with pytest.raises(InvalidUsage, match=why):
        call(shard)
    assert {(r[0], r[2]) for r in rows(shard) if r[1] == "new"} == {(n, n * 10) for n in range(1, 5)}
    assert shard.upper().element in (1, 2)
    assert not machine.location.machine("orders").refresh().leased_readers, "no hold is left"


def test_a_closed_shard_is_refused(shard: Shard) -> None:
    shard.advance_upper(None)
    for call in (
        lambda: shard.upsert(ROWS),
        lambda: shard.delete("id = 1"),
        lambda: shard.overwrite(ROWS),
        lambda: shard.merge(ROWS).when_matched_delete().execute(),
    ):
        with pytest.raises(UpperMismatch, match="is closed"):
            call()


def test_a_far_shard_has_every_verb_at_its_home() -> None:
    verbs = {name for name in vars(EditMethods) if not name.startswith("_")}
    assert verbs <= set(AT_HOME)
    assert all(getattr(FarShard, name) is not getattr(Shard, name) for name in verbs)
