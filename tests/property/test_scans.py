"""DuckDB and Polars over a scan answer as over a plain table of the rows that a model has, whatever the shard went

through: histories, merges, forgotten times, rows taken away, and files that DuckDB reads by itself.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import polars
import pyarrow as pa
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import persist
from compactor.worker import Worker
from persist.client.scan import Scan
from persist.client.shard import Shard
from persist.commit.location import LocationSettings
from persist.core.errors import NotReadable
from persist.core.state import Policy
from persist.parts import codec

ZONE = ZoneInfo("America/New_York")
NEW_YORK = pa.timestamp("us", "America/New_York")
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "id": (pa.int64(), [0, 1, 2, 3, 2**62]),
    "part": (pa.string(), [None, "", "a", "ab", "b"]),
    "f": (pa.float64(), [None, math.nan, -math.inf, -1.5, -0.0, 0.0, 1.5]),
    "n": (pa.int32(), [None, -7, 0, 7]),
    "d": (pa.decimal128(10, 2), [None, Decimal("-1.50"), Decimal("0.00"), Decimal("1.50")]),
    "moment": (
        NEW_YORK,
        [None, *(dt.datetime(2026, 11, 1, hour, 30, tzinfo=dt.UTC).astimezone(ZONE) for hour in (4, 5, 6))],
    ),
    "day": (pa.date32(), [None, dt.date(1969, 12, 31), dt.date(2026, 11, 1)]),
    "st": (
        pa.struct([("x", pa.float64()), ("y", pa.string())]),
        [None, {"x": math.nan, "y": "a"}, {"x": -0.0, "y": None}, {"x": 1.5, "y": "b"}],
    ),
    "l": (pa.list_(pa.int64()), [None, [], [1, None]]),
}
KINDS = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])
FILES_BY_THEMSELVES = pa.schema([field for field in KINDS if field.name != "st"])  # DuckDB loses NaN within structs
KEY = ["part", "id"]
TRIES_MAX = 10
SQL = {
    "id": ["0", "2", "4611686018427387904"],
    "part": ["''", "'ab'", "'zz'"],
    "f": ["0.0", "-0.0", "1.5", "'nan'::double", "'-inf'::double"],
    "n": ["0", "7"],
    "d": ["-1.5", "0", "1.50"],
    "moment": ["timestamptz '2026-11-01 01:30:00-04'", "timestamptz '2026-11-01 01:30:00-05'"],
    "day": ["date '2026-11-01'"],
    "st.x": ["0.0", "1.5", "'nan'::double"],
    "st.y": ["'a'"],
}
IN_BLOBS = Policy(inline_part_bytes_max=0)
IN_BOTH = Policy(inline_part_bytes_max=2_000)


@st.composite
def leaf(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from(list(SQL)))
    one, other = (draw(st.sampled_from(SQL[column])) for _ in range(2))
    forms = [f"{column} {op} {one}" for op in ("=", "<>", "<", "<=", ">", ">=", "is not distinct from")]
    forms += [
        f"{column} in ({one}, {other})",
        f"{column} not in ({one}, {other})",
        f"{column} between {one} and {other}",
    ]
    forms += [f"{column} is null", f"{column} is not null"]
    return draw(st.sampled_from(forms))


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner)
    return joined | inner.map("(not {})".format)


WHERE = st.recursive(leaf(), combined, max_leaves=4)
COLUMNS = st.lists(st.sampled_from(KINDS.names), min_size=1, max_size=4, unique=True)


class Story:
    """A shard with a random history, and what is there as of each time."""

    def __init__(self, shard: Shard, seed: int) -> None:
        self.shard, self.rng, self.kinds = shard, random.Random(seed), shard.schema.arrow
        self.there: list[dict[str, Any]] = []
        self.at: list[pa.Table] = []

    def go_on(self, times: int = 1) -> None:
        """One time after the other, now and then merged, or merged with its history forgotten."""
        for _ in range(times):
            fresh = [self._row() for _ in range(self.rng.randrange(1, 25))]
            self.rng.shuffle(self.there)
            gone = [self.there.pop() for _ in range(min(len(self.there), self.rng.randrange(8)))]
            self.shard.insert([*fresh, *({**row, "__diff": -1} for row in gone)])
            self.there += fresh
            self.at.append(pa.Table.from_pylist(self.there, self.kinds))
            if self.rng.random() < 0.2:
                self.merge()
            if self.rng.random() < 0.1:
                self.shard.downgrade_since(len(self.at) - 1)
                self.merge()
                self.shard.vacuum()

    def merge(self) -> None:
        """All that is there into one run."""
        Worker(self.shard._transport.inner.location).run(self.shard.name, idle=True)  # type: ignore[attr-defined]

    def _row(self) -> dict[str, Any]:
        return {name: self.rng.choice(VALUES[name][1]) for name in self.kinds.names}

    def time(self, number: int) -> int:
        """One of those that can be read."""
        least = self.shard.since().element
        assert least is not None
        return least + number % (len(self.at) - least)

    def scan(self, number: int) -> tuple[int, Scan]:
        """A scan as of one of those times: maintenance may forget it in the moment before it is held."""
        for _ in range(TRIES_MAX):
            as_of = self.time(number)
            with suppress(NotReadable):
                return as_of, self.shard.scan(as_of)
        raise AssertionError(f"no time could be held in {TRIES_MAX} tries")


@pytest.fixture(scope="module", params=["blobs and inline", "one run"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = LocationSettings(policy=IN_BOTH if request.param == "blobs and inline" else IN_BLOBS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codec, "ROW_GROUP_ROWS", 8)
        url = f"persist://{tmp_path_factory.mktemp('scans')}/data"
        with persist.connect(url, location=settings) as client:
            kinds = FILES_BY_THEMSELVES if request.param == "one run" else KINDS
            found = Story(client.create_shard("orders", kinds, KEY, history="none"), len(request.param))
            found.go_on(6)
            if request.param == "one run":
                found.shard.downgrade_since(5)
                found.merge()
            yield found


def rows_of(table: pa.Table) -> Counter[str]:
    """Rows that can be compared: NaN is itself, and 0.0 is not -0.0."""
    return Counter(map(repr, table.to_pylist()))


@pytest.fixture(scope="module")
def connection() -> Iterator[Any]:
    with duckdb.connect() as found:
        yield found


def answer(connection: Any, source: Any, columns: list[str], where: str) -> Counter[str]:
    """What DuckDB says; of a plain table it makes one of its own first, so that Arrow leaves out no rows."""
    if isinstance(source, pa.Table):
        connection.register("rows", source)
        connection.execute("create or replace table plain as select * from rows")
        source = connection.table("plain")
    elif callable(source):
        source = source(connection)
    found = connection.sql(f"select {', '.join(columns)} from source where {where}")
    return rows_of(found.to_arrow_table())


@given(COLUMNS, WHERE, st.booleans(), st.integers(0, 20))
@example(["id"], "f in (0.0, 1.5)", False, 5)
@example(["id", "f"], "f > 0.0", True, 5)
@example(["l", "st"], "st.x in (0.0, 1.5) or part is null", True, 5)
def test_duckdb_answers_as_over_a_plain_table(
    story: Story, connection: Any, columns: list[str], where: str, by_itself: bool, at: int
) -> None:
    assume("st" in story.kinds.names or not ("st." in where or "st" in columns))
    as_of, opened = story.scan(at)
    with opened as scan:
        expected = answer(connection, story.at[as_of], columns, where)
        assert answer(connection, scan.duckdb if by_itself else scan, columns, where) == expected
        story.go_on(int(story.rng.random() < 0.1))
        again = answer(connection, scan.duckdb if by_itself else scan, columns, where)
        assert again == expected, "the same, however often"


def polars_leaf() -> st.SearchStrategy[Any]:
    def one(column: str, op: str, value: Any, other: Any) -> Any:
        named = polars.col(column)
        if op == "in":
            return named.is_in([value, other])
        return named.is_null() if op == "null" else getattr(named, op)(value)

    plain = {name: [value for value in values if value is not None] for name, (_, values) in VALUES.items()}
    of_column = [
        st.builds(one, st.just(name), OPS, st.sampled_from(plain[name]), st.sampled_from(plain[name]))
        for name in ("id", "part", "f", "n", "d", "moment", "day")
    ]
    return st.one_of(of_column)


OPS = st.sampled_from(["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "in", "null"])
PREDICATES = st.recursive(
    polars_leaf(),
    lambda inner: (
        st.builds(lambda a, b: a & b, inner, inner)
        | st.builds(lambda a, b: a | b, inner, inner)
        | inner.map(lambda a: ~a)
    ),
    max_leaves=4,
)


@given(COLUMNS, PREDICATES, st.integers(0, 20))
@example(["id"], polars.col("f") > 1.0, 5)
def test_polars_answers_as_over_a_plain_table(story: Story, columns: list[str], predicate: Any, at: int) -> None:
    columns = [name for name in columns if name in story.kinds.names] or ["id"]
    as_of, opened = story.scan(at)
    with opened as scan:
        frame = scan.polars().filter(predicate).select(columns)
        expected = polars.DataFrame(polars.from_arrow(story.at[as_of])).filter(predicate).select(columns)
        for _ in range(2):
            assert rows_of(frame.collect().to_arrow()) == rows_of(expected.to_arrow())
            story.go_on(int(story.rng.random() < 0.1))
