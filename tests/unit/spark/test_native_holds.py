"""Spark's native read: which parts it takes as they are, and holds for as long as a plan is there."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from persist.core.batch import Run
from persist.core.errors import Expired, PersistError, Unavailable
from persist.parts import codec as codec_module
from persist.parts import part_files as files_module
from persist.parts.part_files import PartFiles
from persist.parts.read_plan import classify
from persist.spark import parquet_scan
from persist.spark import parquet_scan as choice
from persist.spark.options import Options
from persist.spark.parquet_scan import HELD_MAX_S, Holds
from tests.unit.parts.strategies import Shard
from tests.unit.parts.test_straight import SCHEMA, compacted, numbered, table_of


@dataclass
class Lease:
    """Tells what was done with it; `fails` is raised by the next renewals."""

    renewed: int = 0
    closed: bool = False
    fails: list[PersistError] = field(default_factory=list)

    def keep(self) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.renewed += 1

    def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(threading.Thread, "start", lambda _: None)  # the test looks itself
        self.holds = Holds(lambda: self.now)
        self.gone: list[bool] = []

    def kept(self, *, plans: int = 1, fails: PersistError | None = None) -> Lease:
        lease: Any = Lease(fails=[] if fails is None else [fails])
        numbers = range(len(self.gone), len(self.gone) + plans)
        self.gone += [False] * plans
        self.holds.keep(lease, 900.0, [lambda number=number: self.gone[number] for number in numbers])  # type: ignore[misc]
        return lease  # type: ignore[no-any-return]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_hold_is_renewed_until_all_its_plans_are_gone(world: World) -> None:
    lease = world.kept(plans=2)
    assert world.holds.renew_due() == 150.0, "twice in the time after which a lease is renewed"
    world.gone[0] = True
    assert world.holds.renew_due() is not None
    assert (lease.renewed, lease.closed) == (2, False)
    world.gone[1] = True
    assert world.holds.renew_due() is None
    assert (lease.renewed, lease.closed) == (2, False), "it lapses: an RDD may read on"


def test_a_hold_ends_after_a_day_whatever_the_jvm_says(world: World) -> None:
    lease = world.kept()
    world.now = HELD_MAX_S
    assert world.holds.renew_due() is None
    assert (lease.renewed, lease.closed) == (0, False)


def test_a_hold_that_cannot_be_renewed_is_tried_again_and_one_that_lapsed_is_left(world: World) -> None:
    tried, lapsed = world.kept(fails=Unavailable("no answer")), world.kept(fails=Expired("it lapsed"))
    assert world.holds.renew_due() is not None
    assert world.holds.renew_due() is not None
    assert (tried.renewed, lapsed.renewed) == (1, 0)
    world.gone[0] = True
    assert world.holds.renew_due() is None


def test_beyond_the_most_a_hold_is_left_to_lapse(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_scan, "HOLDS_MAX", 1)
    world.kept()
    assert world.holds.is_full
    assert not world.kept().closed
    world.gone[0] = True
    assert world.holds.renew_due() is None


class Session:
    """What is asked of a session."""

    _jvm = object()

    def __init__(self, master: str) -> None:
        self.sparkContext = self
        self.master = master
        self.conf: dict[str, str] = {}


@pytest.mark.parametrize(("master", "root", "is_given", "refused"), [
    ("local[2]", "file:///a", False, None),
    ("local", "s3a://bucket/a", False, None),
    ("yarn", "s3a://bucket/a", False, None),
    ("yarn", "file:///a", True, None),
    ("yarn", "file:///a", False, "is on this machine, and executors may be on others"),
    ("local[2]", "file:///a*", True, "as a pattern"),
])  # fmt: skip
def test_files_of_this_machine_are_not_for_executors_on_others(
    master: str, root: str, is_given: bool, refused: str | None
) -> None:
    why_not = choice.why_not_root(Session(master), root, is_given=is_given)
    assert why_not is None if refused is None else refused in (why_not or "")


def test_a_copy_and_a_session_without_a_jvm_are_not_read_by_spark_itself() -> None:
    none = Options({})
    assert choice.why_not_session(Session("local"), none, shows_copy=False) is None
    assert "a copy may lose files" in str(choice.why_not_session(Session("local"), none, shows_copy=True))
    assert "has no JVM" in str(choice.why_not_session(object(), none, shows_copy=False))


def test_a_session_that_reads_parquet_by_the_newer_sources_is_not_for_native_reads() -> None:
    session = Session("local")
    assert choice.why_not_sources(session) is None
    session.conf["spark.sql.sources.useV1SourceList"] = "avro,csv"
    assert "excludes parquet" in str(choice.why_not_sources(session))


# --- which parts spark's native read takes as they are

ROWS = [(float(n), "value", n % 7, 1) for n in range(100)]
GONE = [(3.0, "value", 8, -1)]


def classified(shard: Shard, runs: list[Run], as_of: int) -> tuple[int, int]:
    """How many parts are read as they are, and how many are added up."""
    straight, others = classify(runs, as_of, PartFiles(shard.blob, {1: SCHEMA}))
    return len(straight), len(others)


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
    return Shard(SCHEMA)


def test_a_merged_part_of_many_times_is_read_as_it_is(shard: Shard) -> None:
    assert classified(shard, compacted(shard, numbered(100, 7)), 9) == (1, 0)


def test_a_merged_part_with_rows_that_cancel_is_added_up_where_the_read_sees_both(shard: Shard) -> None:
    runs = compacted(shard, table_of([*ROWS, *GONE]))
    assert classified(shard, runs, 9) == (0, 1)


def test_parts_that_nothing_on_top_overlaps_are_still_read_as_they_are(shard: Shard) -> None:
    runs = compacted(shard, table_of(ROWS), target=1)
    parts = len(runs[0].parts)
    runs = [*runs, *shard.stage(table_of(GONE))]
    assert parts > 2
    assert classified(shard, runs, 9) == (parts - 1, 2)


def test_a_staged_part_of_many_times_tells_nothing_and_is_added_up(shard: Shard) -> None:
    assert classified(shard, list(shard.stage(table_of(ROWS))), 9) == (0, 1)
