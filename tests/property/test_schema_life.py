"""Whatever columns are added, renamed, moved, widened, dropped: every time reads as a naive model of it says.

The real stack over memory stores: new writers and old ones, parts that were staged before a change and are committed
after it, retractions, compaction, new processes. The model keeps rows as dictionaries by columns that never change.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactor.engine import EngineSettings
from persist.client.shard import Shard
from persist.core import merge_plan
from persist.core.batch import Run
from persist.core.merge_plan import MergePolicy
from persist.core.state import Policy
from persist.parts import ShardSchema, at_time
from persist.parts import codec as codec_module
from persist.parts import part_files as files_module
from persist.parts import run_merge as resort_module
from persist.parts.consolidate import sort_groups
from persist.parts.schema_changes import AddColumn, DropColumn, MoveColumn, RelaxColumn, RenameColumn, WidenColumn
from tests.support.examples import examples
from tests.support.maintained import NAME, WORKER, World

TINY = replace(
    WORKER,
    policy=MergePolicy(fan_in=2, batches_soft=3),
    engine=EngineSettings(memory_bytes=20_000, part_bytes_target=1_000),
)
STRUCT = pa.struct([("a", pa.int8())])
LADDERS: dict[str, list[pa.DataType]] = {
    "integer": [pa.int8(), pa.int16(), pa.int64()],
    "unsigned": [pa.uint8(), pa.uint64()],
    "float": [pa.float32(), pa.float64()],
    "decimal": [pa.decimal128(3, 1), pa.decimal128(9, 3), pa.decimal256(50, 5)],
    "date": [pa.date32(), pa.timestamp("ms")],
    "text": [pa.string()],
    "struct": [STRUCT, pa.struct([("z", pa.string()), ("a", pa.int16())])],
    "list": [pa.list_(STRUCT), pa.list_(pa.struct([("a", pa.int8()), ("b", pa.int8())]))],
}
VALUES: dict[str, list[Any]] = {
    "integer": [-1, 0, 1],
    "unsigned": [0, 7],
    "float": [-0.0, 0.0, 1.5],
    "decimal": [Decimal("-1.5"), Decimal("0.5")],
    "date": [dt.date(1969, 12, 31), dt.date(2024, 2, 29)],
    "text": ["", "a"],
    "struct": [{"a": 1}, {"a": None}],
    "list": [[], [{"a": 1}]],
}


@dataclass(frozen=True)
class Column:
    """A column of the model; `number` is its own for ever."""

    number: int
    name: str
    kind: str
    rung: int
    nullable: bool
    default: Any

    @property
    def type(self) -> pa.DataType:
        return LADDERS[self.kind][self.rung]


@dataclass(frozen=True)
class Row:
    values: dict[int, Any]
    time: int
    diff: int


class Life:
    """A shard, and the model of it."""

    def __init__(self, data: st.DataObject, inline: bool) -> None:
        self.data = data
        self.world = World(
            policy=Policy(
                inline_part_bytes_max=64 * 1024 if inline else 0, inline_shard_bytes_max=4_000, rollup_every=8,
                inline_batches=16,
            )
        )  # fmt: skip
        self.columns = [Column(1, "k", "text", 0, True, None), Column(2, "v", "integer", 2, True, None)]
        self.next = 3
        self.rows: list[Row] = []
        self.writers: list[tuple[Shard, list[Column]]] = []
        self.staged: list[tuple[tuple[Run, ...], list[Row]]] = []
        self.keep_writer()

    @property
    def upper(self) -> int:
        found = self.world.state().upper.element
        assert found is not None
        return found

    def pick(self, some: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(list(some)))

    # --- writing

    def keep_writer(self) -> None:
        """A handle that knows the columns as they are now, for ever."""
        fresh = self.world.client.shard(NAME)
        self.writers.append((fresh, list(self.columns)))

    def some_rows(self, columns: Sequence[Column], count: int) -> list[dict[str, Any]]:
        rows = []
        for _ in range(count):
            row: dict[str, Any] = {"__diff": self.pick([1, 1, 2, -1])}
            for column in columns:
                choices = [*VALUES[column.kind], *([None] if column.nullable else [])]
                if column.number > 2 and (column.nullable or column.default is not None):
                    choices.append(...)
                value = self.pick(choices)
                if value is not ...:
                    row[column.name] = value
            rows.append(row)
        return rows

    def modelled(self, rows: Sequence[dict[str, Any]], columns: Sequence[Column], time: int) -> list[Row]:
        return [
            Row(
                {one.number: row.get(one.name, one.default) for one in columns},
                time,
                row["__diff"],
            )
            for row in rows
        ]

    def write(self) -> None:
        shard, columns = self.pick(self.writers)
        rows = self.some_rows(columns, self.data.draw(st.integers(1, 6)))
        time = self.upper
        shard.insert(rows)
        self.rows += self.modelled(rows, columns, time)

    def stage(self) -> None:
        shard, columns = self.pick(self.writers)
        rows = self.some_rows(columns, self.data.draw(st.integers(1, 8)))
        with closing(shard.open_writer()) as writer:
            runs = tuple(writer.stage_for_one_commit(rows, None, by_rows=False))
        self.staged.append((runs, self.modelled(rows, columns, 0)))

    def commit(self) -> None:
        if not self.staged:
            return
        runs, rows = self.staged.pop()
        time = self.upper
        with closing(self.world.shard.open_writer()) as writer:
            writer.commit_insert(runs)
        if runs:
            self.rows += [replace(row, time=time) for row in rows]

    # --- changing

    def add(self) -> None:
        kind = self.pick(VALUES)
        default = self.pick([None, *VALUES[kind]])
        nullable = default is None or self.data.draw(st.booleans())
        after = self.pick([None, *(one.name for one in self.columns)])
        name = self.pick(
            [*(n for n in ("a", "b", "c") if n not in {one.name for one in self.columns}), f"n{self.next}"]
        )
        column = Column(self.next, name, kind, 0, nullable, default)
        self.world.shard.alter(AddColumn(name, column.type, nullable, default, after))
        at = len(self.columns) if after is None else 1 + [one.name for one in self.columns].index(after)
        self.columns.insert(at, column)
        self.next += 1

    def rename(self) -> None:
        column = self.pick(self.columns)
        free = [n for n in ("a", "b", "c", "k", "v") if n not in {one.name for one in self.columns}]
        to = self.pick([*free, f"r{self.next}x{len(self.world.state().schemas)}"])
        self.world.shard.alter(RenameColumn(column.name, to))
        self.columns[self.columns.index(column)] = replace(column, name=to)

    def drop(self) -> None:
        values = [one for one in self.columns if one.number != 1]
        if values:
            column = self.pick(values)
            self.world.shard.alter(DropColumn(column.name))
            self.columns.remove(column)

    def move(self) -> None:
        column = self.pick(self.columns)
        others = [one for one in self.columns if one is not column]
        after = self.pick([None, *others])
        self.world.shard.alter(MoveColumn(column.name, None if after is None else after.name))
        at = 0 if after is None else others.index(after) + 1
        self.columns = [*others[:at], column, *others[at:]]

    def widen(self) -> None:
        wider = [one for one in self.columns if one.rung + 1 < len(LADDERS[one.kind])]
        if wider:
            column = self.pick(wider)
            fresh = replace(column, rung=column.rung + 1)
            self.world.shard.alter(WidenColumn(column.name, fresh.type))
            self.columns[self.columns.index(column)] = fresh

    def relax(self) -> None:
        column = self.pick(self.columns)
        self.world.shard.alter(RelaxColumn(column.name))
        self.columns[self.columns.index(column)] = replace(column, nullable=True)

    def merge(self) -> None:
        with patch.object(merge_plan, "INLINE_FLUSH_BYTES", 2_000):
            self.world.worker(settings=TINY).run(NAME, idle=self.data.draw(st.booleans()))

    def reopen(self) -> None:
        self.world.user = self.world.process()

    # --- looking

    def expected(self, as_of: int) -> Counter[str]:
        total: Counter[str] = Counter()
        for row in self.rows:
            if row.time <= as_of:
                values = [told(row.values.get(one.number, one.default), one.type) for one in self.columns]
                total[repr(values)] += row.diff
        return Counter({row: count for row, count in total.items() if count})

    def check(self) -> None:
        names = [one.name for one in self.columns]
        fresh = self.world.client.shard(NAME)
        assert fresh.schema.arrow.names == names
        assert [field.type for field in fresh.schema.arrow] == [one.type for one in self.columns]
        for as_of in range(self.upper):
            found = fresh.snapshot(as_of, num_splits=2).to_arrow()
            assert_tidy(found, fresh.schema)
            total = counted(found, self.columns)
            assert total == self.expected(as_of), f"as of {as_of}"
            for column in self.columns[:3]:
                narrow = fresh.snapshot(as_of, columns=[column.name]).to_arrow()
                assert sum(narrow.column("__diff").to_pylist()) == sum(total.values())
        if self.upper:
            heard = heard_of(fresh, self.columns, self.upper)
            assert _sum(heard, self.expected(0)) == self.expected(self.upper - 1)


def assert_tidy(found: pa.Table, schema: ShardSchema) -> None:
    """Each row comes once, in the order of the schema, and none comes no times."""
    table = at_time(found, 0).cast(pa.schema([field.with_nullable(True) for field in schema.updates_schema]))
    order, firsts = sort_groups(table, schema)
    assert order is None
    assert firsts.all()
    assert 0 not in found.column("__diff").to_pylist()


def heard_of(shard: Shard, columns: Sequence[Column], upper: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for event in shard.listen(as_of=0, until=upper):
        if event.updates is not None:
            for row, diff in counted(event.updates, columns).items():
                total[row] += diff
    return total


def _sum(one: Counter[str], other: Counter[str]) -> Counter[str]:
    total = Counter(one)
    for row, count in other.items():
        total[row] += count
    return Counter({row: count for row, count in total.items() if count})


def counted(table: pa.Table, columns: Sequence[Column]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in table.to_pylist():
        total[repr([told(row[one.name], one.type) for one in columns])] += row["__diff"]
    return total


def told(value: Any, kind: pa.DataType) -> Any:
    """A value as a column of this type shows it, by its meaning."""
    if isinstance(value, Decimal):
        return value.normalize()
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime) and pa.types.is_timestamp(kind):
        return dt.datetime(value.year, value.month, value.day)  # noqa: DTZ001 - it has no zone
    if isinstance(value, dict):
        return {field.name: value.get(field.name) for field in kind}
    if isinstance(value, list):
        return [told(one, kind.value_type) for one in value]
    return value


STEPS = ("write", "write", "write", "stage", "commit", "keep_writer", "add", "add", "rename", "drop", "drop", "move",
         "widen", "widen", "relax", "merge", "merge", "reopen")  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a few rows meet every path."""
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(resort_module, "BATCH_ROWS_MIN", 1)
    monkeypatch.setattr(resort_module, "SORTED_PIECE_BYTES", 1)


@examples(0.7)
@given(st.data(), st.booleans())
def test_every_time_reads_as_the_model_says_whatever_becomes_of_the_columns(data: st.DataObject, inline: bool) -> None:
    life = Life(data, inline)
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=4, max_size=16)):
        getattr(life, step)()
    life.check()
    life.merge()
    life.world.worker(settings=TINY).run(NAME, idle=True)
    life.check()
