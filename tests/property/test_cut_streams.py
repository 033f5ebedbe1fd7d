"""Streams whose times are cut by keys, beside a naive model: whatever is written, merged, forgotten and restarted.

Together all micro-batches are exactly the contents that the stream begins with and the changes after them, in order;
none is larger than its bound but for one key at one time; and whoever plans one again gets the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from persist.parts import codec, key_splits
from persist.spark.offsets import Admission, Offset, Position
from persist.spark.stream import StreamReader
from tests.support.examples import seeds, thinned
from tests.support.maintained import NAME, Row, World
from tests.support.rivals import caught_within
from tests.support.streamed import FEED, Change, changes_between, expected, opened

SEEDS = range(3)
PROOF_SEEDS = seeds(78)
BROKEN_SEEDS = range(60)
GROUP_ROWS = 32  # of a row group: indexes name every other row
EVENTS = 6  # that happen between micro-batches
ROWS_MAX = 150  # of a write
BOUNDS = 8  # of a micro-batch, that a write has at most


class Story:
    """One shard, one stream of it with a cursor, and what happens to both, by a seed."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.patch = patch
        patch.setattr(codec, "ROW_GROUP_ROWS", GROUP_ROWS)
        self.world = World()
        self.keys = self.random.choice((3, 40, 400))
        self.bound = self.random.choice((1, 2, 7, 30, 200))
        self.batches: list[tuple[Offset, Offset, list[Change]]] = []
        self.counts: Counter[str] = Counter()
        self.events = EVENTS
        for _ in range(self.random.randrange(1, 5)):
            self.write()
        self.as_of = self.random.choice((0, self.upper // 2))
        if self.as_of:
            self.world.shard.forget(self.as_of)
        self.reader = self.restarted()
        start = self.reader.initialOffset()
        self.as_of = start["snapshot"]
        self.at = start

    @property
    def upper(self) -> int:
        return self.world.state().upper.element or 0

    def restarted(self) -> StreamReader:
        options = {
            "cursor": "job",
            "maxRowsPerTrigger": self.bound,
            "numPartitions": self.random.choice((1, 3)),
            **FEED,
        }
        return opened(self.world, self.patch, **options)

    def write(self) -> None:
        """At one time or several, a few rows or many, some of which take away what is there."""
        first, times = self.upper, self.random.choice((1, 1, 3))
        held = list(self.world.expected(first))
        rows: list[Row] = []
        for _ in range(self.random.choice((1, 5, min(ROWS_MAX, BOUNDS * self.bound)))):
            time = first + self.random.randrange(times)
            if held and self.random.random() < 0.3:
                rows.append((*held.pop(self.random.randrange(len(held))), time, -1))
            else:
                key = f"k{self.random.randrange(self.keys):03}"
                rows.append((key, self.random.randrange(50), time, self.random.choice((1, 1, 1, 3))))
        self.world.append(rows, first + times)
        self.counts["written"] += len(rows)

    def merge(self) -> None:
        worker, collector = self.world.worker(), self.world.collector()
        while worker.run(NAME, idle=True):
            self.counts["merges"] += 1
        collector.run(NAME)

    def forget(self) -> None:
        self.world.shard.forget(self.random.randrange(self.upper))

    def restart(self) -> None:
        """The query ends without a word and starts anew; its last micro-batch may be read again."""
        self.reader = self.restarted()
        if self.batches:
            start, end, rows = self.batches[-1]
            assert Counter(changes_between(self.reader, start, end)) == Counter(rows), "as it was planned before"
            self.counts["planned again"] += 1

    def step(self) -> bool:
        """One micro-batch; False: there is nothing more."""
        start, end = self.at, self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())
        if end == start:
            return False
        self.batches.append((start, end, changes_between(self.reader, start, end)))
        if self.events and self.random.random() < 0.3:
            self.events -= 1
            self.random.choice((self.write, self.merge, self.forget, self.restart))()
        self.reader.commit(end)
        self.at = end
        self.counts["cut"] += "key" in end
        return True

    def check(self) -> None:
        for _, _, rows in self.batches:
            is_one_key = len({(key, time) for key, _, time, _ in rows}) == 1
            assert len(rows) <= self.bound or is_one_key, f"{len(rows)} rows, where {self.bound} are the most"
        found = [row for _, _, rows in self.batches for row in rows]
        assert Counter(found) == expected(self.world.rows, self.as_of, self.as_of, self.upper)
        spans = [[(time, key) for key, _, time, _ in rows] for _, _, rows in self.batches if rows]
        for before, after in pairwise(spans):
            assert max(before) < min(after), "in the order of times, and within a time of keys"
        positions = [Position.of(end) for _, end, _ in self.batches]
        assert all(one.is_before(other) for one, other in pairwise(positions))


def check(seed: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        story = Story(seed, patch)
        while story.step():
            pass
        story.check()
        return story.counts


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_shows_everything_once_and_no_micro_batch_exceeds_its_bound(seed: int) -> None:
    check(seed)


@pytest.mark.proof
def test_it_does_in_many_stories() -> None:
    found: Counter[str] = Counter()
    for seed in PROOF_SEEDS:
        found += check(seed)
    for what in ("cut", "merges", "planned again"):
        assert found[what], what


def with_cuts_one_piece_too_far(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        key_splits.Limit, "allows", lambda self, weight: self.rows is None or weight.rows <= self.rows + GROUP_ROWS
    )


def without_counting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_counted", lambda self, slab, lease, within, rows_max: within.upper)


@pytest.mark.parametrize("breaks", thinned([with_cuts_one_piece_too_far, without_counting], 2))
def test_a_build_that_cuts_wrongly_is_caught(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert caught_within(check, BROKEN_SEEDS) is not None
